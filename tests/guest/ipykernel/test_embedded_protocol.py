"""Messages over FIFOs: the format, and a sender whose readers come and go."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_agentbox.guest.ipykernel.embedded_protocol import (
    ACK,
    HELLO,
    MAX_PARTS,
    FormatError,
    Sender,
    Unpacker,
    pack,
    packed_size,
)

MESSAGES = st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=6), max_size=8)


@given(MESSAGES, st.integers(1, 97))
def test_messages_come_out_as_they_went_in_whatever_the_pieces(messages: list[list[bytes]], piece: int) -> None:
    data = b"".join(map(pack, messages))
    assert len(data) == sum(map(packed_size, messages))
    unpacker = Unpacker(10_000)
    got = [m for start in range(0, len(data), piece) for m in unpacker.feed(data[start : start + piece])]
    assert got == messages


@given(st.lists(st.binary(max_size=400), max_size=20))
@settings(max_examples=300)
def test_random_bytes_are_refused_or_bounded(pieces: list[bytes]) -> None:
    unpacker = Unpacker(1000)
    try:
        for piece in pieces:
            for message in unpacker.feed(piece):
                assert packed_size(message) <= 1000
    except FormatError:
        return
    assert len(unpacker._buffer) <= 4 + 4 * MAX_PARTS + 1000


def test_a_message_may_be_neither_too_large_nor_of_too_many_parts() -> None:
    for data in (pack([b"x" * 1001]), pack([b""] * 4097), b"\0\0\0\0", b"\xff\xff\xff\xff"):
        with pytest.raises(FormatError):
            Unpacker(1000).feed(data)


def test_buffers_of_any_shape_are_sent_as_they_lie_in_memory() -> None:
    square = np.arange(12, dtype="i4").reshape(3, 4)
    parts: list[Any] = [square, np.asfortranarray(square), np.zeros((0, 3)), bytearray(b"b")]
    (got,) = Unpacker(1000).feed(pack(parts))
    assert got == [square.tobytes(), square.tobytes("F"), b"", b"b"]


class Owner:
    """Reads what a sender writes, as a host does."""

    def __init__(self, directory: Path, name: str, room: int = 100_000) -> None:
        self.room = room
        self.paths = [directory / f"{name}-{kind}" for kind in ("said", "acks")]
        for path in self.paths:
            os.mkfifo(path)
        self.said = os.open(self.paths[0], os.O_RDONLY | os.O_NONBLOCK)
        self.acks = os.open(self.paths[1], os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self.said, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.read = 0
        self.buffer = b""

    def attach(self, sender: Sender) -> None:
        said, acks = os.open(self.paths[0], os.O_WRONLY), os.open(self.paths[1], os.O_RDONLY)
        sender.attach(said, acks, self.room)

    def read_on(self) -> None:
        """Read all that is there, and acknowledge it."""
        before = self.read
        try:
            while data := os.read(self.said, 65536):
                self.read += len(data)
                self.buffer += data
        except BlockingIOError:
            pass
        if self.read > before:
            os.write(self.acks, ACK.pack(self.read))

    def take(self) -> tuple[int, int, list[list[bytes]]]:
        """Read all that is there: offset, count of the dropped, messages since it came."""
        self.read_on()
        return (*HELLO.unpack(self.buffer[: HELLO.size]), Unpacker(1 << 30).feed(self.buffer[HELLO.size :]))

    def close(self) -> None:
        os.close(self.said)
        os.close(self.acks)


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender(50_000)
    yield made
    made.detach()


def numbers(messages: list[list[bytes]]) -> list[int]:
    return [int(message[0]) for message in messages]


def test_the_next_owner_begins_with_what_the_last_one_did_not_take(sender: Sender, tmp_path: Path) -> None:
    for number in range(3):
        sender.send([b"%d" % number])
    first = Owner(tmp_path, "first")
    first.attach(sender)
    sender.send([b"3"])
    offset, dropped, messages = first.take()
    assert (offset, dropped, numbers(messages)) == (0, 0, [0, 1, 2, 3])
    first.close()
    sender.send([b"4"])
    sender.send([b"5"])
    taken = sum(map(packed_size, messages[:2]))
    second = Owner(tmp_path, "second")
    sender.detach()
    sender.forget(taken)
    second.attach(sender)
    offset, dropped, messages = second.take()
    assert (offset, dropped, numbers(messages)) == (taken, 0, [2, 3, 4, 5])
    second.close()


def test_what_was_held_back_together_is_taken_message_by_message(sender: Sender, tmp_path: Path) -> None:
    first, second = Owner(tmp_path, "first"), Owner(tmp_path, "second")
    first.attach(sender)
    sender.hold()
    for number in range(3):
        sender.send([b"%d" % number])
    assert len(first.buffer) == 0
    assert first.take()[2] == []
    assert sender.release() is True
    messages = first.take()[2]
    assert numbers(messages) == [0, 1, 2]
    sender.detach()
    sender.forget(packed_size(messages[0]))
    second.attach(sender)
    assert numbers(second.take()[2]) == [1, 2]
    first.close()
    second.close()


def test_without_an_owner_the_oldest_are_dropped_and_counted(sender: Sender, tmp_path: Path) -> None:
    for number in range(1000):
        sender.send([b"%d" % number, b"x" * 100])
    owner = Owner(tmp_path, "owner")
    owner.attach(sender)
    _, dropped, messages = owner.take()
    assert 300 < dropped < 1000
    assert numbers(messages) == list(range(dropped, 1000))
    owner.close()


def test_no_more_is_written_than_the_owner_has_room_for_and_what_is_taken_is_not_kept(
    sender: Sender, tmp_path: Path
) -> None:
    owner = Owner(tmp_path, "owner", room=20_000)
    owner.attach(sender)

    def send() -> None:
        for number in range(100):
            sender.send([b"%d" % number, b"y" * 7000])

    thread = threading.Thread(target=send)
    thread.start()
    got: list[list[bytes]] = []
    while len(got) < 100:
        before = owner.read
        got = owner.take()[2]
        assert owner.read - before <= 20_000
    thread.join(10)
    assert numbers(got) == list(range(100))
    assert sum(len(data) for _, data in sender._sent) < 40_000
    owner.close()


def test_an_interrupt_at_any_moment_breaks_no_message(sender: Sender, tmp_path: Path) -> None:
    class Interrupt(BaseException): ...

    is_armed = False

    def interrupt(*_: object) -> None:
        if is_armed:
            raise Interrupt

    owner = Owner(tmp_path, "owner", room=30_000)
    is_done = threading.Event()

    def read() -> None:
        while not is_done.wait(0.0005):
            owner.read_on()

    # Not by a timer of the process: that is what ends a test which hangs.
    main = threading.get_ident()

    def pester() -> None:
        while not is_done.wait(0.0007):
            signal.pthread_kill(main, signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, interrupt)
    threads = [threading.Thread(target=target, daemon=True) for target in (read, pester)]
    owner.attach(sender)
    for thread in threads:
        thread.start()
    interrupts = 0
    try:
        number = 0
        while number < 600:
            try:
                is_armed = True
                number += 1
                sender.send([b"%d" % number, b"z" * 5000])
                is_armed = False
            except Interrupt:
                is_armed = False
                interrupts += 1
        sender.send([b"-1"])
    finally:
        is_done.set()
        for thread in threads:
            thread.join(10)
        signal.signal(signal.SIGUSR1, previous)
    got = numbers(owner.take()[2])
    assert interrupts > 10
    assert got == [*sorted(set(got[:-1])), -1]
    owner.close()
