"""Send one HTTP request through a sandbox's egress gate, from the host on behalf of the sandbox.

To the gate the request looks like one from a proxy client inside. The gate decides, looks up, dials and logs as for
any other connection. The server's response is hostile: it is limited in size and time, and parsed by the standard
library alone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import socket
import ssl
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from jupyter_agentbox.egress.gate import Gate
from jupyter_agentbox.egress.rules import normal_name
from jupyter_agentbox.errors import InvalidRequest, LinkClosed, PolicyRefused, RuntimeFailed
from jupyter_agentbox.models import HttpAnswer, HttpRequest
from jupyter_agentbox.sandbox.link.link import LinkThread

#: Concurrent requests of one sandbox, in a pool of their own: slow hosts block no other sandbox and not the server.
MAX_REQUESTS = 8
_WORKERS = ThreadPoolExecutor(8 * MAX_REQUESTS, thread_name_prefix="agentbox-fetch")
_requests: Counter[str] = Counter()
#: Prefix of the reason phrase in the gate's own responses.
_GATE = "agentbox: "
#: Headers that only this module sets.
_OWN_HEADERS = frozenset(
    {"host", "connection", "transfer-encoding", "content-length", "upgrade", "te", "trailer", "keep-alive", "expect"}
)


class _End:
    """The gate's end of a socket pair, with the interface of a stream from the guest."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.header: dict[str, Any] = {"kind": "tcp", "via": "http"}
        self._reader = reader
        self._writer = writer

    async def read(self) -> bytes:
        try:
            return await self._reader.read(64 * 1024)
        except OSError as error:
            raise LinkClosed(str(error)) from None

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise LinkClosed(str(error)) from None

    async def write_eof(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def reset(self, reason: str = "") -> None:
        self._writer.close()


async def _serve(gate: Gate, end: socket.socket) -> None:
    stream = _End(*await asyncio.open_unix_connection(sock=end))
    try:
        await gate.handle(stream)
    finally:
        stream.reset()


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
    scheme, host, port, target = _parse(request)
    if _requests[gate.sandbox_id] >= MAX_REQUESTS:
        raise PolicyRefused(f"{MAX_REQUESTS} requests of this sandbox are under way; wait for one of them")
    _requests[gate.sandbox_id] += 1
    try:
        return await _fetch(gate, request, scheme, host, port, target)
    finally:
        _requests.subtract([gate.sandbox_id])
        if not _requests[gate.sandbox_id]:
            del _requests[gate.sandbox_id]


async def _fetch(gate: Gate, request: HttpRequest, scheme: str, host: str, port: int, target: str) -> HttpAnswer:
    ours, theirs = socket.socketpair()
    ours.settimeout(request.timeout)
    theirs.setblocking(False)
    guard = ours.dup()
    serving = LinkThread.instance().submit(_serve(gate, theirs))
    work = asyncio.get_running_loop().run_in_executor(_WORKERS, _exchange, ours, request, scheme, host, port, target)
    try:
        done, _ = await asyncio.wait([work], timeout=request.timeout)
        if not done:
            raise TimeoutError(f"{host}:{port} did not answer within {request.timeout:g} s")
        return work.result()
    except TimeoutError:
        raise TimeoutError(f"{host}:{port} did not answer within {request.timeout:g} s") from None
    finally:
        with contextlib.suppress(OSError):
            guard.shutdown(socket.SHUT_RDWR)  # wakes the reading thread, if there still is one
        guard.close()
        serving.cancel()
        if not work.done():
            work.add_done_callback(lambda future: future.exception())


def _parse(request: HttpRequest) -> tuple[str, str, int, str]:
    try:
        parts = urlsplit(request.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it is no http or https URL with a host")
        if parts.username is not None or parts.password is not None:
            raise ValueError("it holds a user name; send an Authorization header instead")
        host = normal_name(parts.hostname)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        target.encode("ascii")
    except UnicodeError:
        raise InvalidRequest("url: path and query must be percent-encoded", field="url") from None
    except ValueError as error:
        raise InvalidRequest(f"url: {error}", field="url") from None
    if any(not 0x21 <= ord(character) < 0x7F for character in target):
        raise InvalidRequest("url: path and query must be percent-encoded", field="url")
    for name in request.headers:
        if name.lower() in _OWN_HEADERS or name.lower().startswith("proxy-"):
            raise InvalidRequest(f"headers: {name!r:.100} can't be set", field="headers")
    if request.body and request.body_base64:
        raise InvalidRequest("give either body or body_base64, not both", field="body_base64")
    return parts.scheme, host, port, target


def _exchange(sock: socket.socket, request: HttpRequest, scheme: str, host: str, port: int, target: str) -> HttpAnswer:
    """Send the request over the socket and read the response. Blocks, at most until the guard shuts the socket down."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(host, port)
    try:
        connection.sock = sock
        shown = host if port == {"http": 80, "https": 443}[scheme] else f"{host}:{port}"
        if scheme == "https":
            connection.sock = sock = _tunnel(sock, host, port)
        else:
            target = f"http://{shown}{target}"
        body = request.body_base64 or request.body.encode()
        headers = {"Host": shown, "User-Agent": "jupyter-agentbox", "Accept": "*/*", "Connection": "close"}
        own = {name.lower() for name in request.headers}
        headers = {name: value for name, value in headers.items() if name.lower() not in own}
        try:
            connection.request(request.method, target, body or None, {**headers, **request.headers})
        except ValueError as error:
            raise InvalidRequest(f"headers: {error}", field="headers") from None
        with connection.getresponse() as response:
            _check_gate(response)
            data = response.read(request.max_bytes + 1)
        kept = data[: request.max_bytes]
        text, encoding = _text(kept)
        return HttpAnswer(
            status=response.status,
            reason=response.reason,
            headers=[(name, value) for name, value in response.getheaders()],
            body=text,
            encoding="base64" if encoding else "utf-8",
            truncated=len(data) > request.max_bytes,
            duration=time.monotonic() - began,
        )
    except ssl.SSLError as error:
        raise RuntimeFailed(f"TLS with {host}:{port} failed: {error.reason or error}") from None
    except TimeoutError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise RuntimeFailed(f"{host}:{port} ended the exchange early: {error!s:.200}") from None
    finally:
        connection.close()
        sock.close()


def _tunnel(sock: socket.socket, host: str, port: int) -> ssl.SSLSocket:
    sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
    with http.client.HTTPResponse(sock, method="CONNECT") as response:
        response.begin()
        _check_gate(response)
        if response.status != 200:
            raise RuntimeFailed(f"{host}:{port}: {response.status} {response.reason}")
    return ssl.create_default_context().wrap_socket(sock, server_hostname=host)


def _check_gate(response: http.client.HTTPResponse) -> None:
    """Raise the error that corresponds to a response of the gate itself."""
    if not response.reason.startswith(_GATE):
        return
    sentence = response.reason.removeprefix(_GATE)
    if response.status == 403:
        raise PolicyRefused(sentence, field="url", setting="Policy.allowed_hosts")
    if response.status == 400:
        raise InvalidRequest(sentence, field="url")
    if response.status == 504:
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
