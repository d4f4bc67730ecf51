"""Connect to ipykernel through FIFOs in the link's directory that ipykernel reads and writes itself.

The other end is ``guest.ipykernel.embedded``. A round trip costs two wake-ups instead of a dozen. Each owner creates
its own FIFOs. The guest opens them for the kernel, because user code can neither see nor open them. A file beside the
sandbox records, message by message, how much of the kernel's output was consumed. If an owner is killed, its successor
continues exactly there.

The kernel is hostile: for each FIFO, this end buffers at most a few reads and one incomplete message.
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
#: Largest message of a kernel, in bytes.
MAX_MESSAGE = 128 * MIB
#: Size in bytes from which a message for the kernel enlarges its FIFO and is written without joining its frames first.
LARGE = 64 * 1024
#: Reads that may be buffered while a client is slow.
MAX_READS = 2
#: Seconds that the kernel may take to close its ends.
HANG_UP_TIMEOUT = 10.0
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class Claim:
    """The identity that an unclaimed kernel takes on.

    Parameters
    ----------
    key, signature_scheme : str
        For signing messages on the new owner's connection.
    env : mapping of str to str
        The kernel's complete environment.
    rlimits : mapping of str to int
        The kernel's resource limits, not above its current ones. Names are without the prefix.
    context : str
        Name of the code context that the kernel serves; empty for a notebook's kernel.
    kernel_name : str
        Name of the kernelspec.
    """

    key: str
    signature_scheme: str
    env: Mapping[str, str]
    rlimits: Mapping[str, int]
    context: str = ""
    kernel_name: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the part that is sent to the kernel, as a JSON-compatible value."""
        return {
            "key": self.key,
            "signature_scheme": self.signature_scheme,
            "env": dict(self.env),
            "rlimits": dict(self.rlimits),
            "kernel_name": self.kernel_name,
        }


class Embedded:
    """The embedded driver of one kernel and its FIFOs.

    The first set of FIFOs also applies the claim, if there is one.
    """

    def __init__(self, kernel: Kernel, claim: Claim | None = None) -> None:
        self._kernel = kernel
        self._claim = claim
        self._directory = kernel.sandbox.directory / "link"
        self._record = ConsumedCounts(kernel.sandbox.directory / f"{kernel.name}.taken")
        self._loop = LinkThread.instance().loop
        self._name = ""
        self._writers: dict[str, Writer] = {}
        self._readers: list[Reader] = []
        self._has_hung_up = asyncio.Event()
        self._is_open = asyncio.Event()  # cleared while the kernel's ends are closed for a checkpoint
        self._is_closed = False

    def open(self) -> None:
        """Create the FIFOs and have the guest hand their other ends to the kernel."""
        # The name is new, and appears only after our ends are open. Otherwise gVisor would wait for them forever.
        self._name = f"{self._kernel.name}_{secrets.token_hex(8)}"
        for channel in READ_BY_KERNEL:
            self._writers[channel] = Writer(self._make(channel, os.O_RDWR), self._loop)
        rooms = []
        for index, channel in enumerate(WRITTEN_BY_KERNEL):
            fd = self._make(channel, os.O_RDONLY)
            with contextlib.suppress(OSError):  # over this user's quota of pipe memory: slower, but correct
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            # Pages need not be full, but two adjacent ones always hold more than one page of data.
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
        """Send the kernel a message. Raises LinkClosed."""
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
        await self._kernel.wait_for_receiver()
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
            await self._kernel.fail(WRITTEN_BY_KERNEL[index], error)
        finally:
            reader.close()

    def _greeted(self, index: int, offset: int, dropped: int) -> None:
        self._record.set(index, offset)
        self._kernel.dropped(WRITTEN_BY_KERNEL[index], dropped)
        if index == len(WRITTEN_BY_KERNEL) - 1:
            self._remove_names()  # the guest opens this FIFO last, so it has opened all of them

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle an event that the guest reports about the kernel."""
        if event.get("event") == "hung up":
            self._has_hung_up.set()

    def reopen(self) -> None:
        """Reconnect after :meth:`hang_up`."""
        if not self._readers:
            self.open()

    async def hang_up(self) -> None:
        """Have the kernel close its ends, because gVisor cannot save an open FIFO. :meth:`reopen` creates new ones.

        The kernel's earlier output is read first, and its earlier input is in its memory. A message that the kernel
        received only in part is sent again in full. Raises LinkClosed.
        """
        self._is_open.clear()
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.hang_up()
        try:
            await self._order({"hang_up": True})
            if self._kernel.has_receiver:
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
        """Handle the kernel's end. Its remaining output is still delivered."""
        self._is_open.set()
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()
        for reader in self._readers:
            reader.close_if_unused()
        self._record.close()  # no later owner needs it
        self._remove_names()

    def on_owner_lost(self) -> None:
        """Stop reading, because another owner will receive the kernel's messages."""
        self.ended()
        for reader in self._readers:
            reader.close()
        self._record.close()

    def close(self) -> None:
        """Drop undelivered output."""
        self.on_owner_lost()
        self._record.remove()


class Writer:
    """A writer of whole messages to one FIFO, at the rate at which the kernel reads."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._lock = asyncio.Lock()
        self._can_write = asyncio.Event()
        self._has_hung_up = False
        self._is_large = False

    async def write(self, pieces: Sequence[bytes]) -> bool:
        """Write all pieces. Return False if :meth:`hang_up` interrupted this. Raises LinkClosed."""
        async with self._lock:
            if not self._is_large and self._fd >= 0 and sum(map(len, pieces)) > LARGE:
                self._is_large = True
                with contextlib.suppress(OSError):  # over this user's quota of pipe memory: slower, but correct
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
        """Stop writing. The reader drops an incomplete message when it is given another FIFO."""
        self._has_hung_up = True
        self._can_write.set()

    def write_now(self, data: bytes) -> None:
        """Write a few bytes if there is room. A kernel that needs them has read the previous ones, so there is room."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, data)

    def close(self) -> None:
        """Close the FIFO. Pending writes raise LinkClosed."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._loop.remove_writer(fd)
            os.close(fd)
            self._can_write.set()


class Acks:
    """Acknowledgements that tell the kernel how many bytes of one FIFO were read, one for every ``interval`` bytes."""

    def __init__(self, writer: Writer, interval: int) -> None:
        self._writer = writer
        self._interval = interval
        self._total = self._told = 0

    def add(self, count: int) -> None:
        """Count bytes that were read, and acknowledge them if the interval is reached."""
        self._total += count
        if self._total - self._told >= self._interval:
            self._told = self._total
            self._writer.write_now(ACK.pack(self._total))


class Reader:
    """A reader of one FIFO that reads no faster than its data is consumed."""

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
        """Return the next bytes, or ``b""`` when the kernel has closed its end."""
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
        """Wait until the kernel has closed its end and all of its output is consumed."""
        await self._has_closed.wait()

    def close_if_unused(self) -> None:
        """Close the FIFO if the kernel never wrote to it, because in that case its end cannot be detected here."""
        if not self._is_used:
            self.close()

    def close(self) -> None:
        """Stop reading and drop buffered data."""
        self.is_closed = True
        self._close_file()
        self._reads.clear()
        self._has_closed.set()


class ConsumedCounts:
    """A record of how many bytes of a kernel's output were consumed, in a file that survives any death of this process.

    It is memory-mapped, because it is written for each message.

    Attributes
    ----------
    is_known : bool
        Whether the record has content. It has none for a copy of a sandbox.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_known = path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _COUNT.size * len(WRITTEN_BY_KERNEL))
            self._map: mmap.mmap | None = mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def all(self) -> list[int]:
        """Return the count of each FIFO."""
        assert self._map is not None
        return [value for (value,) in _COUNT.iter_unpack(self._map)]

    def set(self, index: int, value: int) -> None:
        """Record the offset at which the kernel starts."""
        if self._map is not None:
            _COUNT.pack_into(self._map, index * _COUNT.size, value % (1 << 64))
            self.is_known = True

    def add(self, index: int, count: int) -> None:
        """Record that `count` more bytes were consumed."""
        if self._map is not None:
            self.set(index, _COUNT.unpack_from(self._map, index * _COUNT.size)[0] + count)

    def close(self) -> None:
        """Close the record and leave it for the next owner."""
        if self._map is not None:
            self._map.close()
            self._map = None
            self.is_known = False

    def remove(self) -> None:
        """Remove the record, because there will be no next owner."""
        self.close()
        self._path.unlink(missing_ok=True)
