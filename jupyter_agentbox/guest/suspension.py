"""The link's pause for a checkpoint: its files are closed, as gVisor saves no open FIFO, and its streams are kept.

The owner says ``{"kind": "suspend", "token": ...}`` as the last it writes, reads all that is on its way, and comes back
with a pair of FIFOs named by the token. A copy of this sandbox, restored from the checkpoint, is met by another owner,
who knows no token: it resets the streams that were open, and begins anew.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import Link


class Suspension:
    """Whether a link is suspended, and under which token."""

    def __init__(self) -> None:
        self.token = ""
        self._is_closed = False

    def begin(self, link: Link, token: str) -> None:
        """Close the files as soon as all is written that waits."""
        self.token = token
        self._is_closed = False
        link.flush()
        self.go_on(link)

    def go_on(self, link: Link) -> None:
        """Called when something was written."""
        if self.token and not self._is_closed and not link.has_output:
            self._is_closed = True
            link.pause()

    def is_resumed_by(self, token: str) -> bool:
        """Whether an owner who comes with that token is the one who suspended it. Ends the suspension either way."""
        is_same = bool(self.token) and self.token == token
        self.token = ""
        return is_same
