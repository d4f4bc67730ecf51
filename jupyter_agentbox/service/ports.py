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
from collections.abc import AsyncIterator, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urljoin, urlsplit

import h11

from jupyter_agentbox.errors import InvalidRequest, LimitReached, LinkClosed
from jupyter_agentbox.sandbox.link.link import Stream
from jupyter_agentbox.sandbox.link.thread import on_link_thread
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import HOSTNAME

from .managed_sandbox import ManagedSandbox
from .refusals import Throttle

#: Maximum number of concurrent connections to the programs of one sandbox.
MAX_CONNECTIONS = 64
#: Limits on a response: seconds until it begins, interim responses before it, and bytes of its head.
HEAD_TIMEOUT, MAX_INTERIM, MAX_HEAD = 300.0, 8, 64 * 1024
#: Seconds for which an address opened in a browser is valid, and maximum number of valid addresses.
GRANT_LIFE, MAX_GRANTS = 12 * 3600.0, 1000

Answer: TypeAlias = "h11.Response | h11.InformationalResponse"

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
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", HOSTNAME})
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
        self._stream: Stream | None = None
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)
        self._leading = b""

    @on_link_thread
    async def __aenter__(self) -> Connection:
        if _connections[self._sandbox.id] >= MAX_CONNECTIONS:
            raise LimitReached(f"this sandbox's ports have {MAX_CONNECTIONS} open connections, the maximum; close some")
        self._stream = self._sandbox.open_stream({"kind": "connect", "port": self.port})
        _connections[self._sandbox.id] += 1
        return self

    @on_link_thread
    async def __aexit__(self, *_: object) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.reset()
            _connections[self._sandbox.id] -= 1
            if not _connections[self._sandbox.id]:
                del _connections[self._sandbox.id]

    @on_link_thread
    async def send(self, data: h11.Request | h11.Data | h11.EndOfMessage | bytes) -> None:
        """Send a part of the request, or bytes once upgraded, at the program's own pace. Raises LinkClosed."""
        assert self._stream is not None
        await self._stream.write(data if isinstance(data, bytes) else self._http.send(data) or b"")

    @on_link_thread
    async def read(self) -> bytes:
        """Return the next bytes of an upgraded connection, or ``b""`` at the end. Raises LinkClosed."""
        data, self._leading = self._leading, b""
        assert self._stream is not None
        return data or await self._stream.read()

    async def read_head(self) -> Answer:
        """Read the head of the response, which switches protocols if its status is 101.

        Raises
        ------
        LinkClosed
            No program listens on the port, or the response is not HTTP.
        TimeoutError
            No response came in time.
        """
        try:
            return await asyncio.wait_for(self._read_head(), HEAD_TIMEOUT)
        except asyncio.TimeoutError:
            raise TimeoutError(f"port {self.port} did not answer within {HEAD_TIMEOUT:g} s") from None
        except h11.RemoteProtocolError as error:
            raise LinkClosed(f"the response on port {self.port} is not valid HTTP/1.1: {error!s:.200}") from None
        except LinkClosed as error:
            raise LinkClosed(f"no response on port {self.port} of the sandbox: {error}") from None

    async def _read_head(self) -> Answer:
        for _ in range(MAX_INTERIM):
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self.read()
                if not data:
                    raise h11.RemoteProtocolError("the connection was closed before the response")
                self._http.receive_data(data)
            assert isinstance(event, h11.Response | h11.InformationalResponse)
            if len(values(event, b"content-length") + values(event, b"transfer-encoding")) > 1:
                raise h11.RemoteProtocolError("HTTP with both Content-Length and Transfer-Encoding")
            if not all(_VALUE.fullmatch(value.decode("latin-1")) for _, value in event.headers):
                raise h11.RemoteProtocolError("an HTTP header contains control characters")
            if event.status_code >= 200 or event.status_code == 101:
                self._leading = self._http.trailing_data[0] if event.status_code == 101 else b""
                return event
        raise h11.RemoteProtocolError("too many interim responses")

    async def read_body(self) -> AsyncIterator[bytes]:
        """Yield the body of the response, without its framing. Raises LinkClosed."""
        data = bytearray()
        try:
            while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Data):
                    data += event.data  # many small chunks are one piece
                    continue
                if data:
                    yield bytes(data)
                    data.clear()
                self._http.receive_data(await self.read())
        except h11.RemoteProtocolError as error:
            raise LinkClosed(f"the response on port {self.port} is not valid HTTP/1.1: {error!s:.200}") from None
        if data:
            yield bytes(data)


def values(answer: Answer, name: bytes) -> list[str]:
    """Return the values of all header lines with this lower-case name."""
    return [value.decode("latin-1") for key, value in answer.headers if key == name]


# -- HTTP filter ---------------------------------------------------------------------------------------


def inner_request(
    method: str, target: str, headers: Iterable[tuple[str, str]], port: int, *, is_socket: bool = False
) -> h11.Request:
    """Return the request to send inside. Only headers known to be harmless are included, so no credentials.

    Raises
    ------
    InvalidRequest
        The target or a header contains characters that HTTP does not allow.
    """
    if not _TARGET.fullmatch(target):
        raise InvalidRequest("the path has characters that are not allowed in an HTTP request")
    lines = [("Host", f"localhost:{port}")]
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
            lines.append((name, value.strip(" \t")))
    length = next((value for name, value in headers if name.lower() == "content-length"), "")
    if length.isdigit():
        lines.append(("Content-Length", length))
    elif any(name.lower() == "transfer-encoding" for name, _ in headers):
        lines.append(("Transfer-Encoding", "chunked"))
    lines += [("Connection", "Upgrade"), ("Upgrade", "websocket")] if is_socket else [("Connection", "close")]
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
    try:
        return h11.Request(method=method, target=target, headers=encoded)
    except h11.LocalProtocolError as error:
        raise InvalidRequest(str(error)) from None


def answer_head(
    answer: h11.Response, *, is_chunked: bool, prefix: str, target: str, port: int, host: str, is_shared: bool
) -> bytes:
    """Return the response head to send to the client.

    Parameters
    ----------
    answer : h11.Response
        The head of the response from inside.
    is_chunked : bool
        Whether the body is sent in chunks. Otherwise its length is known, or it ends with the connection.
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

    lines = [f"HTTP/1.1 {answer.status_code} {responses.get(answer.status_code, 'Unknown')}"]
    lines += _fields(answer, _RESPONSE_HEADERS)
    for value in values(answer, b"location")[:1]:
        lines.append(f"Location: {_location(value, prefix, target, port)}")
    if is_chunked:
        lines.append("Transfer-Encoding: chunked")
    elif answer.status_code != 204:
        lines += _fields(answer, {"content-length"})
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


def socket_head(answer: h11.InformationalResponse) -> bytes:
    """Return the head that tells the client that its websocket is open. Raises LinkClosed."""
    if [value.lower() for value in values(answer, b"upgrade")] != ["websocket"]:
        raise LinkClosed("the program on this port did not accept a websocket")
    lines = ["HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", "Upgrade: websocket"]
    return ("\r\n".join(lines + _fields(answer, _ACCEPT_HEADERS)) + "\r\n\r\n").encode("latin-1")


def _fields(answer: Answer, names: Set[str]) -> list[str]:
    lines = ((name.decode(), value.decode("latin-1")) for name, value in answer.headers)
    return [f"{name.title()}: {value}" for name, value in lines if name in names]


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
