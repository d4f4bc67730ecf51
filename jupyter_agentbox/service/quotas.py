"""How many sandboxes there may be at a time: of one owner, and in all. What is parked counts when it wakes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from jupyter_agentbox.errors import LimitReached
from jupyter_agentbox.policy.policy import Policy

from .grants import Grants
from .managed_sandbox import ManagedSandbox


class Quotas(Grants):
    """Adds the limits. On the link's thread, but for :meth:`room_for_kernel`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._coming: set[str] = set()

    def check_count(self, owner: str | None, *, kernel: str = "", but: ManagedSandbox | None = None) -> None:
        """Refuse one more.

        Parameters
        ----------
        owner : str or None
            Whose it is to be; None for that of a kernel, which counts for the server alone.
        kernel : str
            The kernel's id, if it has one already.
        but : ManagedSandbox, optional
            The one that is about to wake.

        Raises
        ------
        LimitReached
            Names the setting.
        """
        alive = [item for item in self._sessions.values() if item is not but and _is_alive(item)]
        kept = sum(item.owner == owner and item.kept_until is not None for item in self._sessions.values())
        kept -= but is not None and but.kept_until is not None
        own = sum(session.owner == owner for session in alive) + kept
        if owner is not None and own >= self.policy.max_sandboxes_per_owner:
            ended = f", {kept} of which have ended with their files kept until they are deleted" if kept else ""
            raise LimitReached(
                f"{owner} has {own} sandboxes{ended}, and may have no more at a time "
                "(setting: Policy.max_sandboxes_per_owner)",
                setting="Policy.max_sandboxes_per_owner",
            )
        notebooks = [session for session in self.notebooks() if session.state not in ("parked", "ended")]
        kernels = {session.spec.kernel_id for session in notebooks if session.spec is not None} | self._coming
        if len(alive) + len(kernels - {kernel}) >= self.policy.max_sandboxes:
            raise LimitReached(
                f"this server has {self.policy.max_sandboxes} sandboxes, and may have no more at a time "
                "(setting: Policy.max_sandboxes)",
                setting="Policy.max_sandboxes",
            )

    @contextmanager
    def waking(self, kernel: str) -> Iterator[None]:
        """Have a kernel that is about to wake count as one that lives. Raises LimitReached."""
        self.check_count(None, kernel=kernel)
        self._coming.add(kernel)
        try:
            yield
        finally:
            self._coming.discard(kernel)

    @asynccontextmanager
    async def room_for_kernel(self) -> AsyncIterator[None]:
        """Have a kernel that is about to start count as one that lives. From any event loop. Raises LimitReached."""
        name = os.urandom(8).hex()

        async def enter() -> None:
            self.check_count(None)
            self._coming.add(name)

        await self._thread.run(enter())
        try:
            yield
        finally:
            self.loop.call_soon_threadsafe(self._coming.discard, name)


def _is_alive(session: ManagedSandbox) -> bool:
    return session.state not in ("parked", "ended") or session.starting is not None
