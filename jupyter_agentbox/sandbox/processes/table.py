"""Run and manage the programs of one sandbox, for callers on any event loop."""

from __future__ import annotations

import dataclasses
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from jupyter_agentbox.errors import InvalidRequest, NotFound, PolicyRefused
from jupyter_agentbox.models.long_output import HeadTail
from jupyter_agentbox.sandbox.link.thread import LinkThread, on_link_thread
from jupyter_agentbox.sandbox.record import ProcessRecord
from jupyter_agentbox.spec import MIB

from .background import Follower, Process
from .values import Chunk, Command, ExecResult, Exit, Output, ProcessInfo, check_size, check_text
from .wire import KILL_TIMEOUT, Box, Foreground

#: Background processes that a sandbox may have, including ended ones that have not been removed.
MAX_PROCESSES = 32
#: Commands that may run at a time. Each uses up to two of the streams that the guest accepts.
MAX_COMMANDS = 200
#: Bytes that :meth:`ProcessTable.run` keeps of each output: default and maximum.
DEFAULT_OUTPUT = 10 * MIB
MAX_OUTPUT = 64 * MIB
#: Longest time that a command may take, in seconds.
MAX_TIMEOUT = 3600.0


class Events:
    """A stream of a process's events as they happen, ending with its :class:`Exit`.

    Close it, or use it as a context manager. It can be iterated on any event loop. A slow reader delays a command, and
    closing ends it. A reader of a background process misses output that was dropped from the buffer, as the offsets
    show.
    """

    def __init__(self, source: Foreground | Follower) -> None:
        self._thread = LinkThread.instance()
        self._source = source
        self._is_done = False

    def __aiter__(self) -> AsyncIterator[Output | Exit]:
        return self

    async def __anext__(self) -> Output | Exit:
        if self._is_done:
            raise StopAsyncIteration
        event = await self._thread.run(self._source.next())
        self._is_done = isinstance(event, Exit)
        return event

    @on_link_thread
    async def aclose(self) -> None:
        """Stop reading."""
        self._is_done = True
        self._source.close()

    async def __aenter__(self) -> Events:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # A reader that was cancelled between two events may not have closed it.
        self._thread.loop.call_soon_threadsafe(self._source.close)


class ProcessTable:
    """The programs of one sandbox. The coroutines may be awaited on any event loop.

    Parameters
    ----------
    box : Sandbox
    on_change : callable
        Called on the link thread with the records of the background processes after they have changed.

    Attributes
    ----------
    max_timeout : float
        Longest time that a command may take, in seconds.
    used : float
        When a program was last run, started, written to or signalled, in seconds since the epoch.
    """

    def __init__(self, box: Box, on_change: Callable[[list[ProcessRecord]], object] = lambda records: None) -> None:
        self.max_timeout = MAX_TIMEOUT
        self.used = time.time()
        self._box = box
        self._on_change = on_change
        self._processes: dict[str, Process] = {}
        self._commands = 0

    @property
    def is_busy(self) -> bool:
        """Whether a command or a background process runs."""
        return self._commands > 0 or any(not process.is_over for process in self._processes.values())

    # -- commands ----------------------------------------------------------------------------

    @on_link_thread
    async def run(
        self, command: Command, *, stdin: bytes = b"", timeout: float = 30.0, max_output: int = DEFAULT_OUTPUT
    ) -> ExecResult:
        """Run a command to completion. Anything that it leaves in the background continues, but its output is not read.

        Parameters
        ----------
        command : Command
        stdin : bytes
            The command's complete input.
        timeout : float
            Seconds after which it is killed together with everything it started.
        max_output : int
            Bytes kept of each output: the beginning and the end. The rest is read, counted and dropped.

        Raises
        ------
        InvalidRequest, PolicyRefused
        SandboxEnded
            The sandbox ended while the command ran.
        LinkClosed
            The guest sent invalid output.
        """
        if not 0 <= max_output <= MAX_OUTPUT:
            raise InvalidRequest(f"max_output must be between 0 and {MAX_OUTPUT} bytes", field="max_output")
        began = time.monotonic()
        running = self._command(command, stdin, timeout)
        outputs = {name: HeadTail(max_output) for name in ("stdout", "stderr")}
        try:
            while isinstance(event := await running.next(), Output):
                outputs[event.stream].add(event.data)
        finally:
            running.close()
        return ExecResult(
            stdout=outputs["stdout"].value(),
            stderr=outputs["stderr"].value(),
            exit_code=event.exit_code,
            timed_out=event.timed_out,
            truncated=any(output.is_truncated for output in outputs.values()),
            stdout_bytes=outputs["stdout"].total,
            stderr_bytes=outputs["stderr"].total,
            duration=time.monotonic() - began,
        )

    @on_link_thread
    async def stream(self, command: Command, *, stdin: bytes = b"", timeout: float | None = None) -> Events:
        """Run a command and return its events as they happen. It ends with its reader, and waits for a slow one.

        To run a process without a reader, use :meth:`start` and :meth:`follow`.
        """
        return Events(self._command(command, stdin, timeout))

    def _command(self, command: Command, stdin: bytes, timeout: float | None) -> Foreground:
        if timeout is not None and not 0 < timeout <= self.max_timeout:
            raise InvalidRequest(f"timeout must be more than 0 and at most {self.max_timeout:g} s", field="timeout")
        if self._commands >= MAX_COMMANDS:
            raise PolicyRefused(f"this sandbox already runs {MAX_COMMANDS} commands, the maximum. Wait for one to end")
        running = Foreground(self._box, command.header(self._box.spec), stdin, timeout)
        self._commands += 1
        self.used = time.time()
        running.on_done = self._command_done
        return running

    def _command_done(self) -> None:
        self._commands -= 1
        self.used = time.time()

    # -- background processes and terminals --------------------------------------------------

    @on_link_thread
    async def start(self, command: Command) -> ProcessInfo:
        """Start a background process. It outlives its owner for as long as the sandbox does.

        Raises
        ------
        InvalidRequest, PolicyRefused, SandboxEnded, LinkClosed
        """
        return await self._start(command, None)

    @on_link_thread
    async def open_terminal(
        self, command: Command | None = None, *, rows: int = 24, columns: int = 80, term: str = "xterm-256color"
    ) -> ProcessInfo:
        """Start a login shell or another command on a terminal of its own.

        The result is a background process. Read it with :meth:`follow`, which begins with the terminal's most recent
        output. Any number of readers may do so, and may reconnect. Control characters in the input act as on any
        terminal.

        Parameters
        ----------
        command : Command, optional
        rows, columns : int
        term : str
            Terminal type, the value of ``TERM``.
        """
        command = command or Command()
        command = dataclasses.replace(command, env={**command.env, "TERM": check_text(term, "term")})
        return await self._start(command, check_size(rows, columns))

    async def _start(self, command: Command, size: tuple[int, int] | None) -> ProcessInfo:
        header: dict[str, Any] = {**command.header(self._box.spec), "has_stdin": True}
        if size is not None:
            header["size"] = size
        await self._make_room()
        record = ProcessRecord(secrets.token_hex(4), command.shown, time.time(), size is not None)
        process = Process(self._box, record)
        process.open(header)
        self.used = record.started
        self._processes[record.name] = process
        self._changed()
        try:
            await process.wait_started()
        except BaseException:
            await self._remove(record.name)
            raise
        return process.info

    async def _make_room(self) -> None:
        while len(self._processes) >= MAX_PROCESSES:
            ended = next((name for name, process in self._processes.items() if process.is_over), None)
            if ended is None:
                raise PolicyRefused(f"this sandbox already runs {MAX_PROCESSES} background processes. End one of them")
            await self._remove(ended)

    def resume(self, records: Sequence[ProcessRecord]) -> None:
        """Reconnect to the processes of an earlier owner. Call on the link thread."""
        for record in records:
            self._processes[record.name] = process = Process(self._box, record)
            process.open({"is_resumed": True})

    def list(self) -> list[ProcessInfo]:
        """Return all background processes, oldest first."""
        return [process.info for process in tuple(self._processes.values())]

    def get(self, name: str) -> ProcessInfo:
        """Return one background process. Raises NotFound."""
        return self._find(name).info

    @on_link_thread
    async def read(
        self, name: str, *, stream: str = "stdout", offset: int = 0, count: int = MIB, wait: float = 0
    ) -> Chunk:
        """Read the output of a background process from an offset.

        Parameters
        ----------
        stream : str
            ``stdout`` or ``stderr``.
        offset : int
            Offset within everything that was ever printed there.
        count : int
            Maximum number of bytes.
        wait : float
            Seconds to wait for output if there is none yet.
        """
        process = self._find(name)
        if stream not in process.rings:
            raise InvalidRequest("stream must be 'stdout' or 'stderr'", field="stream")
        ring = process.rings[stream]
        if not 0 <= offset <= ring.end:
            raise InvalidRequest(f"offset must be 0 to {ring.end}, the size of the output", field="offset")
        deadline = time.monotonic() + wait
        while offset == ring.end and not process.is_over:
            if not await process.change(max(0.0, deadline - time.monotonic())):
                break
        start, data = ring.get(offset, max(0, count))
        after = start + len(data)
        return Chunk(data, start, after, start - offset, process.is_over and after == ring.end)

    @on_link_thread
    async def follow(self, name: str, *, stdout_offset: int | None = None, stderr_offset: int | None = None) -> Events:
        """Return the events of a background process, from the oldest output that is kept or from the given offsets."""
        offsets = {"stdout": stdout_offset, "stderr": stderr_offset}
        for field, offset in offsets.items():
            if offset is not None and offset < 0:
                raise InvalidRequest("an offset must be 0 or more", field=f"{field}_offset")
        return Events(Follower(self._find(name), {key: n for key, n in offsets.items() if n is not None}))

    @on_link_thread
    async def write(self, name: str, data: bytes, *, timeout: float = 30.0) -> None:
        """Write to a process's input, and wait until the data is on its way.

        Raises TimeoutError, InvalidRequest, NotFound.
        """
        await self._used(name).write(data, timeout)

    @on_link_thread
    async def close_stdin(self, name: str) -> None:
        """Close a process's input. On a terminal, type an end of file."""
        await self._used(name).close_input()

    @on_link_thread
    async def signal(self, name: str, number: int | str) -> None:
        """Send a signal, such as 15, ``TERM`` or ``SIGTERM``, to the process group."""
        try:
            text = str(number).upper()
            known = signal.Signals(int(number)) if text.isdigit() else signal.Signals["SIG" + text.removeprefix("SIG")]
        except (ValueError, KeyError):
            raise InvalidRequest(f"{number!r:.50} is not a signal", field="signal") from None
        await self._used(name).ask(signal=int(known))

    @on_link_thread
    async def resize(self, name: str, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        await self._used(name).ask(size=check_size(rows, columns))

    @on_link_thread
    async def kill(self, name: str) -> ProcessInfo:
        """Kill a process and everything it started, in whatever session, and wait for its end."""
        await self._used(name).ask(kill=True)
        return await self.wait(name, KILL_TIMEOUT)

    @on_link_thread
    async def wait(self, name: str, timeout: float | None = None) -> ProcessInfo:
        """Wait for a process's end. After `timeout` seconds, return its current state."""
        process = self._find(name)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not process.is_over:
            if not await process.change(None if deadline is None else max(0.0, deadline - time.monotonic())):
                break
        return process.info

    @on_link_thread
    async def remove(self, name: str) -> None:
        """Kill a process and everything it started, and forget it and its output."""
        self._find(name)
        await self._remove(name)

    async def _remove(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            await process.forget()
            self._changed()

    def _find(self, name: str) -> Process:
        try:
            return self._processes[name]
        except KeyError:
            raise NotFound(f"this sandbox has no process {name!r:.100}", field="id") from None

    def _used(self, name: str) -> Process:
        self.used = time.time()
        return self._find(name)

    def _changed(self) -> None:
        self._on_change([process.record for process in self._processes.values()])
