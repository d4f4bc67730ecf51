"""Park sandboxes: save them to disk, where they use neither memory nor processor, until the next use wakes them.

A parked sandbox consists of a snapshot of kind ``park``, and a lock in the state directory. The server that manages the
parked sandbox holds the lock; the next server takes over those whose lock is free. Parking saves the snapshot before
it ends the sandbox. Waking removes the snapshot after the record of the woken sandbox is written. At least one of the
two therefore exists at every moment, and if both exist, the running one wins.

Calls wake sandboxes. A notebook's kernel is also woken by any message of a client: its ``kernels.sandboxed_kernel``
keeps the endpoints open while it is parked. Everything runs on the link thread.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from jupyter_agentbox.errors import AgentboxError, Conflict
from jupyter_agentbox.kernels.parked_kernel import ParkedKernel, Restoration
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.models import SnapshotRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.thread import LinkThread, on_link_thread
from jupyter_agentbox.sandbox.manager import MAX_STARTING, Listed, SandboxManager
from jupyter_agentbox.sandbox.record import KernelRecord, Lock, is_owned
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.sandbox.tokens import TokenStore
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.service.service import SandboxService
from jupyter_agentbox.spec import Cause, End, SandboxSpec
from jupyter_agentbox.storage.snapshots import Snapshot

from .live_snapshots import LiveSnapshots, Saved, open_store, read_saved
from .retention import keep_removing

log = logging.getLogger(__name__)

#: Maximum number of seconds between two checks for idle kernels.
CHECK_INTERVAL = 5.0
#: Seconds that another server may take to end a sandbox after it saved it to park it, and seconds between two checks.
PARKING_TIMEOUT, PARKING_INTERVAL = 15.0, 0.1

# An alias, because a method of the store is named `list`.
Found = list[ManagedSandbox]
Kernels = list[ParkedKernel]


class Parker:
    """Implementation of parking and waking for the sandboxes of one server.

    Parameters
    ----------
    service : SandboxService
    snapshots : LiveSnapshots

    Attributes
    ----------
    on_parked : callable
        Called with the id of each kernel that was parked, on the link thread.
    on_woken : callable
        Called with the id of each kernel that was woken, before the kernel sends anything, on the link thread.
    """

    def __init__(self, service: SandboxService, snapshots: LiveSnapshots) -> None:
        self.on_parked: Callable[[str], object] = lambda kernel_id: None
        self.on_woken: Callable[[str], object] = lambda kernel_id: None
        self.service = service
        self.snapshots = snapshots
        self._directory = service.policy.state_path / "parked"
        self._tokens = TokenStore(service.policy.state_path)
        self._locks: dict[str, Lock] = {}
        self._watch_tasks: list[asyncio.Future[None]] = []
        # A caller and the policy may park the same sandbox at the same time.
        self._parking_locks: WeakKeyDictionary[ManagedSandbox, asyncio.Lock] = WeakKeyDictionary()
        #: Held while a sandbox is woken. Decompressing more than can start only slows down those that are starting.
        self.start_permits = asyncio.Semaphore(MAX_STARTING)
        service.parker = self

    # -- sandboxes and kernels --------------------------------------------------------------------

    async def park(self, managed: ManagedSandbox) -> None:
        """Save a sandbox to disk and free its resources. Raises Conflict while it is in use."""
        async with self._parking_locks.setdefault(managed, asyncio.Lock()):
            if managed.parked is None:
                await self._park(managed)

    async def _park(self, managed: ManagedSandbox) -> None:
        sandbox = managed.running()
        _check_unused(managed)
        if managed.kind == "notebook":
            kernel = SandboxedKernel.find(sandbox_id=sandbox.id)
            if kernel is None:
                raise Conflict("its kernel does not belong to this server")
            await kernel.park(lambda sandbox: self._save_kernel(managed, sandbox))
            managed.mark_parked(kernel.parked)
            self.on_parked(sandbox.spec.kernel_id)
            return
        snapshot = await self._save(managed, sandbox)
        managed.close()
        managed.sandbox, managed.parked = None, snapshot.id
        manager = self.snapshots.manager_of(sandbox.spec)
        await manager.stop(sandbox, End(Cause.STOPPED, 0, "it was parked"))

    async def _save(self, managed: ManagedSandbox, sandbox: Sandbox) -> Snapshot:
        used = managed.last_used
        snapshot = await self.snapshots.save(managed, SnapshotRequest(), kind="park")
        try:
            if not self._take_lock(snapshot.id):
                raise Conflict(f"sandbox {managed.id!r} was parked by another server at the same time")
            await self._move_tokens(sandbox.id, snapshot.id)
            # From here until the sandbox is marked as parked, nothing may be awaited. A call that has begun keeps the
            # sandbox running, and so does a call that has already ended, because its effect may not have been saved.
            _check_unused(managed, used)
            managed.running()
        except AgentboxError:
            await self._move_tokens(snapshot.id, sandbox.id)
            await self.remove(snapshot.id, managed.owner)
            raise
        return snapshot

    async def _save_kernel(self, managed: ManagedSandbox, sandbox: Sandbox) -> ParkedKernel:
        snapshot = await self._save(managed, sandbox)
        return self._parked(snapshot, read_saved(snapshot))

    async def wake(self, managed: ManagedSandbox) -> None:
        """Start a parked sandbox from its saved state. It keeps its ids. If the start fails, it stays parked."""
        assert managed.parked is not None
        if managed.kind == "notebook":
            kernel = SandboxedKernel.find(sandbox_id=managed.id)
            if kernel is None:
                raise Conflict("the kernel was shut down")
            await kernel.wake()
            managed.running()
            return
        snapshot = await asyncio.to_thread(self.snapshots.store.get, managed.parked, managed.owner)
        saved = read_saved(snapshot)
        spec = await self.snapshots.renew(managed, snapshot, saved)
        manager = self.snapshots.manager_of(spec)
        async with self.start_permits, self.snapshots.checked_out(snapshot) as files, manager.starting:
            sandbox = await manager.restore(spec, saved.record, files)
        managed.attach(sandbox)
        await asyncio.to_thread(managed.save)
        await self.snapshots.note(sandbox, "woken", snapshot)
        await self._move_tokens(snapshot.id, sandbox.id)
        await self.forget(managed)
        managed.touch()

    async def forget(self, managed: ManagedSandbox) -> None:
        """Delete the saved state of a sandbox that is no longer parked."""
        snapshot_id, managed.parked = managed.parked, None
        if snapshot_id is not None:
            if managed.sandbox is not None:
                await self._move_tokens(snapshot_id, managed.sandbox.id)
            await self.remove(snapshot_id, managed.owner)

    async def remove(self, snapshot_id: str, owner: str) -> None:
        """Delete the saved state of a parked sandbox, and its tokens."""
        await asyncio.to_thread(self.snapshots.store.delete, snapshot_id, owner)
        self._drop_lock(snapshot_id)

    async def _move_tokens(self, old: str, new: str) -> None:
        await asyncio.to_thread(self._tokens.carry, old, new)

    # -- recovery --------------------------------------------------------------------------------

    async def recover(self) -> Found:
        """Return the sandboxes that an earlier server parked, and remove what it left unfinished."""
        found = []
        for snapshot, saved in await self._find_unmanaged():
            if saved.session is not None and await self._take(snapshot, saved):
                managed = ManagedSandbox.of(saved.session)
                managed.parked = snapshot.id
                found.append(managed)
        return found

    @on_link_thread
    async def recover_kernels(self, origin: str) -> Kernels:
        """Take over the parked kernels of an earlier server with the root directory `origin`. From any event loop."""
        found: dict[str, _SavedKernel] = {}
        for snapshot, saved in await self._find_unmanaged():
            record = saved.record
            is_kernel = saved.session is None and record.main_kernel is not None
            if is_kernel and record.spec.origin == origin and await self._take(snapshot, saved):
                older = found.pop(record.spec.kernel_id, None)
                if older is not None:
                    await older.forget()
                found[record.spec.kernel_id] = self._parked(snapshot, saved)
        return list(found.values())

    async def _find_unmanaged(self) -> list[tuple[Snapshot, Saved]]:
        """Return the parked sandboxes whose lock this server does not hold, oldest first."""
        try:
            await asyncio.to_thread(self.snapshots.store.sweep)
            await asyncio.to_thread(self._sweep)
        except OSError as error:
            log.error("cannot remove leftovers of parked sandboxes: %s", error)
        found = []
        for snapshot in await asyncio.to_thread(self.snapshots.store.list):
            if snapshot.meta.kind == "park" and snapshot.id not in self._locks:
                try:
                    found.append((snapshot, read_saved(snapshot)))
                except AgentboxError as error:
                    log.warning("cannot adopt a parked sandbox: %s", error)
        return found

    async def _take(self, snapshot: Snapshot, saved: Saved) -> bool:
        """Take over a parked sandbox, unless another server manages it or is parking it at the moment."""
        origin, own = saved.record.id, SandboxManager.all_shared(self.service.policy.state_path)
        for _ in range(int(PARKING_TIMEOUT / PARKING_INTERVAL)):
            # If this process owns the original sandbox, that one is running and wins.
            is_own = any(origin in manager.sandboxes for manager in own)
            if is_own or not await asyncio.to_thread(is_owned, self._directory.parent / "sandboxes" / origin):
                try:
                    return self._take_lock(snapshot.id)
                except OSError as error:
                    log.error("cannot adopt the sandbox that is parked as snapshot %s: %s", snapshot.id, error)
                    return False
            await asyncio.sleep(PARKING_INTERVAL)
        return False

    def _sweep(self) -> None:
        """Remove the locks that a killed server left of sandboxes that it had just woken or ended."""
        for directory in self._directory.glob("*"):
            with suppress(OSError, AgentboxError):
                if directory.name not in self._locks and not self.snapshots.store.exists(directory.name):
                    _remove_unheld(directory)

    def _parked(self, snapshot: Snapshot, saved: Saved) -> _SavedKernel:
        kernel = saved.record.main_kernel
        assert kernel is not None
        record = saved.record
        return _SavedKernel(self, snapshot.id, snapshot.meta.owner, record.id, record.spec, kernel, record.asks)

    # -- idle kernels ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start to park idle kernels and remove old snapshots, as policy says. May be called from any thread."""
        asyncio.run_coroutine_threadsafe(self._start(), LinkThread.instance().loop)

    async def _start(self) -> None:
        policy = self.service.policy
        if policy.park_kernels_after:
            self._watch_tasks.append(asyncio.ensure_future(self._watch()))
        if policy.snapshot_max_age:
            self._watch_tasks.append(asyncio.ensure_future(keep_removing(self.snapshots, policy.snapshot_max_age)))

    async def _watch(self) -> None:
        after = self.service.policy.park_kernels_after
        while True:
            await asyncio.sleep(min(CHECK_INTERVAL, after / 4))
            for managed in self.service.registry.notebooks():
                if managed.state != "running" or managed.uses or managed.sandbox is None:
                    continue
                try:
                    if await managed.sandbox.is_quiet_for(after):
                        await self.park(managed)
                except (AgentboxError, OSError) as error:
                    # Keep it running rather than lose it. Parking is retried once it has been idle that long again.
                    log.warning("the kernel of sandbox %s could not be parked and keeps running: %s", managed.id, error)

    # -- locks -----------------------------------------------------------------------------------

    def _take_lock(self, snapshot_id: str) -> bool:
        directory = self._directory / snapshot_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Lock(directory)
        if not lock.acquire():
            return False
        self._locks[snapshot_id] = lock
        if not self.snapshots.store.exists(snapshot_id):
            self._drop_lock(snapshot_id)  # another server woke or ended it just before
            return False
        return True

    def _drop_lock(self, snapshot_id: str) -> None:
        lock = self._locks.pop(snapshot_id, None)
        if lock is not None:
            shutil.rmtree(self._directory / snapshot_id, ignore_errors=True)
            lock.release()

    def close(self) -> None:
        """Release the parked sandboxes for a later server to take over. May be called from any thread."""
        for task in self._watch_tasks:
            LinkThread.instance().loop.call_soon_threadsafe(task.cancel)
        locks, self._locks = self._locks, {}
        for lock in locks.values():
            lock.release()


@dataclass(frozen=True)
class _SavedKernel:
    """Implementation of :class:`~jupyter_agentbox.kernels.parked_kernel.ParkedKernel`."""

    parker: Parker
    snapshot_id: str
    owner: str
    sandbox_id: str
    spec: SandboxSpec
    kernel: KernelRecord
    asks: list[dict[str, Any]]

    def waking(self) -> AbstractContextManager[None]:
        return self.parker.service.quotas.waking(self.spec.kernel_id)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Restoration]:
        async with self.parker.start_permits, self._open() as found:
            yield found

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Restoration]:
        snapshots = self.parker.snapshots
        snapshot = await asyncio.to_thread(snapshots.store.get, self.snapshot_id, self.owner)
        saved = read_saved(snapshot)
        managed = ManagedSandbox("", self.owner, saved.request, kind="notebook")
        # Querying the package clients and verifying the files run concurrently.
        renewal = asyncio.ensure_future(snapshots.renew(managed, snapshot, saved))
        try:
            async with snapshots.checked_out(snapshot) as files:
                yield Restoration(await renewal, saved.record, files)
        finally:
            renewal.cancel()
            await asyncio.wait([renewal])
            if not renewal.cancelled():
                renewal.exception()  # retrieves the exception: if the checkout failed, nothing else does

    def moved(self, sandbox: Sandbox) -> None:
        self.parker.service.move_kernel(self.sandbox_id, sandbox)
        self.parker.on_woken(self.spec.kernel_id)

    async def woken(self, sandbox: Sandbox) -> None:
        await asyncio.to_thread(TokenStore(self.parker.service.policy.state_path).carry, self.snapshot_id, sandbox.id)
        detail = {"event": "woken", "snapshot": self.snapshot_id, "name": ""}
        with suppress(AgentboxError):
            await self.parker.service.registry.audit().arecord("lifecycle", sandbox.id, detail=detail)
        await self.forget()

    async def forget(self) -> None:
        try:
            await self.parker.remove(self.snapshot_id, self.owner)
        except (AgentboxError, OSError) as error:
            log.error("cannot delete the parked state of kernel %s: %s", self.spec.kernel_id, error)


def list_parked(policy: Policy) -> list[Listed]:
    """Return the parked sandboxes of a state directory, whichever server parked them, oldest first. Blocks."""
    if not (policy.state_path / "snapshots").is_dir():
        return []
    found = []
    for snapshot in open_store(policy).list():
        if snapshot.meta.kind == "park":
            with suppress(AgentboxError):  # the snapshot was made by another release
                record = read_saved(snapshot).record
                spec, folder = record.spec, str(record.spec.workspace or "")
                found.append(
                    Listed(
                        record.id, spec.profile, spec.kernel_id, spec.owner, record.runtime, folder, record.created,
                        "parked", 0,
                    )
                )  # fmt: skip
    return found


def _remove_unheld(directory: Path) -> None:
    lock = Lock(directory)
    if lock.acquire():
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def _check_unused(managed: ManagedSandbox, since: float | None = None) -> None:
    if managed.uses or since not in (None, managed.last_used):
        raise Conflict(f"sandbox {managed.id!r} is in use; wait for the calls on it to end")
