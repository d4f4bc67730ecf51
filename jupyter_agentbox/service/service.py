"""Manage the sandboxes of agents and programs: create, change, park, revive and end them.

Each process has one :class:`SandboxService` above its sandbox manager. REST, MCP and the command line are thin layers
over it, so a sandbox created through one of them is available through all of them. The service delegates to three
objects: the registry decides which caller may see and use which sandbox, grants change which hosts a sandbox may
reach, and quotas limit the number of sandboxes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
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
from jupyter_agentbox.models import SandboxInfo, SandboxPatch, SandboxRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.renewal import reapply_policy
from jupyter_agentbox.sandbox.limits import DiskQuota
from jupyter_agentbox.sandbox.link.thread import LinkThread, finished, log_failure, on_link_thread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.sandbox.sweep import SESSION_FILE
from jupyter_agentbox.sandbox.tokens import TokenStore
from jupyter_agentbox.spec import Cause, End, SandboxSpec, format_size

from .consent import ConsentWatch
from .expired import END, report_expired
from .folders import Folders
from .grants import Grants
from .managed_sandbox import ManagedSandbox, check_request
from .packages import install_all, split_packages
from .quotas import Quotas
from .registry import Caller, SandboxRegistry
from .tenants import Tenant

log = logging.getLogger(__name__)

#: Maximum number of ended sandboxes that are remembered with their cause.
MAX_ENDED = 200
#: Seconds between two checks for sandboxes whose idle timeout or maximum lifetime has expired.
CULL_INTERVAL = 2.0
#: Seconds between two measurements of the tenants' disk use.
TENANT_INTERVAL = 5.0
#: The setting that limits them.
TENANT_SETTING = "Policy.max_tenant_disk"

Start = Callable[[], Awaitable[Sandbox]]
OnProgress = Callable[[str], object]


def _ignore_progress(text: str) -> None:
    """Discard a progress message; the default when the caller passes no callback."""


class SandboxParker(Protocol):
    """Interface of an object that parks sandboxes. All methods run on the link thread."""

    async def park(self, managed: ManagedSandbox) -> None:
        """Save a sandbox to disk and free its resources. Raises Conflict while the sandbox is in use."""

    async def wake(self, managed: ManagedSandbox) -> None:
        """Start a parked sandbox from its saved state. It keeps its ids."""

    async def forget(self, managed: ManagedSandbox) -> None:
        """Delete the saved state of a sandbox."""

    async def recover(self) -> list[ManagedSandbox]:
        """Return the sandboxes that an earlier server parked."""


class SandboxService:
    """Service that owns all managed sandboxes of this process. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Limits and defaults.

    Attributes
    ----------
    registry : SandboxRegistry
    quotas : Quotas
    grants : Grants
    parker : SandboxParker or None
        Parks and wakes sandboxes. If None, sandboxes are never parked.
    start_kernel : coroutine function or None
        Starts a kernel with the given id and kernelspec name, on the server's own event loop.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.registry = SandboxRegistry(policy, self._wake)
        self.quotas = Quotas(policy, self.registry)
        self.grants = Grants(policy, self.registry)
        self.folders = Folders(policy, self.registry, self.grants)
        ConsentWatch.start(policy)
        self.parker: SandboxParker | None = None
        self.start_kernel: Callable[[str, str], Awaitable[None]] | None = None
        self._sandboxes = self.registry.sandboxes
        self._thread = LinkThread.instance()
        self._watch_tasks: list[asyncio.Task[None]] = []
        self._tenant_quotas: dict[tuple[str, str], DiskQuota] = {}

    # -- life cycle ----------------------------------------------------------------------------

    @on_link_thread
    async def create(
        self, request: SandboxRequest, *, caller: Caller, on_progress: OnProgress = _ignore_progress
    ) -> tuple[SandboxInfo, bool]:
        """Start a sandbox, or return the existing one that has the same id and was created by the same request.

        The output of the package installation is passed to `on_progress`, on the link thread.

        Returns
        -------
        SandboxInfo, bool
            The sandbox, and whether it is new.

        Raises
        ------
        InvalidRequest, PolicyRefused, LimitReached
            The request is malformed or not allowed.
        Conflict
            A sandbox with this id exists and was created by a different request.
        RuntimeUnavailable, RuntimeFailed
            The sandbox did not start. Nothing of it remains.
        """
        caller.check_unscoped("create sandboxes")
        check_request(request)
        split_packages(request.packages)
        known = self._sandboxes.get((caller.name, request.id)) if request.id is not None else None
        if known is not None and (known.state != "ended" or known.kept_until):
            if not await asyncio.to_thread(known.is_asked_for_by, request):
                what = "has ended with its files kept" if known.kept_until else "exists"
                raise Conflict(
                    f"sandbox {request.id!r} {what}, and its request was different; delete it, or choose another id",
                    field="id",
                )
            await self._revive(known, caller)
            return known.info(), False
        self.quotas.check(caller.name)
        policy = self.policy
        managed = ManagedSandbox(
            request.id or os.urandom(8).hex(),
            caller.name,
            request,
            idle_timeout=_within(request.idle_timeout, policy.idle_timeout, policy.max_idle_timeout, "idle_timeout"),
            max_life=_within(request.max_life, policy.max_life, policy.max_life, "max_life"),
        )
        self._sandboxes[managed.key] = managed
        self._start_watching()
        starting = managed.starting = self._thread.spawn(self._start(managed, on_progress=on_progress), is_awaited=True)
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The caller has disconnected. A sandbox with a generated id could never be found again.
            if request.id is None:
                starting.cancel()
            starting.add_done_callback(log_failure)
            raise
        return managed.info(), True

    @on_link_thread
    async def add(self, managed: ManagedSandbox, start: Start, *, caller: Caller) -> SandboxInfo:
        """Register a sandbox that the coroutine function `start` creates as a copy of another sandbox.

        Raises
        ------
        Conflict
            A sandbox with this id exists.
        LimitReached
        """
        known = self._sandboxes.get(managed.key)
        if known is not None and (known.state != "ended" or known.kept_until):
            raise Conflict(f"sandbox {managed.id!r} already exists; delete it, or choose another id", field="id")
        self.quotas.check(caller.name)
        policy, request = self.policy, managed.request
        managed.idle_timeout = _within(
            request.idle_timeout, policy.idle_timeout, policy.max_idle_timeout, "idle_timeout"
        )
        managed.max_life = _within(request.max_life, policy.max_life, policy.max_life, "max_life")
        self._sandboxes[managed.key] = managed
        self._start_watching()
        managed.starting = self._thread.spawn(self._start(managed, start))
        await asyncio.shield(managed.starting)
        return managed.info()

    @on_link_thread
    async def swap(self, managed: ManagedSandbox, sandbox: Sandbox) -> None:
        """Replace the sandbox behind a managed sandbox, and end the previous one."""
        old = managed.sandbox
        if old is not None:
            self.grants.inherit_grant(sandbox, old)
        managed.close()
        managed.attach(sandbox)
        await asyncio.to_thread(sandbox.record.save, sandbox.directory)
        await asyncio.to_thread(managed.save)
        self._thread.spawn(self._watch(managed, sandbox))
        if old is not None:
            await asyncio.to_thread(TokenStore(self.policy.state_path).carry, old.id, sandbox.id)
            await self._remove(old)

    def move_kernel(self, old_id: str, sandbox: Sandbox) -> None:
        """Record that a notebook's kernel has moved to another sandbox, with its host requests. On the link thread."""
        managed = self.registry.move(old_id, sandbox)
        if managed is not None:
            self._thread.spawn(self.grants.save_asks(managed))

    async def _start(
        self, managed: ManagedSandbox, start: Start | None = None, on_progress: OnProgress = _ignore_progress
    ) -> None:
        sandbox: Sandbox | None = None
        managed.keep_ended_for = self.policy.keep_ended_for
        try:
            if start is not None:
                sandbox = await start()
                self._restrict(managed)
            else:
                spec = await asyncio.to_thread(self._resolve, managed)
                manager = SandboxManager.shared(self.policy.state_path, spec.runtime, config=self.policy.config)
                async with manager.starting:
                    sandbox = await self._make(managed, manager, spec)
            managed.attach(sandbox)
            await self._prepare(managed, on_progress)
            await asyncio.to_thread(managed.save)  # from here on, a later server can identify its request
            managed.starting = None
            managed.touch()
            self._thread.spawn(self._watch(managed, sandbox))
        except BaseException:
            managed.end = managed.end or End(Cause.RUNTIME_FAILED, 1, "it did not start")
            self._sandboxes.pop(managed.key, None)
            if sandbox is not None:
                await asyncio.shield(self._remove(sandbox))
            raise

    async def _make(self, managed: ManagedSandbox, manager: SandboxManager, spec: SandboxSpec) -> Sandbox:
        if managed.request.packages:  # packages must be installed before its kernels start
            return await manager.create(spec)
        warm, has_code = WarmStarts.shared(manager, self.policy), "run_code" in managed.tools
        return await warm.create(spec, has_code=has_code, is_usual=not managed.request.env)

    def _resolve(self, managed: ManagedSandbox) -> SandboxSpec:
        """Resolve a request against policy, and return the sandbox's spec. Blocks."""
        request = managed.request
        if len(request.ports) > self.policy.max_ports:
            raise PolicyRefused(
                f"{len(request.ports)} ports exceed the maximum of {self.policy.max_ports}",
                field="ports",
                setting="Policy.max_ports",
            )
        limits = request.limits
        requested: dict[str, Any] = {
            "profile": request.profile,
            "image": request.image,
            "allowed_hosts": request.allowed_hosts,
            "memory": limits.memory,
            "cpus": limits.cpus,
            "processes": limits.processes,
            "disk": limits.disk,
        }
        spec = self.policy.resolve(
            {key: value for key, value in requested.items() if value is not None},
            executable=sys.executable,
            # The requester does not know about kernelspec templates, so a dollar sign is literal.
            kernelspec_env={name: value.replace("$", "$$") for name, value in request.env.items()},
            owner=managed.owner,
        )
        spec = self.policy.with_consent(replace(spec, consent_id=secrets.token_hex(8)))
        self._restrict(managed)
        if request.tenant is None:
            return spec
        tenant = Tenant.open(self.policy.state_path, managed.owner, request.tenant)
        mounts = (*spec.mounts, *tenant.mounts)
        return replace(spec, workspace=tenant.workspace, hidden=(), read_only=(), mounts=mounts)

    def _restrict(self, managed: ManagedSandbox) -> None:
        """Apply today's policy limits to a sandbox, whatever policy it was created under."""
        policy, request = self.policy, managed.request
        managed.restrict(policy.blocked_commands)
        if len(request.ports) > policy.max_ports:
            managed.request = msgspec.structs.replace(request, ports=request.ports[: policy.max_ports])
            log.warning("sandbox %s keeps only %d ports, because of Policy.max_ports", managed.id, policy.max_ports)
        if managed.idle_timeout is not None:
            managed.idle_timeout = min(managed.idle_timeout, policy.max_idle_timeout)
        if managed.max_life is not None:
            managed.max_life = min(managed.max_life, policy.max_life)
        if request.tenant is not None:
            managed.quota, managed.quota_setting = policy.max_tenant_disk, TENANT_SETTING

    async def _prepare(self, managed: ManagedSandbox, on_progress: OnProgress) -> None:
        """Write the requested files and install the requested packages before the sandbox is first used."""
        request = managed.request
        if request.files:
            await asyncio.to_thread(managed.write_files)
        await self._install(managed, on_progress)

    async def _install(self, managed: ManagedSandbox, on_progress: OnProgress) -> None:
        for request in split_packages(managed.request.packages):
            done = await install_all(managed, request, on_progress)
            if not done.is_ok:
                raise Conflict(f"the packages were not installed: {done.message}", field="packages")

    async def _watch(self, managed: ManagedSandbox, sandbox: Sandbox) -> None:
        """Wait for a sandbox to end, and record why. Keep its files if the end was unintended; remove the rest."""
        end = await sandbox.wait_ended()
        if managed.sandbox is not sandbox:
            return  # another sandbox has replaced it
        managed.end = managed.end or end
        managed.ended_at = time.time()
        managed.close()
        if managed.kept_until is not None:
            await self._keep_files(managed, sandbox)
        else:
            await self._remove(sandbox)
        ended = [other for other in self._sandboxes.values() if other.state == "ended" and other.kept_until is None]
        for other in sorted(ended, key=lambda other: other.ended_at)[:-MAX_ENDED]:
            self._sandboxes.pop(other.key, None)

    async def _keep_files(self, managed: ManagedSandbox, sandbox: Sandbox) -> None:
        try:
            await self._manager_of(sandbox).keep(sandbox)
            await asyncio.to_thread(managed.save, sandbox.directory)
        except (AgentboxError, OSError) as error:  # for example on a full disk; a later server would not know the cause
            log.warning("sandbox %s has ended; the record of its kept files is incomplete: %s", managed.id, error)

    async def revive(self, sandbox_id: str, *, caller: Caller) -> SandboxInfo:
        """Start a sandbox again that ended by a fault, with its files. Do nothing if it is running.

        The new sandbox has the settings of the ended one, as far as today's policy allows them. Its tokens stay valid.

        Raises
        ------
        NotFound
        SandboxEnded
            Its files were not kept.
        Conflict
            It belongs to a kernel that Jupyter restarts.
        LimitReached, PolicyRefused, RuntimeUnavailable, RuntimeFailed
            It did not start. Its files are still kept.
        """
        spec = await self._revive_by_id(sandbox_id, caller)
        if spec is None:
            return await self.registry.get(sandbox_id, caller=caller)
        assert self.start_kernel is not None
        async with self.quotas.room_for_kernel():
            await self.start_kernel(spec.kernel_id, spec.kernel_name)
        return await self.registry.get(spec.kernel_id, caller=caller)

    @on_link_thread
    async def _revive_by_id(self, sandbox_id: str, caller: Caller) -> SandboxSpec | None:
        """Revive an agent's sandbox, or return the spec of a notebook's kernel, which the server must start."""
        managed = self.registry.find(sandbox_id, caller)
        if managed.kind == "session":
            await self._revive(managed, caller)
            return None
        if managed.kept_until is None or self.start_kernel is None or managed.spec is None:
            raise Conflict(f"sandbox {managed.id} belongs to a Jupyter kernel; restart the kernel instead")
        return managed.spec

    async def _revive(self, managed: ManagedSandbox, caller: Caller) -> None:
        if managed.starting is None and managed.state == "ended":
            if managed.kept_until is None:
                managed.running()  # raises the error that says why
            self.quotas.check(managed.owner, excluded=managed)
            managed.starting = self._thread.spawn(self._restart(managed, caller))
        await self.registry.started(managed, is_own=True)

    async def _restart(self, managed: ManagedSandbox, caller: Caller) -> None:
        old, end = managed.sandbox, managed.end
        assert old is not None
        revived: Sandbox | None = None
        managed.sandbox = managed.end = None
        try:
            await self._manager_of(old).keep(old)  # if it has only just ended
            previous_spec = replace(old.spec, grant=old.gate.grant, layout="plain", warm=None)
            is_tenants = managed.request.tenant is not None
            spec = await asyncio.to_thread(
                reapply_policy, self.policy, previous_spec, owner=managed.owner, is_tenants=is_tenants
            )
            manager = SandboxManager.shared(self.policy.state_path, spec.runtime, config=self.policy.config)
            async with manager.starting:
                revived = await manager.create(spec, inherit=old)
            managed.attach(revived)
            self._restrict(managed)
            await self._install(managed, _ignore_progress)
            managed.keep_ended_for = self.policy.keep_ended_for
            await asyncio.to_thread(managed.save)
            detail = {"event": "revived", "before": old.id, **caller.to_detail()}
            await self.registry.audit().arecord("lifecycle", revived.id, detail=detail)
        except BaseException:
            await asyncio.shield(self._keep_or_remove(managed, revived or old, end))
            raise
        finally:
            managed.starting = None
        managed.touch()
        self._thread.spawn(self._watch(managed, revived))

    async def _keep_or_remove(self, managed: ManagedSandbox, sandbox: Sandbox, end: End | None) -> None:
        """Keep the files of a sandbox that could not be revived, or remove it if it was deleted in the meantime."""
        managed.close()
        if managed.end is not None:
            await self._remove(sandbox)
            return
        managed.sandbox, managed.end = sandbox, end
        await self._keep_files(managed, sandbox)

    async def _remove(self, sandbox: Sandbox, end: Cause | End = Cause.STOPPED) -> None:
        await self._manager_of(sandbox).stop(sandbox, end)

    def _manager_of(self, sandbox: Sandbox) -> SandboxManager:
        return SandboxManager.shared(self.policy.state_path, sandbox.spec.runtime, config=self.policy.config)

    @on_link_thread
    async def delete(self, sandbox_id: str, *, caller: Caller) -> None:
        """End a sandbox and forget it. Raises NotFound, and Conflict for the sandbox of a notebook's kernel."""
        managed = self.registry.find(sandbox_id, caller)
        if managed.kind == "notebook":
            retained_kernel = SandboxedKernel.retained.get(managed.spec.kernel_id) if managed.spec is not None else None
            if retained_kernel is not None and retained_kernel.sandbox is managed.sandbox:
                await retained_kernel.forget()
                return
            raise Conflict(
                f"sandbox {managed.id} belongs to a Jupyter kernel, and ends with it; shut down the kernel instead"
            )
        if managed.lost is not None:
            manager = SandboxManager.shared(self.policy.state_path, self.policy.runtime, config=self.policy.config)
            await asyncio.to_thread(manager.remove_lost, managed.lost)
        if managed.sandbox is not None:
            managed.sandbox.end_lease()
        if managed.starting is not None:
            managed.end = End(Cause.STOPPED, 137, "it was deleted")
            managed.starting.cancel()
        await self._end(managed, End(Cause.STOPPED, 137, "it was deleted"))
        self._sandboxes.pop(managed.key, None)

    async def _wake(self, managed: ManagedSandbox) -> None:
        try:
            if self.parker is None:
                raise Conflict(f"sandbox {managed.id!r} is parked, and this server cannot wake parked sandboxes")
            if managed.kind == "session":
                self.quotas.check(managed.owner, excluded=managed)
            await self.parker.wake(managed)
            if managed.kind == "session" and managed.sandbox is not None:
                self._thread.spawn(self._watch(managed, managed.sandbox))
        finally:
            managed.starting = None

    @on_link_thread
    async def park(self, sandbox_id: str, *, caller: Caller) -> SandboxInfo:
        """Save a sandbox to disk and free its resources. Raises Conflict while it is in use."""
        managed = self.registry.find(sandbox_id, caller)
        if self.parker is None:
            raise Conflict("this server cannot park sandboxes")
        if managed.state != "parked":
            await finished(self.parker.park(managed))
        return managed.info()

    async def wake(self, sandbox_id: str, *, caller: Caller) -> SandboxInfo:
        """Wake a parked sandbox. Any other use wakes it as well."""
        async with self.registry.use(sandbox_id, caller=caller) as managed:
            return managed.info()

    async def _end(self, managed: ManagedSandbox, end: End) -> None:
        managed.end = managed.end or end  # an intended end, so the files are not kept
        managed.keep_ended_for = 0.0
        if managed.parked is not None and self.parker is not None:
            await self.parker.forget(managed)
        if managed.sandbox is not None:
            await self._remove(managed.sandbox, end)
        managed.ended_at = managed.ended_at or time.time()
        managed.close()

    async def _watch_tenants(self) -> None:
        """Stop the sandboxes of a tenant over its disk quota from writing, and end them if they continue to.

        Code inside can write past the checks of REST.
        """
        limit = self.policy.max_tenant_disk
        tenants: dict[tuple[str, str], list[ManagedSandbox]] = {}
        for managed in self._sandboxes.values():
            if managed.state == "running" and managed.request.tenant is not None:
                tenants.setdefault((managed.owner, managed.request.tenant), []).append(managed)
        for (owner, name), members in tenants.items():
            tenant = await asyncio.to_thread(Tenant.open, self.policy.state_path, owner, name)
            used = await asyncio.to_thread(tenant.used)
            quota = self._tenant_quotas.setdefault((owner, name), DiskQuota(limit))
            sentence = f"{format_size(used)} of {format_size(limit)} used"
            if quota.is_escaped(used):
                end = End(Cause.DISK_FULL, 137, f"the tenant exceeded its disk quota ({sentence})", TENANT_SETTING)
                await asyncio.gather(*(self._end(managed, end) for managed in members))
            if not quota.is_over(used):
                quota.is_stopped = False
            elif not quota.is_stopped and all(
                managed.sandbox is None or managed.sandbox.shared_folder_full for managed in members
            ):
                quota.mark(used)  # since the previous round, nothing should be written
            full = (
                f"the tenant's disk quota is full: {sentence}. Delete files to continue" if quota.is_over(used) else ""
            )
            for managed in members:
                if managed.sandbox is not None:
                    managed.sandbox.shared_folder_full = full
        for gone in self._tenant_quotas.keys() - tenants.keys():
            del self._tenant_quotas[gone]

    def _start_watching(self) -> None:
        if not self._watch_tasks:
            work = ((CULL_INTERVAL, self._cull), (TENANT_INTERVAL, self._watch_tenants))
            self._watch_tasks = [self._thread.spawn(self._thread.repeat(*job)) for job in work]

    async def _cull(self) -> None:
        for managed in list(self._sandboxes.values()):
            if managed.kept_until is not None and managed.kept_until < time.time():
                self._thread.spawn(self._end(managed, managed.end or END))
            if managed.state not in ("running", "parked") or managed.starting or (expired := managed.overdue()) is None:
                continue
            if expired == "idle_timeout" and managed.request.idle_policy == "park" and self.parker is not None:
                if managed.state == "running":
                    self._thread.spawn(self._park_idle(managed))
                continue
            seconds = getattr(managed, expired)
            if expired == "idle_timeout":
                end = End(Cause.IDLE, 137, f"it was not used for {seconds:g} s", "Policy.idle_timeout")
            else:
                end = End(Cause.LIFE_OVER, 137, f"it reached its maximum lifetime of {seconds:g} s", "Policy.max_life")
            self._thread.spawn(self._end(managed, end))

    async def _park_idle(self, managed: ManagedSandbox) -> None:
        assert self.parker is not None
        try:
            await self.parker.park(managed)
        except (AgentboxError, OSError) as error:
            # Keep it running rather than lose it. Parking is retried after the next idle timeout.
            managed.touch()
            log.warning("sandbox %s could not be parked and keeps running: %s", managed.id, error)

    @on_link_thread
    async def recover(self) -> list[str]:
        """Adopt the sandboxes of an earlier server whose lease has not expired. Returns their ids."""
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
                managed = await asyncio.to_thread(ManagedSandbox.load, directory)
            except NotFound as error:
                self._add_lost(manager, listed.id, str(error), listed.owner)
                continue
            if managed.key in self._sandboxes:
                continue
            try:
                own_manager = SandboxManager.shared(self.policy.state_path, listed.runtime, config=self.policy.config)
                record = await asyncio.to_thread(Record.load, directory)
                try:
                    spec = await asyncio.to_thread(self._renew, managed, record)
                    sandbox = await own_manager.adopt(listed.id, spec)
                except (PolicyRefused, InvalidRequest) as error:
                    managed.end, managed.ended_at = await own_manager.refuse(record, error), time.time()
                    self._sandboxes[managed.key] = managed
                    continue
            except (AgentboxError, OSError) as error:
                log.error("cannot adopt sandbox %s: %s", listed.id, error)
                continue
            managed.end = None  # the end of the sandbox from which it was revived
            managed.attach(sandbox)
            self._restrict(managed)
            self._sandboxes[managed.key] = managed
            self._thread.spawn(self._watch(managed, sandbox))
            found.append(managed.id)
        if self.parker is not None:
            try:
                parked = await self.parker.recover()
            except (AgentboxError, OSError) as error:
                log.error("cannot adopt parked sandboxes: %s", error)
                parked = []
            for managed in reversed(parked):
                if (known := self._sandboxes.setdefault(managed.key, managed)) is managed:
                    self._restrict(managed)
                    found.append(managed.id)
                else:
                    managed.sandbox = known.sandbox  # its tokens belong to this sandbox
                    await self.parker.forget(managed)  # the earlier server ended between two steps, and it runs
        await asyncio.to_thread(self.registry.end_duplicates, manager)
        await self._recover_ended(manager)
        for managed in await report_expired(self.policy.state_path, manager.audit):
            self._sandboxes.setdefault(managed.key, managed)
        if self._sandboxes:
            self._start_watching()
        return found

    async def _recover_ended(self, manager: SandboxManager) -> None:
        """Adopt the kept files of sandboxes that have ended."""
        for listed in await asyncio.to_thread(manager.list):
            directory = self.policy.state_path / "sandboxes" / listed.id
            if listed.state != "ended" or not (directory / SESSION_FILE).exists():
                continue
            try:
                managed = await asyncio.to_thread(ManagedSandbox.load, directory)
                own_manager = SandboxManager.shared(self.policy.state_path, listed.runtime, config=self.policy.config)
                sandbox = await own_manager.take_ended(listed.id)
                if sandbox is None:
                    continue
                managed.keep_ended_for = min(managed.keep_ended_for, self.policy.keep_ended_for)
                managed.ended_at = sandbox.kept_since
                managed.attach(sandbox)
                if managed.key in self._sandboxes or managed.kept_until is None:
                    await self._remove(sandbox)  # it was revived, or policy no longer keeps files
                    continue
                if managed.end is None:  # the earlier server did not report its end
                    managed.end = sandbox.end
                    assert sandbox.end is not None
                    await self.registry.audit().arecord("lifecycle", sandbox.id, detail=sandbox.end.to_detail(""))
                self._sandboxes[managed.key] = managed
            except (AgentboxError, OSError) as error:
                log.warning("cannot adopt the kept files of sandbox %s: %s", listed.id, error)

    def _add_lost(self, manager: SandboxManager, name: str, reason: str, owner: str = "") -> None:
        """List a sandbox whose record is damaged, until it is deleted."""
        directory = manager.place_of(name)
        log.error("sandbox %s is lost: %s. Its files are in %s until it is deleted", name, reason, directory / "work")
        try:
            managed = ManagedSandbox.load(directory)
        except NotFound:
            managed = ManagedSandbox(name, owner or self.registry.server_owner, SandboxRequest())
        if managed.key in self._sandboxes:
            managed.id = name
        managed.lost = name
        managed.previous_ids.append(name)
        managed.end = End(Cause.LOST, 1, f"it is lost: {reason}. Its files are kept until you delete it")
        managed.ended_at = managed.created
        self._sandboxes[managed.key] = managed

    def _renew(self, managed: ManagedSandbox, record: Record) -> SandboxSpec:
        is_tenants = managed.request.tenant is not None
        return reapply_policy(self.policy, record.spec, owner=managed.owner, is_tenants=is_tenants, is_running=True)

    @on_link_thread
    async def aclose(self, *, is_ended: bool = True) -> None:
        """End the running sandboxes with the server, or leave them to a later one. Parked ones are always left."""
        for task in self._watch_tasks:
            task.cancel()
        self._watch_tasks = []
        closing = list(self._sandboxes.values())
        self._sandboxes.clear()
        for managed in closing:
            if managed.starting is not None:
                managed.starting.cancel()
        if is_ended:
            end = End(Cause.STOPPED, 137, "the server ended")
            await asyncio.gather(*(self._end_or_leave(managed, end) for managed in closing), return_exceptions=True)
        else:
            for managed in closing:
                await self._end_or_leave(managed, None)

    async def _end_or_leave(self, managed: ManagedSandbox, end: End | None) -> None:
        """End a sandbox, or leave it to a later server if `end` is None. Kept files are always left."""
        managed.close()
        if managed.sandbox is None:
            return
        if managed.kept_until is not None or (end is None and managed.state == "running"):
            await self._manager_of(managed.sandbox).leave(managed.sandbox)
        elif end is not None:
            await self._remove(managed.sandbox, end)

    # -- changes -------------------------------------------------------------------------------

    @on_link_thread
    async def patch(self, sandbox_id: str, patch: SandboxPatch, *, caller: Caller) -> SandboxInfo:
        """Change a running sandbox. Either all requested changes are made, or none.

        Raises
        ------
        InvalidRequest, PolicyRefused
            A value is malformed, or exceeds what the profile allows.
        NotFound, SandboxEnded
        Conflict
            It is a notebook's sandbox, of which only the allowed hosts can be changed.
        """
        caller.check_unscoped("change a sandbox")
        managed = await self.registry.peek(sandbox_id, caller=caller)
        others = (patch.idle_timeout, patch.max_life, patch.labels)
        if managed.kind == "notebook" and any(value is not UNSET for value in others):
            raise Conflict("Jupyter manages the life of a notebook's sandbox; only allowed_hosts can be changed")
        policy = self.policy
        idle, life = managed.idle_timeout, managed.max_life
        if patch.idle_timeout is not UNSET:
            idle = _within(patch.idle_timeout, policy.idle_timeout, policy.max_idle_timeout, "idle_timeout")
        if patch.max_life is not UNSET:
            life = _within(patch.max_life, policy.max_life, policy.max_life, "max_life")
        if patch.allowed_hosts is not UNSET:
            await self.grants.set_hosts(managed, patch.allowed_hosts, caller)
        managed.idle_timeout, managed.max_life = idle, life
        if patch.labels is not UNSET:
            managed.labels = dict(patch.labels)
        if managed.kind == "session":
            await asyncio.to_thread(managed.save)
        if any(value is not UNSET for value in others):
            detail = {"idle_timeout": idle, "max_life": life, "labels": sorted(managed.labels), **caller.to_detail()}
            await self.registry.audit().arecord(
                "lifecycle", managed.running().id, detail={"event": "changed", **detail}
            )
        managed.touch()
        return managed.info()


def _within(requested: float | None, default: float, ceiling: float, field: str) -> float:
    if requested is None:
        return min(default, ceiling)
    if requested > ceiling:
        setting = f"Policy.max_{field.removeprefix('max_')}"
        raise PolicyRefused(
            f"{field} of {requested:g} s exceeds the maximum of {ceiling:g} s (setting: {setting})",
            field=field,
            setting=setting,
        )
    return requested
