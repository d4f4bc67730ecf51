"""Define the interface of a parked kernel, and the saved state that a kernel continues from."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jupyter_agentbox.sandbox.record import KernelRecord, Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import SandboxSpec


@dataclass(frozen=True)
class Restoration:
    """The saved state from which a kernel is about to be started.

    Parameters
    ----------
    spec : SandboxSpec
        Specification of its sandbox under the current policy.
    record, saved
        See ``SandboxManager.restore``.
    """

    spec: SandboxSpec
    record: Record
    saved: Path


class ParkedKernel(Protocol):
    """A kernel that was saved to disk and ended. ``service.live.parking`` implements it.

    Parameters
    ----------
    snapshot_id, sandbox_id : str
        Ids of the saved state and of the sandbox that ended.
    spec : SandboxSpec
        Specification of that sandbox.
    kernel : KernelRecord
        The notebook's kernel.
    asks : list of dict
        From its :class:`~jupyter_agentbox.sandbox.record.Record`.
    """

    @property
    def snapshot_id(self) -> str: ...
    @property
    def sandbox_id(self) -> str: ...
    @property
    def spec(self) -> SandboxSpec: ...
    @property
    def kernel(self) -> KernelRecord: ...
    @property
    def asks(self) -> list[dict[str, Any]]: ...

    def waking(self) -> AbstractContextManager[None]:
        """Count the kernel as a live one within the context. Raises LimitReached."""

    def opened(self) -> AbstractAsyncContextManager[Restoration]:
        """Provide the saved state within the context, with the current policy applied. Raises AgentboxError."""

    def moved(self, sandbox: Sandbox) -> None:
        """Record that the kernel continues in another sandbox."""

    async def woken(self, sandbox: Sandbox) -> None:
        """Remove the saved state, because the kernel runs in another sandbox now. Never fails."""

    async def forget(self) -> None:
        """Remove the saved state, because the kernel is no longer needed. Never fails."""
