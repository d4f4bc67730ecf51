"""Run code on a kernel and collect its results, as an in-process client without a socket.

A :class:`KernelClient` joins a :class:`~jupyter_agentbox.kernels.front.front.Front` beside the clients of notebooks and
shares the kernel with them. It sends code only when the kernel is free. Therefore nothing that it may have to withdraw
is ever in the kernel's own queue, and an interrupt never hits another client's cell. ``kernels.runner`` creates the
clients.

Use on the link thread only. Kernel output is hostile; ``models.outputs`` parses it.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from jupyter_agentbox.errors import RuntimeFailed
from jupyter_agentbox.models.long_output import HeadTail
from jupyter_agentbox.models.outputs import (
    ClearEvent,
    CodeResult,
    DisplayEvent,
    Event,
    OutputLimits,
    Outputs,
    Reply,
    Status,
    StreamEvent,
    read,
    read_reply,
)
from jupyter_agentbox.sandbox.drivers.messages import MAX_HEADER, header_index
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.spec import Cause, End

from .front.front import Front

#: Seconds that interrupted code has to end before the kernel is reported as still busy.
INTERRUPT_GRACE = 3.0
#: Seconds that outputs may arrive after the reply, and after the notification of the kernel's end.
IDLE_GRACE = 2.0
END_GRACE = 0.1
#: Seconds that a new kernel may take to send its first message, and between two requests for one.
START_TIMEOUT = 60.0
ASK_INTERVAL = 0.5
#: Seconds without any message after which another client's request that never ran, such as one with a wrong signature,
#: no longer blocks.
QUIET_TIME = 3.0
# About the memory that a queued event needs, apart from its text.
_EVENT_SIZE = 200


class _Header(msgspec.Struct):
    msg_type: str = ""


class _Parent(msgspec.Struct):
    msg_id: str = ""


class _State(msgspec.Struct):
    execution_state: str = ""


class Feed:
    """A queue of events for one reader.

    Outdated events are dropped unread, and the run's limits bound the displays. If the reader is slow, the text in the
    queue is shortened in the middle, and stdout and stderr are no longer in order.

    Parameters
    ----------
    limit : int
        Bytes of text from which a slow reader misses some.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._events: list[Event] = []
        self._texts: dict[Literal["stdout", "stderr"], HeadTail] = {}
        self._is_closed = False
        self._news = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event. Text is appended to text that is still queued."""
        if isinstance(event, StreamEvent):
            if event.name not in self._texts:
                self._end_texts()
                self._texts[event.name] = HeadTail(self._limit)
            data = event.text.encode("utf-8", "replace")
            self._texts[event.name].add(data)
            self._size += len(data) + _EVENT_SIZE
        else:
            if isinstance(event, ClearEvent):
                self._events.clear()
                self._texts.clear()
                self._size = 0
            self._end_texts()
            if isinstance(event, DisplayEvent) and event.is_update:
                self._drop_update(event.display.display_id)
            self._events.append(event)
        self._news.set()

    def _end_texts(self, is_read: bool = False) -> None:
        """End the texts that are being appended to, unless too many are queued."""
        if self._size <= self._limit or is_read:
            for name, text in self._texts.items():
                if data := text.value():
                    self._events.append(StreamEvent(name, data.decode()))
            self._texts.clear()

    def _drop_update(self, name: str | None) -> None:
        for i, event in enumerate(self._events):
            if isinstance(event, DisplayEvent) and event.is_update and event.display.display_id == name:
                del self._events[i]
                return

    def close(self) -> None:
        """Mark the end of the events."""
        self._is_closed = True
        self._news.set()

    async def read(self) -> list[Event]:
        """Wait for events and return them. An empty list means that there are no more."""
        while True:
            while not self._events and not self._texts and not self._is_closed:
                self._news.clear()
                await self._news.wait()
            self._end_texts(is_read=True)
            events, self._events, self._size = self._events, [], 0
            if events or self._is_closed:
                return events


class _Run:
    """One execution, from its request to its end."""

    def __init__(self, outputs: Outputs, is_silent: bool = False) -> None:
        self.outputs = outputs
        self.is_silent = is_silent
        self.epoch = 0
        self.msg_id = ""
        self.has_started = False
        self.is_idle = False
        self.is_abandoned = False
        self.reply: Reply | None = None
        self.end: End | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_expired = False

    @property
    def is_over(self) -> bool:
        return self.end is not None or (self.reply is not None and self.is_idle)

    def wake(self) -> None:
        """Wake the waiting task, because something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _expire(self) -> None:
        self._has_expired = True
        self.wake()

    async def until(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until the condition holds. Return False if the loop's time reaches `deadline` first."""
        loop = asyncio.get_running_loop()
        self._has_expired = False
        timer = loop.call_at(deadline, self._expire) if deadline is not None else None
        try:
            while not condition():
                if self._has_expired:
                    return False
                self._waiter = loop.create_future()
                await self._waiter
            return True
        finally:
            if timer is not None:
                timer.cancel()


class KernelClient:
    """A client that runs code on one front's kernel, one run at a time.

    Parameters
    ----------
    front : Front
        The front that the client joins, for the front's lifetime.
    send_signal : coroutine function
        Sends a signal to the current kernel and its children. Never fails.
    name : str
        The context's name, for results.
    """

    def __init__(self, front: Front, send_signal: Callable[[int], Awaitable[None]], name: str) -> None:
        self.front = front
        self.identity = b"\0" + uuid.uuid4().bytes
        self._send_signal = send_signal
        self._name = name
        self._waiting: deque[_Run] = deque()
        self._sent: dict[str, _Run] = {}
        self._heard_at = 0.0
        front.join(self)

    @classmethod
    def of(cls, front: Front, send_signal: Callable[[int], Awaitable[None]], name: str) -> KernelClient:
        """Return the client that has joined this front, or a new one."""
        for peer in front.local_peers.values():
            if isinstance(peer, KernelClient):
                return peer
        return cls(front, send_signal, name)

    # -- running -----------------------------------------------------------------------------

    async def run(
        self,
        code: str,
        *,
        timeout: float | None,
        limits: OutputLimits,
        emit: Callable[[Event], None] | None = None,
        keep_running: bool = False,
        is_silent: bool = False,
    ) -> CodeResult:
        """Run code and wait for its end. If the caller is cancelled, the code is interrupted.

        Parameters
        ----------
        code : str
        timeout : float or None
            Seconds until the code is withdrawn or interrupted, including the time spent waiting for other code to end.
        limits : OutputLimits
        emit : callable, optional
            Called with each event.
        keep_running : bool
            If the caller is cancelled, let the code run on. Its further output is lost.
        is_silent : bool
            Keep the code out of the history.

        Raises
        ------
        RuntimeFailed
            The kernel has started but does not answer.
        """
        loop = asyncio.get_running_loop()
        run = _Run(Outputs(limits, emit), is_silent)
        self._waiting.append(run)
        try:
            await self._wait_for_kernel(run)
            began = loop.time()
            deadline = None if timeout is None else began + timeout
            while True:
                if not await self._wait_for_turn(run, deadline):
                    return self._withdrawn(run, loop.time() - began)
                # Removed from the queue and sent in one step of the event loop, so the next run in the queue sees a
                # busy kernel.
                self._send(run, code)
                began = loop.time()
                await self._wait_for_end(run, deadline, keep_running)
                if run.reply is None or run.reply.status != "aborted" or run.end is not None:
                    break
                del self._sent[run.msg_id]
                # Another client's failing cell aborted the kernel's queue. This code has not run, so it is sent again.
                self._waiting.appendleft(run)
            return await self._conclude(run, loop.time, began)
        finally:
            if run in self._waiting:
                self._waiting.remove(run)
            self._wake_first()

    async def interrupt(self) -> None:
        """Interrupt the code that the kernel runs, regardless of who sent it."""
        await self._send_signal(signal.SIGINT)

    def request_interrupt(self) -> None:
        """Ask the kernel with a message to interrupt its code. For kernels that a signal would end."""
        if self.front.is_attached:
            self.front.submit(self, "control", self._message("interrupt_request", {})[1])

    async def _wait_for_kernel(self, run: _Run) -> None:
        """Wait until a new kernel's outputs are received.

        Its first outputs are lost if the kernel has no connection yet.
        """
        front, loop = self.front, asyncio.get_running_loop()
        deadline = loop.time() + START_TIMEOUT
        while not front.has_output and front.end is None:
            if loop.time() > deadline:
                raise RuntimeFailed(f"the kernel did not answer within {START_TIMEOUT:g} s")
            self._ask()
            await run.until(lambda: front.has_output or front.end is not None, loop.time() + ASK_INTERVAL)

    async def _wait_for_turn(self, run: _Run, deadline: float | None) -> bool:
        """Wait until nothing else runs. Return False on a timeout, or if there is no kernel and none is starting."""
        loop = asyncio.get_running_loop()
        front, since = self.front, loop.time()

        def is_free() -> bool:
            if self._waiting[0] is not run or not front.is_attached or not front.has_output:
                return False
            is_quiet = front.cell.header is None and loop.time() - max(since, self._heard_at) > QUIET_TIME
            return not front.cell.is_busy or is_quiet

        while True:
            epoch = front.epoch
            self._ask()  # the kernel may have been replaced by now
            next_check = loop.time() + (QUIET_TIME if front.has_output else ASK_INTERVAL)
            await run.until(
                lambda: is_free() or front.end is not None or front.epoch != epoch,  # noqa: B023
                next_check if deadline is None else min(deadline, next_check),
            )
            if front.end is not None:
                run.end = front.end
                return False
            if is_free():
                return True
            if deadline is not None and loop.time() >= deadline:
                return False

    def _ask(self) -> None:
        if self.front.is_attached and not self.front.has_output:
            self.front.submit(self, "shell", self._message("kernel_info_request", {})[1])

    def _send(self, run: _Run, code: str) -> None:
        self._waiting.popleft()
        content = {
            "code": code,
            "silent": run.is_silent,
            "store_history": not run.is_silent,
            "user_expressions": {},
            "allow_stdin": False,
            # On a shared kernel, a failure here must not abort the requests of other clients.
            "stop_on_error": False,
        }
        run.reply, run.has_started, run.is_idle = None, False, False
        run.epoch = self.front.epoch
        run.msg_id, frames = self._message("execute_request", content)
        self._sent[run.msg_id] = run
        self.front.submit(self, "shell", frames)

    async def _wait_for_end(self, run: _Run, deadline: float | None, keep_running: bool) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not run.is_over:
                # After the reply, the remaining output is already on its way.
                limit = loop.time() + IDLE_GRACE if run.reply is not None else deadline
                answered = run.reply
                if not await run.until(lambda: run.is_over or run.reply is not answered, limit):  # noqa: B023
                    return
        except asyncio.CancelledError:
            if keep_running:
                self._sent.pop(run.msg_id, None)
            else:
                LinkThread.instance().spawn(self._abandon(run))
            raise

    async def _conclude(self, run: _Run, now: Callable[[], float], began: float) -> CodeResult:
        values: dict[str, Any] = {}
        status: Status
        if run.end is not None:
            # The kernel's last output may arrive a moment after the notification of its end.
            await asyncio.sleep(END_GRACE)
            status = "kernel_died"
            values = {"end": run.end, "message": f"the kernel ended: {run.end.message}"}
        elif run.reply is not None:
            run.outputs.take_reply(run.reply)
            error = run.outputs.error
            if run.reply.status == "ok" and error is None:
                status = "ok"
            else:
                status = "interrupted" if error is not None and error.ename == "KeyboardInterrupt" else "error"
            values = {"execution_count": run.reply.execution_count}
        else:
            status = "timed_out"
            values = await self._stop(run)
        if not run.is_abandoned:
            self._sent.pop(run.msg_id, None)
        return run.outputs.result(
            status,
            duration=now() - began,
            has_started=run.has_started,
            context=self._name,
            epoch=run.epoch,
            **values,
        )

    async def _stop(self, run: _Run) -> dict[str, Any]:
        """Interrupt a run that reached its timeout. Return the values to report in its result."""
        if not run.has_started:
            run.is_abandoned = True
            return {"message": "the kernel did not start the code in time; if it does later, the code is interrupted"}
        await self._send_signal(signal.SIGINT)
        await run.until(lambda: run.is_over, asyncio.get_running_loop().time() + INTERRUPT_GRACE)
        if run.end is not None:
            return {"message": f"the code timed out, and the kernel ended: {run.end.message}", "end": run.end}
        if run.is_over:
            count = run.reply.execution_count if run.reply is not None else None
            return {"message": "the code timed out and was interrupted", "execution_count": count}
        return {
            "message": "the code timed out and was interrupted, but still runs: the kernel is busy until it ends. "
            "Interrupt again, or restart the context",
            "is_busy": True,
        }

    async def _abandon(self, run: _Run) -> None:
        """Interrupt the run now, or as soon as it starts if it is in the kernel's queue."""
        run.is_abandoned = True
        if run.is_over:
            self._sent.pop(run.msg_id, None)
        elif run.has_started:
            await self._send_signal(signal.SIGINT)

    def _withdrawn(self, run: _Run, duration: float) -> CodeResult:
        end = run.end
        if end is not None:
            message = f"the kernel has ended: {end.message}"
        else:
            message = "this code did not run: the kernel was busy with other code until the timeout"
        return run.outputs.result(
            "timed_out" if end is None else "kernel_died",
            duration=duration,
            has_started=False,
            end=end,
            message=message,
            context=self._name,
            epoch=self.front.epoch,
        )

    def _message(self, kind: str, content: dict[str, Any]) -> tuple[str, list[bytes]]:
        _, *frames = self.front.signer.message(b"", kind, content)
        return msgspec.json.decode(frames[2], type=_Parent).msg_id, frames

    # -- what the front tells ----------------------------------------------------------------

    def on_message(self, channel: str, frames: list[bytes]) -> None:
        """Handle a message; see :class:`~jupyter_agentbox.kernels.front.front.LocalPeer`."""
        if channel == "iopub":
            self._heard_at = asyncio.get_running_loop().time()
        index = header_index(frames) if self._sent else None
        if index is not None and max(map(len, frames[index : index + 2])) <= MAX_HEADER:
            parent = read(frames[index + 1], _Parent)
            run = self._sent.get(parent.msg_id) if parent is not None else None
            header = read(frames[index], _Header) if run is not None else None
            if run is not None and header is not None:
                self._take(run, channel, header.msg_type, frames[index + 3])
        self._wake_first()

    def _take(self, run: _Run, channel: str, kind: str, content: bytes) -> None:
        if channel == "shell" and kind == "execute_reply":
            run.reply = read_reply(content)
        elif channel == "iopub" and kind == "status":
            status = read(content, _State) if len(content) <= MAX_HEADER else None
            if status is not None and status.execution_state == "busy" and not run.has_started:
                run.has_started = True
                if run.is_abandoned:
                    LinkThread.instance().spawn(self._abandon(run))
            elif status is not None and status.execution_state == "idle":
                run.is_idle = True
                if run.is_abandoned:
                    self._sent.pop(run.msg_id, None)
        elif channel == "iopub" and not run.is_abandoned:
            run.outputs.take(kind, content)
            return
        else:
            return
        run.wake()

    def on_kernel(self) -> None:
        """Handle a change of the kernel; see :class:`~jupyter_agentbox.kernels.front.front.LocalPeer`."""
        for run in list(self._sent.values()):
            if run.end is None and (run.epoch != self.front.epoch or not self.front.is_attached):
                run.end = self.front.end or End(Cause.STOPPED, 0, "it was replaced by another kernel")
                run.wake()
                if run.is_abandoned:
                    del self._sent[run.msg_id]
        for run in self._waiting:
            run.wake()

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[0].wake()
