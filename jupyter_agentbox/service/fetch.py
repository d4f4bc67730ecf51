"""Send one HTTP request through a sandbox's egress gate, from the host on behalf of the sandbox.

To the gate the request looks like one from a proxy client inside. The gate decides, looks up, dials and logs as for
any other connection. The server's response is hostile: it is limited in size and time, and never decompressed.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpcore

from jupyter_agentbox.egress.gate import Gate
from jupyter_agentbox.egress.http1 import GATE_PREFIX
from jupyter_agentbox.egress.rules import BLOCKED, normal_name
from jupyter_agentbox.errors import InvalidRequest, PolicyRefused, RuntimeFailed
from jupyter_agentbox.models import HttpAnswer, HttpRequest
from jupyter_agentbox.sandbox.link.link import LinkThread

#: Maximum number of concurrent requests of one sandbox.
MAX_REQUESTS = 8
_requests: Counter[str] = Counter()
#: Headers that only this module sets.
_OWN_HEADERS = frozenset(
    {"host", "connection", "transfer-encoding", "content-length", "upgrade", "te", "trailer", "keep-alive", "expect"}
)


class _Pipe(httpcore.AsyncNetworkStream):
    """An end of a socket pair between client and gate. To the gate it is a stream from the guest.

    The timeout of the whole request bounds its reads and writes.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.header: dict[str, Any] = {"kind": "tcp", "via": "http"}
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int = 64 * 1024, timeout: float | None = None) -> bytes:
        return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._writer.write(buffer)
        await self._writer.drain()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> _Pipe:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        plain, host = self._writer, server_hostname
        transport = await loop.start_tls(
            plain.transport, protocol, ssl_context, server_hostname=host, ssl_handshake_timeout=timeout
        )
        assert transport is not None
        protocol.connection_made(transport)
        self._plain = plain  # a writer closes its transport when it is deleted
        self._reader, self._writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        return self

    async def write_eof(self) -> None:
        self._writer.write_eof()

    def reset(self, reason: str = "") -> None:
        self._writer.close()

    async def aclose(self) -> None:
        self._writer.transport.abort()
        self._writer.close()


class _Network(httpcore.AsyncNetworkBackend):
    """Network in which every connection leads to the gate, which the link thread serves."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.serving: list[Future[None]] = []

    async def connect_tcp(self, *_: Any, **__: Any) -> _Pipe:
        ours, theirs = socket.socketpair()
        self.serving.append(LinkThread.instance().submit(self._serve(theirs)))
        return _Pipe(*await asyncio.open_unix_connection(sock=ours))

    async def _serve(self, end: socket.socket) -> None:
        await self._gate.handle(_Pipe(*await asyncio.open_unix_connection(sock=end)))


async def fetch(gate: Gate, request: HttpRequest) -> HttpAnswer:
    """Send a request and return the response. May be awaited on any event loop.

    Raises
    ------
    InvalidRequest
        The request is malformed and cannot be sent.
    PolicyRefused
        The gate refused it, with the gate's message, or the sandbox has reached its limit of concurrent requests.
    RuntimeFailed
        The server was not reached, or its response is not HTTP.
    TimeoutError
    """
    url = _parse(request)
    peer = f"{url.host.decode()}:{url.origin.port}"
    if _requests[gate.sandbox_id] >= MAX_REQUESTS:
        raise PolicyRefused(f"this sandbox has {MAX_REQUESTS} requests in progress, the maximum; wait for one to end")
    _requests[gate.sandbox_id] += 1
    network = _Network(gate)
    try:
        return await asyncio.wait_for(_exchange(network, request, url), request.timeout)
    except (TimeoutError, asyncio.TimeoutError) as error:
        raise TimeoutError(str(error) or f"{peer} did not answer within {request.timeout:g} s") from None
    except httpcore.ProxyError as error:
        status, _, reason = str(error).partition(" ")
        _check_gate(int(status), reason)
        raise RuntimeFailed(f"{peer}: {error}") from None
    except httpcore.LocalProtocolError as error:
        raise InvalidRequest(f"headers: {error}", field="headers") from None
    except ssl.SSLError as error:
        raise RuntimeFailed(f"TLS with {peer} failed: {error.reason or error}") from None
    except (OSError, httpcore.NetworkError, httpcore.ProtocolError) as error:
        raise RuntimeFailed(f"{peer} closed the connection early: {error!s:.200}") from None
    finally:
        for serving in network.serving:
            serving.cancel()
        _requests.subtract([gate.sandbox_id])
        if not _requests[gate.sandbox_id]:
            del _requests[gate.sandbox_id]


def _parse(request: HttpRequest) -> httpcore.URL:
    try:
        parts = urlsplit(request.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http or https URL with a host")
        if parts.username is not None or parts.password is not None:
            raise ValueError("must not contain a user name; send an Authorization header instead")
        host = normal_name(parts.hostname)
        port = parts.port
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
    except ValueError as error:
        raise InvalidRequest(f"url: {error}", field="url") from None
    if any(not 0x21 <= ord(character) < 0x7F for character in target):
        raise InvalidRequest("url: path and query must be percent-encoded", field="url")
    for name in request.headers:
        if name.lower() in _OWN_HEADERS or name.lower().startswith("proxy-"):
            raise InvalidRequest(f"headers: {name!r:.100} must not be set", field="headers")
    if request.body and request.body_base64:
        raise InvalidRequest("give either body or body_base64, not both", field="body_base64")
    if port == {"http": 80, "https": 443}[parts.scheme]:
        port = None
    return httpcore.URL(scheme=parts.scheme, host=host, port=port or None, target=target)


async def _exchange(network: _Network, request: HttpRequest, url: httpcore.URL) -> HttpAnswer:
    began = time.monotonic()
    host = url.host if url.port is None else b"%b:%d" % (url.host, url.port)
    own = {"Host": host, "User-Agent": b"jupyter-agentbox", "Accept": b"*/*", "Connection": b"close"}
    given = {name.lower() for name in request.headers}
    headers = [(name.encode(), value) for name, value in own.items() if name.lower() not in given]
    try:
        headers += [(name.encode("ascii"), value.strip().encode("latin-1")) for name, value in request.headers.items()]
    except UnicodeError as error:
        raise InvalidRequest(f"headers: {error}", field="headers") from None
    body = request.body_base64 or request.body.encode()
    content = body if body or request.method in ("POST", "PUT", "PATCH") else None
    context = ssl.create_default_context() if url.scheme == b"https" else None
    timeouts = {"timeout": {"connect": request.timeout}}
    data = bytearray()
    async with (
        httpcore.AsyncHTTPProxy("http://gate", ssl_context=context, network_backend=network) as proxy,
        proxy.stream(request.method, url, headers=headers, content=content, extensions=timeouts) as response,
    ):
        reason = response.extensions["reason_phrase"].decode("latin-1")
        if url.scheme == b"http":
            _check_gate(response.status, reason)
        async for piece in response.aiter_stream():
            data += piece
            if len(data) > request.max_bytes:
                break
    text, is_encoded = _text(bytes(data[: request.max_bytes]))
    return HttpAnswer(
        status=response.status,
        reason=reason,
        headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers],
        body=text,
        encoding="base64" if is_encoded else "utf-8",
        truncated=len(data) > request.max_bytes,
        duration=time.monotonic() - began,
    )


def _check_gate(status: int, reason: str) -> None:
    """Raise the error that corresponds to a response of the gate itself."""
    if not reason.startswith((GATE_PREFIX, BLOCKED)):
        return
    sentence = reason.removeprefix(GATE_PREFIX)
    if status == 403:
        raise PolicyRefused(sentence, field="url", setting="Policy.allowed_hosts")
    if status == 400:
        raise InvalidRequest(sentence, field="url")
    if status == 504:
        raise TimeoutError(sentence)
    raise RuntimeFailed(sentence)


def _text(data: bytes) -> tuple[str, bool]:
    """Return bytes as text, or base64-encoded if they are not valid UTF-8, and whether they were encoded."""
    try:
        return data.decode(), False
    except UnicodeDecodeError as error:
        if error.end >= len(data) and error.reason == "unexpected end of data":
            return data[: error.start].decode(), False  # truncated in the middle of a character
        return base64.b64encode(data).decode(), True
