"""Responses of programs inside, which may be anything: what is read of them, and what is sent to the client."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
import pytest

from jupyter_agentbox.errors import InvalidRequest, LinkClosed
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.service import ports
from jupyter_agentbox.service.ports import Connection, answer_head, inner_request, socket_head


class Program:
    """Sandbox with a program that answers with fixed pieces, and then ends the connection."""

    id = "sandbox"

    def __init__(self, *pieces: bytes) -> None:
        self.got = b""
        self._pieces = list(pieces)

    def open_stream(self, header: dict[str, Any]) -> Program:
        return self

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def write(self, data: bytes) -> None:
        self.got += data

    def reset(self, reason: str = "") -> None:
        pass


def exchange(*pieces: bytes, method: str = "GET", is_socket: bool = False) -> tuple[bytes, bytes]:
    """Return the head for a client of HTTP/1.1 whose response is not chunked, and the body or the raw bytes."""

    async def run() -> tuple[bytes, bytes]:
        async with Connection(cast(Sandbox, Program(*pieces)), 80) as connection:
            await connection.send(inner_request(method, "/", [], 80, is_socket=is_socket))
            await connection.send(h11.EndOfMessage())
            answer = await connection.read_head()
            if isinstance(answer, h11.InformationalResponse):
                return socket_head(answer), await connection.read() + await connection.read()
            head = answer_head(
                answer, is_chunked=False, prefix="/p", target="/", port=80, host="localhost", is_shared=False
            )
            return head, b"".join([piece async for piece in connection.read_body()])

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "length", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"5", b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nheHTTP/1.1 200 OK\r\n\r\nllo", b"2", b"he"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nhello", b"2", b"he"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", None, b"hello"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello", None, b"hello"),
        (b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n3  \r\nhel\r\n2;x=y\r\nlo\r\n0\r\n\r\nmore", None, b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding:\r\n chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\r\n\r\n", None, b"hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 99 + b"0\r\n\r\n", None, b"x" * 99),
        (b"HTTP/1.1 102 Wait\r\n\r\n" * 7 + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"5", b"hello"),
        (b"HTTP/1.1 204 None\r\nContent-Length: 5\r\n\r\nhello", None, b""),
        (b"HTTP/1.1 304 Same\r\nContent-Length: 5\r\n\r\nhello", b"5", b""),
    ],
)
def test_framing_of_a_response_is_not_passed_on(answer: bytes, length: bytes | None, body: bytes) -> None:
    for pieces in ([answer], [answer[place : place + 1] for place in range(len(answer))]):
        head, got = exchange(*pieces)
        assert got == body
        assert b"transfer-encoding" not in head.lower()
        assert (b"Content-Length: %b\r\n" % (length or b"")) in head if length else b"Content-Length" not in head


def test_a_head_has_its_length_and_no_body() -> None:
    head, body = exchange(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", method="HEAD")
    assert (b"Content-Length: 5\r\n" in head, body) == (True, b"")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nETag: a\rSet-Cookie: b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nETag: a\x01\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nETag : a\r\n\r\n",
        b"HTTP/1.1 101 Switch\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 102 Wait\r\n\r\n" * 8 + b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
        b"SSH-2.0-OpenSSH\r\n",
    ],
)
def test_what_is_not_http_is_said(answer: bytes) -> None:
    with pytest.raises(LinkClosed, match=r"the response on port 80 is not valid HTTP/1\.1: "):
        exchange(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"Content-Length: 9\r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello more\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + b"5" * 21 + b"\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 20_000,
    ],
)
def test_a_body_that_does_not_end_is_an_error(answer: bytes) -> None:
    with pytest.raises(LinkClosed, match=r"the response on port 80 is not valid HTTP/1\.1: "):
        exchange(b"HTTP/1.1 200 OK\r\n" + answer)


def test_what_follows_an_upgrade_is_carried_as_it_is() -> None:
    answer = b"HTTP/1.1 101 Switch\r\nUpgrade: WebSocket\r\nSet-Cookie: a\r\nSec-WebSocket-Accept: b\r\n\r\nHTTP/1.1 "
    for pieces in ([answer, b"more"], [answer + b"more"]):
        head, got = exchange(*pieces, is_socket=True)
        assert (b"Accept: b" in head, b"Cookie" in head, got) == (True, False, b"HTTP/1.1 more")
    with pytest.raises(LinkClosed, match="did not accept a websocket"):
        exchange(b"HTTP/1.1 101 Switch\r\nUpgrade: h2c\r\n\r\n", is_socket=True)
    assert exchange(b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno", is_socket=True)[1] == b"no"


def test_no_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "HEAD_TIMEOUT", 0.1)
    monkeypatch.setattr(Program, "read", lambda self: asyncio.sleep(60))
    with pytest.raises(TimeoutError, match=r"port 80 did not answer within 0\.1 s"):
        exchange()


def test_requests_are_framed_anew() -> None:
    async def run(*headers: tuple[str, str]) -> bytes:
        program = Program()
        async with Connection(cast(Sandbox, program), 80) as connection:
            await connection.send(inner_request("POST", "/x", [*headers, ("Cookie", "a")], 80))
            await connection.send(h11.Data(data=b"hello"))
            await connection.send(h11.EndOfMessage())
        return program.got

    head = b"POST /x HTTP/1.1\r\nHost: localhost:80\r\n"
    assert asyncio.run(run(("Content-Length", "5"))) == head + b"Content-Length: 5\r\nConnection: close\r\n\r\nhello"
    assert asyncio.run(run(("Transfer-Encoding", "x"), ("ETag", "a"))) == (
        head + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    )
    for target, value in (("/a b", "x"), ("//\r\nX: y", "x"), ("/", "a\rb"), ("/", "a\x01"), ("/", "\u20ac")):
        with pytest.raises(InvalidRequest):
            inner_request("GET", target, [("Accept", value)], 80)
    with pytest.raises(InvalidRequest):
        inner_request("GET", "/", [("Content-Length", "9" * 30)], 80)
