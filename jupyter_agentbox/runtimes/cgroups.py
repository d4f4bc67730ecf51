"""Control groups of both versions: where a sandbox's can be made, its limits, and what the counters say.

As root beneath the server's own group; as an ordinary user where a version 2 group was delegated, which systemd does
for its user sessions. What cannot be enforced is said by name and with the reason, never left out silently.
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
#: Of the host's processes and threads for one inside: gVisor needs a few for each. This is only a backstop behind the
#: limit that gVisor enforces inside, since reaching it ends the sandbox.
TASKS_PER_PROCESS, TASKS_BASE = 4, 1024

REMEDY = (
    "run Jupyter where control groups are delegated, such as `systemd-run --user --scope -p Delegate=yes jupyter lab`,"
    " or as root, or set RunscRuntime.cgroup_parent to a group that this user may write to"
)


@dataclass(frozen=True)
class Cgroups:
    """Where groups are made.

    Parameters
    ----------
    parents : mapping of str to Path
        Parent directory by controller: ``memory``, ``cpu``, ``pids`` and, in version 1, ``cpuacct``.
    reasons : mapping of str to str
        Why a controller has none.
    """

    parents: Mapping[str, Path] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def enforceable(self) -> dict[str, str | None]:
        """Tell for each limit why it cannot be enforced; None where it can.

        ``processes`` is enforced by gVisor inside, with control groups as a backstop only; ``disk`` by gVisor for
        each file, for their sum by a limit on the size of the file that holds the writable layer, rounded up to whole
        GiB, and exactly by the owner, who watches the blocks allocated and ends the sandbox that is over.
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
        return self.reasons.get(controller, f"there is no {controller} controller")

    def name(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the directories that :meth:`create` makes."""
        return tuple(dict.fromkeys(str(parent / f"agentbox-{sandbox_id}") for parent in self.parents.values()))

    def create(self, sandbox_id: str, limits: Limits) -> tuple[str, ...]:
        """Make the groups of one sandbox with its limits set, and return their directories.

        Raises
        ------
        RuntimeFailed
            The kernel refused; nothing is left behind.
        """
        paths = self.name(sandbox_id)
        try:
            for path in map(Path, paths):
                path.mkdir(mode=0o755, exist_ok=True)
                for name, value in make_settings(limits).items():
                    _set(path, name, value)
        except OSError as error:
            remove_cgroups(paths)
            raise RuntimeFailed(f"the control group of the sandbox could not be made: {error}") from error
        return paths


def lower(paths: Iterable[str], limits: Limits) -> frozenset[str]:
    """Lower the limits of groups with processes in them, and return the names of those that were not.

    Without a group the owner watches the memory limit, and nobody the share of processor time.
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
    """Return what to write into which file, for both versions; a file that a group lacks is passed over."""
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
    # Without O_CREAT: a missing file is a setting that this kernel does not have.
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
    """Find where groups can be made.

    Parameters
    ----------
    parent : str
        Directory to use for every controller it has (version 2), or a path beneath each controller's own mount
        (version 1); empty finds one.
    mountinfo, own : Path
        The tables of mounts and of the server's own groups; others in tests only.
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
            place = _join(point, root, parent or groups.get(controller, "/"))
            if os.access(place, os.W_OK):
                parents[controller] = place
            else:
                reasons[controller] = f"this user may not make control groups in {place}"
        elif controller != "cpuacct":
            if unified is None:
                reasons[controller] = "no control group was delegated to this user"
            elif _has_controller(unified, controller):
                parents[controller] = unified
            else:
                reasons[controller] = f"the {controller} controller is not delegated to {unified}"
    return Cgroups(parents, reasons)


def _read_mounts(text: str) -> dict[str, tuple[str, Path]]:
    """Return root and mount point by controller; the unified hierarchy has the empty name."""
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
    """Return the directory of a group on a mount that may show only a part of the hierarchy."""
    if root != "/" and (path + "/").startswith(root.rstrip("/") + "/"):
        path = path[len(root.rstrip("/")) :]
    return point / path.strip("/")


def _find_unified(mount: tuple[str, Path] | None, own: str, parent: str) -> Path | None:
    """Find the nearest group at or above our own that may have children with limits."""
    if mount is None:
        return None
    root, point = mount
    if parent:
        return Path(parent) if parent.startswith(str(point)) else _join(point, root, parent)
    place = _join(point, root, own)
    while place == point or point in place.parents:
        if _can_have_children(place, is_top=place == point):
            return place
        place = place.parent
    return None


def _can_have_children(place: Path, *, is_top: bool) -> bool:
    if not os.access(place, os.W_OK) or not os.access(place / "cgroup.procs", os.W_OK):
        return False
    wanted = {"memory", "cpu", "pids"}
    missing = wanted - _read_words(place / "cgroup.subtree_control")
    available = missing & _read_words(place / "cgroup.controllers")
    # A group with processes of its own cannot give controllers to children, except at the very top.
    if available and (is_top or not _read_words(place / "cgroup.procs")):
        for controller in sorted(available):
            with contextlib.suppress(OSError):
                _set(place, "cgroup.subtree_control", f"+{controller}")
    return "memory" in _read_words(place / "cgroup.subtree_control")


def _has_controller(place: Path, controller: str) -> bool:
    return controller in _read_words(place / "cgroup.subtree_control")


def _read_words(path: Path) -> set[str]:
    try:
        return set(path.read_text().split())
    except OSError:
        return set()


def find_of(pid: int, *, mountinfo: Path = Path("/proc/self/mountinfo"), proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Return the directories of the groups that somebody else made for a process; none for those it shares with us."""
    try:
        mounts = _read_mounts(mountinfo.read_text())
        groups, ours = _read_own((proc / f"{pid}/cgroup").read_text()), _read_own((proc / "self/cgroup").read_text())
    except OSError:
        return ()
    places = [
        _join(mounts[name][1], mounts[name][0], groups[name])
        for name in ("memory", "cpu", "cpuacct", "pids", "")
        if name in mounts and name in groups and groups[name] != ours.get(name)
    ]
    return tuple(dict.fromkeys(str(place) for place in places if place.is_dir()))


# Counters


def read_pids(paths: Iterable[str]) -> list[str] | None:
    """Return the pids of the processes in the groups; None where there is no group."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError):
            return (path / "cgroup.procs").read_text().split()
    return None


def read_memory(paths: Iterable[str]) -> int | None:
    """Return the bytes in use, without file cache that can be dropped; None where no group counts them."""
    for path in map(Path, paths):
        for name, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
            with contextlib.suppress(OSError, ValueError):
                used = int((path / name).read_text())
                return max(0, used - _read_key(path / "memory.stat", cache))
    return None


def read_pressure(paths: Iterable[str], most: int) -> int | None:
    """Return the bytes in use, without any file cache if they are more than `most`; None where no group counts them.

    Cheaper than :func:`read_memory` as long as they are not. What gVisor has allocated for the inside is no file cache.
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
    """Return the processor seconds used; None where no group counts them."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError, ValueError):
            return int((path / "cpuacct.usage").read_text()) / 1e9
        if microseconds := _read_key(path / "cpu.stat", "usage_usec"):
            return microseconds / 1e6
    return None


def read_oom_kills(paths: Iterable[str]) -> int:
    """Return how often the kernel killed for memory in these groups."""
    return sum(
        _read_key(Path(path) / name, "oom_kill") for path in paths for name in ("memory.events", "memory.oom_control")
    )


def read_all_oom_kills() -> int:
    """Return how often the kernel killed for memory on this machine."""
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
