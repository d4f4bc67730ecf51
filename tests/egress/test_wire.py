"""Readers of hostile bytes: TLS hello, SOCKS5, DNS, HTTP/1.1."""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.egress import http1, wire
from jupyter_agentbox.egress.wire import WireError


def hello(name: str | None, **options: object) -> bytes:
    """Make a real ClientHello."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


NAME = b"a.example.org"
HELLO = hello(NAME.decode())


def outcome(reader: Callable[[bytes], object], data: bytes) -> object:
    """Return what a reader returns, or the class of its error."""
    try:
        return reader(data)
    except WireError:
        return WireError


def read_in_pieces(reader: Callable[[bytes], object], data: bytes) -> object:
    """Return the outcome for all bytes, after checking that each shorter piece gives the same one, or None."""
    whole = outcome(reader, data)
    decided = [found for size in range(len(data)) if (found := outcome(reader, data[:size])) is not None]
    assert all(found == whole for found in decided)
    assert whole is not None or not decided
    return whole


# -- TLS


def test_the_name_of_a_real_hello_is_found_and_only_in_full() -> None:
    assert wire.client_hello_name(HELLO) == "a.example.org"
    assert wire.client_hello_name(HELLO + b"early data") == "a.example.org"
    assert wire.client_hello_name(hello(None)) == ""
    for size in range(len(HELLO)):
        assert wire.client_hello_name(HELLO[:size]) is None


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_a_hello_cut_into_records_is_still_read(sizes: list[int]) -> None:
    rest, records = HELLO[5:], b""
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        if piece:
            records += b"\x16\x03\x01" + struct.pack(">H", len(piece)) + piece
    if rest:
        records += b"\x16\x03\x01" + struct.pack(">H", len(rest)) + rest
    assert wire.client_hello_name(records) == "a.example.org"


def test_a_hello_in_a_thousand_records_is_refused_soon() -> None:
    message = HELLO[5:] + bytes(1000)
    pieces = [b"\x16\x03\x01\0\1" + message[at : at + 1] for at in range(1000)]
    assert wire.client_hello_name(b"".join(pieces[: wire.MAX_RECORDS])) is None
    with pytest.raises(WireError, match="too many records"):
        wire.client_hello_name(b"".join(pieces[: wire.MAX_RECORDS + 1]))


@given(st.binary(max_size=200), st.integers(0, len(HELLO)), st.integers(0, 255))
def test_any_bytes_are_a_name_an_error_or_too_few(junk: bytes, position: int, value: int) -> None:
    changed = bytearray(HELLO)
    changed[position : position + 1] = bytes((value,))
    for data in (junk, b"\x16\x03\x01" + junk, HELLO[:position] + junk, bytes(changed)):
        found = read_in_pieces(wire.client_hello_name, data)
        assert found is None or found is WireError or isinstance(found, str)
    if not wire.may_be_tls(junk):
        assert outcome(wire.client_hello_name, junk) is (WireError if junk else None)


@given(st.integers(0, len(NAME) - 1), st.integers(0, 255))
def test_the_name_is_what_the_hello_has_byte_for_byte(position: int, value: int) -> None:
    name = NAME[:position] + bytes((value,)) + NAME[position + 1 :]
    assert HELLO.count(NAME) == 1
    assert wire.client_hello_name(HELLO.replace(NAME, name)) == name.decode("latin-1")


def test_two_names_in_one_hello_are_refused() -> None:
    def extension(*names: bytes) -> bytes:
        entries = b"".join(b"\0" + struct.pack(">H", len(n)) + n for n in names)
        return struct.pack(">HHH", 0, len(entries) + 2, len(entries)) + entries

    def made(extensions: bytes) -> bytes:
        body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + struct.pack(">H", len(extensions)) + extensions
        message = b"\1" + len(body).to_bytes(3, "big") + body
        return b"\x16\3\1" + struct.pack(">H", len(message)) + message

    assert wire.client_hello_name(made(extension(b"a.example"))) == "a.example"
    for several in (extension(b"a.example", b"b.example"), extension(b"a.example") + extension(b"b.example")):
        with pytest.raises(WireError, match="several"):
            wire.client_hello_name(made(several))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1",
        b"\x80\x2e\x01",
        b"\x16\x02",
        b"\x15\x03\x01\x00\x02",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x00\x01\x02",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
    ],
)
def test_what_is_no_hello_is_known_at_once(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.client_hello_name(data)


# -- SOCKS5


def test_socks_requests() -> None:
    assert wire.socks_greeting(b"\x05\x02\x00\x02rest") == (4, True)
    assert wire.socks_greeting(b"\x05\x01\x02") == (3, False)
    request = b"\x05\x01\x00\x03\x0bexample.com\x01\xbb"
    assert wire.socks_request(request + b"more") == wire.SocksRequest("example.com", 443, len(request))
    assert all(wire.socks_request(request[:n]) is None for n in range(len(request)))
    four = wire.socks_request(b"\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50")
    assert four is not None
    assert (four.host, four.error) == ("127.0.0.1", wire.SOCKS_NO_ADDRESS_TYPE)
    bind = wire.socks_request(b"\x05\x02\x00\x03\x01a\x00\x50")
    assert bind is not None
    assert bind.error == wire.SOCKS_NO_COMMAND
    for bad in (b"\x04", b"GET / HTTP", b"\x05\x01\x00\x09\x00"):
        with pytest.raises(WireError):
            wire.socks_request(bad)


@given(st.binary(max_size=255), st.integers(0, 65535), st.integers(0, 255), st.binary(max_size=20))
def test_a_socks_request_is_read_back(host: bytes, port: int, command: int, rest: bytes) -> None:
    request = bytes((5, command, 0, 3, len(host))) + host + port.to_bytes(2, "big")
    error = wire.SOCKS_OK if command == 1 else wire.SOCKS_NO_COMMAND
    found = wire.SocksRequest(host.decode("latin-1"), port, len(request), error)
    assert read_in_pieces(wire.socks_request, request + rest) == found
    assert wire.socks_request(request[:-1]) is None


@given(st.ip_addresses(), st.integers(0, 65535), st.sampled_from([1, 2, 3]))
def test_a_socks_request_for_an_address_is_read_back_and_gets_an_error(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int, command: int
) -> None:
    kind = 1 if address.version == 4 else 4
    request = bytes((5, command, 0, kind)) + address.packed + port.to_bytes(2, "big")
    error = wire.SOCKS_NO_ADDRESS_TYPE if command == 1 else wire.SOCKS_NO_COMMAND
    assert read_in_pieces(wire.socks_request, request) == wire.SocksRequest(str(address), port, len(request), error)


@given(st.binary(max_size=255), st.binary(max_size=20))
def test_a_socks_greeting_is_read_back(methods: bytes, rest: bytes) -> None:
    greeting = bytes((5, len(methods))) + methods
    assert read_in_pieces(wire.socks_greeting, greeting + rest) == (len(greeting), 0 in methods)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_socks_message_an_error_or_too_few(data: bytes) -> None:
    for prefix in (b"", b"\x05\x01\x00"):
        greeting = read_in_pieces(wire.socks_greeting, prefix + data)
        assert greeting in (None, WireError) or isinstance(greeting, tuple)
        request = read_in_pieces(wire.socks_request, prefix + data)
        assert request in (None, WireError) or isinstance(request, wire.SocksRequest)
    if data[:1] not in (b"", b"\x05"):
        assert outcome(wire.socks_greeting, data) is outcome(wire.socks_request, data) is WireError


# -- DNS


def dns(name: str, kind: int = 1, klass: int = 1, flags: int = 0x0100, count: int = 1) -> bytes:
    labels = b"".join(bytes((len(part),)) + part.encode("latin-1") for part in name.split(".")) if name else b""
    return struct.pack(">HHHHHH", 0x1234, flags, count, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, klass)


def test_dns_queries() -> None:
    query = wire.dns_query(dns("wWw.Example.org") + b"\0\0\x29\x04\xd0\0\0\0\0\0\0")  # with EDNS
    assert query is not None
    assert (query.id, query.name, query.type, query.error) == (0x1234, "wWw.Example.org", 1, wire.NOERROR)
    answer = wire.dns_answer(query, wire.NOERROR, "127.64.0.1")
    assert answer[:4] == b"\x12\x34\x81\x80"
    assert answer[12 : 12 + len(query.question)] == query.question
    assert answer.endswith(b"\x00\x04\x7f\x40\x00\x01")
    denied = wire.dns_answer(query, wire.NXDOMAIN)
    assert denied[3] & 15 == wire.NXDOMAIN
    assert denied[4:8] == b"\0\1\0\0"


def test_odd_dns_queries_get_their_code() -> None:
    def code(packet: bytes) -> int | None:
        query = wire.dns_query(packet)
        return None if query is None else query.error

    assert code(b"short") is None
    assert code(dns("a", flags=0x8100)) is None
    assert code(dns("a", flags=0x2100)) == wire.NOTIMP
    assert code(dns("a", klass=3)) == wire.REFUSED
    assert code(dns("a", count=2)) == wire.FORMERR
    assert code(dns("a")[:-1]) == wire.FORMERR
    assert code(dns("a")[:12] + b"\xc0\x0c\0\1\0\1") == wire.FORMERR
    assert code(dns(".".join(["a" * 60] * 5))) == wire.FORMERR


def test_a_dot_in_a_label_is_no_label_boundary() -> None:
    packet = dns("x").replace(b"\1x", b"\x0fa\0.example.org.", 1)
    query = wire.dns_query(packet[:12] + b"\x0da.example.org\0\0\1\0\1")
    assert query is not None
    assert "." not in query.name


LABELS = st.lists(
    st.text(st.characters(max_codepoint=255, exclude_characters="."), min_size=1, max_size=40), max_size=6
)


@given(LABELS, st.integers(0, 65535), st.integers(0, 65535))
def test_a_dns_query_is_read_back(labels: list[str], kind: int, klass: int) -> None:
    packet = dns(".".join(labels), kind, klass)
    error = wire.NOERROR if klass == 1 else wire.REFUSED
    assert wire.dns_query(packet) == wire.DnsQuery(0x1234, 0x0100, ".".join(labels), kind, packet[12:], error)


@given(st.binary(max_size=600))
def test_any_packet_gets_its_answer_or_none(data: bytes) -> None:
    for packet in (data, dns("example.org")[:12] + data):
        query = wire.dns_query(packet)
        if len(packet) < 12 or packet[2] & 0x80:
            assert query is None
            continue
        assert query is not None
        assert query.error in (wire.NOERROR, wire.FORMERR, wire.NOTIMP, wire.REFUSED)
        answer = wire.dns_answer(query, query.error or wire.NXDOMAIN)
        assert answer[:2] == packet[:2]
        assert answer[2] & 0x80, "it is marked as an answer"
        assert answer[3] & 15 == query.error or (query.error, answer[3] & 15) == (wire.NOERROR, wire.NXDOMAIN)
        assert answer[12:] == query.question
        assert packet[12:].startswith(query.question)
        assert wire.dns_query(answer) is None


@given(st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_dns_frames_come_through(number: int, query: bytes) -> None:
    body = number.to_bytes(4, "big") + query
    frame = len(body).to_bytes(2, "big") + body
    assert wire.query_frame(frame + b"next") == (number, query, len(frame))
    assert all(wire.query_frame(frame[:n]) is None for n in range(len(frame)))


# -- HTTP/1.1


def request(text: str) -> http1.Request:
    data = text.encode("latin-1")
    size = http1.find_head(data)
    assert size == len(data)
    return http1.parse_request(data)


def test_a_request_goes_on_in_origin_form_without_what_was_meant_for_the_proxy() -> None:
    parsed = request(
        "GET http://example.org/a?b=c HTTP/1.1\r\nHost: example.org\r\nProxy-Authorization: Basic x\r\n"
        "Connection: keep-alive, X-Mine\r\nX-Mine: 1\r\nProxy-Connection: keep-alive\r\nTE: trailers\r\n"
        "X-Other: 2\r\n\r\n"
    )
    assert http1.split_url(parsed.target) == ("example.org", 80, "/a?b=c")
    assert http1.forwarded(parsed, "/a?b=c", "example.org") == (
        b"GET /a?b=c HTTP/1.1\r\nHost: example.org\r\nX-Other: 2\r\n\r\n"
    )


def test_connection_cannot_take_host_or_framing_away() -> None:
    parsed = request("POST / HTTP/1.1\r\nHost: a\r\nConnection: content-length, host\r\nContent-Length: 3\r\n\r\n")
    assert b"Content-Length: 3\r\n" in http1.forwarded(parsed, "/", "a")


def test_only_a_websocket_may_take_the_connection_over() -> None:
    head = "GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: {}\r\n\r\n"
    assert b"Upgrade: websocket\r\n" in http1.forwarded(request(head.format("WebSocket")), "/", "a")
    assert b"pgrade" not in http1.forwarded(request(head.format("h2c")), "/", "a")


@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "Content-Length: 3\r\nContent-Length: 3",
        "Content-Length: 3\r\nContent-Length: 4",
        "Content-Length: 3, 3",
        "Content-Length: +3",
        "Content-Length: 0x3",
        "Content-Length:",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: \x0bchunked",
        "Transfer-Encoding : chunked",
        "X: a\r\n folded",
        "X: a\r\n\tfolded",
        "X: a\rb",
        "X: a\nY: b",
        "X: a\x00b",
        "no colon",
        ": no name",
        "Host: other",
    ],
)
def test_requests_that_can_be_read_in_two_ways_are_refused(lines: str) -> None:
    with pytest.raises(WireError):
        request(f"POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n")


@pytest.mark.parametrize(
    "line",
    [
        "GET /",
        "GET  / HTTP/1.1",
        "GET / HTTP/1.1 x",
        "GET / HTTP/2.0",
        "PRI * HTTP/2.0",
        "GET /\x00 HTTP/1.1",
        "G(T / HTTP/1.1",
        "GET / HTTP/0.9",
        "GET\t/\tHTTP/1.1",
    ],
)
def test_bad_request_lines_are_refused(line: str) -> None:
    with pytest.raises(WireError):
        request(f"{line}\r\nHost: a\r\n\r\n")


@pytest.mark.parametrize(
    "url",
    ["https://a/", "ftp://a/", "http:///", "http://a:0/", "http://a:99999/", "http://u@a/", "http://a\\b/", "a:80"],
)
def test_urls_that_are_not_plain_http_are_refused(url: str) -> None:
    with pytest.raises(WireError):
        http1.split_url(url)


def test_bare_line_feeds_and_endless_heads_are_refused() -> None:
    for data in (b"GET / HTTP/1.1\nHost: a\n\n", b"GET / HTTP/1.1\r\nHost: a\n", b"x" * http1.MAX_HEAD):
        with pytest.raises(WireError):
            http1.find_head(data)


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\r\n", b"\r\n\r\n"]), max_size=12), st.integers(0, 12))
def test_a_head_is_found_alike_in_pieces_and_at_once(words: list[bytes], cut: int) -> None:
    data = b"".join(words)

    def find(*sizes: int) -> int | str | None:
        found, known = None, 0
        try:
            for size in sizes:
                found, known = http1.find_head(data[:size], known), size
                if found is not None:
                    break
        except WireError as error:
            return str(error)
        return found

    # What is wrong before the end of a head shows the earlier, the smaller the pieces.
    whole, pieces = find(len(data)), find(*range(len(data) + 1))
    assert pieces == whole or (isinstance(pieces, str) and isinstance(whole, int))
    if not isinstance(whole, int):
        assert find(min(cut, len(data)), len(data)) == whole


CHUNKED = http1.Framing(is_chunked=True)


@given(st.lists(st.binary(min_size=1, max_size=50), max_size=6), st.integers(1, 20), st.binary(max_size=20))
def test_the_end_of_a_chunked_body_is_found_whatever_the_pieces(chunks: list[bytes], step: int, rest: bytes) -> None:
    body = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(c), c) for c in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    reader = http1.BodyReader(CHUNKED)
    buffer = bytearray()
    data, taken = body + rest, 0
    for start in range(0, len(data), step):
        buffer += data[start : start + step]
        count = reader.feed(buffer)
        taken += count
        del buffer[:count]
        if reader.is_done:
            break
    assert reader.is_done
    assert taken == len(body)


@pytest.mark.parametrize(
    "body",
    [
        b"3\nabc\r\n",
        b"3 \r\nabcd",
        b"-1\r\n",
        b"0x3\r\n",
        b"\r\n",
        b"3\r\nabcX\r\n",
        b"0\r\nbad\r\n",
        b"0\r\n x: y\r\n",
        b"1" * 5000,
        b"3;\x00\r\n",
    ],
)
def test_loose_chunks_are_refused(body: bytes) -> None:
    reader = http1.BodyReader(CHUNKED)
    with pytest.raises(WireError):
        taken = reader.feed(body)
        reader.feed(body[taken:] + b"\r\n")


TOKENS = st.text("!#$%&'*+-.^_`|~09AZaz", min_size=1, max_size=12)
VALUES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0xFF, exclude_categories=["Cc"]), max_size=30)
#: Headers that have no effect on framing or target, and are meant for the server.
HEADERS = st.lists(st.tuples(TOKENS.map("X-{}".format), VALUES), max_size=6)
FRAMINGS = st.sampled_from(
    [
        ([], http1.Framing()),
        ([("Transfer-Encoding", "Chunked")], http1.Framing(is_chunked=True)),
        ([("content-length", "17")], http1.Framing(length=17)),
    ]
)


@given(TOKENS, HEADERS, FRAMINGS)
def test_a_request_is_read_back_and_is_the_same_when_it_was_passed_on(
    method: str, headers: list[tuple[str, str]], framing: tuple[list[tuple[str, str]], http1.Framing]
) -> None:
    lines = [("Host", "a"), *headers, *framing[0]]
    head = f"{method} /x HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines)
    parsed = request(head + "\r\n")
    assert parsed == http1.Request(method, "/x", "1.1", lines, framing[1])
    again = http1.parse_request(http1.forwarded(parsed, "/y", "b.example"))
    assert again == http1.Request(method, "/y", "1.1", [("Host", "b.example"), *lines[1:]], framing[1])


@given(st.binary(max_size=400))
def test_any_bytes_are_one_request_for_the_gate_and_the_server_or_an_error(data: bytes) -> None:
    for start in (b"", b"GET / HTTP/1.1\r\nHost: a\r\n", b"HTTP/1.1 200 OK\r\n"):
        text = start + data + b"\r\n\r\n"
        size = outcome(http1.find_head, text)
        if size is WireError:
            continue
        assert isinstance(size, int)
        assert text.index(b"\r\n\r\n") + 4 == size
        parsed = outcome(http1.parse_request, text[:size])
        if parsed is not WireError:
            assert isinstance(parsed, http1.Request)
            again = http1.parse_request(http1.forwarded(parsed, "/", "b.example"))
            assert (again.method, again.target, again.values("host")) == (parsed.method, "/", ["b.example"])
            assert again.framing == parsed.framing
        answered = outcome(lambda head: http1.parse_response(head, "GET"), text[:size])
        if answered is not WireError:
            assert isinstance(answered, http1.Response)
            assert answered.raw == text[:size]
            assert parsed is WireError, "no head is both"


@given(st.lists(st.sampled_from([b"3", b"0", b"a", b";x", b"\r\n", b"\n", b"abc", b"X: y"]), max_size=20))
def test_a_chunked_body_is_judged_alike_in_pieces_and_at_once(words: list[bytes]) -> None:
    data = b"".join(words)

    def read(step: int) -> object:
        reader, taken = http1.BodyReader(CHUNKED), 0
        try:
            while taken < len(data) and not reader.is_done:
                count = reader.feed(data[taken : taken + step])
                assert 0 < count <= step
                taken += count
        except WireError:
            return WireError
        return taken if reader.is_done else None

    assert read(1) == read(3) == read(len(data) or 1)


def test_how_a_response_ends() -> None:
    def framing(head: str, method: str = "GET") -> http1.Framing:
        return http1.parse_response(head.encode() + b"\r\n\r\n", method).framing

    assert framing("HTTP/1.1 200 OK\r\nContent-Length: 5").length == 5
    assert framing("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked").is_chunked
    assert framing("HTTP/1.1 200").is_until_close
    for none in ("HTTP/1.1 204 x", "HTTP/1.1 304 x\r\nContent-Length: 5", "HTTP/1.1 100 Continue"):
        assert framing(none) == http1.Framing()
    assert framing("HTTP/1.1 200 OK\r\nContent-Length: 5", "HEAD") == http1.Framing()


@given(st.text())
def test_a_refusal_is_one_well_formed_response(text: str) -> None:
    answer = http1.refusal(403, "refused", text)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 403 agentbox: ")
    assert len(head.split(b"\r\n")) == 6
    assert f"Content-Length: {len(body)}".encode() in head


@given(st.text(max_size=80))
def test_a_services_host_is_what_follows_two_underscored_labels(name: str) -> None:
    assert wire.service_host(f"_{name.replace('.', '')}._tcp.a.example") == "a.example"
    found = wire.service_host(name)
    assert found == name or (name.startswith("_") and name.endswith("." + found) and name.count(".") >= 2)
