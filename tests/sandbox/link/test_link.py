"""The host's end against the guest's real loop in a process of its own, and against a hostile one."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import jupyter_agentbox
from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.sandbox.link.link import MAX_SERVED_STREAMS, Link, LinkThread, Stream

PACKAGE = Path(jupyter_agentbox.__file__).parent

PEER = r"""
import sys, socket
sys.path.insert(0, sys.argv[1])
from guest.loop import Link, Loop, LinkDown
from guest.pump import Pump
loop = Loop()
def opened(stream):
    kind = stream.header["kind"]
    if kind == "echo":
        a, b = socket.socketpair()
        a.setblocking(False); b.setblocking(False)
        Pump(loop, a, stream)
        Echo(b)
    elif kind == "open":
        for n in range(stream.header["count"]):
            link.open({"kind": "mine", "port": n}).write(b"%d" % n)
        stream.write_eof()
    elif kind == "hang up":
        link.hang_up()
    elif kind == "die":
        raise SystemExit
class Echo:
    def __init__(self, sock):
        self.sock, self.data, self.eof = sock, b"", False
        self.watch()
    def watch(self):
        if self.eof and not self.data:
            loop.watch(self.sock.fileno()); self.sock.close(); return
        reads = not self.eof and len(self.data) <= 65536
        loop.watch(self.sock.fileno(), self.read if reads else None, self.write if self.data else None)
    def read(self):
        data = self.sock.recv(65536)
        self.data += data; self.eof = self.eof or not data; self.watch()
    def write(self):
        self.data = self.data[self.sock.send(self.data):]; self.watch()
link = Link(loop, sys.argv[2], opened)
loop.later(250, lambda: setattr(loop, "is_running", False))
link.dial()
loop.run()
"""


async def refuse(stream: Stream) -> None:
    stream.reset("not here")


class Peer:
    """The guest's loop in a process, and a link to it."""

    def __init__(self, directory: Path, on_stream: Callable[[Stream], Awaitable[None]] = refuse) -> None:
        self.lost: list[str] = []
        self.directory = directory
        self.link = Link(directory, on_stream, self.lost.append)
        self.process: subprocess.Popen[bytes] | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Link]:
        self.link.listen()
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", PEER, str(PACKAGE), str(self.directory)])
        try:
            await self.link.wait_connected(60)
            yield self.link
        finally:
            self.link.close()
            self.process.kill()
            self.process.wait(60)


@pytest.fixture
def link_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "link"
    directory.mkdir()
    return directory


def on_link(test: Callable[..., Awaitable[None]], *args: object) -> None:
    LinkThread.instance().submit(test(*args)).result(200)  # type: ignore[arg-type]


async def read_all(stream: Stream) -> bytes:
    parts = []
    while data := await stream.read():
        parts.append(data)
    return b"".join(parts)


def test_megabytes_go_there_and_back_whole(link_dir: Path) -> None:
    async def scenario() -> None:
        async with Peer(link_dir).connected() as link:
            data = random.Random(1).randbytes(8_000_000)
            stream = link.open({"kind": "echo"})

            async def send() -> None:
                await stream.write(data)
                await stream.write_eof()

            sending = asyncio.ensure_future(send())
            assert await read_all(stream) == data
            await sending

    on_link(scenario)


def test_a_stream_that_nobody_reads_holds_up_no_other(link_dir: Path) -> None:
    async def scenario() -> None:
        async with Peer(link_dir).connected() as link:
            stuck = link.open({"kind": "echo"})
            sending = asyncio.ensure_future(stuck.write(b"x" * 5_000_000))
            for _ in range(20):
                stream = link.open({"kind": "echo"})
                await stream.write(b"hello")
                await stream.write_eof()
                assert await asyncio.wait_for(read_all(stream), 60) == b"hello"
            assert not sending.done()
            stuck.reset()
            with pytest.raises(LinkClosed):
                await sending

    on_link(scenario)


def test_streams_that_the_guest_opens_are_served(link_dir: Path) -> None:
    served: list[tuple[int, bytes]] = []

    async def serve(stream: Stream) -> None:
        served.append((stream.header["port"], await stream.read()))

    async def scenario() -> None:
        async with Peer(link_dir, serve).connected() as link:
            assert await read_all(link.open({"kind": "open", "count": 50})) == b""
            for _ in range(3000):
                if len(served) == 50:
                    break
                await asyncio.sleep(0.02)
            assert sorted(served) == [(n, b"%d" % n) for n in range(50)]

    on_link(scenario)


def test_the_end_of_the_guest_ends_every_stream_and_is_told_once(link_dir: Path) -> None:
    async def scenario() -> None:
        peer = Peer(link_dir)
        async with peer.connected() as link:
            reading = asyncio.ensure_future(link.open({"kind": "echo"}).read())
            link.open({"kind": "die"})
            with pytest.raises(LinkClosed):
                await asyncio.wait_for(reading, 60)
            with pytest.raises(LinkClosed):
                link.open({"kind": "echo"})
            link.close()
            assert peer.lost == ["the guest disconnected"]

    on_link(scenario)


def test_a_guest_finds_the_next_owner_by_itself(link_dir: Path) -> None:
    async def scenario() -> None:
        peer = Peer(link_dir)
        async with peer.connected() as link:
            link.close("the owner is replaced")
            for _ in range(3):
                second = Link(link_dir, refuse, lambda reason: None)
                second.listen()
                await second.wait_connected(60)
                stream = second.open({"kind": "echo"})
                await stream.write(b"again")
                assert await stream.read() == b"again"
                second.close()

    on_link(scenario)


def test_a_guest_that_never_dials_is_an_error_in_time(link_dir: Path) -> None:
    async def scenario() -> None:
        link = Link(link_dir, refuse, lambda reason: None)
        link.listen()
        with pytest.raises(LinkClosed, match=r"did not connect within 0\.2 s"):
            await link.wait_connected(0.2)
        link.close()

    on_link(scenario)


@pytest.fixture
def memory() -> Callable[[], int]:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    return resident


@pytest.mark.parametrize("seed", range(6))
def test_noise_from_the_guest_costs_its_link_and_nothing_else(
    link_dir: Path, seed: int, memory: Callable[[], int]
) -> None:
    """Random, truncated, huge and out-of-order frames, as fast as they can be written."""
    noise = random.Random(seed)
    lost: list[str] = []
    before = memory()

    async def hold(stream: Stream) -> None:
        await asyncio.sleep(600)

    async def start() -> Link:
        link = Link(link_dir, hold, lost.append)
        link.listen()
        return link

    def make_noise() -> bytes:
        frames = [(17).to_bytes(4, "big") + b"\x01" + bytes(4) + b'{"version":1}    ']
        for number in range(3000):
            payload = noise.randbytes(noise.choice((0, 4, 8, 60, 5000))) if noise.random() < 0.4 else b"{}"
            stream = 2 * number + 2 if noise.random() < 0.97 else noise.randrange(1 << 32)
            kind = noise.choice((2, 2, 2, 3, 3, 4, 5, 6, 7, 8)) if seed % 2 else 2
            frames.append(len(payload).to_bytes(4, "big") + bytes((kind,)) + stream.to_bytes(4, "big") + payload)
        return b"".join(frames)[: noise.randrange(1000, 1 << 20)]

    link = LinkThread.instance().submit(start()).result(60)
    fd = os.open(link_dir / "up.1", os.O_WRONLY)

    def write() -> None:
        try:
            os.write(fd, make_noise())
        except OSError:
            pass
        os.close(fd)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(60)
    deadline = time.monotonic() + 60
    while not lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(lost) == 1
    assert link._serving <= MAX_SERVED_STREAMS
    assert memory() - before < 64 * 1024 * 1024

    async def settle() -> None:
        for task in list(LinkThread.instance()._tasks):
            task.cancel()

    LinkThread.instance().submit(settle()).result(60)
    on_link(lambda: asyncio.sleep(0))
