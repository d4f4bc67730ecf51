"""Test egress without a sandbox: with the real guest part, link and gate, and servers in place of the internet."""

from __future__ import annotations

import contextlib
import http.server
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jupyter_agentbox.egress.gate import Gate, GateLimits
from jupyter_agentbox.guest.egress import Egress
from jupyter_agentbox.guest.loop import Link as GuestLink
from jupyter_agentbox.guest.loop import Loop
from jupyter_agentbox.sandbox.link.link import Link, LinkThread
from jupyter_agentbox.spec import Grant
from jupyter_agentbox.storage.audit.log import AuditLog
from support.waiting import wait_until

PUBLIC = "203.0.113.7"


class Guest:
    """Guest's egress in a thread."""

    def __init__(self, directory: Path) -> None:
        self.loop = Loop()
        self.link = GuestLink(self.loop, str(directory), lambda stream: stream.reset())
        free = ("127.0.0.1", 0)
        self.egress = Egress(self.loop, self.link, http=free, socks=free, dns=free)
        self.egress.start()
        self.link.dial()
        self._is_stopped = False
        self._tick()
        self._thread = threading.Thread(target=self.loop.run)
        self._thread.start()

    def _tick(self) -> None:
        if self._is_stopped:
            self.egress.close()
            self.link.hang_up()
            self.loop.is_running = False
        self.loop.later(0.02, self._tick)

    def stop(self) -> None:
        self._is_stopped = True
        self._thread.join(60)
        assert not self._thread.is_alive()


class World:
    """Fake internet: names, their addresses, the servers behind them, and a record of lookups and connections."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.servers: dict[tuple[str, int], tuple[str, int]] = {}
        self.lookups: list[str] = []
        self.dials: list[tuple[str, int]] = []
        self.resolve_hook: Callable[[str], list[str]] | None = None

    def add(self, name: str, port: int, server: tuple[str, int], address: str = PUBLIC) -> None:
        self.names[name] = [address]
        self.servers[address, port] = server

    async def resolve(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        if self.resolve_hook is not None:
            return self.resolve_hook(host)
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host]

    async def connect(self, address: str, port: int) -> Any:
        from jupyter_agentbox.egress.dial import connect_stream

        self.dials.append((address, port))
        host, real = self.servers.get((address, port), ("127.0.0.1", 1))
        return await connect_stream(host, real)


class Box:
    """Guest, link and gate connected to each other."""

    def __init__(
        self, directory: Path, grant: Grant, *, real: bool = False, limits: GateLimits | None = None, **options: Any
    ) -> None:
        self.world = World()
        self.refusals: list[tuple[str, int, str]] = []
        self.audit = AuditLog(directory / "log" / "audit.sqlite")
        if not real:
            options = {"resolve": self.world.resolve, "connect": self.world.connect, **options}
        self.gate = Gate(
            "box", grant, self.audit, on_refusal=lambda *r: self.refusals.append(r), limits=limits, **options
        )
        self.directory = directory / "link"
        self.directory.mkdir()
        self.thread = LinkThread.instance()
        self.link: Link | None = None
        self.own()
        self.guest = Guest(self.directory)
        self.wait_up()

    def on_loop(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return work()

        return self.thread.submit(run()).result(60)

    def own(self) -> None:
        """Become the owner, for the first time or again."""

        def start() -> None:
            self.link = Link(self.directory, self.gate.handle, lambda reason: None)
            self.link.listen()

        self.on_loop(start)

    def leave(self) -> None:
        assert self.link is not None
        self.on_loop(self.link.close)

    def wait_up(self) -> None:
        assert self.link is not None
        self.thread.submit(self.link.wait_connected(60)).result(60)
        until(lambda: self.guest.link._is_up)  # it has also read our hello

    def set_grant(self, grant: Grant) -> None:
        self.on_loop(lambda: setattr(self.gate, "grant", grant))

    def close(self) -> None:
        self.guest.stop()
        self.leave()
        self.thread.submit(self.gate.aclose()).result(60)
        self.audit.close()

    # -- as code inside would

    @property
    def proxy(self) -> str:
        return "http://{}:{}".format(*self.guest.egress.addresses["http"])

    @property
    def proxies(self) -> dict[str, str]:
        return {"http": self.proxy, "https": self.proxy}

    def dial(self, via: str = "http", timeout: float = 60) -> socket.socket:
        return socket.create_connection(self.guest.egress.addresses[via], timeout)

    def say(self, data: bytes, via: str = "http") -> bytes:
        """Send data, and return the complete answer."""
        with self.dial(via) as sock:
            sock.sendall(data)
            return read_all(sock)

    def connect(self, target: str) -> socket.socket:
        """Open a tunnel with CONNECT, which must succeed."""
        sock = self.dial()
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert read_head(sock).startswith(b"HTTP/1.1 200 "), target
        return sock

    def rows(self, **filters: Any) -> list[Any]:
        return self.audit.query(**filters)

    def wait_rows(self, count: int = 1, **filters: Any) -> list[Any]:
        until(lambda: len(self.rows(**filters)) >= count)
        return self.rows(**filters)


def until(condition: Callable[[], bool], timeout: float = 60) -> None:
    """Wait until the condition is true."""
    wait_until(condition, timeout, "the condition", pause=0.01)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(65536):
            data += piece
    return data


def read_head(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        piece = sock.recv(1)
        if not piece:
            break
        data += piece
    return data


def read_response(sock: socket.socket) -> tuple[int, bytes]:
    head = read_head(sock)
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    body = b""
    while len(body) < length:
        piece = sock.recv(length - len(body))
        if not piece:
            break
        body += piece
    return int(head.split(b" ")[1]), body


class Handler(http.server.BaseHTTPRequestHandler):
    """Handler that records its requests."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path, self.headers.get("Host"), dict(self.headers)))
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://other.example/")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.path == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for n in range(50):
                self.wfile.write(b"%x\r\n%s\r\n" % (1000 + n, b"x" * (1000 + n)))
            self.wfile.write(b"0\r\n\r\n")
            return
        if self.path == "/close":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"until the end")
            self.close_connection = True
            return
        body = (
            b"x" * int(self.path[6:])
            if self.path.startswith("/size/")
            else f"{self.headers['Host']}{self.path}".encode()
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.server.seen.append((self.command, self.path, self.headers.get("Host"), dict(self.headers)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            size = 0
            while length := int(self.rfile.readline(), 16):
                size += len(self.rfile.read(length))
                self.rfile.readline()
            self.rfile.readline()
        else:
            size = len(self.rfile.read(int(self.headers["Content-Length"])))
        body = str(size).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


class HttpServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str, str | None, dict[str, str]]] = []
        if context:
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class RawServer(socketserver.ThreadingTCPServer):
    """Server that calls ``serve(sock)`` for each connection."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        class RawHandler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    serve(self.request)

        super().__init__(("127.0.0.1", 0), RawHandler)


@contextlib.contextmanager
def running(server: socketserver.BaseServer) -> Iterator[tuple[str, int]]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address  # type: ignore[misc]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def make_certificate(directory: Path, *names: str) -> Path:
    """Create a self-signed certificate with openssl. Return a file with key and certificate."""
    key, certificate, both = directory / "key.pem", directory / "cert.pem", directory / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={names[0]}",
         "-addext", "subjectAltName=" + ",".join(f"DNS:{name}" for name in names)],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both
