"""Take snapshots of running sandboxes, restore a sandbox to one of them, and fork a sandbox from one.

:class:`~jupyter_agentbox.storage.snapshots.SnapshotStore` stores snapshots,
:meth:`~jupyter_agentbox.sandbox.sandbox.Sandbox.checkpoint` saves a sandbox, and ``policy.renewal`` decides what a
copy may do under today's policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from jupyter_agentbox.errors import Conflict, Damaged, InvalidRequest, NotAuthorized, NotFound, RuntimeFailed
from jupyter_agentbox.kernels.parked_kernel import Restoration
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.models import ForkRequest, SandboxInfo, SandboxRequest, SnapshotInfo, SnapshotRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.renewal import intersect_grants, reapply_policy
from jupyter_agentbox.sandbox.link.link import LinkThread, finished
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox, SessionRecord
from jupyter_agentbox.service.refusals import SERVER
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService
from jupyter_agentbox.service.tenants import Tenant
from jupyter_agentbox.spec import Grant, SandboxSpec
from jupyter_agentbox.storage.snapshots import Kind, Snapshot, SnapshotMeta, SnapshotStore

from .reseeding import reseed

log = logging.getLogger(__name__)

# An alias, because a method below is named `list`.
Infos = list[SnapshotInfo]


class LiveSnapshots:
    """The snapshots of one server's sandboxes. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    service : SandboxService
    """

    def __init__(self, service: SandboxService) -> None:
        policy = service.policy
        self._service = service
        self._policy = policy
        self._thread = LinkThread.instance()
        self._latest: dict[tuple[str, str], str] = {}
        self._store: SnapshotStore | None = None
        #: Starts a Jupyter kernel from a snapshot and returns its id, on the server's event loop.
        self.start_kernel: Callable[[Restoration], Awaitable[str]] | None = None

    @property
    def store(self) -> SnapshotStore:
        """The snapshot store, created at first use. Raises InvalidConfig."""
        if self._store is None:
            self._store = open_store(self._policy)
        return self._store

    # -- taking ----------------------------------------------------------------------------------

    async def take(self, sandbox_id: str, request: SnapshotRequest, *, caller: Caller) -> SnapshotInfo:
        """Save a running sandbox, without stopping it.

        Raises
        ------
        NotFound, PolicyRefused, SandboxEnded
        LimitReached
            Its owner has reached the number or size of snapshots that policy allows.
        RuntimeUnavailable
            Its runtime does not support snapshots.
        Conflict
            A program inside has something open that gVisor cannot save. The message names it.
        RuntimeFailed
            It could not be saved for another reason.
        """

        async def take() -> SnapshotInfo:
            async with self._service.registry.use(sandbox_id, "snapshot", caller=caller) as managed:
                return describe(await self.save(managed, request))

        return await finished(take())

    async def save(self, managed: ManagedSandbox, request: SnapshotRequest, kind: Kind = "user") -> Snapshot:
        """Save a sandbox; see :meth:`take`. Must not be cancelled."""
        sandbox = managed.running()
        staged = await asyncio.to_thread(self.store.stage)
        try:
            fingerprint = await asyncio.to_thread(self.manager_of(sandbox.spec).runtime.fingerprint, sandbox.spec)
            record = await self._checkpoint(sandbox, staged)
            meta = SnapshotMeta(
                sandbox=_label(managed.info()),
                name=request.name,
                note=request.note,
                parent=await self._find_parent(managed),
                owner=managed.owner,
                created=time.time(),
                fingerprint=fingerprint,
                record=msgspec.json.encode(
                    _Written(
                        msgspec.Raw(record), managed.request, managed.record if managed.kind == "session" else None
                    )
                ),
                kind=kind,
            )
            snapshot = await asyncio.to_thread(self.store.commit, staged, meta)
        except BaseException:
            await asyncio.to_thread(self.store.discard, staged)
            raise
        self._latest[snapshot.meta.owner, snapshot.meta.sandbox] = snapshot.id
        await self.note(sandbox, "snapshot", snapshot)
        return snapshot

    async def _find_parent(self, managed: ManagedSandbox) -> str | None:
        """Return the id of the parent: the snapshot of this sandbox that was taken or restored last."""
        key = (managed.owner, _label(managed.info()))
        own = {
            item.id: item for item in await asyncio.to_thread(self.store.list, key[0]) if item.meta.sandbox == key[1]
        }
        newest = max(own.values(), key=lambda item: item.meta.created, default=None)
        latest = self._latest.get(key)
        return latest if latest in own else newest.id if newest is not None else None

    def manager_of(self, spec: SandboxSpec) -> SandboxManager:
        """Return the manager for sandboxes with this spec."""
        return SandboxManager.shared(self._policy.state_path, spec.runtime, config=self._policy.config)

    async def _checkpoint(self, sandbox: Sandbox, staged: Path) -> bytes:
        try:
            return await self._thread.run(sandbox.checkpoint(staged))
        except RuntimeFailed:
            await asyncio.to_thread(self.manager_of(sandbox.spec).check_space)  # the runtime hides this cause
            raise

    async def note(self, sandbox: Sandbox, event: str, snapshot: Snapshot) -> None:
        """Write an event of a sandbox and a snapshot to the audit log."""
        await self._service.registry.audit().arecord(
            "lifecycle", sandbox.id, detail={"event": event, "snapshot": snapshot.id, "name": snapshot.meta.name}
        )

    async def expire(self, snapshot: Snapshot) -> None:
        """Remove a snapshot that is older than policy allows."""
        await self.record_event("snapshot_expired", snapshot, Caller("Policy.snapshot_max_age"))
        await asyncio.to_thread(self.store.delete, snapshot.id, snapshot.meta.owner)

    async def record_event(self, event: str, snapshot: Snapshot, caller: Caller) -> None:
        """Write an operation on a snapshot itself to the audit log, with the caller."""
        sandbox = SERVER
        with suppress(RuntimeFailed):  # the snapshot was made by another release
            sandbox = read_saved(snapshot).record.id
        detail = {"event": event, "snapshot": snapshot.id, "name": snapshot.meta.name, **caller.to_detail()}
        await self._service.registry.audit().arecord("lifecycle", sandbox, detail=detail)

    # -- the list --------------------------------------------------------------------------------

    async def list(self, sandbox_id: str | None = None, *, caller: Caller) -> Infos:
        """List the snapshots of a sandbox, or all snapshots that the caller may see, oldest first."""
        if sandbox_id is None:
            caller.check_unscoped("list all snapshots")
            found = await asyncio.to_thread(self.store.list, None if caller.is_admin else caller.name)
        else:
            info = await self._service.registry.get(sandbox_id, caller=caller)
            found = [i for i in await asyncio.to_thread(self.store.list, info.owner) if i.meta.sandbox == _label(info)]
        return [
            describe(item) for item in sorted(found, key=lambda item: item.meta.created) if item.meta.kind == "user"
        ]

    async def get(self, snapshot_id: str, *, caller: Caller) -> SnapshotInfo:
        """Return a description of one snapshot. Raises NotFound."""
        return describe(await self.find(snapshot_id, caller))

    async def delete(self, snapshot_id: str, *, caller: Caller) -> None:
        """Remove a snapshot, but not data that it shares with others. Raises NotFound.

        The caller's own snapshots can be removed even if they cannot be read.
        """
        try:
            found = await self.find(snapshot_id, caller)
            owner = found.meta.owner
            await self.record_event("snapshot_deleted", found, caller)
        except Damaged:
            owner = caller.name
        await asyncio.to_thread(self.store.delete, snapshot_id, owner)

    async def find(self, snapshot_id: str, caller: Caller) -> Snapshot:
        """Return a snapshot that the caller may use: its own, or one of a sandbox that it may see.

        Raises
        ------
        NotFound
        Damaged
            The snapshot is the caller's own, and can no longer be read.
        """
        for item in await asyncio.to_thread(self.store.list):
            if item.id == snapshot_id and item.meta.kind == "user":
                if caller.scope is None and (caller.is_admin or item.meta.owner == caller.name):
                    return item
                with suppress(NotFound):
                    info = await self._service.registry.get(item.meta.sandbox, caller=caller)
                    if (info.owner, _label(info)) == (item.meta.owner, item.meta.sandbox):
                        return item
        if caller.scope is None:
            reason = (await asyncio.to_thread(self.store.damaged, caller.name)).get(snapshot_id)
            if reason is not None:
                raise Damaged(f"snapshot {snapshot_id} cannot be used, only deleted: {reason}", field="snapshot")
        raise NotFound(f"snapshot {snapshot_id[:64]!r} does not exist", field="snapshot")

    # -- restoring -------------------------------------------------------------------------------

    async def restore(self, sandbox_id: str, snapshot_id: str, *, caller: Caller) -> SandboxInfo:
        """Restore a sandbox to one of its snapshots. It keeps its ids and endpoints; work in progress is dropped.

        Raises
        ------
        NotFound
        Conflict
            The snapshot is not of this sandbox, or was taken in a different environment, or a file that a program had
            open no longer exists.
        PolicyRefused
            Policy no longer allows such a sandbox.
        RuntimeFailed
            It did not start. The sandbox continues as it was.
        Damaged
            The snapshot was changed on disk, or cannot be read. The sandbox continues as it was.
        """
        return await finished(self._restore(sandbox_id, snapshot_id, caller))

    async def _restore(self, sandbox_id: str, snapshot_id: str, caller: Caller) -> SandboxInfo:
        async with self._service.registry.use(sandbox_id, "restore", caller=caller) as managed:
            snapshot = await self.find(snapshot_id, caller)
            if (snapshot.meta.owner, snapshot.meta.sandbox) != (managed.owner, _label(managed.info())):
                raise Conflict(
                    f"snapshot {snapshot.id} belongs to another sandbox; fork it into a new sandbox instead",
                    field="snapshot",
                )
            saved = read_saved(snapshot)
            old = managed.running()
            spec = await self.renew(managed, snapshot, saved)
            spec = replace(
                spec,
                grant=intersect_grants(spec.grant, old.gate.grant),
                notebook=old.spec.notebook,
                consent_id=old.spec.consent_id,
            )
            async with self.checked_out(snapshot) as files:
                kernel = SandboxedKernel.find(sandbox_id=old.id) if managed.kind == "notebook" else None
                if kernel is not None:
                    sandbox = await self._thread.run(self._restore_kernel(kernel, spec, saved.record, files))
                else:
                    manager = self.manager_of(spec)
                    sandbox = await manager.restore(spec, saved.record, files)
                    await self._service.swap(managed, sandbox)
            self._latest[snapshot.meta.owner, snapshot.meta.sandbox] = snapshot.id
            await self.note(sandbox, "restored", snapshot)
            return await self._service.registry.get(sandbox.id if kernel is not None else managed.id, caller=caller)

    async def _restore_kernel(self, kernel: SandboxedKernel, spec: SandboxSpec, record: Record, files: Path) -> Sandbox:
        old = kernel.sandbox
        if old is None:
            raise Conflict("the kernel was parked or shut down in the meantime")

        def moved(sandbox: Sandbox) -> None:
            self._service.grants.inherit_grant(sandbox, old)
            self._service.move_kernel(old.id, sandbox)

        await kernel.restore(Restoration(replace(spec, kernel_id=old.spec.kernel_id), record, files), moved)
        assert kernel.sandbox is not None
        await asyncio.to_thread(kernel.sandbox.record.save, kernel.sandbox.directory)
        return kernel.sandbox

    async def renew(self, managed: ManagedSandbox, snapshot: Snapshot, saved: Saved) -> SandboxSpec:
        """Return the spec under today's policy for a restored sandbox. Raises Conflict, PolicyRefused."""
        await self._check_same(snapshot, saved.record.spec)
        return await self._renew(managed, saved)

    async def _check_same(self, snapshot: Snapshot, spec: SandboxSpec) -> None:
        runtime = self.manager_of(spec).runtime
        then, now = snapshot.meta.fingerprint, await asyncio.to_thread(runtime.fingerprint, spec)
        differing = [name for name in {**now, **then} if now.get(name) != then.get(name)]
        if differing:
            changes = ", ".join(f"{name}: {then.get(name)} then, {now.get(name)} now" for name in differing)
            raise Conflict(f"cannot restore the snapshot in a different environment ({changes})", field="snapshot")

    async def _renew(self, managed: ManagedSandbox, saved: Saved) -> SandboxSpec:
        spec = saved.record.spec
        is_tenants = saved.request.tenant is not None
        if saved.request.tenant is not None:
            # Do not trust the folders that the snapshot names: it may be a file that another owner exported.
            tenant = await asyncio.to_thread(Tenant.open, self._policy.state_path, managed.owner, saved.request.tenant)
            if spec.workspace != tenant.workspace or not set(tenant.mounts) <= set(spec.mounts):
                raise Conflict("the snapshot mounts the folders of another owner's tenant", field="snapshot")
            others = set(spec.mounts) - set(tenant.mounts)
        else:
            others = set(spec.mounts)
        if any(mount.is_writable for mount in others):
            raise Conflict("the snapshot mounts a writable folder of another owner", field="snapshot")
        return await asyncio.to_thread(reapply_policy, self._policy, spec, owner=managed.owner, is_tenants=is_tenants)

    @contextlib.asynccontextmanager
    async def checked_out(self, snapshot: Snapshot) -> AsyncIterator[Path]:
        """Provide a snapshot's files. None is loaded before all are verified. Raises Damaged, at exit at the latest."""
        waits = self.manager_of(read_saved(snapshot).record.spec).runtime.waits_for_image
        context = self.store.checkout(snapshot.id, snapshot.meta.owner, is_early=waits)
        files = await asyncio.to_thread(context.__enter__)
        try:
            yield files
        finally:
            await asyncio.to_thread(context.__exit__, *sys.exc_info())

    # -- forks -----------------------------------------------------------------------------------

    async def fork(self, sandbox_id: str, request: ForkRequest, *, caller: Caller) -> SandboxInfo:
        """Start another sandbox from a snapshot, or from the present state of a sandbox.

        The fork has its own id, grant and audit trail.

        Raises
        ------
        NotFound, Conflict, LimitReached, PolicyRefused, RuntimeFailed
        NotAuthorized, InvalidRequest
            The fork is to be a kernel, and the caller may not use kernels or has given an id for it.
        """
        caller.check_unscoped("fork a sandbox")
        if request.as_kernel and not caller.has_kernels:
            raise NotAuthorized("you have no permission to use kernels on this server")
        if request.as_kernel and request.id is not None:
            raise InvalidRequest("the id of a kernel cannot be chosen; omit it", field="id")
        return await finished(self._take_and_fork(sandbox_id, request, caller))

    async def _take_and_fork(self, sandbox_id: str, request: ForkRequest, caller: Caller) -> SandboxInfo:
        async with self._service.registry.use(sandbox_id, "fork", caller=caller) as managed:
            fork = self._fork_kernel if request.as_kernel else self._fork
            if request.snapshot is None:
                async with self._captured(managed) as origin:
                    return await fork(origin, request, caller)
            snapshot = await self.find(request.snapshot, caller)
            saved = read_saved(snapshot)
            await self._check_same(snapshot, saved.record.spec)
            files = functools.partial(self.checked_out, snapshot)
            is_its_own = (snapshot.meta.owner, snapshot.meta.sandbox) == (managed.owner, _label(managed.info()))
            now = managed.running().gate.grant if is_its_own else saved.record.spec.grant
            return await fork(_Origin(saved, files, {"snapshot": snapshot.id}, now), request, caller)

    @contextlib.asynccontextmanager
    async def _captured(self, managed: ManagedSandbox) -> AsyncIterator[_Origin]:
        """Provide the present state of a sandbox. It is not a snapshot, and does not outlive this process."""
        sandbox = managed.running()
        staged = await asyncio.to_thread(self.store.stage)
        try:
            record = Record.from_bytes(await self._checkpoint(sandbox, staged))
            saved = Saved(record, managed.request, None)
            yield _Origin(saved, lambda: contextlib.nullcontext(staged), {"sandbox": sandbox.id}, sandbox.gate.grant)
        finally:
            await asyncio.to_thread(self.store.discard, staged)

    async def _fork(self, origin: _Origin, request: ForkRequest, caller: Caller) -> SandboxInfo:
        saved = origin.saved
        fork_request = msgspec.structs.replace(
            saved.request, id=request.id or os.urandom(8).hex(), packages=[], files={}
        )
        fork = ManagedSandbox(fork_request.id or "", caller.name, fork_request)
        spec = await self._renew(fork, saved)
        spec = replace(await self._begin_fork(spec, origin), kernel_name="", origin="")
        record = saved.record
        if record.main_kernel is not None:
            # A notebook's kernel becomes the fork's default context.
            kernels = [replace(k, context=k.context or "default") for k in record.kernels]
            record = replace(record, kernels=kernels)

        async def start() -> Sandbox:
            manager = self.manager_of(spec)
            async with origin.files() as files:
                sandbox = await manager.restore(spec, record, files)
            try:
                if not request.keep_seeds:  # before any caller, or a later server, can find it
                    await reseed(sandbox)
            except BaseException:
                await asyncio.shield(manager.stop(sandbox))
                raise
            return sandbox

        info = await self._service.add(fork, start, caller=caller)
        assert fork.sandbox is not None
        await self._record_fork(fork.sandbox, origin)
        return info

    async def _begin_fork(self, spec: SandboxSpec, origin: _Origin) -> SandboxSpec:
        """Return the spec of a fork. It has none of the hosts that a person allowed for the original alone."""
        grant = intersect_grants(spec.grant, origin.now)
        spec = replace(spec, grant=grant, kernel_id="", notebook="", consent_id=secrets.token_hex(8))
        return await asyncio.to_thread(self._policy.with_consent, spec)

    async def _record_fork(self, sandbox: Sandbox, origin: _Origin) -> None:
        detail = {"event": "forked", "snapshot": "", "name": "", **origin.detail}
        await self._service.registry.audit().arecord("lifecycle", sandbox.id, detail=detail)

    async def _fork_kernel(self, origin: _Origin, request: ForkRequest, caller: Caller) -> SandboxInfo:
        saved = origin.saved
        if self.start_kernel is None or saved.record.main_kernel is None:
            raise Conflict("only a notebook's kernel on this server can be forked into a kernel", field="as_kernel")
        fork = ManagedSandbox("", self._service.registry.server_owner, saved.request, kind="notebook")
        spec = await self._renew(fork, saved)
        spec = await self._begin_fork(spec, origin)
        async with self._service.quotas.room_for_kernel(), origin.files() as files:
            kernel_id = await self.start_kernel(Restoration(spec, saved.record, files))
        kernel = SandboxedKernel.find(kernel_id=kernel_id)
        if kernel is None or kernel.sandbox is None:
            raise RuntimeFailed("the kernel ended immediately")
        await self._record_fork(kernel.sandbox, origin)
        if not request.keep_seeds:
            await reseed(kernel.sandbox)
        return await self._service.registry.get(kernel_id, caller=caller)


class _Written(msgspec.Struct):
    record: msgspec.Raw
    request: SandboxRequest
    session: SessionRecord | None = None


class Saved(msgspec.Struct):
    """The description of a sandbox that is saved with its snapshot.

    Parameters
    ----------
    record : Record
    request : SandboxRequest
    session : SessionRecord or None
        None for a notebook's sandbox.
    """

    record: Record
    request: SandboxRequest
    session: SessionRecord | None


@dataclass(frozen=True)
class _Origin:
    """The saved state from which a fork starts.

    Parameters
    ----------
    saved : Saved
    files : callable
        Returns an asynchronous context manager that provides the directory for ``SandboxManager.restore``.
    detail : dict
        Entries for the audit log.
    now : Grant
        The present grant of the original sandbox, if it is running. The fork's grant cannot exceed it.
    """

    saved: Saved
    files: Callable[[], contextlib.AbstractAsyncContextManager[Path]]
    detail: dict[str, str]
    now: Grant


def open_store(policy: Policy) -> SnapshotStore:
    """Open the snapshot store of a state directory, and create the directory if needed. Raises InvalidConfig."""
    policy.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return SnapshotStore(
        policy.state_path,
        secret=policy.snapshot_secret(),
        max_bytes=policy.max_snapshot_bytes,
        max_count=policy.max_snapshots,
    )


def read_saved(snapshot: Snapshot) -> Saved:
    """Read the description that is saved with a snapshot. Raises RuntimeFailed."""
    try:
        found = msgspec.json.decode(snapshot.meta.record, type=_Written)
        return Saved(Record.from_bytes(bytes(found.record)), found.request, found.session)
    except ValueError as error:
        raise RuntimeFailed(f"snapshot {snapshot.id} of another release cannot be read: {error}") from None


def _label(info: SandboxInfo) -> str:
    """Return the id that a sandbox keeps across restarts: its own id, or the kernel's id for a notebook's sandbox."""
    return info.kernels[0].id if info.kind == "notebook" and info.kernels else info.id


def describe(snapshot: Snapshot) -> SnapshotInfo:
    """Return a snapshot's description for the API."""
    spec = read_saved(snapshot).record.spec
    return SnapshotInfo(
        id=snapshot.id,
        sandbox=snapshot.meta.sandbox,
        owner=snapshot.meta.owner,
        name=snapshot.meta.name,
        note=snapshot.meta.note,
        parent=snapshot.meta.parent,
        created=snapshot.meta.created,
        size=snapshot.size,
        cost=snapshot.cost,
        is_folder_kept=spec.workspace is None,
    )
