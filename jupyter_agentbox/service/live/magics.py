"""Run cell commands on the host: ``%snapshot``, ``%restore``, ``%snapshots`` and ``%fork``, for any kernel language.

``kernels.front.front`` sees the messages of its clients. A cell that consists of one such line, apart from blank lines
and comments, is answered here and never reaches the kernel. Code inside therefore cannot issue these commands, and a
restored kernel does not revert the answer. A command runs after the cells before it, and the cells after it wait.

Code that is run over REST is not searched for commands: agents have API calls, and tokens, for the same operations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.models import ForkRequest, SnapshotInfo, SnapshotRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService
from jupyter_agentbox.spec import format_size

from .live_snapshots import LiveSnapshots

#: Maximum number of snapshots that ``%snapshots`` lists, the newest ones.
MAX_LISTED = 50


class CellCommandRunner:
    """Runner of cell commands for the kernels of one process that share a state directory.

    Parameters
    ----------
    snapshots : LiveSnapshots
    service : SandboxService
    loop : event loop, optional
        Event loop of the server that can start kernels. Without it, ``%fork`` is not available.
    """

    _shared: ClassVar[dict[Path, CellCommandRunner]] = {}

    def __init__(
        self, snapshots: LiveSnapshots, service: SandboxService, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._snapshots = snapshots
        self._loop = loop
        self._caller = Caller(service.registry.server_owner, has_kernels=True)

    @classmethod
    def share(cls, policy: Policy, magics: CellCommandRunner) -> None:
        """Use a server's instance for all kernels of its state directory."""
        cls._shared[policy.state_path] = magics

    @classmethod
    def of(cls, policy: Policy) -> CellCommandRunner:
        """Return the instance for a state directory: its server's, or a new one in a program without a server."""
        found = cls._shared.get(policy.state_path)
        if found is None:
            service = SandboxService(policy)
            found = cls._shared[policy.state_path] = cls(LiveSnapshots(service), service)
        return found

    async def run(self, kernel: SandboxedKernel, name: str, argument: str) -> str:
        """Run a command, and return the text to show. On the link thread.

        Raises
        ------
        AgentboxError
        """
        sandbox = kernel.sandbox
        if sandbox is None:
            raise Conflict("the kernel was shut down")
        kernel_id = sandbox.spec.kernel_id
        work: dict[str, Callable[[str, str], Awaitable[str]]] = {
            "snapshot": self._snapshot,
            "restore": self._restore,
            "snapshots": self._list,
            "fork": self._fork,
        }
        return await work[name](kernel_id, argument)

    async def _snapshot(self, kernel_id: str, name: str) -> str:
        if len(name) > 100 or not name.isprintable():
            raise InvalidRequest("a snapshot's name must have at most 100 printable characters", field="name")
        taken = await self._snapshots.take(kernel_id, SnapshotRequest(name=name), caller=self._caller)
        excluded = "" if taken.is_folder_kept else ", without the files of the notebook's folder"
        return f"snapshot {_display_name(taken)}: {format_size(taken.size)}{excluded}\n"

    async def _restore(self, kernel_id: str, wanted: str) -> str:
        found = await self._snapshots.list(kernel_id, caller=self._caller)
        snapshot = choose(found, wanted)
        await self._snapshots.restore(kernel_id, snapshot.id, caller=self._caller)
        return f"restored snapshot {_display_name(snapshot)}, taken {_age(snapshot)} ago\n"

    async def _list(self, kernel_id: str, argument: str) -> str:
        _check_no_argument("snapshots", argument)
        found = await self._snapshots.list(kernel_id, caller=self._caller)
        if not found:
            return "this kernel has no snapshots; take one with %snapshot\n"
        lines = [
            f"{item.id}  {_age(item):>5} ago  {format_size(item.size):>10}  {item.name}".rstrip() for item in found
        ]
        omitted = [f"({len(lines) - MAX_LISTED} older ones)"] if len(lines) > MAX_LISTED else []
        return "\n".join([*omitted, *lines[-MAX_LISTED:]]) + "\n"

    async def _fork(self, kernel_id: str, argument: str) -> str:
        _check_no_argument("fork", argument)
        if self._loop is None:
            raise Conflict("only kernels of a Jupyter server with this extension can be forked")
        work = self._snapshots.fork(kernel_id, ForkRequest(as_kernel=True), caller=self._caller)
        info = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        fork = info.kernels[0].id
        return (
            f"forked: kernel {fork} continues from here. To use it in JupyterLab, right-click it in the list of "
            "running kernels and choose New Notebook for Kernel\n"
        )


def install(kernel: SandboxedKernel, policy: Policy) -> None:
    """Let a kernel's front answer cell commands, unless policy turns them off."""
    if policy.magics:
        kernel.on_command = lambda name, argument: _run(policy, kernel, name, argument)


async def _run(policy: Policy, kernel: SandboxedKernel, name: str, argument: str) -> str:
    magics = await asyncio.to_thread(CellCommandRunner.of, policy)
    return await LinkThread.instance().run(magics.run(kernel, name, argument))


def choose(found: list[SnapshotInfo], wanted: str) -> SnapshotInfo:
    """Return the newest snapshot with this name or id, else the one whose id has this prefix.

    If `wanted` is empty, return the newest of all.

    Parameters
    ----------
    found : list of SnapshotInfo
        Snapshots, oldest first.

    Raises
    ------
    NotFound, InvalidRequest
    """
    if not wanted:
        if not found:
            raise NotFound("this kernel has no snapshots; take one with %snapshot")
        return found[-1]
    for item in reversed(found):
        if wanted in (item.id, item.name):
            return item
    matches = [item for item in found if item.id.startswith(wanted)]
    if len(matches) > 1:
        raise InvalidRequest(f"{wanted[:100]!r} matches {len(matches)} snapshots; list them with %snapshots")
    if not matches:
        raise NotFound(f"this kernel has no snapshot {wanted[:100]!r}; list its snapshots with %snapshots")
    return matches[0]


def _display_name(snapshot: SnapshotInfo) -> str:
    return f"{snapshot.id} ({snapshot.name})" if snapshot.name else snapshot.id


def _age(snapshot: SnapshotInfo) -> str:
    seconds = max(0, int(time.time() - snapshot.created))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _check_no_argument(name: str, argument: str) -> None:
    if argument:
        raise InvalidRequest(f"%{name} does not take an argument")
