"""Read a workspace's files, which hostile code may have written, and write them to a new directory.

Links stay links and are never followed, hard links are preserved, and holes stay holes. Sockets, FIFOs and devices are
dropped and counted. The names, depth and number of files cannot cause harm: whatever exceeds a limit is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from jupyter_agentbox.errors import AgentboxError, Damaged, DiskFull, TooLarge
from jupyter_agentbox.storage.trees import Found, closing, open_forced, walk

MAX_ENTRIES = 250_000
MAX_DEPTH = 200
MAX_PATH = 4096  # bytes
MAX_FILE = 1 << 44  # bytes of one file, holes included
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_COPY_SIZE = 16 * 1024 * 1024


class Entry(msgspec.Struct, array_like=True):
    """One entry of a workspace. A directory comes before its contents.

    Parameters
    ----------
    path : bytes
        Path relative to the workspace.
    kind : str
        ``f`` file, ``d`` directory, ``l`` symbolic link, ``h`` another name of an earlier file.
    mode : int
        Permission bits, without set-id.
    mtime : int
        Nanoseconds since the epoch.
    size : int
        Bytes, including holes.
    target : bytes
        Target of a symbolic link, or other path of a hard link.
    """

    path: bytes
    kind: Literal["f", "d", "l", "h"]
    mode: int = 0
    mtime: int = 0
    size: int = 0
    target: bytes = b""


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Translate file system errors into errors that say what failed, and what to do if the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"{what}: the server's disk is full. Free some space, or delete a snapshot",
                setting="Policy.state_dir",
            ) from error
        raise AgentboxError(f"{what}: {error.strerror}") from error


@dataclass
class Walk:
    """Iterable over a tree that yields an entry and, for files, a descriptor that is open until the next entry.

    Parameters
    ----------
    top : Path
        A directory, which must not be a link.
    """

    top: Path
    #: Number of entries left out so far, by kind.
    dropped: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[tuple[Entry, int]]:
        count = 0
        seen: dict[tuple[int, int], bytes] = {}

        def take() -> bool:
            nonlocal count
            count += 1
            return count <= MAX_ENTRIES or _refuse()

        with closing(os.open(self.top, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as top:
            device = os.fstat(top).st_dev

            def is_kept(found: Found) -> bool:
                return found.status.st_dev == device and found.status.st_size <= MAX_FILE

            for found in walk(top, enter=is_kept, take=take, on_error=self._drop, is_forced=True):
                path, facts = os.fsencode(found.path), found.status
                if found.path.count("/") >= MAX_DEPTH or len(path) > MAX_PATH:
                    _refuse()
                if not is_kept(found):
                    self.dropped["mounts" if facts.st_dev != device else "too large"] += 1
                    continue
                entry = Entry(path, "f", stat.S_IMODE(facts.st_mode) & 0o1777, facts.st_mtime_ns)
                what = stat.S_IFMT(facts.st_mode)
                try:
                    if what == stat.S_IFDIR:
                        entry.kind = "d"
                        yield entry, -1
                    elif what == stat.S_IFLNK:
                        entry.kind, entry.target = "l", os.readlink(os.fsencode(found.name), dir_fd=found.directory)
                        yield entry, -1
                    elif what == stat.S_IFREG:
                        identity = (facts.st_dev, facts.st_ino)
                        if facts.st_nlink > 1 and identity in seen:
                            yield Entry(path, "h", target=seen[identity]), -1
                            continue
                        handle = _open(found)
                        try:
                            facts = os.fstat(handle)
                            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_FILE:
                                continue
                            entry.size = facts.st_size
                            if facts.st_nlink > 1:
                                seen[identity] = path
                            yield entry, handle
                        finally:
                            os.close(handle)
                    else:
                        self.dropped[{stat.S_IFSOCK: "sockets", stat.S_IFIFO: "fifos"}.get(what, "devices")] += 1
                except OSError as error:
                    self._drop(found.path, error)

    def _drop(self, path: str, error: OSError) -> None:
        if error.errno == errno.ENAMETOOLONG:
            _refuse()
        if isinstance(error, PermissionError) and path:
            self.dropped["unreadable"] += 1
        elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL) and path:
            self.dropped["gone"] += 1  # or replaced by a link, or no longer a link
        else:
            raise error


def _refuse() -> NoReturn:
    raise TooLarge(
        f"a snapshot's workspace may hold {MAX_ENTRIES} names, {MAX_DEPTH} deep and of {MAX_PATH} bytes, and this one "
        "has more"
    )


def _open(found: Found) -> int:
    """Open a file, even if its mode forbids that to its owner."""
    try:
        return os.open(found.name, _READ | os.O_NOFOLLOW, dir_fd=found.directory)
    except PermissionError:
        pass
    with closing(os.open(found.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found.directory)) as reference:
        handle, mode = open_forced(reference, _READ, 0o400)
    os.fchmod(handle, mode)
    return handle


def data_ranges(handle: int, size: int, grain: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of data between holes, rounded outward to multiples of `grain`, without overlaps."""
    done = 0
    while done < size:
        try:
            start = os.lseek(handle, done, os.SEEK_DATA)
            end = min(size, os.lseek(handle, start, os.SEEK_HOLE))
        except OSError:
            return  # only a hole is left, or the file became shorter
        start = max(done, start // grain * grain)
        end = min(size, -(-end // grain) * grain)
        if end > start:
            yield start, end
        done = max(end, done + 1)


class Writer:
    """Writer of entries to an empty directory that no one else uses.

    Use it as a context manager. It sets modes and times of directories at the end.
    """

    def __init__(self, top: Path) -> None:
        self._top = os.open(top, _DIRECTORY)
        self._folders: list[Entry] = []
        self._count = 0
        self._open: tuple[bytes, int] | None = None  # the folder of the last entry

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *problem: object) -> None:
        try:
            if problem[0] is None:
                for entry in reversed(self._folders):
                    with self._folder(entry.path) as handle:
                        os.utime(handle, ns=(entry.mtime, entry.mtime))
                        os.fchmod(handle, entry.mode & 0o1777)
                    self._forget()
        finally:
            self._forget()
            os.close(self._top)

    def add(self, entry: Entry) -> int | None:
        """Create an entry. For a file, return a descriptor to write to, which :meth:`finish` closes.

        Raises
        ------
        Damaged
            A path leads out of the directory or through a link, or a value is impossible.
        """
        self._count += 1
        parts = entry.path.split(b"/")
        if (
            self._count > MAX_ENTRIES
            or len(parts) > MAX_DEPTH
            or len(entry.path) > MAX_PATH
            or any(part in (b"", b".", b"..") or b"\0" in part or len(part) > 255 for part in parts)
            or not 0 <= entry.size <= MAX_FILE
            or not abs(entry.mtime) < 1 << 62
            or len(entry.target) > MAX_PATH
        ):
            raise Damaged("the snapshot's files have an invalid name, size or time")
        prefix, _, name = entry.path.rpartition(b"/")
        try:
            with self._folder(prefix) as parent:
                if entry.kind == "d":
                    os.mkdir(name, 0o700, dir_fd=parent)
                    self._folders.append(entry)
                elif entry.kind == "l":
                    os.symlink(entry.target, name, dir_fd=parent)
                    os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=parent, follow_symlinks=False)
                elif entry.kind == "f":
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    return os.open(name, flags, 0o600, dir_fd=parent)
                else:
                    self._link(entry.target, name, parent)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE):  # lack of room does not mean forged data
                raise
            raise Damaged(f"the snapshot's files cannot be restored: {error.strerror}") from None
        return None

    def finish(self, entry: Entry, handle: int) -> None:
        """Set the length, time and mode of a written file, and close it."""
        try:
            os.ftruncate(handle, entry.size)
            os.utime(handle, ns=(entry.mtime, entry.mtime))
            os.fchmod(handle, entry.mode & 0o1777)
        finally:
            os.close(handle)

    def _link(self, target: bytes, name: bytes, parent: int) -> None:
        prefix, _, old = target.rpartition(b"/")
        other = self._descend(prefix)
        try:
            if not stat.S_ISREG(os.stat(old, dir_fd=other, follow_symlinks=False).st_mode):
                raise Damaged("the snapshot's files contain a hard link to a non-file")
            os.link(old, name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(other)

    @contextmanager
    def _folder(self, prefix: bytes) -> Iterator[int]:
        if self._open is None or self._open[0] != prefix:
            handle = self._descend(prefix)
            self._forget()
            self._open = (prefix, handle)
        yield self._open[1]

    def _descend(self, prefix: bytes) -> int:
        handle = os.dup(self._top)
        for part in prefix.split(b"/") if prefix else ():
            if part in (b"", b".", b".."):
                os.close(handle)
                raise Damaged("the snapshot's files contain a path that leads outside")
            try:
                below = os.open(part, _DIRECTORY, dir_fd=handle)
            finally:
                os.close(handle)
            handle = below
        return handle

    def _forget(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None


def copy_tree(source: Path, target: Path, *, max_bytes: int) -> dict[str, int]:
    """Copy a workspace to an empty directory, such as ``work`` of a staged snapshot.

    Programs in the sandbox should be paused during the copy; otherwise the copy mixes earlier and later contents. In
    any case it contains nothing but data from the workspace.

    Parameters
    ----------
    source, target : Path
    max_bytes : int
        Maximum bytes of files, not counting holes.

    Returns
    -------
    dict of str to int
        Number of entries left out, by kind: ``sockets``, ``fifos``, ``devices``, ``unreadable``, ``mounts``, ``gone``.

    Raises
    ------
    TooLarge
    """
    walk = Walk(source)
    left = max_bytes
    with disk_errors("the workspace could not be copied"), Writer(target) as writer:
        for entry, handle in walk:
            copy = writer.add(entry)
            if copy is None:
                continue
            try:
                for start, end in data_ranges(handle, entry.size, 4096):
                    left -= end - start
                    if left < 0:
                        raise TooLarge(
                            f"the workspace contains more than the {max_bytes} bytes allowed in a snapshot",
                            setting="Policy.max_snapshot_bytes",
                        )
                    _copy_range(handle, copy, start, end)
            except BaseException:
                os.close(copy)
                raise
            writer.finish(entry, copy)
    return dict(walk.dropped)


def _copy_range(source: int, target: int, start: int, end: int) -> None:
    while start < end:
        count = min(_COPY_SIZE, end - start)
        try:
            done = os.copy_file_range(source, target, count, start, start)
        except OSError:  # between file systems, or unsupported by the file system
            done = os.pwrite(target, os.pread(source, count, start), start)
        if not done:
            return  # the file became shorter
        start += done
