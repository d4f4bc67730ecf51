"""What a hostile guest can make the host hold: the memory of a process with a link is measured under floods."""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import termios
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jupyter_agentbox.guest.framing import (
    CREDIT,
    DATA,
    EOF,
    HELLO,
    INITIAL_CREDIT,
    OPEN,
    PING,
    PONG,
    RESET,
    MessageReader,
    ProtocolError,
    pack_message,
)
from jupyter_agentbox.guest.ipykernel.embedded_protocol import FormatError, Unpacker
from jupyter_agentbox.guest.zmtp import Decoder, ZmtpError
from jupyter_agentbox.sandbox.link.link import MAX_GUEST_STREAMS
from jupyter_agentbox.spec import KIB, MIB

#: Most that a process may grow by for one guest: the credit of all streams and a frame each, the output that waits, and
#: what the interpreter keeps for itself.
MOST = 100 * MIB

#: The host's end in a process of its own. Its streams are read by nobody, or served by an egress gate that refuses all.
HOST = r"""
import asyncio, os, re, sys
from pathlib import Path
from jupyter_agentbox.storage.audit.log import AuditLog
from jupyter_agentbox.egress.gate import Gate
from jupyter_agentbox.sandbox.link.link import Link
from jupyter_agentbox.sandbox.link.thread import LinkThread
from jupyter_agentbox.spec import Grant

def tell(line):  # in one piece, as two threads do so
    os.write(1, f"{line}\n".encode())

async def hold(stream):
    await asyncio.sleep(600)

async def start():
    gate = Gate("flood", Grant(), AuditLog(directory.parent / "audit.sqlite"))
    link = Link(directory, gate.handle if service == "gate" else hold, lambda reason: tell(f"closed {reason}"))
    link.listen()

def peak():
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def serve():
    LinkThread.instance().submit(start()).result(60)
    before = peak()
    tell("ready")
    os.read(0, 1)
    LinkThread.instance().submit(asyncio.sleep(0.1)).result(60)  # what it has read it has dealt with by then
    tell(f"grown {peak() - before}")

# A process for each flood, without starting Python and importing all this again.
while line := os.read(0, 4096):
    directory, service = Path(line.decode().split()[0]), line.decode().split()[1]
    pid = os.fork()
    if not pid:
        try:
            serve()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    tell("done")
"""


def frame(kind: int, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(4, "big") + bytes((kind,)) + stream.to_bytes(4, "big") + payload


def header(**values: object) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()


def streams(count: int = MAX_GUEST_STREAMS) -> range:
    return range(2, 2 * count + 2, 2)


def opened(payload: bytes = header(kind="tcp", via="http"), count: int = MAX_GUEST_STREAMS) -> bytes:
    return b"".join(frame(OPEN, stream, payload) for stream in streams(count))


def large_headers(size: int) -> Iterator[bytes]:
    """Headers that are a hundred times as large once they are parsed."""
    fill = b'{"kind":"tcp","x":[' + b"[]," * ((size - 40) // 3) + b"[]]}"
    for number in range(256 * MIB // size if size > 100 * KIB else 20_000):
        yield frame(OPEN, 2 * number + 2, fill)


def data(size: int, count: int = MAX_GUEST_STREAMS, payload: bytes = header(kind="tcp", via="http")) -> Iterator[bytes]:
    """All streams' whole credit, in frames of one size."""
    yield opened(payload, count)
    for stream in streams(count):
        yield frame(DATA, stream, b"x" * size) * (INITIAL_CREDIT // size)


def http_heads() -> Iterator[bytes]:
    yield opened()
    for stream in streams():
        yield frame(DATA, stream, b"GET http://a.example/ HTTP/1.1\r\n" + b"a: b\r\n" * 5000)


def answers_unread(kind: int, payload: bytes) -> Iterator[bytes]:
    for _ in range(40):
        yield frame(kind, 0, payload) * 20_000


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "hello again": lambda: iter([frame(HELLO, 0, header(version=1, x="x" * 4000))] * 1000),
    "headers of 255 KiB": lambda: large_headers(255 * KIB),
    "headers of 4 KiB": lambda: large_headers(4000),
    "headers of 2 KiB": lambda: large_headers(2000),
    "open and reset": lambda: (
        frame(OPEN, 2 * n + 2, header(kind="tcp", x="x" * 500)) + frame(RESET, 2 * n + 2, b"r" * 1024)
        for n in range(50_000)
    ),
    "data in small frames": lambda: data(2, 64),
    "data in large frames": lambda: data(64 * KIB),
    "data of names": lambda: data(1000, payload=header(kind="dns")),
    "heads without end": http_heads,
    "credit": lambda: iter([opened(), *(frame(CREDIT, s, b"\0\0\xff\xff") * 400 for s in streams())]),
    "ends": lambda: iter([opened(), *(frame(EOF, s) for s in streams())]),
    "pings whose answers nobody reads": lambda: answers_unread(PING, b"12345678"),
    "answers": lambda: answers_unread(PONG, b"12345678"),
    "a frame without end": lambda: iter(
        [opened(count=1), (64 * KIB).to_bytes(4, "big") + bytes((DATA, 0, 0, 0, 2)), b"x" * (64 * KIB - 1)]
    ),
    "unknown": lambda: iter([frame(99, 2, b"x" * 1000) * 1000]),
}


@pytest.fixture(scope="module")
def host() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as host:
        yield host
        os.killpg(host.pid, signal.SIGKILL)


@pytest.mark.parametrize("service", ["nobody", "gate"])
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_frames_costs_the_host_a_bounded_amount_of_memory(
    host: subprocess.Popen[str], tmp_path: Path, name: str, service: str
) -> None:
    directory = tmp_path / "link"
    directory.mkdir()
    assert host.stdin
    assert host.stdout
    host.stdin.write(f"{directory} {service}\n")
    host.stdin.flush()
    assert host.stdout.readline() == "ready\n"
    (up,) = directory.glob("up.*")
    fd = os.open(up, os.O_WRONLY | os.O_NONBLOCK)
    try:
        sent = write(fd, [frame(HELLO, 0, header(version=1)), *FLOODS[name]()])
        assert sent > 20
        wait_until_taken(fd)
    finally:
        host.stdin.write("\n")
        host.stdin.flush()
        lines = list(iter(host.stdout.readline, "done\n"))
        os.close(fd)
    (grown,) = (int(line.split()[1]) for line in lines if line.startswith("grown "))
    assert grown < MOST, lines


def write(fd: int, pieces: list[bytes]) -> int:
    """Write until all is written, or the host has closed its end; the count is returned."""
    count, deadline = 0, time.monotonic() + 120
    for piece in pieces:
        view = memoryview(piece)
        while view:
            assert time.monotonic() < deadline, "the host takes too long"
            try:
                written = os.write(fd, view)
            except BlockingIOError:
                time.sleep(0.001)
                continue
            except BrokenPipeError:
                return count
            view = view[written:]
            count += written
    return count


def wait_until_taken(fd: int) -> None:
    """Wait until the host has read all, or has closed its end."""
    left, deadline = array.array("i", [1]), time.monotonic() + 120
    poll = select.poll()
    poll.register(fd, 0)  # errors are told anyway
    while left[0] and not poll.poll(10):
        assert time.monotonic() < deadline, "the host takes too long"
        fcntl.ioctl(fd, termios.FIONREAD, left)


def messages_of_fifos() -> Iterator[bytes]:
    sizes = (4096).to_bytes(4, "little") + b"\x01\0\0\0" * 4096
    yield sizes + b"x" * 4095
    yield b"x"
    yield (b"\x01\0\0\0" + b"\x05\0\0\0" + b"iopub") * 5000
    yield (4096).to_bytes(4, "little") + (32 * KIB - 5).to_bytes(4, "little") * 4096 + b"x" * MIB


def messages_of_sockets() -> Iterator[bytes]:
    yield b"\x01\x01x" * 4095
    yield b"\x00\x01x"
    yield b"\x01\x00" * 5000


@pytest.mark.parametrize(
    ("reader", "pieces"),
    [
        (lambda: Unpacker(4 * MIB), messages_of_fifos),
        (lambda: Decoder(4 * MIB), messages_of_sockets),
        (lambda: MessageReader(256 * KIB), lambda: iter([pack_message(*[b"xy"] * 40_000), b"\0\x01\0\0" * 100])),
    ],
    ids=["embedded kernels", "relayed kernels", "processes"],
)
def test_messages_of_many_small_parts_take_no_more_than_a_multiple_of_their_size(
    reader: Callable[[], Unpacker], pieces: Callable[[], Iterator[bytes]]
) -> None:
    made = reader()
    tracemalloc.start()
    try:
        for piece in pieces():
            for start in range(0, len(piece), 64 * KIB):
                try:
                    made.feed(piece[start : start + 64 * KIB])
                except (FormatError, ZmtpError, ProtocolError):
                    return
            assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
