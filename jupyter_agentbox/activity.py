"""The use of notebooks' sandboxes over REST, told to Jupyter: its culler knows of cells only."""

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

    def _look(self, session: Session) -> None:
        self._waiting.discard(session)
        if session.uses:
            self._note(session)
