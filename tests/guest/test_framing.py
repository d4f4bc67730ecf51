"""The format keeps its promises between two honest ends, and its bounds against a hostile one."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_agentbox.guest import framing
from jupyter_agentbox.guest.framing import Connection, MessageReader, ProtocolError, pack_message

HEAD = struct.Struct(">IBI")


def make_pair() -> tuple[Connection, Connection]:
    host, guest = Connection(is_host=True), Connection(is_host=False)
    host.hello({})
    guest.hello({})
    exchange(host, guest)
    return host, guest


def exchange(host: Connection, guest: Connection, cut: int = 1 << 30) -> tuple[list, list]:
    """Carry what waits both ways, in pieces of `cut` bytes; the events at (host, guest)."""
    at_host, at_guest = [], []
    for _ in range(1000):
        down, up = host.take_output(), guest.take_output()
        if not down and not up:
            return at_host, at_guest
        for start in range(0, len(down), cut):
            at_guest += guest.receive(down[start : start + cut])
        for start in range(0, len(up), cut):
            at_host += host.receive(up[start : start + cut])
    raise AssertionError("it never gets quiet")


def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload), kind, stream) + payload


@given(st.lists(st.binary(max_size=200_000), max_size=6), st.integers(1, 5000))
@settings(max_examples=40, deadline=None)
def test_bytes_arrive_whole_and_in_order_however_they_are_cut(parts: list[bytes], cut: int) -> None:
    host, guest = make_pair()
    stream = guest.open({"kind": "x"})
    at_host, _ = exchange(host, guest, cut)
    assert [(e.kind, e.value) for e in at_host] == [(framing.OPEN, {"kind": "x"})]
    wanted, got = b"".join(parts), b""
    position = 0
    for _ in range(10_000):
        position += guest.send(stream, memoryview(wanted)[position:])
        at_host, _ = exchange(host, guest, cut)
        for event in at_host:
            assert event.kind == framing.DATA
            got += event.value
            host.grant(stream, len(event.value))
        exchange(host, guest, cut)
        if position == len(wanted):
            break
    assert got == wanted


def test_a_stream_sends_no_more_than_its_credit() -> None:
    host, guest = make_pair()
    stream = host.open({"kind": "x"})
    exchange(host, guest)
    assert host.send(stream, b"a" * 1_000_000) == framing.INITIAL_CREDIT
    assert host.send(stream, b"a") == 0
    exchange(host, guest)
    guest.grant(stream, 10)
    exchange(host, guest)
    assert host.send(stream, b"a" * 100) == 10


def test_each_way_ends_by_itself_and_both_ends_forget_the_stream() -> None:
    host, guest = make_pair()
    stream = host.open({"kind": "x"})
    host.send_eof(stream)
    _, at_guest = exchange(host, guest)
    assert [e.kind for e in at_guest] == [framing.OPEN, framing.EOF]
    assert guest.send(stream, b"still") == 5
    guest.send_eof(stream)
    at_host, _ = exchange(host, guest)
    assert [e.kind for e in at_host] == [framing.DATA, framing.EOF]
    assert not host.is_open(stream)
    assert not guest.is_open(stream)


def test_what_was_on_its_way_when_a_stream_was_reset_is_let_pass() -> None:
    host, guest = make_pair()
    stream = guest.open({"kind": "x"})
    exchange(host, guest)
    guest.send(stream, b"late")
    host.reset(stream, "enough")
    at_host, at_guest = exchange(host, guest)
    assert at_host == []
    assert [(e.kind, e.value) for e in at_guest] == [(framing.RESET, "enough")]


def test_streams_beyond_the_limit_are_reset_and_the_link_goes_on() -> None:
    host, guest = Connection(is_host=True, max_streams=3), Connection(is_host=False)
    host.hello({})
    guest.hello({})
    exchange(host, guest)
    streams = [guest.open({"n": n}) for n in range(5)]
    at_host, at_guest = exchange(host, guest)
    assert [e.value for e in at_host] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [e.stream for e in at_guest] == streams[3:]
    guest.reset(streams[0])
    guest.open({"n": 5})
    at_host, _ = exchange(host, guest)
    assert at_host[-1].value == {"n": 5}


HOSTILE = {
    "no hello first": frame(framing.PING, 0, b"12345678"),
    "another version": frame(framing.HELLO, 0, b'{"version":99}'),
    "hello that is no JSON": frame(framing.HELLO, 0, b"\xff{"),
    "hello that is a list": frame(framing.HELLO, 0, b"[]"),
    "hello of endless depth": frame(framing.HELLO, 0, b"[" * 4000),
}
HELLO = frame(framing.HELLO, 0, b'{"version":1}')
HOSTILE_AFTER_HELLO = {
    "unknown type": frame(99, 1),
    "length beyond any limit": HEAD.pack(0xFFFFFFFF, framing.DATA, 2),
    "credit of three bytes": frame(framing.OPEN, 2, b"{}") + frame(framing.CREDIT, 2, b"abc"),
    "second hello": HELLO,
    "stream of the host's parity": frame(framing.OPEN, 3, b"{}"),
    "stream opened again": frame(framing.OPEN, 2, b"{}") * 2,
    "ids that go down": frame(framing.OPEN, 4, b"{}") + frame(framing.OPEN, 2, b"{}"),
    "stream zero": frame(framing.OPEN, 0, b"{}"),
    "data before open": frame(framing.DATA, 2, b"x"),
    "data on a stream the host never opened": frame(framing.DATA, 1, b"x"),
    "data beyond the credit": frame(framing.OPEN, 2, b"{}")
    + frame(framing.DATA, 2, b"x" * 65536)
    + frame(framing.DATA, 2, b"x"),
    "data after the end": frame(framing.OPEN, 2, b"{}") + frame(framing.EOF, 2) + frame(framing.DATA, 2, b"x"),
    "two ends": frame(framing.OPEN, 2, b"{}") + frame(framing.EOF, 2) * 2,
    "endless credit": frame(framing.OPEN, 2, b"{}") + frame(framing.CREDIT, 2, b"\xff\xff\xff\xff"),
    "header that is a number": frame(framing.OPEN, 2, b"7"),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_bad_greeting_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Connection(is_host=True).receive(data)


@pytest.mark.parametrize("data", HOSTILE_AFTER_HELLO.values(), ids=HOSTILE_AFTER_HELLO)
def test_a_broken_rule_is_refused(data: bytes) -> None:
    host = Connection(is_host=True)
    host.receive(HELLO)
    with pytest.raises(ProtocolError):
        host.receive(data)


def test_a_peer_that_asks_without_reading_is_given_up() -> None:
    host = Connection(is_host=True)
    host.receive(HELLO)
    with pytest.raises(ProtocolError, match="without reading"):
        for _ in range(1000):
            host.receive(frame(framing.PING, 0, b"12345678") * 1000)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=300), st.builds(frame, st.integers(0, 9), st.integers(0, 9), st.binary(max_size=300))
        ),
        max_size=40,
    )
)
@settings(max_examples=300, deadline=None)
def test_whatever_comes_in_memory_stays_bounded(chunks: list[bytes]) -> None:
    host = Connection(is_host=True, max_streams=4)
    received = 0
    try:
        host.receive(HELLO)
        for chunk in chunks:
            for event in host.receive(chunk):
                if event.kind == framing.DATA:
                    received += len(event.value)
    except ProtocolError:
        pass
    assert len(host._input) <= max(framing.MAX_PAYLOAD.values()) + HEAD.size + 400
    assert host.output_size <= framing.MAX_OUTPUT + 2000
    assert len(host._streams) <= 4
    assert received <= sum(map(len, chunks))


@given(st.lists(st.lists(st.binary(max_size=500), min_size=1, max_size=5), max_size=8), st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_messages_come_back_as_they_were_packed(messages: list[list[bytes]], cut: int) -> None:
    data = b"".join(pack_message(*parts) for parts in messages)
    reader = MessageReader(100_000)
    got = []
    for start in range(0, len(data), cut):
        got += reader.feed(data[start : start + cut])
    assert got == messages


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_messages_of_nonsense_end_in_an_error_or_wait(data: bytes) -> None:
    reader = MessageReader(1000)
    try:
        reader.feed(data)
    except ProtocolError:
        return
    assert len(reader._buffer) <= 1004


def test_a_guests_headers_are_small_and_a_hosts_may_be_large() -> None:
    host, guest = make_pair()
    host.open({"argv": ["x" * 200_000]})
    _, at_guest = exchange(host, guest)
    assert [event.kind for event in at_guest] == [framing.OPEN]
    guest.open({"kind": "tcp", "x": "y" * 900})
    assert [event.kind for event in host.receive(guest.take_output())] == [framing.OPEN]
    with pytest.raises(ProtocolError, match="limit is 1024"):
        host.receive(frame(framing.OPEN, 4, b'{"x":"%s"}' % (b"y" * 1024)))
    with pytest.raises(ProtocolError, match="limit is 256"):
        Connection(is_host=True).receive(frame(framing.HELLO, 0, b'{"version":1,"x":"%s"}' % (b"y" * 256)))


def test_many_small_frames_wait_in_no_more_than_their_own_size() -> None:
    host, _ = make_pair()
    tracemalloc.start()
    try:
        for _ in range(20):
            host.receive(frame(framing.PING, 0, b"12345678") * 4000)
        assert tracemalloc.get_traced_memory()[0] < 2 * host.output_size
    finally:
        tracemalloc.stop()


def test_a_message_over_its_limit_is_refused_before_it_is_held() -> None:
    reader = MessageReader(1000)
    with pytest.raises(ProtocolError):
        reader.feed(struct.pack(">I", 1001))
