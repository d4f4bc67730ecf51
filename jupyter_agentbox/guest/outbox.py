"""What a program inside says to the host, kept until the host has taken it.

An :class:`Outbox` outlives the link: when the owner is lost it goes on collecting, and the next owner gets
every message that the last one had not taken, whole. Bounded: beyond its limit it takes no more while an owner is
there (the program waits), and drops the oldest while none is (a kernel must not stop for want of an audience, and
the newest tell how it stands now), which it counts.
"""

from __future__ import annotations

from collections import deque

from .framing import INITIAL_CREDIT
from .loop import LinkDown, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Outbox:
    """Whole messages on their way to the host.

    Parameters
    ----------
    limit : int
        Bytes that may wait.
    on_room : callable
        Called when it has room again after it was full.
    """

    def __init__(self, limit: int, on_room: Callable[[], object]) -> None:
        self.limit = limit
        self.size = 0
        self.dropped = 0
        self.is_closed = False
        self._on_room = on_room
        self._messages: deque[bytes] = deque()
        self._stream: Stream | None = None
        self._window = 0
        # Which message is next to be sent, and from where; bytes sent and bytes forgotten since this owner came.
        self._next = 0
        self._offset = 0
        self._sent = 0
        self._forgotten = 0

    @property
    def is_attached(self) -> bool:
        """Whether an owner listens."""
        return self._stream is not None

    @property
    def has_room(self) -> bool:
        """Whether more should be put; always while nobody listens, since then the rest is dropped."""
        return self._stream is None or self.size < self.limit

    def put(self, message: bytes) -> None:
        """Add one message."""
        self._messages.append(message)
        self.size += len(message)
        if self._stream is not None:
            self._push()
            return
        while self.size > self.limit and len(self._messages) > 1:
            self.size -= len(self._messages.popleft())
            self.dropped += 1

    def close(self) -> None:
        """Nothing more will be put; the stream ends when all is sent."""
        self.is_closed = True
        self._push()

    def attach(self, stream: Stream) -> None:
        """Send to this stream, from the first message that was not wholly taken.

        The header's ``window`` is the credit that the host gives at the start, so that later credit tells what it took.
        """
        self._stream = stream
        self._window = INITIAL_CREDIT + int(stream.header.get("window", 0))
        self._next = self._offset = self._sent = self._forgotten = 0
        stream.on_credit = self._push
        self._push()

    def detach(self) -> None:
        """The owner is gone."""
        self._stream = None
        self._on_room()

    def _push(self) -> None:
        stream = self._stream
        if stream is None:
            return
        was_full = not self.has_room
        self._forget(self._sent + stream.credit_given - self._window)
        try:
            while self._next < len(self._messages):
                room = stream.credit
                if room <= 0:
                    break
                message = self._messages[self._next]
                part = message[self._offset : self._offset + room] if self._offset or room < len(message) else message
                stream.write(part)
                self._sent += len(part)
                self._offset += len(part)
                if self._offset == len(message):
                    self._next += 1
                    self._offset = 0
            if self.is_closed and self._next == len(self._messages):
                stream.write_eof()
        except LinkDown:
            return  # on_reset tells whoever attached us
        if was_full and self.has_room:
            self._on_room()

    def _forget(self, taken: int) -> None:
        """The host has taken so many bytes since it came: whole messages among them need not be kept."""
        while self._next > 0 and taken - self._forgotten >= len(self._messages[0]):
            first = self._messages.popleft()
            self._forgotten += len(first)
            self.size -= len(first)
            self._next -= 1
