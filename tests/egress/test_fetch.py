"""Requests that the host sends through a sandbox's gate, to servers that answer as they like."""

from __future__ import annotations

import asyncio
import base64
import gzip
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.gate_box import Box, HttpServer, RawServer, read_head, running

from jupyter_agentbox.egress.forward import Timeouts
from jupyter_agentbox.egress.gate import GateLimits
from jupyter_agentbox.errors import InvalidRequest, PolicyRefused, RuntimeFailed
from jupyter_agentbox.models import HttpAnswer, HttpRequest
from jupyter_agentbox.service.fetch import fetch
from jupyter_agentbox.spec import Grant

MakeBox = Callable[..., Box]
URL = "http://a.example/"
SECURE = "https://secure.example/"


def ask(box: Box, url: str = URL, **options: Any) -> HttpAnswer:
    return asyncio.run(fetch(box.gate, HttpRequest(url=url, **{"timeout": 60.0, **options})))


def names(answer: HttpAnswer) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers}


class Says(RawServer):
    """Server that answers each request with fixed bytes, plain or over TLS, and closes the connection."""

    def __init__(self, answer: bytes, certificate: Path | None = None) -> None:
        def serve(sock: socket.socket) -> None:
            if certificate is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificate)
                sock = context.wrap_socket(sock, server_side=True)
            with sock:
                read_head(sock)
                sock.sendall(answer)
                if isinstance(sock, ssl.SSLSocket):
                    sock.unwrap()

        super().__init__(serve)


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    return certificate


@pytest.fixture
def box(make_box: MakeBox) -> Box:
    return make_box("a.example", "secure.example")


def test_plain_requests_go_as_to_a_proxy(box: Box, web: HttpServer) -> None:
    box.world.add("a.example", 80, web.server_address)
    answer = ask(box, URL + "x?y=%20", headers={"X-Own": " \u00e9 ", "user-agent": "me"})
    assert (answer.status, answer.reason, answer.body, answer.truncated) == (200, "OK", "a.example/x?y=%20", False)
    sent = web.seen[0][3]
    assert (sent["X-Own"], sent["user-agent"], sent["Connection"]) == ("\u00e9", "me", "close")
    assert "proxy" not in str(sent)
    assert ask(box, URL + "redirect").status == 302
    assert ask(box, URL + "chunked").body == "x" * sum(1000 + n for n in range(50))
    assert ask(box, URL + "close").body == "until the end"
    assert names(ask(box, URL + "size/9", method="HEAD"))["content-length"] == "9"
    assert ask(box, method="POST", body="hello").body == "5"
    assert ask(box, method="POST", body_base64=bytes(300_000)).body == "300000"
    assert ask(box, method="POST").body == "0"


def test_secure_requests_are_verified_for_their_host(
    box: Box, secure_web: HttpServer, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.world.add("secure.example", 443, secure_web.server_address)
    box.world.add("a.example", 443, secure_web.server_address)
    with pytest.raises(RuntimeFailed, match=r"TLS with secure\.example:443 failed: CERTIFICATE_VERIFY_FAILED"):
        ask(box, SECURE)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert ask(box, SECURE + "size/300000").body == "x" * 300_000
    with pytest.raises(RuntimeFailed, match=r"TLS with a\.example:443 failed"):
        ask(box, "https://a.example/")
    assert len(secure_web.seen) == 1


def test_any_event_loop_can_ask(box: Box, web: HttpServer) -> None:
    box.world.add("a.example", 80, web.server_address)
    request = HttpRequest(url=URL)
    assert box.thread.submit(fetch(box.gate, request)).result(60).body == "a.example/"
    assert asyncio.run(fetch(box.gate, request)).body == "a.example/"


@pytest.mark.parametrize("url", ["http://other.example/", "https://other.example/"])
def test_the_gates_refusals_are_errors_with_its_sentence(box: Box, url: str) -> None:
    with pytest.raises(PolicyRefused, match=r"^Blocked by sandbox: other\.example:\d+\.") as caught:
        ask(box, url)
    assert (caught.value.field, caught.value.setting) == ("url", "Policy.allowed_hosts")
    with pytest.raises(RuntimeFailed, match=r"^secure\.example:\d+ is allowed, but its name was not found"):
        ask(box, url.replace("other", "secure"))
    assert not box.world.dials


@pytest.mark.parametrize("url", [URL, SECURE])
def test_a_lookup_that_takes_too_long_is_a_timeout(make_box: MakeBox, url: str) -> None:
    box = make_box("*.example", limits=GateLimits(timeouts=Timeouts(lookup=0.2)))

    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    box.gate._resolve = resolve
    with pytest.raises(TimeoutError, match="the lookup of its name timed out"):
        ask(box, url)


def test_only_the_gate_refuses_in_its_name(box: Box, trusted: Path) -> None:
    with running(Says(b"HTTP/1.1 403 agentbox: no\r\nContent-Length: 0\r\n\r\n", trusted)) as address:
        box.world.add("secure.example", 443, address)
        assert ask(box, SECURE).reason == "agentbox: no"


@pytest.mark.parametrize("headers", [{"a b": "x"}, {"X": "a\r\nY: b"}, {"X": "a\0"}, {"X": "\u20ac"}, {"\u00e9": "x"}])
def test_headers_that_http_does_not_have_are_invalid(box: Box, web: HttpServer, headers: dict[str, str]) -> None:
    box.world.add("a.example", 80, web.server_address)
    with pytest.raises(InvalidRequest) as caught:
        ask(box, headers=headers)
    assert caught.value.field == "headers"
    assert not web.seen


BOTH = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


def test_two_framings_are_refused_by_the_gate_and_read_as_chunks_over_tls(box: Box, trusted: Path) -> None:
    with running(Says(BOTH)) as plain, running(Says(BOTH, trusted)) as secure:
        box.world.add("a.example", 80, plain)
        box.world.add("secure.example", 443, secure)
        with pytest.raises(RuntimeFailed, match="both Content-Length and Transfer-Encoding"):
            ask(box)
        assert ask(box, SECURE).body == "hello"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
        b"X: y\r\n" * 50_000,
        b"",
    ],
)
def test_what_is_not_http_ends_in_an_error(box: Box, trusted: Path, answer: bytes) -> None:
    with running(Says(answer)) as plain, running(Says(answer, trusted)) as secure:
        box.world.add("a.example", 80, plain)
        box.world.add("secure.example", 443, secure)
        for url in (URL, SECURE):
            with pytest.raises(RuntimeFailed, match=r"example:(80|443) "):
                ask(box, url)


def test_a_compressed_body_stays_as_it_is_and_is_limited(box: Box) -> None:
    body = gzip.compress(bytes(10_000_000))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    with running(Says(head + body)) as address:
        box.world.add("a.example", 80, address)
        answer = ask(box)
        assert (base64.b64decode(answer.body), answer.encoding, answer.truncated) == (body, "base64", False)
        assert names(answer)["content-encoding"] == "gzip"
        cut = ask(box, max_bytes=100)
        assert (base64.b64decode(cut.body), cut.truncated) == (body[:100], True)
        assert ask(box, max_bytes=len(body)).truncated is False
        nothing = ask(box, max_bytes=0)
        assert (nothing.body, nothing.truncated) == ("", True)


def accept(sock: socket.socket, url: str, trusted: Path) -> socket.socket:
    """Return the server's end of a connection, with TLS if the URL has it."""
    if url != SECURE:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted)
    return context.wrap_socket(sock, server_side=True)


@pytest.mark.parametrize("endless", [b"X: y\r\n", b"x" * 1000, b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("url", [URL, SECURE])
def test_an_endless_head_ends_by_size_or_time(box: Box, trusted: Path, url: str, endless: bytes) -> None:
    def serve(sock: socket.socket) -> None:
        with accept(sock, url, trusted) as sock:
            read_head(sock)
            sock.sendall(b"HTTP/1.1 200 OK\r\n" if endless[:1] != b"H" else b"")
            while True:
                sock.sendall(endless)

    with running(RawServer(serve)) as address:
        box.world.add("a.example", 80, address)
        box.world.add("secure.example", 443, address)
        with pytest.raises((RuntimeFailed, TimeoutError)):
            ask(box, url, timeout=2)


@pytest.mark.parametrize("url", [URL, SECURE])
def test_an_endless_body_ends_at_the_limit(box: Box, trusted: Path, url: str) -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + bytes(20_000_000)
    with running(Says(answer, trusted if url == SECURE else None)) as address:
        box.world.add("a.example", 80, address)
        box.world.add("secure.example", 443, address)
        assert ask(box, url, max_bytes=1000).truncated
    assert box.wait_rows(kind="egress_closed")[0].bytes_down < 10_000_000


@pytest.mark.parametrize("is_greeted", [False, True])
def test_a_server_that_stalls_in_tls_takes_the_requests_timeout(make_box: MakeBox, is_greeted: bool) -> None:
    box, reached = make_box("secure.example"), threading.Event()

    def serve(sock: socket.socket) -> None:
        reached.set()
        if is_greeted:
            sock.sendall(b"\x16\x03\x03\x40\x00")  # begins a long record that never comes
        while sock.recv(4096):
            pass

    with running(RawServer(serve)) as address:
        box.world.add("secure.example", 443, address)
        # On a busy machine the time may be over before the request has left for the server.
        for timeout in (0.5, 5.0, 50.0):
            began = time.monotonic()
            with pytest.raises(TimeoutError, match=rf"secure\.example:443 did not answer within {timeout:g} s"):
                ask(box, SECURE, timeout=timeout)
            assert time.monotonic() - began < timeout + 20
            if reached.is_set():
                break
        box.wait_rows(kind="egress_closed")


@pytest.mark.parametrize("url", [URL, SECURE])
def test_a_server_that_stalls_in_the_body_takes_the_requests_timeout(box: Box, trusted: Path, url: str) -> None:
    def serve(sock: socket.socket) -> None:
        with accept(sock, url, trusted) as sock:
            read_head(sock)
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello")
            sock.recv(1)

    with running(RawServer(serve)) as address:
        box.world.add("a.example", 80, address)
        box.world.add("secure.example", 443, address)
        with pytest.raises(TimeoutError, match="did not answer within 1 s"):
            ask(box, url, timeout=1)
        box.wait_rows(kind="egress_closed")


def test_no_proxy_of_the_environment_is_used(box: Box, web: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    box.world.add("a.example", 80, web.server_address)
    assert ask(box).status == 200
    box.set_grant(Grant(hosts=()))
    with pytest.raises(PolicyRefused):
        ask(box)
