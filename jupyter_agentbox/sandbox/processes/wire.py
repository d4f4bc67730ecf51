"""Read one process's stream from the untrusted guest, and run foreground commands, which end with their readers."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import signal
from collections.abc import Callable
from typing import Any, Protocol

from jupyter_agentbox.errors import InvalidRequest, LinkClosed, SandboxEnded
from jupyter_agentbox.guest.framing import MessageReader, ProtocolError, load_json, pack_json
from jupyter_agentbox.sandbox.link.link import LinkThread, Stream
from jupyter_agentbox.spec import KIB, End, SandboxSpec

from .values import Exit, Output

#: Seconds that the guest may take to report the end of a process after a kill.
KILL_TIMEOUT = 5.0
#: Credit of a process beyond the initial one, and its largest message, in bytes.
_CREDIT = 256 * KIB
_MAX_MESSAGE = 256 * KIB
_MAX_OFFSET = 1 << 62
_NAMES = {b"1": "stdout", b"2": "stderr"}


class Box(Protocol):
    """The part of a sandbox that this module needs."""

    end: End | None

    @property
    def spec(self) -> SandboxSpec: ...

    def open_stream(self, header: dict[str, Any]) -> Stream: ...

    async def wait_ended(self) -> End: ...


class ProtocolViolation(LinkClosed):
    """The guest sent a message that is not valid process output."""


class Started:
    """The guest has started the process, or has resumed it."""


class Wire:
    """The stream of one process, with validation of everything that the guest sends.

    Parameters
    ----------
    stream : Stream
    may_skip : bool
        Whether offsets may jump ahead.
    """

    def __init__(self, stream: Stream, *, may_skip: bool) -> None:
        self.stream = stream
        self._may_skip = may_skip
        self._reader = MessageReader(_MAX_MESSAGE)
        self._events: list[Output | Exit | Started] = []
        self._ends = {"stdout": 0, "stderr": 0}
        self._asking = asyncio.Lock()
        stream.grant(_CREDIT)

    async def next(self) -> Output | Exit | Started:
        """Wait for the next event. A cancelled wait loses none.

        Raises
        ------
        LinkClosed
            The stream is lost, or the guest violated its format.
        InvalidRequest
            The program's working directory can't be entered.
        """
        while not self._events:
            data = await self.stream.read()
            try:
                if not data:
                    raise ProtocolError("an exit without a status")
                self._events = [self._event(parts) for parts in self._reader.feed(data)][::-1]
            except (ProtocolError, ValueError, KeyError, TypeError, IndexError) as error:
                self.stream.reset("invalid process output")
                raise ProtocolViolation(f"the guest sent invalid process output: {error!s:.200}") from None
        return self._events.pop()

    def _event(self, parts: list[bytes]) -> Output | Exit | Started:
        if parts[0] == b"started":
            return Started()
        if parts[0] == b"exit":
            info = load_json(parts[1])
            if info.get("field") == "workdir":
                raise InvalidRequest(f"cannot enter workdir: {info.get('message')!s:.500}", field="workdir")
            code, number = info["code"], info["signal"]
            if not isinstance(code, int) or not isinstance(number, int):
                raise ProtocolError("an exit status that is not a number")
            return Exit(code & 0xFF, number & 0x7F)
        tag, position, data = parts
        stream, offset = _NAMES[tag], int(position[:20])
        end = self._ends[stream]
        if not data or (offset != end and not (self._may_skip and end < offset < _MAX_OFFSET)):
            raise ProtocolError("output that does not continue the previous one")
        self._ends[stream] = offset + len(data)
        return Output(stream, offset, data)

    async def ask(self, **request: Any) -> None:
        """Send the guest a request, for a bounded time. There is no reply; the effect shows in the process's events."""
        try:
            async with self._asking:
                await asyncio.wait_for(self.stream.write(pack_json(request)), KILL_TIMEOUT)
        except (LinkClosed, asyncio.TimeoutError):
            pass  # the process has ended or its guest does not respond; the reader finds out


async def _feed(stream: Stream, data: bytes) -> None:
    try:
        await stream.write(data)
        await stream.write_eof()
    except LinkClosed:
        pass  # the program closed its input or ended


async def find_loss(box: Box, error: LinkClosed) -> SandboxEnded | LinkClosed:
    """Return the reason for a lost stream: most often that the sandbox has ended, including how it ended."""
    if isinstance(error, ProtocolViolation):
        return error
    try:
        await asyncio.wait_for(box.wait_ended(), KILL_TIMEOUT)
    except asyncio.TimeoutError:
        return error
    return error if box.end is None else SandboxEnded(box.end)


class Foreground:
    """A command in the foreground, which ends when its reader stops reading."""

    def __init__(self, box: Box, header: dict[str, Any], stdin: bytes, timeout: float | None) -> None:
        self._box = box
        self._timed_out = False
        self._timers: list[asyncio.TimerHandle] = []
        self._feeding: asyncio.Task[None] | None = None
        self.on_done: Callable[[], object] = lambda: None
        name = secrets.token_hex(4)
        stream = box.open_stream({"kind": "process", "process": name, **header, "has_stdin": bool(stdin)})
        self._wire = Wire(stream, may_skip=False)
        if stdin:
            source = box.open_stream({"kind": "stdin", "process": name})
            self._feeding = LinkThread.instance().spawn(_feed(source, stdin))
        if timeout is not None:
            self._timers.append(asyncio.get_running_loop().call_later(timeout, self._on_timeout))

    def _on_timeout(self) -> None:
        self._timed_out = True
        LinkThread.instance().spawn(self._wire.ask(kill=True))
        # Reset the stream if the guest does not obey, or cannot report the end because its output is not being read.
        self._timers.append(asyncio.get_running_loop().call_later(KILL_TIMEOUT, self._wire.stream.reset))

    async def next(self) -> Output | Exit:
        """Wait for the next event. Raises SandboxEnded, LinkClosed, InvalidRequest."""
        try:
            event = await self._wire.next()
            while isinstance(event, Started):
                event = await self._wire.next()
        except LinkClosed as error:
            if self._timed_out and self._box.end is None and not isinstance(error, ProtocolViolation):
                return Exit(128 + signal.SIGKILL, signal.SIGKILL, timed_out=True)
            raise await find_loss(self._box, error) from None
        if isinstance(event, Exit):
            event = dataclasses.replace(event, timed_out=self._timed_out)
        return event

    def close(self) -> None:
        """End the command. Does nothing if it was already closed."""
        for timer in self._timers:
            timer.cancel()
        if self._feeding is not None:
            self._feeding.cancel()
        self._wire.stream.reset()
        done, self.on_done = self.on_done, lambda: None
        done()
