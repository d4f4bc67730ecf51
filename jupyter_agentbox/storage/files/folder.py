"""Change files beneath one directory that a sandbox writes to, through the class Folder."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound, TooLarge
from jupyter_agentbox.models.file_entries import Copied, Edited, Entry, Used, make_entry
from jupyter_agentbox.storage.trees import closing, libc

from . import archives
from .atomic import NewFile, Room, check_replaceable, copy_data, look, permissions
from .builder import Builder, check_unchangeable, copy_tree, delete_tree, make_plan
from .paths import Parts, show, write_path
from .transfer import Upload, check_announced
from .tree import Budget, Tree, open_found, translate_os_errors
from .view import MAX_DOWNLOAD, MAX_READ, MAX_TREE, FolderView, read_at

#: Maximum number of entries of a tree to delete.
MAX_DELETE = 2_000_000
_USED_INTERVAL = 2.0


class Folder(FolderView):
    """The files beneath one directory, for listing, reading and changing.

    Parameters
    ----------
    root, hidden, read_only, mount
        See :class:`~jupyter_agentbox.storage.files.view.FolderView`.
    quota : int, optional
        Bytes on disk up to which writes through this object may fill the folder.
    quota_setting : str
        The setting that a refusal over the quota names.
    held : callable
        Returns the bytes of deleted files that are still in use. They count toward the quota.
    free : callable
        Returns the free space of the disk as a Room, or None for no limit.
    """

    def __init__(
        self,
        root: Path,
        hidden: tuple[str, ...] = (),
        quota: int | None = None,
        *,
        read_only: tuple[str, ...] = (),
        mount: str = "/workspace",
        quota_setting: str = "Policy.max_disk",
        held: Callable[[], int] = lambda: 0,
        free: Callable[[], Room | None] = lambda: None,
    ) -> None:
        super().__init__(root, hidden, read_only=read_only, mount=mount)
        self.quota, self._quota_setting = quota, quota_setting
        self._held, self._free = held, free
        self._used = Used(0)
        self._used_until = 0.0
        self._used_lock = threading.Lock()

    def used(self, *, timeout: float = 10.0) -> Used:
        """Return the folder's disk usage, including hidden entries, measured only as far as the quota requires.

        Allocated blocks are counted, so holes of sparse files do not count, and files with several names count once.
        Each name counts as at least 4 KiB, so that a large number of empty files also ends the measurement.
        """
        budget = Budget(20_000_000 if self.quota is None else self.quota // 4096 + 1, timeout)
        total, seen = 0, set()
        beneath = Tree(os.dup(self._tree.fd))
        try:
            for found in beneath.walk(budget):
                status, size = found.status, 4096
                identity = (status.st_dev, status.st_ino)
                if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) or identity not in seen:
                    size = max(size, status.st_blocks * 512)
                    if status.st_nlink > 1:
                        seen.add(identity)
                total += size
                if self.quota is not None and total > self.quota:
                    return Used(total, False)
        finally:
            beneath.close()
        if self.quota is not None and budget.left < 0:
            total = max(total, self.quota + 1)
        return Used(total, budget.reason is None)

    def write(
        self, path: str, data: bytes, *, parents: bool = False, overwrite: bool = True, mode: int | None = None
    ) -> Entry:
        """Write a whole file atomically. An existing file keeps its permission bits.

        Parameters
        ----------
        path : str
            The file. No link is followed.
        data : bytes
            Its whole content.
        parents : bool
            Whether to create missing directories.
        overwrite : bool
            Whether the file may exist already.
        mode : int, optional
            Permission bits to set.
        """
        with self.upload(path, len(data), parents=parents, overwrite=overwrite, mode=mode) as upload:
            upload.write(data)
            return upload.finish()

    def append(self, path: str, data: bytes, *, parents: bool = False) -> Entry:
        """Append to a file, or create it.

        A file with several names is refused, because the change would affect all of them.
        """
        parts = self._parse(path)
        with closing(self._tree.open_parent(parts, make=parents)) as directory, translate_os_errors(write_path(parts)):
            status = look(directory, parts[-1])
            if status is None:
                return self.write(path, data, overwrite=False)
            check_replaceable(status, write_path(parts))
            flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
            with closing(os.open(parts[-1], flags, dir_fd=directory)) as found:
                status = os.fstat(found)
                check_replaceable(status, write_path(parts))
                if status.st_nlink > 1:
                    raise Conflict(
                        f"{show(write_path(parts))} has other names (hard links); write the whole file instead"
                    )
                self._room().take(len(data), write_path(parts))
                flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                with closing(os.open(f"/proc/self/fd/{found}", flags)) as fd:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(fd, view) :]
                    self._add_used(len(data))
                    return make_entry(write_path(parts), os.fstat(fd))

    def upload(
        self,
        path: str,
        size: int | None = None,
        sha256: str | None = None,
        *,
        parents: bool = False,
        overwrite: bool = True,
        mode: int | None = None,
        max_size: int | None = None,
    ) -> Upload[Entry]:
        """Start to write a file of any size; see :class:`~jupyter_agentbox.storage.files.transfer.Upload`."""
        parts = self._parse(path)

        def deliver(file: NewFile, digest: str) -> Entry:
            status = file.commit(mode=mode, overwrite=overwrite)
            self._add_used(file.cost)
            return make_entry(write_path(parts), status)

        if mode is not None and not 0 <= mode <= 0o777:
            raise InvalidRequest("the mode must be permission bits, 0 to 0o777", field="mode")
        file = self._new_file(parts, self._announce(parts, size, sha256, max_size), make=parents)
        try:
            with translate_os_errors(write_path(parts)):
                check_replaceable(look(file.directory, parts[-1]), write_path(parts), overwrite)
        except BaseException:
            file.discard()
            raise
        return Upload(file, size, sha256, deliver)

    def edit(self, path: str, old: str, new: str, *, count: int | None = 1) -> Edited:
        """Replace a text in a file.

        Newlines match the line ends of the file, which may be CRLF, and the replacement takes over the line ends of the
        place. To change line ends, give an `old` with CRLF that is in the file: it is replaced exactly as given.

        Parameters
        ----------
        path : str
            The file. No link is followed.
        old : str
            The text to replace, exactly as in the file apart from line ends.
        new : str
            The replacement.
        count : int, optional
            Expected number of occurrences of `old`; None for any number except 0. All of them are replaced.
        """
        if not old:
            raise InvalidRequest("the text to replace must not be empty", field="old")
        if count is not None and count < 1:
            raise InvalidRequest("the count must be 1 or more", field="count")
        parts = self._parse(path)
        name, before, after = show(write_path(parts)), _encode(old, "old"), _encode(new, "new")
        self._tree.check_name(parts, is_change=True)
        with closing(self._tree.open_file(parts, follow=False)) as fd, translate_os_errors(write_path(parts)):
            status = os.fstat(fd)
            if status.st_size > MAX_READ:
                raise TooLarge(f"{name} has more than the {MAX_READ} bytes that can be edited", field="path")
            data = read_at(fd, 0, status.st_size)
        text = _Lines(data, before, after)
        times = text.count()
        if not times:
            raise Conflict(f"the text does not occur in {name}", field="old")
        if count is not None and times != count:
            wanted = "once" if count == 1 else f"{count} times"
            raise Conflict(
                f"the text occurs in {name} {times} times, not {wanted}; include more context, or set the count",
                field="old",
            )
        if len(data) + times * (len(after) + after.count(b"\n") - len(before)) > MAX_READ:
            raise TooLarge(f"{name} would have more than the {MAX_READ} bytes that can be edited", field="new")
        file = self._new_file(parts, self._room())
        try:
            file.write(text.replace())
            return Edited(make_entry(write_path(parts), file.commit(expect=status)), times)
        finally:
            file.discard()

    def mkdir(self, path: str, *, parents: bool = False, exist_ok: bool = False) -> Entry:
        """Create a directory, and with `parents` also missing ones above it."""
        parts = self._parse(path)
        parent = self._tree.open_parent(parts, make=parents, is_folder=True)
        with closing(parent) as directory, translate_os_errors(write_path(parts)):
            try:
                os.mkdir(parts[-1], dir_fd=directory)
            except FileExistsError:
                existing = look(directory, parts[-1])
                if not exist_ok or existing is None or not stat.S_ISDIR(existing.st_mode):
                    raise
            return make_entry(write_path(parts), os.stat(parts[-1], dir_fd=directory, follow_symlinks=False))

    def move(self, source: str, target: str, *, parents: bool = False, overwrite: bool = False) -> Entry:
        """Move an entry of any kind to another path. With `overwrite`, it may replace a file or an empty directory.

        A directory with hidden or read-only entries is not moved.
        """
        old, new = self._parse(source, "source"), self._parse(target, "target")
        with (
            closing(self._tree.open_parent(old)) as from_dir,
            closing(self._tree.open_parent(new, make=parents)) as to_dir,
        ):
            with translate_os_errors(write_path(old)):
                status = os.stat(old[-1], dir_fd=from_dir, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and self._tree.names:
                flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                with translate_os_errors(write_path(old)), closing(os.open(old[-1], flags, dir_fd=from_dir)) as fd:
                    tree = self._tree.beneath(fd, old)
                    try:
                        check_unchangeable(tree, write_path(old), Budget(MAX_DELETE), "moved")
                    finally:
                        tree.close()
            if new[: len(old)] == old and new != old:
                raise InvalidRequest("a directory cannot be moved into itself", field="target")
            with translate_os_errors(write_path(new)):
                if overwrite:
                    os.replace(old[-1], new[-1], src_dir_fd=from_dir, dst_dir_fd=to_dir)
                else:
                    libc.rename_new(from_dir, old[-1], to_dir, new[-1])
                return make_entry(write_path(new), os.stat(new[-1], dir_fd=to_dir, follow_symlinks=False))

    def copy(
        self,
        source: str,
        target: str,
        *,
        view: FolderView | None = None,
        recursive: bool = False,
        parents: bool = False,
        overwrite: bool = False,
        max_entries: int = MAX_TREE,
        timeout: float = 300.0,
    ) -> Copied:
        """Copy a file or a tree, from this folder or from another one.

        Parameters
        ----------
        source : str
            A file or directory. A link that stays inside is followed. Links within a tree are copied as links if they
            lead into that tree. Other links, and entries that are neither files nor directories, are left out and
            reported.
        target : str
            Path of the copy, in this folder.
        view : FolderView, optional
            The folder of `source`, such as another sandbox's; by default this one.
        recursive : bool
            Whether `source` may be a directory.
        parents : bool
            Whether to create missing parent directories.
        overwrite : bool
            Whether to replace existing files and to copy into existing directories.
        max_entries : int
            Maximum number of entries of a tree.
        timeout : float
            Seconds after which the copy stops. Entries copied so far remain.
        """
        origin = view or self
        old, new = origin._parse(source, "source"), self._parse(target, "target")
        budget = Budget(max_entries, timeout)
        opened, real = origin._tree.resolve(old, follow=True)
        with closing(opened) as fd:
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                if not recursive:
                    raise Conflict(f"{show(write_path(old))} is a directory; set recursive to copy it", field="source")
                tree = origin._tree.beneath(fd, real)
                try:
                    return self._copy_tree(tree, new, budget, parents=parents, overwrite=overwrite)
                finally:
                    tree.close()
                    self._used_until = 0.0
            with closing(open_found(fd, write_path(old))) as file:
                new_file = self._new_file(new, self._room(), make=parents)
                try:
                    copy_data(file, new_file, budget.require)
                    new_file.commit(mode=permissions(os.fstat(file)), overwrite=overwrite)
                finally:
                    new_file.discard()
        self._add_used(new_file.cost)
        return Copied(1, new_file.size)

    def _copy_tree(self, source: Tree, new: Parts, budget: Budget, *, parents: bool, overwrite: bool) -> Copied:
        with closing(self._tree.open_parent(new, make=parents)) as directory, translate_os_errors(write_path(new)):
            existing = look(directory, new[-1])
            if existing is not None and not (overwrite and stat.S_ISDIR(existing.st_mode)):
                raise Conflict(f"{show(write_path(new))} already exists", field="target")
        # The list is complete before anything is created, so that a copy of a directory into itself ends.
        plan = make_plan(source, budget)
        with closing(self._tree.make_directories(new)) as top:
            tree = self._tree.beneath(top, new)
        with Builder(tree, new, self._room(), overwrite) as builder:
            return copy_tree(source, plan, builder, budget)

    def delete(self, path: str, *, recursive: bool = False, missing_ok: bool = False, timeout: float = 300.0) -> int:
        """Delete an entry of any kind. For a link, delete the link, not its target.

        A directory must be empty, unless `recursive`. A directory with hidden or read-only entries is not
        deleted.

        Returns
        -------
        int
            Number of entries deleted.
        """
        parts = self._parse(path)
        budget = Budget(MAX_DELETE, timeout)
        try:
            with closing(self._tree.open_parent(parts)) as directory, translate_os_errors(write_path(parts)):
                status = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False)
                if not stat.S_ISDIR(status.st_mode):
                    os.unlink(parts[-1], dir_fd=directory)
                    return 1
                if not recursive:
                    os.rmdir(parts[-1], dir_fd=directory)
                    return 1
                return delete_tree(directory, parts[-1], write_path(parts), budget, self._tree.names, parts)
        except NotFound:
            if missing_ok:
                return 0
            raise
        finally:
            self._used_until = 0.0

    def unpack(
        self,
        path: str = ".",
        size: int | None = None,
        sha256: str | None = None,
        *,
        overwrite: bool = True,
        max_size: int | None = None,
        max_entries: int = MAX_TREE,
        max_bytes: int = MAX_DOWNLOAD,
        timeout: float = 300.0,
    ) -> Upload[Copied]:
        """Start the upload of an archive (tar, tar.gz or zip), to be unpacked into a directory once it is complete.

        The whole archive is checked before anything is created. Absolute names and ``..`` cause a refusal. Links that
        lead outside, special files, hidden names and read-only names are left out and reported.

        Parameters
        ----------
        path : str
            The directory; created if it is missing.
        size, sha256 : optional
            Expected size and SHA-256 of the archive.
        overwrite : bool
            Whether to replace existing files.
        max_size : int, optional
            Maximum bytes of the archive.
        max_entries, max_bytes : int
            Limits on the unpacked contents.
        timeout : float
            Seconds after which the unpacking stops.
        """
        parts = self._parse(path)

        def deliver(file: NewFile, digest: str) -> Copied:
            tree = self._tree.beneath(file.directory, parts)
            with (
                Builder(tree, parts, self._room(), overwrite) as builder,
                open(os.dup(file.fd), "rb") as archive,
            ):
                try:
                    return archives.unpack(archive, builder, Budget(max_entries, timeout), max_bytes, digest)
                finally:
                    self._used_until = 0.0

        room = self._announce(parts, size, sha256, max_size)
        file = NewFile(self._tree.make_directories(parts), "", write_path(parts), room)
        return Upload(file, size, sha256, deliver)

    def _announce(self, parts: Parts, size: int | None, sha256: str | None, max_size: int | None) -> Room:
        """Check the announced size and SHA-256 of an upload, and return the space that it may use."""
        check_announced(size, sha256)
        room = self._room()
        if max_size is not None and (room.left is None or max_size < room.left):
            room = Room(max_size, f"one upload may have at most {max_size} bytes")
        room.check(size or 0, write_path(parts))
        return room

    def _new_file(self, parts: Parts, room: Room, *, make: bool = False) -> NewFile:
        return NewFile(self._tree.open_parent(parts, make=make), parts[-1], write_path(parts), room)

    def _room(self) -> Room:
        """Return the space left for writing. The folder is measured at intervals, and writes are counted in between."""
        room, free = self._quota_room(), self._free()
        return room if free is None or (room.left is not None and room.left <= (free.left or 0)) else free

    def _quota_room(self) -> Room:
        if self.quota is None:
            return Room()
        with self._used_lock:
            if time.monotonic() >= self._used_until:
                began = time.monotonic()
                self._used = self.used()
                # A large folder must not be walked for every small write.
                self._used_until = time.monotonic() + max(_USED_INTERVAL, 10 * (time.monotonic() - began))
            left = max(0, self.quota - self._used.bytes - self._held())
        reason = f"the folder is limited to {self.quota} bytes ({self._quota_setting}); delete some files"
        return Room(left, reason, self._quota_setting)

    def _add_used(self, size: int) -> None:
        with self._used_lock:
            self._used = Used(self._used.bytes + max(4096, size), self._used.is_exact)


class _Lines:
    """A file's content in which a text is replaced, whatever its line ends are."""

    def __init__(self, data: bytes, old: bytes, new: bytes) -> None:
        is_exact = b"\r\n" in old and old in data
        # A byte that occurs nowhere stands for CRLF, so that line ends are one byte. Only binary data has none.
        used = set(data).union(old, new)
        mark = next((bytes([byte]) for byte in range(256) if byte not in used), b"\r\n")
        self._mark = b"\r\n" if is_exact else mark
        self._old, self._new = (text if is_exact else text.replace(b"\r\n", b"\n") for text in (old, new))
        self._data = data.replace(b"\r\n", self._mark)
        self._flat = data if is_exact or len(mark) > 1 else self._data.replace(mark, b"\n")

    def count(self) -> int:
        """Return how often the text occurs."""
        return self._flat.count(self._old)

    def replace(self) -> bytes:
        """Return the content with all occurrences replaced."""
        if self._flat == self._data:
            return self._data.replace(self._old, self._new)
        pieces, end = [], 0
        while (start := self._flat.find(self._old, end)) >= 0:
            pieces.append(self._data[end:start])
            end = start + len(self._old)
            pieces.append(self._replacement(start, end))
        return b"".join((*pieces, self._data[end:])).replace(self._mark, b"\r\n")

    def _replacement(self, start: int, end: int) -> bytes:
        """Return the new text for a place, line by line with the line ends there; more lines have the last one's."""
        first, *lines = self._new.split(b"\n")
        if not lines:
            return first
        ends = [bytes([byte]) for byte in self._data[start:end] if byte in (self._mark[0], 10)]
        if not ends:
            near = self._flat.find(b"\n", end)
            near = self._flat.rfind(b"\n", 0, start) if near < 0 else near
            ends.append(self._data[near : near + 1])
        ends += ends[-1:] * (len(lines) - len(ends))
        return first + b"".join(end + line for end, line in zip(ends, lines, strict=False))


def _encode(text: str, field: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest("the text contains a character that is not valid in UTF-8", field=field) from None
