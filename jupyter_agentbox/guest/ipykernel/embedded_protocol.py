"""Define messages over FIFOs: the format of the embedded driver, and a sender that outlives its readers.

A message is the number of its parts and the size of each, four bytes each, and then the parts; the first part names
the channel. Each new reader first receives the 16 bytes of :data:`HELLO`: the offset of the next message in everything
ever sent, and how many messages before it were dropped.

Both the host and the kernel's own process use this module, so it uses only the standard library.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Part = bytes | bytearray | memoryview

HELLO = struct.Struct("<QQ")
ACK = struct.Struct("<Q")
#: Seconds between two checks whether to give up an owner that does not read.
ACK_INTERVAL = 0.2
#: Maximum number of parts in one message.
MAX_PARTS = 4096
#: Bytes to read at a time. A kernel reads less while no message has begun, since gVisor clears as much memory for each
#: read.
READ_SIZE = 256 * 1024
FIRST_READ_SIZE = 16 * 1024
_COUNT = struct.Struct("<I")


class FormatError(Exception):
    """The data is not a valid message, or the message is too large."""


def pack(parts: Sequence[Part]) -> bytes:
    """Return one message as bytes."""
    views = [part if isinstance(part, bytes) else _flat(part) for part in parts]
    return b"".join((pack_head(views), *views))


def pack_head(parts: Sequence[Part]) -> bytes:
    """Return the header of one message, whose parts are flat."""
    return struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts))


def _flat(part: Part) -> Part:
    try:
        return memoryview(part).cast("B")
    except TypeError:  # in Fortran order, or with a dimension of size 0
        return memoryview(part).tobytes("A")


class Unpacker:
    """Parser that splits data into messages.

    Parameters
    ----------
    max_size : int
        Maximum size of one message, in bytes.
    kind : type
        Type of the returned parts.
    """

    def __init__(self, max_size: int, kind: type[bytes] = bytes) -> None:
        self.max_size = max_size
        self._kind = kind
        self._buffer = bytearray()
        self._sizes: list[int] = []  # of the remaining parts of the current message, the next one last
        self._parts: list[bytes] = []

    @property
    def is_at_boundary(self) -> bool:
        """Whether no part of an unfinished message is buffered."""
        return not self._buffer and not self._sizes

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Parse more bytes. Return the messages that are complete. Raises FormatError."""
        self._buffer += data
        messages: list[list[bytes]] = []
        start, end = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while True:
                if not self._sizes:
                    if end - start < 4:
                        break
                    (count,) = _COUNT.unpack_from(view, start)
                    if not 0 < count <= MAX_PARTS:
                        raise FormatError(f"a message of {count} parts; the limit is {MAX_PARTS}")
                    position = start + 4 + 4 * count
                    if position > end:
                        break
                    sizes = struct.unpack_from(f"<{count}I", view, start + 4)
                    if position - start + sum(sizes) > self.max_size:
                        raise FormatError(f"a message of more than {self.max_size} bytes")
                    self._sizes = list(reversed(sizes))
                    start = position
                size = self._sizes[-1]
                if end - start < size:
                    break
                self._parts.append(self._kind(view[start : start + size]))
                start += size
                self._sizes.pop()
                if not self._sizes:
                    messages.append(self._parts)
                    self._parts = []
        if start:
            del self._buffer[:start]
        return messages


def packed_size(parts: Sequence[bytes]) -> int:
    """Return the size of a message in this format, in bytes."""
    return 4 + 4 * len(parts) + sum(map(len, parts))


class _Held(threading.local):
    """Messages that one thread holds back; None if it does not hold back."""

    messages: list[bytes] | None = None


class Sender:
    """Sender of messages to one owner after another, each complete message once. Thread-safe.

    While an owner is connected, :meth:`send` waits for it to read. Data that may still be in the FIFO is kept, because
    it may be lost with the owner. Without an owner everything is kept. Beyond ``limit`` the oldest messages are dropped
    and counted, because a program must not block when no one reads its output.

    gVisor has no non-blocking write to a host's FIFO, and a blocking write cannot be interrupted. The sender therefore
    writes only as much as the FIFO has room for. The owner reports on a second FIFO how much it has read, and the
    sender reads that FIFO only when it needs to.

    A signal handler may raise an exception at any point of the main thread's code here. Each step can therefore be
    repeated, and the results of ``write`` and ``read`` are stored by the same call that makes the system call.

    Parameters
    ----------
    limit : int
        Maximum number of bytes that are kept without an owner.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.dropped = 0
        self._lock = threading.RLock()
        self._fd = self._acks = -1
        self._is_closing = False
        self._room = self._acked = 0
        self._news: list[bytes] = []  # the result of each read of acknowledgements
        self._unsent: deque[bytes] = deque()
        self._sent: deque[tuple[int, bytes]] = deque()  # with their offsets
        self._base = 0  # offset of the next message, if _sent is empty
        self._hello = b""
        self._written: list[int] = []  # the result of each write to this owner
        self._current: tuple[bytes, int] = (b"", 0)  # message being written, and number of bytes written before it
        self._held = _Held()
        self._unchecked = 0

    def hold(self) -> bool:
        """Hold back what this thread sends, so that it is sent with one write. Return whether it did not do so yet."""
        if self._held.messages is not None:
            return False
        self._held.messages = []
        return True

    def release(self) -> bool:
        """Send the messages held back, and stop holding back. Return whether this thread was holding back."""
        is_held = self._held.messages is not None
        if self.queue_held():
            self.push()
        return is_held

    def queue_held(self) -> bool:
        """Stop holding back, and queue the messages for :meth:`push`. Return whether there were any."""
        messages = self._held.messages
        if messages:
            self._unsent.append(b"".join(messages))
        self._held.messages = None
        return bool(messages)

    def send(self, parts: Sequence[Part]) -> None:
        """Send one message."""
        data = pack(parts)
        if self._held.messages is not None:
            self._held.messages.append(data)
            return
        self._unsent.append(data)
        self.push()

    def attach(self, fd: int, acks: int, room: int) -> None:
        """Write to this owner from here on, starting with the kept messages.

        Parameters
        ----------
        fd, acks : int
            FIFO to write to, and the one on which the owner reports how many bytes it has read, each time as
            :data:`ACK`. The sender closes them when it is done with them.
        room : int
            Number of bytes that may be written and unread.
        """
        self.detach()
        with self._lock:
            pending = self._find_unread()
            self._base = pending[0][0] if pending else self._end()
            self._sent.clear()
            self._hello = HELLO.pack(self._base, self.dropped)
            self._unsent = deque([self._hello, *(data for _, data in pending)])
            self._current, self._written = (b"", 0), []
            self._room, self._acked, self._news = room, 0, []
            self._is_closing = False
            self._fd, self._acks = fd, acks
            self.push(is_nested=True)

    def detach(self) -> None:
        """Close the FIFOs. Later messages wait for the next owner."""
        self._is_closing = True  # stops a thread that is writing
        with self._lock:
            self._close()
            if self._unsent and self._unsent[0] is self._hello:
                self._unsent.popleft()
            self._shorten()

    def forget(self, taken: int) -> None:
        """Discard everything before this offset. Call only while no owner is connected."""
        with self._lock:
            pending = [
                (max(start, taken), data[max(0, taken - start) :])
                for start, data in self._find_unread()
                if start + len(data) > taken
            ]
            self._base = pending[0][0] if pending else self._end()
            self._sent.clear()
            self._unsent = deque(data for _, data in pending)

    def _find_unread(self) -> list[tuple[int, bytes]]:
        pending, end = list(self._sent), self._end()
        for data in self._unsent:
            pending.append((end, data))
            end += len(data)
        return pending

    def _close(self) -> None:
        for fd in (self._fd, self._acks):
            if fd >= 0:
                os.close(fd)
        self._fd = self._acks = -1

    def abandon(self) -> None:
        """Release the FIFOs in a forked child, since they belong to the parent."""
        self._lock = threading.RLock()
        self._close()
        self._is_closing = True
        self._held = _Held()
        self.limit = 0

    def _end(self) -> int:
        """Return the offset after the last message in _sent."""
        return self._sent[-1][0] + len(self._sent[-1][1]) if self._sent else self._base

    def push(self, is_nested: bool = False) -> None:
        """Send the queued messages."""
        # This thread is already sending, and a signal handler or finalizer has sent a message. The outer call sends it
        # too.
        if not is_nested and self._lock._is_owned():  # type: ignore[attr-defined]
            return
        with self._lock:
            while self._unsent and self._fd >= 0 and not self._is_closing:
                data = self._unsent[0]
                written = sum(self._written)
                self._written = [written]
                if self._current[0] is not data:
                    self._current = (data, written)
                done = written - self._current[1]
                if done < len(data):
                    self._write(data, done, written)
                    continue
                if data is not self._hello and not (self._sent and self._sent[-1][1] is data):
                    self._sent.append((self._end(), data))
                self._unsent.popleft()
                end = self._end()
                while len(self._sent) > 1 and end - self._sent[1][0] >= self._room:
                    self._sent.popleft()
            if self._fd < 0:
                self._unchecked += 1
                if self._unchecked >= 256:
                    self._shorten()

    def _write(self, data: bytes, done: int, written: int) -> None:
        """Write a part of a message, or wait for an acknowledgement."""
        rest = len(data) - done
        try:
            if self._news:
                if not self._news[-1]:
                    raise OSError
                self._acked = ACK.unpack_from(self._news[-1], len(self._news[-1]) - ACK.size)[0]
            room = self._room - written + self._acked
            if room < min(rest, self._room // 4):
                if is_readable(self._acks, ACK_INTERVAL):
                    self._news = self._news[-1:]
                    self._news.extend(map(os.read, (self._acks,), (64 * ACK.size,)))
                return
            view = data if done == 0 and rest <= room else memoryview(data)[done : done + room]
            self._written.extend(map(os.write, (self._fd,), (view,)))
        except OSError:
            self.detach()

    def _shorten(self) -> None:
        """Drop the oldest messages beyond the limit."""
        self._unchecked = 0
        size = sum(len(data) for _, data in self._sent) + sum(map(len, self._unsent))
        while size > self.limit and len(self._sent) + len(self._unsent) > 1:
            if self._sent:
                start, data = self._sent.popleft()
                self._base = start + len(data)
            else:
                data = self._unsent.popleft()
            size -= len(data)
            self.dropped += 1


def is_readable(fd: int, timeout: float = 0.0) -> bool:
    """Return whether data or EOF can be read within ``timeout`` seconds. Otherwise reading a host's FIFO blocks."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
