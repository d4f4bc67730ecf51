"""Find out whether a connection to a proxy of the sandbox leads to the sandbox itself, and serve it inside if so.

Programs ask the proxy also for their own servers, at addresses such as 0.0.0.0 or under the host name, because the
forms that ``NO_PROXY`` may have differ from program to program. Such a connection is no egress: it stays inside. Every
other connection is passed on to the host's gate, with the bytes that were read.
"""

from __future__ import annotations

import socket

from .connect import Dial, own_addresses
from .loop import CHUNK, Loop
from .pump import Splice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: Maximum size in bytes of what is read here, and seconds after which a slow client is passed on to the gate.
MAX_HEAD = 64 * 1024
HEAD_TIMEOUT = 10.0

_NO_AUTH = b"\x05\x00"
_CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"
#: Header lines that concern only the connection to a proxy.
_HOP_HEADERS = (b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive")


class Own:
    """A connection that leads to the sandbox itself.

    Parameters
    ----------
    host : str
        Requested host.
    port : int
    to_server : bytes
        Bytes that are sent to the server first.
    accepted, refused : bytes
        Answers to the client, if the server accepts the connection and if nothing does.
    """

    def __init__(self, host: str, port: int, to_server: bytes, accepted: bytes, refused: bytes) -> None:
        self.host = host
        self.port = port
        self.to_server = to_server
        self.accepted = accepted
        self.refused = refused


def read_http(data: bytes) -> Own | bool | None:
    """Read the head of a request to the HTTP proxy.

    Parameters
    ----------
    data : bytes
        Bytes that the client has sent so far.

    Returns
    -------
    Own, bool or None
        False if the connection does not lead to the sandbox itself; None if more bytes are needed.
    """
    line, newline, _ = data.partition(b"\n")
    if not newline:
        return None
    words = line.removesuffix(b"\r").split(b" ")
    if len(words) != 3:
        return False
    method, target, version = words
    is_tunnel = method == b"CONNECT"
    path = b""
    if not is_tunnel:
        if target[:7].lower() != b"http://":
            return False
        authority, slash, path = target[7:].partition(b"/")
        authority, question, query = authority.partition(b"?")
        path = b"/" + path if slash and not question else b"/" + question + query + slash + path
        target = authority.rpartition(b"@")[2]
    host, port = _split(target, 0 if is_tunnel else 80)
    if not port or not own_addresses(host):
        return False
    ends = [at + len(mark) for mark in (b"\r\n\r\n", b"\n\n") if (at := data.find(mark)) >= 0]
    if not ends:
        return None
    rest = data[min(ends) :]
    sentence = f"nothing listens on {host}:{port} in this sandbox".encode()
    refused = b"HTTP/1.1 502 agentbox: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (
        sentence,
        len(sentence),
    )
    refused += b"" if method == b"HEAD" else sentence
    if is_tunnel:
        return Own(host, port, rest, _CONNECTED, refused)
    lines = [text for text in data[len(line) + 1 : min(ends)].splitlines() if text]
    if not any(text.lower().startswith(b"upgrade:") for text in lines):
        # The next request on this connection may be for another host.
        lines = [text for text in lines if text.partition(b":")[0].strip().lower() not in _HOP_HEADERS]
        lines.append(b"Connection: close")
    head = b"\r\n".join([b" ".join((method, path, version)), *lines]) + b"\r\n\r\n"
    return Own(host, port, head + rest, b"", refused)


def _split(authority: bytes, default: int) -> tuple[str, int]:
    """Return host and port of an authority; port 0 if it has none or an invalid one."""
    host, colon, port = authority.rpartition(b":")
    if not colon or authority.endswith(b"]"):
        host, port = authority, b"%d" % default
    is_port = port.isdigit() and len(port) <= 5 and int(port) < 65536
    return host.decode("latin-1"), int(port) if is_port else 0


def read_socks_greeting(data: bytes) -> int | bool | None:
    """Return the size of a SOCKS5 greeting that offers no authentication; otherwise as :func:`read_http`."""
    if data[:1] not in (b"", b"\x05"):
        return False
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    return 2 + data[1] if 0 in data[2 : 2 + data[1]] else False


def read_socks_request(data: bytes) -> Own | bool | None:
    """Read a SOCKS5 request, as :func:`read_http`."""
    if len(data) < 5:
        return None
    kind = data[3]
    start, size = {1: (4, 4), 3: (5, data[4]), 4: (4, 16)}.get(kind, (0, 0))
    if data[:3] != b"\x05\x01\x00" or not start:
        return False
    end = start + size + 2
    if len(data) < end:
        return None
    raw = data[start : start + size]
    if kind == 3:
        host = raw.decode("latin-1")
    else:
        host = socket.inet_ntop(socket.AF_INET if kind == 1 else socket.AF_INET6, raw)
    port = int.from_bytes(data[end - 2 : end], "big")
    if not port or not own_addresses(host):
        return False
    return Own(host, port, data[end:], _socks_reply(0), _socks_reply(5))


def _socks_reply(code: int) -> bytes:
    return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))


class ProxyClient:
    """Client of a proxy, from its first byte until it is known where it leads.

    Parameters
    ----------
    loop : Loop
    sock : socket.socket
        Its connection.
    via : str
        "http" or "socks".
    pass_on : callable
        Takes over a connection to another host: the socket, the bytes read, and the number of bytes of the gate's
        answer that the client has been sent already.
    reject : callable
        Takes over a connection that nothing accepts: the socket, and the answer.
    on_done : callable
        Called once when the connection has ended, unless one of these has taken it over.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        via: str,
        pass_on: Callable[[socket.socket, bytes, int], object],
        reject: Callable[[socket.socket, bytes], object],
        on_done: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._pass_on = pass_on
        self._reject = reject
        self._on_done = on_done
        self._received = bytearray()
        #: Size of the SOCKS greeting, once it has been answered.
        self._greeting = 0
        self._read = read_http if via == "http" else self._read_socks
        self._close: Callable[[], object] = self._close_socket
        self._timer = loop.later(HEAD_TIMEOUT, lambda: self._decided(False))
        loop.watch(sock.fileno(), self._readable)

    def close(self) -> None:
        """Close the connection now."""
        self._loop.cancel(self._timer)
        self._close()

    def _close_socket(self) -> None:
        self._loop.watch(self._sock.fileno())
        self._sock.close()
        self._on_done()

    def _readable(self) -> None:
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._received += data
        found = self._read(bytes(self._received))
        if found is None and data and len(self._received) < MAX_HEAD:
            return
        self._decided(found or False)

    def _read_socks(self, data: bytes) -> Own | bool | None:
        if not self._greeting:
            size = read_socks_greeting(data)
            if not size:
                return size if size is None else False
            self._greeting = size
            try:
                self._sock.send(_NO_AUTH)
            except OSError:
                return False
        return read_socks_request(data[self._greeting :])

    def _decided(self, found: Own | bool) -> None:
        self._loop.cancel(self._timer)
        self._loop.watch(self._sock.fileno())
        if not isinstance(found, Own):
            self._pass_on(self._sock, bytes(self._received), len(_NO_AUTH) if self._greeting else 0)
            return

        def connected(far: socket.socket) -> None:
            splice = Splice(self._loop, self._sock, far, found.accepted, found.to_server, self._on_done)
            self._close = splice.close

        def failed(reason: str) -> None:
            self._reject(self._sock, found.refused)

        def close() -> None:
            dial.close()
            self._close_socket()

        self._close = close
        dial = Dial(self._loop, own_addresses(found.host), found.port, connected, failed)
