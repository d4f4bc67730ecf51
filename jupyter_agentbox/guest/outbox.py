"""Keep the messages of a program inside until the host has read them.

An :class:`Outbox` outlives the link. When the owner is lost, the outbox goes on collecting messages, and the next owner
receives every message that the last one had not read completely. An outbox is bounded. At its limit, while an owner is
connected, it accepts no more and the program waits. Without an owner it drops and counts the oldest messages, because a
kernel must not block when no one reads its output, and the newest messages show the current state.
"""

from __future__ import annotations

from collections import deque

from .framing import INITIAL_CREDIT
from .loop import LinkDown, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Outbox:
    """Queue of complete messages on their way to the host.

    Parameters
    ----------
    limit : int
        Maximum number of queued bytes.
    on_room : callable
        Called when a full outbox has room again.
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
        # Next message to send, and the offset in it; bytes sent and bytes forgotten since this owner connected.
        self._next = 0
        self._offset = 0
        self._sent = 0
        self._forgotten = 0

    @property
    def is_attached(self) -> bool:
        """Whether an owner is connected."""
        return self._stream is not None

    @property
    def has_room(self) -> bool:
        """Whether more messages should be added. Always true without an owner, since then the oldest are dropped."""
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
        """Signal that no more messages will be added. The stream ends when all are sent."""
        self.is_closed = True
        self._push()

    def attach(self, stream: Stream) -> None:
        """Send to this stream, starting with the first message that was not read completely.

        The header's ``window`` is the credit that the host gives at the start. Later credit then shows how much it has
        read.
        """
        self._stream = stream
        self._window = INITIAL_CREDIT + int(stream.header.get("window", 0))
        self._next = self._offset = self._sent = self._forgotten = 0
        stream.on_credit = self._push
        self._push()

    def detach(self) -> None:
        """Stop sending, because the owner is lost."""
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
            return  # on_reset notifies the user of this outbox
        if was_full and self.has_room:
            self._on_room()

    def _forget(self, taken: int) -> None:
        """Remove messages that the host has read completely; ``taken`` is the number of bytes read by this owner."""
        while self._next > 0 and taken - self._forgotten >= len(self._messages[0]):
            first = self._messages.popleft()
            self._forgotten += len(first)
            self.size -= len(first)
            self._next -= 1
