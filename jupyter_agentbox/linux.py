"""Linux primitives for the package: process handles, control groups, removal of hostile trees, files and locks.

This module uses the standard library only and imports quickly, because the sweeper runs as a separate program in a
bare interpreter: see :func:`make_bare_command`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

#: The folder of this package, and the folder of the guest program, which is PID 1 inside.
PACKAGE = Path(__file__).resolve().parent
GUEST = PACKAGE / "guest"
#: Prefix of directories that :func:`remove_tree` moves up, and of a sandbox directory that is being removed.
GONE = ".gone-"
#: Prefix of an incomplete file or folder. It is renamed to its final name once it is complete.
NEW = ".new-"


# Processes


def read_start_time(pid: int) -> int | None:
    """Return a process's start time in ticks since boot, or None if it has ended or is a zombie.

    Raises OSError if the start time cannot be read.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process name, in brackets, may contain anything, so fields are counted from the last bracket.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if not fields or fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def is_running(pid: int, start_time: int) -> bool:
    """Return whether this process still runs, as opposed to another process that now has the same pid."""
    return read_start_time(pid) == start_time


def find_processes(directory: Path, among: Iterable[str] | None = None) -> list[tuple[int, int]]:
    """Find the processes that runsc started for a sandbox directory, by their command lines.

    `among` restricts the search to these pids, if the caller knows the candidates.
    """
    wanted = b"--root=" + os.fsencode(directory / "state")
    found = []
    for name in os.listdir("/proc") if among is None else among:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb", buffering=0) as file:
                    arguments = file.read(65536).split(b"\0")
            except OSError:
                continue
            start_time = read_start_time(int(name)) if wanted in arguments else None
            if start_time is not None:
                found.append((int(name), start_time))
    return found


def kill_processes(processes: Iterable[tuple[int, int]], timeout: float = 10.0) -> list[int]:
    """Kill processes given by pid and start time, and wait until they have ended.

    Returns
    -------
    list of int
        Pids of processes that still exist after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    left = []
    with contextlib.ExitStack() as handles:
        watched = []
        for pid, start_time in processes:
            try:
                # Open the handle before checking the start time: while the handle is open, it refers to one process
                # only.
                handle = os.pidfd_open(pid)
                handles.callback(os.close, handle)
                if is_running(pid, start_time):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    watched.append((pid, start_time, handle))
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    left.append(pid)
        for pid, start_time, handle in watched:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000) and is_running(pid, start_time):
                left.append(pid)
            else:
                _reap(pid)
    return left


def send_signal(pid: int, start_time: int, number: int) -> bool:
    """Send a signal to this process only, never to another process that now has its pid; return whether it was sent."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if is_running(pid, start_time):
                signal.pidfd_send_signal(handle, number)
                return True
        finally:
            os.close(handle)
    return False


def _reap(pid: int) -> None:
    """Reap a process if it is our child. A server that is PID 1 of a container inherits detached processes."""
    with contextlib.suppress(OSError):
        if int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
            os.waitpid(pid, os.WNOHANG)


# Control groups and directories


def remove_cgroups(paths: Iterable[str], timeout: float = 5.0) -> list[str]:
    """Remove control groups that this package created, killing what runs in them; return those that remain."""
    deadline = time.monotonic() + timeout
    left = []
    for text in paths:
        path = Path(text)
        if not (path.name.startswith("agentbox-") and text.startswith("/sys/fs/cgroup/") and ".." not in path.parts):
            continue  # not created by this package, whatever a state file says
        while True:
            try:
                path.rmdir()
                break
            except FileNotFoundError:
                break
            except OSError:
                if time.monotonic() > deadline:
                    left.append(text)
                    break
            with contextlib.suppress(OSError, ValueError):
                pids = [int(line) for line in (path / "cgroup.procs").read_text().split()]
                kill_processes([(pid, read_start_time(pid) or 0) for pid in pids], 1.0)
            time.sleep(0.01)
    return left


def remove_tree(directory: Path) -> None:
    """Remove a directory tree that hostile code may have written to.

    Links are not followed, names may be any bytes, and unreadable directories are made readable. Any depth works,
    because nested directories are moved to the top instead of being descended into. No process may still run in the
    tree. A tree that does not exist is not an error.
    """
    try:
        top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except (NotADirectoryError, OSError) as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            directory.unlink(missing_ok=True)
            return
        raise
    try:
        serial = 0
        while folders := _unlink_files(top):
            for folder in folders:
                handle = _open_folder(top, folder)
                try:
                    for child in _unlink_files(handle):
                        serial += 1
                        os.close(_open_folder(handle, child))  # moving a directory requires write permission on it
                        os.rename(
                            child, b"%s%d.%d" % (GONE.encode(), os.getpid(), serial), src_dir_fd=handle, dst_dir_fd=top
                        )
                finally:
                    os.close(handle)
                os.rmdir(folder, dir_fd=top)
    finally:
        os.close(top)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(directory)


def _open_folder(parent: int, name: bytes) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        handle = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        # Always a directory: no process runs that could have replaced it with a link since it was listed.
        os.chmod(name, 0o700, dir_fd=parent)
        return os.open(name, flags, dir_fd=parent)
    if os.fstat(handle).st_mode & 0o700 != 0o700:
        with contextlib.suppress(PermissionError):
            os.fchmod(handle, 0o700)
    return handle


def _unlink_files(handle: int) -> list[bytes]:
    """Unlink all entries except directories, and return the names of the directories found."""
    folders = []
    # By descriptor instead of by path, because the path may be too long.
    with os.scandir(handle) as entries:
        names = ((os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries)
        for name, is_folder in names:
            if is_folder:
                folders.append(name)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=handle)
    return folders


def measure_tree(path: str | os.PathLike[str], max_entries: int = 100_000, max_time: float = 1.0) -> tuple[int, bool]:
    """Return the allocated bytes beneath a folder that hostile code writes to, and whether the whole tree was read.

    No link is followed, not even one that replaces a folder during the walk. The walk is bounded in entries and
    seconds.
    """
    total, seen, deadline = 0, 0, time.monotonic() + max_time
    folders: list[tuple[str, ...]] = [()]
    while folders:
        parts = folders.pop()
        with contextlib.suppress(OSError), _opened_below(path, parts) as handle, os.scandir(handle) as entries:
            for entry in entries:
                seen += 1
                if seen > max_entries or time.monotonic() > deadline:
                    return total, False
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((*parts, entry.name))
    return total, True


@contextlib.contextmanager
def _opened_below(top: str | os.PathLike[str], parts: Sequence[str]) -> Iterator[int]:
    """Open a folder component by component without following links."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(top, flags)
    try:
        for part in parts:
            below = os.open(part, flags, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def remove_unfinished(folder: Path, min_age: float) -> None:
    """Remove incomplete files and directories (see :data:`NEW`) in a folder that are older than `min_age` seconds.

    An incomplete entry is left over when its creator is killed before it renames the entry.
    """
    for path in folder.glob(f"{NEW}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > min_age:
                remove_tree(path)


def remove_unowned(folder: Path) -> list[str]:
    """Remove the directories in a folder whose file ``lock`` no process holds, and return their names.

    A directory exists before its lock does, so the caller must make sure that no directory is created at the same time.
    """
    removed = []
    for path in sorted(folder.iterdir()):
        with contextlib.suppress(OSError):
            if path.is_symlink() or not path.is_dir():
                continue
            if not is_locked(path / "lock"):
                remove_tree(path)
                removed.append(path.name)
    return removed


def get_runtime_directories() -> list[Path]:
    """Return the candidate directories for this user's short-lived sockets; some may not exist."""
    found = [Path(f"/tmp/agentbox-{os.geteuid()}")]
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        found.insert(0, Path(base) / "agentbox")
    return found


# Files


def write_atomically(
    path: Path, data: bytes, mode: int = 0o600, *, is_durable: bool = False, is_new: bool = False
) -> None:
    """Write a file atomically, in a folder that hostile code cannot write to.

    Parameters
    ----------
    path : Path
    data : bytes
    mode : int
        The file's permissions, independent of the umask.
    is_durable : bool
        Flush the data to the disk before the file gets its name.
    is_new : bool
        Keep an existing file unchanged. If several processes write simultaneously, the first one creates the file.
    """
    fresh = path.with_name(f"{NEW}{path.name}-{os.urandom(8).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(fresh, flags, 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            os.fchmod(handle, mode)
            if is_durable:
                file.flush()
                os.fsync(handle)
        if not is_new:
            fresh.replace(path)
            return
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        fresh.unlink()
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


# Locks

_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW


def acquire_lock(handle: int, timeout: float = 0.0, *, is_shared: bool = False) -> bool:
    """Lock an open file or folder, waiting up to `timeout` seconds; return whether the lock is held."""
    kind = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if timeout == math.inf else fcntl.LOCK_NB)
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(handle, kind)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        else:
            return True


def open_locked(path: Path, timeout: float = 0.0, flags: int = _LOCK_FLAGS) -> int | None:
    """Open a file or folder and lock it until the descriptor is closed; return None if it stays locked."""
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    is_held = False
    try:
        is_held = acquire_lock(handle, timeout)
    finally:
        if not is_held:
            os.close(handle)
    return handle if is_held else None


@contextlib.contextmanager
def try_lock(path: Path, flags: int = _LOCK_FLAGS, *, timeout: float = 0.0) -> Iterator[bool]:
    """Hold the lock on a file or folder inside the block, if it becomes free in time; yield whether it is held."""
    handle = open_locked(path, timeout, flags)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock on a file; false if the file does not exist."""
    try:
        with try_lock(path, os.O_RDWR | os.O_NOFOLLOW) as is_free:
            return not is_free
    except FileNotFoundError:
        return False


# Bare programs


def make_bare_command(program: str | Path, *arguments: str, python: str = "") -> list[str]:
    """Return the command that runs a file of the package in a bare interpreter.

    The interpreter has the standard library, then the package. It takes nothing from the environment: no site-packages,
    no Python environment variables, no user site.

    Parameters
    ----------
    program : str or Path
        The file. Unless `python` is given, it may import only the standard library and this module.
    python : str, optional
        Interpreter to use instead, from an environment whose packages the program also needs.
    """
    # The package's folder comes last, so that it cannot shadow a module of the standard library.
    code = (
        "import runpy, sys; del sys.argv[0]; sys.path.append(sys.argv.pop(0)); "
        "runpy.run_path(sys.argv[0], None, '__main__')"
    )
    interpreter = [python, "-I"] if python else [find_python(), "-I", "-S"]
    return [*interpreter, "-B", "-c", code, str(PACKAGE.parent), os.path.abspath(program), *arguments]


def find_python() -> str:
    """Return the path of the base interpreter, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
