"""Parse the first bytes that code inside sends: TLS ClientHello, SOCKS5, DNS. Pure functions over hostile bytes.

Each parser takes the bytes received so far. It returns None while it needs more, raises :class:`WireError` as soon as
no continuation can be valid, and never reads beyond its limit. HTTP is in :mod:`.http1`.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass


class WireError(ValueError):
    """The bytes are invalid; the text gives the reason and contains none of them."""


# -- TLS ------------------------------------------------------------------------------------------

#: Maximum size of a ClientHello, and maximum number of its records. It is parsed again with each piece.
MAX_HELLO, MAX_RECORDS = 32 * 1024, 64
_CLIENT_HELLO = 1
_SERVER_NAME = 0


class _Cursor:
    """Reader that takes fields off the front of a complete message."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise WireError("a length in the TLS hello exceeds the message")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _Cursor:
        return _Cursor(self.take(self.number(size)))

    def is_at_end(self) -> bool:
        return self.position == len(self.data)


def may_be_tls(data: bytes) -> bool:
    """Return whether the bytes received so far can be the start of a TLS connection."""
    return data[:1] == b"\x16" and data[1:2] in (b"", b"\x03")


def client_hello_name(data: bytes) -> str | None:
    """Return the server name of a TLS ClientHello, which may span several records.

    Parameters
    ----------
    data : bytes
        Bytes that the client has sent so far.

    Returns
    -------
    str or None
        The name; empty if the hello has none; None if more bytes are needed.

    Raises
    ------
    WireError
        The bytes are not a valid ClientHello.
    """
    message = bytearray()
    position = 0
    for _ in range(MAX_RECORDS + 1):
        if not may_be_tls(data[position : position + 2]) and position < len(data):
            raise WireError("it is not TLS")
        if len(data) < position + 5:
            return None
        length = int.from_bytes(data[position + 3 : position + 5], "big")
        if not 0 < length <= 1 << 14:
            raise WireError("a TLS record has an invalid length")
        message += data[position + 5 : position + 5 + length]
        if message[:1] not in (b"", bytes((_CLIENT_HELLO,))):
            raise WireError("the first TLS message is not a ClientHello")
        if len(message) >= 4:
            size = 4 + int.from_bytes(message[1:4], "big")
            if size > MAX_HELLO:
                raise WireError("the TLS hello is too long")
            if len(message) >= size:
                return _name_in_hello(bytes(message[4:size]))
        position += 5 + length
    raise WireError("the TLS hello spans too many records")


def _name_in_hello(body: bytes) -> str:
    hello = _Cursor(body)
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    if hello.is_at_end():
        return ""
    extensions = hello.vector(2)
    if not hello.is_at_end():
        raise WireError("the TLS hello has bytes after its extensions")
    names: list[str] = []
    while not extensions.is_at_end():
        kind = extensions.number(2)
        extension = extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        entries = extension.vector(2)
        while not entries.is_at_end():
            is_host_name = entries.number(1) == 0
            name = entries.vector(2).data
            if is_host_name:
                names.append(name.decode("latin-1"))
    # With two names, this parser and the server might each use a different one.
    if len(names) > 1:
        raise WireError("the TLS hello contains several server names")
    return names[0] if names else ""


# -- SOCKS5 ---------------------------------------------------------------------------------------

SOCKS_OK = 0
SOCKS_FAILED = 1
SOCKS_REFUSED = 2
SOCKS_UNREACHABLE = 4
SOCKS_NO_COMMAND = 7
SOCKS_NO_ADDRESS_TYPE = 8
#: Answers to the greeting: no authentication; none of the offered methods is acceptable.
SOCKS_NO_AUTH = b"\x05\x00"
SOCKS_NO_METHOD = b"\x05\xff"


@dataclass(frozen=True)
class SocksRequest:
    """SOCKS request; ``error`` is the reply code if the request cannot be served under any policy."""

    host: str
    port: int
    size: int
    error: int = SOCKS_OK


def socks_greeting(data: bytes) -> tuple[int, bool] | None:
    """Parse a greeting. Return its size in bytes, and whether it offers no authentication as a method."""
    if data[:1] not in (b"", b"\x05"):
        raise WireError("it is not SOCKS5")
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    return 2 + data[1], 0 in data[2 : 2 + data[1]]


def socks_request(data: bytes) -> SocksRequest | None:
    """Parse a request. Addresses are parsed too, so that the refusal can name them."""
    if data[:1] not in (b"", b"\x05") or data[2:3] not in (b"", b"\x00"):
        raise WireError("it is not SOCKS5")
    if len(data) < 5:
        return None
    kind = data[3]
    if kind == 3:
        start, length = 5, data[4]
    elif kind in (1, 4):
        start, length = 4, 4 if kind == 1 else 16
    else:
        raise WireError("the SOCKS5 request has an unknown address type")
    size = start + length + 2
    if len(data) < size:
        return None
    raw = data[start : start + length]
    port = int.from_bytes(data[size - 2 : size], "big")
    error = SOCKS_OK if data[1] == 1 else SOCKS_NO_COMMAND
    if kind == 3:
        return SocksRequest(raw.decode("latin-1"), port, size, error)
    return SocksRequest(str(ipaddress.ip_address(raw)), port, size, error or SOCKS_NO_ADDRESS_TYPE)


def socks_reply(code: int) -> bytes:
    """Return the reply to a request. The bound address has no meaning here and is zero."""
    return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))


# -- DNS ------------------------------------------------------------------------------------------

NOERROR, FORMERR, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 3, 4, 5
TYPE_A, TYPE_TXT, TYPE_SRV = 1, 16, 33
_CLASS_IN = 1
#: Seconds for which programs may cache an answer.
DNS_TTL = 10
#: Maximum size of a query, in bytes.
MAX_QUERY = 4096


@dataclass(frozen=True)
class DnsQuery:
    """Parsed DNS question.

    Parameters
    ----------
    id : int
        Query id, repeated in the answer.
    flags : int
        Flags of the query.
    name : str
        Requested name, with dots; hostile. Empty for the root.
    type : int
        Record type, such as :data:`TYPE_A`.
    question : bytes
        Question section, repeated unchanged in the answer.
    error : int
        Response code other than :data:`NOERROR` if the query can only be answered with an error.
    """

    id: int
    flags: int
    name: str
    type: int
    question: bytes
    error: int = NOERROR


def dns_query(packet: bytes) -> DnsQuery | None:
    """Parse a query. Return None if it gets no answer: it has an invalid size, or is an answer itself."""
    if not 12 <= len(packet) <= MAX_QUERY:
        return None
    ident, flags, questions = struct.unpack_from(">HHH", packet)
    if flags & 0x8000:
        return None

    def failed(code: int) -> DnsQuery:
        return DnsQuery(ident, flags, "", 0, b"", code)

    if flags & 0x7800:
        return failed(NOTIMP)
    if questions != 1:
        return failed(FORMERR)
    labels: list[str] = []
    position = 12
    while True:
        length = packet[position] if position < len(packet) else 64
        # 64 and above is a compression pointer or undefined. Neither is valid in a question.
        if length > 63 or position + 1 + length > len(packet) or position - 12 + length > 254:
            return failed(FORMERR)
        position += 1 + length
        if not length:
            break
        # A dot inside a label would make it look like two labels.
        labels.append(packet[position - length : position].decode("latin-1").replace(".", "\\"))
    if position + 4 > len(packet):
        return failed(FORMERR)
    kind, klass = struct.unpack_from(">HH", packet, position)
    question = packet[12 : position + 4]
    return DnsQuery(ident, flags, ".".join(labels), kind, question, NOERROR if klass == _CLASS_IN else REFUSED)


def service_host(name: str) -> str:
    """Return the host of a service's name, ``_service._protocol.host``; any other name unchanged."""
    labels = name.split(".", 2)
    return labels[2] if len(labels) == 3 and labels[0][:1] == labels[1][:1] == "_" else name


def dns_answer(query: DnsQuery, code: int, address: str | None = None) -> bytes:
    """Return the answer to a query: a response code, and for an A query an IPv4 address."""
    # Answer, recursion available; opcode and "recursion desired" are copied from the query.
    flags = 0x8080 | query.flags & 0x7900 | code
    head = struct.pack(">HHHHHH", query.id, flags, 1 if query.question else 0, 1 if address else 0, 0, 0)
    if not address:
        return head + query.question
    record = struct.pack(">HHHIH", 0xC00C, TYPE_A, _CLASS_IN, DNS_TTL, 4) + ipaddress.IPv4Address(address).packed
    return head + query.question + record


# Format of the "dns" stream between guest and gate. The guest numbers its queries, so answers may come in any order:
#   to the gate   length u16, number u32, query
#   to the guest  length u16, number u32, count u8, count times (IPv4 address, port u16), answer
# The guest listens on these addresses before it passes the answer on. An empty answer means: send no answer.

#: Maximum number of ports on which the guest listens for one name.
MAX_LISTENERS = 32
_NUMBER = struct.Struct(">I")


def query_frame(data: bytes | bytearray) -> tuple[int, bytes, int] | None:
    """Parse one frame to the gate. Return number, query, and the frame's size."""
    if len(data) < 2:
        return None
    length = int.from_bytes(data[:2], "big")
    if not 4 <= length <= 4 + MAX_QUERY:
        raise WireError("a DNS frame has an invalid length")
    if len(data) < 2 + length:
        return None
    return _NUMBER.unpack_from(data, 2)[0], bytes(data[6 : 2 + length]), 2 + length


def answer_frame(number: int, listen: list[tuple[str, int]], answer: bytes) -> bytes:
    """Return one frame to the guest."""
    listeners = b"".join(ipaddress.IPv4Address(host).packed + struct.pack(">H", port) for host, port in listen)
    body = _NUMBER.pack(number) + bytes((len(listen),)) + listeners + answer
    return len(body).to_bytes(2, "big") + body
