"""Sandboxes for agents and programs: ids, owners, rules, time to live. One for each process, above the manager.

REST, MCP and the command line are thin over :class:`Sessions`; what one of them makes is there for all. The sandboxes
of this server's notebooks are found here too, under their sandbox ids.

Nobody learns of another owner's sandbox by any call: it is not found, as one that never was. Ids are each owner's
own, so not even a clash tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from .audit import AuditLog
from .errors import (
    AgentboxError,
    Conflict,
    LimitReached,
    NotFound,
    PolicyRefused,
    RuntimeFailed,
)
from .link import LinkThread
from .manager import SandboxManager
from .models import AskInfo, GrantInfo, InstallRequest, SandboxFilters, SandboxInfo, SandboxPatch, SandboxRequest
from .packages import check_names, install_all
from .policy import Policy
from .sandbox import Sandbox
from .session import SESSION_FILE, Session, check_request
from .spec import Cause, End, SandboxSpec
from .tenants import Tenant

log = logging.getLogger(__name__)

#: Ended sessions that are remembered with their cause.
MAX_ENDED = 200
#: Seconds between two looks for sandboxes whose time is over.
CULL_INTERVAL = 2.0

# A method below is called `list`.
Infos = list[SandboxInfo]
Asks = list[AskInfo]
Found = list[Session]
Ids = list[str]


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
    """

    name: str
    has_kernels: bool = False
    is_admin: bool = False


class Sessions:
    """All sessions of this process. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Ceilings and defaults.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.server_owner = getpass.getuser()
        self._thread = LinkThread.instance()
        self._sessions: dict[tuple[str, str], Session] = {}
        self._notebooks: dict[str, Session] = {}
        self._tenants: dict[Path, Tenant] = {}
        self._culler: asyncio.Task[None] | None = None

    # -- life ----------------------------------------------------------------------------------

    async def create(self, request: SandboxRequest, *, caller: Caller) -> tuple[SandboxInfo, bool]:
        """Start a sandbox, or return the one of the same id that was asked for in the same words.

        Returns
        -------
        SandboxInfo, bool
            And whether it is new.

        Raises
        ------
        InvalidRequest, PolicyRefused, LimitReached
            It may not be.
        Conflict
            There is one of that id that was asked for otherwise.
        RuntimeUnavailable, RuntimeFailed
            It did not start. Nothing is left of it.
        """
        return await self._thread.run(self._create(request, caller))

    async def _create(self, request: SandboxRequest, caller: Caller) -> tuple[SandboxInfo, bool]:
        check_request(request)
        check_names(request.packages)
        known = self._sessions.get((caller.name, request.id)) if request.id is not None else None
        if known is not None and known.state != "ended":
            if known.request != request:
                raise Conflict(
                    f"sandbox {request.id!r} exists, and was asked for otherwise; delete it, or choose another id",
                    field="id",
                )
            await self._started(known)
            return known.info(), False
        self._check_counts(caller)
        policy = self.policy
        session = Session(
            request.id or os.urandom(8).hex(),
            caller.name,
            request,
            idle_timeout=_within(request.idle_timeout, policy.idle_timeout, policy.max_idle_timeout, "idle_timeout"),
            max_life=_within(request.max_life, policy.max_life, policy.max_life, "max_life"),
        )
        self._sessions[session.key] = session
        self._culler = self._culler or self._thread.spawn(self._cull_for_ever())
        starting = session.starting = self._thread.spawn(self._start(session))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Whoever asked is gone. Without a name of its own, nobody could ever find it.
            if request.id is None:
                starting.cancel()
            raise
        return session.info(), True

    def _check_counts(self, caller: Caller) -> None:
        alive = [session for session in self._sessions.values() if session.state != "ended"]
        own = sum(session.owner == caller.name for session in alive)
        if own >= self.policy.max_sandboxes_per_owner:
            raise LimitReached(
                f"{caller.name} has {own} sandboxes, and may have no more at a time",
                setting="Policy.max_sandboxes_per_owner",
            )
        if len(alive) + len(self._find_notebooks()) >= self.policy.max_sandboxes:
            raise LimitReached(
                f"this server has {self.policy.max_sandboxes} sandboxes, and may have no more at a time",
                setting="Policy.max_sandboxes",
            )

    async def _start(self, session: Session) -> None:
        sandbox: Sandbox | None = None
        try:
            spec = await asyncio.to_thread(self._resolve, session)
            manager = SandboxManager.shared(self.policy.state_path, spec.runtime, config=self.policy.config)
            sandbox = await manager.create(spec)
            session.attach(sandbox)
            await asyncio.to_thread(session.save)
            await self._prepare(session)
            session.starting = None
            session.touch()
            self._thread.spawn(self._watch(session, sandbox))
        except BaseException:
            session.end = session.end or End(Cause.RUNTIME_FAILED, 1, "it did not start")
            self._sessions.pop(session.key, None)
            if sandbox is not None:
                await asyncio.shield(self._remove(sandbox))
            raise

    def _resolve(self, session: Session) -> SandboxSpec:
        """Decide about it. Blocks."""
        request = session.request
        limits = request.limits
        asked: dict[str, Any] = {
            "profile": request.profile,
            "allowed_hosts": request.allowed_hosts,
            "memory": limits.memory,
            "cpus": limits.cpus,
            "processes": limits.processes,
            "disk": limits.disk,
        }
        spec = self.policy.resolve(
            {key: value for key, value in asked.items() if value is not None},
            executable=sys.executable,
            # Its author knows nothing of templates: a dollar is a dollar.
            kernelspec_env={name: value.replace("$", "$$") for name, value in request.env.items()},
            owner=session.owner,
        )
        session.blocked_commands = tuple(dict.fromkeys((*self.policy.blocked_commands, *request.blocked_commands)))
        session.quota = spec.limits.disk
        if request.tenant is None:
            return spec
        session.quota, session.quota_setting = self.policy.max_tenant_disk, "Policy.max_tenant_disk"
        tenant = Tenant.open(self.policy.state_path, session.owner, request.tenant)
        return replace(spec, workspace=tenant.workspace, hidden=(), mounts=(*spec.mounts, *tenant.mounts))

    async def _prepare(self, session: Session) -> None:
        """Put in what was asked for before its first user gets it."""
        request = session.request
        if request.files:
            await asyncio.to_thread(_write_files, session)
        if request.packages:
            done = await install_all(session, InstallRequest(packages=request.packages))
            if not done.is_ok:
                raise Conflict(f"the packages were not installed: {done.message}", field="packages")

    async def _started(self, session: Session) -> Session:
        """Wait for its start. Raises what kept it from starting."""
        if session.starting is not None:
            try:
                await asyncio.shield(session.starting)
            except asyncio.CancelledError:
                if session.end is None:
                    raise
                raise RuntimeFailed(f"sandbox {session.id!r} did not start: whoever asked for it has gone") from None
        return session

    async def _watch(self, session: Session, sandbox: Sandbox) -> None:
        """Wait for its end, keep the cause, and remove what is left."""
        end = await sandbox.wait_ended()
        session.end = end
        session.ended_at = time.time()
        session.close()
        await self._remove(sandbox)
        ended = sorted(
            (other for other in self._sessions.values() if other.state == "ended"), key=lambda other: other.ended_at
        )
        for other in ended[:-MAX_ENDED]:
            self._sessions.pop(other.key, None)

    async def _remove(self, sandbox: Sandbox, end: Cause | End = Cause.STOPPED) -> None:
        await self._manager_of(sandbox).stop(sandbox, end)

    def _manager_of(self, sandbox: Sandbox) -> SandboxManager:
        return SandboxManager.shared(self.policy.state_path, sandbox.spec.runtime, config=self.policy.config)

    async def delete(self, session_id: str, *, caller: Caller) -> None:
        """End a sandbox and forget it. Raises NotFound; Conflict for that of a notebook's kernel."""
        await self._thread.run(self._delete(session_id, caller))

    async def _delete(self, session_id: str, caller: Caller) -> None:
        session = self._find(session_id, caller)
        if session.kind == "notebook":
            raise Conflict(
                f"sandbox {session.id} belongs to a Jupyter kernel, and ends with it: shut the kernel down instead"
            )
        if session.starting is not None:
            session.end = End(Cause.STOPPED, 137, "it was deleted")
            session.starting.cancel()
        await self._end(session, End(Cause.STOPPED, 137, "it was deleted"))
        self._sessions.pop(session.key, None)

    async def _end(self, session: Session, end: End) -> None:
        if session.sandbox is not None:
            await self._remove(session.sandbox, end)
        session.end = session.end or end
        session.ended_at = session.ended_at or time.time()
        session.close()

    async def _cull_for_ever(self) -> None:
        while True:
            await asyncio.sleep(CULL_INTERVAL)
            for session in list(self._sessions.values()):
                if session.state != "running" or (over := session.overdue()) is None:
                    continue
                seconds = getattr(session, over)
                if over == "idle_timeout":
                    end = End(Cause.IDLE, 137, f"it was not used for {seconds:g} s", "Policy.idle_timeout")
                else:
                    end = End(Cause.LIFE_OVER, 137, f"its life of {seconds:g} s is over", "Policy.max_life")
                self._thread.spawn(self._end(session, end))

    async def recover(self) -> Ids:
        """Take back the sessions of a server that ended, within their lease. Returns their ids."""
        return await self._thread.run(self._recover())

    async def _recover(self) -> Ids:
        found = []
        manager = SandboxManager.shared(self.policy.state_path, self.policy.runtime, config=self.policy.config)
        for listed in await asyncio.to_thread(manager.list):
            directory = self.policy.state_path / "sandboxes" / listed.id
            if listed.state != "orphaned" or not (directory / SESSION_FILE).exists():
                continue
            try:
                session = await asyncio.to_thread(Session.load, directory)
                if session.key in self._sessions:
                    continue
                sandbox = await manager.adopt(listed.id)
            except AgentboxError as error:
                log.warning("sandbox %s is not taken back: %s", listed.id, error)
                continue
            session.attach(sandbox)
            session.blocked_commands = tuple(
                dict.fromkeys((*self.policy.blocked_commands, *session.request.blocked_commands))
            )
            self._sessions[session.key] = session
            self._thread.spawn(self._watch(session, sandbox))
            found.append(session.id)
        if found and self._culler is None:
            self._culler = self._thread.spawn(self._cull_for_ever())
        return found

    async def aclose(self, *, is_ended: bool = True) -> None:
        """The server ends: end its sessions, or leave them to a successor."""
        await self._thread.run(self._close(is_ended))

    async def _close(self, is_ended: bool) -> None:
        if self._culler is not None:
            self._culler.cancel()
            self._culler = None
        sessions, self._sessions = dict(self._sessions), {}
        for session in sessions.values():
            if session.starting is not None:
                session.starting.cancel()
        if is_ended:
            end = End(Cause.STOPPED, 137, "the server ended")
            await asyncio.gather(*(self._end(session, end) for session in sessions.values()), return_exceptions=True)
        else:
            for session in sessions.values():
                session.close()
                if session.sandbox is not None and session.state == "running":
                    await self._manager_of(session.sandbox).leave(session.sandbox)

    # -- looking -------------------------------------------------------------------------------

    async def get(self, session_id: str, *, caller: Caller) -> SandboxInfo:
        """Describe one. Raises NotFound."""
        return await self._thread.run(self._get(session_id, caller))

    async def _get(self, session_id: str, caller: Caller) -> SandboxInfo:
        return self._find(session_id, caller).info()

    async def list(self, filters: SandboxFilters | None = None, *, caller: Caller) -> Infos:
        """Describe all that the caller may see and that fit, oldest first."""
        return await self._thread.run(self._list(filters or SandboxFilters(), caller))

    async def _list(self, filters: SandboxFilters, caller: Caller) -> Infos:
        infos = [session.info() for session in self._all() if self._is_visible(session, caller)]
        return sorted((info for info in infos if _fits(info, filters)), key=lambda info: info.created)

    def busy(self) -> Ids:
        """Ids of those that calls are on. From any thread."""
        return [session.id for session in list(self._sessions.values()) if session.uses]

    def alive(self) -> int:
        """How many live in this process, notebooks' included, about. From any thread."""
        managers = SandboxManager.all_shared(self.policy.state_path)
        return sum(sandbox.end is None for manager in managers for sandbox in list(manager.sandboxes.values()))

    async def count(self) -> int:
        """How many live in this process, notebooks' included."""
        return await self._thread.run(self._count())

    async def _count(self) -> int:
        return sum(session.state != "ended" for session in self._all())

    def _all(self) -> Found:
        return [*self._sessions.values(), *self._find_notebooks().values()]

    def _find_notebooks(self) -> dict[str, Session]:
        """Return the sandboxes of this process's kernels, by their ids."""
        own = {session.sandbox.id for session in self._sessions.values() if session.sandbox is not None}
        found = {}
        for manager in SandboxManager.all_shared(self.policy.state_path):
            for sandbox in manager.sandboxes.values():
                if not sandbox.spec.kernel_id or sandbox.id in own or sandbox.end is not None:
                    continue
                session = self._notebooks.get(sandbox.id)
                if session is None:
                    session = Session(sandbox.id, self.server_owner, SandboxRequest(), kind="notebook")
                    session.created = sandbox.record.created
                    session.blocked_commands = tuple(self.policy.blocked_commands)
                    session.attach(sandbox)
                found[sandbox.id] = session
        for sandbox_id in self._notebooks.keys() - found.keys():
            self._notebooks[sandbox_id].close()
        self._notebooks = found
        return found

    def _is_visible(self, session: Session, caller: Caller) -> bool:
        if caller.is_admin or (session.kind == "notebook" and caller.has_kernels):
            return True
        return session.kind == "session" and session.owner == caller.name

    def _find(self, session_id: str, caller: Caller) -> Session:
        """Find what the caller calls so: its own first, then what else it may see."""
        session = self._sessions.get((caller.name, session_id))
        if session is not None:
            return session
        for other in self._all():
            sandbox = other.sandbox
            is_named = other.id == session_id or (
                sandbox is not None and session_id in (sandbox.id, sandbox.spec.kernel_id)
            )
            if is_named and self._is_visible(other, caller):
                return other
        raise NotFound(f"there is no sandbox {session_id[:64]!r}")

    # -- use -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def use(self, session_id: str, tool: str | None = None, *, caller: Caller) -> AsyncIterator[Session]:
        """Have a running session at hand for one call, which counts as use from begin to end.

        Raises
        ------
        NotFound
            There is none, or it is another owner's.
        PolicyRefused
            The session does not have that tool.
        SandboxEnded
            It was there; the error says why it ended.
        """
        session = await self._thread.run(self._begin(session_id, tool, caller))
        began = time.monotonic()
        reason: str | None = "cancelled"
        try:
            yield session
            reason = None
        except AgentboxError as error:
            reason = type(error).__name__
            raise
        finally:
            self._thread.loop.call_soon_threadsafe(session.done)
            self._note(session, tool, caller, True, time.monotonic() - began, reason)

    async def look(self, session_id: str, tool: str | None = None, *, caller: Caller) -> Session:
        """Return a running session for a look that does not count as use. Raises what :meth:`use` does."""
        return await self._thread.run(self._look(session_id, tool, caller))

    async def _look(self, session_id: str, tool: str | None, caller: Caller) -> Session:
        session = self._find(session_id, caller)
        session.running()
        session.check_tool(tool)
        return session

    async def _begin(self, session_id: str, tool: str | None, caller: Caller) -> Session:
        session = await self._started(self._find(session_id, caller))
        session.running()
        try:
            session.check_tool(tool)
        except PolicyRefused as refused:
            self._note(session, tool, caller, False, 0.0, str(refused))
            raise
        session.begin()
        return session

    def _note(
        self, session: Session, tool: str | None, caller: Caller, is_allowed: bool, duration: float, reason: str | None
    ) -> None:
        if tool is None or session.sandbox is None:
            return
        with contextlib.suppress(RuntimeError):  # the log is closed already
            self.audit().submit(
                "call",
                session.sandbox.id,
                is_allowed=is_allowed,
                reason=reason,
                duration=duration,
                detail={"tool": tool, "by": caller.name},
            )

    def audit(self) -> AuditLog:
        """The log of this process's sandboxes."""
        return SandboxManager.shared(self.policy.state_path, self.policy.runtime, config=self.policy.config).audit

    # -- changes -------------------------------------------------------------------------------

    async def patch(self, session_id: str, patch: SandboxPatch, *, caller: Caller) -> SandboxInfo:
        """Change a living sandbox: all that is asked for, or nothing.

        Raises
        ------
        InvalidRequest, PolicyRefused
            A value is malformed or more than the profile has.
        NotFound, SandboxEnded
        Conflict
            It is a notebook's, of which only the hosts can be changed.
        """
        return await self._thread.run(self._patch(session_id, patch, caller))

    async def _patch(self, session_id: str, patch: SandboxPatch, caller: Caller) -> SandboxInfo:
        session = await self._started(self._find(session_id, caller))
        session.running()
        others = (patch.idle_timeout, patch.max_life, patch.labels)
        if session.kind == "notebook" and any(value is not UNSET for value in others):
            raise Conflict("Jupyter looks after the life of a notebook's sandbox; only allowed_hosts can be changed")
        policy = self.policy
        idle, life = session.idle_timeout, session.max_life
        if patch.idle_timeout is not UNSET:
            idle = _within(patch.idle_timeout, policy.idle_timeout, policy.max_idle_timeout, "idle_timeout")
        if patch.max_life is not UNSET:
            life = _within(patch.max_life, policy.max_life, policy.max_life, "max_life")
        if patch.allowed_hosts is not UNSET:
            await self._set_hosts(session, patch.allowed_hosts, caller)
        session.idle_timeout, session.max_life = idle, life
        if patch.labels is not UNSET:
            session.labels = dict(patch.labels)
        if session.kind == "session":
            await asyncio.to_thread(session.save)
        session.touch()
        return session.info()

    async def _set_hosts(self, session: Session, hosts: Sequence[str], caller: Caller) -> None:
        sandbox = session.running()
        grant = await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, hosts)
        await self.audit().arecord(
            "grant", sandbox.id, is_allowed=True, detail={"hosts": list(hosts)[:100], "by": caller.name}
        )
        session.running().gate.grant = grant
        # An owner to come goes by the record.
        session.spec = sandbox.record.spec = replace(sandbox.spec, grant=grant)
        await asyncio.to_thread(sandbox.record.save, sandbox.directory)

    # -- hosts ---------------------------------------------------------------------------------

    async def grant(self, session_id: str, *, caller: Caller) -> GrantInfo:
        """Tell what a sandbox may reach, and what it may be given."""
        return await self._thread.run(self._grant(session_id, caller))

    async def _grant(self, session_id: str, caller: Caller) -> GrantInfo:
        session = await self._started(self._find(session_id, caller))
        sandbox = session.running()
        grant = sandbox.gate.grant
        ceiling = self.policy.profile(sandbox.spec.profile).hosts
        return GrantInfo(list(grant.hosts), list(grant.private_hosts), list(ceiling), grant.setting)

    async def ask(self, session_id: str, host: str, why: str, *, caller: Caller) -> AskInfo:
        """Ask for a host: it is pending until a person decides, or allowed already.

        Raises
        ------
        PolicyRefused
            No person may allow it: the profile does not cover it.
        """
        return await self._thread.run(self._ask(session_id, host, why, caller))

    async def _ask(self, session_id: str, host: str, why: str, caller: Caller) -> AskInfo:
        session = self._find(session_id, caller)
        sandbox = session.running()
        session.check_tool("ask_host")
        await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, [host])
        session.running()
        if host in sandbox.gate.grant.hosts:
            now = time.time()
            return AskInfo("", session.id, host, why, "allowed", now, now, None, "it is allowed already")
        return session.ask(host, why)

    async def asks(self, session_id: str | None = None, *, caller: Caller, state: str | None = None) -> Asks:
        """List what was asked for, of one sandbox or of all that the caller may see."""
        return await self._thread.run(self._asks(session_id, caller, state))

    async def _asks(self, session_id: str | None, caller: Caller, state: str | None) -> Asks:
        sessions = [s for s in self._all() if self._is_visible(s, caller) and s.state != "ended"]
        if session_id is not None:
            sessions = [self._find(session_id, caller)]
        found = [item for session in sessions for item in session.asks.values() if state in (None, item.state)]
        return sorted(found, key=lambda item: item.asked)

    async def get_ask(self, session_id: str, ask_id: str, *, caller: Caller) -> AskInfo:
        """Tell what became of a question. Raises NotFound."""
        return await self._thread.run(self._get_ask(session_id, ask_id, caller))

    async def _get_ask(self, session_id: str, ask_id: str, caller: Caller) -> AskInfo:
        item = self._find(session_id, caller).asks.get(ask_id)
        if item is None:
            raise NotFound(f"nothing was asked under {ask_id[:64]!r}")
        return item

    async def decide(
        self, session_id: str, ask_id: str, *, is_allowed: bool, note: str = "", caller: Caller
    ) -> AskInfo:
        """Allow or deny a host that was asked for.

        Raises
        ------
        NotFound, Conflict, SandboxEnded
        PolicyRefused
            Policy has changed, and does not cover it any more.
        """
        return await self._thread.run(self._decide(session_id, ask_id, is_allowed, note, caller))

    async def _decide(self, session_id: str, ask_id: str, is_allowed: bool, note: str, caller: Caller) -> AskInfo:
        session = self._find(session_id, caller)
        sandbox = session.running()
        item = session.pending(ask_id)
        if is_allowed:
            await self._set_hosts(session, (*sandbox.gate.grant.hosts, item.host), caller)
            session.pending(ask_id)
        else:
            detail = {"denied": item.host, "by": caller.name}
            await self.audit().arecord("grant", sandbox.id, is_allowed=False, detail=detail)
        decided = AskInfo(
            id=item.id,
            sandbox=item.sandbox,
            host=item.host,
            why=item.why,
            state="allowed" if is_allowed else "denied",
            asked=item.asked,
            decided=time.time(),
            decided_by=caller.name,
            note=note,
        )
        session.asks[ask_id] = decided
        return decided


def _write_files(session: Session) -> None:
    folder = session.folder()
    for path, content in session.request.files.items():
        data = content.encode() if isinstance(content, str) else content.base64
        try:
            folder.write(path, data, parents=True)
        except AgentboxError as error:
            error.field = "files"
            raise


def _within(asked: float | None, default: float, ceiling: float, field: str) -> float:
    if asked is None:
        return min(default, ceiling)
    if asked > ceiling:
        setting = f"Policy.max_{field.removeprefix('max_')}"
        raise PolicyRefused(
            f"{field} of {asked:g} s is more than the {ceiling:g} s that are allowed (setting: {setting})",
            field=field,
            setting=setting,
        )
    return asked


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
