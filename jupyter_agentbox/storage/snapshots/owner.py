"""Manage one owner's part of the store: a directory with a lock, the snapshots, and the packs that they share.

    owners/<hash of the owner>/
        owner, lock
        packs/<id>                   chunks that this snapshot added
        snapshots/<id>/head          description
        snapshots/<id>/table         location of its chunks
        snapshots/<id>/image/        memory that is stored as it was written
        snapshots/<id>/packed/       memory that is stored compressed

A snapshot exists while its directory has its final name. A single rename creates it, and another one deletes it.
Directories with temporary names are removed by the next process that holds the lock.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from jupyter_agentbox.errors import Conflict, Damaged, LimitReached, NotFound
from jupyter_agentbox.linux import GONE, NEW, remove_tree, try_lock, write_atomically

from .keys import Keys, read_regular, write_new
from .pages import PAGE, Table, open_regular
from .values import Snapshot, SnapshotMeta, check_id

#: Seconds that a commit or delete waits for another operation of the same owner.
LOCK_TIMEOUT = 120.0
#: Maximum number of snapshots that are searched for the chunks of a new one.
MAX_RELATIVES = 4
_MAX_HEAD = 16 * 1024 * 1024
_MAX_TABLE = 2 * 1024 * 1024 * 1024
_PUNCH_HOLE = 0x02 | 0x01  # and keep the file's size
#: Nanoseconds after which another change of a file is certain to change its timestamp, on every kernel.
_SETTLED = 100_000_000


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a snapshot, in a file small enough to be read for a listing."""

    id: str
    serial: int
    meta: SnapshotMeta
    size: int
    packs: list[str]
    dropped: dict[str, int]


class CachedHead(NamedTuple):
    """Cached facts about a snapshot: identity of its head file, the head, and the bytes that its directory uses."""

    file: tuple[int, int, int, int]
    head: Head
    usage: int


#: Cache by snapshot id, for one owner. Snapshots never change, and there may be thousands.
Cache = dict[str, CachedHead]


def folder_name(owner: str) -> str:
    """Return the name of an owner's directory. It is a hash, because an owner's name may contain anything."""
    return blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@contextmanager
def locked(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Hold a file lock inside the block. Raises Conflict after `timeout` seconds."""
    with try_lock(path, timeout=timeout) as is_held:
        if not is_held:
            raise Conflict("another operation on this owner's snapshots is in progress; try again later")
        yield


class OwnerFolder:
    """One owner's snapshots and packs. Methods that change something require the lock; reading does not.

    Data that an existing snapshot refers to never changes. So the only event that can disturb a reader is the deletion
    of the snapshot that it reads.
    """

    def __init__(self, path: Path, owner: str, keys: Keys, cache: Cache) -> None:
        self.path, self.owner, self.keys = path, owner, keys
        self._cache = cache
        self.packs, self.snapshots = path / "packs", path / "snapshots"
        self.hash_key = keys.derive("chunk", owner)

    def make(self) -> None:
        """Create the owner's directories, unless they exist."""
        for path in (self.path, self.packs, self.snapshots):
            path.mkdir(mode=0o700, exist_ok=True)
        if not (self.path / "owner").exists():
            # With the lock, because its holder removes files that still have temporary names.
            with self.locked():
                write_atomically(self.path / "owner", self.owner.encode("utf-8", "surrogatepass"))

    @contextmanager
    def locked(self, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Hold the owner's lock."""
        with locked(self.path / "lock", timeout):
            yield

    # -- reading -------------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Return the ids of all snapshots, readable or not."""
        with suppress(FileNotFoundError):
            return [name for name in os.listdir(self.snapshots) if not name.startswith(".")]
        return []

    def has(self, snapshot_id: str) -> bool:
        """Return whether the snapshot exists."""
        return (self.snapshots / check_id(snapshot_id)).is_dir()

    def head(self, snapshot_id: str) -> Head:
        """Read the head of a snapshot. Raises NotFound and Damaged."""
        data = self._read(snapshot_id, "head", _MAX_HEAD)
        try:
            head = msgspec.msgpack.decode(data, type=Head)
        except ValueError as error:
            raise Damaged(f"the snapshot's description is malformed: {error}") from None
        if head.id != snapshot_id or head.meta.owner != self.owner:
            raise Damaged("the snapshot's description belongs to another snapshot")
        return head

    def table(self, snapshot_id: str) -> Table:
        """Read the table of a snapshot. Raises NotFound and Damaged."""
        return Table.decode(self._read(snapshot_id, "table", _MAX_TABLE))

    def _read(self, snapshot_id: str, part: str, max_bytes: int) -> bytes:
        folder = self.snapshots / check_id(snapshot_id)
        if folder.is_symlink():
            raise Damaged("the snapshot's directory is a link")
        try:
            data = read_regular(folder / part, max_bytes)
        except FileNotFoundError:
            if folder.is_dir():
                raise Damaged(f"the snapshot's {part} is missing on disk") from None
            raise NotFound(f"snapshot {snapshot_id!r} does not exist") from None
        return self.keys.open(part, self.owner, snapshot_id, data)

    def _load_head(self, snapshot_id: str) -> CachedHead:
        """Return a snapshot's head and disk usage for listings, from the cache if possible.

        A restore reads the head again. An attacker who can change a file and reset its time can change this process as
        well. Raises NotFound and Damaged.
        """
        known = self._cache.get(snapshot_id)
        try:
            found = os.stat(f"{self.snapshots}/{snapshot_id}/head", follow_symlinks=False)
            file = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError:
            file = (0, 0, 0, 0)
        if known is None or known.file != file:
            known = CachedHead(file, self.head(snapshot_id), disk_usage(self.snapshots / snapshot_id))
            if time.time_ns() - file[3] > _SETTLED:
                self._cache[snapshot_id] = known
        return known

    def heads(self) -> tuple[list[Head], dict[str, str]]:
        """Return the readable heads in order of creation, and the error of each unreadable snapshot by id."""
        heads, damaged, ids = [], {}, self.ids()
        for snapshot_id in ids:
            try:
                heads.append(self._load_head(snapshot_id).head)
            except Damaged as error:
                damaged[snapshot_id] = str(error)
            except NotFound as error:
                if not re.fullmatch(r"[0-9a-f]{20}", snapshot_id):
                    damaged[snapshot_id] = str(error)
        for gone in set(self._cache).difference(ids):
            self._cache.pop(gone, None)
        return sorted(heads, key=lambda head: head.serial), damaged

    def snapshot(self, snapshot_id: str) -> Snapshot:
        """Return one snapshot with its cost. Raises NotFound and Damaged."""
        head = self.head(snapshot_id)
        others = [other for other in self.heads()[0] if other.serial < head.serial] if head.packs else []
        charged = {pack for other in others for pack in other.packs}
        return self._describe(head, disk_usage(self.snapshots / head.id), charged)

    def describe_all(self) -> list[Snapshot]:
        """Return all readable snapshots with their costs, oldest first."""
        charged: set[str] = set()
        found = []
        for head in self.heads()[0]:
            with suppress(NotFound, Damaged):  # removed in the meantime
                found.append(self._describe(head, self._load_head(head.id).usage, charged))
            charged.update(head.packs)
        return found

    def _describe(self, head: Head, usage: int, charged: set[str]) -> Snapshot:
        """Describe one snapshot. A pack is charged to the oldest snapshot that needs it."""
        own = [self.packs / pack for pack in head.packs if pack not in charged]
        return Snapshot(id=head.id, meta=head.meta, size=head.size, cost=usage + disk_usage(*own), dropped=head.dropped)

    def relatives(self, meta: SnapshotMeta) -> list[Table]:
        """Return tables of the snapshots most similar to a new one: its ancestors, then others of its sandbox."""
        heads = {head.id: head for head in self.heads()[0] if head.packs}
        chosen: list[str] = []
        ancestor = meta.parent
        while ancestor in heads and ancestor not in chosen:
            chosen.append(ancestor)
            ancestor = heads[ancestor].meta.parent
        chosen += [name for name in reversed(heads) if heads[name].meta.sandbox == meta.sandbox and name not in chosen]
        tables = []
        for name in chosen[:MAX_RELATIVES]:
            with suppress(Damaged, NotFound):
                tables.append(self.table(name))
        return tables

    # -- writing, with the lock held -----------------------------------------------------------

    def remove(self, snapshot_ids: Iterable[str]) -> None:
        """Delete snapshots and free data that no other one needs. Raises NotFound."""
        for snapshot_id in snapshot_ids:
            try:
                (self.snapshots / check_id(snapshot_id)).rename(self.snapshots / f"{GONE}{snapshot_id}")
            except FileNotFoundError:
                raise NotFound(f"snapshot {snapshot_id!r} does not exist") from None
        self.tidy()

    def tidy(self) -> bool:
        """Free data that no snapshot needs and remove what killed processes left; return whether there was any."""
        leftovers = [name for name in os.listdir(self.snapshots) if name.startswith(".")]
        heads, damaged = self.heads()
        used = {pack for head in heads for pack in head.packs}
        strays = [name for name in os.listdir(self.packs) if name not in used]
        if not damaged:
            # Otherwise it is unknown which data the damaged snapshot needs. Its deletion calls this method again.
            for name in strays:
                (self.packs / name).unlink()
            if any(name.startswith(GONE) for name in leftovers):
                live = _live_blocks(self.table(head.id) for head in heads if head.packs)
                for pack, blocks in live.items():
                    _free(self.packs / pack, blocks)
        for name in leftovers:
            remove_tree(self.snapshots / name)
        for path in self.path.glob(f"{NEW}owner-*"):
            path.unlink(missing_ok=True)
        return bool(leftovers or (strays and not damaged))

    def new_folder(self, snapshot_id: str) -> Path:
        """Create the directory of a snapshot under its temporary name."""
        path = self.snapshots / f"{NEW}{snapshot_id}"
        path.mkdir(mode=0o700)
        return path

    def write_parts(self, folder: Path, head: Head, table: Table) -> None:
        """Write the head and the table of a snapshot to its new directory."""
        for part, data in (("head", msgspec.msgpack.encode(head)), ("table", table.encode())):
            write_new(folder / part, self.keys.protect(part, self.owner, head.id, data))

    def publish(self, snapshot_id: str, *, is_durable: bool) -> None:
        """Give a snapshot its final name. If durable, flush its data to the disk before, and the new name afterward."""
        new, pack = self.snapshots / f"{NEW}{snapshot_id}", self.packs / snapshot_id
        if is_durable:
            sync(*new.rglob("*"), new, *filter(Path.exists, [pack]), self.packs, self.path / "owner", self.path)
            sync(self.path.parent)
        new.rename(self.snapshots / snapshot_id)
        if is_durable:
            sync(self.snapshots)

    def choose_dropped(self, table: Table, new: Path, *, max_bytes: int, max_count: int) -> list[str]:
        """Return the unnamed automatic snapshots to delete so that a new one fits, oldest first.

        Raises
        ------
        LimitReached
            It would not fit even without all of them. In that case none has to be deleted.
        """
        heads, damaged = self.heads()
        autos = [head.id for head in heads if head.meta.kind == "auto" and not head.meta.name]
        count = sum(head.meta.kind in ("user", "auto") for head in heads) + len(damaged)
        over = max(0, count + 1 - max_count)
        hint = f", {len(damaged)} of them unreadable" if damaged else ""
        if over > len(autos):
            raise LimitReached(
                f"the owner has {count} snapshots{hint}, and the maximum is {max_count}; delete one",
                setting="Policy.max_snapshots",
            )
        taken = {head.id: self._load_head(head.id).usage for head in heads}
        taken |= {name: disk_usage(self.snapshots / name) for name in damaged}
        if disk_usage(self.packs, new) + sum(taken.values()) <= max_bytes and not over:
            return []
        tables = {head.id: self.table(head.id) for head in heads if head.packs}

        def is_room(count: int) -> bool:
            rest = [head.id for head in heads if head.id not in autos[:count]]
            live = _live_blocks([*(tables[name] for name in rest if name in tables), table])
            total = sum(sum(blocks) for blocks in live.values()) * PAGE + disk_usage(new)
            total += sum(taken[name] for name in (*rest, *damaged))
            return total <= max_bytes

        # It is unknown which data a damaged snapshot needs, so no space can be expected to become free.
        count = bisect_left(range(over, len(autos) + 1), True, key=is_room) + over if not damaged else len(autos) + 1
        if count > len(autos):
            raise LimitReached(
                f"with this snapshot, the owner's snapshots{hint} would exceed {max_bytes} bytes on disk; delete one",
                setting="Policy.max_snapshot_bytes",
            )
        return autos[:count]


def _live_blocks(tables: Iterable[Table]) -> dict[str, bytearray]:
    """Return for each pack one byte per 4 KiB block, which is 1 if a table refers to data in the block."""
    live: dict[str, bytearray] = {}
    for table in tables:
        ends = [0] * len(table.packs)
        for pack, offset, length in zip(table.pack_column, table.offsets, table.lengths, strict=True):
            ends[pack] = max(ends[pack], offset + length)
        maps = []
        for name, end in zip(table.packs, ends, strict=True):
            blocks = live.setdefault(name, bytearray())
            blocks.extend(bytes(max(0, -(-end // PAGE) - len(blocks))))
            maps.append(blocks)
        for pack, offset, length in zip(table.pack_column, table.offsets, table.lengths, strict=True):
            first, last = offset // PAGE, (offset + length - 1) // PAGE
            blocks = maps[pack]
            for block in range(first, last + 1):
                blocks[block] = 1
    return live


def _free(path: Path, blocks: bytearray) -> None:
    """Return unused blocks to the file system. Without support for holes, space is freed only with the whole pack."""
    with suppress(Damaged):
        os.close(open_regular(path, "chunks"))
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(handle).st_size
            if os.fstat(handle).st_blocks * 512 <= sum(blocks) * PAGE:
                return
            blocks.extend(bytes(max(0, -(-size // PAGE) - len(blocks))))
            for dead in re.finditer(rb"\0+", blocks):
                start, end = dead.start() * PAGE, min(size, dead.end() * PAGE)
                if end > start and not _punch(handle, start, end - start):
                    return
        finally:
            os.close(handle)


def _punch(handle: int, start: int, length: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (handle, _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(length))
    return bool(libc.fallocate(*arguments) == 0)


def sync(*paths: Path) -> None:
    """Wait until the contents of files and the names in directories are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def disk_usage(*paths: Path) -> int:
    """Return the bytes that files and trees use on the disk."""
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                total += disk_usage(*path.iterdir())
            else:
                total += path.lstat().st_blocks * 512
    return total
