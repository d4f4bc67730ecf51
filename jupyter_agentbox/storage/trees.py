"""Walk a tree that hostile code may change at the same time.

No link is followed, and no entry outside the tree is opened: directories are opened by descriptors, with ``openat2`` or
name by name, and never by a path that is resolved a second time. Any depth works, with a bounded number of descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

_SYS_OPENAT2 = 437  # the same on every architecture
_RESOLVE = 0x08 | 0x04 | 0x02  # BENEATH, NO_SYMLINKS, NO_MAGICLINKS
_RENAME_NOREPLACE = 1
_MISSING = (errno.ENOSYS, errno.EINVAL)
_PATH = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Levels of a tree whose descriptors stay open. Deeper ones are opened again after each directory beneath them.
_MAX_OPEN = 200


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


class _Libc:
    """The two system calls that Python lacks. `has_openat2` is cleared when a kernel does not support the call."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.has_openat2 = hasattr(self._libc, "syscall")

    def openat2(self, directory: int, path: str, flags: int) -> int:
        how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE)
        fd: int = self._libc.syscall(
            ctypes.c_long(_SYS_OPENAT2),
            ctypes.c_int(directory),
            ctypes.c_char_p(os.fsencode(path)),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return fd

    def rename_new(self, source_dir: int, source: str, target_dir: int, target: str) -> None:
        """Rename unless the target exists; in two steps if the kernel cannot do it in one."""
        if hasattr(self._libc, "renameat2"):
            old, new = os.fsencode(source), os.fsencode(target)
            if self._libc.renameat2(source_dir, old, target_dir, new, ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
                return
            code = ctypes.get_errno()
            if code not in _MISSING:
                raise OSError(code, os.strerror(code))
        try:
            os.stat(target, dir_fd=target_dir, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir)
        else:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


libc = _Libc()


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close `fd` at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_beneath(top: int, path: str, flags: int) -> int:
    """Open the entry at a relative path beneath a directory, through no link. An empty path is the directory itself."""
    if libc.has_openat2:
        try:
            return libc.openat2(top, path or ".", flags | os.O_NOFOLLOW)
        except OSError as error:  # the code below finds the cause again, or works without openat2
            libc.has_openat2 = error.errno != errno.ENOSYS
    directory = os.open(".", _PATH, dir_fd=top)
    *above, last = path.split("/") if path else ["."]
    for name in above:
        with closing(directory):
            directory = os.open(name, _PATH | os.O_DIRECTORY, dir_fd=directory)
    with closing(directory):
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)


def open_forced(reference: int, flags: int, needed: int) -> tuple[int, int]:
    """Open the entry of an ``O_PATH`` descriptor although its mode forbids that to its owner.

    Parameters
    ----------
    reference, flags : int
    needed : int
        Permission bits that are set before.

    Returns
    -------
    int, int
        The descriptor, and the mode that the caller has to restore.
    """
    itself, mode = f"/proc/self/fd/{reference}", os.fstat(reference).st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    os.chmod(itself, stat.S_IMODE(mode) | needed)
    try:
        return os.open(itself, flags), stat.S_IMODE(mode)
    except OSError:
        os.chmod(itself, stat.S_IMODE(mode))
        raise


class Found(NamedTuple):
    """An entry that a walk has found.

    Parameters
    ----------
    path : str
        Path relative to the top.
    status : os.stat_result
    directory : int
        Descriptor of the directory that contains it, which is open only until the walk continues.
    """

    path: str
    status: os.stat_result
    directory: int

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.split("/"))


class _Level:
    """A directory of a walk. Its descriptor may be closed between two of its names."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1
        self.names: Iterator[str] = iter(())
        self.is_listed = False
        self.below: list[_Level] = []
        self.is_cut = False
        self._mode: int | None = None

    def open(self, top: int, take: Callable[[], bool] | None, is_forced: bool) -> Iterator[str]:
        with suppress(*[PermissionError] * is_forced):
            self.fd = open_beneath(top, self.path, _DIRECTORY)
        if is_forced and (self.fd < 0 or not os.access(".", os.X_OK, dir_fd=self.fd, effective_ids=True)):
            self.close()  # its names can be listed, but not looked up
            with closing(open_beneath(top, self.path, os.O_PATH | os.O_DIRECTORY)) as reference:
                self.fd, self._mode = open_forced(reference, _DIRECTORY, 0o500)
        if not self.is_listed:
            names = []
            with os.scandir(self.fd) as entries:
                for entry in entries:
                    if take is not None and not take():
                        self.is_cut = True
                        break
                    names.append(entry.name)
            self.names, self.is_listed = iter(sorted(names, key=os.fsencode)), True
        return self.names

    def release(self) -> None:
        """Close the descriptor, unless it may not be possible to open the directory again."""
        if self._mode is None:
            self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with closing(fd):
                if self._mode is not None:
                    os.fchmod(fd, self._mode)


def walk(
    top: int,
    *,
    siblings_first: bool = False,
    enter: Callable[[Found], bool] | None = None,
    take: Callable[[], bool] | None = None,
    on_error: Callable[[str, OSError], None] | None = None,
    is_forced: bool = False,
) -> Iterator[Found]:
    """Yield the entries beneath a directory, sorted by name, a directory before its contents.

    Parameters
    ----------
    top : int
        Descriptor of the directory.
    siblings_first : bool
        Whether all entries of a directory come before the contents of the first directory among them. Otherwise the
        contents of a directory follow it.
    enter : callable, optional
        Called with a directory after it was yielded; returns whether to descend into it.
    take : callable, optional
        Called for each name that is read. Once it returns false, the walk ends with the names read so far.
    on_error : callable, optional
        Called with the path, which is empty for the top, and the error if an entry cannot be looked up, opened or
        listed. If it returns, the entry is left out. By default the error is raised.
    is_forced : bool
        Whether directories that their owner may not read are made readable until their contents were yielded.
    """
    levels = [_Level("")]
    try:
        while levels:
            level = levels[-1]
            path = level.path
            try:
                names = level.names if level.fd >= 0 else level.open(top, take, is_forced)
                name = next(names, None)
                if name is None:
                    levels.pop().close()
                    if level.is_cut:
                        return
                    levels += reversed(level.below)
                    continue
                path = f"{level.path}/{name}" if level.path else name
                found = Found(path, os.stat(name, dir_fd=level.fd, follow_symlinks=False), level.fd)
            except OSError as error:
                if path == level.path:
                    levels.pop().close()
                if on_error is None:
                    raise
                on_error(path, error)
                continue
            yield found
            if stat.S_ISDIR(found.status.st_mode) and (enter is None or enter(found)):
                if siblings_first:
                    level.below.append(_Level(path))
                    continue
                if len(levels) > _MAX_OPEN:
                    level.release()
                levels.append(_Level(path))
    finally:
        with ExitStack() as left:
            for level in levels:
                left.callback(level.close)
