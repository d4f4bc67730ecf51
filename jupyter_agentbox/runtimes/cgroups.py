"""Find, create and read control groups of both versions, and set a sandbox's limits on them.

A root server creates them beneath its own group. An ordinary user creates them in a version 2 group that was delegated
to the user, as systemd does for user sessions. A limit that cannot be enforced is reported by name with the reason, and
never silently ignored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_agentbox.errors import RuntimeFailed
from jupyter_agentbox.linux import remove_cgroups
from jupyter_agentbox.spec import Limits

CPU_PERIOD = 100_000  # microseconds
#: Host processes and threads allowed for each one inside, because gVisor needs a few for each. The limit that gVisor
#: enforces inside comes first. This one is only a backstop, because reaching it ends the sandbox.
TASKS_PER_PROCESS, TASKS_BASE = 4, 1024

REMEDY = (
    "run Jupyter where control groups are delegated, such as `systemd-run --user --scope -p Delegate=yes jupyter lab`,"
    " or as root, or set RunscRuntime.cgroup_parent to a group that this user may write to"
)


@dataclass(frozen=True)
class Cgroups:
    """The places where control groups can be created.

    Parameters
    ----------
    parents : mapping of str to Path
        Parent directory by controller: ``memory``, ``cpu``, ``pids`` and, in version 1, ``cpuacct``.
    reasons : mapping of str to str
        For each controller without a parent, the reason.
    """

    parents: Mapping[str, Path] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def enforceable(self) -> dict[str, str | None]:
        """Return for each limit the reason why it cannot be enforced, or None if it can.

        gVisor enforces ``processes`` inside, and control groups are only a backstop. gVisor also enforces ``disk``, by
        the size of the writable layer. The owner measures a private workspace.
        """
        return {
            "memory": self._reason("memory"),
            "cpus": self._reason("cpu"),
            "processes": None,
            "disk": None,
        }

    def _reason(self, controller: str) -> str | None:
        if controller in self.parents:
            return None
        return self.reasons.get(controller, f"the {controller} controller does not exist")

    def name(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the directories that :meth:`create` creates."""
        return tuple(dict.fromkeys(str(parent / f"agentbox-{sandbox_id}") for parent in self.parents.values()))

    def create(self, sandbox_id: str, limits: Limits) -> tuple[str, ...]:
        """Create the groups of one sandbox, set its limits, and return the directories of the groups.

        Raises
        ------
        RuntimeFailed
            The kernel refused. No group is left behind.
        """
        paths = self.name(sandbox_id)
        try:
            for path in map(Path, paths):
                path.mkdir(mode=0o755, exist_ok=True)
                for name, value in make_settings(limits).items():
                    _set(path, name, value)
        except OSError as error:
            remove_cgroups(paths)
            raise RuntimeFailed(f"cannot create the sandbox's control group: {error}") from error
        return paths


def lower(paths: Iterable[str], limits: Limits) -> frozenset[str]:
    """Lower the limits of groups that contain processes, and return the names of limits that were not lowered.

    Without a group, the owner watches the memory limit, and nothing limits the share of processor time.
    """
    paths = tuple(paths)
    if not paths:
        return frozenset({"cpus"})
    used = read_memory(paths)
    if used is not None and used > limits.memory:
        return frozenset({"memory"})
    try:
        for path in map(Path, paths):
            for name, value in make_settings(limits).items():
                _set(path, name, value)
    except OSError:
        return frozenset({"memory", "cpus"})
    return frozenset()


def make_settings(limits: Limits) -> dict[str, str]:
    """Return the values to write by file name, for both versions. Files that a group lacks are skipped."""
    quota = max(1000, round(limits.cpus * CPU_PERIOD))
    tasks = limits.processes * TASKS_PER_PROCESS + TASKS_BASE
    return {
        "memory.limit_in_bytes": str(limits.memory),
        "memory.memsw.limit_in_bytes": str(limits.memory),
        "memory.max": str(limits.memory),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.cfs_period_us": str(CPU_PERIOD),
        "cpu.cfs_quota_us": str(quota),
        "cpu.max": f"{quota} {CPU_PERIOD}",
        "pids.max": str(tasks),
    }


def _set(path: Path, name: str, value: str) -> None:
    file = path / name
    # Without O_CREAT: a missing file means that this kernel does not have the setting.
    try:
        handle = os.open(file, os.O_WRONLY)
    except FileNotFoundError:
        return
    try:
        os.write(handle, value.encode())
    finally:
        os.close(handle)


def detect(
    parent: str = "", *, mountinfo: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
) -> Cgroups:
    """Find where control groups can be created.

    Parameters
    ----------
    parent : str
        Directory to use for all its controllers (version 2), or a path beneath each controller's own mount (version 1).
        Empty selects one automatically.
    mountinfo, own : Path
        The tables of mounts and of the server's own groups. Only tests pass other paths.
    """
    try:
        mounts = _read_mounts(mountinfo.read_text())
        groups = _read_own(own.read_text())
    except OSError as error:
        return Cgroups(reasons=dict.fromkeys(("memory", "cpu", "pids"), f"control groups cannot be read: {error}"))
    parents: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    unified = _find_unified(mounts.get(""), groups.get("", "/"), parent)
    for controller in ("memory", "cpu", "pids", "cpuacct"):
        if controller in mounts:
            root, point = mounts[controller]
            directory = _join(point, root, parent or groups.get(controller, "/"))
            if os.access(directory, os.W_OK):
                parents[controller] = directory
            else:
                reasons[controller] = f"this user cannot create control groups in {directory}"
        elif controller != "cpuacct":
            if unified is None:
                reasons[controller] = "no control group was delegated to this user"
            elif _has_controller(unified, controller):
                parents[controller] = unified
            else:
                reasons[controller] = f"the {controller} controller is not delegated to {unified}"
    return Cgroups(parents, reasons)


def _read_mounts(text: str) -> dict[str, tuple[str, Path]]:
    """Return root and mount point by controller. The unified hierarchy has the empty name."""
    found: dict[str, tuple[str, Path]] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            found.setdefault("", (fields[3], Path(fields[4])))
        elif kind[0] == "cgroup":
            for option in kind[2].split(","):
                if option in ("memory", "cpu", "cpuacct", "pids"):
                    found.setdefault(option, (fields[3], Path(fields[4])))
    return found


def _read_own(text: str) -> dict[str, str]:
    found = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in names.split(","):
            found[name] = path
    return found


def _join(point: Path, root: str, path: str) -> Path:
    """Return the directory of a group on a mount that may show only part of the hierarchy."""
    if root != "/" and (path + "/").startswith(root.rstrip("/") + "/"):
        path = path[len(root.rstrip("/")) :]
    return point / path.strip("/")


def _find_unified(mount: tuple[str, Path] | None, own: str, parent: str) -> Path | None:
    """Return the nearest group, at or above our own, that may have children with limits."""
    if mount is None:
        return None
    root, point = mount
    if parent:
        return Path(parent) if parent.startswith(str(point)) else _join(point, root, parent)
    directory = _join(point, root, own)
    while directory == point or point in directory.parents:
        if _can_have_children(directory, is_top=directory == point):
            return directory
        directory = directory.parent
    return None


def _can_have_children(directory: Path, *, is_top: bool) -> bool:
    if not os.access(directory, os.W_OK) or not os.access(directory / "cgroup.procs", os.W_OK):
        return False
    wanted = {"memory", "cpu", "pids"}
    missing = wanted - _read_words(directory / "cgroup.subtree_control")
    available = missing & _read_words(directory / "cgroup.controllers")
    # A group that contains processes cannot pass controllers on to children, except at the very top.
    if available and (is_top or not _read_words(directory / "cgroup.procs")):
        for controller in sorted(available):
            with contextlib.suppress(OSError):
                _set(directory, "cgroup.subtree_control", f"+{controller}")
    return "memory" in _read_words(directory / "cgroup.subtree_control")


def _has_controller(directory: Path, controller: str) -> bool:
    return controller in _read_words(directory / "cgroup.subtree_control")


def _read_words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


def find_groups_of(
    pid: int, *, mountinfo: Path = Path("/proc/self/mountinfo"), proc: Path = Path("/proc")
) -> tuple[str, ...]:
    """Return the directories of groups that another program created for a process, without those it shares with us."""
    try:
        mounts = _read_mounts(mountinfo.read_text())
        groups, ours = _read_own((proc / f"{pid}/cgroup").read_text()), _read_own((proc / "self/cgroup").read_text())
    except OSError:
        return ()
    directories = [
        _join(mounts[name][1], mounts[name][0], groups[name])
        for name in ("memory", "cpu", "cpuacct", "pids", "")
        if name in mounts and name in groups and groups[name] != ours.get(name)
    ]
    return tuple(dict.fromkeys(str(directory) for directory in directories if directory.is_dir()))


# Counters


def read_pids(paths: Iterable[str]) -> list[str] | None:
    """Return the pids of the processes in the groups; None without a group."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError):
            return (path / "cgroup.procs").read_text().split()
    return None


def read_memory(paths: Iterable[str]) -> int | None:
    """Return the bytes in use, without file cache that can be dropped; None if no group counts them."""
    for path in map(Path, paths):
        for name, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
            with contextlib.suppress(OSError, ValueError):
                used = int((path / name).read_text())
                return max(0, used - _read_key(path / "memory.stat", cache))
    return None


def read_pressure(paths: Iterable[str], most: int) -> int | None:
    """Return the bytes in use, excluding all file cache if they exceed `most`; None if no group counts them.

    Cheaper than :func:`read_memory` while usage is below `most`. Memory that gVisor allocates for the inside is not
    file cache.
    """
    for path in map(Path, paths):
        for name, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
            with contextlib.suppress(OSError, ValueError):
                used = int((path / name).read_text())
                if used > most:
                    for kind in ("inactive_file", "active_file"):
                        used -= _read_key(path / "memory.stat", prefix + kind)
                return max(0, used)
    return None


def read_cpu(paths: Iterable[str]) -> float | None:
    """Return the processor seconds used; None if no group counts them."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError, ValueError):
            return int((path / "cpuacct.usage").read_text()) / 1e9
        if microseconds := _read_key(path / "cpu.stat", "usage_usec"):
            return microseconds / 1e6
    return None


def read_oom_kills(paths: Iterable[str]) -> int:
    """Return the number of out-of-memory kills by the kernel in these groups."""
    return sum(
        _read_key(Path(path) / name, "oom_kill") for path in paths for name in ("memory.events", "memory.oom_control")
    )


def read_all_oom_kills() -> int:
    """Return the number of out-of-memory kills by the kernel on this machine."""
    return _read_key(Path("/proc/vmstat"), "oom_kill")


def _read_key(path: Path, key: str) -> int:
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
