"""Which sandboxes there are in this process, and who may find and use which.

Nobody learns of another owner's sandbox by any call: it is not found, as one that never was. Ids are each owner's
own, so not even a clash tells. The sandboxes of this server's notebooks are found here too, under their sandbox ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jupyter_agentbox.errors import AgentboxError, Conflict, NotAuthorized, NotFound, PolicyRefused, SandboxEnded
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.models import SandboxFilters, SandboxInfo, SandboxRequest
from jupyter_agentbox.models.sandboxes import CallInfo
from jupyter_agentbox.policy.environment import user_name
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.thread import LinkThread, on_link_thread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.sandbox.tokens import Scope, Verb
from jupyter_agentbox.storage.audit.log import AuditLog

from .managed_sandbox import ManagedSandbox
from .refusals import Refusals

# A method below is called `list`.
Infos = list[SandboxInfo]
Found = list[ManagedSandbox]
Ids = list[str]
OnUse = Callable[[ManagedSandbox], None]
Wake = Callable[[ManagedSandbox], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Caller:
    """Who calls.

    Parameters
    ----------
    name : str
        The owner of what is made.
    has_kernels : bool
        May use the kernels of this server, and so their sandboxes.
    is_admin : bool
        Sees the sandboxes of all owners.
    scope : Scope or None
        Of a token for one sandbox: there is nothing else for such a caller, and nothing beyond its verbs.
    verb : str or None
        What this call is about to do: ``read``, ``write`` or ``execute``. Whoever has a scope must say it.
    """

    name: str
    has_kernels: bool = False
    is_admin: bool = False
    scope: Scope | None = None
    verb: Verb | None = None

    def acting(self, verb: Verb) -> Caller:
        """Return the same caller, about to do that."""
        return replace(self, verb=verb)

    def check_verb(self) -> None:
        """Refuse what a token is not for. Raises NotAuthorized."""
        if self.scope is not None and self.verb not in self.scope.verbs:
            raise NotAuthorized(f"the token is for {', '.join(self.scope.verbs)}, and this call is to {self.verb}")

    def check_unscoped(self, what: str) -> None:
        """Refuse what no token for one sandbox can do. Raises NotAuthorized."""
        if self.scope is not None:
            raise NotAuthorized(f"a token for one sandbox is not enough to {what}")

    def to_detail(self) -> dict[str, Any]:
        """Return what the audit log tells of the caller."""
        if self.scope is None:
            return {"by": self.name}
        return {"by": self.name, "token": self.scope.id, "token_name": self.scope.name}


class NotebookSandbox(ManagedSandbox):
    """That of a notebook's kernel, whose use Jupyter is to know of.

    Parameters
    ----------
    sandbox_id, owner : str
    on_use : callable or None
        Called with it whenever it is used, from any thread.
    """

    def __init__(self, sandbox_id: str, owner: str, on_use: OnUse | None) -> None:
        super().__init__(sandbox_id, owner, SandboxRequest(), kind="notebook")
        self._on_use = on_use

    def touch(self) -> None:
        """It is in use at this moment."""
        super().touch()
        if self._on_use is not None:
            self._on_use(self)


#: Seconds that a call waits for a sandbox that is starting, and after which it is worth another try.
START_TIMEOUT, RETRY_AFTER = 60.0, 5


class SandboxRegistry:
    """Which sandboxes there are, and who may find and use them. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Ceilings and defaults.
    wake : coroutine function
        Starts a parked sandbox again, on the link's thread.

    Attributes
    ----------
    sandboxes : dict
        Those of agents and programs, by owner and id. Only on the link's thread.
    on_use : callable or None
        Called with a notebook's sandbox whenever a call on it begins or ends, from any thread.
    server_owner : str
        Whose the notebooks' sandboxes are.
    """

    def __init__(self, policy: Policy, wake: Wake) -> None:
        self.policy = policy
        self.sandboxes: dict[tuple[str, str], ManagedSandbox] = {}
        self.on_use: OnUse | None = None
        self.server_owner = user_name()
        self.refusals = Refusals(self.audit)
        self._wake = wake
        self._notebooks: dict[str, ManagedSandbox] = {}

    async def started(self, managed: ManagedSandbox, *, is_own: bool = False) -> ManagedSandbox:
        """Wait for its start, and wake it if it is parked. Only on the link's thread. Raises what keeps it from waking.

        Parameters
        ----------
        managed : ManagedSandbox
        is_own : bool
            The caller asked for the start: raise what kept it from starting.

        Raises
        ------
        Conflict
            It is still starting after START_TIMEOUT.
        NotFound
            It did not start. Why is for those who asked for its start alone.
        """
        if managed.parked is not None and managed.starting is None and managed.end is None:
            managed.starting = LinkThread.instance().spawn(self._wake(managed))
        if (starting := managed.starting) is not None:
            is_own = is_own or managed.parked is not None
            done, _ = await asyncio.wait([starting], timeout=None if is_own else START_TIMEOUT)
            if not done:
                error = Conflict(f"sandbox {managed.id!r} is still starting; try again in {RETRY_AFTER} s")
                error.retry_after = RETRY_AFTER
                raise error
            if is_own and not starting.cancelled():
                starting.result()
            elif starting.cancelled() or starting.exception() is not None:
                raise NotFound(f"there is no sandbox {managed.id!r}: it did not start")
        return managed

    @on_link_thread
    async def get(self, sandbox_id: str, *, caller: Caller) -> SandboxInfo:
        """Describe one. Raises NotFound."""
        return self.find(sandbox_id, caller).info()

    @on_link_thread
    async def list(self, filters: SandboxFilters | None = None, *, caller: Caller) -> Infos:
        """Describe all that the caller may see and that fit, oldest first."""
        infos = [managed.info() for managed in self.visible(caller)]
        fitting = infos if filters is None else [info for info in infos if _fits(info, filters)]
        return sorted(fitting, key=lambda info: info.created)

    def visible(self, caller: Caller) -> Found:
        """Return those that the caller may see. Only on the link's thread. Raises NotAuthorized."""
        caller.check_verb()
        return [managed for managed in self._all() if _is_visible(managed, caller)]

    def busy(self) -> Ids:
        """Ids of those that calls are on. From any thread."""
        return [managed.id for managed in list(self.sandboxes.values()) if managed.uses]

    def alive(self) -> int:
        """How many live in this process, notebooks' included, about. From any thread."""
        managers = SandboxManager.all_shared(self.policy.state_path)
        return sum(sandbox.end is None for manager in managers for sandbox in list(manager.sandboxes.values()))

    @on_link_thread
    async def count(self) -> int:
        """How many live in this process, notebooks' included."""
        return sum(managed.state != "ended" for managed in self._all())

    def _all(self) -> Found:
        return [*self.sandboxes.values(), *self._find_notebooks().values()]

    def notebooks(self) -> Found:
        """Return those of this process's kernels. On the link's thread."""
        return list(self._find_notebooks().values())

    def move(self, old_id: str, sandbox: Sandbox) -> ManagedSandbox | None:
        """Note that a notebook's kernel goes on in another sandbox, and return what it is here, if anybody knows it.

        Only on the link's thread.
        """
        managed = self._notebooks.pop(old_id, None)
        if managed is not None:
            managed.move_to(sandbox)
            self._notebooks[sandbox.id] = managed
        return managed

    def _find_notebooks(self) -> dict[str, ManagedSandbox]:
        """Return the sandboxes of this process's kernels, by their ids; of a parked one by that of the last."""
        own = {managed.sandbox.id for managed in self.sandboxes.values() if managed.sandbox is not None}
        found = {}
        for manager in SandboxManager.all_shared(self.policy.state_path):
            for sandbox in manager.sandboxes.values():
                if not sandbox.spec.kernel_id or sandbox.id in own or sandbox.end is not None:
                    continue
                managed = self._notebooks.get(sandbox.id)
                if managed is None:
                    managed = NotebookSandbox(sandbox.id, self.server_owner, self.on_use)
                    managed.created = sandbox.record.created
                    managed.recall(sandbox.record.asks)
                    managed.blocked_commands = tuple(self.policy.blocked_commands)
                    managed.attach(sandbox)
                found[sandbox.id] = managed
        for slot in SandboxedKernel.all():
            parked = slot.parked
            if parked is not None and slot.manager.state_dir == self.policy.state_path:
                managed = self._notebooks.get(parked.sandbox_id)
                if managed is None:
                    managed = NotebookSandbox(parked.sandbox_id, self.server_owner, self.on_use)
                    managed.blocked_commands = tuple(self.policy.blocked_commands)
                    managed.recall(parked.asks)
                if managed.parked is None:
                    managed.mark_parked(parked)
                found[parked.sandbox_id] = managed
        for kept in SandboxedKernel.kept.values():
            sandbox = kept.sandbox
            if kept.manager.state_dir == self.policy.state_path:
                managed = self._notebooks.get(sandbox.id)
                if managed is None:
                    managed = NotebookSandbox(sandbox.id, self.server_owner, self.on_use)
                    managed.created = sandbox.record.created
                    managed.attach(sandbox)
                managed.ended_at = sandbox.kept_since
                managed.keep_ended_for = kept.until - managed.ended_at
                found[sandbox.id] = managed
        for sandbox_id in self._notebooks.keys() - found.keys():
            self._notebooks[sandbox_id].close()
        self._notebooks = found
        return found

    def find(self, sandbox_id: str, caller: Caller) -> ManagedSandbox:
        """Find what the caller calls so: its own first, then what else it may see. Raises NotFound, NotAuthorized."""
        caller.check_verb()
        managed = self.sandboxes.get((caller.name, sandbox_id))
        if managed is not None and _is_visible(managed, caller):
            return managed
        for other in self._all():
            sandbox, spec = other.sandbox, other.spec
            is_named = sandbox_id in (
                other.id, sandbox.id if sandbox is not None else None, (spec.kernel_id or None) if spec else None
            )  # fmt: skip
            is_named = is_named or (caller.scope is not None and sandbox_id == caller.scope.sandbox)
            if is_named and _is_visible(other, caller):
                return other
        raise NotFound(f"there is no sandbox {sandbox_id[:64]!r}")

    def end_duplicates(self, manager: SandboxManager) -> None:
        """End what was cut off as another took its place, or as it was parked: there is never more than one of each."""
        for record in manager.orphans():
            with contextlib.suppress(NotFound):
                twin = ManagedSandbox.load(manager.state_dir / "sandboxes" / record.id)
                known = self.sandboxes.get(twin.key)
                if known is not None and known.created == twin.created:
                    manager.end_duplicate(record, known.sandbox.id if known.sandbox is not None else known.parked)

    # -- use -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, sandbox_id: str, tool: str | None = None, *, caller: Caller) -> AsyncIterator[ManagedSandbox]:
        """Have a running sandbox at hand for one call, which counts as use from begin to end.

        Raises
        ------
        NotFound
            There is none, or it is another owner's.
        PolicyRefused
            The sandbox does not have that tool.
        SandboxEnded
            It was there; the error says why it ended.
        """
        managed = await self._begin(sandbox_id, tool, caller)
        began, mark = time.monotonic(), object()
        if tool is not None:
            token = caller.scope.name if caller.scope is not None else None
            managed.calls[mark] = CallInfo(tool, caller.name, token, time.time())
        reason: str | None = "cancelled"
        is_allowed = True
        try:
            yield managed
            reason = None
        except AgentboxError as error:
            reason = type(error).__name__
            is_allowed = not isinstance(error, (PolicyRefused, NotAuthorized))
            if isinstance(error, SandboxEnded):
                error.advise(managed.remedy())
            error.is_logged = tool is not None
            raise
        finally:
            managed.calls.pop(mark, None)
            LinkThread.instance().loop.call_soon_threadsafe(managed.done)
            self._note(managed, tool, caller, is_allowed, time.monotonic() - began, reason)

    @on_link_thread
    async def look(self, sandbox_id: str, tool: str | None = None, *, caller: Caller) -> ManagedSandbox:
        """Return a running sandbox for a look that does not count as use. Raises what :meth:`use` does."""
        managed = await self.started(self.find(sandbox_id, caller))
        managed.running()
        managed.check_tool(tool)
        return managed

    @on_link_thread
    async def _begin(self, sandbox_id: str, tool: str | None, caller: Caller) -> ManagedSandbox:
        managed = await self.started(self.find(sandbox_id, caller))
        managed.running()
        try:
            managed.check_tool(tool)
        except PolicyRefused as refused:
            self._note(managed, tool, caller, False, 0.0, str(refused))
            refused.is_logged = tool is not None
            raise
        managed.begin()
        return managed

    def _note(
        self,
        managed: ManagedSandbox,
        tool: str | None,
        caller: Caller,
        is_allowed: bool,
        duration: float,
        reason: str | None,
    ) -> None:
        if tool is None or managed.sandbox is None:
            return
        self.audit().note(
            "call",
            managed.sandbox.id,
            is_allowed=is_allowed,
            reason=reason,
            duration=duration,
            detail={"tool": tool, **caller.to_detail()},
        )

    def audit(self) -> AuditLog:
        """The log of this process's sandboxes."""
        return SandboxManager.shared(self.policy.state_path, self.policy.runtime, config=self.policy.config).audit


def _is_visible(managed: ManagedSandbox, caller: Caller) -> bool:
    if caller.scope is not None:
        return caller.scope.sandbox in (managed.parked, *managed.previous_ids)
    if caller.is_admin or (managed.kind == "notebook" and caller.has_kernels):
        return True
    return managed.kind == "session" and managed.owner == caller.name


def _fits(info: SandboxInfo, filters: SandboxFilters) -> bool:
    exact: Mapping[str, str | None] = {
        "state": filters.state,
        "profile": filters.profile,
        "tenant": filters.tenant,
        "owner": filters.owner,
    }
    if any(wanted is not None and getattr(info, name) != wanted for name, wanted in exact.items()):
        return False
    if filters.kernel_id is not None and filters.kernel_id not in [kernel.id for kernel in info.kernels]:
        return False
    for label in filters.label:
        name, has_value, value = label.partition("=")
        if name not in info.labels or (has_value and info.labels[name] != value):
            return False
    return True
