"""Carry bytes between a socket inside and a stream of the link, or between two sockets inside."""

from __future__ import annotations

import socket
import struct

from .loop import CHUNK, LinkDown, Loop, Stream, ignore

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Callback = Callable[[], object]


class Pump:
    """Two-way copy between a non-blocking socket and a stream, which runs until both ends are closed.

    Parameters
    ----------
    loop : Loop
    sock : socket.socket
        Socket, owned by the pump from here on.
    stream : Stream
        Stream whose callbacks the pump takes over.
    initial : bytes
        Bytes already read from the socket, sent first.
    on_done : callable, optional
        Called once when the pump has ended.
    queue_size : int
        Number of bytes read from the socket ahead of the stream's credit.
    is_abrupt : bool
        Whether a stream that is reset before its EOF also resets the socket, so that its program does not take what it
        has read so far for the whole.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        stream: Stream,
        initial: bytes = b"",
        on_done: Callback = ignore,
        queue_size: int = CHUNK,
        is_abrupt: bool = False,
    ) -> None:
        self._loop = loop
        self._sock: socket.socket | None = sock
        self._is_abrupt = is_abrupt
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
        """Close both sides now."""
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
        if self._sock is not None and self._is_abrupt and not self._has_stream_eof:
            reset_on_close(self._sock)
        self._finish()


def reset_on_close(sock: socket.socket) -> None:
    """Have a TCP connection end with a reset instead of an EOF when it is closed."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass


class Splice:
    """Two-way copy between two non-blocking sockets, which runs until both ends are closed.

    Parameters
    ----------
    loop : Loop
    near, far : socket.socket
        Sockets, owned by the splice from here on.
    to_near, to_far : bytes
        Bytes that are sent first.
    on_done : callable, optional
        Called once when the splice has ended.
    """

    def __init__(
        self,
        loop: Loop,
        near: socket.socket,
        far: socket.socket,
        to_near: bytes = b"",
        to_far: bytes = b"",
        on_done: Callback = ignore,
    ) -> None:
        self._loop = loop
        self._on_done = on_done
        self._ends = _End(near, to_near), _End(far, to_far)
        self._rewatch()

    def close(self) -> None:
        """Close both sockets now. Does nothing if they are closed."""
        if self._ends[0].sock.fileno() < 0:
            return
        for end in self._ends:
            self._loop.watch(end.sock.fileno())
            end.sock.close()
        self._on_done()

    def _rewatch(self) -> None:
        for end, other in (self._ends, self._ends[::-1]):
            if other.has_eof and not end.pending and not end.is_shut:
                end.is_shut = True
                try:
                    end.sock.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
        if all(end.is_shut for end in self._ends):
            self.close()
            return
        for end, other in (self._ends, self._ends[::-1]):
            self._loop.watch(
                end.sock.fileno(),
                self._reader(end, other) if end.is_readable(other) else None,
                self._writer(end) if end.pending else None,
            )

    def _reader(self, end: _End, other: _End) -> Callback:
        return lambda: self._read(end, other)

    def _writer(self, end: _End) -> Callback:
        return lambda: self._write(end)

    def _read(self, end: _End, other: _End) -> None:
        try:
            data = end.sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            self._fail()
            return
        other.pending += data
        end.has_eof = not data
        if data:
            self._write(other)
        else:
            self._rewatch()

    def _write(self, end: _End) -> None:
        try:
            del end.pending[: end.sock.send(end.pending)]
        except BlockingIOError:
            pass
        except OSError:
            self._fail()
            return
        self._rewatch()

    def _fail(self) -> None:
        for end in self._ends:
            reset_on_close(end.sock)
        self.close()


class _End:
    """One socket of a splice."""

    def __init__(self, sock: socket.socket, pending: bytes) -> None:
        self.sock = sock
        self.pending = bytearray(pending)
        self.has_eof = False
        self.is_shut = False

    def is_readable(self, other: _End) -> bool:
        return not self.has_eof and len(other.pending) < CHUNK
