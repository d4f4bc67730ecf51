"""Open entries beneath a folder that a hostile sandbox writes to, and never anything else.

All names of the package's file operations are resolved in this module only. There are two ways, with the same result:

- ``openat2`` with ``RESOLVE_BENEATH`` and without links: one system call, sufficient for every path without links;
- otherwise a walk name by name with ``O_NOFOLLOW`` from directory to directory. It determines which name was a
  link, and follows it if that is allowed. On a kernel without ``openat2``, it is the only way.

Every entry is first opened with ``O_PATH``, which does not affect FIFOs or devices. If it is a regular file, it is then
opened for reading through that same descriptor. So whatever is swapped in the meantime, only the checked entry is used.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from jupyter_agentbox.names import HIDDEN, PARENT, READ_ONLY, Names
from jupyter_agentbox.storage.trees import Found, closing, libc, walk

from .paths import MAX_PATH, Parts, show, write_path

_MAX_LINKS = 40
_HIDDEN_SETTING, _READ_ONLY_SETTING = "Policy.hidden_files", "Policy.read_only_files"

KIND_NAMES: dict[Kind, str] = {
    "file": "a file",
    "directory": "a directory",
    "link": "a link",
    "fifo": "a FIFO",
    "socket": "a socket",
    "device": "a device",
}


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
    names : Names, optional
        Classes of names. Hidden ones are treated as nonexistent, read-only ones are not changed.
    at : tuple of str
        Path of the directory in the folder to which the names apply.
    """

    def __init__(self, root: Path | int, names: Names | None = None, at: Parts = ()) -> None:
        self.fd = root if isinstance(root, int) else os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.names, self.at = names or Names(), at

    def beneath(self, fd: int, parts: Parts) -> Tree:
        """Return the directory of a descriptor, which is duplicated, as a tree. `parts` is its path without links."""
        return Tree(os.dup(fd), self.names, self.at + parts)

    def check_name(self, parts: Parts, *, is_change: bool = False, is_folder: bool = False) -> None:
        """Refuse a path with a hidden name, or to change a read-only one.

        The name alone decides, so that the error does not reveal what exists.
        """
        if (refusal := self.find_refusal(parts, is_change=is_change, is_folder=is_folder)) is None:
            return
        reason, setting = refusal
        path = show("/".join(parts))
        if is_change:
            raise PolicyRefused(f"{path} cannot be changed: {reason}", setting=setting)
        raise NotFound(f"{path} does not exist: {reason}", field="path", setting=setting)

    def find_refusal(self, parts: Parts, *, is_change: bool = True, is_folder: bool = False) -> tuple[str, str] | None:
        """Return why a path must not be used, or not be changed, and the setting; None if it may be.

        With `is_folder`, the change is to create a folder, in which ordinary entries may then be created.
        """
        kind, where = self.names.classify(self.at + parts)
        name = show("/".join(where))
        if kind == HIDDEN:
            return f"{name} is hidden in sandboxes ({_HIDDEN_SETTING})", _HIDDEN_SETTING
        if is_change and (kind == READ_ONLY or (kind == PARENT and not is_folder)):
            return f"{name} is read-only in sandboxes ({_READ_ONLY_SETTING})", _READ_ONLY_SETTING
        return None

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
        return self.resolve(parts, follow=follow, follow_last=follow_last)[0]

    def resolve(self, parts: Parts, *, follow: bool = False, follow_last: bool | None = None) -> tuple[int, Parts]:
        """Open an entry as :meth:`open` does, and return its descriptor and its path without links."""
        self.check_name(parts)
        if follow_last is None:
            follow_last = follow
        with translate_os_errors(write_path(parts)):
            if libc.has_openat2:
                try:
                    flags = os.O_PATH if follow_last else os.O_PATH | os.O_NOFOLLOW
                    return libc.openat2(self.fd, "/".join(parts) or ".", flags), parts
                except OSError as error:
                    # The walk finds the cause: a link to follow, or the actual error.
                    libc.has_openat2 = error.errno != errno.ENOSYS
            return self._walk(parts, follow, follow_last)

    def _walk(self, parts: Parts, follow: bool, follow_last: bool) -> tuple[int, Parts]:
        original, links = write_path(parts), 0
        while True:
            index, target = 0, ""
            fd = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                for index, name in enumerate(parts):
                    if name == "..":
                        break  # the names before it have been opened as directories
                    self.check_name(parts[: index + 1])
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
                    return found, parts
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

    def open_parent(self, parts: Parts, *, make: bool = False, is_folder: bool = False) -> int:
        """Open the directory that contains ``parts[-1]``, through no link; with `make`, create it if it is missing.

        ``parts[-1]`` is to be changed. With `is_folder`, it is to be created as a folder.
        """
        if not parts:
            raise InvalidRequest("the folder itself cannot be changed", field="path")
        self.check_name(parts, is_change=True, is_folder=is_folder)
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
        self.check_name(parts, is_change=True, is_folder=True)
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
        budget: Budget,
        *,
        depth: int | None = None,
        enter: Callable[[Parts], bool] | None = None,
        see_hidden: bool = False,
    ) -> Iterator[Found]:
        """Yield the entries beneath the root, sorted by name; all entries of a directory come before their contents.

        If the walk is cut short, `budget` records the reason.

        Parameters
        ----------
        budget : Budget
            Limits on entries and time.
        depth : int, optional
            Maximum number of levels; 1 for the root's own entries only.
        enter : callable, optional
            Called with a directory's parts; returns whether to descend into it.
        see_hidden : bool
            Whether to yield hidden entries. They are never descended into.
        """

        # The state of each directory that is entered, so that each name is classified once.
        states: dict[Parts, tuple[object, ...]] = {(): self._find_state()}
        step, has_names = self.names.step, bool(self.names)

        def is_hidden(found: Found) -> bool:
            return has_names and step(states[found.parts[:-1]], found.name)[0] == HIDDEN

        def descend(found: Found) -> bool:
            parts = found.parts
            if is_hidden(found) or (enter and not enter(parts)) or (depth and len(parts) >= depth):
                return False
            if has_names:
                states[parts] = step(states[parts[:-1]], found.name)[1]
            if len(os.fsencode(found.path)) >= MAX_PATH - 256:
                budget.cut(f"stopped at paths longer than {MAX_PATH - 256} bytes")
                return False
            return True

        def on_error(path: str, error: OSError) -> None:
            if not path:
                raise translate_os_error(error, write_path(())) from error

        for found in walk(self.fd, siblings_first=True, enter=descend, take=budget.take, on_error=on_error):
            if budget.remaining_seconds() <= 0:
                budget.take()
                return
            if see_hidden or not is_hidden(found):
                yield found

    def _find_state(self) -> tuple[object, ...]:
        state: tuple[object, ...] = ()
        for name in self.at:
            state = self.names.step(state, name)[1]
        return state


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
