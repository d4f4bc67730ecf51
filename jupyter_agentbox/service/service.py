"""Sandboxes for agents and programs: ids, owners, rules, time to live. One for each process, above the manager.

REST, MCP and the command line are thin over :class:`SandboxService`; what one of them makes is there for all.
``service.registry`` knows who may see what, ``service.grants`` what may be reached,
``service.quotas`` how many there may be.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from jupyter_agentbox.errors import AgentboxError, Conflict, InvalidRequest, NotFound, PolicyRefused
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.kernels.warm.starts import WarmStarts
from jupyter_agentbox.models import InstallRequest, SandboxInfo, SandboxPatch, SandboxRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.renewal import reapply_policy
from jupyter_agentbox.sandbox.link.link import finished
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.sandbox.sweep import SESSION_FILE
from jupyter_agentbox.sandbox.tokens import TokenStore
from jupyter_agentbox.spec import Cause, End, SandboxSpec, format_size

from .expired import END
from .expired import tell as tell_lapsed
from .managed_sandbox import ManagedSandbox, check_request
from .packages import check_names, install_all
from .quotas import Quotas
from .registry import Caller
from .tenants import Tenant

log = logging.getLogger(__name__)

#: Ended sessions that are remembered with their cause.
MAX_ENDED = 200
#: Seconds between two looks for sandboxes whose time is over.
CULL_INTERVAL = 2.0
#: Seconds between two looks at what tenants keep.
TENANT_INTERVAL = 5.0

# A method of the registry is called `list`.
Ids = list[str]
Found = list[ManagedSandbox]
Start = Callable[[], Awaitable[Sandbox]]
Tell = Callable[[str], object]


def _nobody(text: str) -> None:
    """Hear what nobody wants to know."""


class Parking(Protocol):
    """What parks sessions; all on the link's thread."""

    async def park(self, session: ManagedSandbox) -> None:
        """Save it to the disk and free what it uses. Raises Conflict while it is in use."""

    async def wake(self, session: ManagedSandbox) -> None:
        """Start it again where it was, with its own ids."""

    async def forget(self, session: ManagedSandbox) -> None:
        """Remove what was saved."""

    async def recover(self) -> Found:
        """Make the sessions again that an earlier server has parked."""


class SandboxService(Quotas):
    """All sessions of this process. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Ceilings and defaults.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._keepers: list[asyncio.Task[None]] = []
        self.parking: Parking | None = None
        #: Starts a kernel of that id and kernelspec, on the server's own event loop.
        self.start_kernel: Callable[[str, str], Awaitable[None]] | None = None

    # -- life ----------------------------------------------------------------------------------

    async def create(
        self, request: SandboxRequest, *, caller: Caller, tell: Tell = _nobody
    ) -> tuple[SandboxInfo, bool]:
        """Start a sandbox, or return the one of the same id that was asked for in the same words.

        What installing its packages prints goes to `tell`, on the link's thread.

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
        return await self._thread.run(self._create(request, caller, tell))

    async def _create(self, request: SandboxRequest, caller: Caller, tell: Tell) -> tuple[SandboxInfo, bool]:
        caller.check_unscoped("make sandboxes")
        check_request(request)
        check_names(request.packages)
        known = self._sessions.get((caller.name, request.id)) if request.id is not None else None
        if known is not None and (known.state != "ended" or known.kept_until):
            if not await asyncio.to_thread(known.is_asked_for_by, request):
                what = "has ended with its files kept" if known.kept_until else "exists"
                raise Conflict(
                    f"sandbox {request.id!r} {what}, and was asked for otherwise; delete it, or choose another id",
                    field="id",
                )
            await self._revive(known, caller)
            return known.info(), False
        self.check_count(caller.name)
        policy = self.policy
        session = ManagedSandbox(
            request.id or os.urandom(8).hex(),
            caller.name,
            request,
            idle_timeout=_within(request.idle_timeout, policy.idle_timeout, policy.max_idle_timeout, "idle_timeout"),
            max_life=_within(request.max_life, policy.max_life, policy.max_life, "max_life"),
        )
        self._sessions[session.key] = session
        self._start_keeping()
        starting = session.starting = self._thread.spawn(self._start(session, tell=tell))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # Whoever asked is gone. Without a name of its own, nobody could ever find it.
            if request.id is None:
                starting.cancel()
            raise
        return session.info(), True

    async def add(self, session: ManagedSandbox, start: Start, *, caller: Caller) -> SandboxInfo:
        """Take up a session whose sandbox `start` makes, a coroutine function: a copy of another.

        Raises
        ------
        Conflict
            There is one of its id.
        LimitReached
        """
        return await self._thread.run(self._add(session, start, caller))

    async def _add(self, session: ManagedSandbox, start: Start, caller: Caller) -> SandboxInfo:
        known = self._sessions.get(session.key)
        if known is not None and (known.state != "ended" or known.kept_until):
            raise Conflict(f"sandbox {session.id!r} exists; delete it, or choose another id", field="id")
        self.check_count(caller.name)
        policy, request = self.policy, session.request
        session.idle_timeout = _within(
            request.idle_timeout, policy.idle_timeout, policy.max_idle_timeout, "idle_timeout"
        )
        session.max_life = _within(request.max_life, policy.max_life, policy.max_life, "max_life")
        self._sessions[session.key] = session
        self._start_keeping()
        session.starting = self._thread.spawn(self._start(session, start))
        await asyncio.shield(session.starting)
        return session.info()

    async def swap(self, session: ManagedSandbox, sandbox: Sandbox) -> None:
        """Put another sandbox in the place of a session's own, which ends."""
        await self._thread.run(self._swap(session, sandbox))

    async def _swap(self, session: ManagedSandbox, sandbox: Sandbox) -> None:
        old = session.sandbox
        if old is not None:
            self.inherit_grant(sandbox, old)
        session.close()
        session.attach(sandbox)
        await asyncio.to_thread(sandbox.record.save, sandbox.directory)
        await asyncio.to_thread(session.save)
        self._thread.spawn(self._watch(session, sandbox))
        if old is not None:
            await asyncio.to_thread(TokenStore(self.policy.state_path).carry, old.id, sandbox.id)
            await self._remove(old)

    async def _start(self, session: ManagedSandbox, start: Start | None = None, tell: Tell = _nobody) -> None:
        sandbox: Sandbox | None = None
        session.keep_ended_for = self.policy.keep_ended_for
        try:
            if start is not None:
                sandbox = await start()
                self._restrict(session)
            else:
                spec = await asyncio.to_thread(self._resolve, session)
                manager = SandboxManager.shared(self.policy.state_path, spec.runtime, config=self.policy.config)
                async with manager.starting:
                    sandbox = await self._make(session, manager, spec)
            session.attach(sandbox)
            await self._prepare(session, tell)
            await asyncio.to_thread(session.save)  # now a later server may take it for what was asked for
            session.starting = None
            session.touch()
            self._thread.spawn(self._watch(session, sandbox))
        except BaseException:
            session.end = session.end or End(Cause.RUNTIME_FAILED, 1, "it did not start")
            self._sessions.pop(session.key, None)
            if sandbox is not None:
                await asyncio.shield(self._remove(sandbox))
            raise

    async def _make(self, session: ManagedSandbox, manager: SandboxManager, spec: SandboxSpec) -> Sandbox:
        if session.request.packages:  # which are to be there when its kernels start
            return await manager.create(spec)
        warm, has_code = WarmStarts.shared(manager, self.policy), "run_code" in session.tools
        return await warm.create(spec, has_code=has_code, is_usual=not session.request.env)

    def _resolve(self, session: ManagedSandbox) -> SandboxSpec:
        """Decide about it. Blocks."""
        request = session.request
        if len(request.ports) > self.policy.max_ports:
            raise PolicyRefused(
                f"{len(request.ports)} ports are more than the {self.policy.max_ports} that are allowed",
                field="ports",
                setting="Policy.max_ports",
            )
        limits = request.limits
        asked: dict[str, Any] = {
            "profile": request.profile,
            "image": request.image,
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
        self._restrict(session)
        if request.tenant is None:
            return spec
        tenant = Tenant.open(self.policy.state_path, session.owner, request.tenant)
        return replace(spec, workspace=tenant.workspace, hidden=(), mounts=(*spec.mounts, *tenant.mounts))

    def _restrict(self, session: ManagedSandbox) -> None:
        """Hold a session to what policy has today, whatever it was made under."""
        policy, request = self.policy, session.request
        session.restrict(policy.blocked_commands)
        if len(request.ports) > policy.max_ports:
            session.request = msgspec.structs.replace(request, ports=request.ports[: policy.max_ports])
            log.warning("sandbox %s has %d ports left, by Policy.max_ports", session.id, policy.max_ports)
        if session.idle_timeout is not None:
            session.idle_timeout = min(session.idle_timeout, policy.max_idle_timeout)
        if session.max_life is not None:
            session.max_life = min(session.max_life, policy.max_life)
        if request.tenant is not None:
            session.quota, session.quota_setting = policy.max_tenant_disk, "Policy.max_tenant_disk"

    async def _prepare(self, session: ManagedSandbox, tell: Tell) -> None:
        """Put in what was asked for before its first user gets it."""
        request = session.request
        if request.files:
            await asyncio.to_thread(session.write_files)
        await self._install(session, tell)

    async def _install(self, session: ManagedSandbox, tell: Tell) -> None:
        packages = session.request.packages
        if packages:
            done = await install_all(session, InstallRequest(packages=packages), tell)
            if not done.is_ok:
                raise Conflict(f"the packages were not installed: {done.message}", field="packages")

    async def _watch(self, session: ManagedSandbox, sandbox: Sandbox) -> None:
        """Wait for its end, keep the cause, and the files if nobody meant it to end. Remove what else is left."""
        end = await sandbox.wait_ended()
        if session.sandbox is not sandbox:
            return  # another has taken its place
        session.end = session.end or end
        session.ended_at = time.time()
        session.close()
        if session.kept_until is not None:
            await self._keep_files(session, sandbox)
        else:
            await self._remove(sandbox)
        ended = [other for other in self._sessions.values() if other.state == "ended" and other.kept_until is None]
        for other in sorted(ended, key=lambda other: other.ended_at)[:-MAX_ENDED]:
            self._sessions.pop(other.key, None)

    async def _keep_files(self, session: ManagedSandbox, sandbox: Sandbox) -> None:
        try:
            await self._manager_of(sandbox).keep(sandbox)
            await asyncio.to_thread(session.save, sandbox.directory)
        except (AgentboxError, OSError) as error:  # as on a full disk; a later server would not know why it ended
            log.warning("sandbox %s has ended, and what its files need to be kept is incomplete: %s", session.id, error)

    async def revive(self, session_id: str, *, caller: Caller) -> SandboxInfo:
        """Start a sandbox again that ended by a fault, with its files; does nothing to one that lives.

        It has the terms of the one that ended, as far as policy allows them now. Its tokens stay good.

        Raises
        ------
        NotFound
        SandboxEnded
            Its files were not kept.
        Conflict
            It is that of a kernel which Jupyter starts again.
        LimitReached, PolicyRefused, RuntimeUnavailable, RuntimeFailed
            It did not start. Its files are still kept.
        """
        spec = await self._thread.run(self._revive_by_id(session_id, caller))
        if spec is None:
            return await self.get(session_id, caller=caller)
        assert self.start_kernel is not None
        async with self.room_for_kernel():
            await self.start_kernel(spec.kernel_id, spec.kernel_name)
        return await self.get(spec.kernel_id, caller=caller)

    async def _revive_by_id(self, session_id: str, caller: Caller) -> SandboxSpec | None:
        """Revive an agent's; return what a notebook's was, which the server is to start."""
        session = self._find(session_id, caller)
        if session.kind == "session":
            await self._revive(session, caller)
            return None
        if session.kept_until is None or self.start_kernel is None or session.spec is None:
            raise Conflict(f"sandbox {session.id} belongs to a Jupyter kernel; restart the kernel instead")
        return session.spec

    async def _revive(self, session: ManagedSandbox, caller: Caller) -> None:
        if session.starting is None and session.state == "ended":
            if session.kept_until is None:
                session.running()  # says why not
            self.check_count(session.owner, but=session)
            session.starting = self._thread.spawn(self._start_again(session, caller))
        await self._started(session, is_own=True)

    async def _start_again(self, session: ManagedSandbox, caller: Caller) -> None:
        old, end = session.sandbox, session.end
        assert old is not None
        made: Sandbox | None = None
        session.sandbox = session.end = None
        try:
            await self._manager_of(old).keep(old)  # if it has only just ended
            then = replace(old.spec, grant=old.gate.grant, layout="plain", warm=None)
            is_tenants = session.request.tenant is not None
            spec = await asyncio.to_thread(
                reapply_policy, self.policy, then, owner=session.owner, is_tenants=is_tenants
            )
            manager = SandboxManager.shared(self.policy.state_path, spec.runtime, config=self.policy.config)
            async with manager.starting:
                made = await manager.create(spec, inherit=old)
            session.attach(made)
            self._restrict(session)
            await self._install(session, _nobody)
            session.keep_ended_for = self.policy.keep_ended_for
            await asyncio.to_thread(session.save)
            detail = {"event": "revived", "before": old.id, **caller.to_detail()}
            await self.audit().arecord("lifecycle", made.id, detail=detail)
        except BaseException:
            await asyncio.shield(self._give_back(session, made or old, end))
            raise
        finally:
            session.starting = None
        session.touch()
        self._thread.spawn(self._watch(session, made))

    async def _give_back(self, session: ManagedSandbox, sandbox: Sandbox, end: End | None) -> None:
        """Keep the files of one that was not revived, unless it was deleted meanwhile."""
        session.close()
        if session.end is not None:
            await self._remove(sandbox)
            return
        session.sandbox, session.end = sandbox, end
        await self._keep_files(session, sandbox)

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
            kept = SandboxedKernel.kept.get(session.spec.kernel_id) if session.spec is not None else None
            if kept is not None and kept.sandbox is session.sandbox:
                await kept.forget()
                return
            raise Conflict(
                f"sandbox {session.id} belongs to a Jupyter kernel, and ends with it: shut the kernel down instead"
            )
        if session.lost is not None:
            manager = SandboxManager.shared(self.policy.state_path, self.policy.runtime, config=self.policy.config)
            await asyncio.to_thread(manager.remove_lost, session.lost)
        if session.sandbox is not None:
            session.sandbox.end_lease()
        if session.starting is not None:
            session.end = End(Cause.STOPPED, 137, "it was deleted")
            session.starting.cancel()
        await self._end(session, End(Cause.STOPPED, 137, "it was deleted"))
        self._sessions.pop(session.key, None)

    async def _wake(self, session: ManagedSandbox) -> None:
        try:
            if self.parking is None:
                raise Conflict(f"sandbox {session.id!r} is parked, and this server wakes none")
            if session.kind == "session":
                self.check_count(session.owner, but=session)
            await self.parking.wake(session)
            if session.kind == "session" and session.sandbox is not None:
                self._thread.spawn(self._watch(session, session.sandbox))
        finally:
            session.starting = None

    async def park(self, session_id: str, *, caller: Caller) -> SandboxInfo:
        """Save a sandbox to the disk, and free what it uses. Raises Conflict while it is in use."""
        return await self._thread.run(self._park(session_id, caller))

    async def _park(self, session_id: str, caller: Caller) -> SandboxInfo:
        session = self._find(session_id, caller)
        if self.parking is None:
            raise Conflict("this server parks no sandboxes")
        if session.state != "parked":
            await finished(self.parking.park(session))
        return session.info()

    async def wake(self, session_id: str, *, caller: Caller) -> SandboxInfo:
        """Start a parked session again; any use does that too."""
        async with self.use(session_id, caller=caller) as session:
            return session.info()

    async def _end(self, session: ManagedSandbox, end: End) -> None:
        session.end = session.end or end  # whose files nobody keeps
        session.keep_ended_for = 0.0
        if session.parked is not None and self.parking is not None:
            await self.parking.forget(session)
        if session.sandbox is not None:
            await self._remove(session.sandbox, end)
        session.ended_at = session.ended_at or time.time()
        session.close()

    async def _watch_tenants(self) -> None:
        """End the sandboxes of a tenant that keeps too much: code inside writes past all that REST looks at."""
        limit = self.policy.max_tenant_disk
        tenants: dict[tuple[str, str], list[ManagedSandbox]] = {}
        for session in self._sessions.values():
            if session.state == "running" and session.request.tenant is not None:
                tenants.setdefault((session.owner, session.request.tenant), []).append(session)
        for (owner, name), sessions in tenants.items():
            tenant = await asyncio.to_thread(Tenant.open, self.policy.state_path, owner, name)
            used = await asyncio.to_thread(tenant.used)
            if used > limit:
                message = f"the tenant's disk is full (limit {format_size(limit)}, used {format_size(used)})"
                end = End(Cause.DISK_FULL, 137, message, "Policy.max_tenant_disk")
                await asyncio.gather(*(self._end(session, end) for session in sessions))

    def _start_keeping(self) -> None:
        if not self._keepers:
            work = ((CULL_INTERVAL, self._cull), (TENANT_INTERVAL, self._watch_tenants))
            self._keepers = [self._thread.spawn(self._thread.repeat(*each)) for each in work]

    async def _cull(self) -> None:
        for session in list(self._sessions.values()):
            if session.kept_until is not None and session.kept_until < time.time():
                self._thread.spawn(self._end(session, session.end or END))
            if session.state not in ("running", "parked") or session.starting or (over := session.overdue()) is None:
                continue
            if over == "idle_timeout" and session.request.idle_policy == "park" and self.parking is not None:
                if session.state == "running":
                    self._thread.spawn(self._park_idle(session))
                continue
            seconds = getattr(session, over)
            if over == "idle_timeout":
                end = End(Cause.IDLE, 137, f"it was not used for {seconds:g} s", "Policy.idle_timeout")
            else:
                end = End(Cause.LIFE_OVER, 137, f"its life of {seconds:g} s is over", "Policy.max_life")
            self._thread.spawn(self._end(session, end))

    async def _park_idle(self, session: ManagedSandbox) -> None:
        assert self.parking is not None
        try:
            await self.parking.park(session)
        except (AgentboxError, OSError) as error:
            # It is tried again when its time is over once more: better alive than lost.
            session.touch()
            log.warning("sandbox %s was not parked, and lives on: %s", session.id, error)

    async def recover(self) -> Ids:
        """Take back the sessions of a server that ended, within their lease. Returns their ids."""
        return await self._thread.run(self._recover())

    async def _recover(self) -> Ids:
        found = []
        manager = SandboxManager.shared(self.policy.state_path, self.policy.runtime, config=self.policy.config)
        for listed in await asyncio.to_thread(manager.list):
            directory = self.policy.state_path / "sandboxes" / listed.id
            if listed.state == "lost":
                self._add_lost(manager, listed.id, listed.reason)
                continue
            if listed.state != "orphaned" or not (directory / SESSION_FILE).exists():
                continue
            try:
                session = await asyncio.to_thread(ManagedSandbox.load, directory)
            except NotFound as error:
                self._add_lost(manager, listed.id, str(error), listed.owner)
                continue
            if session.key in self._sessions:
                continue
            try:
                its = SandboxManager.shared(self.policy.state_path, listed.runtime, config=self.policy.config)
                record = await asyncio.to_thread(Record.load, directory)
                try:
                    spec = await asyncio.to_thread(self._renew, session, record)
                    sandbox = await its.adopt(listed.id, spec)
                except (PolicyRefused, InvalidRequest) as error:
                    session.end, session.ended_at = await its.refuse(record, error), time.time()
                    self._sessions[session.key] = session
                    continue
            except (AgentboxError, OSError) as error:
                log.error("sandbox %s is not taken back: %s", listed.id, error)
                continue
            session.end = None  # that of one which it was revived from
            session.attach(sandbox)
            self._restrict(session)
            self._sessions[session.key] = session
            self._thread.spawn(self._watch(session, sandbox))
            found.append(session.id)
        if self.parking is not None:
            try:
                parked = await self.parking.recover()
            except (AgentboxError, OSError) as error:
                log.error("parked sandboxes are not taken back: %s", error)
                parked = []
            for session in reversed(parked):
                if (known := self._sessions.setdefault(session.key, session)) is session:
                    self._restrict(session)
                    found.append(session.id)
                else:
                    session.sandbox = known.sandbox  # whose its tokens are
                    await self.parking.forget(session)  # the process ended between two steps, and it lives
        await asyncio.to_thread(self._end_duplicates, manager)
        await self._recover_ended(manager)
        for session in await tell_lapsed(self.policy.state_path, manager.audit):
            self._sessions.setdefault(session.key, session)
        if self._sessions:
            self._start_keeping()
        return found

    async def _recover_ended(self, manager: SandboxManager) -> None:
        """Take back the files of those that have ended."""
        for listed in await asyncio.to_thread(manager.list):
            directory = self.policy.state_path / "sandboxes" / listed.id
            if listed.state != "ended" or not (directory / SESSION_FILE).exists():
                continue
            try:
                session = await asyncio.to_thread(ManagedSandbox.load, directory)
                its = SandboxManager.shared(self.policy.state_path, listed.runtime, config=self.policy.config)
                sandbox = await its.take_ended(listed.id)
                if sandbox is None:
                    continue
                session.keep_ended_for = min(session.keep_ended_for, self.policy.keep_ended_for)
                session.ended_at = sandbox.kept_since
                session.attach(sandbox)
                if session.key in self._sessions or session.kept_until is None:
                    await self._remove(sandbox)  # it was revived, or policy keeps none any more
                    continue
                if session.end is None:  # nobody has told of it
                    session.end = sandbox.end
                    assert sandbox.end is not None
                    await self.audit().arecord("lifecycle", sandbox.id, detail=sandbox.end.to_detail(""))
                self._sessions[session.key] = session
            except (AgentboxError, OSError) as error:
                log.warning("the files of sandbox %s are not taken back: %s", listed.id, error)

    def _add_lost(self, manager: SandboxManager, name: str, reason: str, owner: str = "") -> None:
        """List a sandbox whose record is damaged, until it is deleted."""
        directory = manager.place_of(name)
        log.error("sandbox %s is lost: %s. Its files are in %s until it is deleted", name, reason, directory / "work")
        try:
            session = ManagedSandbox.load(directory)
        except NotFound:
            session = ManagedSandbox(name, owner or self.server_owner, SandboxRequest())
        if session.key in self._sessions:
            session.id = name
        session.lost = name
        session.places.append(name)
        session.end = End(Cause.LOST, 1, f"it is lost, since {reason}. Its files are kept until you delete it")
        session.ended_at = session.created
        self._sessions[session.key] = session

    def _renew(self, session: ManagedSandbox, record: Record) -> SandboxSpec:
        is_tenants = session.request.tenant is not None
        return reapply_policy(self.policy, record.spec, owner=session.owner, is_tenants=is_tenants, is_running=True)

    async def aclose(self, *, is_ended: bool = True) -> None:
        """End the running sandboxes with the server, or leave them to a later one. Parked ones are left always."""
        await self._thread.run(self._close(is_ended))

    async def _close(self, is_ended: bool) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        self._keepers = []
        sessions, self._sessions = dict(self._sessions), {}
        for session in sessions.values():
            if session.starting is not None:
                session.starting.cancel()
        if is_ended:
            end = End(Cause.STOPPED, 137, "the server ended")
            await asyncio.gather(*(self._let_go(session, end) for session in sessions.values()), return_exceptions=True)
        else:
            for session in sessions.values():
                await self._let_go(session, None)

    async def _let_go(self, session: ManagedSandbox, end: End | None) -> None:
        """End its sandbox, or leave it to a later server where no end is given. Kept files are left always."""
        session.close()
        if session.sandbox is None:
            return
        if session.kept_until is not None or (end is None and session.state == "running"):
            await self._manager_of(session.sandbox).leave(session.sandbox)
        elif end is not None:
            await self._remove(session.sandbox, end)

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
        caller.check_unscoped("change a sandbox's own terms")
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
        if any(value is not UNSET for value in others):
            detail = {"idle_timeout": idle, "max_life": life, "labels": sorted(session.labels), **caller.to_detail()}
            await self.audit().arecord("lifecycle", session.running().id, detail={"event": "changed", **detail})
        session.touch()
        return session.info()


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
