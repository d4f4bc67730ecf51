"""Open entries beneath a folder that a hostile sandbox writes to, and never anything else.

All names of the package's file operations are resolved in this module only. There are two ways, with the same result:

- ``openat2`` with ``RESOLVE_BENEATH`` and without links: one system call, sufficient for every path without links;
- otherwise a walk name by name with ``O_NOFOLLOW`` from directory to directory. It determines which name was a
  link, and follows it if that is allowed. On a kernel without ``openat2``, it is the only way.

Every entry is first opened with ``O_PATH``, which does not affect FIFOs or devices. If it is a regular file, it is then
opened for reading through that same descriptor. So whatever is swapped in the meantime, only the checked entry is used.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.errors import (
    AgentboxError,
    Conflict,
    DiskFull,
    InvalidRequest,
    NotFound,
    PolicyRefused,
    RuntimeFailed,
    TooLarge,
)
from jupyter_agentbox.models.file_entries import Kind, kind_of

from .paths import MAX_PATH, Parts, make_matcher, show, write_path

_SYS_OPENAT2 = 437  # the same on every architecture
_RESOLVE = 0x08 | 0x04 | 0x02  # BENEATH, NO_SYMLINKS, NO_MAGICLINKS
_RENAME_NOREPLACE = 1
_MAX_LINKS = 40
_MISSING = (errno.ENOSYS, errno.EINVAL)

KIND_NAMES: dict[Kind, str] = {
    "file": "a file",
    "directory": "a directory",
    "link": "a link",
    "fifo": "a FIFO",
    "socket": "a socket",
    "device": "a device",
}


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


@contextmanager
def translate_os_errors(path: str) -> Iterator[None]:
    """Translate an OSError of an operation on `path` (in written form) into one of the package's errors."""
    try:
        yield
    except OSError as error:
        raise translate_os_error(error, path) from error


def translate_os_error(error: OSError, path: str) -> AgentboxError:
    """Return the package's error for an error of the kernel about `path`."""
    code, name = error.errno or 0, show(path)
    if code == errno.ENOENT:
        return NotFound(f"{name} does not exist", field="path")
    if code == errno.ENOTDIR:
        return Conflict(f"{name}, or one of its parents, is not a directory", field="path")
    if code == errno.EISDIR:
        return Conflict(f"{name} is a directory", field="path")
    if code == errno.EEXIST:
        return Conflict(f"{name} already exists", field="path")
    if code == errno.ENOTEMPTY:
        return Conflict(f"{name} is a directory that is not empty", field="path")
    if code == errno.ELOOP:
        return Conflict(f"{name} goes through a link, which is not followed here", field="path")
    if code in (errno.EACCES, errno.EPERM):
        return Conflict(f"{name}: permission denied; change its owner or mode inside the sandbox", field="path")
    if code in (errno.ENAMETOOLONG, errno.EINVAL):
        return InvalidRequest(f"{name}: {os.strerror(code)}", field="path")
    if code in (errno.EBUSY, errno.EXDEV, errno.ETXTBSY, errno.ESTALE):
        return Conflict(f"{name}: {os.strerror(code)}", field="path")
    if code in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"{name} cannot be written: the server's disk is full. Free some space, or delete files",
            field="path",
            setting="Policy.state_dir",
        )
    if code == errno.EFBIG:
        return TooLarge(f"{name} cannot be written: the file is too large for the host", field="path")
    return RuntimeFailed(f"{name}: {error.strerror or error}", field="path")


class Budget:
    """The limits of one operation, so that no tree can occupy it forever, however large it is.

    Parameters
    ----------
    entries : int
        Maximum number of directory entries.
    seconds : float
        Maximum wall-clock time.
    """

    def __init__(self, entries: int, seconds: float = 60.0) -> None:
        self.left = entries
        self._limits = entries, seconds
        self._deadline = time.monotonic() + seconds
        self.reason: str | None = None

    def take(self, entries: int = 1) -> bool:
        """Account for `entries`. Return False and set `reason` if a limit is exceeded."""
        if self.remaining_seconds() <= 0:
            self.cut(f"stopped after {self._limits[1]:g} seconds")
            return False
        self.left -= entries
        if self.left < 0:
            self.cut(f"stopped after {self._limits[0]} entries")
            return False
        return True

    def remaining_seconds(self) -> float:
        """Return the seconds that are left; 0 or less if there are none."""
        return self._deadline - time.monotonic()

    def cut(self, reason: str) -> None:
        """Record why the operation was cut short. The first reason is kept."""
        self.reason = self.reason or reason

    def require(self, entries: int = 0) -> None:
        """Account for `entries`, or raise TooLarge if a limit is exceeded."""
        if not self.take(entries):
            self.refuse()

    def refuse(self) -> None:
        """Raise TooLarge if the operation was cut short."""
        if self.reason:
            raise TooLarge(f"the operation {self.reason}, which is its limit; do it in smaller parts")


@dataclass(frozen=True)
class Found:
    """An entry that a walk has found. `directory` is open only until the walk continues."""

    parts: Parts
    status: os.stat_result
    directory: int

    @property
    def name(self) -> str:
        return self.parts[-1]


class Held:
    """A descriptor that other threads may still use when it is released.

    If its number became free immediately, the next file opened anywhere in the process could get it. A thread that
    still works with this object would then read or change that file, which may belong to another sandbox.
    """

    fd = -1

    def close(self) -> None:
        """Close the descriptor now, which is safe only if no other thread uses it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def retire(self) -> None:
        """Make the descriptor useless now, and free its number only when no one can use it. Idempotent."""
        if self.fd >= 0:
            with closing(os.open("/dev/null", os.O_PATH | os.O_CLOEXEC)) as nothing:
                os.dup2(nothing, self.fd, inheritable=False)

    def __del__(self) -> None:
        self.close()


class Tree(Held):
    """A directory that is held by its descriptor, and the only way from names to entries beneath it.

    Parameters
    ----------
    root : Path or int
        The directory, or a descriptor of it, which then belongs to the tree.
    hidden : tuple of str
        Shell patterns of names that are treated as nonexistent, at any depth.
    """

    def __init__(self, root: Path | int, hidden: tuple[str, ...] = ()) -> None:
        self.fd = root if isinstance(root, int) else os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.hidden = hidden
        self.is_hidden = make_matcher(hidden)

    def check_name(self, parts: Parts, *, is_new: bool = False) -> None:
        """Refuse a path with a hidden name by the name alone, so that the error does not reveal what exists."""
        for part in parts:
            if self.is_hidden(part):
                reason = f"names like {show(part)} are hidden in this sandbox"
                setting = "Policy.hidden_files"
                if is_new:
                    raise PolicyRefused(f"{show('/'.join(parts))} cannot be created: {reason}", setting=setting)
                raise NotFound(f"{show('/'.join(parts))} does not exist: {reason}", field="path", setting=setting)

    def open(self, parts: Parts, *, follow: bool = False, follow_last: bool | None = None) -> int:
        """Open an entry of any kind with ``O_PATH``.

        Parameters
        ----------
        parts : tuple of str
            The path.
        follow : bool
            Whether to follow links, as long as they stay beneath the root. Absolute links are never followed.
        follow_last : bool, optional
            Whether to follow a link at the end of the path; by default as `follow`. If not, the link itself is opened.

        Raises
        ------
        AgentboxError
            The entry does not exist, a name is hidden, or a link may not be followed.
        """
        self.check_name(parts)
        if follow_last is None:
            follow_last = follow
        with translate_os_errors(write_path(parts)):
            if libc.has_openat2:
                try:
                    flags = os.O_PATH if follow_last else os.O_PATH | os.O_NOFOLLOW
                    return libc.openat2(self.fd, "/".join(parts) or ".", flags)
                except OSError as error:
                    # The walk finds the cause: a link to follow, or the actual error.
                    libc.has_openat2 = error.errno != errno.ENOSYS
            return self._walk(parts, follow, follow_last)

    def _walk(self, parts: Parts, follow: bool, follow_last: bool) -> int:
        original, links = write_path(parts), 0
        while True:
            index, target = 0, ""
            fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                for index, name in enumerate(parts):
                    if name == "..":
                        break  # the names before it have been opened as directories
                    self.check_name((name,))
                    child = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                    os.close(fd)
                    fd = child
                    is_last = index == len(parts) - 1
                    mode = os.fstat(fd).st_mode
                    if stat.S_ISLNK(mode) and not (is_last and not follow_last):
                        if not follow:
                            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                        target = os.readlink("", dir_fd=fd)
                        break
                    if not is_last and not stat.S_ISDIR(mode):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                else:
                    found, fd = fd, -1
                    return found
            finally:
                if fd >= 0:
                    os.close(fd)
            links += 1
            inner = tuple(part for part in target.split("/") if part not in ("", "."))
            front = parts[:index] if target else parts[: index - 1] if index else None
            if front is None or target.startswith("/"):
                raise Conflict(
                    f"{show(original)} goes through a link that leads out of the folder"
                    + (f" ({show(target)}); only relative links that stay inside are followed" if target else ""),
                    field="path",
                )
            parts = front + inner + parts[index + 1 :]
            if links > _MAX_LINKS or sum(map(len, parts)) > MAX_PATH:
                raise Conflict(f"{show(original)} goes through too many links", field="path")

    def open_parent(self, parts: Parts, *, make: bool = False) -> int:
        """Open the directory that contains ``parts[-1]``, through no link; with `make`, create it if it is missing."""
        if not parts:
            raise InvalidRequest("the folder itself cannot be changed", field="path")
        self.check_name(parts, is_new=True)
        try:
            fd = self.open(parts[:-1])
        except NotFound:
            if not make:
                raise
            return self.make_directories(parts[:-1])
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise Conflict(f"{show(write_path(parts[:-1]))} is not a directory", field="path")
        return fd

    def make_directories(self, parts: Parts, mode: int = 0o777) -> int:
        """Create the missing directories of a path, through no link, and open the last one."""
        self.check_name(parts, is_new=True)
        fd = self.open(())
        try:
            for index, name in enumerate(parts):
                with translate_os_errors(write_path(parts[: index + 1])):
                    with suppress(FileExistsError):
                        os.mkdir(name, mode if index == len(parts) - 1 else 0o777, dir_fd=fd)
                    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    child = os.open(name, flags, dir_fd=fd)
                os.close(fd)
                fd = child
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_file(self, parts: Parts, *, follow: bool = True) -> int:
        """Open a regular file for reading; see :func:`open_found`."""
        with closing(self.open(parts, follow=follow)) as fd:
            return open_found(fd, write_path(parts))

    def walk(
        self,
        top: Parts,
        budget: Budget,
        *,
        depth: int | None = None,
        enter: Callable[[Parts], bool] | None = None,
        see_hidden: bool = False,
    ) -> Iterator[Found]:
        """Yield the entries beneath `top`, sorted by name, a directory before its contents, without following links.

        Holds one descriptor at a time, regardless of depth. If the walk is cut short, `budget` records the reason.

        Parameters
        ----------
        top : tuple of str
            Path of a directory, without links. The parts of found entries are relative to it.
        budget : Budget
            Limits on entries and time.
        depth : int, optional
            Maximum number of levels; 1 for the directory's own entries only.
        enter : callable, optional
            Called with a directory's parts; returns whether to descend into it.
        see_hidden : bool
            Whether to yield hidden entries. They are never descended into.
        """
        pending: list[Parts] = [()]
        while pending:
            inside = pending.pop()
            try:
                base = self.open(top + inside)
            except AgentboxError:
                if not inside:
                    raise
                continue  # removed, or replaced by a link in the meantime
            with closing(base):
                try:
                    names = read_names(base, budget)
                except OSError as error:
                    if not inside:
                        raise translate_os_error(error, write_path(top)) from error
                    continue
                below: list[Parts] = []
                for name in names:
                    if self.is_hidden(name) and not see_hidden:
                        continue
                    try:
                        status = os.stat(name, dir_fd=base, follow_symlinks=False)
                    except OSError:
                        continue
                    if budget.remaining_seconds() <= 0:
                        budget.take()
                        return
                    parts = (*inside, name)
                    yield Found(parts, status, base)
                    if stat.S_ISDIR(status.st_mode) and not self.is_hidden(name) and (not enter or enter(parts)):
                        if depth is not None and len(parts) >= depth:
                            continue
                        if len(os.fsencode("/".join(top + parts))) >= MAX_PATH - 256:
                            budget.cut(f"stopped at paths longer than {MAX_PATH - 256} bytes")
                        else:
                            below.append(parts)
                pending.extend(reversed(below))
            if budget.reason and budget.left < 0:
                return


def read_names(directory: int, budget: Budget) -> list[str]:
    """Return the sorted names in a directory, at most as many as the budget allows."""
    names: list[str] = []
    # A separate descriptor, because threads that list through the same one would share its position.
    with closing(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)) as fd:
        with os.scandir(fd) as entries:
            for entry in entries:
                if not budget.take():
                    break
                names.append(entry.name)
    return sorted(names)


def open_found(fd: int, path: str) -> int:
    """Open the entry of an ``O_PATH`` descriptor for reading, if it is a regular file.

    Raises
    ------
    Conflict
        It is something else; the message says what.
    """
    kind = kind_of(os.fstat(fd).st_mode)
    if kind != "file":
        raise Conflict(f"{show(path)} is {KIND_NAMES[kind]}, not a regular file", field="path")
    with translate_os_errors(path):
        # Through the descriptor instead of by name: this is the file that was checked.
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def open_child(directory: int, name: str, path: str) -> int:
    """Open a regular file in an open directory for reading, never through a link."""
    with translate_os_errors(path):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    with closing(fd):
        return open_found(fd, path)
