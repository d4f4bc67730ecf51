"""Connect to programs inside that listen on a TCP port, and filter the HTTP that may pass in each direction.

A response from inside is a page of hostile code, served from the Jupyter server's own address. Both directions
therefore use an allow-list: no credential of the server goes in, no cookie comes out, and a page runs without the
server's origin. ``api.ports`` is the HTTP side.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

from jupyter_agentbox.egress.http1 import BodyReader, Framing, find_head, parse_response
from jupyter_agentbox.egress.wire import WireError
from jupyter_agentbox.errors import InvalidRequest, LimitReached, LinkClosed
from jupyter_agentbox.sandbox.link.link import LinkThread, Stream
from jupyter_agentbox.sandbox.sandbox import Sandbox

from .managed_sandbox import ManagedSandbox
from .refusals import Throttle

#: Maximum number of concurrent connections to the programs of one sandbox.
MAX_CONNECTIONS = 64
#: Seconds for a program to begin its response, and maximum number of interim responses before it.
HEAD_TIMEOUT, MAX_INTERIM = 300.0, 8
#: Seconds for which an address opened in a browser is valid, and maximum number of valid addresses.
GRANT_LIFE, MAX_GRANTS = 12 * 3600.0, 1000

Headers = list[tuple[str, str]]

_REQUEST_HEADERS = frozenset(
    {
        "accept", "accept-encoding", "accept-language", "cache-control", "content-encoding", "content-language",
        "content-type", "if-match", "if-modified-since", "if-none-match", "if-range", "if-unmodified-since",
        "last-event-id", "pragma", "range", "user-agent", "x-requested-with",
    }
)  # fmt: skip
_SOCKET_HEADERS = frozenset({"sec-websocket-extensions", "sec-websocket-key", "sec-websocket-version"})
_RESPONSE_HEADERS = frozenset(
    {
        "accept-ranges", "allow", "content-disposition", "content-encoding", "content-language", "content-range",
        "content-type", "etag", "last-modified", "retry-after", "vary",
    }
)  # fmt: skip
_ACCEPT_HEADERS = frozenset({"sec-websocket-accept", "sec-websocket-extensions", "sec-websocket-protocol"})
_LOCAL = frozenset({"localhost", "127.0.0.1", "0.0.0.0"})
_VALUE = re.compile(r"[\t \x21-\x7e\x80-\xff]*")
_TARGET = re.compile(r"/[\x21-\x7e]*")
_HOST = re.compile(r"[A-Za-z0-9.-]+(:[0-9]{1,5})?|\[[0-9a-fA-F:]+\](:[0-9]{1,5})?")
_connections: Counter[str] = Counter()


class Connection:
    """One TCP connection to a port inside. Its coroutines may be awaited on any event loop.

    Use it as a context manager. It counts towards the sandbox's limit until it is closed.
    """

    def __init__(self, sandbox: Sandbox, port: int) -> None:
        self.port = port
        self._sandbox = sandbox
        self._thread = LinkThread.instance()
        self._stream: Stream | None = None
        self._buffer = bytearray()

    async def __aenter__(self) -> Connection:
        await self._thread.run(self._open())
        return self

    async def _open(self) -> None:
        if _connections[self._sandbox.id] >= MAX_CONNECTIONS:
            raise LimitReached(f"this sandbox's ports have {MAX_CONNECTIONS} open connections, the maximum; close some")
        self._stream = self._sandbox.open_stream({"kind": "connect", "port": self.port})
        _connections[self._sandbox.id] += 1

    async def __aexit__(self, *_: object) -> None:
        await self._thread.run(self._close())

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.reset()
            _connections[self._sandbox.id] -= 1
            if not _connections[self._sandbox.id]:
                del _connections[self._sandbox.id]

    async def write(self, data: bytes) -> None:
        """Send bytes, at the pace at which the program reads them. Raises LinkClosed."""
        assert self._stream is not None
        await self._thread.run(self._stream.write(data))

    async def read(self) -> bytes:
        """Return the next bytes, or ``b""`` at the end. Raises LinkClosed."""
        if self._buffer:
            data, self._buffer = bytes(self._buffer), bytearray()
            return data
        assert self._stream is not None
        return await self._thread.run(self._stream.read())

    async def read_head(self, method: str) -> Answer:
        """Read the head of the response to a request with this method.

        Raises
        ------
        LinkClosed
            No program listens on the port, or the response is not HTTP.
        TimeoutError
            No response came in time.
        """
        try:
            return await asyncio.wait_for(self._read_head(method), HEAD_TIMEOUT)
        except asyncio.TimeoutError:
            raise TimeoutError(f"port {self.port} did not answer within {HEAD_TIMEOUT:g} s") from None
        except WireError as error:
            raise LinkClosed(f"the response on port {self.port} is not valid HTTP/1.1: {error}") from None
        except LinkClosed as error:
            raise LinkClosed(f"no response on port {self.port} of the sandbox: {error}") from None

    async def _read_head(self, method: str) -> Answer:
        assert self._stream is not None
        for _ in range(MAX_INTERIM):
            known = 0
            while (size := find_head(self._buffer, known)) is None:
                known = len(self._buffer)
                data = await self._thread.run(self._stream.read())
                if not data:
                    raise WireError("the connection was closed before the response")
                self._buffer += data
            head = bytes(self._buffer[:size])
            del self._buffer[:size]
            response = parse_response(head, method)
            if response.status >= 200 or response.status == 101:
                return Answer(response.status, _fields(head), response.framing)
        raise WireError("too many interim responses")

    async def read_body(self, reader: BodyReader) -> bytes:
        """Return the next bytes of a body as received, or ``b""`` when it is complete. Raises LinkClosed."""
        if reader.is_done:
            return b""
        data = await self.read()
        try:
            piece = data[: reader.feed(data)]
        except WireError as error:
            raise LinkClosed(f"the response on port {self.port} is not valid HTTP/1.1: {error}") from None
        if not data and not reader.ends_with_connection:
            raise LinkClosed(f"the response on port {self.port} was incomplete")
        return piece


@dataclass(frozen=True)
class Answer:
    """The head of a response from inside."""

    status: int
    headers: Headers
    framing: Framing

    def values(self, name: str) -> list[str]:
        """Return the values of all header lines with this name."""
        return [value for key, value in self.headers if key == name]


def _fields(head: bytes) -> Headers:
    lines = head[:-4].decode("latin-1").split("\r\n")[1:]
    parts = (line.partition(":") for line in lines)
    return [(name.lower(), value.strip(" \t")) for name, _, value in parts]


# -- HTTP filter ---------------------------------------------------------------------------------------


def request_head(
    method: str, target: str, headers: Iterable[tuple[str, str]], port: int, *, is_socket: bool = False
) -> bytes:
    """Return the request head to send inside. Only headers known to be harmless are included, so no credentials.

    Raises
    ------
    InvalidRequest
        The target or a header contains characters that HTTP does not allow.
    """
    if not _TARGET.fullmatch(target):
        raise InvalidRequest("the path has characters that are not allowed in an HTTP request")
    lines = [f"{method} {target} HTTP/1.1", f"Host: localhost:{port}"]
    known = _REQUEST_HEADERS | _SOCKET_HEADERS if is_socket else _REQUEST_HEADERS
    for name, value in headers:
        low = name.lower()
        if low == "origin":
            value = f"http://localhost:{port}"  # programs compare it with Host
        elif low == "sec-websocket-protocol" and is_socket:
            value = ", ".join(word for word in re.split(r"[,\s]+", value) if not word.startswith("agentbox"))
        elif low not in known:
            continue
        if not _VALUE.fullmatch(value):
            raise InvalidRequest(f"the header {name[:50]} contains control characters")
        if value:
            lines.append(f"{name}: {value}")
    length = next((value for name, value in headers if name.lower() == "content-length"), "")
    if length.isdigit():
        lines.append(f"Content-Length: {length}")
    elif any(name.lower() == "transfer-encoding" for name, _ in headers):
        lines.append("Transfer-Encoding: chunked")
    lines += ["Connection: Upgrade", "Upgrade: websocket"] if is_socket else ["Connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def answer_head(answer: Answer, *, prefix: str, target: str, port: int, host: str, is_shared: bool) -> bytes:
    """Return the response head to send to the client.

    Parameters
    ----------
    answer : Answer
        The head of the response from inside.
    prefix : str
        Path of the port on this server, without a trailing slash.
    target : str
        The target of the request inside.
    port : int
    host : str
        The server's host name, as the client sent it.
    is_shared : bool
        Whether the address itself is the credential. A page without an origin may then read the response.

    Raises
    ------
    LinkClosed
        The response redirects to another server or port.
    """
    from http.client import responses

    lines = [f"HTTP/1.1 {answer.status} {responses.get(answer.status, 'Unknown')}"]
    lines += [f"{name.title()}: {value}" for name, value in answer.headers if name in _RESPONSE_HEADERS]
    for value in answer.values("location")[:1]:
        lines.append(f"Location: {_location(value, prefix, target, port)}")
    if answer.framing.is_chunked:
        lines.append("Transfer-Encoding: chunked")
    elif not answer.framing.is_until_close:
        lines += [f"Content-Length: {value}" for value in answer.values("content-length")]
    if is_shared:
        lines.append("Access-Control-Allow-Origin: *")
    lines += [
        f"Content-Security-Policy: {security_policy(host)}",
        "Cache-Control: no-store",
        "Referrer-Policy: no-referrer",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def socket_head(answer: Answer) -> bytes:
    """Return the head that tells the client that its websocket is open. Raises LinkClosed."""
    if answer.status != 101 or [value.lower() for value in answer.values("upgrade")] != ["websocket"]:
        raise LinkClosed("the program on this port did not accept a websocket")
    lines = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket"]
    lines += [f"{name.title()}: {value}" for name, value in answer.headers if name in _ACCEPT_HEADERS]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def security_policy(host: str) -> str:
    """Return the security policy for a page from inside: it runs without an origin and loads from its own server."""
    own = f"{host} ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    return (
        "sandbox allow-scripts allow-forms allow-modals allow-downloads; "
        f"default-src 'self' {own} data: blob: 'unsafe-inline' 'unsafe-eval'; "
        f"form-action 'self' {own}; frame-ancestors 'self'; base-uri 'self' {own}; object-src 'none'"
    )


def _location(value: str, prefix: str, target: str, port: int) -> str:
    """Translate a redirect of a program inside into the corresponding address on this server."""
    try:
        found = urlsplit(urljoin(f"http://localhost:{port}{target}", value))
        is_own = found.scheme == "http" and found.hostname in _LOCAL and (found.port or 80) == port
    except ValueError:
        is_own = False
    if not is_own or not _TARGET.fullmatch(found.path or "/") or "\\" in value:
        raise LinkClosed(f"port {port} of the sandbox redirects to another server or port: {value!r:.200}")
    return prefix + found._replace(scheme="", netloc="", path=found.path or "/").geturl()


# -- addresses for browsers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class PortGrant:
    """Permission for one port by an address that is its own credential: a page without an origin sends no cookie."""

    managed: ManagedSandbox
    sandbox_id: str
    port: int
    expires: float
    who: Mapping[str, Any]


class PortGrants:
    """The addresses that were opened in browsers. They are lost when the server ends."""

    def __init__(self) -> None:
        self._grants: dict[str, PortGrant] = {}
        #: Limits the audit log to one row a minute for each visitor and port.
        self.visits = Throttle(1, 60.0)

    def make(self, managed: ManagedSandbox, sandbox_id: str, port: int, who: Mapping[str, Any]) -> str:
        """Return the key for a port's address. The same caller gets the same key until half its life has passed."""
        now = time.monotonic()
        for key, grant in list(self._grants.items()):
            if grant.expires < now or grant.managed.state == "ended":
                del self._grants[key]
            elif (grant.managed, grant.sandbox_id, grant.port, grant.who) == (managed, sandbox_id, port, who) and (
                grant.expires > now + GRANT_LIFE / 2
            ):
                return key
        while len(self._grants) >= MAX_GRANTS:
            del self._grants[next(iter(self._grants))]
        key = secrets.token_urlsafe(24)
        self._grants[key] = PortGrant(managed, sandbox_id, port, now + GRANT_LIFE, who)
        return key

    def find(self, key: str, sandbox_id: str, port: int) -> PortGrant | None:
        """Return the permission that a key stands for, or None."""
        grant = self._grants.get(key)
        if grant is None or grant.expires < time.monotonic() or (grant.sandbox_id, grant.port) != (sandbox_id, port):
            return None
        return grant
