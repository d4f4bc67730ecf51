"""Find the sandboxes of this process, and decide who may use them.

No call reveals another owner's sandbox: the caller gets NotFound, as for an id that never existed. Ids are scoped to
their owner, so a duplicate id reveals nothing either. The sandboxes of this server's notebooks are found here too,
under their sandbox ids.
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

# Aliases, because a method below is named `list`.
Infos = list[SandboxInfo]
Found = list[ManagedSandbox]
Ids = list[str]
OnUse = Callable[[ManagedSandbox], None]
Wake = Callable[[ManagedSandbox], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Caller:
    """The identity and permissions of a caller.

    Parameters
    ----------
    name : str
        Owner of the sandboxes that the caller creates.
    has_kernels : bool
        Whether the caller may use this server's kernels, and so their sandboxes.
    is_admin : bool
        Whether the caller sees the sandboxes of all owners.
    scope : Scope or None
        Scope of a token for one sandbox. The caller sees only this sandbox and may use only the token's verbs.
    verb : str or None
        What this call does: ``read``, ``write`` or ``execute``. Required if the caller has a scope.
    """

    name: str
    has_kernels: bool = False
    is_admin: bool = False
    scope: Scope | None = None
    verb: Verb | None = None

    def acting(self, verb: Verb) -> Caller:
        """Return the same caller with another verb."""
        return replace(self, verb=verb)

    def check_verb(self) -> None:
        """Check that the token allows the verb. Raises NotAuthorized."""
        if self.scope is not None and self.verb not in self.scope.verbs:
            raise NotAuthorized(f"the token permits {', '.join(self.scope.verbs)}, but this call requires {self.verb}")

    def check_unscoped(self, what: str) -> None:
        """Refuse an operation that a token for one sandbox never allows. Raises NotAuthorized."""
        if self.scope is not None:
            raise NotAuthorized(f"a token for one sandbox cannot be used to {what}; use the server's token")

    def to_detail(self) -> dict[str, Any]:
        """Return the caller's entries for the audit log."""
        if self.scope is None:
            return {"by": self.name}
        return {"by": self.name, "token": self.scope.id, "token_name": self.scope.name}


class NotebookSandbox(ManagedSandbox):
    """The sandbox of a notebook's kernel, whose use is reported to Jupyter.

    Parameters
    ----------
    sandbox_id, owner : str
    on_use : callable or None
        Called with this object whenever the sandbox is used, from any thread.
    """

    def __init__(self, sandbox_id: str, owner: str, on_use: OnUse | None) -> None:
        super().__init__(sandbox_id, owner, SandboxRequest(), kind="notebook")
        self._on_use = on_use

    def touch(self) -> None:
        """Set the time of last use to now, and report the use."""
        super().touch()
        if self._on_use is not None:
            self._on_use(self)


#: Seconds that a call waits for a sandbox that is starting, and seconds after which the caller should retry.
START_TIMEOUT, RETRY_AFTER = 60.0, 5


class SandboxRegistry:
    """Registry of sandboxes and of who may use them. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Limits and defaults.
    wake : coroutine function
        Starts a parked sandbox, on the link thread.

    Attributes
    ----------
    sandboxes : dict
        Sandboxes of agents and programs, by owner and id. Only on the link thread.
    on_use : callable or None
        Called with a notebook's sandbox whenever a call on it begins or ends, from any thread.
    server_owner : str
        Owner of the notebooks' sandboxes.
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
        """Wait until a sandbox has started; wake it if it is parked. Only on the link thread.

        If waking fails, the error is raised.

        Parameters
        ----------
        managed : ManagedSandbox
        is_own : bool
            The caller requested the start: raise the error that prevented it.

        Raises
        ------
        Conflict
            It is still starting after START_TIMEOUT.
        NotFound
            It did not start. Only the caller that requested the start is told why.
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
                raise NotFound(f"sandbox {managed.id!r} does not exist: it did not start")
        return managed

    @on_link_thread
    async def get(self, sandbox_id: str, *, caller: Caller) -> SandboxInfo:
        """Return a description of one sandbox. Raises NotFound."""
        return self.find(sandbox_id, caller).info()

    @on_link_thread
    async def list(self, filters: SandboxFilters | None = None, *, caller: Caller) -> Infos:
        """Return descriptions of all sandboxes that the caller may see and that match the filters, oldest first."""
        infos = [managed.info() for managed in self.visible(caller)]
        matching = infos if filters is None else [info for info in infos if _matches(info, filters)]
        return sorted(matching, key=lambda info: info.created)

    def visible(self, caller: Caller) -> Found:
        """Return the sandboxes that the caller may see. Only on the link thread. Raises NotAuthorized."""
        caller.check_verb()
        return [managed for managed in self._all() if _is_visible(managed, caller)]

    def busy(self) -> Ids:
        """Return the ids of the sandboxes with calls in progress. May be called from any thread."""
        return [managed.id for managed in list(self.sandboxes.values()) if managed.uses]

    def alive(self) -> int:
        """Return the approximate number of running sandboxes, including notebooks'. May be called from any thread."""
        managers = SandboxManager.all_shared(self.policy.state_path)
        return sum(sandbox.end is None for manager in managers for sandbox in list(manager.sandboxes.values()))

    @on_link_thread
    async def count(self) -> int:
        """Return the number of sandboxes of this process that have not ended, including notebooks'."""
        return sum(managed.state != "ended" for managed in self._all())

    def _all(self) -> Found:
        return [*self.sandboxes.values(), *self._find_notebooks().values()]

    def notebooks(self) -> Found:
        """Return the sandboxes of this process's kernels. On the link thread."""
        return list(self._find_notebooks().values())

    def move(self, old_id: str, sandbox: Sandbox) -> ManagedSandbox | None:
        """Record that a notebook's kernel has moved to another sandbox; return its managed sandbox, or None if unknown.

        Only on the link thread.
        """
        managed = self._notebooks.pop(old_id, None)
        if managed is not None:
            managed.move_to(sandbox)
            self._notebooks[sandbox.id] = managed
        return managed

    def _find_notebooks(self) -> dict[str, ManagedSandbox]:
        """Return the sandboxes of this process's kernels by id; a parked kernel has the id of its last sandbox."""
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
        for kernel in SandboxedKernel.all():
            parked = kernel.parked
            if parked is not None and kernel.manager.state_dir == self.policy.state_path:
                managed = self._notebooks.get(parked.sandbox_id)
                if managed is None:
                    managed = NotebookSandbox(parked.sandbox_id, self.server_owner, self.on_use)
                    managed.blocked_commands = tuple(self.policy.blocked_commands)
                    managed.recall(parked.asks)
                if managed.parked is None:
                    managed.mark_parked(parked)
                found[parked.sandbox_id] = managed
        for ended_kernel in SandboxedKernel.retained.values():
            sandbox = ended_kernel.sandbox
            if ended_kernel.manager.state_dir == self.policy.state_path:
                managed = self._notebooks.get(sandbox.id)
                if managed is None:
                    managed = NotebookSandbox(sandbox.id, self.server_owner, self.on_use)
                    managed.created = sandbox.record.created
                    managed.attach(sandbox)
                managed.ended_at = sandbox.kept_since
                managed.keep_ended_for = ended_kernel.until - managed.ended_at
                found[sandbox.id] = managed
        for sandbox_id in self._notebooks.keys() - found.keys():
            self._notebooks[sandbox_id].close()
        self._notebooks = found
        return found

    def find(self, sandbox_id: str, caller: Caller) -> ManagedSandbox:
        """Return the sandbox with this id: the caller's own first, then any other that the caller may see.

        The id may be that of the managed sandbox, of the sandbox behind it, or of its kernel.

        Raises
        ------
        NotFound, NotAuthorized
        """
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
        raise NotFound(f"sandbox {sandbox_id[:64]!r} does not exist")

    def end_duplicates(self, manager: SandboxManager) -> None:
        """End duplicates left by an interrupted restore or park, so that each managed sandbox has one sandbox."""
        for record in manager.orphans():
            with contextlib.suppress(NotFound):
                duplicate = ManagedSandbox.load(manager.state_dir / "sandboxes" / record.id)
                known = self.sandboxes.get(duplicate.key)
                if known is not None and known.created == duplicate.created:
                    manager.end_duplicate(record, known.sandbox.id if known.sandbox is not None else known.parked)

    # -- use -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, sandbox_id: str, tool: str | None = None, *, caller: Caller) -> AsyncIterator[ManagedSandbox]:
        """Provide a running sandbox for one call. The call counts as use from begin to end.

        Raises
        ------
        NotFound
            No such sandbox exists, or it has another owner.
        PolicyRefused
            The tool is not in the sandbox's list of tools.
        SandboxEnded
            The sandbox has ended. The error says why.
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
    async def peek(self, sandbox_id: str, tool: str | None = None, *, caller: Caller) -> ManagedSandbox:
        """Return a running sandbox for a call that does not count as use. Raises the same errors as :meth:`use`."""
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
        """Return the audit log of this process's sandboxes."""
        return SandboxManager.shared(self.policy.state_path, self.policy.runtime, config=self.policy.config).audit


def _is_visible(managed: ManagedSandbox, caller: Caller) -> bool:
    if caller.scope is not None:
        return caller.scope.sandbox in (managed.parked, *managed.previous_ids)
    if caller.is_admin or (managed.kind == "notebook" and caller.has_kernels):
        return True
    return managed.kind == "session" and managed.owner == caller.name


def _matches(info: SandboxInfo, filters: SandboxFilters) -> bool:
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
