"""The guest's one thread: a small event loop, the link to the host, and pumps between the two.

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

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
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


def _ignore(*_: object) -> None:
    pass


class Stream:
    """One stream of the link. Callbacks are assigned by whoever uses it."""

    def __init__(self, link: Link, stream_id: int, header: dict[str, Any]) -> None:
        self.header = header
        self.on_data: Callable[[bytes], object] = _ignore
        self.on_eof: Callback = _ignore
        self.on_reset: Callable[[str], object] = _ignore
        self.on_credit: Callback = _ignore
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
        on_up: Callable[[dict[str, Any]], object] = _ignore,
        on_down: Callback = _ignore,
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

    def dial(self) -> None:
        """Look for an owner now, and keep looking."""
        try:
            # Each owner makes a new pair, with a higher number. One without a reader must not be opened: gVisor
            # would wait for the reader, whatever the flags say.
            numbers = [int(name[3:]) for name in os.listdir(self._directory) if name.startswith("up.")]
            number = max(numbers, default=0)
            if number <= self._number:
                raise LinkDown("no new owner")
            self._number = number
            self._writer = os.open(f"{self._directory}/up.{number}", os.O_WRONLY | os.O_NONBLOCK)
            self._reader = os.open(f"{self._directory}/down.{number}", os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError, LinkDown):
            self._close_files()
            self.loop.later(REDIAL_INTERVAL, self.dial)
            return
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
        self.connection = None
        self._is_up = False
        self._pending = memoryview(b"")
        self._close_files()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.on_reset("the owner is gone")
        self._on_down()
        self.loop.later(REDIAL_INTERVAL, self.dial)

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
        had_output = False
        while True:
            if not self._pending:
                had_output = had_output or self.connection.output_size > 0
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


class Pump:
    """Carries bytes both ways between a non-blocking socket and a stream, until both ends are done.

    Parameters
    ----------
    loop : Loop
    sock : socket.socket
        Owned by the pump from here on.
    stream : Stream
        Its callbacks become the pump's.
    initial : bytes
        Already read from the socket, to be sent first.
    on_done : callable, optional
        Called once when nothing flows any more.
    queue_size : int
        Bytes taken from the socket ahead of the stream's credit.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        stream: Stream,
        initial: bytes = b"",
        on_done: Callback = _ignore,
        queue_size: int = CHUNK,
    ) -> None:
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._stream = stream
        self._on_done = on_done
        self._queue_size = queue_size
        self._up: list[bytes] = [initial] if initial else []
        self._up_size = len(initial)
        self._down: list[bytes] = []
        self._has_socket_eof = False
        self._has_stream_eof = False
        self._is_write_shut = False
        stream.on_data = self._from_stream
        stream.on_eof = self._stream_eof
        stream.on_reset = self._stream_reset
        stream.on_credit = self._to_stream
        self._to_stream()

    def close(self, reason: str = "") -> None:
        """End both sides now."""
        if self._sock is not None:
            self._stream.reset(reason)
            self._finish()

    def _finish(self) -> None:
        if self._sock is None:
            return
        self._loop.watch(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self._on_done()

    def _rewatch(self) -> None:
        if self._sock is None:
            return
        wants_read = not self._has_socket_eof and self._up_size < self._queue_size
        self._loop.watch(
            self._sock.fileno(),
            self._readable if wants_read else None,
            self._writable if self._down else None,
        )

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self.close("the socket failed")
            return
        if data:
            self._up.append(data)
            self._up_size += len(data)
        else:
            self._has_socket_eof = True
        self._to_stream()

    def _to_stream(self) -> None:
        if self._sock is None:
            return
        try:
            while self._up:
                room = self._stream.credit
                if room <= 0:
                    break
                data = self._up[0]
                if len(data) > room:
                    self._up[0] = data[room:]
                    data = data[:room]
                else:
                    del self._up[0]
                self._up_size -= len(data)
                self._stream.write(data)
        except LinkDown:
            self._finish()
            return
        if self._has_socket_eof and not self._up:
            self._stream.write_eof()
            if self._has_stream_eof and not self._down:
                self._finish()
                return
        self._rewatch()

    def _from_stream(self, data: bytes) -> None:
        if self._sock is None:
            return
        self._down.append(data)
        if len(self._down) == 1:
            self._writable()

    def _writable(self) -> None:
        assert self._sock is not None
        try:
            while self._down:
                data = self._down[0]
                count = self._sock.send(data)
                if count < len(data):
                    self._down[0] = data[count:]
                else:
                    del self._down[0]
                self._stream.consumed(count)
        except BlockingIOError:
            pass
        except OSError:
            self.close("the socket failed")
            return
        self._shut_if_done()
        self._rewatch()

    def _shut_if_done(self) -> None:
        if self._has_stream_eof and not self._down and not self._is_write_shut and self._sock is not None:
            self._is_write_shut = True
            try:
                self._sock.shutdown(1)
            except OSError:
                pass
            if self._has_socket_eof and not self._up:
                self._finish()

    def _stream_eof(self) -> None:
        self._has_stream_eof = True
        self._shut_if_done()

    def _stream_reset(self, reason: str) -> None:
        self._finish()
