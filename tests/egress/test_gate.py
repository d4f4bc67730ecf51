"""The gate behind the real guest part and link: what code inside can and cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from support.gate_box import PUBLIC, Box, HttpServer, RawServer, read_all, read_head, read_response, running, until

from jupyter_agentbox.egress.forward import Timeouts
from jupyter_agentbox.egress.gate import GateLimits
from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.models import HttpRequest
from jupyter_agentbox.service import fetch
from jupyter_agentbox.spec import Grant

MakeBox = Callable[..., Box]
GET = "GET http://{0}{1} HTTP/1.1\r\nHost: {0}\r\n\r\n"


def tls(sock: socket.socket, certificate: Path, name: str | None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificate))
    if name is None:
        context.check_hostname = False
    return context.wrap_socket(sock, server_hostname=name)


# -- TLS through CONNECT


def test_https_to_an_allowed_name_works_and_is_logged(
    make_box: MakeBox, secure_web: HttpServer, certificate: Path
) -> None:
    box = make_box("*.example")
    box.world.add("secure.example", 443, secure_web.server_address)
    with box.connect("secure.example:443") as sock, tls(sock, certificate, "secure.example") as secure:
        secure.sendall(b"GET /size/300000 HTTP/1.1\r\nHost: secure.example\r\n\r\n")
        status, body = read_response(secure)
        assert (status, len(body)) == (200, 300_000)
    assert box.world.lookups == ["secure.example"]
    assert box.world.dials == [(PUBLIC, 443)]
    decision = box.rows(kind="egress")[0]
    assert (decision.is_allowed, decision.host, decision.port, decision.rule) == (
        True,
        "secure.example",
        443,
        "*.example",
    )
    end = box.wait_rows(kind="egress_closed")[0]
    assert end.bytes_down > 300_000
    assert end.bytes_up > 100
    assert end.duration > 0


def test_a_denied_name_is_refused_in_the_programs_own_words_and_never_looked_up(make_box: MakeBox) -> None:
    box = make_box("secure.example")
    with pytest.raises(requests.exceptions.ProxyError) as caught:
        requests.get("https://secret.attacker.test/", proxies=box.proxies, timeout=60)
    refused = "Blocked by sandbox: secret.attacker.test:{}. Ask your administrator to add it to Policy.allowed_hosts."
    assert refused.format(443) in str(caught.value)
    answer = requests.get("http://secret.attacker.test/", proxies=box.proxies, timeout=60)
    assert answer.status_code == 403
    assert answer.reason == refused.format(80)
    assert answer.text.strip() == answer.reason
    assert [r[:2] for r in box.refusals] == [("secret.attacker.test", 443), ("secret.attacker.test", 80)]
    assert [(r.host, r.is_allowed) for r in box.wait_rows(2)] == [("secret.attacker.test", False)] * 2
    assert box.world.lookups == []


@pytest.mark.parametrize("name", ["other.example", None])
def test_another_server_name_or_none_is_closed_and_logged_with_both_names(
    make_box: MakeBox, secure_web: HttpServer, certificate: Path, name: str | None
) -> None:
    box = make_box("secure.example")
    box.world.add("secure.example", 443, secure_web.server_address)
    with box.connect("secure.example:443") as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        tls(sock, certificate, name).close()
    row = box.wait_rows(is_allowed=False)[0]
    assert "secure.example" in row.reason
    assert (name or "no server name") in row.reason
    assert box.wait_rows(kind="egress_closed")[0].bytes_up == 0
    assert "secure.example" in box.refusals[0][2]


def test_curl_cannot_front_one_name_with_another(make_box: MakeBox, secure_web: HttpServer, certificate: Path) -> None:
    box = make_box("secure.example")
    box.world.add("secure.example", 443, secure_web.server_address)
    command = ["curl", "-sS", "--max-time", "60", "--cacert", str(certificate), "-x", box.proxy]
    fine = subprocess.run([*command, "https://secure.example/"], capture_output=True, timeout=90)
    assert fine.stdout == b"secure.example/"
    for arguments in (
        ["--connect-to", "other.example:443:secure.example:443", "https://other.example/"],
        ["--resolve", f"other.example:443:{PUBLIC}", "https://other.example/"],
        [f"https://{PUBLIC}/"],
        ["http://2130706433/"],
        ["http://0x7f.1/"],
        ["http://[::1]/"],
    ):
        refused = subprocess.run([*command, "-f", *arguments], capture_output=True, timeout=90)
        assert refused.returncode not in (0, 28), arguments
    assert len(secure_web.seen) == 1


def test_port_443_takes_tls_only(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("secure.example")
    box.world.add("secure.example", 443, web.server_address)
    with box.connect("secure.example:443") as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: secure.example\r\n\r\n")
        assert read_all(sock) == b""
    assert b" 403 " in box.say(b"GET http://secure.example:443/ HTTP/1.1\r\nHost: secure.example:443\r\n\r\n")
    assert web.seen == []
    assert "not TLS" in box.rows(is_allowed=False)[0].reason


def test_only_ports_80_and_443_unless_listed(make_box: MakeBox) -> None:
    box = make_box("a.example")
    for port in (22, 25, 53, 853, 8443):
        answer = box.say(f"CONNECT a.example:{port} HTTP/1.1\r\nHost: a.example:{port}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403 Blocked by sandbox: a.example:%d. " % port)
    assert box.world.lookups == []


# -- plain HTTP


def test_each_request_of_a_kept_alive_connection_is_checked(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example", "b.example")
    box.world.add("a.example", 80, web.server_address, "203.0.113.1")
    box.world.add("b.example", 80, web.server_address, "203.0.113.2")
    with box.dial() as sock:
        for host, path in (("a.example", "/1"), ("a.example", "/2"), ("b.example", "/3"), ("a.example", "/4")):
            sock.sendall(GET.format(host, path).encode())
            assert read_response(sock) == (200, f"{host}{path}".encode())
        sock.sendall(GET.format("denied.example", "/5").encode())
        status, body = read_response(sock)
        assert (status, b"denied.example:80" in body) == (403, True)
        assert read_all(sock) == b""
    assert [seen[1] for seen in web.seen] == ["/1", "/2", "/3", "/4"]
    assert "denied.example" not in box.world.lookups
    assert all("Proxy" not in str(seen[3]) for seen in web.seen)


def test_pipelined_requests_are_checked_too(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    answer = box.say((GET.format("a.example", "/1") + GET.format("denied.example", "/2")).encode())
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert answer.count(b"HTTP/1.1 403 ") == 1
    assert len(web.seen) == 1


def test_the_host_header_must_be_the_urls_host(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    for host in ("other.example", "a.example:81", "a.example.evil.com", "x@a.example"):
        answer = box.say(f"GET http://a.example/ HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer[9:12] in (b"403", b"400")
    assert web.seen == []
    for host in ("a.example", "A.Example.", "a.example:80"):
        assert b" 200 " in box.say(
            f"GET http://A.example/ HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
    assert [seen[2] for seen in web.seen] == ["a.example"] * 3


def test_port_80_behind_connect_is_http_and_checked_per_request(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    with box.connect("a.example:80") as sock:
        sock.sendall(b"GET /1 HTTP/1.1\r\nHost: a.example\r\n\r\n")
        assert read_response(sock) == (200, b"a.example/1")
        sock.sendall(b"GET /2 HTTP/1.1\r\nHost: other.example\r\n\r\n")
        status, body = read_response(sock)
        assert (status, b"other.example" in body, b"a.example:80" in body) == (403, True, True)
    with box.connect("a.example:80") as sock:
        sock.sendall(b"\x16\x03\x01\x00\x05hello\r\n\r\n")
        assert read_head(sock).startswith(b"HTTP/1.1 400 agentbox: a.example:80 was closed: ")
    assert len(web.seen) == 1


@pytest.mark.parametrize(
    "extra",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 6",
        "Transfer-Encoding: identity",
        "X: a\r\n folded: b",
        "X: \x01",
    ],
)
def test_smuggling_is_refused_before_anything_is_sent(make_box: MakeBox, web: HttpServer, extra: str) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    answer = box.say(f"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\n{extra}\r\n\r\n0\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 400 agentbox: ")
    assert box.world.dials == []


def test_bad_chunks_end_the_connection(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    head = b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n"
    smuggled = b"0 \n\r\nGET http://a.example/smuggled HTTP/1.1\r\nHost: a.example\r\n\r\n"
    assert b"smuggled" not in box.say(head + smuggled)
    assert [seen[1] for seen in web.seen if "smuggled" in seen[1]] == []


def test_bodies_both_ways(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    with requests.Session() as session:
        session.proxies = box.proxies
        url = "http://a.example"
        assert len(session.get(f"{url}/size/3000000", timeout=60).content) == 3_000_000
        assert len(session.get(f"{url}/chunked", timeout=60).content) == 51_225
        assert session.head(f"{url}/size/1000", timeout=60).headers["Content-Length"] == "1000"
        assert session.post(url, data=b"x" * 2_000_000, timeout=60).text == "2000000"
        assert session.post(url, data=iter([b"x" * 70_000] * 10), timeout=60).text == "700000"
        assert session.post(url, data=b"abc", headers={"Expect": "100-continue"}, timeout=60).text == "3"
        assert session.get(f"{url}/close", timeout=60).text == "until the end"
        redirect = session.get(f"{url}/redirect", allow_redirects=False, timeout=60)
        assert redirect.headers["Location"] == "http://other.example/"
    assert "other.example" not in box.world.lookups


class Repository(http.server.SimpleHTTPRequestHandler):
    """Serves files; what is beneath ``/moved`` is at another host."""

    def do_GET(self) -> None:
        if not self.path.startswith("/moved/"):
            return super().do_GET()
        self.send_response(302)
        self.send_header("Location", "http://objects.example" + self.path.removeprefix("/moved"))
        self.send_header("Content-Length", "0")
        return self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def test_git_clones_and_is_told_which_host_a_redirect_needs(make_box: MakeBox, tmp_path: Path) -> None:
    box = make_box("git.example")
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "http_proxy": box.proxy,
           "GIT_TERMINAL_PROMPT": "0"}  # fmt: skip

    def git(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@git.example", *map(str, arguments)]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "file").write_text("by git")
    for arguments in (
        ("init", "-q", "made"), ("-C", "made", "add", "file"), ("-C", "made", "commit", "-q", "-m", "x"),
        ("clone", "-q", "--bare", "made", "served/it.git"), ("-C", "served/it.git", "update-server-info"),
    ):  # fmt: skip
        assert git(*arguments).returncode == 0, arguments
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Repository, directory=str(tmp_path / "served"))
    )
    with running(server) as address:
        box.world.add("git.example", 80, address)
        cloned = git("clone", "-q", "http://git.example/it.git", "cloned")
        moved = git("clone", "-q", "http://git.example/moved/it.git", "moved")
        followed = subprocess.run(["curl", "-sSL", "--max-time", "60", "http://git.example/moved/it.git/HEAD"],
                                  env=env, capture_output=True, text=True, timeout=90)  # fmt: skip
    assert (cloned.returncode, (tmp_path / "cloned" / "file").read_text()) == (0, "by git")
    assert (moved.returncode != 0, "403" in moved.stderr) == (True, True), moved
    assert "Blocked by sandbox: objects.example:80." in followed.stdout
    assert "Policy.allowed_hosts" in followed.stdout
    assert [refusal[:2] for refusal in box.refusals] == [("objects.example", 80)] * 2
    assert box.world.lookups.count("objects.example") == 0


def test_an_answer_before_the_request_is_whole_ends_the_connection(make_box: MakeBox) -> None:
    def serve(sock: socket.socket) -> None:
        read_head(sock)
        sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        read_all(sock)

    box = make_box("a.example")
    with running(RawServer(serve)) as server:
        box.world.add("a.example", 80, server)
        with box.dial() as sock:
            sock.sendall(b"POST http://a.example/ HTTP/1.1\r\nHost: a.example\r\nContent-Length: 100\r\n\r\nabc")
            assert read_response(sock)[0] == 413
            assert sock.recv(1) == b""


def test_a_websocket_goes_through(make_box: MakeBox) -> None:
    def serve(sock: socket.socket) -> None:
        assert b"Upgrade: websocket" in read_head(sock)
        sock.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nfirst")
        while data := sock.recv(100):
            sock.sendall(data.upper())

    box = make_box("a.example")
    with running(RawServer(serve)) as server:
        box.world.add("a.example", 80, server)
        with box.dial() as sock:
            sock.sendall(
                GET.format("a.example", "/")[:-2].encode() + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\nab"
            )
            assert b" 101 " in read_head(sock)
            assert sock.recv(5, socket.MSG_WAITALL) == b"first"
            assert sock.recv(2, socket.MSG_WAITALL) == b"AB"
            sock.sendall(b"c")
            assert sock.recv(1) == b"C"


def test_what_is_no_proxy_request_is_told_so(make_box: MakeBox) -> None:
    box = make_box("*")
    for data in (
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1:3128\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"CONNECT a HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET https://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\n",
    ):
        assert box.say(data).startswith(b"HTTP/1.1 400 agentbox: ")
    assert box.world.lookups == []


# -- SOCKS5


def socks(box: Box, host: str, port: int, command: int = 1) -> tuple[socket.socket, int]:
    sock = box.dial("socks")
    sock.sendall(b"\x05\x01\x00")
    assert sock.recv(2) == b"\x05\x00"
    name = host.encode()
    sock.sendall(bytes((5, command, 0, 3, len(name))) + name + port.to_bytes(2, "big"))
    reply = sock.recv(10, socket.MSG_WAITALL)
    return sock, reply[1]


@pytest.mark.usefixtures("hostile_guest")
def test_socks_by_name_only(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example", "missing.example", "raw.example:9000")
    box.world.add("a.example", 80, web.server_address)
    sock, code = socks(box, "a.example", 80)
    with sock:
        assert code == 0
        sock.sendall(b"GET /1 HTTP/1.1\r\nHost: a.example\r\n\r\n")
        assert read_response(sock) == (200, b"a.example/1")
    for host, port, command, expected in (
        ("denied.example", 80, 1, 2), ("a.example", 22, 1, 2), ("127.0.0.1", 80, 1, 2), ("missing.example", 80, 1, 4),
        ("a.example", 80, 2, 7), ("a.example", 80, 3, 7),
    ):  # fmt: skip
        sock, code = socks(box, host, port, command)
        sock.close()
        assert code == expected, (host, port, command)
    with box.dial("socks") as sock:
        sock.sendall(b"\x05\x01\x00\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50")
        assert read_all(sock)[3] == 8
    with box.dial("socks") as sock:
        sock.sendall(b"\x05\x01\x02")
        assert read_all(sock) == b"\x05\xff"
    assert box.world.lookups == ["a.example", "missing.example"]


# -- private addresses


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["169.254.169.254"],
        ["10.0.0.1"],
        ["100.64.0.1"],
        ["0.0.0.0"],
        ["::1"],
        ["::ffff:7f00:1"],
        ["64:ff9b::a00:1"],
        [PUBLIC, "192.168.0.1"],
        ["2606:4700::1", "fd00::1"],
    ],
)
def test_one_bad_answer_refuses_the_name(make_box: MakeBox, addresses: list[str]) -> None:
    box = make_box("*")
    box.world.names["rebind.example"] = addresses
    answer = box.say(b"CONNECT rebind.example:443 HTTP/1.1\r\nHost: rebind.example\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 Blocked by sandbox: rebind.example:443 resolves to")
    assert b"Policy.private_hosts" in answer
    assert not any(address.encode() in answer for address in addresses)
    assert box.world.dials == []
    assert box.rows(is_allowed=False)[0].detail["address"] in addresses


def test_what_was_checked_is_what_is_dialled(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("flip.example")
    answers = iter([[PUBLIC], ["127.0.0.1"], ["169.254.169.254"]])
    box.world.resolve_hook = lambda host: next(answers)
    box.world.servers[PUBLIC, 80] = web.server_address
    assert b" 200 " in box.say(GET.format("flip.example", "/")[:-2].encode() + b"Connection: close\r\n\r\n")
    assert len(box.world.lookups) == 1
    assert box.world.dials == [(PUBLIC, 80)]


def test_the_next_address_is_tried(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    box.world.names["a.example"] = ["203.0.113.99", PUBLIC]
    assert b" 200 " in box.say(GET.format("a.example", "/")[:-2].encode() + b"Connection: close\r\n\r\n")
    assert box.world.dials == [("203.0.113.99", 80), (PUBLIC, 80)]


@pytest.mark.usefixtures("hostile_guest")
def test_this_machine_is_out_of_reach_whatever_the_allowlist_says(make_box: MakeBox, web: HttpServer) -> None:
    port = web.server_address[1]
    box = make_box("*", f"*:{port}", private=("*", f"*:{port}"), real=True)
    own = box.guest.egress.addresses["http"][1]
    for target in (f"localhost:{port}", f"127.0.0.1:{port}", f"localhost:{own}", "169.254.169.254:80", f"[::1]:{port}"):
        answer = box.say(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ")), target
    assert web.seen == []


def test_a_public_address_of_this_machine_is_this_machine_too(make_box: MakeBox) -> None:
    box = make_box("*", private=("*",), is_own=lambda address: address == PUBLIC)
    box.world.names["jupyter.example"] = [PUBLIC]
    assert b" 403 " in box.say(b"CONNECT jupyter.example:443 HTTP/1.1\r\nHost: jupyter.example\r\n\r\n")
    assert box.world.dials == []


def test_a_private_host_set_by_name_and_port_is_reached(make_box: MakeBox, web: HttpServer) -> None:
    port = web.server_address[1]
    box = make_box(f"localhost:{port}", private=(f"localhost:{port}",), real=True)
    answer = requests.get(f"http://localhost:{port}/x", proxies=box.proxies, timeout=60)
    assert answer.text == f"localhost:{port}/x"


# -- raw ports


def test_the_server_may_speak_first_on_other_ports(make_box: MakeBox) -> None:
    def serve(sock: socket.socket) -> None:
        sock.sendall(b"SSH-2.0-test\r\n")
        assert read_all(sock) == b"hello"
        sock.sendall(b"bye")

    box = make_box("db.example:2222")
    with running(RawServer(serve)) as server:
        box.world.add("db.example", 2222, server)
        with box.connect("db.example:2222") as sock:
            assert sock.recv(14, socket.MSG_WAITALL) == b"SSH-2.0-test\r\n"
            sock.sendall(b"hello")
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b"bye"
    end = box.wait_rows(kind="egress_closed")[0]
    assert (end.bytes_up, end.bytes_down) == (5, 17)


def test_tls_on_other_ports_is_checked(make_box: MakeBox, secure_web: HttpServer, certificate: Path) -> None:
    box = make_box("secure.example:8443")
    box.world.add("secure.example", 8443, secure_web.server_address)
    with box.connect("secure.example:8443") as sock, tls(sock, certificate, "secure.example") as secure:
        secure.sendall(b"GET / HTTP/1.1\r\nHost: secure.example\r\n\r\n")
        assert read_response(secure)[0] == 200
    with box.connect("secure.example:8443") as sock, pytest.raises((ssl.SSLError, ConnectionError)):
        tls(sock, certificate, "other.example").close()


# -- names


def dns_packet(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes((len(part),)) + part.encode() for part in name.split("."))
    return b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\0" + kind.to_bytes(2, "big") + b"\0\1"


def ask(box: Box, packet: bytes, timeout: float = 60) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(timeout)
        sock.sendto(packet, box.guest.egress.addresses["dns"])
        return sock.recv(4096)


def ask_tcp(box: Box, *packets: bytes) -> list[bytes]:
    with box.dial("dns") as sock:
        sock.sendall(b"".join(len(p).to_bytes(2, "big") + p for p in packets))
        return [sock.recv(int.from_bytes(sock.recv(2, socket.MSG_WAITALL), "big"), socket.MSG_WAITALL) for _ in packets]


def test_an_allowed_name_leads_through_the_gate_by_plain_sockets(make_box: MakeBox) -> None:
    def serve(sock: socket.socket) -> None:
        sock.sendall(b"220 hello\r\n")
        read_all(sock)

    with socket.socket() as free:  # a port that ordinary users may bind, too
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    box = make_box(f"*.example:{port}")
    with running(RawServer(serve)) as server:
        box.world.add("mail.example", port, server)
        answer = ask(box, dns_packet("Mail.example"))
        assert answer[3] & 15 == 0
        address = socket.inet_ntoa(answer[-4:])
        assert address.startswith("127.64.")
        assert box.world.lookups == []
        with socket.create_connection((address, port), 60) as sock:
            assert sock.recv(11, socket.MSG_WAITALL) == b"220 hello\r\n"
        assert ask_tcp(box, dns_packet("mail.example"))[0][-4:] == answer[-4:]
        assert ask(box, dns_packet("www.example"))[-4:] != answer[-4:]
        box.set_grant(Grant())
        with socket.create_connection((address, port), 60) as sock:
            assert read_all(sock) == b""
    assert box.refusals[-1][2].startswith("Blocked by sandbox: mail.example:")


def test_a_denied_name_is_answered_at_once_and_asked_of_nobody(make_box: MakeBox) -> None:
    box = make_box("a.example")
    before = time.monotonic()
    for name in ("secret.attacker.test", "b.example", "a.example.evil", "_x.secret", "a.example"):
        for kind in (1, 28, 16, 15, 65, 255):
            code = ask(box, dns_packet(name, kind))[3] & 15
            assert code == (0 if name == "a.example" else 3)
    assert time.monotonic() - before < 30
    assert ask(box, dns_packet("a.example", 28))[6:8] == b"\0\0"  # no address of version 6, and no error
    assert ask(box, dns_packet("1.0.64.127.in-addr.arpa", 12))[3] & 15 == 3
    assert ask(box, dns_packet("localhost"))[-4:] == b"\x7f\0\0\x01"
    assert box.world.lookups == []
    assert {r.host for r in box.wait_rows(25, is_allowed=False)} == {
        "secret.attacker.test",
        "b.example",
        "a.example.evil",
        "_x.secret",
        "a.example",  # its TXT records
    }


@pytest.mark.parametrize("hosts", ["c0.db.example:27017", "*.db.example:27017"])
def test_service_records_of_an_allowed_name_are_refused_with_a_way_out(make_box: MakeBox, hosts: str) -> None:
    box = make_box(hosts)
    for name, kind, record in (("_mongodb._tcp.c0.db.example", 33, "SRV"), ("c0.db.example", 16, "TXT")):
        answer = ask(box, dns_packet(name, kind))
        assert (answer[3] & 15, answer[6:8]) == (0, b"\0\0")
        until(lambda record=record: bool(box.refusals) and box.refusals[-1][2].startswith(record))
        host, _, sentence = box.refusals[-1]
        assert (host, "mongodb://HOST:27017" in sentence) == ("c0.db.example", True)
    assert [row.detail["type"] for row in box.wait_rows(2, is_allowed=False)] == ["SRV", "TXT"]
    assert ask(box, dns_packet("_mongodb._tcp.other.example", 33))[3] & 15 == 3
    until(lambda: box.refusals[-1][2].startswith("Blocked by sandbox: other.example."))
    assert box.world.lookups == []


def test_malformed_queries_harm_nothing(make_box: MakeBox) -> None:
    box = make_box("a.example")
    good = dns_packet("a.example")
    assert ask(box, good[:-1])[3] & 15 == 1
    assert ask(box, good[:2] + b"\x29" + good[3:])[3] & 15 == 4
    for junk in (b"", b"x", good[:2] + b"\x81" + good[3:], os.urandom(5000)):
        with contextlib.suppress(TimeoutError):
            ask(box, junk, 0.1)
    with box.dial("dns") as sock:
        sock.sendall(b"\xff\xff" + bytes(100))
        assert read_all(sock) == b""
    assert ask(box, good)[3] & 15 == 0
    assert [a[3] & 15 for a in ask_tcp(box, good, dns_packet("denied.example"), good)] == [0, 3, 0]


def test_the_names_remembered_are_bounded(make_box: MakeBox) -> None:
    box = make_box("*:9999", limits=GateLimits(names=10))
    seen = {ask(box, dns_packet(f"n{n}.example"))[-4:] for n in range(40)}
    assert len(seen) == 40  # an address is not given to another name soon
    assert len(box.gate._names) == len(box.gate._addresses) == 10


# -- bounds, failures, changes


def read_until_end(sock: socket.socket) -> None:
    while sock.recv(65536):
        pass


def test_too_many_connections_are_refused_by_every_way_out(make_box: MakeBox) -> None:
    with socket.socket() as free:  # a port that ordinary users may bind, too
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    target = f"a.example:{port}"
    box = make_box(target, limits=GateLimits(connections=2, timeouts=Timeouts(slot=0.3)))
    request = "CONNECT {0} HTTP/1.1\r\nHost: {0}\r\n\r\n"
    with running(RawServer(read_until_end)) as server:
        box.world.add("a.example", port, server)
        held = [box.connect(target) for _ in range(2)]
        sentence = f"{target} is refused: this sandbox has 2 open connections, the maximum"
        assert box.say(request.format(target).encode()).startswith(b"HTTP/1.1 503 agentbox: " + sentence.encode())
        sock, code = socks(box, "a.example", port)
        sock.close()
        assert code == 1
        address = socket.inet_ntoa(ask(box, dns_packet("a.example"))[-4:])
        with socket.create_connection((address, port), 60) as sock, pytest.raises(ConnectionResetError):
            sock.recv(1)
        rows = box.wait_rows(3, kind="egress_failed")
        assert [row.host for row in rows] == ["a.example"] * 3
        assert all(sentence in row.reason for row in rows)
        assert all(sentence in words for _, _, words in box.refusals)
        assert box.say(request.format("b.example:443").encode()).startswith(b"HTTP/1.1 403 ")
        held.pop().close()
        box.wait_rows(kind="egress_closed")
        box.connect(target).close()
        held.pop().close()


def test_connections_over_the_limit_wait_for_others_to_end(make_box: MakeBox) -> None:
    box = make_box("a.example:7000", limits=GateLimits(connections=3, timeouts=Timeouts(slot=200)))
    with running(RawServer(lambda sock: sock.sendall(sock.recv(5)))) as server:
        box.world.add("a.example", 7000, server)

        def exchange(number: int) -> bytes:
            with box.connect("a.example:7000") as sock:
                sock.sendall(b"%5d" % number)
                return read_all(sock)

        with ThreadPoolExecutor(50) as pool:
            assert list(pool.map(exchange, range(200))) == [b"%5d" % number for number in range(200)]
    assert box.refusals == []
    until(lambda: box.gate._slots == 3)
    assert not box.gate._waiting


def ask_kept(sock: socket.socket, host: str, path: str = "/") -> bytes:
    """Send a request on a connection to the proxy that is kept, and return the answer's head."""
    sock.sendall(GET.format(host, path).encode())
    head = read_head(sock)
    length = int(next(line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")))
    while length:
        length -= len(sock.recv(length))
    return head


def test_the_longest_idle_connection_of_the_proxy_makes_room(make_box: MakeBox, web: HttpServer) -> None:
    times = Timeouts(slot=60, reuse=0.2)
    box = make_box("a.example", "b.example:7000", limits=GateLimits(connections=4, timeouts=times))
    with running(RawServer(read_until_end)) as server, contextlib.ExitStack() as stack:
        box.world.add("a.example", 80, web.server_address, "203.0.113.1")
        box.world.add("b.example", 7000, server, "203.0.113.2")
        tunnel = stack.enter_context(box.connect("b.example:7000"))
        fixed = stack.enter_context(box.connect("a.example:80"))
        fixed.sendall(b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n")
        assert read_response(fixed) == (200, b"a.example/")
        oldest, newer = (stack.enter_context(box.dial()) for _ in range(2))
        assert b"Connection: close" not in ask_kept(oldest, "a.example")
        assert b"Connection: close" not in ask_kept(newer, "a.example")
        first = stack.enter_context(box.dial())
        assert b" 200 " in ask_kept(first, "a.example")
        assert oldest.recv(1) == b""  # the end, no reset
        assert b" 200 " in ask_kept(newer, "a.example")
        for sock in (tunnel, fixed, newer, first):
            sock.settimeout(0.5)
            with pytest.raises(TimeoutError):
                sock.recv(1)
    assert box.refusals == []
    until(lambda: box.gate._slots == 4)
    assert not box.gate._kept._idle


@pytest.mark.parametrize("way", ["proxy", "socks"])
def test_a_connection_that_the_server_has_closed_makes_room(make_box: MakeBox, way: str) -> None:
    box = make_box(
        "a.example:7000", limits=GateLimits(connections=1, timeouts=Timeouts(slot=60, half_closed=600, reuse=0.2))
    )

    def connect() -> socket.socket:
        return box.connect("a.example:7000") if way == "proxy" else socks(box, "a.example", 7000)[0]

    with running(RawServer(lambda sock: sock.sendall(b"bye"))) as server:
        box.world.add("a.example", 7000, server)
        kept = []
        for _ in range(3):
            kept.append(connect())
            assert read_all(kept[-1]) == b"bye"
        for sock in kept:
            sock.close()
    assert box.refusals == []
    until(lambda: box.gate._slots == 1)
    assert not box.gate._kept._idle


def test_an_answer_says_that_its_connection_ends_while_others_wait(make_box: MakeBox) -> None:
    box = make_box("a.example", limits=GateLimits(connections=1, timeouts=Timeouts(slot=60, reuse=60)))
    go = threading.Event()

    def serve(sock: socket.socket) -> None:
        read_head(sock)
        go.wait(60)
        sock.sendall(b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nContent-Length: 0\r\n\r\n")
        read_until_end(sock)

    with running(RawServer(serve)) as server, box.dial() as busy, box.dial() as waiting:
        box.world.add("a.example", 80, server)
        busy.sendall(GET.format("a.example", "/").encode())
        until(lambda: box.gate._slots == 0)
        waiting.sendall(GET.format("a.example", "/").encode())
        until(lambda: len(box.gate._waiting) == 1)
        go.set()
        assert read_all(busy) == b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        assert b"Keep-Alive: timeout=5" in read_head(waiting)


def test_a_gate_that_closes_forgets_who_waits(make_box: MakeBox) -> None:
    box = make_box("a.example:7000", limits=GateLimits(connections=1))
    with running(RawServer(read_until_end)) as server:
        box.world.add("a.example", 7000, server)
        with box.connect("a.example:7000"), box.dial() as waiting:
            waiting.sendall(b"CONNECT a.example:7000 HTTP/1.1\r\nHost: a.example:7000\r\n\r\n")
            until(lambda: len(box.gate._waiting) == 1)
            box.thread.submit(box.gate.aclose()).result(60)
            assert read_all(waiting) == b""
    assert (box.gate._slots, len(box.gate._waiting)) == (1, 0)


def test_silence_is_ended(make_box: MakeBox) -> None:
    box = make_box("a.example:7000", "b.example", limits=GateLimits(timeouts=Timeouts(head=2.0, idle=2.0)))

    def hold(sock: socket.socket) -> None:
        sock.recv(1)

    with running(RawServer(hold)) as server:
        box.world.add("a.example", 7000, server)
        box.world.add("b.example", 443, server, "203.0.113.9")
        before = time.monotonic()

        def connect(target: str) -> bytes:
            with box.connect(target) as sock:
                return read_all(sock)

        with ThreadPoolExecutor(4) as pool:
            silent = [
                pool.submit(box.say, b"GET http://a.ex"),
                pool.submit(box.say, b"\x05", "socks"),
                pool.submit(connect, "a.example:7000"),
                pool.submit(connect, "b.example:443"),
            ]
            assert [each.result() for each in silent] == [b""] * 4
        assert time.monotonic() - before < 55  # of the next bound, that of who dials


def test_a_half_that_is_left_open_is_ended(make_box: MakeBox) -> None:
    box = make_box("a.example:7000", limits=GateLimits(timeouts=Timeouts(half_closed=0.3)))
    with running(RawServer(lambda sock: sock.sendall(b"bye"))) as server:
        box.world.add("a.example", 7000, server)
        with box.connect("a.example:7000") as sock:
            assert read_all(sock) == b"bye"
            box.wait_rows(kind="egress_closed")


def test_slow_lookups_end_and_say_so(make_box: MakeBox) -> None:
    async def never(host: str, port: int) -> list[str]:
        import asyncio

        await asyncio.sleep(60)
        return []

    box = make_box("a.example", resolve=never, limits=GateLimits(timeouts=Timeouts(lookup=0.2)))
    assert box.say(b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n").startswith(
        b"HTTP/1.1 504 agentbox: a.example:443"
    )


def test_a_name_without_server_or_address_says_so(make_box: MakeBox) -> None:
    box = make_box("*")
    box.world.names["down.example"] = [PUBLIC]
    for host, words in (("down.example", b"the connection failed"), ("missing.example", b"was not found")):
        answer = box.say(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 502 agentbox: ")
        assert words in answer
    assert len(box.wait_rows(2, kind="egress_failed")) == 2


def test_nothing_leaves_that_cannot_be_logged(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    box.audit.record("egress", "box")
    log = box.audit.path
    log.unlink()
    log.mkdir()
    assert box.say(GET.format("a.example", "/").encode()).startswith(
        b"HTTP/1.1 503 agentbox: a.example:80 is refused: the audit log"
    )
    assert web.seen == []
    log.rmdir()
    assert b" 200 " in box.say(GET.format("a.example", "/")[:-2].encode() + b"Connection: close\r\n\r\n")


def test_a_narrower_grant_ends_what_it_does_not_cover(make_box: MakeBox) -> None:
    def echo(sock: socket.socket) -> None:
        while data := sock.recv(100):
            sock.sendall(data)

    box = make_box("a.example:7000", "b.example:7000")
    with running(RawServer(echo)) as server:
        box.world.add("a.example", 7000, server)
        box.world.add("b.example", 7000, server)
        with box.connect("a.example:7000") as one, box.connect("b.example:7000") as two:
            for sock in (one, two):
                sock.sendall(b"x")
                assert sock.recv(1) == b"x"
            box.set_grant(Grant(hosts=("b.example:7000",)))
            assert read_all(one) == b""
            two.sendall(b"y")
            assert two.recv(1) == b"y"
    with pytest.raises(InvalidRequest):
        box.set_grant(Grant(hosts=("bad pattern",)))


def test_without_an_owner_everything_is_refused_at_once_and_works_again_after(
    make_box: MakeBox, web: HttpServer
) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    assert ask(box, dns_packet("a.example"))[3] & 15 == 0
    box.leave()
    until(lambda: not box.guest.link._is_up)
    before = time.monotonic()
    assert box.say(GET.format("a.example", "/").encode()).startswith(b"HTTP/1.1 503 agentbox: no owner")
    assert box.say(b"\x05\x01\x00\x05\x01\x00\x03\x01a\x00\x50", "socks")[:4] == b"\x05\x00\x05\x01"
    assert ask(box, dns_packet("a.example"))[3] & 15 == 2
    assert time.monotonic() - before < 30
    box.own()
    box.wait_up()
    assert ask(box, dns_packet("a.example"))[3] & 15 == 0
    assert b" 200 " in box.say(GET.format("a.example", "/")[:-2].encode() + b"Connection: close\r\n\r\n")


def test_a_hostile_name_reaches_no_log_or_screen_raw(make_box: MakeBox) -> None:
    box = make_box("a.example")
    for host in ("\x1b[2J.example", "a" * 3000, "a.example\x00.evil", "\xe4.\xff"):
        box.say(f"CONNECT {host}:443 HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"))
        sock, code = socks(box, host[:200].encode("latin-1", "replace").decode("latin-1"), 443)
        sock.close()
        assert code == 2
    for _, _, sentence in box.refusals:
        assert sentence.isascii()
        assert sentence.isprintable()
        assert len(sentence) < 600
    assert all(row.reason.isprintable() for row in box.rows())


@pytest.mark.parametrize(
    "host",
    ["a%00.example", "a%00b", "a\x00.example", "a\uff0eexample", "\uff41.example\uff61", "a\u3002example", "-a.example",
     "a..example", "a" * 64 + ".example", "a_.example!", "a.exam ple"],
)  # fmt: skip
def test_what_is_no_host_name_is_a_bad_request_and_not_a_decision(make_box: MakeBox, host: str) -> None:
    box = make_box("*")
    encoded = host.encode()
    for request in (
        b"CONNECT %s:443 HTTP/1.1\r\nHost: a.example\r\n\r\n" % encoded,
        b"GET http://%s/ HTTP/1.1\r\nHost: %s\r\n\r\n" % (encoded, encoded),
        b"GET http://a.example/ HTTP/1.1\r\nHost: %s\r\n\r\n" % encoded,
    ):
        answer = box.say(request)
        assert answer.startswith(b"HTTP/1.1 400 "), (request, answer)
        assert b"setting" not in answer
    assert (box.world.dials, box.world.lookups) == ([], [])


@pytest.mark.usefixtures("hostile_guest")
@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "0x7f.1"])
def test_an_address_is_a_decision(make_box: MakeBox, host: str) -> None:
    box = make_box("*")
    assert box.say(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).startswith(b"HTTP/1.1 403 ")


def test_many_connections_at_once(make_box: MakeBox, web: HttpServer) -> None:
    box = make_box("a.example")
    box.world.add("a.example", 80, web.server_address)
    failed: list[object] = []

    def work() -> None:
        try:
            for _ in range(5):
                answer = requests.get("http://a.example/size/50000", proxies=box.proxies, timeout=100)
                assert len(answer.content) == 50_000
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert failed == []
    until(lambda: box.gate._streams == 0)


@pytest.mark.parametrize("arguments", [["https://git.example/x.git"], ["http://git.example/x.git"]])
def test_a_refused_git_fails_at_once(make_box: MakeBox, arguments: list[str]) -> None:
    box = make_box("a.example")
    env = {**os.environ, "http_proxy": box.proxy, "https_proxy": box.proxy, "GIT_TERMINAL_PROMPT": "0"}
    before = time.monotonic()
    result = subprocess.run(["git", "ls-remote", *arguments], env=env, capture_output=True, timeout=100)
    assert result.returncode != 0
    assert b"403" in result.stderr
    assert time.monotonic() - before < 60
    assert box.refusals[0][0] == "git.example"


# -- streams that a hostile guest opens by itself


class ByHand:
    """A stream of a guest that says what it likes."""

    def __init__(self, header: dict[str, object], *data: bytes) -> None:
        self.header = header
        self.pieces = [*data, b""]
        self.written = b""
        self.is_reset = False

    async def read(self) -> bytes:
        return self.pieces.pop(0) if self.pieces else b""

    async def write(self, data: bytes) -> None:
        self.written += data

    async def write_eof(self) -> None:
        pass

    def reset(self, reason: str = "") -> None:
        self.is_reset = True


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"kind": "other"},
        {"kind": "tcp"},
        {"kind": "tcp", "via": "x"},
        {"kind": "tcp", "via": ["direct"]},
        {"kind": "tcp", "via": "direct"},
        {"kind": "tcp", "via": "direct", "address": "127.0.0.1", "port": 80},
        {"kind": "tcp", "via": "direct", "address": "127.64.0.1", "port": "80"},
        {"kind": ["dns"]},
    ],
)
def test_headers_that_mean_nothing_are_reset(make_box: MakeBox, header: dict[str, object]) -> None:
    box = make_box("*")
    stream = ByHand(header, b"hello")
    box.thread.submit(box.gate.handle(stream)).result(60)
    assert stream.is_reset
    assert (stream.written, box.world.lookups) == (b"", [])


def test_transparent_http_and_tls_are_checked_like_the_rest(
    make_box: MakeBox, web: HttpServer, certificate: Path
) -> None:
    box = make_box("a.example", "secure.example")
    box.world.add("a.example", 80, web.server_address)
    box.world.add("a.example", 443, web.server_address)
    address = socket.inet_ntoa(ask(box, dns_packet("a.example"))[-4:])

    def direct(port: int, data: bytes) -> bytes:
        stream = ByHand({"kind": "tcp", "via": "direct", "address": address, "port": port}, data)
        box.thread.submit(box.gate.handle(stream)).result(60)
        return stream.written

    request = b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n"
    assert b" 200 " in direct(80, request % b"a.example" + request % b"a.example")
    answer = direct(80, request % b"a.example" + request % b"other.example")
    assert (answer.count(b" 200 "), answer.count(b" 403 ")) == (1, 1)
    assert direct(443, request % b"a.example") == b""
    assert direct(22, b"") == b""
    for port in (0, -1, 1 << 16, 1 << 70):
        assert direct(port, b"hello") == b""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="secure.example")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    assert direct(443, outgoing.read()) == b"\x15\x03\x01\x00\x02\x02\x70"
    assert "secure.example, not a.example" in box.refusals[-1][2]


def test_slow_hosts_of_one_sandbox_hold_up_no_requests_of_others(make_box: MakeBox) -> None:
    slow, other = make_box("slow.example"), make_box("slow.example")
    other.gate.sandbox_id = "other"

    async def exchange(server: socket.socket) -> None:
        for box in (slow, other):
            box.world.add("slow.example", 80, server.getsockname())
        request = HttpRequest(url="http://slow.example/", timeout=60)
        waiting = [asyncio.ensure_future(fetch.fetch(slow.gate, request)) for _ in range(fetch.MAX_REQUESTS)]
        while slow.gate._streams < fetch.MAX_REQUESTS:
            await asyncio.sleep(0.01)
        with pytest.raises(PolicyRefused, match="in progress"):
            await fetch.fetch(slow.gate, request)
        for box in (other, slow):
            with pytest.raises(PolicyRefused, match=r"denied\.example:80" if box is other else "in progress"):
                await fetch.fetch(box.gate, HttpRequest(url="http://denied.example/"))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(PolicyRefused, match=r"^Blocked by sandbox: denied\.example:80\."):
            await fetch.fetch(slow.gate, HttpRequest(url="http://denied.example/"))

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(exchange(server))


def test_a_closed_gate_lets_nothing_through(make_box: MakeBox) -> None:
    box = make_box("*")
    box.thread.submit(box.gate.aclose()).result(60)
    assert box.say(b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n") == b""
