"""The guest's one thread: a small event loop, and the link to the host.

No asyncio: its import alone costs a tenth of a second inside gVisor. Neighbours: :mod:`.framing`
is the format, :mod:`.pid1` puts the parts together.
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
#: Credit is given back in pieces of this many bytes.
GRANT_SIZE = INITIAL_CREDIT // 2
#: Seconds between two tries to find an owner.
REDIAL_INTERVAL = 0.02


class LinkDown(Exception):
    """No owner is connected at the moment."""


class Loop:
    """Calls back when descriptors are ready or timers are due."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._watched: dict[int, tuple[Callback | None, Callback | None]] = {}
        self._timers: list[list[Any]] = []
        self._count = 0
        self.is_running = True

    def watch(self, fd: int, on_readable: Callback | None = None, on_writable: Callback | None = None) -> None:
        """Call back when ``fd`` is ready; with neither callback, stop watching it."""
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
        """Watch by a new epoll object: gVisor's keeps what was unwatched while ready, and can't be saved with that."""
        self._poll.close()
        self._poll = select.epoll()
        for fd, (on_readable, on_writable) in self._watched.items():
            mask = (select.EPOLLIN if on_readable else 0) | (select.EPOLLOUT if on_writable else 0)
            self._poll.register(fd, mask)

    def later(self, delay: float, callback: Callback) -> list[Any]:
        """Call ``callback`` in ``delay`` seconds; the result goes to :meth:`cancel`."""
        self._count += 1
        timer: list[Any] = [time.monotonic() + delay, self._count, callback]
        heapq.heappush(self._timers, timer)
        return timer

    def cancel(self, timer: list[Any]) -> None:
        """Forget a timer; it may have fired already."""
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
                # Looked up anew each time: an earlier callback may have closed this one.
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
    """Do nothing, as a callback."""


class Stream:
    """One stream of the link. Callbacks are assigned by whoever uses it."""

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
        """Bytes that may be written now."""
        connection = self._link.connection
        return connection.room(self._id) if connection is not None else 0

    @property
    def credit_given(self) -> int:
        """Bytes that the host has allowed and that were not sent yet, whether or not the link has room."""
        connection = self._link.connection
        return connection.credit(self._id) if connection is not None else 0

    def write(self, data: bytes) -> None:
        """Queue ``data``, of which no more than :attr:`credit` may be given."""
        connection = self._link.connection
        if connection is None or connection.send(self._id, data) < len(data):
            raise LinkDown("more was written than the host takes")
        self._link.flush()

    def write_eof(self) -> None:
        """No more will be written."""
        if self._link.connection is not None:
            self._link.connection.send_eof(self._id)
            self._link.flush()
            self._link.loop.later(0, lambda: self._link.forget_if_done(self._id))

    def reset(self, reason: str = "") -> None:
        """End it both ways."""
        if self._link.connection is not None and self._link.forget(self._id):
            self._link.connection.reset(self._id, reason)
            self._link.flush()

    def consumed(self, count: int) -> None:
        """Let the host send ``count`` bytes more; it is told in larger pieces, since every frame costs both ends."""
        self._owed += count
        if self._owed >= GRANT_SIZE and self._link.connection is not None:
            self._link.connection.grant(self._id, self._owed)
            self._owed = 0
            self._link.flush()


class Link:
    """The guest's end: finds an owner on the FIFOs in ``directory``, again and again.

    Parameters
    ----------
    loop : Loop
    directory : str
        Where ``down.N`` and ``up.N`` are.
    on_stream : callable
        Called with each stream that the host opens.
    on_up, on_down : callable
        Called when an owner is there, and when it is gone.
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
        """Look for an owner now, and keep looking."""
        try:
            # Each owner makes a new pair, with a higher number. One without a reader must not be opened: gVisor
            # would wait for the reader, whatever the flags say.
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
        """Open a stream to the host. Raises LinkDown when no owner is there."""
        if self.connection is None or not self._is_up:
            raise LinkDown("no owner is connected")
        stream_id = self.connection.open(header)
        stream = self._streams[stream_id] = Stream(self, stream_id, header)
        self.flush()
        return stream

    def forget(self, stream_id: int) -> bool:
        """Drop a stream from the table; whether it was there."""
        return self._streams.pop(stream_id, None) is not None

    def forget_if_done(self, stream_id: int) -> None:
        """Drop a stream that has ended both ways. Not before its last event was handled: they come in batches."""
        if self.connection is not None and not self.connection.is_open(stream_id):
            self._streams.pop(stream_id, None)

    def hang_up(self) -> None:
        """Close the link; every stream on it is reset."""
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
            stream.on_reset("the owner is gone")
        self._on_down()

    def suspend(self, token: str) -> None:
        """Close the files, keep the streams, and wait for the owner that comes with ``token``, or for another one."""
        self._suspension.begin(self, token)

    def pause(self) -> None:
        """Close the files once all is written; for :class:`Suspension`."""
        self._close_files()
        self.loop.renew()
        self._on_down()
        self.loop.later(REDIAL_INTERVAL, self.dial)

    @property
    def has_output(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._pending) or (self.connection is not None and self.connection.output_size > 0)

    def flush(self) -> None:
        """Write what waits."""
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
        self._suspension.go_on(self)

    def _writable_again(self) -> None:
        self._writable()
        if not self._pending and self.connection is not None:
            for stream in list(self._streams.values()):  # room in the output again
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
