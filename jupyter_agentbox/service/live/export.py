"""Export snapshots as files, to keep them elsewhere or move them to another machine, and import them again.

``storage.snapshots`` signs exported files, and imports only files that are signed with its own key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterable, Iterator
from functools import partial
from typing import IO

from jupyter_agentbox.errors import AgentboxError, LimitReached, NotAuthorized, TooLarge
from jupyter_agentbox.models import SnapshotInfo
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService
from jupyter_agentbox.spec import MIB, format_size
from jupyter_agentbox.storage.snapshots import Snapshot, SnapshotMeta

from .live_snapshots import LiveSnapshots, describe, read_saved

#: Concurrent exports and imports of one caller. Each one takes a snapshot's space on the disk.
MAX_TRANSFERS = 2
#: Bytes of a file in addition to the snapshot's own: names and signatures.
_EXTRA = 128 * MIB
_PIECE = MIB


class SnapshotTransfer:
    """Exporter and importer of the snapshots of one server.

    Parameters
    ----------
    service : SandboxService
    snapshots : LiveSnapshots
    """

    def __init__(self, service: SandboxService, snapshots: LiveSnapshots) -> None:
        self._policy = service.policy
        self._snapshots = snapshots
        self._transfers: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def export(self, snapshot_id: str, *, caller: Caller) -> Iterator[bytes]:
        """Return a generator of the bytes of a snapshot's file. The generator blocks.

        Raises
        ------
        NotFound
        Damaged, LimitReached
            Raised by the generator, before its first bytes.
        """
        found = await self._snapshots.find(snapshot_id, caller)
        await self._snapshots.record_event("exported", found, caller)  # if this fails, nothing is exported

        def chunks() -> Iterator[bytes]:
            with self._permit(caller):
                yield from self._snapshots.store.export(found.id, found.meta.owner)

        return chunks()

    async def import_(self, chunks: AsyncIterable[bytes], *, caller: Caller) -> SnapshotInfo:
        """Create a snapshot from a file. The caller becomes its owner.

        Raises
        ------
        Damaged
            The file was changed or truncated, or was exported by another store.
        LimitReached, TooLarge
        NotAuthorized
            The snapshot contains a notebook's folder, and the caller may not use kernels.
        """
        caller.check_unscoped("import a snapshot")
        with self._permit(caller):
            store = await asyncio.to_thread(lambda: self._snapshots.store)
            # Receive the whole file first: a slow sender then blocks no thread, and the file is verified in one pass.
            with await asyncio.to_thread(lambda: tempfile.TemporaryFile(dir=self._policy.state_path)) as file:
                limit, size = self._policy.max_snapshot_bytes + _EXTRA, 0
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limit:
                        raise TooLarge(
                            f"the file is larger than the limit of {format_size(limit)}",
                            setting="Policy.max_snapshot_bytes",
                        )
                    await asyncio.to_thread(file.write, chunk)
                check = partial(_check, caller)
                work = asyncio.ensure_future(asyncio.to_thread(store.import_, _read(file), caller.name, check))
                try:
                    snapshot = await asyncio.shield(work)
                except asyncio.CancelledError:
                    await asyncio.wait([work])  # a thread is reading the file
                    if work.exception() is None:
                        await self._delete(work.result())
                    raise
        try:
            await self._snapshots.record_event("imported", snapshot, caller)
        except AgentboxError:
            await self._delete(snapshot)
            raise
        return describe(snapshot)

    async def _delete(self, snapshot: Snapshot) -> None:
        await asyncio.to_thread(self._snapshots.store.delete, snapshot.id, snapshot.meta.owner)

    @contextlib.contextmanager
    def _permit(self, caller: Caller) -> Iterator[None]:
        with self._lock:
            if self._transfers[caller.name] >= MAX_TRANSFERS:
                raise LimitReached(f"you have {MAX_TRANSFERS} exports or imports in progress; wait for one to end")
            self._transfers[caller.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._transfers[caller.name] -= 1
                self._transfers += Counter()  # drops counters that are zero


def _read(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0, os.SEEK_SET)
    return iter(partial(file.read, _PIECE), b"")


def _check(caller: Caller, meta: SnapshotMeta) -> None:
    """Refuse a snapshot that mounts a notebook's folder if the caller may not use kernels."""
    saved = read_saved(Snapshot(id="in the file", meta=meta, size=0, cost=0))
    if saved.record.spec.workspace is not None and saved.request.tenant is None and not caller.has_kernels:
        raise NotAuthorized("the snapshot mounts a notebook's folder, and you have no permission to use kernels")
