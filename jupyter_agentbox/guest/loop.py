"""Provide the guest's single-threaded event loop and its end of the link to the host.

It does not use asyncio, whose import alone takes a tenth of a second inside gVisor. :mod:`.framing` defines the wire
format, and :mod:`.pid1` combines the parts.
"""

from __future__ import annotations

import errno
import heapq
import os
import select
import time

from .framing import CREDIT, DATA, EOF, HELLO, INITIAL_CREDIT, MAX_PAYLOAD, OPEN, RESET, Connection, ProtocolError
from .suspension import Suspension

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Callback = Callable[[], object]

CHUNK = MAX_PAYLOAD[DATA]
#: Number of consumed bytes after which credit is returned to the host.
GRANT_SIZE = INITIAL_CREDIT // 2
#: Seconds between two attempts to find an owner.
REDIAL_INTERVAL = 0.02


class LinkDown(Exception):
    """No owner is connected, or the host cannot take more data."""


class Loop:
    """Event loop that calls back when descriptors are ready or timers expire."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, tuple[Callback | None, Callback | None]] = {}
        self._timers: list[list[Any]] = []
        self._count = 0
        self.is_running = True

    def watch(self, fd: int, on_readable: Callback | None = None, on_writable: Callback | None = None) -> None:
        """Call back when ``fd`` is ready. Without callbacks, stop watching it."""
        mask = (select.EPOLLIN if on_readable else 0) | (select.EPOLLOUT if on_writable else 0)
        known = self._watched.get(fd)
        if not mask:
            if known is not None:
                del self._watched[fd]
                self._poll.unregister(fd)
            return
        self._watched[fd] = (on_readable, on_writable)
        if known is None:
            self._poll.register(fd, mask)
        else:
            self._poll.modify(fd, mask)

    def renew(self) -> None:
        """Replace the epoll object. gVisor's keeps files that were unwatched while ready, and then cannot be saved."""
        self._poll.close()
        self._poll = select.epoll()
        for fd, (on_readable, on_writable) in self._watched.items():
            mask = (select.EPOLLIN if on_readable else 0) | (select.EPOLLOUT if on_writable else 0)
            self._poll.register(fd, mask)

    def later(self, delay: float, callback: Callback) -> list[Any]:
        """Call ``callback`` in ``delay`` seconds. Return a timer for :meth:`cancel`."""
        self._count += 1
        timer: list[Any] = [time.monotonic() + delay, self._count, callback]
        heapq.heappush(self._timers, timer)
        return timer

    def cancel(self, timer: list[Any]) -> None:
        """Cancel a timer, which may have fired already."""
        timer[2] = None

    def run(self) -> None:
        """Run until :attr:`is_running` is false."""
        while self.is_running:
            timeout = -1.0
            while self._timers and self._timers[0][2] is None:
                heapq.heappop(self._timers)
            if self._timers:
                timeout = max(0.0, self._timers[0][0] - time.monotonic())
            for fd, mask in self._poll.poll(timeout):
                # Look the descriptor up again for each event: an earlier callback may have closed it.
                if mask & ~select.EPOLLOUT and fd in self._watched:
                    on_readable, on_writable = self._watched[fd]
                    (on_readable or on_writable)()  # type: ignore[misc]
                if mask & select.EPOLLOUT and fd in self._watched:
                    on_writable = self._watched[fd][1]
                    if on_writable:
                        on_writable()
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                callback = heapq.heappop(self._timers)[2]
                if callback:
                    callback()


def ignore(*_: object) -> None:
    """Do nothing. Used as the default callback."""


class Stream:
    """Stream of the link. Its user assigns the callbacks."""

    def __init__(self, link: Link, stream_id: int, header: dict[str, Any]) -> None:
        self.header = header
        self.on_data: Callable[[bytes], object] = ignore
        self.on_eof: Callback = ignore
        self.on_reset: Callable[[str], object] = ignore
        self.on_credit: Callback = ignore
        self._link = link
        self._id = stream_id
        self._owed = 0

    @property
    def credit(self) -> int:
        """Number of bytes that may be written now."""
        connection = self._link.connection
        return connection.room(self._id) if connection is not None else 0

    @property
    def credit_given(self) -> int:
        """Number of unused credit bytes from the host, regardless of the room on the link."""
        connection = self._link.connection
        return connection.credit(self._id) if connection is not None else 0

    def write(self, data: bytes) -> None:
        """Queue ``data``, which must not exceed :attr:`credit`."""
        connection = self._link.connection
        if connection is None or connection.send(self._id, data) < len(data):
            raise LinkDown("the host does not accept more data")
        self._link.flush()

    def write_eof(self) -> None:
        """Signal that nothing more will be written."""
        if self._link.connection is not None:
            self._link.connection.send_eof(self._id)
            self._link.flush()
            self._link.loop.later(0, lambda: self._link.forget_if_done(self._id))

    def reset(self, reason: str = "") -> None:
        """Close both directions."""
        if self._link.connection is not None and self._link.forget(self._id):
            self._link.connection.reset(self._id, reason)
            self._link.flush()

    def consumed(self, count: int) -> None:
        """Return credit for ``count`` bytes to the host, in batches, because every frame costs both ends."""
        self._owed += count
        if self._owed >= GRANT_SIZE and self._link.connection is not None:
            self._link.connection.grant(self._id, self._owed)
            self._owed = 0
            self._link.flush()


class Link:
    """Guest's end of the link, which finds one owner after another on the FIFOs in ``directory``.

    Parameters
    ----------
    loop : Loop
    directory : str
        Directory of ``down.N`` and ``up.N``.
    on_stream : callable
        Called with each stream that the host opens.
    on_up, on_down : callable
        Called when an owner connects, and when it disconnects.
    """

    def __init__(
        self,
        loop: Loop,
        directory: str,
        on_stream: Callable[[Stream], object],
        on_up: Callable[[dict[str, Any]], object] = ignore,
        on_down: Callback = ignore,
    ) -> None:
        self.connection: Connection | None = None
        self.loop = loop
        self._directory = directory
        self._on_stream = on_stream
        self._on_up = on_up
        self._on_down = on_down
        self._streams: dict[int, Stream] = {}
        self._reader = self._writer = -1
        self._pending = memoryview(b"")
        self._is_up = False
        self._number = 0
        self._suspension = Suspension()

    def dial(self) -> None:
        """Look for an owner now, and keep looking until one is found."""
        try:
            # Each owner creates a new pair of FIFOs with a higher number. A FIFO without a reader must not be opened:
            # gVisor would block until there is a reader, even with O_NONBLOCK.
            number, token = _find_newest(self._directory)
            if number <= self._number:
                raise LinkDown("no new owner")
            self._number = number
            name = f"{self._directory}/up.{number}" + (f".{token}" if token else "")
            self._writer = os.open(name, os.O_WRONLY | os.O_NONBLOCK)
            self._reader = os.open(f"{self._directory}/down.{number}", os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError, LinkDown):
            self._close_files()
            self.loop.later(REDIAL_INTERVAL, self.dial)
            return
        if self.connection is not None:
            if self._suspension.is_resumed_by(token):
                self.loop.watch(self._reader, self._readable)
                self._on_up({})
                self._writable_again()
                return
            self._drop()
        self.connection = Connection(is_host=False)
        self.loop.watch(self._reader, self._readable)
        self.connection.hello({})
        self.flush()

    def open(self, header: dict[str, Any]) -> Stream:
        """Open a stream to the host. Raises LinkDown if no owner is connected."""
        if self.connection is None or not self._is_up:
            raise LinkDown("no owner is connected")
        stream_id = self.connection.open(header)
        stream = self._streams[stream_id] = Stream(self, stream_id, header)
        self.flush()
        return stream

    def forget(self, stream_id: int) -> bool:
        """Remove a stream from the table. Return whether it was there."""
        return self._streams.pop(stream_id, None) is not None

    def forget_if_done(self, stream_id: int) -> None:
        """Remove a stream that has ended in both directions, after its last event: events are handled in batches."""
        if self.connection is not None and not self.connection.is_open(stream_id):
            self._streams.pop(stream_id, None)

    def hang_up(self) -> None:
        """Close the link and reset every stream on it."""
        if self.connection is None:
            return
        self._close_files()
        self._drop()
        self.loop.later(0, self.dial)

    def _drop(self) -> None:
        self.connection = None
        self._is_up = False
        self._pending = memoryview(b"")
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_reset("the owner disconnected")
        self._on_down()

    def suspend(self, token: str) -> None:
        """Close the files but keep the streams, and wait for the owner with ``token`` or for a different owner."""
        self._suspension.begin(self, token)

    def pause(self) -> None:
        """Close the files after all output has been written. Called by :class:`Suspension`."""
        self._close_files()
        self.loop.renew()
        self._on_down()
        self.loop.later(REDIAL_INTERVAL, self.dial)

    @property
    def has_output(self) -> bool:
        """Whether output is waiting to be written."""
        return bool(self._pending) or (self.connection is not None and self.connection.output_size > 0)

    def flush(self) -> None:
        """Write pending output."""
        if self._writer >= 0 and not self._pending:
            self._writable()

    def _close_files(self) -> None:
        for fd in (self._reader, self._writer):
            if fd >= 0:
                self.loop.watch(fd)
                os.close(fd)
        self._reader = self._writer = -1

    def _writable(self) -> None:
        assert self.connection is not None
        while True:
            if not self._pending:
                self._pending = memoryview(self.connection.take_output())
                if not self._pending:
                    break
            try:
                count = os.write(self._writer, self._pending)
            except BlockingIOError:
                self.loop.watch(self._writer, None, self._writable_again)
                return
            except OSError:
                self.loop.later(0, self.hang_up)
                self._pending = memoryview(b"")
                return
            self._pending = self._pending[count:]
        self.loop.watch(self._writer)
        self._suspension.advance(self)

    def _writable_again(self) -> None:
        self._writable()
        if not self._pending and self.connection is not None:
            for stream in list(self._streams.values()):  # the output has room again
                stream.on_credit()

    def _readable(self) -> None:
        try:
            data = os.read(self._reader, 256 * 1024)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EINTR:
                return
            data = b""
        if not data:
            self.hang_up()
            return
        assert self.connection is not None
        connection = self.connection
        try:
            events = connection.receive(data)
            for event in events:
                if self.connection is not connection:
                    return
                self._handle(event.kind, event.stream, event.value)
        except ProtocolError:
            self.hang_up()
            return
        self.flush()

    def _handle(self, kind: int, stream_id: int, value: Any) -> None:
        if kind == HELLO:
            self._is_up = True
            self._on_up(value)
            return
        if kind == OPEN:
            stream = self._streams[stream_id] = Stream(self, stream_id, value)
            self._on_stream(stream)
            return
        found = self._streams.get(stream_id)
        if found is None:
            return
        if kind == DATA:
            found.on_data(value)
        elif kind == CREDIT:
            found.on_credit()
        elif kind == EOF:
            found.on_eof()
            self.forget_if_done(stream_id)
        elif kind == RESET:
            del self._streams[stream_id]
            found.on_reset(value)


def _find_newest(directory: str) -> tuple[int, str]:
    """Return the number and the token of the newest pair of FIFOs."""
    found = [(0, "")]
    for name in os.listdir(directory):
        kind, _, rest = name.partition(".")
        number, _, token = rest.partition(".")
        if kind == "up" and number.isdigit():
            found.append((int(number), token))
    return max(found)
