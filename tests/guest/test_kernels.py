"""The guest's connections to a kernel's sockets: in which order what comes in on several of them goes to the host."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_agentbox.guest import kernels, zmtp
from jupyter_agentbox.guest.framing import INITIAL_CREDIT
from jupyter_agentbox.guest.kernels import Channel


class Hand:
    """Stands for the loop: what is ready is called by the test, in the order that it chooses."""

    def __init__(self) -> None:
        self.watched: dict[int, tuple[Callable[[], object] | None, Callable[[], object] | None]] = {}
        self.delayed: list[Callable[[], object]] = []

    def watch(self, fd: int, on_readable: Any = None, on_writable: Any = None) -> None:
        self.watched[fd] = (on_readable, on_writable)

    def later(self, delay: float, callback: Callable[[], object]) -> None:
        self.delayed.append(callback)

    def fire(self, channel: Channel) -> None:
        sock = channel._sock
        assert sock is not None
        on_readable, _ = self.watched[sock.fileno()]
        assert on_readable is not None
        on_readable()


class Owner:
    """Stands for the host's end of one channel, and writes down what comes on all of them."""

    def __init__(self, name: str, heard: list[tuple[str, bytes]]) -> None:
        self.name, self.heard = name, heard
        self.header = {"window": 0}
        self.credit = self.credit_given = INITIAL_CREDIT
        self.on_credit: Callable[[], object] = lambda: None

    def write(self, data: bytes) -> None:
        self.heard.append((self.name, data))

    def consumed(self, count: int) -> None:
        pass


class Kernel:
    """A kernel's listening sockets, and the guest's channels to them."""

    is_running = True
    is_listened_to = kernels.Kernel.is_listened_to
    connected = kernels.Kernel.connected

    def __init__(self, folder: Path, *names: str) -> None:
        self.loop = Hand()
        self.folder = folder
        self.heard: list[tuple[str, bytes]] = []
        self.ends: dict[str, socket.socket] = {}
        self.channels: dict[str, Channel] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Listen, and have the guest connect; again, where it was connected before."""
        kept, self.loop.watched = self.loop.watched, {}
        (self.folder / name).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.folder / name))
            listener.listen()
            if self.loop.delayed:
                channel = self.channels[name]
                self.loop.delayed.pop()()
            else:
                channel = Channel(self.loop, self, name, str(self.folder / name))  # type: ignore[arg-type]
            self.channels[name] = channel
            ((fd, (_, on_writable)),) = self.loop.watched.items()
            assert on_writable is not None
            on_writable()
            self.ends[name] = listener.accept()[0]
        self.ends[name].sendall(zmtp.greeting() + zmtp.ready(b"PUB" if name == "iopub" else b"ROUTER"))
        deadline = time.monotonic() + 60
        while channel._sock is None:
            assert time.monotonic() < deadline
            on_readable, _ = self.loop.watched[fd]
            assert on_readable is not None
            on_readable()
        if channel._stream is None:
            channel.attach(Owner(name, self.heard))  # type: ignore[arg-type]
        self.loop.watched = {**kept, **self.loop.watched}

    def _report(self, **fields: Any) -> None:
        pass

    def close(self) -> None:
        for channel in self.channels.values():
            assert channel._sock is not None
            channel._sock.close()
        for end in self.ends.values():
            end.close()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path, "shell", "iopub")
    yield made
    made.close()


def test_a_reply_does_not_overtake_what_was_put_out_before_it(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_READ_SIZE", 1000)  # so that several reads are needed
    said = [zmtp.encode([b"stream", text * 10_000]) for text in (b"1", b"2")]
    reply = zmtp.encode([b"client", b"reply"])
    for message in said:
        kernel.ends["iopub"].sendall(message)
    kernel.ends["shell"].sendall(reply)
    kernel.loop.fire(kernel.channels["shell"])
    assert kernel.heard == [("iopub", said[0]), ("iopub", said[1]), ("shell", reply)]
    kernel.loop.fire(kernel.channels["iopub"])
    assert len(kernel.heard) == 3


def test_a_kernel_is_asked_nothing_before_what_it_puts_out_is_heard(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, "shell")
    try:
        owner: Any = kernel.channels["shell"]._stream
        request = zmtp.encode([b"request"])
        owner.on_data(request)
        end = kernel.ends["shell"]
        end.setblocking(False)
        assert request not in end.recv(65536)  # the greeting
        assert kernel.loop.watched[kernel.channels["shell"]._sock.fileno()][1] is None, "nothing spins meanwhile"  # type: ignore[union-attr]
        kernel.add("iopub")
        assert end.recv(65536) == request
        owner.on_data(request)
        assert end.recv(65536) == request
    finally:
        kernel.close()


def test_a_message_that_a_lost_connection_cut_off_is_sent_whole(kernel: Kernel) -> None:
    channel = kernel.channels["shell"]
    owner: Any = channel._stream
    messages = [zmtp.encode([text * 2_000_000]) for text in (b"1", b"2")]
    owner.on_data(b"".join(messages))
    assert 0 < channel._sent < len(messages[0]), "the kernel has a part"
    kernel.ends["shell"].close()
    kernel.loop.fire(channel)
    assert not channel.is_connected
    kernel.add("shell")
    end = kernel.ends["shell"]
    end.setblocking(False)
    got = bytearray()
    deadline = time.monotonic() + 60
    while not got.endswith(messages[1]):
        assert time.monotonic() < deadline
        channel.send_waiting()
        while True:
            try:
                got += end.recv(1 << 20)
            except BlockingIOError:
                break
    assert len(got) - len(b"".join(messages)) == len(zmtp.greeting() + zmtp.ready(b"DEALER", kernels.IDENTITY))
    assert got.endswith(b"".join(messages))
