"""Suspend the link for a checkpoint: close its files, since gVisor saves no open FIFO, but keep its streams.

The owner's last message is ``{"kind": "suspend", "token": ...}``. It then reads all pending output, and returns
with a pair of FIFOs named by the token. A copy of this sandbox, restored from the checkpoint, has a different owner
that does not know the token. That owner resets the open streams and starts over.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import Link


class Suspension:
    """State of a suspended link, with the token of its owner."""

    def __init__(self) -> None:
        self.token = ""
        self._is_closed = False

    def begin(self, link: Link, token: str) -> None:
        """Close the files as soon as all pending output is written."""
        self.token = token
        self._is_closed = False
        link.flush()
        self.advance(link)

    def advance(self, link: Link) -> None:
        """Continue the suspension after output was written."""
        if self.token and not self._is_closed and not link.has_output:
            self._is_closed = True
            link.pause()

    def is_resumed_by(self, token: str) -> bool:
        """Return whether an owner with this token suspended the link. Ends the suspension either way."""
        is_same = bool(self.token) and self.token == token
        self.token = ""
        return is_same
