"""Implement the host's end of the link: streams to one guest over a pair of FIFOs, on the :class:`LinkThread`.

:mod:`jupyter_agentbox.guest.framing` defines the format, and :mod:`jupyter_agentbox.guest.loop` implements the guest's
end.

The guest is hostile. It can make this end buffer at most ``max_streams * (credit + one frame)`` bytes, and a guest that
violates the format only loses its link.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.guest.framing import (
    CREDIT,
    DATA,
    EOF,
    HELLO,
    INITIAL_CREDIT,
    MAX_PAYLOAD,
    OPEN,
    RESET,
    Connection,
    ProtocolError,
)
from jupyter_agentbox.runtimes import linkdir

from .thread import LinkThread, finished

__all__ = ["Link", "LinkThread", "Stream", "finished"]

log = logging.getLogger(__name__)

#: Bytes read from the guest at a time.
READ_SIZE = 256 * 1024
#: Requested capacity of each FIFO in bytes. The kernel may grant less.
PIPE_SIZE = 1024 * 1024
#: Credit is returned when half of a stream's window is used, or after this many seconds.
GRANT_DELAY = 0.05
#: Seconds between two attempts to release a guest that is blocked on a dead owner's FIFOs, and the maximum number of
#: these FIFOs.
NUDGE_INTERVAL, MAX_LEFT = 0.05, 256
#: Names of FIFO pairs. The host never uses a number of more than 18 digits.
_PAIR = re.compile(r"(?:up|down)\.([0-9]{1,18})(?:\..*)?", re.ASCII | re.DOTALL)
#: Fields that are kept of the header of a stream that the guest opens.
HEADER_FIELDS = ("kind", "via", "address", "port")
#: Streams that one guest may have open at a time, and streams that are served, with those whose end is still handled.
MAX_GUEST_STREAMS = 512
MAX_SERVED_STREAMS = 4 * MAX_GUEST_STREAMS


class Stream:
    """A byte stream to or from the guest. Use on the link thread only.

    Attributes
    ----------
    header : dict
        The header with which the stream was opened.
    """

    def __init__(self, link: Link, stream_id: int, header: dict[str, Any]) -> None:
        self.header = header
        self._link = link
        self._id = stream_id
        self._incoming: deque[bytes | bytearray] = deque()
        self._has_eof = False
        self._reason: str | None = None
        self._window = INITIAL_CREDIT
        self._owed = 0
        self._payment: asyncio.TimerHandle | None = None
        self._has_news = asyncio.Event()
        self._can_write = asyncio.Event()

    def grant(self, count: int) -> None:
        """Let the guest send ``count`` bytes more than the initial credit."""
        self._window += count
        self._link.grant(self._id, count)

    async def read(self) -> bytes:
        """Return the next bytes, at most one frame, or ``b""`` at the guest's EOF.

        Raises
        ------
        LinkClosed
            The stream was reset or the link is lost.
        """
        while not self._incoming:
            if self._has_eof:
                return b""
            self._check()
            self._has_news.clear()
            await self._has_news.wait()
        data = self._incoming.popleft()
        self._owed += len(data)
        if self._owed >= self._window // 2:
            self._pay()
        elif self._payment is None:
            # Return small amounts soon, too: credit also tells the guest which data it need not keep for another owner.
            self._payment = asyncio.get_running_loop().call_later(GRANT_DELAY, self._pay)
            self._link._unpaid.add(self)
        return bytes(data)

    def _pay(self) -> None:
        """Return the owed credit to the guest. Credits are batched, because every frame costs both ends."""
        if self._payment is not None:
            self._payment.cancel()
            self._payment = None
            self._link._unpaid.discard(self)
        owed, self._owed = self._owed, 0
        self._link.grant(self._id, owed)

    async def write(self, data: bytes | memoryview) -> None:
        """Send all of ``data``, as fast as the guest gives credit and reads. Raises LinkClosed."""
        view = memoryview(data)
        while len(view):
            self._check()
            room = self._link.room(self._id)
            if room <= 0:
                self._can_write.clear()
                self._link.request_wakeup(self)
                await self._can_write.wait()
                continue
            view = view[self._link.send(self._id, view[:room]) :]

    async def write_eof(self) -> None:
        """Signal that nothing more will be written."""
        self._check()
        self._link.send_eof(self._id)

    def reset(self, reason: str = "") -> None:
        """End the stream in both directions. Does nothing if it was already reset."""
        self._link.reset(self._id, reason)
        self._lost(reason or "reset by the host")

    def _check(self) -> None:
        if self._reason is not None:
            raise LinkClosed(f"stream closed: {self._reason}")

    def _received(self, data: bytes) -> None:
        # Merge data up to the size of a frame, because many small pieces would take many times their size in memory.
        last = self._incoming[-1] if self._incoming else None
        if last is None or len(last) + len(data) > MAX_PAYLOAD[DATA]:
            self._incoming.append(data)
        elif isinstance(last, bytearray):
            last += data
        else:
            self._incoming[-1] = bytearray(last + data)
        self._has_news.set()

    def _ended(self) -> None:
        self._has_eof = True
        self._has_news.set()

    def _lost(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
        self._has_news.set()
        self._can_write.set()


class Link:
    """The link to one guest. Use on the link thread only.

    Parameters
    ----------
    directory : Path
        Directory in which the FIFOs ``down.N`` and ``up.N`` are created.
    on_stream : callable
        Coroutine function that serves each stream that the guest opens.
    on_lost : callable
        Called once with the reason when the link closes, for example because the guest disconnected or violated the
        format.

    Attributes
    ----------
    last_active : float
        When something was last sent or received, by the monotonic clock.
    on_write : callable
        Called before something is sent.
    number : int
        Number of the current FIFO pair. Each pair has a higher number than all before it.
    """

    def __init__(
        self,
        directory: Path,
        on_stream: Callable[[Stream], Awaitable[None]],
        on_lost: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._on_stream = on_stream
        self._on_lost = on_lost
        self._thread = LinkThread.instance()
        self._loop = self._thread.loop
        self._connection = Connection(is_host=True, max_streams=MAX_GUEST_STREAMS)
        self._streams: dict[int, Stream] = {}
        self._waiting: set[Stream] = set()
        self._unpaid: set[Stream] = set()
        self._serving = 0
        self._pending = memoryview(b"")
        self._reader = self._writer = -1
        self._is_lost = False
        self._suspended: asyncio.Future[None] | None = None
        self._token = ""
        self.number = 0
        self.last_active = time.monotonic()
        self.on_write: Callable[[], object] = lambda: None
        self._greeted: asyncio.Future[dict[str, Any]] = self._loop.create_future()

    def listen(self, after: int = 0) -> None:
        """Create new FIFOs, which contain nothing of an earlier owner's, and listen for the guest.

        The FIFOs also get a new number. gVisor tells files apart by their inode numbers, and Linux reuses those.

        Parameters
        ----------
        after : int
            Highest number that a guest restored from a checkpoint already knows.
        """
        # Take references to the FIFOs of an earlier owner before their names are removed.
        left = linkdir.reference_fifos(self._directory, MAX_LEFT)
        try:
            self._open_files(after)
            self._connection.hello({})
            self._flush()
        except BaseException:
            for fd in left:
                os.close(fd)
            raise
        self._nudge(left)

    def _nudge(self, left: list[int]) -> None:
        """Release the guest if it is blocked on FIFOs whose owner died before the guest opened them.

        gVisor waits for the other end of a FIFO. Opening and closing these FIFOs lets it continue.
        """
        if self._is_lost or self._greeted.done() or not left:
            for fd in left:
                os.close(fd)
            return
        for fd in left:
            with contextlib.suppress(OSError):
                os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop.call_later(NUDGE_INTERVAL, self._nudge, left)

    def _open_files(self, after: int, token: str = "") -> None:
        names = linkdir.list_names(self._directory)
        found = [match[1] for match in map(_PAIR.fullmatch, names) if match]
        number = self.number = max([after, *map(int, found)]) + 1
        linkdir.remove_names(self._directory, names)
        # Opened for reading and writing, because opening a FIFO for writing alone fails until it has a reader.
        self._writer = linkdir.share_fifo(self._directory, f"down.{number}", os.O_RDWR)
        # The guest looks for this FIFO, so the other one must already exist.
        name = ".".join(("up", str(number), *([token] if token else [])))
        self._reader = linkdir.share_fifo(self._directory, name, os.O_RDONLY)
        for fd in (self._reader, self._writer):
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            except OSError:
                pass  # over this user's quota of pipe memory: slower, but correct
        self._loop.add_reader(self._reader, self._readable)

    async def suspend(self, timeout: float) -> None:
        """Have the guest close its ends for a checkpoint of the sandbox. All streams stay open.

        Data that is written from now on is queued until :meth:`resume`. Raises LinkClosed.
        """
        if self._suspended is not None:
            raise LinkClosed("the link is already suspended")
        self._pay_all()
        self._token = secrets.token_hex(8)
        self.open({"kind": "suspend", "token": self._token})
        # This is the last data for the guest. Anything queued later stays on the host.
        self._pending = memoryview(bytes(self._pending) + self._connection.take_output())
        self._suspended = self._loop.create_future()
        if self._pending:
            self._writable()
        try:
            await asyncio.wait_for(asyncio.shield(self._suspended), timeout)
        except asyncio.TimeoutError:
            self.close("the guest did not suspend its link")
            raise LinkClosed(f"the guest did not suspend its link within {timeout:g} s") from None
        self._close_files()

    def resume(self) -> None:
        """Continue a suspended link."""
        if self._suspended is None or self._is_lost:
            return
        self._suspended = None
        try:
            self._open_files(self.number, self._token)
        except OSError as error:  # user code that runs as uid 0 may interfere
            self.close(f"cannot reopen the link: {error}")
            return
        self._flush()

    async def wait_connected(self, timeout: float) -> dict[str, Any]:
        """Wait for the guest's hello. Raises LinkClosed if it does not arrive within ``timeout`` seconds."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._greeted), timeout)
        except asyncio.TimeoutError:
            raise LinkClosed(f"the guest did not connect within {timeout:g} s") from None

    def open(self, header: dict[str, Any]) -> Stream:
        """Open a stream to the guest. Raises LinkClosed."""
        if self._is_lost:
            raise LinkClosed("the link to the sandbox is closed")
        stream_id = self._connection.open(header)
        stream = self._streams[stream_id] = Stream(self, stream_id, header)
        self._flush()
        return stream

    def close(self, reason: str = "closed") -> None:
        """Close the link, which ends every stream on it. Does nothing if it is already closed."""
        if self._is_lost:
            return
        if self._pay_all():
            return  # the last write failed and closed the link
        self._is_lost = True
        self._close_files()
        if self._suspended is not None and not self._suspended.done():
            self._suspended.set_exception(LinkClosed(f"the connection to the guest was lost: {reason}"))
            self._suspended.exception()
        self._pending = memoryview(b"")
        if not self._greeted.done():
            self._greeted.set_exception(LinkClosed(f"the connection to the guest was lost: {reason}"))
            self._greeted.exception()  # marks the exception as retrieved, in case nothing awaits it
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._lost(reason)
        self._waiting.clear()
        self._on_lost(reason)

    def _close_files(self) -> None:
        for fd, forget in ((self._reader, self._loop.remove_reader), (self._writer, self._loop.remove_writer)):
            if fd >= 0:
                forget(fd)
                os.close(fd)
        self._reader = self._writer = -1

    def _pay_all(self) -> bool:
        """Return all owed credit to the guest. Return whether the link is closed afterwards."""
        streams, self._unpaid = self._unpaid, set()
        for stream in streams:
            stream._pay()
        return self._is_lost

    # -- for Stream --------------------------------------------------------------------------

    def room(self, stream_id: int) -> int:
        """Return the number of bytes that :meth:`send` accepts now."""
        return self._connection.room(stream_id)

    def request_wakeup(self, stream: Stream) -> None:
        """Wake ``stream`` when there may be room."""
        self._waiting.add(stream)

    def send(self, stream_id: int, data: memoryview) -> int:
        """Queue data of a stream. Return the number of bytes accepted."""
        count = self._connection.send(stream_id, data)
        self._flush()
        return count

    def send_eof(self, stream_id: int) -> None:
        """Half-close a stream."""
        self._connection.send_eof(stream_id)
        self._forget_if_done(stream_id)
        self._flush()

    def grant(self, stream_id: int, count: int) -> None:
        """Give the guest credit."""
        if not self._is_lost:
            self._connection.grant(stream_id, count)
            self._flush()

    def reset(self, stream_id: int, reason: str) -> None:
        """End a stream in both directions."""
        if self._streams.pop(stream_id, None) is not None and not self._is_lost:
            self._connection.reset(stream_id, reason)
            self._flush()

    # -- bytes -------------------------------------------------------------------------------

    def _flush(self) -> None:
        if not self._pending and not self._is_lost and self._suspended is None:
            self._writable()

    def _writable(self) -> None:
        while True:
            if not self._pending:
                if self._suspended is not None:
                    break
                self._pending = memoryview(self._connection.take_output())
                if not self._pending:
                    break
            self.on_write()
            self.last_active = time.monotonic()
            try:
                count = os.write(self._writer, self._pending)
            except BlockingIOError:
                self._loop.add_writer(self._writer, self._writable_again)
                return
            except OSError as error:
                self.close(f"cannot write to the guest: {error}")
                return
            self._pending = self._pending[count:]

    def _writable_again(self) -> None:
        self._writable()
        if not self._pending and not self._is_lost:
            if self._writer >= 0:
                self._loop.remove_writer(self._writer)
            waiting, self._waiting = self._waiting, set()
            for stream in waiting:
                stream._can_write.set()

    def _readable(self) -> None:
        try:
            data = os.read(self._reader, READ_SIZE)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(f"cannot read from the guest: {error}")
            return
        if not data:
            if self._suspended is None:
                self.close("the guest disconnected")
            elif not self._suspended.done():
                self._loop.remove_reader(self._reader)
                self._suspended.set_result(None)
            return
        self.last_active = time.monotonic()
        try:
            for event in self._connection.receive(data):
                if self._is_lost:
                    return
                self._handle(event.kind, event.stream, event.value)
            self._flush()
        except ProtocolError as error:
            log.warning("the guest sent invalid data on the link: %s", error)
            self.close(f"the guest sent invalid data on the link: {error}")

    def _handle(self, kind: int, stream_id: int, value: Any) -> None:
        if kind == HELLO:
            if not self._greeted.done():
                self._greeted.set_result(value)
            return
        if kind == OPEN:
            self._opened(stream_id, value)
            return
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if kind == DATA:
            stream._received(value)
        elif kind == CREDIT:
            self._waiting.discard(stream)
            stream._can_write.set()
        elif kind == EOF:
            stream._ended()
            self._forget_if_done(stream_id)
        elif kind == RESET:
            del self._streams[stream_id]
            stream._lost(f"reset by the guest: {value!r:.200}")

    def _opened(self, stream_id: int, header: dict[str, Any]) -> None:
        # A guest that quickly opens and resets streams must not make serving tasks accumulate here.
        if self._serving >= MAX_SERVED_STREAMS:
            self._connection.reset(stream_id, "too many streams")
            return
        known = {name: value for name in HEADER_FIELDS if isinstance(value := header.get(name), str | int)}
        stream = self._streams[stream_id] = Stream(self, stream_id, known)
        self._serving += 1
        self._thread.spawn(self._serve(stream))

    async def _serve(self, stream: Stream) -> None:
        try:
            await self._on_stream(stream)
        finally:
            self._serving -= 1
            stream.reset()

    def _forget_if_done(self, stream_id: int) -> None:
        if not self._connection.is_open(stream_id):
            self._streams.pop(stream_id, None)


assert MAX_PAYLOAD[DATA] <= READ_SIZE
