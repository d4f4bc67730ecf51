"""Enforce the limits that only the owner of a sandbox can enforce: private folders, free space and memory pressure."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.errors import DiskFull
from jupyter_agentbox.linux import measure_tree
from jupyter_agentbox.runtimes import Usage, cgroups
from jupyter_agentbox.runtimes.machine import find_memory_room
from jupyter_agentbox.spec import GIB, MIB, Cause, End, Limits, SandboxSpec, format_size
from jupyter_agentbox.storage.files.atomic import Room

#: The settings that control the disk limit.
DISK_SETTING = "disk of the profile, Policy.max_disk"
#: Bytes by which a sandbox may grow after writing was stopped: this minimum, or this fraction of its limit. And bytes
#: beyond twice the limit with which it ends in any case.
STOPPED_ROOM, STOPPED_DIVISOR, MAX_EXCESS = 32 * MIB, 8, GIB
#: Bytes of a folder of the host that a program writes per second, at most. It determines how often it is measured.
WRITE_RATE = GIB
#: Growth is tracked when less than this multiple of the floor is free.
TRACKING_MULTIPLE = 8
#: Seconds after which a size mark is replaced, as long as enough space is free. Older growth no longer counts.
MARK_INTERVAL = 60.0
#: A sandbox counts as filling the disk if it grows by more than this fraction of the floor while less than the floor is
#: free.
GROWTH_DIVISOR = 16
#: Most entries and seconds for measuring a workspace; pause between two measurements, as a multiple of the last one's
#: duration.
MAX_ENTRIES, MAX_TIME, PAUSE = 1_000_000, 5.0, 10.0
#: Seconds of CPU time that a sandbox must use to count as filling a folder that is too large to measure.
MIN_CPU = 1.0
#: Bytes of memory that programs are assumed to allocate per second, at most. It determines how often memory is checked.
ALLOCATION_RATE = 2 * GIB
#: Seconds between two checks of a sandbox's memory: minimum, maximum, while nothing runs in it, and while it is frozen.
MIN_INTERVAL, MAX_INTERVAL, IDLE_INTERVAL, FROZEN_INTERVAL = 0.02, 2.0, 2.0, 60.0
#: Seconds for which a sandbox counts as running after something was sent to it; and to wait for memory to be freed
#: after a kill.
AWAKE_TIME, FREE_TIMEOUT = 1.0, 1.0
#: Bytes by which the memory of an idle sandbox may grow between two checks.
IDLE_GROWTH = 4 * MIB


class DiskQuota:
    """A limit on disk space above which writing is stopped, and the sandbox ends only if it continues to grow.

    Parameters
    ----------
    limit : int
        Bytes.

    Attributes
    ----------
    is_stopped : bool
        Whether programs were told to stop writing.
    """

    def __init__(self, limit: int) -> None:
        self.is_stopped = False
        self._limit = limit
        self._most = 0

    def is_over(self, used: int) -> bool:
        """Return whether nothing may be written."""
        return used > self._limit

    def mark(self, used: int) -> None:
        """Record the size at the time when writing was stopped. Blocks that are freed later may not be used again."""
        self.is_stopped = True
        self._most = used + max(STOPPED_ROOM, self._limit // STOPPED_DIVISOR)

    def is_escaped(self, used: int) -> bool:
        """Return whether the size grew although writing was stopped, or is far beyond the limit."""
        if not self.is_stopped:
            return False
        self._most = min(self._most, used + max(STOPPED_ROOM, self._limit // STOPPED_DIVISOR))
        return used > min(self._most, 2 * self._limit + MAX_EXCESS)


def describe_full_disk(limit: int, used: int) -> str:
    """Return the sentence that explains a full disk."""
    return f"disk full (limit {format_size(limit)}, used {format_size(used)})"


def end_full_disk(limits: Limits, used: int) -> End:
    """Return the reason of the end of a sandbox that wrote beyond its disk limit."""
    return End(Cause.DISK_FULL, 137, describe_full_disk(limits.disk, used), DISK_SETTING)


def find_breach(usage: Usage, spec: SandboxSpec) -> End | None:
    """Check the memory limit if there is no control group.

    Parameters
    ----------
    usage : Usage
    spec : SandboxSpec

    Returns
    -------
    End or None
        Why the sandbox has to end, or None if it is within its limits.
    """
    limits = spec.limits
    if usage.memory > limits.memory and "memory" in spec.accept_unenforced:
        return End(
            Cause.OUT_OF_MEMORY,
            137,
            f"out of memory (limit {format_size(limits.memory)}, used {format_size(usage.memory)})",
            "memory of the profile, Policy.max_memory",
        )
    return None


@dataclass(frozen=True)
class _Mark:
    """The size of a sandbox's data on one file system at one time."""

    when: float
    size: int
    is_exact: bool
    cpu: float


class FreeSpace:
    """A guard that keeps some space free on the file systems that a sandbox writes to.

    It stops a sandbox if less than the floor is free *and* the sandbox's data there has grown by more than a 16th of
    the floor since more was last free (recorded once a minute). A sandbox that has not grown is never stopped, even if
    another program fills the disk. A sandbox's data is the contents of its workspace, so sandboxes that share a folder
    are stopped together. A folder that is too large to measure counts as growing if the sandbox has used more than a
    second of CPU time.

    Parameters
    ----------
    workspace, directory : Path
        The sandbox's workspace, and its directory on the host.
    floor : int or None
        Bytes to keep free; 0 for none, None for the smaller of 1 GiB and 2 % of the file system.
    """

    def __init__(self, workspace: Path, directory: Path, floor: int | None) -> None:
        self._workspace = workspace
        self._directory = directory
        self._floor = floor
        self._marks: dict[int, _Mark] = {}
        self._next = 0.0

    def _left(self, path: Path) -> tuple[int, int]:
        """Return the bytes that are free above the floor on the file system of `path`, and the floor."""
        found = os.statvfs(path)
        floor = min(GIB, found.f_blocks * found.f_frsize // 50) if self._floor is None else self._floor
        return found.f_bavail * found.f_frsize - floor, floor

    def room(self) -> Room | None:
        """Return how much may be written to the workspace from outside, or None if there is no bound."""
        if self._floor == 0:
            return None
        left, floor = self._left(self._workspace)
        return Room(
            max(0, left), _describe_shortage(self._workspace, left + floor, floor), "Policy.min_free_disk", DiskFull
        )

    def find_breach(self, usage: Usage) -> End | None:
        """Return why the sandbox has to be stopped, or None. Blocks; cheap while space is plentiful. Raises OSError."""
        if self._floor == 0:
            return None
        for path in (self._directory, self._workspace):
            left, floor = self._left(path)
            device = os.stat(path).st_dev
            if left > (TRACKING_MULTIPLE - 1) * floor:
                self._marks.pop(device, None)
                continue
            mark, now = self._marks.get(device), time.monotonic()
            is_old = mark is None or (left >= 0 and now - mark.when > MARK_INTERVAL)
            if not (is_old or left < 0) or now < self._next:
                continue
            found = self._measure(device, usage)
            if mark is None or is_old:
                self._marks[device] = found
            elif found.is_exact and mark.is_exact:
                if found.size - mark.size > floor // GROWTH_DIVISOR:
                    return _end(path, left + floor, floor)
            elif found.cpu - mark.cpu > MIN_CPU:
                return _end(path, left + floor, floor)
        return None

    def _measure(self, device: int, usage: Usage) -> _Mark:
        """Measure the sandbox's data on one file system."""
        began = time.monotonic()
        size, is_exact = 0, True
        if os.stat(self._directory).st_dev == device:
            size += usage.disk
        if self._workspace.parent != self._directory and os.stat(self._workspace).st_dev == device:
            folder, is_exact = measure_tree(self._workspace, MAX_ENTRIES, MAX_TIME)
            size += folder + usage.held
        now = time.monotonic()
        self._next = now + PAUSE * (now - began)
        return _Mark(now, size, is_exact, usage.cpu)


def _describe_shortage(path: Path, free: int, floor: int) -> str:
    return (
        f"the disk of {path} has {format_size(max(0, free))} left, and {format_size(floor)} must stay free. Delete"
        " files there, or lower Policy.min_free_disk"
    )


def _end(path: Path, free: int, floor: int) -> End:
    sentence = f"disk full: the sandbox was filling a disk of the host; {_describe_shortage(path, free, floor)}"
    return End(Cause.DISK_FULL, 137, sentence, "Policy.min_free_disk")


class MemoryWatch:
    """A watch that has a program killed before the control group ends the whole sandbox.

    Use on the link thread only. The less memory is left, the more often it checks; while nothing runs in the sandbox,
    it rarely checks. Programs that allocate faster than `ALLOCATION_RATE` can outrun it. In that case the control group
    ends the sandbox.

    Parameters
    ----------
    paths : sequence of str
        The sandbox's control groups.
    limit : int
        Bytes.
    is_busy, is_frozen : callable
        Return whether something runs in the sandbox, and whether it is frozen.
    relieve : coroutine function
        Called with the bytes in use and the excess. Has a program killed and returns its size, or 0 if none was killed.
    """

    def __init__(
        self,
        paths: Sequence[str],
        limit: int,
        is_busy: Callable[[], bool],
        is_frozen: Callable[[], bool],
        relieve: Callable[[int, int], Awaitable[int]],
    ) -> None:
        self._paths = paths
        self._most = limit - find_memory_room(limit)
        self._is_busy = is_busy
        self._is_frozen = is_frozen
        self._relieve = relieve
        self._woken = asyncio.Event()
        self._awake_until = 0.0

    def wake(self) -> None:
        """Check the memory soon, because something was sent to the sandbox."""
        self._woken.set()

    async def run(self) -> None:
        """Watch the memory until cancelled. Returns immediately if no control group counts it."""
        last = 0
        while self._paths:
            used = cgroups.read_pressure(self._paths, self._most)
            if used is None:  # not counted by any group, or no file can be opened at the moment
                await asyncio.sleep(MAX_INTERVAL)
                continue
            if used > self._most:
                freed = await self._relieve(used, used - self._most)
                await self._wait_freed(used - freed // 2 if freed else self._most)
            elif used > last + IDLE_GROWTH or time.monotonic() < self._awake_until or self._is_busy():
                await asyncio.sleep(min(MAX_INTERVAL, max(MIN_INTERVAL, (self._most - used) / ALLOCATION_RATE)))
            else:
                self._woken.clear()
                with suppress(asyncio.TimeoutError):
                    timeout = FROZEN_INTERVAL if self._is_frozen() else IDLE_INTERVAL
                    await asyncio.wait_for(self._woken.wait(), timeout)
                    self._awake_until = time.monotonic() + AWAKE_TIME
            last = used

    async def _wait_freed(self, target: int) -> None:
        """Wait until at most `target` bytes are in use.

        gVisor takes a moment to return the memory of an ended program.
        """
        deadline = time.monotonic() + FREE_TIMEOUT
        target = max(target, self._most)
        while time.monotonic() < deadline:
            if (cgroups.read_pressure(self._paths, target) or 0) <= target:
                break
            await asyncio.sleep(MIN_INTERVAL)
