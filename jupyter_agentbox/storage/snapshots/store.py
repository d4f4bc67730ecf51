"""The snapshot store: memory images written by a runtime, and workspaces, stored compactly, privately and verifiably.

The store uses no event loop. Its methods block and are called in worker threads. Any number of processes may use one
store at the same time.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from jupyter_agentbox.errors import AgentboxError, Damaged, InvalidRequest, NotFound
from jupyter_agentbox.linux import open_locked, remove_tree, remove_unowned

from . import transfer
from .compression import pack as pack_file
from .compression import unpack as unpack_file
from .deferred_image import GATE, DeferredImage
from .keys import load_keys
from .owner import Cache, Head, OwnerFolder, folder_name, locked
from .pages import BLOCK, PAGE, Kept, PackReader, PackWriter, Table, changed, hash_big, open_regular
from .tree import Entry, Walk, Writer, disk_errors
from .values import MAX_OWNER, Snapshot, SnapshotMeta, check_id, check_meta

MAX_IMAGE_FILES = 16
#: Kinds that are flushed to the disk. For the other kinds, the sandbox that the snapshot was taken of still exists.
DURABLE = ("user", "park")
#: The only file of an image that consists of raw pages.
PAGES = "pages.img"
#: Maximum bytes of an image that a runtime may wait for while it starts.
EARLY_SIZE = 256 * 1024 * 1024
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class SnapshotStore:
    """The snapshots of one state directory.

    Parameters
    ----------
    state_dir : Path
        The state directory. The store is its ``snapshots``, and the store's key is ``snapshots.key`` beside it.
    secret : bytes, optional
        The administrator's secret, 32 bytes or more. If given, snapshots are encrypted, and authenticated with this
        secret instead of the key.
    max_bytes : int
        Maximum bytes on the disk for one owner, and maximum size of one snapshot as restored.
    max_count : int
        Maximum number of snapshots for one owner, not counting parked kernels and templates.
    """

    def __init__(self, state_dir: Path, *, secret: bytes | None = None, max_bytes: int, max_count: int) -> None:
        self._base = state_dir / "snapshots"
        self._owners, self._live = self._base / "owners", self._base / "live"
        for path in (self._base, self._owners, self._live):
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise AgentboxError(f"{path} is not a directory that only this user can enter; remove it")
        self._keys = load_keys(state_dir, secret)
        self._max_bytes, self._max_count = max_bytes, max_count
        self._locks: dict[Path, int] = {}
        self._mutex = threading.Lock()
        self._verified: set[tuple[int, int, int, int, bytes]] = set()
        self._caches: dict[str, Cache] = {}

    # -- creating ------------------------------------------------------------------------------

    def stage(self) -> Path:
        """Create a private directory with empty ``image`` and ``work``, for :meth:`commit` or :meth:`discard`.

        It exists only as long as this process.
        """
        path = self._live / secrets.token_hex(8)
        # Under the store's lock, so that a sweep cannot remove the directory before it is locked.
        with locked(self._base / "lock"):
            path.mkdir(mode=0o700)
            lock = open_locked(path / "lock", math.inf)
            assert lock is not None
        with self._mutex:
            self._locks[path] = lock
        for name in ("image", "work"):
            (path / name).mkdir(mode=0o700)
        return path

    def discard(self, staged: Path) -> None:
        """Remove a staged directory. It is not an error if the directory does not exist."""
        with self._mutex:
            lock = self._locks.pop(staged, None)
        if lock is None:
            return
        try:
            with suppress(FileNotFoundError):
                for name in os.listdir(staged):
                    if name != "lock":
                        remove_tree(staged / name)
            # A sweep removes any directory without a lock, so no sweep may look at this point.
            with locked(self._base / "lock"):
                remove_tree(staged)
        finally:
            os.close(lock)

    def commit(self, staged: Path, meta: SnapshotMeta) -> Snapshot:
        """Turn the contents of a staged directory into a snapshot, and remove the directory.

        If the process is killed, the snapshot exists completely or not at all. If the method raises, the directory is
        unchanged. A snapshot of a :data:`DURABLE` kind is on the disk when this method returns, and survives a power
        failure.

        Raises
        ------
        InvalidRequest
            A value of `meta`, or the image, is invalid.
        LimitReached, TooLarge
            A limit is exceeded; names the setting. Unnamed automatic snapshots are deleted instead, oldest first, if
            that makes enough room.
        Conflict
            Other operations on the owner's snapshots took too long.
        """
        check_meta(meta)
        if staged not in self._locks:
            raise NotFound("the staged snapshot does not exist")
        folder = self._folder(meta.owner)
        with disk_errors("the snapshot could not be stored"):
            folder.make()
            with folder.locked():
                folder.tidy()
                snapshot_id = secrets.token_hex(10)
                new = folder.new_folder(snapshot_id)
                try:
                    dropped = self._write(folder, snapshot_id, new, staged, meta)
                except BaseException:
                    with suppress(FileNotFoundError):
                        for path in (new / "image").iterdir():
                            path.rename(staged / "image" / path.name)
                    (folder.packs / snapshot_id).unlink(missing_ok=True)
                    remove_tree(new)
                    raise
                folder.publish(snapshot_id, is_durable=meta.kind in DURABLE)
                if dropped:
                    folder.remove(dropped)
                snapshot = folder.snapshot(snapshot_id)
        self.discard(staged)
        return snapshot

    def _write(self, folder: OwnerFolder, snapshot_id: str, new: Path, staged: Path, meta: SnapshotMeta) -> list[str]:
        """Write a snapshot's parts; return the ids of other snapshots that must be deleted to make room."""
        pack, walk = folder.packs / snapshot_id, Walk(staged / "work")
        is_kept = meta.kind == "template" and not self._keys.is_sealed
        is_packed = meta.kind == "park" and not self._keys.is_sealed
        if is_packed:
            (new / "packed").mkdir(mode=0o700)
        relatives = folder.relatives(meta)
        with PackWriter(pack, snapshot_id, self._keys, folder.hash_key, relatives, self._max_bytes) as writer:
            table = writer.table
            for name, handle in _image_files(staged / "image"):
                facts = os.fstat(handle)
                if is_kept:
                    writer.count(facts.st_size)
                    table.kept.append(Kept(name, facts.st_size, hash_big(handle, facts.st_size, folder.hash_key)))
                elif is_packed:
                    writer.count(facts.st_size)
                    table.packed.append(pack_file(handle, name, facts.st_size, new / "packed" / name, folder.hash_key))
                else:
                    entry = Entry(os.fsencode(name), "f", 0o600, facts.st_mtime_ns, facts.st_size)
                    is_raw = name == PAGES
                    grain = PAGE if is_raw else BLOCK
                    table.image.append(writer.add(entry, handle, grain=grain, is_compressed=not is_raw))
            for entry, handle in walk:
                table.work.append(writer.add(entry, handle))
        if not pack.stat().st_size:
            pack.unlink()
        if table.kept:
            (new / "image").mkdir(mode=0o700)
            for kept in table.kept:
                _keep(staged / "image" / kept.name, new / "image" / kept.name)
        heads = folder.heads()[0]
        head = Head(
            id=snapshot_id,
            serial=1 + max((head.serial for head in heads), default=0),
            meta=meta,
            size=writer.size,
            packs=table.packs,
            dropped=dict(walk.dropped),
        )
        folder.write_parts(new, head, table)
        # Parked kernels and templates are limited by the space that they use, not by their number.
        max_count = self._max_count if meta.kind in ("user", "auto") else sys.maxsize
        return folder.choose_dropped(table, new, max_bytes=self._max_bytes, max_count=max_count)

    # -- deleting ------------------------------------------------------------------------------

    def delete(self, snapshot_id: str, owner: str) -> None:
        """Delete a snapshot, readable or not, and free data that no other one needs. Raises NotFound and Conflict."""
        folder = self._folder(owner)
        if not folder.has(snapshot_id):
            raise NotFound(f"snapshot {check_id(snapshot_id)!r} does not exist")
        with folder.locked():
            folder.remove([snapshot_id])

    def sweep(self) -> list[str]:
        """Remove data that killed processes left.

        Returns
        -------
        list of str
            Names of the staged and checked-out directories that were removed.
        """
        with locked(self._base / "lock"):
            removed = remove_unowned(self._live)
        for folder in self._folders():
            with suppress(AgentboxError, OSError), folder.locked(timeout=0.0):
                folder.tidy()
        return removed

    # -- reading -------------------------------------------------------------------------------

    @contextmanager
    def checkout(
        self,
        snapshot_id: str,
        owner: str,
        *,
        verify: Literal["always", "once"] = "always",
        is_early: bool = False,
    ) -> Iterator[Path]:
        """Write a snapshot to a private directory with ``image`` and ``work``, and remove it at the end of the block.

        The caller owns the contents; ``work`` may be renamed to its final path. Files of an image may be hard links to
        the store's own files, so they must not be written to.

        Parameters
        ----------
        snapshot_id, owner : str
        verify : str
            ``once`` skips reading memory that is stored as it was written (``template``), if this process has verified
            it before and its inode, size and modification time are unchanged.
        is_early : bool
            Enter the block as soon as ``work`` is complete, if the image is small. A reader that opens all files of the
            image then waits until they are verified. If verification fails, the files are empty, and `Damaged` is
            raised at the end of the block.

        Raises
        ------
        NotFound
            The owner has no such snapshot.
        Damaged
            A part of the snapshot differs from what was written. No part of it was handed out.
        """
        path = self.stage()
        deferred: DeferredImage | None = None
        try:
            folder = self._folder(owner)
            with _restoring(folder, snapshot_id):
                table = self._read(folder, snapshot_id)
                self._restore_work(folder, table, path)
                for kept in table.kept:
                    source = folder.snapshots / snapshot_id / "image" / kept.name
                    self._restore_kept(folder, source, kept, path, verify == "once")
                deferred = self._restore_image(folder, snapshot_id, table, path / "image", is_early)
            try:
                yield path
            except Exception:
                if deferred is not None:
                    deferred.finish()  # a damaged image is the reason for the other failure
                raise
            if deferred is not None:
                deferred.finish()
        finally:
            if deferred is not None:
                deferred.close()
            self.discard(path)

    def _read(self, folder: OwnerFolder, snapshot_id: str) -> Table:
        head, table = folder.head(snapshot_id), folder.table(snapshot_id)
        if head.packs != table.packs:
            raise Damaged("the snapshot's description was changed on disk")
        return table

    def _restore_work(self, folder: OwnerFolder, table: Table, path: Path) -> None:
        part = "the snapshot's files"
        with (
            PackReader(table, folder.packs, self._keys, folder.hash_key) as reader,
            Writer(path / "work") as writer,
        ):
            reader.skip(table.image)
            for file in table.work:
                handle = writer.add(file.entry)
                if handle is None:
                    continue
                try:
                    reader.write(file, handle, part)
                except BaseException:
                    os.close(handle)
                    raise
                writer.finish(file.entry, handle)

    def _restore_image(
        self, folder: OwnerFolder, snapshot_id: str, table: Table, image: Path, is_early: bool
    ) -> DeferredImage | None:
        """Restore the files of an image that are not stored as they were written; return the deferred image, if any."""
        sizes = {item.name: item.size for item in table.packed}
        sizes |= {os.fsdecode(file.entry.path): file.entry.size for file in table.image}
        if not all(map(_IMAGE_NAME.fullmatch, sizes)):
            raise Damaged("the description of the snapshot's memory is invalid")
        is_deferred = is_early and GATE in sizes and sum(sizes.values()) <= EARLY_SIZE
        handles: dict[str, int] = {}
        deferred: DeferredImage | None = None

        def restore() -> None:
            with _restoring(folder, snapshot_id):
                for item in table.packed:
                    source = folder.snapshots / snapshot_id / "packed" / item.name
                    unpack_file(item, source, handles[item.name], folder.hash_key, _part(item.name))
                with PackReader(table, folder.packs, self._keys, folder.hash_key) as reader:
                    for file in table.image:
                        name = os.fsdecode(file.entry.path)
                        reader.write(file, handles[name], _part(name))
                        os.ftruncate(handles[name], file.entry.size)

        try:
            for name in sizes:
                target = image.parent / GATE if is_deferred and name == GATE else image / name
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                handles[name] = os.open(target, flags, 0o600)
            if is_deferred:
                deferred = DeferredImage(image, handles, restore)
            else:
                restore()
        finally:
            if deferred is None:
                for handle in handles.values():
                    os.close(handle)
        return deferred

    def _restore_kept(self, folder: OwnerFolder, source: Path, kept: Kept, path: Path, is_once: bool) -> None:
        part, target = _part(kept.name), path / "image" / kept.name
        try:
            # A hard link, so that deleting the snapshot in the meantime does not remove the file.
            os.link(source, target, follow_symlinks=False)
        except OSError:
            raise changed(part) from None
        handle = open_regular(target, part)
        try:
            facts = os.fstat(handle)
            if facts.st_size != kept.size:
                raise changed(part)
            # Only this user can enter the directory. An attacker who can change a file and reset its time can change
            # this process as well.
            seen = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, kept.hashes)
            if not (is_once and seen in self._verified):
                if hash_big(handle, kept.size, folder.hash_key) != kept.hashes:
                    raise changed(part)
                if len(self._verified) > 4096:
                    self._verified.clear()
                self._verified.add(seen)
        finally:
            os.close(handle)

    def list(self, owner: str | None = None) -> list[Snapshot]:
        """Return the snapshots of one owner or of all, oldest first, without unreadable ones: see `damaged`."""
        found: list[Snapshot] = []
        for folder in self._folders() if owner is None else (self._folder(owner),):
            found += folder.describe_all()
        return found

    def damaged(self, owner: str) -> dict[str, str]:
        """Return the unreadable snapshots by id, with the reason. They count toward limits and can be deleted."""
        return self._folder(owner).heads()[1]

    def get(self, snapshot_id: str, owner: str) -> Snapshot:
        """Return one snapshot. Raises NotFound, also for another owner's, and Damaged."""
        return self._folder(owner).snapshot(snapshot_id)

    def exists(self, snapshot_id: str) -> bool:
        """Return whether any owner has a snapshot of this id, readable or not."""
        return any(self._owners.glob(f"*/snapshots/{check_id(snapshot_id)}"))

    # -- export and import ---------------------------------------------------------------------

    def export(self, snapshot_id: str, owner: str) -> Iterator[bytes]:
        """Yield a snapshot as one signed file, encrypted if the store is. Raises the errors of :meth:`checkout`."""
        meta = self.get(snapshot_id, owner).meta
        with self.checkout(snapshot_id, owner) as path:
            yield from transfer.write(path, meta, self._keys)

    def import_(
        self, chunks: Iterable[bytes], owner: str, check: Callable[[SnapshotMeta], object] = lambda meta: None
    ) -> Snapshot:
        """Create a snapshot from an exported file. It belongs to the owner who imports it.

        Parameters
        ----------
        chunks : iterable of bytes
        owner : str
        check : callable
            Called with the description before the snapshot is created; raises to refuse it.

        Raises
        ------
        Damaged
            The file was changed or truncated, or was exported by a store with another key. That is the case for another
            machine, unless the administrator has given both machines the same secret.
        LimitReached
        """
        staged = self.stage()
        try:
            with disk_errors("the snapshot could not be imported"):
                meta = transfer.read(chunks, staged, self._keys, self._max_bytes)
            check(meta)
            return self.commit(staged, transfer.adopt(meta, owner, self._folder(owner).ids()))
        finally:
            self.discard(staged)

    # -- folders -------------------------------------------------------------------------------

    def _folder(self, owner: str) -> OwnerFolder:
        if not 0 < len(owner) <= MAX_OWNER or not owner.isprintable():
            raise InvalidRequest("the owner's name is malformed", field="owner")
        cache = self._caches.setdefault(owner, {})
        return OwnerFolder(self._owners / folder_name(owner), owner, self._keys, cache)

    def _folders(self) -> Iterator[OwnerFolder]:
        for path in sorted(self._owners.iterdir()):
            with suppress(OSError, ValueError):
                owner = (path / "owner").read_bytes().decode("utf-8", "surrogatepass")
                if folder_name(owner) == path.name and not path.is_symlink():
                    yield self._folder(owner)


@contextmanager
def _restoring(folder: OwnerFolder, snapshot_id: str) -> Iterator[None]:
    """Translate errors inside the block, and report a snapshot that was deleted in the meantime as not found."""
    try:
        with disk_errors("the snapshot could not be restored"):
            yield
    except Damaged:
        if not folder.has(snapshot_id):  # deleted in the meantime
            raise NotFound(f"snapshot {snapshot_id!r} does not exist") from None
        raise


def _image_files(image: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and an open descriptor of each file. Pages come first, aligned to whole blocks of a pack."""
    names = sorted(os.listdir(image), key=lambda name: (name != PAGES, name))
    if not names or len(names) > MAX_IMAGE_FILES or not all(map(_IMAGE_NAME.fullmatch, names)):
        raise InvalidRequest("the image has no files, too many files, or files that no runtime writes", field="image")
    for name in names:
        handle = open_regular(image / name, "the image")
        try:
            yield name, handle
        finally:
            os.close(handle)


def _keep(source: Path, target: Path) -> None:
    """Move a file into the store, owned by this user and read-only."""
    if source.lstat().st_uid == os.geteuid():
        source.rename(target)
    else:
        # A runtime writes as another user. Only root may link to such a file or change its mode.
        shutil.copyfile(source, target, follow_symlinks=False)
    target.chmod(0o400)


def _part(name: str) -> str:
    return "the snapshot's memory" if name.startswith("pages") else "the snapshot's kernel state"
