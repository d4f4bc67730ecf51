"""What a parked kernel is, and what a kernel goes on from."""

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
    """What a kernel that is about to be started goes on from.

    Parameters
    ----------
    spec : SandboxSpec
        For its sandbox, as policy has it now.
    record, saved
        See ``SandboxManager.restore``.
    """

    spec: SandboxSpec
    record: Record
    saved: Path


class ParkedKernel(Protocol):
    """A kernel that was saved to the disk, and ended; ``service.live.parking`` makes them.

    Parameters
    ----------
    snapshot_id, sandbox_id : str
        Of what was saved, and of the sandbox that ended.
    spec : SandboxSpec
        What that was.
    kernel : KernelRecord
        The notebook's.
    asks : list of dict
        Of its :class:`~jupyter_agentbox.sandbox.record.Record`.
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
        """Have it count as one that lives. Raises LimitReached."""

    def opened(self) -> AbstractAsyncContextManager[Restoration]:
        """Have what was saved at hand, as policy allows it now. Raises AgentboxError."""

    def moved(self, sandbox: Sandbox) -> None:
        """It goes on in another sandbox from now on."""

    async def woken(self, sandbox: Sandbox) -> None:
        """It goes on in another sandbox: remove what was saved. Never fails."""

    async def forget(self) -> None:
        """Nobody wants it any more: remove what was saved. Never fails."""
