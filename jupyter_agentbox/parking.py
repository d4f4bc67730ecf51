"""Parked sessions: saved to the disk, using neither memory nor processor, until their next use wakes them.

A parked session is a snapshot of kind ``park``, and a lock in the state directory that the server which knows it holds;
the next server takes over those whose lock is free. All on the link's thread.
"""

from __future__ import annotations

import asyncio
import logging
import shutil

from .errors import AgentboxError, Conflict
from .models import SnapshotRequest
from .record import Lock
from .session import Session
from .sessions import Sessions
from .snapshotting import Snapshots, read_saved
from .spec import Cause, End

log = logging.getLogger(__name__)

# A method of the store is called `list`.
Found = list[Session]


class Parker:
    """Parks and wakes the sessions of one server.

    Parameters
    ----------
    sessions : Sessions
    snapshots : Snapshots
    """

    def __init__(self, sessions: Sessions, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._directory = sessions.policy.state_path / "parked"
        self._locks: dict[str, Lock] = {}
        sessions.parking = self

    async def park(self, session: Session) -> None:
        """Save it to the disk and free what it uses. Raises Conflict while it is in use."""
        sandbox = session.running()
        _check_unused(session)
        snapshot = await self._snapshots.save(session, SnapshotRequest(), kind="park")
        try:
            _check_unused(session)
            session.running()
            if not self._take_lock(snapshot.id):
                raise Conflict(f"sandbox {session.id!r} was parked by another server at the same moment")
        except AgentboxError:
            await asyncio.to_thread(self._snapshots.store.delete, snapshot.id, session.owner)
            raise
        session.close()
        session.sandbox, session.parked = None, snapshot.id
        manager = self._snapshots.manager_of(sandbox.spec)
        await manager.stop(sandbox, End(Cause.STOPPED, 0, "it was parked"))

    async def wake(self, session: Session) -> None:
        """Start it again where it was, with its own ids. It stays parked when that fails."""
        assert session.parked is not None
        snapshot = await asyncio.to_thread(self._snapshots.store.get, session.parked, session.owner)
        saved = read_saved(snapshot)
        spec = await self._snapshots.renew(session, snapshot, saved)
        manager = self._snapshots.manager_of(spec)
        async with self._snapshots.checked_out(snapshot) as files, manager.starting:
            sandbox = await manager.restore(spec, saved.record, files)
        session.attach(sandbox)
        await asyncio.to_thread(session.save)
        await self._snapshots.note(sandbox, "woken", snapshot)
        await self.forget(session)
        session.touch()

    async def forget(self, session: Session) -> None:
        """Remove what was saved."""
        snapshot_id, session.parked = session.parked, None
        if snapshot_id is not None:
            await asyncio.to_thread(self._snapshots.store.delete, snapshot_id, session.owner)
            self._drop_lock(snapshot_id)

    async def recover(self) -> Found:
        """Make the sessions again that an earlier server has parked, and clear away what it left half done."""
        await asyncio.to_thread(self._snapshots.store.sweep)
        found = []
        for snapshot in await asyncio.to_thread(self._snapshots.store.list):
            if snapshot.meta.kind != "park" or snapshot.id in self._locks:
                continue
            try:
                record = read_saved(snapshot).session
            except AgentboxError as error:
                log.warning("a parked sandbox is not taken back: %s", error)
                continue
            if record is not None and self._take_lock(snapshot.id):
                session = Session.of(record)
                session.parked = snapshot.id
                found.append(session)
        return found

    def _take_lock(self, snapshot_id: str) -> bool:
        directory = self._directory / snapshot_id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Lock(directory)
        if not lock.acquire():
            return False
        self._locks[snapshot_id] = lock
        return True

    def _drop_lock(self, snapshot_id: str) -> None:
        lock = self._locks.pop(snapshot_id, None)
        if lock is not None:
            shutil.rmtree(self._directory / snapshot_id, ignore_errors=True)
            lock.release()

    def close(self) -> None:
        """Let go of those that are parked, for a successor to take over."""
        locks, self._locks = self._locks, {}
        for lock in locks.values():
            lock.release()


def _check_unused(session: Session) -> None:
    if session.uses:
        raise Conflict(f"sandbox {session.id!r} is in use; wait for the calls on it to end")
