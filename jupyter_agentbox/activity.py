"""What Jupyter is told of notebooks' sandboxes: that one is used over REST, as its culler knows of cells only; that one
was parked, as it holds connections for pages that were closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime, timezone
from typing import Any

from .session import Session

#: Seconds between two words to Jupyter while a call goes on.
INTERVAL = 1.0


class KernelActivity:
    """Lets calls on a kernel's sandbox count as activity of the kernel, from their begin to their end.

    Parameters
    ----------
    kernels : MappingKernelManager
        The server's.
    loop : AbstractEventLoop
        The server's.
    """

    def __init__(self, kernels: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._kernels = kernels
        self._loop = loop
        self._waiting: set[Session] = set()

    def used(self, session: Session) -> None:
        """Somebody uses a notebook's sandbox. From any thread."""
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._note, session)

    def _note(self, session: Session) -> None:
        kernel_id = session.spec.kernel_id if session.spec is not None else ""
        if kernel_id in self._kernels:
            now = datetime.now(timezone.utc)
            self._kernels.last_kernel_activity = self._kernels.get_kernel(kernel_id).last_activity = now
        if session.uses and session not in self._waiting:
            self._waiting.add(session)
            self._loop.call_later(INTERVAL, self._look, session)

    def parked(self, kernel_id: str) -> None:
        """A kernel was parked. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_later, INTERVAL, self._let_go, kernel_id)

    def _let_go(self, kernel_id: str) -> None:
        """Close the connections that wait for a closed page to come back, half of a parked kernel's descriptors.

        Not if they have brought something that the page has not seen. A page that comes back makes new ones.
        """
        kept = self._kernels._kernel_buffers.get(kernel_id)
        if kept is not None and not kept["buffer"] and kernel_id in self._kernels:
            self._kernels.stop_buffering(kernel_id)

    def _look(self, session: Session) -> None:
        self._waiting.discard(session)
        if session.uses:
            self._note(session)
