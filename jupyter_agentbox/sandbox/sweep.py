"""Remove sandboxes whose owners have ended, and everything that belonged to them.

The registry is the file system: one directory for each sandbox beneath ``<state_dir>/sandboxes``. An owner holds a file
lock on ``lock`` in that directory for as long as it lives, and touches the file as the heartbeat of its lease. The
sweep treats each directory as follows:

- The lock is held: the sandbox has an owner, and nothing in it is touched.
- Its processes run and the last heartbeat is younger than the lease: it waits to be adopted.
- It is a managed sandbox that ended on its own before its lease expired: its files are kept for the time stated in its
  ``session.json``.
- Otherwise its processes are killed, and its control groups, its registered paths and its directory are removed. If its
  record is damaged, its workspace is moved to ``<state_dir>/lost``, where it stays until someone deletes it.

An owner that begins to end a sandbox sets the time of its heartbeat to 0, so that no lease remains.

Snapshots that a killed process was saving or preparing for a start are removed too. A process that works on one holds a
lock on it as well.

``runtimes.docker.orphans`` removes containers whose sandbox has no directory any more. It is a program that runs in the
server's environment for a bounded time, because an engine may hang.

This module uses only the standard library and is light to import, because it also runs on its own:
:func:`ensure_sweeper` starts one small process for each state directory. The process sweeps every few seconds until
nothing is left to watch. It ends sandboxes whose owner was killed and whose guest does not exit on its own. It shares
:mod:`jupyter_agentbox.linux` with the package.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from jupyter_agentbox.linux import (
    GONE,
    PACKAGE,
    find_processes,
    get_runtime_directories,
    is_running,
    kill_processes,
    make_bare_command,
    remove_cgroups,
    remove_tree,
    remove_unowned,
    try_lock,
)

#: Seconds between two rounds of the sweeper, and for which it stays when there is nothing to watch.
ROUND_INTERVAL, IDLE_TIMEOUT = 2.0, 30.0
#: Seconds after which a directory that never got a state file is considered abandoned; and for which a directory is
#: kept whose control groups can't be removed, because only it records their names.
CREATION_TIMEOUT, CGROUP_PATIENCE = 60.0, 600.0
#: Seconds between two container sweeps, that one of them may take, and for which the sweeper stays if an engine does
#: not answer.
CONTAINER_INTERVAL, CONTAINER_TIMEOUT, CONTAINER_PATIENCE = 60.0, 60.0, 3600.0
#: Longest lease that a state file can request, in seconds.
MAX_LEASE = 7 * 24 * 3600.0

#: Files in a managed sandbox's directory: the facts that a later server needs, and the mark whose modification time is
#: when the files of an ended sandbox began to be kept.
SESSION_FILE, KEPT_MARK = "session.json", "kept"
#: Longest time for which a session file can have files kept, in seconds.
MAX_KEPT = 31 * 24 * 3600.0
#: Name of a sandbox's record in its directory, and of the state directory's folder for sandboxes with a damaged record.
STATE_FILE, LOST = "state.json", "lost"
#: Entries that are kept of a sandbox whose record is damaged.
_KEPT = ("work", STATE_FILE, SESSION_FILE, "log", "lock")
#: The program that removes containers.
_ORPHANS = PACKAGE / "runtimes" / "docker" / "orphans.py"


# Registry


def _remove_registered(paths: object) -> None:
    """Remove the paths that a sandbox registered, but only those that lie directly in one of our own directories."""
    for text in paths if isinstance(paths, list) else ():
        if not isinstance(text, str):
            continue
        path = Path(text)
        if path.parent in get_runtime_directories() and path.name not in ("", ".", ".."):
            with contextlib.suppress(OSError):
                found = path.parent.lstat()
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
                    remove_tree(path)


def _read_state(directory: Path) -> dict[str, object] | None:
    try:
        state = json.loads((directory / STATE_FILE).read_bytes())
        is_sound = state["id"] == directory.name and isinstance(state["spec"], dict) and state["lease_timeout"] >= 0
        return state if is_sound and isinstance(state["handle"], (dict, type(None))) else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None


def _read_lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text().splitlines()
    return []


def _read_processes(state: dict[str, object]) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the valid processes and control groups from the handle in a state."""
    handle = state.get("handle")
    if not isinstance(handle, dict):
        return [], []
    try:
        processes = [(int(handle["pid"]), int(handle["start_time"]))]
        processes += [(int(pid), int(start)) for pid, start in handle.get("helpers", ())]
        cgroups = [str(path) for path in handle.get("cgroups", ())]
    except (KeyError, TypeError, ValueError, OverflowError):
        return [], []
    return [(pid, start) for pid, start in processes if 0 < pid <= 1 << 22], cgroups  # Linux has no larger process ids


def _read_kept_for(directory: Path) -> float:
    """Return the seconds for which a sandbox's files are kept after an unintended end, or 0 if they are not kept."""
    if not (directory / "work").is_dir():
        return 0.0  # another sandbox has its files
    with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
        return min(float(json.loads((directory / SESSION_FILE).read_bytes())["keep_ended_for"]), MAX_KEPT)
    return 0.0


class _Due(NamedTuple):
    """The facts about a directory that is due for removal."""

    state: dict[str, object]
    heartbeat: float
    lease: float
    kept_for: float
    is_alive: bool
    processes: list[tuple[int, int]]
    cgroups: list[str]


def _inspect(directory: Path, now: float) -> _Due | None:
    """Return the facts about a sandbox's directory if it is due for removal, provided that it has no owner.

    Changes nothing.
    """
    state = _read_state(directory)
    try:
        heartbeat = (directory / "lock").stat().st_mtime
    except FileNotFoundError:
        heartbeat = directory.stat().st_mtime
        if now - heartbeat < CREATION_TIMEOUT:
            return None  # it is being created, or its owner is removing it
    if state is None:
        if now - directory.stat().st_mtime < CREATION_TIMEOUT:
            return None
        state = {}
    processes, cgroups = _read_processes(state)
    lease = state.get("lease_timeout", 0.0)
    lease = min(float(lease), MAX_LEASE) if isinstance(lease, (int, float)) else 0.0
    is_alive = bool(processes) and is_running(*processes[0])
    if is_alive and now - heartbeat < lease:
        return None
    kept_for = _read_kept_for(directory)
    with contextlib.suppress(FileNotFoundError):
        if now - (directory / KEPT_MARK).stat().st_mtime < kept_for:
            return None
        kept_for = 0.0
    return _Due(state, heartbeat, lease, kept_for, is_alive, processes, cgroups)


def _sweep_one(directory: Path, now: float) -> bool:
    """Remove one sandbox's directory if it is due. The caller holds its lock. Return whether it was removed."""
    if not (directory / "lock").exists() or (due := _inspect(directory, now)) is None:
        return False  # another process is removing it, or has adopted it
    # Include processes that an interrupted start never recorded.
    kill_processes({*due.processes, *find_processes(directory)})
    groups = {*due.cgroups, *_read_lines(directory / "bundle" / "cgroups")}
    age = now - (due.heartbeat or directory.stat().st_mtime)
    if remove_cgroups(groups) and age < due.lease + CGROUP_PATIENCE:
        return False
    _remove_registered(due.state.get("cleanup"))
    if not due.state and os.path.lexists(directory / STATE_FILE):
        _set_aside(directory)
        return True
    if not due.is_alive and due.kept_for and now - due.heartbeat < due.lease:
        (directory / KEPT_MARK).touch(0o600)
        return False
    gone = _mark_gone(directory)
    # It may have ended since, but its end was not requested.
    if due.heartbeat and time.time() - due.heartbeat >= due.lease:
        with contextlib.suppress(OSError):  # it was not a managed sandbox, or no server collects these files
            (gone / SESSION_FILE).replace(directory.parents[1] / "lapsed" / directory.name)
    remove_tree(gone)
    return True


def _mark_gone(directory: Path) -> Path:
    gone = directory.with_name(f"{GONE}{os.getpid()}-{directory.name}")
    directory.rename(gone)
    return gone


def remove_directory(directory: Path) -> None:
    """Remove a sandbox's directory. If this process is killed meanwhile, the next sweep removes the rest.

    Without the new name, the rest would look like a sandbox that is being created.
    """
    with contextlib.suppress(FileNotFoundError):
        remove_tree(_mark_gone(directory))


def _set_aside(directory: Path) -> None:
    """Keep the workspace of a sandbox whose record is damaged, for a person to inspect and delete."""
    for name in os.listdir(directory):
        if name not in _KEPT:
            remove_tree(directory / name)
    (directory.parents[1] / LOST).mkdir(mode=0o700, exist_ok=True)
    directory.rename(directory.parents[1] / LOST / directory.name)


def remove_lost(directory: Path) -> bool:
    """End what runs in a sandbox whose record is damaged, and remove all of it. Return False if a process owns it."""
    try:
        with try_lock(directory / "lock") as is_locked:
            if not is_locked:
                return False
            processes, cgroups = _read_processes(_read_state(directory) or {})
            kill_processes({*processes, *find_processes(directory)})
            remove_cgroups({*cgroups, *_read_lines(directory / "bundle" / "cgroups")})
            remove_tree(directory)
    except FileNotFoundError:
        pass
    return True


class ContainerSweep:
    """Removal of containers without a sandbox, in a child process, so that the caller never waits for an engine.

    Parameters
    ----------
    state_dir : Path
        Its file ``engines`` lists the engines. Without that file there is nothing to do.
    python : str, optional
        Interpreter of the server's environment, which has the Docker client. Default: the running interpreter.
    """

    def __init__(self, state_dir: Path, python: str = sys.executable) -> None:
        self._state_dir, self._python = state_dir, python
        self._process: subprocess.Popen[str] | None = None
        self._started, self._is_due, self._was_done = 0.0, True, True

    @property
    def is_done(self) -> bool:
        """Whether the last sweep has finished and no container without a sandbox remained."""
        return self._process is None and self._was_done

    def look(self, *, is_due: bool = False) -> None:
        """Collect the result of a finished sweep, kill one that takes too long, and start the next one if it is due."""
        self._is_due = self._is_due or is_due
        age = time.monotonic() - self._started
        if self._process is not None and (self._process.poll() is not None or age > CONTAINER_TIMEOUT):
            self._finish()
        if self._process is not None or not (self._is_due or age > CONTAINER_INTERVAL):
            return
        self._started, self._is_due = time.monotonic(), False
        if (self._state_dir / "engines").exists():
            try:
                self._process = subprocess.Popen(
                    make_bare_command(_ORPHANS, str(self._state_dir), python=self._python),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={},
                    text=True,
                )
            except OSError:  # the environment was removed
                self._was_done = False

    def wait(self) -> list[str]:
        """Run one sweep to completion, and return the ids of the sandboxes whose containers were removed."""
        self.look(is_due=True)
        if self._process is None:
            return []
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CONTAINER_TIMEOUT)
        return self._finish()

    def _finish(self) -> list[str]:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
        removed = self._process.communicate()[0].split()
        self._was_done, self._process = self._process.returncode == 0, None
        return removed


def sweep(state_dir: Path) -> list[str]:
    """Remove sandboxes that have no owner, and their containers. Takes a minute if an engine hangs.

    Returns the ids of the sandboxes that were removed or moved to the lost ones. A sandbox that can't be removed is
    left for the next round.
    """
    removed = sweep_directories(state_dir)
    return [*removed, *(name for name in ContainerSweep(state_dir).wait() if name not in removed)]


def sweep_directories(state_dir: Path) -> list[str]:
    """Remove sandboxes that have no owner, but not their containers; see :func:`sweep`."""
    _sweep_staged(Path(state_dir) / "snapshots")
    removed = []
    base = Path(state_dir) / "sandboxes"
    try:
        names = sorted(os.listdir(base))
    except FileNotFoundError:
        return []
    now = time.time()
    for name in names:
        directory = base / name
        with contextlib.suppress(OSError):
            if directory.is_symlink() or not directory.is_dir():
                continue
            if name.startswith(GONE):
                remove_tree(directory)
                continue
            if _inspect(directory, now) is None:
                continue  # checked without taking the lock, which would look like ownership
            # An existing lock file is not created again, because its owner may be removing it.
            create = 0 if (directory / "lock").exists() else os.O_CREAT
            with try_lock(directory / "lock", os.O_RDWR | os.O_NOFOLLOW | create) as is_locked:
                if is_locked and _sweep_one(directory, now):
                    removed.append(name)
    return removed


def _sweep_staged(store: Path) -> None:
    """Remove what killed processes were saving or preparing in the snapshot store."""
    # Nothing acquires its own lock while this one is held.
    with contextlib.suppress(OSError), try_lock(store / "lock") as is_quiet:
        if is_quiet:
            remove_unowned(store / "live")


# The sweeper process


def ensure_sweeper(state_dir: Path) -> bool:
    """Make sure that a sweeper process watches ``state_dir``. Return whether one had to be started."""
    with try_lock(Path(state_dir) / "sweeper.lock") as is_free:
        if not is_free:
            return False
    env = {name: os.environ[name] for name in ("XDG_RUNTIME_DIR",) if name in os.environ}
    # It forks and exits immediately, so that the sweeper is not a child that this process would have to reap.
    subprocess.run(
        make_bare_command(__file__, str(state_dir), sys.executable),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=env,
        timeout=30.0,
        check=False,
    )
    return True


def run_sweeper(
    state_dir: Path,
    python: str = sys.executable,
    *,
    interval: float = ROUND_INTERVAL,
    idle_timeout: float = IDLE_TIMEOUT,
) -> None:
    """Sweep repeatedly until no sandbox has existed for ``idle_timeout`` seconds.

    It stays longer, but for a bounded time, while an engine does not confirm that none of its containers is left.
    """
    base = state_dir / "sandboxes"
    containers = ContainerSweep(state_dir, python)
    while True:
        with try_lock(state_dir / "sweeper.lock") as is_locked:
            if not is_locked:
                return
            last_seen = time.monotonic()
            while time.monotonic() - last_seen < (idle_timeout if containers.is_done else CONTAINER_PATIENCE):
                containers.look(is_due=bool(sweep_directories(state_dir)))
                if _has_entries(base):
                    last_seen = time.monotonic()
                time.sleep(interval)
        # A sandbox created just before the lock was released found it held, and relies on this sweeper.
        if not _has_entries(base):
            return


def has_left(state_dir: Path) -> bool:
    """Return whether there may be something to remove: a sandbox, or an engine that had containers."""
    return _has_entries(state_dir / "sandboxes") or (state_dir / "engines").exists()


def _has_entries(directory: Path) -> bool:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return any(True for _ in entries)
    return False


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    run_sweeper(Path(sys.argv[1]), sys.argv[2])
