"""Parse and write HTTP/1.1 as a strict proxy: heads, body framing, refusals. Pure functions.

Input that two programs might interpret differently is refused, not repaired: a Content-Length with a
Transfer-Encoding, two lengths, folded lines, bare line feeds, spaces before a colon, control characters, malformed
chunks. This prevents smuggling a second request past the check of the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .rules import BLOCKED, printable
from .wire import WireError

#: Largest head in bytes, and maximum number of header lines.
MAX_HEAD = 64 * 1024
MAX_LINES = 256

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.ASCII)
_VALUE = re.compile(r"[\t \x21-\x7e\x80-\xff]*")
_TARGET = re.compile(r"[\x21-\x7e\x80-\xff]+")
_AUTHORITY = re.compile(r"(?P<host>\[[^\]]*\]|[^:@/?#\[\]\\]*)(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_PERSISTENCE = re.compile(rb"\r\n(?:(?:proxy-)?connection|keep-alive):[^\r]*", re.IGNORECASE)
_HOP_BY_HOP = frozenset(
    {
        "connection", "http2-settings", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection",
        "te", "trailer", "upgrade",
    }
)  # fmt: skip
#: Headers that determine the target or the framing. Naming them in Connection must not remove them.
_ESSENTIAL = frozenset({"host", "content-length", "transfer-encoding"})

Headers = list[tuple[str, str]]


@dataclass
class Framing:
    """How a body ends: after ``length`` bytes, with the last chunk, or when the connection closes."""

    length: int = 0
    is_chunked: bool = False
    is_until_close: bool = False


@dataclass
class Request:
    """Request head.

    Parameters
    ----------
    method, target, version : str
        The request line; ``version`` is ``1.0`` or ``1.1``.
    headers : list of (str, str)
        Header lines in order.
    framing : Framing
        Framing of the body.
    """

    method: str
    target: str
    version: str
    headers: Headers
    framing: Framing = field(default_factory=Framing)

    def values(self, name: str) -> list[str]:
        """Return the values of all header lines with this lower-case name."""
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def is_upgrade(self) -> bool:
        """Whether the request asks to upgrade to a websocket.

        Other upgrades are not passed on, because the requests inside an HTTP/2 connection could not be checked.
        """
        return "upgrade" in _tokens(self.headers, "connection") and _tokens(self.headers, "upgrade") == {"websocket"}

    @property
    def is_last(self) -> bool:
        """Whether the client asks to close the connection after the answer."""
        options = _tokens(self.headers, "connection") | _tokens(self.headers, "proxy-connection")
        return "close" in options or (self.version == "1.0" and "keep-alive" not in options)


@dataclass
class Response:
    """Response head; ``raw`` is the form in which it is sent to the client."""

    status: int
    raw: bytes
    framing: Framing
    is_last: bool


def find_head(data: bytes | bytearray, known: int = 0) -> int | None:
    """Return the size of the head at the start of ``data``, or None while it is incomplete.

    The first ``known`` bytes were searched before and are skipped. Otherwise a head that arrives in tiny pieces would
    take quadratic time.
    """
    end = data.find(b"\r\n\r\n", max(0, known - 3), MAX_HEAD)
    if end < 0:
        if len(data) >= MAX_HEAD:
            raise WireError("the HTTP head is too long")
        # A client that ends lines with a bare line feed would wait here until the timeout.
        if _BARE_LINE_FEED.search(data, known):
            raise WireError("an HTTP line ends with a bare line feed")
        return None
    return end + 4


def _lines(head: bytes) -> tuple[str, Headers]:
    first, *rest = head[:-4].decode("latin-1").split("\r\n")
    if len(rest) > MAX_LINES:
        raise WireError("the HTTP head has too many lines")
    headers = []
    for line in rest:
        if line[:1] in (" ", "\t"):
            raise WireError("an HTTP header is folded")
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name):
            raise WireError("an HTTP header has an invalid name")
        if not _VALUE.fullmatch(value):
            raise WireError("an HTTP header contains control characters")
        headers.append((name, value.strip(" \t")))
    return first, headers


def _tokens(headers: Headers, name: str) -> set[str]:
    return {part.strip().lower() for key, value in headers if key.lower() == name for part in value.split(",")} - {""}


def _framing(headers: Headers, version: str) -> Framing | None:
    lengths = [value for key, value in headers if key.lower() == "content-length"]
    codings = [value.lower() for key, value in headers if key.lower() == "transfer-encoding"]
    if lengths and codings:
        raise WireError("an HTTP message has both Content-Length and Transfer-Encoding")
    if codings:
        if codings != ["chunked"] or version != "1.1":
            raise WireError("an HTTP message has a transfer encoding other than chunked")
        return Framing(is_chunked=True)
    if lengths:
        if len(lengths) > 1 or not re.fullmatch(r"[0-9]{1,18}", lengths[0], re.ASCII):
            raise WireError("an HTTP message has an invalid Content-Length")
        return Framing(length=int(lengths[0]))
    return None


def parse_request(head: bytes) -> Request:
    """Parse a request head that :func:`find_head` has found."""
    line, headers = _lines(head)
    parts = line.split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise WireError("it is not a valid HTTP request")
    if parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise WireError("the HTTP version is not supported")
    version = parts[2][5:]
    request = Request(parts[0], parts[1], version, headers, _framing(headers, version) or Framing())
    hosts = request.values("host")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise WireError("an HTTP request must have exactly one Host header")
    return request


def split_authority(text: str, default_port: int) -> tuple[str, int]:
    """Split ``host:port``. Brackets are kept, so that an address is recognized as one."""
    match = _AUTHORITY.fullmatch(text)
    port = int(match["port"] or default_port) if match else 0
    # Bytes beyond ASCII were decoded as Latin-1, so the lookup would be for a name other than the client's.
    if match is None or not match["host"] or not match["host"].isascii() or not 0 < port <= 65535:
        raise WireError("an HTTP request has an invalid host")
    return match["host"], port


def split_url(target: str) -> tuple[str, int, str]:
    """Split an absolute ``http`` URL into host, port and origin form. A URL with a user name is refused."""
    if not target.lower().startswith("http://"):
        raise WireError("a proxied URL must start with http://")
    rest = target[7:]
    end = min((rest.find(c) for c in "/?#" if c in rest), default=len(rest))
    host, port = split_authority(rest[:end], 80)
    path = rest[end:].partition("#")[0]
    return host, port, path if path.startswith("/") else "/" + path


def forwarded(request: Request, target: str, authority: str) -> bytes:
    """Return the head to send to the server: origin form, a new Host header, no headers meant for the proxy."""
    named = _tokens(request.headers, "connection") - _ESSENTIAL
    lines = [f"{request.method} {target} HTTP/1.1", f"Host: {authority}"]
    for name, value in request.headers:
        low = name.lower()
        if low != "host" and low not in _HOP_BY_HOP and low not in named:
            lines.append(f"{name}: {value}")
    if request.is_upgrade:
        lines += ["Connection: Upgrade", "Upgrade: websocket"]
    elif request.is_last:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_response(head: bytes, method: str) -> Response:
    """Parse the head of the response to a request with this method."""
    line, headers = _lines(head)
    match = re.fullmatch(r"HTTP/(1\.[01]) ([1-9][0-9][0-9])(?: [\t \x21-\x7e\x80-\xff]*)?", line)
    if not match:
        raise WireError("the server's response is not HTTP/1.1")
    version, status = match[1], int(match[2])
    options = _tokens(headers, "connection")
    is_last = "close" in options or (version == "1.0" and "keep-alive" not in options)
    framing = _framing(headers, version)
    if method == "HEAD" or status < 200 or status in (204, 304):
        framing = Framing()
    elif framing is None:
        framing = Framing(is_until_close=True)
    return Response(status, head, framing, is_last or framing.is_until_close)


def as_last(response: Response) -> Response:
    """Return the response with the announcement that the connection closes after it."""
    raw = _PERSISTENCE.sub(b"", response.raw)[:-2] + b"Connection: close\r\n\r\n"
    return Response(response.status, raw, response.framing, is_last=True)


class BodyReader:
    """Parser that finds the end of a body: it returns how much of each piece belongs to the body.

    Chunks are checked and passed on unchanged, so they need not be encoded again.
    """

    MAX_LINE = 4096

    def __init__(self, framing: Framing) -> None:
        self._left = framing.length
        self._is_chunked = framing.is_chunked
        self.ends_with_connection = framing.is_until_close
        self._line = bytearray()
        self._state = "size"
        self.is_done = not (self._is_chunked or self.ends_with_connection or self._left)

    def feed(self, data: bytes | bytearray) -> int:
        """Return the number of bytes at the start of ``data`` that belong to the body."""
        if self.ends_with_connection:
            return len(data)
        if not self._is_chunked:
            count = min(self._left, len(data))
            self._left -= count
            self.is_done = not self._left
            return count
        position = 0
        while position < len(data) and not self.is_done:
            if self._state == "data":
                count = min(self._left, len(data) - position)
                self._left -= count
                position += count
                if not self._left:
                    self._state = "data end"
                continue
            end = data.find(b"\n", position)
            piece = data[position : end + 1 if end >= 0 else len(data)]
            self._line += piece
            position += len(piece)
            if len(self._line) > self.MAX_LINE:
                raise WireError("a line between HTTP chunks is too long")
            if end >= 0:
                self._line_read(bytes(self._line))
                self._line.clear()
        return position

    def _line_read(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise WireError("an HTTP line ends with a bare line feed")
        text = line[:-2].decode("latin-1")
        if self._state == "data end":
            if text:
                raise WireError("an HTTP chunk is longer than its stated size")
            self._state = "size"
        elif self._state == "size":
            match = re.fullmatch(r"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t \x21-\x7e]*)?", text)
            if not match:
                raise WireError("an HTTP chunk has an invalid size")
            self._left = int(match[1], 16)
            self._state = "data" if self._left else "trailer"
        elif not text:
            self.is_done = True
        else:
            _lines(b"\r\n" + line + b"\r\n")


#: Start of the reason phrase of the gate's own responses, except those that begin with BLOCKED.
GATE_PREFIX = "agentbox: "


def refusal(status: int, phrase: str, sentence: str, method: str = "GET") -> bytes:
    """Return a response of the gate itself, with the refusal's sentence as its reason phrase.

    Programs such as pip and requests show only the reason phrase of a failed CONNECT.
    """
    text = sentence.strip() or phrase
    if not text.startswith(BLOCKED):
        text = GATE_PREFIX + text
    phrase = " ".join(printable(word, 300) for word in text.split())[:500]
    body = b"" if method == "HEAD" else phrase.encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(phrase) + 1}\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def host_of(request: Request) -> str:
    """Return the Host header; empty if an HTTP/1.0 request has none."""
    return next(iter(request.values("host")), "")
