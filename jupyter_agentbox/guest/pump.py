"""Carry bytes between a socket inside and a stream of the link."""

from __future__ import annotations

from .loop import CHUNK, LinkDown, Loop, Stream, ignore

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
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
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        stream: Stream,
        initial: bytes = b"",
        on_done: Callback = ignore,
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
        self._finish()
