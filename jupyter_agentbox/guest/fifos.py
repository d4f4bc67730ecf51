"""Whole messages over FIFOs: the format of the embedded driver, and the end of it that outlives its readers.

A message is the number of its parts and the size of each, four bytes each, and then the parts; the first of them names
the channel. The first 16 bytes to a new reader are :data:`HELLO`: where in all that was ever said the next message
begins, and how many messages before it were dropped.

Both the host and the kernel's own process use this: standard library only.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Part = bytes | bytearray | memoryview

HELLO = struct.Struct("<QQ")
#: Most parts of one message.
MAX_PARTS = 4096
#: Bytes read at a time.
READ_SIZE = 256 * 1024
_COUNT = struct.Struct("<I")


class FormatError(Exception):
    """What was read is no message, or is larger than it may be."""


def pack(parts: Sequence[Part]) -> bytes:
    """One message as bytes."""
    views = [part if isinstance(part, bytes) else _flat(part) for part in parts]
    return b"".join((struct.pack(f"<{len(views) + 1}I", len(views), *map(len, views)), *views))


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
        self._wanted = 0

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take what was read; whole messages are returned. Raises FormatError."""
        self._buffer += data
        size = len(self._buffer)
        if size < self._wanted:  # not looked at again for each piece of a large message
            return []
        messages: list[list[bytes]] = []
        start = 0
        with memoryview(self._buffer) as view:
            while size - start >= 4:
                (count,) = _COUNT.unpack_from(view, start)
                if not 0 < count <= MAX_PARTS:
                    raise FormatError(f"a message of {count} parts; 1 to {MAX_PARTS} may be")
                position = start + 4 + 4 * count
                if position > size:
                    self._wanted = position - start
                    break
                sizes = struct.unpack_from(f"<{count}I", view, start + 4)
                end = position + sum(sizes)
                if end - start > self.max_size:
                    raise FormatError(f"a message of over {self.max_size} bytes")
                if end > size:
                    self._wanted = end - start
                    break
                parts = []
                for length in sizes:
                    parts.append(self._kind(view[position : position + length]))
                    position += length
                messages.append(parts)
                start = end
                self._wanted = 0
        if start:
            del self._buffer[:start]
        return messages


def packed_size(parts: Sequence[bytes]) -> int:
    """How many bytes a message took."""
    return 4 + 4 * len(parts) + sum(map(len, parts))


class Sender:
    """What a program says to one owner after another, each whole message once. Any thread may use it.

    While an owner is there, :meth:`send` waits for it to read. The last that was written is kept, since the owner may
    be lost before it took that out of the FIFO; ``window`` says how much this can be, so no acknowledgement is
    needed. While none is there, all is kept, and beyond ``limit`` the oldest are dropped and counted: a program must
    not stop for want of an audience.

    A signal's handler may raise in the midst of anything here that the main thread does. So each step can be taken
    again, and what ``write`` returned is stored by the call that called it.

    Parameters
    ----------
    limit : int
        Bytes that may wait while nobody listens.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.dropped = 0
        self._lock = threading.RLock()
        self._fd = -1
        self._is_closing = False
        self._window = 0
        self._unsent: deque[bytes] = deque()
        self._sent: deque[tuple[int, bytes]] = deque()  # with their offsets
        self._base = 0  # offset of the next, where none is in _sent
        self._hello = b""
        self._progress: tuple[bytes, list[int]] = (b"", [])  # of the one being written: what each write took
        self._held: list[bytes] = []
        self._holder = 0
        self._unchecked = 0

    def hold(self) -> None:
        """Let what this thread sends wait for :meth:`release`, so that it goes by one write."""
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Send what was held back, and hold back no more."""
        self._holder = 0
        if self._held:
            self._unsent.append(b"".join(self._held))
            self._held = []
        self._push()

    def send(self, parts: Sequence[Part]) -> None:
        """Send one message."""
        data = pack(parts)
        if self._holder and self._holder == threading.get_ident():
            self._held.append(data)
            return
        self._unsent.append(data)
        self._push()

    def attach(self, fd: int, taken: int | None, window: int) -> None:
        """Write to this owner from here on.

        Parameters
        ----------
        fd : int
            The FIFO; closed when it is done with.
        taken : int, optional
            Offset of what no earlier owner took; everything kept is sent where it is not known.
        window : int
            Bytes that may be written and not be taken.
        """
        self.detach()
        with self._lock:
            kept = [*self._sent, *_placed(self._unsent, self._end())]
            if taken is not None:
                kept = [
                    (max(start, taken), data[max(0, taken - start) :])
                    for start, data in kept
                    if start + len(data) > taken
                ]
            self._base = kept[0][0] if kept else self._end()
            self._sent.clear()
            self._progress = (b"", [])
            self._hello = HELLO.pack(self._base, self.dropped)
            self._unsent = deque([self._hello, *(data for _, data in kept)])
            self._window = window
            self._is_closing = False
            self._fd = fd
            self._push(is_nested=True)

    def detach(self, is_taken: bool = False) -> None:
        """Close the FIFO; what is said from here on waits for the next owner.

        Parameters
        ----------
        is_taken : bool
            The owner reads to the end what was written, so that it need not be kept.
        """
        self._is_closing = True  # who is writing stops at the next message
        with self._lock:
            if is_taken and self._fd >= 0:
                self._base = self._end()
                self._sent.clear()
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)
            if self._unsent and self._unsent[0] is self._hello:
                self._unsent.popleft()
            self._shorten()

    def abandon(self) -> None:
        """In a forked child: the FIFO is the parent's."""
        self._lock = threading.RLock()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._holder = -1, 0
        self._is_closing = True
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
                if self._progress[0] is not data:
                    self._progress = (data, [])
                counts = self._progress[1]
                done = sum(counts)
                if done < len(data):
                    try:
                        counts.extend(map(os.write, (self._fd,), (memoryview(data)[done:] if done else data,)))
                    except OSError:
                        self.detach()
                    continue
                if data is not self._hello and not (self._sent and self._sent[-1][1] is data):
                    self._sent.append((self._end(), data))
                self._unsent.popleft()
                end = self._end()
                while len(self._sent) > 1 and end - self._sent[1][0] >= self._window:
                    self._sent.popleft()
            if self._fd < 0:
                self._unchecked += 1
                if self._unchecked >= 256:
                    self._shorten()

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


def _placed(messages: deque[bytes], start: int) -> list[tuple[int, bytes]]:
    placed = []
    for data in messages:
        placed.append((start, data))
        start += len(data)
    return placed
