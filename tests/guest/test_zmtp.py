"""The ZMTP codec against itself, against libzmq, and against noise."""

from __future__ import annotations

import socket

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_agentbox.guest import zmtp
from jupyter_agentbox.guest.zmtp import Decoder, Handshake, Splitter, ZmtpError, encode

FRAMES = st.lists(st.binary(max_size=700), min_size=1, max_size=6)


@given(st.lists(FRAMES, max_size=6), st.integers(1, 400))
@settings(max_examples=80, deadline=None)
def test_messages_come_back_as_they_were_however_they_are_cut(messages: list[list[bytes]], cut: int) -> None:
    data = b"".join(map(encode, messages))
    decoder = Decoder(1_000_000)
    got = []
    for start in range(0, len(data), cut):
        got += decoder.feed(data[start : start + cut])
    assert got == messages
    assert decoder.feed(encode([b"next"])) == [[b"next"]]  # nothing was left over


@given(st.lists(st.binary(max_size=300), max_size=10))
@settings(max_examples=200, deadline=None)
def test_noise_ends_in_an_error_or_a_bounded_wait(chunks: list[bytes]) -> None:
    decoder = Decoder(1000, max_frames=10)
    try:
        for chunk in chunks:
            decoder.feed(chunk)
    except ZmtpError:
        return
    assert len(decoder._buffer) <= 1000 + 9 + 300
    assert sum(map(len, decoder._frames)) <= 1000
    assert len(decoder._frames) <= 10


def test_a_message_over_the_limit_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ZmtpError):
        Decoder(1000).feed(b"\x02" + (1 << 62).to_bytes(8, "big"))
    with pytest.raises(ZmtpError):
        Decoder(1000).feed(encode([b"x" * 600, b"y" * 600]))
    with pytest.raises(ZmtpError):
        Decoder(1000, max_frames=3).feed(encode([b""] * 5))


def test_commands_between_messages_are_passed_over() -> None:
    assert Decoder(1000).feed(encode([b"a"]) + bytes((zmtp.COMMAND, 4)) + b"PING" + encode([b"b"])) == [[b"a"], [b"b"]]


@pytest.fixture
def router() -> zmq.Socket:
    context = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.linger = 0
    sock.rcvtimeo = 60_000
    yield sock
    sock.close()
    context.term()


def test_libzmq_takes_our_greeting_and_identity_and_answers(router: zmq.Socket) -> None:
    port = router.bind_to_random_port("tcp://127.0.0.1")
    with socket.create_connection(("127.0.0.1", port), 60) as sock:
        sock.sendall(zmtp.greeting() + zmtp.ready(b"DEALER", b"agentbox"))
        handshake = Handshake()
        while (rest := handshake.feed(sock.recv(3))) is None:  # in small pieces on purpose
            pass
        assert rest == b""
        sock.sendall(encode([b"client", b"x" * 100_000]))
        assert router.recv_multipart() == [b"agentbox", b"client", b"x" * 100_000]
        router.send_multipart([b"agentbox", b"client", b"", b"y" * 100_000])
        decoder = Decoder(1_000_000)
        messages: list[list[bytes]] = []
        while not messages:
            messages = decoder.feed(sock.recv(65536))
        assert messages == [[b"client", b"", b"y" * 100_000]]


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 60,
        b"\xff" + b"\0" * 8 + b"\x7f\x01\x00" + b"\0" * 60,
        b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" * 32 + b"\x04\x06\x05READY",
        zmtp.greeting() + b"\x04\x06\x05ERROR",
        zmtp.greeting() + b"\x00\x05hello",
        zmtp.greeting() + b"\x04\x08\x05READY\xff\xff",
        zmtp.greeting() + b"\x06" + (4097).to_bytes(8, "big"),
    ],
)
def test_a_peer_of_another_kind_is_refused(data: bytes) -> None:
    with pytest.raises(ZmtpError):
        Handshake().feed(data)


@given(identity=st.binary(max_size=255), rest=st.binary(max_size=50), cuts=st.lists(st.integers(1, 40)))
@settings(max_examples=200, deadline=None)
def test_a_handshake_is_read_in_any_pieces(identity: bytes, rest: bytes, cuts: list[int]) -> None:
    handshake, left, is_done = Handshake(), b"", False
    body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + len(identity).to_bytes(4, "big") + identity
    data = zmtp.greeting() + b"\x06" + len(body).to_bytes(8, "big") + body + rest
    for cut in [*cuts, len(data)]:
        piece, data = data[:cut], data[cut:]
        after = piece if is_done else handshake.feed(piece)
        is_done = is_done or after is not None
        left += after or b""
    assert (handshake.identity, left) == (identity, rest)


@given(st.lists(FRAMES, max_size=6), st.integers(1, 400))
@settings(max_examples=80, deadline=None)
def test_messages_are_cut_apart_as_they_came(messages: list[list[bytes]], cut: int) -> None:
    data = b"".join(map(encode, messages))
    splitter = Splitter(1_000_000)
    got = []
    for start in range(0, len(data), cut):
        got += splitter.feed(data[start : start + cut])
    assert got == list(map(encode, messages))


def test_a_message_too_large_to_carry_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ZmtpError):
        Splitter(1000).feed(b"\x02" + (1 << 62).to_bytes(8, "big"))
