"""Run processes that outlive their readers and their owner, and keep their latest output."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from jupyter_agentbox.errors import InvalidRequest, LinkClosed, NotFound
from jupyter_agentbox.sandbox.link.link import LinkThread, Stream
from jupyter_agentbox.sandbox.record import ProcessRecord
from jupyter_agentbox.spec import KIB, MIB

from .values import Exit, Output, ProcessInfo
from .wire import KILL_TIMEOUT, Box, ProtocolViolation, Wire, find_loss

log = logging.getLogger(__name__)

#: Bytes kept of each output. Older ones are dropped.
RING_SIZE = 1 * MIB
#: Seconds that the guest may take to start a process; and for which a slow reader may delay one.
START_TIMEOUT = 30.0
HOLD_TIMEOUT = 10.0
#: Bytes read from each process per second, at most, so that none keeps the link thread busy with output that no
#: one reads.
DRAIN_RATE = 32 * MIB
_CHUNK = 64 * KIB


class Ring:
    """A buffer of the last part of an output, addressed by offsets within the whole."""

    def __init__(self) -> None:
        self.start = self.end = 0
        self._data = bytearray()

    def put(self, offset: int, data: bytes) -> None:
        if offset != self.end:
            self._data.clear()
            self.start = offset
        self._data += data
        self.end = offset + len(data)
        excess = len(self._data) - RING_SIZE
        if excess > 0:
            del self._data[:excess]
            self.start += excess

    def get(self, offset: int, count: int) -> tuple[int, bytes]:
        offset = max(offset, self.start)
        return offset, bytes(self._data[offset - self.start : offset - self.start + count])


class Process:
    """A background process, on a terminal or not, which outlives its readers and its owner.

    Attributes
    ----------
    rings : dict of str to Ring
    exit : Exit or None
        How the process ended.
    loss : Exception or None
        Why its end cannot be determined.
    """

    def __init__(self, box: Box, record: ProcessRecord) -> None:
        self.record = record
        self.rings = {"stdout": Ring(), "stderr": Ring()}
        self.followers: set[Follower] = set()
        self.exit: Exit | None = None
        self.loss: Exception | None = None
        self._box = box
        self._changed = asyncio.Event()
        self._moved = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = asyncio.Lock()
        self._wire: Wire | None = None
        self._input: Stream | None = None
        self._is_forgotten = False
        self._taken = 0
        self._since = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the process produces no more events."""
        return self.exit is not None or self.loss is not None

    @property
    def info(self) -> ProcessInfo:
        """The current state of the process."""
        return ProcessInfo(
            id=self.record.name,
            command=self.record.command,
            started=self.record.started,
            state="exited" if self.exit else "lost" if self.loss else "running",
            exit_code=self.exit.exit_code if self.exit else None,
            is_terminal=self.record.is_terminal,
            stdout_bytes=self.rings["stdout"].end,
            stderr_bytes=self.rings["stderr"].end,
        )

    def open(self, header: dict[str, Any]) -> None:
        """Start the process, or reconnect to it if the header has ``is_resumed``."""
        name = self.record.name
        stream = self._box.open_stream({"kind": "process", "process": name, "is_kept": True, **header})
        self._wire = Wire(stream, may_skip=True)
        self._input = self._box.open_stream({"kind": "stdin", "process": name})
        LinkThread.instance().spawn(self._pump(self._wire))

    async def wait_started(self) -> None:
        """Wait until the process runs. Raises InvalidRequest, SandboxEnded, LinkClosed."""
        try:
            await asyncio.wait_for(asyncio.shield(self._started), START_TIMEOUT)
        except asyncio.TimeoutError:
            raise LinkClosed(f"the guest did not start the process within {START_TIMEOUT:g} s") from None

    async def _pump(self, wire: Wire) -> None:
        try:
            while self.exit is None:
                event = await wire.next()
                if isinstance(event, Output):
                    self.rings[event.stream].put(event.offset, event.data)
                    self._notify()
                    await self._throttle(len(event.data))
                    continue
                if isinstance(event, Exit):
                    self.exit = event
                if not self._started.done():
                    self._started.set_result(None)
        except InvalidRequest as error:
            self.loss = error
        except LinkClosed as error:
            if self._is_forgotten:
                self.loss = NotFound("the process was removed", field="id")
            else:
                self.loss = await find_loss(self._box, error)
                if isinstance(error, ProtocolViolation):
                    log.warning("process %s: %s", self.record.name, error)
        if self.loss is not None and not self._started.done():
            self._started.set_exception(self.loss)
            self._started.exception()  # marks the exception as retrieved, in case nothing awaits it
        self._notify()

    async def _throttle(self, count: int) -> None:
        """Wait for slow readers, for a bounded time, and limit the rate of reading."""
        deadline = time.monotonic() + HOLD_TIMEOUT
        while any(follower.is_behind for follower in self.followers):
            self._moved.clear()
            try:
                await asyncio.wait_for(self._moved.wait(), deadline - time.monotonic())
            except asyncio.TimeoutError:
                for follower in self.followers:
                    follower.is_given_up = follower.is_given_up or follower.is_behind
        self._taken += count
        if self._taken > DRAIN_RATE // 32:
            now = time.monotonic()
            await asyncio.sleep(max(0.0, self._taken / DRAIN_RATE - (now - self._since)))
            self._taken, self._since = 0, time.monotonic()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def moved(self) -> None:
        """Record that a reader has consumed output."""
        self._moved.set()

    async def change(self, timeout: float | None = None) -> bool:
        """Wait for a change. Return False after a timeout."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def write(self, data: bytes, timeout: float) -> None:
        """Write to the process's input."""
        assert self._input is not None
        try:
            async with self._writing:
                await asyncio.wait_for(self._input.write(data), timeout)
        except asyncio.TimeoutError:
            raise TimeoutError(f"the process did not read its input within {timeout:g} s") from None
        except LinkClosed:
            raise InvalidRequest("the process has ended or closed its input", field="id") from None

    async def close_input(self) -> None:
        """Close the process's input, so that it reads an end of file."""
        assert self._input is not None
        async with self._writing:
            try:
                await self._input.write_eof()
            except LinkClosed:
                pass  # already closed

    async def ask(self, **request: Any) -> None:
        """Send the guest a request, such as a signal."""
        if self._wire is not None and not self.is_over:
            await self._wire.ask(**request)

    async def forget(self) -> None:
        """End the process and everything it started, and have the guest forget it."""
        self._is_forgotten = True
        if self._wire is None or self._input is None:
            return
        self._input.reset()
        try:
            await self._wire.stream.write_eof()
        except LinkClosed:
            pass  # closed with the sandbox, or because the guest violated the protocol
        # A well-behaved guest answers by closing its end of the stream.
        asyncio.get_running_loop().call_later(KILL_TIMEOUT, self._wire.stream.reset)


class Follower:
    """A reader of a background process, from given offsets."""

    def __init__(self, process: Process, offsets: Mapping[str, int]) -> None:
        self.is_given_up = False
        self._process = process
        self._offsets = {name: offsets.get(name, ring.start) for name, ring in process.rings.items()}
        process.followers.add(self)

    @property
    def is_behind(self) -> bool:
        """Whether the reader is so far behind that the process should wait for it."""
        rings = self._process.rings
        return not self.is_given_up and any(
            rings[name].end - offset > RING_SIZE // 2 for name, offset in self._offsets.items()
        )

    async def next(self) -> Output | Exit:
        """Wait for the next event. Raises SandboxEnded, LinkClosed."""
        process = self._process
        while True:
            for name, ring in process.rings.items():
                if self._offsets[name] < ring.end:
                    offset, data = ring.get(self._offsets[name], _CHUNK)
                    self._offsets[name] = offset + len(data)
                    self.is_given_up = self.is_given_up and self._offsets[name] < ring.end
                    process.moved()
                    return Output(name, offset, data)
            if process.exit is not None:
                return process.exit
            if process.loss is not None:
                raise process.loss
            await process.change()

    def close(self) -> None:
        """Stop reading. The process continues."""
        self._process.followers.discard(self)
        self._process.moved()
