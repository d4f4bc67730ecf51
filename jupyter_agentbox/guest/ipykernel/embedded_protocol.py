"""Whole messages over FIFOs: the format of the embedded driver, and the end of it that outlives its readers.

A message is the number of its parts and the size of each, four bytes each, and then the parts; the first of them names
the channel. The first 16 bytes to a new reader are :data:`HELLO`: where in all that was ever said the next message
begins, and how many messages before it were dropped.

Both the host and the kernel's own process use this: standard library only.
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
#: Seconds between two looks at whether an owner that does not read is to be given up.
ACK_INTERVAL = 0.2
#: Most parts of one message.
MAX_PARTS = 4096
#: Bytes read at a time; and by a kernel while no message has begun, since gVisor clears as much memory for each read.
READ_SIZE = 256 * 1024
FIRST_READ_SIZE = 16 * 1024
_COUNT = struct.Struct("<I")


class FormatError(Exception):
    """What was read is no message, or is larger than it may be."""


def pack(parts: Sequence[Part]) -> bytes:
    """One message as bytes."""
    views = [part if isinstance(part, bytes) else _flat(part) for part in parts]
    return b"".join((pack_head(views), *views))


def pack_head(parts: Sequence[Part]) -> bytes:
    """What goes before the parts of one message, which are flat."""
    return struct.pack(f"<{len(parts) + 1}I", len(parts), *map(len, parts))


def _flat(part: Part) -> Part:
    try:
        return memoryview(part).cast("B")
    except TypeError:  # in Fortran's order, or with a dimension of nothing
        return memoryview(part).tobytes("A")


class Unpacker:
    """Cuts what was read into messages.

    Parameters
    ----------
    max_size : int
        Bytes that one message may have.
    kind : type
        What each part is made.
    """

    def __init__(self, max_size: int, kind: type[bytes] = bytes) -> None:
        self.max_size = max_size
        self._kind = kind
        self._buffer = bytearray()
        self._sizes: list[int] = []  # of the parts to come of the message that has begun, the next one last
        self._parts: list[bytes] = []

    @property
    def is_at_boundary(self) -> bool:
        """Whether nothing of an unfinished message is held."""
        return not self._buffer and not self._sizes

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take what was read; whole messages are returned. Raises FormatError."""
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
                        raise FormatError(f"a message of {count} parts; 1 to {MAX_PARTS} may be")
                    position = start + 4 + 4 * count
                    if position > end:
                        break
                    sizes = struct.unpack_from(f"<{count}I", view, start + 4)
                    if position - start + sum(sizes) > self.max_size:
                        raise FormatError(f"a message of over {self.max_size} bytes")
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
    """How many bytes a message took."""
    return 4 + 4 * len(parts) + sum(map(len, parts))


class _Held(threading.local):
    """What one thread holds back; None where it does not."""

    messages: list[bytes] | None = None


class Sender:
    """What a program says to one owner after another, each whole message once. Any thread may use it.

    While an owner is there, :meth:`send` waits for it to read. What it may not have taken out of the FIFO is kept, as
    it may be lost first. While none is there, all is kept, and beyond ``limit`` the oldest are dropped and counted: a
    program must not stop for want of an audience.

    gVisor knows no write to a host's FIFO that does not block, and one that blocks cannot be interrupted. So no more is
    written than has room: the owner says on a second FIFO how much it has read, which is looked at only when needed.

    A signal's handler may raise in the midst of anything here that the main thread does. So each step can be taken
    again, and what ``write`` and ``read`` returned is stored by the call that called them.

    Parameters
    ----------
    limit : int
        Bytes that may wait while nobody listens.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.dropped = 0
        self._lock = threading.RLock()
        self._fd = self._acks = -1
        self._is_closing = False
        self._room = self._acked = 0
        self._news: list[bytes] = []  # what each read of acknowledgements gave
        self._unsent: deque[bytes] = deque()
        self._sent: deque[tuple[int, bytes]] = deque()  # with their offsets
        self._base = 0  # offset of the next, where none is in _sent
        self._hello = b""
        self._written: list[int] = []  # what each write to this owner took
        self._current: tuple[bytes, int] = (b"", 0)  # the one being written, and how much was before it
        self._held = _Held()
        self._unchecked = 0

    def hold(self) -> None:
        """Let what this thread sends wait for :meth:`release`, so that it goes by one write."""
        if self._held.messages is None:
            self._held.messages = []

    def release(self) -> bool:
        """Send what was held back, and hold back no more; whether it was."""
        messages = self._held.messages
        if messages:
            self._unsent.append(b"".join(messages))
        self._held.messages = None
        if messages:
            self._push()
        return messages is not None

    def send(self, parts: Sequence[Part]) -> None:
        """Send one message."""
        data = pack(parts)
        if self._held.messages is not None:
            self._held.messages.append(data)
            return
        self._unsent.append(data)
        self._push()

    def attach(self, fd: int, acks: int, room: int) -> None:
        """Write to this owner from here on: what is kept comes first.

        Parameters
        ----------
        fd, acks : int
            FIFO to write to, and the one on which the owner says how many bytes it has read, each time as
            :data:`ACK`; they are closed when they are done with.
        room : int
            Bytes that may be written and not be read.
        """
        self.detach()
        with self._lock:
            kept = self._kept()
            self._base = kept[0][0] if kept else self._end()
            self._sent.clear()
            self._hello = HELLO.pack(self._base, self.dropped)
            self._unsent = deque([self._hello, *(data for _, data in kept)])
            self._current, self._written = (b"", 0), []
            self._room, self._acked, self._news = room, 0, []
            self._is_closing = False
            self._fd, self._acks = fd, acks
            self._push(is_nested=True)

    def detach(self) -> None:
        """Close the FIFOs; what is said from here on waits for the next owner."""
        self._is_closing = True  # who is writing stops
        with self._lock:
            self._close()
            if self._unsent and self._unsent[0] is self._hello:
                self._unsent.popleft()
            self._shorten()

    def forget(self, taken: int) -> None:
        """Keep nothing of what was said before this offset. Only while no owner is there."""
        with self._lock:
            kept = [
                (max(start, taken), data[max(0, taken - start) :])
                for start, data in self._kept()
                if start + len(data) > taken
            ]
            self._base = kept[0][0] if kept else self._end()
            self._sent.clear()
            self._unsent = deque(data for _, data in kept)

    def _kept(self) -> list[tuple[int, bytes]]:
        kept, end = list(self._sent), self._end()
        for data in self._unsent:
            kept.append((end, data))
            end += len(data)
        return kept

    def _close(self) -> None:
        for fd in (self._fd, self._acks):
            if fd >= 0:
                os.close(fd)
        self._fd = self._acks = -1

    def abandon(self) -> None:
        """In a forked child: the FIFOs are the parent's."""
        self._lock = threading.RLock()
        self._close()
        self._is_closing = True
        self._held = _Held()
        self.limit = 0

    def _end(self) -> int:
        """Offset of the first that is not in _sent."""
        return self._sent[-1][0] + len(self._sent[-1][1]) if self._sent else self._base

    def _push(self, is_nested: bool = False) -> None:
        # What a signal's handler or a finalizer says while this thread is in here goes with the rest.
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
        """Write some of it, or wait for an acknowledgement."""
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
        """Keep no more than the limit."""
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
    """Whether a read gives something, be it the end, in ``timeout`` seconds: one of a host's FIFO would block."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
