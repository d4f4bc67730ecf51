"""Parked sandboxes: saved to the disk, using neither memory nor processor, until their next use wakes them.

What is parked is a snapshot of kind ``park``, and a lock in the state directory that the server which knows it holds;
the next server takes over those whose lock is free. It is saved before the sandbox ends, and removed after the woken
one was written down: there is one of the two at every moment, and where there are both, the living one wins.

SandboxService are woken by calls. A notebook's kernel is woken by whatever a client sends it as well: its
``kernels.sandboxed_kernel`` keeps the endpoints meanwhile. All on the link's thread.
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
from jupyter_agentbox.kernels.sandboxed_kernel import Parked, Restoration, SandboxedKernel
from jupyter_agentbox.models import SnapshotRequest
from jupyter_agentbox.policy.policy import Policy
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

#: Seconds between two looks for kernels in which nothing runs, at most.
LOOK_INTERVAL = 5.0
#: Seconds that another server may take to end what it has saved to park it, and between two looks.
PARKING_TIMEOUT, PARKING_INTERVAL = 15.0, 0.1

# A method of the store is called `list`.
Found = list[ManagedSandbox]
Kernels = list[Parked]


class Parker:
    """Parks and wakes the sandboxes of one server.

    Parameters
    ----------
    sessions : SandboxService
    snapshots : LiveSnapshots

    Attributes
    ----------
    on_parked : callable
        Told the id of each kernel that was parked, on the link's thread.
    on_woken : callable
        Told the id of each kernel that goes on, before it says a word, on the link's thread.
    """

    def __init__(self, sessions: SandboxService, snapshots: LiveSnapshots) -> None:
        self.on_parked: Callable[[str], object] = lambda kernel_id: None
        self.on_woken: Callable[[str], object] = lambda kernel_id: None
        self.sessions = sessions
        self.snapshots = snapshots
        self._directory = sessions.policy.state_path / "parked"
        self._tokens = TokenStore(sessions.policy.state_path)
        self._locks: dict[str, Lock] = {}
        self._watching: list[asyncio.Future[None]] = []
        # Somebody may ask for what policy is just doing, or the other way round.
        self._turns: WeakKeyDictionary[ManagedSandbox, asyncio.Lock] = WeakKeyDictionary()
        #: Held by each that is woken: to decompress more than can start only takes time from those that do.
        self.opening = asyncio.Semaphore(MAX_STARTING)
        sessions.parking = self

    # -- sessions, and kernels by their sessions -------------------------------------------------

    async def park(self, session: ManagedSandbox) -> None:
        """Save it to the disk and free what it uses. Raises Conflict while it is in use."""
        async with self._turns.setdefault(session, asyncio.Lock()):
            if session.parked is None:
                await self._park(session)

    async def _park(self, session: ManagedSandbox) -> None:
        sandbox = session.running()
        _check_unused(session)
        if session.kind == "notebook":
            slot = SandboxedKernel.find(sandbox_id=sandbox.id)
            if slot is None:
                raise Conflict("its kernel is none of this server's")
            await slot.park(lambda sandbox: self._save_kernel(session, sandbox))
            session.mark_parked(slot.parked)
            self.on_parked(sandbox.spec.kernel_id)
            return
        snapshot = await self._save(session, sandbox)
        session.close()
        session.sandbox, session.parked = None, snapshot.id
        manager = self.snapshots.manager_of(sandbox.spec)
        await manager.stop(sandbox, End(Cause.STOPPED, 0, "it was parked"))

    async def _save(self, session: ManagedSandbox, sandbox: Sandbox) -> Snapshot:
        used = session.last_used
        snapshot = await self.snapshots.save(session, SnapshotRequest(), kind="park")
        try:
            if not self._take_lock(snapshot.id):
                raise Conflict(f"sandbox {session.id!r} was parked by another server at the same moment")
            await self._carry(sandbox.id, snapshot.id)
            # Nothing is waited for after this until a session is parked: a call that came before keeps it awake, and so
            # does one that is over already, as what it did may not be saved.
            _check_unused(session, used)
            session.running()
        except AgentboxError:
            await self._carry(snapshot.id, sandbox.id)
            await self.remove(snapshot.id, session.owner)
            raise
        return snapshot

    async def _save_kernel(self, session: ManagedSandbox, sandbox: Sandbox) -> Parked:
        snapshot = await self._save(session, sandbox)
        return self._parked(snapshot, read_saved(snapshot))

    async def wake(self, session: ManagedSandbox) -> None:
        """Start it again where it was, with its own ids. It stays parked when that fails."""
        assert session.parked is not None
        if session.kind == "notebook":
            slot = SandboxedKernel.find(sandbox_id=session.id)
            if slot is None:
                raise Conflict("the kernel was shut down")
            await slot.wake()
            session.running()
            return
        snapshot = await asyncio.to_thread(self.snapshots.store.get, session.parked, session.owner)
        saved = read_saved(snapshot)
        spec = await self.snapshots.renew(session, snapshot, saved)
        manager = self.snapshots.manager_of(spec)
        async with self.opening, self.snapshots.checked_out(snapshot) as files, manager.starting:
            sandbox = await manager.restore(spec, saved.record, files)
        session.attach(sandbox)
        await asyncio.to_thread(session.save)
        await self.snapshots.note(sandbox, "woken", snapshot)
        await self._carry(snapshot.id, sandbox.id)
        await self.forget(session)
        session.touch()

    async def forget(self, session: ManagedSandbox) -> None:
        """Remove what was saved."""
        snapshot_id, session.parked = session.parked, None
        if snapshot_id is not None:
            if session.sandbox is not None:
                await self._carry(snapshot_id, session.sandbox.id)
            await self.remove(snapshot_id, session.owner)

    async def remove(self, snapshot_id: str, owner: str) -> None:
        """Remove what was saved, and the tokens for it."""
        await asyncio.to_thread(self.snapshots.store.delete, snapshot_id, owner)
        self._drop_lock(snapshot_id)

    async def _carry(self, old: str, new: str) -> None:
        await asyncio.to_thread(self._tokens.carry, old, new)

    # -- what an earlier server left -------------------------------------------------------------

    async def recover(self) -> Found:
        """Make the sessions again that an earlier server has parked, and clear away what it left half done."""
        found = []
        for snapshot, saved in await self._find_left():
            if saved.session is not None and await self._take(snapshot, saved):
                session = ManagedSandbox.of(saved.session)
                session.parked = snapshot.id
                found.append(session)
        return found

    async def recover_kernels(self, origin: str) -> Kernels:
        """Take over the kernels that an earlier server of a root directory has parked. From any event loop."""
        return await self.sessions.on_thread(self._recover_kernels(origin))

    async def _recover_kernels(self, origin: str) -> Kernels:
        found: dict[str, _ParkedKernel] = {}
        for snapshot, saved in await self._find_left():
            record = saved.record
            is_kernel = saved.session is None and record.main_kernel is not None
            if is_kernel and record.spec.origin == origin and await self._take(snapshot, saved):
                older = found.pop(record.spec.kernel_id, None)
                if older is not None:
                    await older.forget()
                found[record.spec.kernel_id] = self._parked(snapshot, saved)
        return list(found.values())

    async def _find_left(self) -> list[tuple[Snapshot, Saved]]:
        """Return what is parked and nobody's, oldest first."""
        try:
            await asyncio.to_thread(self.snapshots.store.sweep)
            await asyncio.to_thread(self._sweep)
        except OSError as error:
            log.error("what earlier processes left of parked sandboxes was not removed: %s", error)
        found = []
        for snapshot in await asyncio.to_thread(self.snapshots.store.list):
            if snapshot.meta.kind == "park" and snapshot.id not in self._locks:
                try:
                    found.append((snapshot, read_saved(snapshot)))
                except AgentboxError as error:
                    log.warning("a parked sandbox is not taken back: %s", error)
        return found

    async def _take(self, snapshot: Snapshot, saved: Saved) -> bool:
        """Take over what is parked, unless another server has it, or is just parking it and will have it."""
        origin, own = saved.record.id, SandboxManager.all_shared(self.sessions.policy.state_path)
        for _ in range(int(PARKING_TIMEOUT / PARKING_INTERVAL)):
            # Where this process has it that one lives, and wins.
            is_own = any(origin in manager.sandboxes for manager in own)
            if is_own or not await asyncio.to_thread(is_owned, self._directory.parent / "sandboxes" / origin):
                try:
                    return self._take_lock(snapshot.id)
                except OSError as error:
                    log.error("the sandbox that is parked as snapshot %s is not taken back: %s", snapshot.id, error)
                    return False
            await asyncio.sleep(PARKING_INTERVAL)
        return False

    def _sweep(self) -> None:
        """Remove what a server that was killed left of those which it had just woken or ended."""
        for directory in self._directory.glob("*"):
            with suppress(OSError, AgentboxError):
                if directory.name not in self._locks and not self.snapshots.store.exists(directory.name):
                    _remove_unheld(directory)

    def _parked(self, snapshot: Snapshot, saved: Saved) -> _ParkedKernel:
        kernel = saved.record.main_kernel
        assert kernel is not None
        record = saved.record
        return _ParkedKernel(self, snapshot.id, snapshot.meta.owner, record.id, record.spec, kernel, record.asks)

    # -- idle kernels ----------------------------------------------------------------------------

    def start(self) -> None:
        """Park kernels in which nothing runs, and remove old snapshots, if policy says so. From any thread."""
        asyncio.run_coroutine_threadsafe(self._start(), self.sessions.loop)

    async def _start(self) -> None:
        policy = self.sessions.policy
        if policy.park_kernels_after:
            self._watching.append(asyncio.ensure_future(self._watch()))
        if policy.snapshot_max_age:
            self._watching.append(asyncio.ensure_future(keep_removing(self.snapshots, policy.snapshot_max_age)))

    async def _watch(self) -> None:
        after = self.sessions.policy.park_kernels_after
        while True:
            await asyncio.sleep(min(LOOK_INTERVAL, after / 4))
            for session in self.sessions.notebooks():
                if session.state != "running" or session.uses or session.sandbox is None:
                    continue
                try:
                    if await session.sandbox.is_quiet_for(after):
                        await self.park(session)
                except (AgentboxError, OSError) as error:
                    # Better alive than lost; it is tried again when it has been quiet for as long once more.
                    log.warning("kernel of sandbox %s was not parked, and lives on: %s", session.id, error)

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
        """Let go of those that are parked, for a successor to take over. From any thread."""
        for task in self._watching:
            self.sessions.loop.call_soon_threadsafe(task.cancel)
        locks, self._locks = self._locks, {}
        for lock in locks.values():
            lock.release()


@dataclass(frozen=True)
class _ParkedKernel:
    """See :class:`~jupyter_agentbox.kernels.saved.Parked`."""

    parker: Parker
    snapshot_id: str
    owner: str
    sandbox_id: str
    spec: SandboxSpec
    kernel: KernelRecord
    asks: list[dict[str, Any]]

    def waking(self) -> AbstractContextManager[None]:
        return self.parker.sessions.waking(self.spec.kernel_id)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Restoration]:
        async with self.parker.opening, self._opened() as found:
            yield found

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Restoration]:
        snapshots = self.parker.snapshots
        snapshot = await asyncio.to_thread(snapshots.store.get, self.snapshot_id, self.owner)
        saved = read_saved(snapshot)
        session = ManagedSandbox("", self.owner, saved.request, kind="notebook")
        # Package clients are asked, and all bytes verified, at the same time.
        renewal = asyncio.ensure_future(snapshots.renew(session, snapshot, saved))
        try:
            async with snapshots.checked_out(snapshot) as files:
                yield Restoration(await renewal, saved.record, files)
        finally:
            renewal.cancel()
            await asyncio.wait([renewal])
            if not renewal.cancelled():
                renewal.exception()  # looked at: where the checkout failed, nobody else will

    def moved(self, sandbox: Sandbox) -> None:
        self.parker.sessions.moved(self.sandbox_id, sandbox)
        self.parker.on_woken(self.spec.kernel_id)

    async def woken(self, sandbox: Sandbox) -> None:
        await asyncio.to_thread(TokenStore(self.parker.sessions.policy.state_path).carry, self.snapshot_id, sandbox.id)
        detail = {"event": "woken", "snapshot": self.snapshot_id, "name": ""}
        with suppress(AgentboxError):
            await self.parker.sessions.audit().arecord("lifecycle", sandbox.id, detail=detail)
        await self.forget()

    async def forget(self) -> None:
        try:
            await self.parker.remove(self.snapshot_id, self.owner)
        except (AgentboxError, OSError) as error:
            log.error("what kernel %s was parked as was not removed: %s", self.spec.kernel_id, error)


def list_parked(policy: Policy) -> list[Listed]:
    """Return what lies parked in a state directory, whichever server parked it, oldest first. Blocks."""
    if not (policy.state_path / "snapshots").is_dir():
        return []
    found = []
    for snapshot in open_store(policy).list():
        if snapshot.meta.kind == "park":
            with suppress(AgentboxError):  # of another release
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


def _check_unused(session: ManagedSandbox, since: float | None = None) -> None:
    if session.uses or since not in (None, session.last_used):
        raise Conflict(f"sandbox {session.id!r} is in use; wait for the calls on it to end")
