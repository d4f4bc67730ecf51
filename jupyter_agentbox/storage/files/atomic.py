"""Create files that appear complete or not at all, and copy data into them."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress

from jupyter_agentbox.errors import AgentboxError, Conflict, TooLarge
from jupyter_agentbox.models.file_entries import kind_of
from jupyter_agentbox.storage.trees import libc

from .paths import show
from .tree import KIND_NAMES, translate_os_errors

CHUNK = 1024 * 1024
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS)
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


class Room:
    """Space that may still be used, shared by the files of one operation.

    Parameters
    ----------
    left : int, optional
        Number of bytes; None for no limit.
    reason : str
        Text that follows the path in a refusal.
    setting : str, optional
        The setting that the refusal names.
    error : type of AgentboxError
        Class of the refusal.
    """

    def __init__(
        self,
        left: int | None = None,
        reason: str = "",
        setting: str | None = None,
        error: type[AgentboxError] = TooLarge,
    ) -> None:
        self.left, self.reason, self.setting, self.error = left, reason, setting, error

    def take(self, size: int, path: str) -> None:
        """Account for `size` bytes before they are written to `path`.

        Raises
        ------
        TooLarge, DiskFull
            There is not enough space.
        """
        if self.left is not None:
            self.check(size, path)
            self.left -= size

    def check(self, size: int, path: str) -> None:
        """Refuse `size` bytes if there is not enough space for them."""
        if self.left is not None and size > self.left:
            raise self.error(f"{show(path)} cannot be written: {self.reason}", field="path", setting=self.setting)


class NewFile:
    """A file without a name, in the directory in which it will get one.

    On a file system without support for unnamed files, it has a name that begins with ``.agentbox-`` until then.

    Parameters
    ----------
    directory : int
        Descriptor of the directory, owned by this object from now on.
    name : str
        Name that the file gets at :meth:`commit`.
    path : str
        Path in written form, for messages.
    room : Room, optional
        Space that may be used.

    Attributes
    ----------
    size, cost : int
        Size of the file in bytes, and its size without holes.
    """

    def __init__(self, directory: int, name: str, path: str, room: Room | None = None) -> None:
        self.directory, self.name, self.path = directory, name, path
        self.room = room or Room()
        self.size = self.cost = 0
        self._temporary: str | None = None
        self.fd = -1
        with translate_os_errors(path):
            self.fd = self._open()

    def __del__(self) -> None:
        self.discard()

    def _open(self) -> int:
        try:
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            return os.open(".", flags, 0o666, dir_fd=self.directory)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        name = make_name()
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=self.directory)
        self._temporary = name
        return fd

    def take_room(self, size: int) -> None:
        """Account for bytes before they are written."""
        self.room.take(size, self.path)
        self.cost += size

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        self.take_room(len(data))
        view = memoryview(data)
        with translate_os_errors(self.path):
            while view:
                view = view[os.write(self.fd, view) :]
        self.size += len(data)

    def commit(
        self, *, mode: int | None = None, overwrite: bool = True, expect: os.stat_result | None = None
    ) -> os.stat_result:
        """Give the file its name in one step, replacing an existing regular file.

        Parameters
        ----------
        mode : int, optional
            Permission bits; by default those of the replaced file, or else according to the umask. Set-user-id and
            similar bits are never set.
        overwrite : bool
            Whether the file may replace an existing one.
        expect : os.stat_result, optional
            Status of the file that must be replaced, and must be unchanged.

        Raises
        ------
        Conflict
            An existing entry may not be replaced, or is not the expected one.
        """
        try:
            with translate_os_errors(self.path):
                old = look(self.directory, self.name)
                check_replaceable(old, self.path, overwrite)
                if expect is not None and (old is None or not is_same(old, expect)):
                    raise Conflict(f"{show(self.path)} was changed in the meantime; read it again", field="path")
                if mode is None and old is not None:
                    mode = old.st_mode
                if mode is not None:
                    os.fchmod(self.fd, mode & 0o777)
                status = os.fstat(self.fd)
                if self._temporary is None and old is None:
                    with suppress(FileExistsError):
                        self._link(self.name)
                        return status
                    if not overwrite:
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                if self._temporary is None:
                    name = make_name()
                    self._link(name)
                    self._temporary = name
                source = self._temporary
                if overwrite:
                    os.replace(source, self.name, src_dir_fd=self.directory, dst_dir_fd=self.directory)
                else:
                    libc.rename_new(self.directory, source, self.directory, self.name)
                self._temporary = None
                return status
        finally:
            self.discard()

    def _link(self, name: str) -> None:
        os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self.directory, follow_symlinks=True)

    def discard(self) -> None:
        """Discard the file. Idempotent; does nothing to a committed file."""
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self.directory)
        for fd in (self.fd, self.directory):
            if fd >= 0:
                os.close(fd)
        self.fd = self.directory = -1


def make_name() -> str:
    """Return a name that no entry has."""
    return f".agentbox-{secrets.token_hex(8)}"


def look(directory: int, name: str) -> os.stat_result | None:
    """Return the status of an entry itself, or None if it does not exist."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_same(one: os.stat_result, other: os.stat_result) -> bool:
    """Return whether two stat results are for the same file with unchanged content."""
    return (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) == (
        other.st_dev,
        other.st_ino,
        other.st_size,
        other.st_mtime_ns,
    )


def check_replaceable(status: os.stat_result | None, path: str, overwrite: bool = True) -> None:
    """Refuse to replace anything but a regular file, and also a regular file if `overwrite` is false."""
    if status is None:
        return
    kind = kind_of(status.st_mode)
    if kind != "file":
        also = "; writes never follow links, so delete it first" if kind == "link" else ""
        raise Conflict(f"{show(path)} is {KIND_NAMES[kind]}, not a regular file{also}", field="path")
    if not overwrite:
        raise Conflict(f"{show(path)} already exists", field="path")


def copy_data(source: int, target: NewFile, check: Callable[[], None] = lambda: None) -> None:
    """Copy the current content of a regular file, preserving holes, so that a sparse file uses no more space.

    Parameters
    ----------
    source : int
        Descriptor that is open for reading.
    target : NewFile
        A file that is still empty.
    check : callable
        Called between chunks; raises to stop.
    """
    with translate_os_errors(target.path):
        target.size = copy_content(source, target.fd, target.take_room, check)


def copy_content(
    source: int, target: int, take: Callable[[int], None] = lambda size: None, check: Callable[[], None] = lambda: None
) -> int:
    """Copy the current content of a regular file to an empty one, preserving holes, and return its size.

    Parameters
    ----------
    source, target : int
        Descriptors that are open for reading and for writing. The position of `source` changes.
    take : callable
        Called with the number of bytes before they are written; raises to stop.
    check : callable
        Called between chunks; raises to stop.
    """
    size = os.fstat(source).st_size
    start = 0
    while start < size:
        check()
        try:
            start = os.lseek(source, start, os.SEEK_DATA)
            end = min(size, os.lseek(source, start, os.SEEK_HOLE))
        except OSError as error:
            if error.errno == errno.ENXIO:
                break  # only a hole is left
            if error.errno != errno.EINVAL:
                raise
            end = size
        take(max(0, end - start))
        while start < end:
            check()
            count = _copy_range(source, target, min(8 * CHUNK, end - start), start)
            if not count:
                size = end = start  # the file shrank
            start += count
    os.ftruncate(target, size)
    return size


def _copy_range(source: int, target: int, count: int, offset: int) -> int:
    try:
        copied = os.copy_file_range(source, target, count, offset, offset)
        if copied:
            return copied
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    data = os.pread(source, min(count, CHUNK), offset)
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, offset + len(data) - len(view))
        view = view[written:]
    return len(data)


def permissions(status: os.stat_result) -> int:
    """Return the permission bits that a copy keeps, without set-user-id and similar bits."""
    return stat.S_IMODE(status.st_mode) & 0o777
