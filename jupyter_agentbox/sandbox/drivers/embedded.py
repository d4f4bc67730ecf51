"""The embedded driver: ipykernel itself reads and writes FIFOs of the link's directory, and nothing is between.

Its other end is ``guest.ipykernel.embedded``. A round trip costs two wake-ups instead of a dozen. Each owner
makes FIFOs of its own; the guest opens them for the kernel, as user code can neither see nor open any. How much was
taken of what the kernel said is written down beside the sandbox, message by message, so that a successor of an owner
that was killed goes on exactly there.

The kernel is hostile: of each FIFO this end holds a few reads and one unfinished message, no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.guest.ipykernel.embedded_protocol import (
    ACK,
    HELLO,
    READ_SIZE,
    FormatError,
    Unpacker,
    pack,
    pack_head,
    packed_size,
)
from jupyter_agentbox.runtimes import linkdir
from jupyter_agentbox.sandbox.link.link import PIPE_SIZE, LinkThread
from jupyter_agentbox.spec import MIB

if TYPE_CHECKING:
    from . import Kernel

log = logging.getLogger(__name__)

#: FIFOs that the kernel reads, and those that it writes.
READ_BY_KERNEL = ("shell", "stdin", "control", "said-read", "answers-read")
WRITTEN_BY_KERNEL = ("said", "answers")
CHANNELS = frozenset({b"shell", b"iopub", b"stdin", b"control"})
#: Largest message of a kernel, bytes.
MAX_MESSAGE = 128 * MIB
#: Bytes of a message for the kernel that make its FIFO a large one; they are not put together before.
LARGE = 64 * 1024
#: Reads that may wait while a client is slow.
MAX_READS = 2
#: Seconds that the kernel may take to close its ends.
HANG_UP_TIMEOUT = 10.0
_TAKEN = struct.Struct("<Q")


@dataclass(frozen=True)
class Claim:
    """Whose a kernel becomes that has waited.

    Parameters
    ----------
    key, signature_scheme : str
        The session's.
    env : mapping of str to str
        Its whole environment.
    rlimits : mapping of str to int
        Its resource limits, no more than it has; names without the prefix.
    context : str
        The context of code that it is; empty for a notebook's.
    """

    key: str
    signature_scheme: str
    env: Mapping[str, str]
    rlimits: Mapping[str, int]
    context: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return what the kernel is told, as a value that JSON can hold."""
        return {
            "key": self.key,
            "signature_scheme": self.signature_scheme,
            "env": dict(self.env),
            "rlimits": dict(self.rlimits),
        }


class Embedded:
    """The FIFOs of one kernel. One that waited becomes that of a claim with the first of them."""

    def __init__(self, kernel: Kernel, claim: Claim | None = None) -> None:
        self._kernel = kernel
        self._claim = claim
        self._directory = kernel.sandbox.directory / "link"
        self._record = Taken(kernel.sandbox.directory / f"{kernel.name}.taken")
        self._loop = LinkThread.instance().loop
        self._name = ""
        self._writers: dict[str, Writer] = {}
        self._readers: list[Reader] = []
        self._has_hung_up = asyncio.Event()
        self._is_open = asyncio.Event()  # not while its ends are closed for a checkpoint
        self._is_closed = False

    def open(self) -> None:
        """Make FIFOs and have the kernel handed their other ends."""
        # A new name, and it is there only when our ends are open: gVisor would wait for them for ever.
        self._name = f"{self._kernel.name}_{secrets.token_hex(8)}"
        for channel in READ_BY_KERNEL:
            self._writers[channel] = Writer(self._make(channel, os.O_RDWR), self._loop)
        rooms = []
        for index, channel in enumerate(WRITTEN_BY_KERNEL):
            fd = self._make(channel, os.O_RDONLY)
            with contextlib.suppress(OSError):  # beyond this user's share of pipe memory: slower, no worse
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            # Pages need not be full, but two neighbours have more than one's worth.
            room = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) // 2 - 2 * mmap.PAGESIZE
            rooms.append(room)
            reader = Reader(fd, self._loop, self._active)
            self._readers.append(reader)
            acks = Acks(self._writers[f"{channel}-read"], room // 4)
            LinkThread.instance().spawn(self._carry(index, reader, acks))
        taken = self._record.all() if self._record.is_known else None
        claim, self._claim = self._claim, None
        given = {} if claim is None else {"claim": claim.to_dict()}
        self._kernel.request({"fifos": self._name, "taken": taken, "room": rooms, **given})
        self._is_open.set()

    def _make(self, channel: str, flags: int) -> int:
        return linkdir.share_fifo(self._directory, f"{self._name}-{channel}", flags)

    def _remove_names(self) -> None:
        names = (f"{self._name}-{channel}" for channel in (*READ_BY_KERNEL, *WRITTEN_BY_KERNEL))
        linkdir.remove_names(self._directory, names)

    def _active(self) -> None:
        self._kernel.sandbox.link.last_active = time.monotonic()

    async def send(self, channel: str, frames: list[bytes]) -> None:
        """Hand the kernel a message. Raises LinkClosed."""
        is_large = sum(map(len, frames)) > LARGE
        pieces, is_written = [pack_head(frames), *frames] if is_large else [pack(frames)], False
        while not is_written:
            await self._is_open.wait()
            writer = self._writers.get(channel)
            if writer is None:
                raise LinkClosed("the kernel has ended")
            self._kernel.sandbox.link.on_write()
            self._active()
            is_written = await writer.write(pieces)

    async def _carry(self, index: int, reader: Reader, acks: Acks) -> None:
        unpacker = Unpacker(MAX_MESSAGE)
        await self._kernel.heard_by_somebody()
        hello = b""
        try:
            while data := await reader.read():
                count = len(data)
                if len(hello) < HELLO.size:
                    hello, data = hello + data[: HELLO.size - len(hello)], data[HELLO.size - len(hello) :]
                    if len(hello) == HELLO.size:
                        self._greeted(index, *HELLO.unpack(hello))
                for parts in unpacker.feed(data):
                    if parts[0] not in CHANNELS:
                        raise FormatError("a message on an unknown channel")
                    self._kernel.is_ready = True
                    await self._kernel.on_message(parts[0].decode(), parts[1:])
                    if reader.is_closed:
                        return
                    self._record.add(index, packed_size(parts))
                acks.add(count)
        except FormatError as error:
            await self._kernel.cut_off(WRITTEN_BY_KERNEL[index], error)
        finally:
            reader.close()

    def _greeted(self, index: int, offset: int, dropped: int) -> None:
        self._record.set(index, offset)
        self._kernel.dropped(WRITTEN_BY_KERNEL[index], dropped)
        if index == len(WRITTEN_BY_KERNEL) - 1:
            self._remove_names()  # the guest opened all, this one last

    def heard(self, event: dict[str, Any]) -> None:
        """Take note of what the guest says about the kernel."""
        if event.get("event") == "hung up":
            self._has_hung_up.set()

    def reopen(self) -> None:
        """Go on after :meth:`hang_up`."""
        if not self._readers:
            self.open()

    async def hang_up(self) -> None:
        """Have the kernel close its ends, as gVisor saves no open FIFO; :meth:`reopen` makes new ones.

        What the kernel said before is taken first, and what was sent to it is in its memory. A message of which it has
        only a part is sent whole once more. Raises LinkClosed.
        """
        self._is_open.clear()
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.hang_up()
        try:
            await self._order({"hang_up": True})
            if self._kernel.is_heard:
                rest = asyncio.gather(*(reader.wait_closed() for reader in self._readers))
                await asyncio.wait_for(rest, HANG_UP_TIMEOUT)
            if self._record.is_known:
                await self._order({"hang_up": True, "taken": self._record.all()})
        except asyncio.TimeoutError:
            raise LinkClosed(f"the kernel did not hang up within {HANG_UP_TIMEOUT:g} s") from None
        finally:
            for writer in writers.values():
                writer.close()
            for reader in self._readers:
                reader.close()
            self._readers = []
            self._remove_names()

    async def _order(self, order: dict[str, Any]) -> None:
        self._has_hung_up.clear()
        self._kernel.request(order)
        await asyncio.wait_for(self._has_hung_up.wait(), HANG_UP_TIMEOUT)

    def ended(self) -> None:
        """The kernel is gone; what it said is still taken."""
        self._is_open.set()
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()
        for reader in self._readers:
            reader.close_if_unused()
        self._record.close()  # there is no next owner to tell
        self._remove_names()

    def left(self) -> None:
        """Another owner will take the kernel's messages: take no more."""
        self.ended()
        for reader in self._readers:
            reader.close()
        self._record.close()

    def close(self) -> None:
        """Drop what nobody took."""
        self.left()
        self._record.remove()


class Writer:
    """Writes whole messages to one FIFO, as the kernel reads."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._lock = asyncio.Lock()
        self._can_write = asyncio.Event()
        self._has_hung_up = False
        self._is_large = False

    async def write(self, pieces: Sequence[bytes]) -> bool:
        """Write all of them; whether that was done, and not cut off by :meth:`hang_up`. Raises LinkClosed."""
        async with self._lock:
            if not self._is_large and self._fd >= 0 and sum(map(len, pieces)) > LARGE:
                self._is_large = True
                with contextlib.suppress(OSError):  # beyond this user's share of pipe memory: slower, no worse
                    fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            rest = deque(memoryview(piece) for piece in pieces)
            while rest:
                if self._has_hung_up:
                    return False
                if self._fd < 0:
                    raise LinkClosed("the kernel has ended")
                try:
                    rest[0] = rest[0][os.write(self._fd, rest[0]) :]
                    if not rest[0]:
                        rest.popleft()
                except BlockingIOError:
                    self._can_write.clear()
                    self._loop.add_writer(self._fd, self._can_write.set)
                    await self._can_write.wait()
                    if self._fd >= 0:
                        self._loop.remove_writer(self._fd)
            return True

    def hang_up(self) -> None:
        """Write no more: whoever reads drops a part of a message when it is given another FIFO."""
        self._has_hung_up = True
        self._can_write.set()

    def write_now(self, data: bytes) -> None:
        """Write a few bytes if there is room: a kernel that needs them has read those before."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, data)

    def close(self) -> None:
        """Close it; who writes is told."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._loop.remove_writer(fd)
            os.close(fd)
            self._can_write.set()


class Acks:
    """Tells the kernel how many bytes were read of one FIFO, when it is ``interval`` more than it was told."""

    def __init__(self, writer: Writer, interval: int) -> None:
        self._writer = writer
        self._interval = interval
        self._total = self._told = 0

    def add(self, count: int) -> None:
        """So much more was read."""
        self._total += count
        if self._total - self._told >= self._interval:
            self._told = self._total
            self._writer.write_now(ACK.pack(self._total))


class Reader:
    """Reads one FIFO, no faster than what was read is taken."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop, on_data: Callable[[], object]) -> None:
        self.is_closed = False
        self._fd = fd
        self._loop = loop
        self._on_data = on_data
        self._reads: deque[bytes] = deque()
        self._is_paused = False
        self._is_used = False
        self._has_news = asyncio.Event()
        self._has_closed = asyncio.Event()
        loop.add_reader(fd, self._readable)

    async def read(self) -> bytes:
        """What comes next; ``b""`` when the kernel has closed its end."""
        while not self._reads:
            if self._fd < 0:
                return b""
            if self._is_paused:
                self._is_paused = False
                self._loop.add_reader(self._fd, self._readable)
            self._has_news.clear()
            await self._has_news.wait()
        return self._reads.popleft()

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._has_news.set()
        if not data:
            self._close_file()
            return
        self._is_used = True
        self._on_data()
        self._reads.append(data)
        if len(self._reads) >= MAX_READS:
            self._is_paused = True
            self._loop.remove_reader(self._fd)

    def _close_file(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)
            self._has_news.set()

    async def wait_closed(self) -> None:
        """Wait until the kernel has closed its end, and all that it said is taken."""
        await self._has_closed.wait()

    def close_if_unused(self) -> None:
        """Close it if the kernel never wrote: then its end is not seen here."""
        if not self._is_used:
            self.close()

    def close(self) -> None:
        """Take no more."""
        self.is_closed = True
        self._close_file()
        self._reads.clear()
        self._has_closed.set()


class Taken:
    """How many bytes of what a kernel said were taken, in a file that outlives this process whatever kills it.

    Written through memory, as it is done for each message.

    Attributes
    ----------
    is_known : bool
        Whether anything is; of a copy of a sandbox it is not.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_known = path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _TAKEN.size * len(WRITTEN_BY_KERNEL))
            self._map: mmap.mmap | None = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def all(self) -> list[int]:
        """Of each FIFO."""
        assert self._map is not None
        return [value for (value,) in _TAKEN.iter_unpack(self._map)]

    def set(self, index: int, value: int) -> None:
        """Note where the kernel begins."""
        if self._map is not None:
            _TAKEN.pack_into(self._map, index * _TAKEN.size, value % (1 << 64))
            self.is_known = True

    def add(self, index: int, count: int) -> None:
        """Note that so much more was taken."""
        if self._map is not None:
            self.set(index, _TAKEN.unpack_from(self._map, index * _TAKEN.size)[0] + count)

    def close(self) -> None:
        """Leave it to the next owner."""
        if self._map is not None:
            self._map.close()
            self._map = None
            self.is_known = False

    def remove(self) -> None:
        """There will be no next owner."""
        self.close()
        self._path.unlink(missing_ok=True)
