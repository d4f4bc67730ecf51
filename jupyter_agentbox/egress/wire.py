"""Reads what code inside sends first: TLS ClientHello, SOCKS5, DNS. Pure functions over hostile bytes.

Each reader takes the bytes so far. It returns None while it needs more, raises :class:`WireError` as soon as they
can become nothing valid, and never looks further than its limit. HTTP is in :mod:`.http1`.
"""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass


class WireError(ValueError):
    """The bytes are not what they must be; the text says why, and holds nothing of theirs."""


# -- TLS ------------------------------------------------------------------------------------------

#: Most bytes that a ClientHello may have, and records that it may come in: it is read anew with each piece.
MAX_HELLO, MAX_RECORDS = 32 * 1024, 64
_CLIENT_HELLO = 1
_SERVER_NAME = 0


class _Cursor:
    """Takes fields off the front of a message that is there in full."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise WireError("a length in the TLS hello leads beyond it")
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
    """Tell whether the bytes so far may be the start of a TLS connection."""
    return data[:1] == b"\x16" and data[1:2] in (b"", b"\x03")


def client_hello_name(data: bytes) -> str | None:
    """Read the server name of a TLS ClientHello, which may come in several records.

    Parameters
    ----------
    data : bytes
        What the client sent so far.

    Returns
    -------
    str or None
        The name, empty if the hello has none; None if more bytes are needed.

    Raises
    ------
    WireError
        It is no ClientHello.
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
            raise WireError("a TLS record has no valid length")
        message += data[position + 5 : position + 5 + length]
        if message[:1] not in (b"", bytes((_CLIENT_HELLO,))):
            raise WireError("TLS starts with something else than a ClientHello")
        if len(message) >= 4:
            size = 4 + int.from_bytes(message[1:4], "big")
            if size > MAX_HELLO:
                raise WireError("the TLS hello is too long")
            if len(message) >= size:
                return _name_in_hello(bytes(message[4:size]))
        position += 5 + length
    raise WireError("the TLS hello comes in too many records")


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
    # A second name is what one party reads and the other does not.
    if len(names) > 1:
        raise WireError("the TLS hello holds several server names")
    return names[0] if names else ""


# -- SOCKS5 ---------------------------------------------------------------------------------------

SOCKS_OK = 0
SOCKS_FAILED = 1
SOCKS_REFUSED = 2
SOCKS_UNREACHABLE = 4
SOCKS_NO_COMMAND = 7
SOCKS_NO_ADDRESS_TYPE = 8
#: Answers to the greeting: no authentication; none of the offered methods will do.
SOCKS_NO_AUTH = b"\x05\x00"
SOCKS_NO_METHOD = b"\x05\xff"


@dataclass(frozen=True)
class SocksRequest:
    """One request; ``error`` is the reply code if it cannot be served whatever the policy."""

    host: str
    port: int
    size: int
    error: int = SOCKS_OK


def socks_greeting(data: bytes) -> tuple[int, bool] | None:
    """Read a greeting: its size in bytes, and whether it offers to go without authentication."""
    if data[:1] not in (b"", b"\x05"):
        raise WireError("it is not SOCKS5")
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    return 2 + data[1], 0 in data[2 : 2 + data[1]]


def socks_request(data: bytes) -> SocksRequest | None:
    """Read a request. Addresses are read as well, so that the refusal can name them."""
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
        raise WireError("SOCKS5 with an unknown type of address")
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
    """Make the reply to a request. The bound address means nothing here and is zero."""
    return bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0))


# -- DNS ------------------------------------------------------------------------------------------

NOERROR, FORMERR, NXDOMAIN, NOTIMP, REFUSED = 0, 1, 3, 4, 5
TYPE_A = 1
_CLASS_IN = 1
#: Seconds that programs may remember an answer.
DNS_TTL = 10
#: Largest query that is looked at, bytes.
MAX_QUERY = 4096


@dataclass(frozen=True)
class DnsQuery:
    """One question.

    Parameters
    ----------
    id : int
        To be repeated in the answer.
    flags : int
        As they came.
    name : str
        The name asked for, with dots; hostile. Empty for the root.
    type : int
        Such as :data:`TYPE_A`.
    question : bytes
        The question section, to be repeated as it came.
    error : int
        Not :data:`NOERROR` if the query cannot be answered otherwise.
    """

    id: int
    flags: int
    name: str
    type: int
    question: bytes
    error: int = NOERROR


def dns_query(packet: bytes) -> DnsQuery | None:
    """Read a query; None for what deserves no answer: too short, or an answer itself."""
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
        # 64 and more is a compression pointer or undefined: neither belongs into a question.
        if length > 63 or position + 1 + length > len(packet) or position - 12 + length > 254:
            return failed(FORMERR)
        position += 1 + length
        if not length:
            break
        # A dot in a label would make two of it.
        labels.append(packet[position - length : position].decode("latin-1").replace(".", "\\"))
    if position + 4 > len(packet):
        return failed(FORMERR)
    kind, klass = struct.unpack_from(">HH", packet, position)
    question = packet[12 : position + 4]
    return DnsQuery(ident, flags, ".".join(labels), kind, question, NOERROR if klass == _CLASS_IN else REFUSED)


def dns_answer(query: DnsQuery, code: int, address: str | None = None) -> bytes:
    """Make the answer to a query: a code, and for an A query an IPv4 address."""
    # Answer, recursion available; opcode and "recursion desired" as they came.
    flags = 0x8080 | query.flags & 0x7900 | code
    head = struct.pack(">HHHHHH", query.id, flags, 1 if query.question else 0, 1 if address else 0, 0, 0)
    if not address:
        return head + query.question
    record = struct.pack(">HHHIH", 0xC00C, TYPE_A, _CLASS_IN, DNS_TTL, 4) + ipaddress.IPv4Address(address).packed
    return head + query.question + record


# The "dns" stream between guest and gate. The guest numbers its queries, so answers may come in any order:
#   to the gate   length u16, number u32, query
#   to the guest  length u16, number u32, count u8, count times (IPv4 address, port u16), answer
# The guest listens on the addresses before it passes the answer on. An empty answer means: give none.

#: Most ports that one name gets listeners on.
MAX_LISTENERS = 32
_NUMBER = struct.Struct(">I")


def query_frame(data: bytes | bytearray) -> tuple[int, bytes, int] | None:
    """Read one frame to the gate: number, query, and the frame's size."""
    if len(data) < 2:
        return None
    length = int.from_bytes(data[:2], "big")
    if not 4 <= length <= 4 + MAX_QUERY:
        raise WireError("a DNS frame has no valid length")
    if len(data) < 2 + length:
        return None
    return _NUMBER.unpack_from(data, 2)[0], bytes(data[6 : 2 + length]), 2 + length


def answer_frame(number: int, listen: list[tuple[str, int]], answer: bytes) -> bytes:
    """Make one frame to the guest."""
    places = b"".join(ipaddress.IPv4Address(host).packed + struct.pack(">H", port) for host, port in listen)
    body = _NUMBER.pack(number) + bytes((len(listen),)) + places + answer
    return len(body).to_bytes(2, "big") + body
