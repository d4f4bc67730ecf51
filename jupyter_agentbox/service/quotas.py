"""Limit the number of sandboxes, per owner and in total. A parked sandbox counts when it wakes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from jupyter_agentbox.errors import LimitReached
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.thread import LinkThread, on_link_thread

from .managed_sandbox import ManagedSandbox
from .registry import SandboxRegistry


class Quotas:
    """Limits on the number of sandboxes. Only on the link thread, except :meth:`room_for_kernel`.

    Parameters
    ----------
    policy : Policy
        Defines the limits.
    registry : SandboxRegistry
        Lists the existing sandboxes.
    """

    def __init__(self, policy: Policy, registry: SandboxRegistry) -> None:
        self.policy = policy
        self._registry = registry
        self._starting: set[str] = set()

    def check(self, owner: str | None, *, kernel: str = "", excluded: ManagedSandbox | None = None) -> None:
        """Check that one more sandbox is allowed.

        Parameters
        ----------
        owner : str or None
            Owner of the new sandbox. None for a kernel's sandbox, which counts only towards the total.
        kernel : str
            The kernel's id, if it already has one.
        excluded : ManagedSandbox, optional
            Sandbox to exclude from the count, because it is the one about to wake or to be revived.

        Raises
        ------
        LimitReached
            The error names the setting.
        """
        owned = self._registry.sandboxes.values()
        alive = [item for item in owned if item is not excluded and _is_alive(item)]
        kept = sum(item.owner == owner and item.kept_until is not None for item in owned)
        kept -= excluded is not None and excluded.kept_until is not None
        own = sum(managed.owner == owner for managed in alive) + kept
        if owner is not None and own >= self.policy.max_sandboxes_per_owner:
            ended = f", {kept} of which have ended with their files kept until they are deleted" if kept else ""
            raise LimitReached(
                f"{owner} has {own} sandboxes{ended}, which is the maximum; delete one "
                "(setting: Policy.max_sandboxes_per_owner)",
                setting="Policy.max_sandboxes_per_owner",
            )
        notebooks = [managed for managed in self._registry.notebooks() if managed.state not in ("parked", "ended")]
        kernels = {managed.spec.kernel_id for managed in notebooks if managed.spec is not None} | self._starting
        if len(alive) + len(kernels - {kernel}) >= self.policy.max_sandboxes:
            raise LimitReached(
                f"this server has {self.policy.max_sandboxes} sandboxes, which is the maximum; end one "
                "(setting: Policy.max_sandboxes)",
                setting="Policy.max_sandboxes",
            )

    @contextmanager
    def waking(self, kernel: str) -> Iterator[None]:
        """Count a kernel that is about to wake as running. Raises LimitReached."""
        self.check(None, kernel=kernel)
        self._starting.add(kernel)
        try:
            yield
        finally:
            self._starting.discard(kernel)

    @asynccontextmanager
    async def room_for_kernel(self) -> AsyncIterator[None]:
        """Count a kernel that is about to start as running. May be used on any event loop. Raises LimitReached."""
        name = os.urandom(8).hex()

        @on_link_thread
        async def enter() -> None:
            self.check(None)
            self._starting.add(name)

        await enter()
        try:
            yield
        finally:
            LinkThread.instance().loop.call_soon_threadsafe(self._starting.discard, name)


def _is_alive(managed: ManagedSandbox) -> bool:
    return managed.state not in ("parked", "ended") or managed.starting is not None
