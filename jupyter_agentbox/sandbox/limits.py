"""Limits that nothing but the owner holds a sandbox to."""

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
from jupyter_agentbox.spec import GIB, MIB, Cause, End, SandboxSpec, format_size
from jupyter_agentbox.storage.files.atomic import Room

#: Where less than so many times the floor is free, it is watched what grows.
NEAR = 8
#: Seconds after which what has grown since counts no more, as long as enough is free.
MARK_INTERVAL = 60.0
#: What a sandbox may grow by below the floor before it counts as filling the disk: this part of the floor.
SHARE = 16
#: Entries and seconds in which a work folder is measured for that; seconds between two measures, in times of the last.
MAX_ENTRIES, MAX_TIME, PAUSE = 1_000_000, 5.0, 10.0
#: Seconds of processor time that a sandbox has to use to be taken for what fills a folder that cannot be measured.
MIN_CPU = 1.0
#: Bytes of memory that programs may allocate in a second; they are looked at so often that they do not get past us.
ALLOCATION_RATE = 2 * GIB
#: Seconds between two looks at a sandbox's memory: at least, at most, and where nothing runs in it or it is frozen.
MIN_LOOK, MAX_LOOK, IDLE_LOOK, FROZEN_LOOK = 0.02, 2.0, 2.0, 60.0
#: Seconds for which one that was sent something counts as running; and for memory to be free after a kill.
AWAKE_TIME, FREE_TIMEOUT = 1.0, 1.0
#: Bytes by which the memory of one in which nothing runs may grow between two looks.
IDLE_GROWTH = 4 * MIB


def find_breach(usage: Usage, spec: SandboxSpec, room: int) -> End | None:
    """Judge what no one else holds it to: the disk always, memory where there is no control group.

    Parameters
    ----------
    usage : Usage
    spec : SandboxSpec
    room : int
        Bytes that it may have on the disk now; the limit, or more where it has inherited more.
    """
    limits = spec.limits
    if usage.disk > room:
        return End(
            Cause.DISK_FULL,
            137,
            f"disk full (limit {format_size(limits.disk)}, used {format_size(usage.disk)})",
            "limits.disk of the profile, Policy.max_disk",
        )
    if usage.memory > limits.memory and "memory" in spec.accept_unenforced:
        return End(
            Cause.OUT_OF_MEMORY,
            137,
            f"out of memory (limit {format_size(limits.memory)}, used {format_size(usage.memory)})",
            "limits.memory of the profile, Policy.max_memory",
        )
    return None


@dataclass(frozen=True)
class _Mark:
    """What a sandbox held on one file system at some time."""

    when: float
    size: int
    is_exact: bool
    cpu: float


class FreeSpace:
    """Keeps some space free on the file systems that a sandbox writes to.

    A sandbox is stopped if less than the floor is free *and* what it holds there has grown, by a 16th of the floor,
    since there was last more (looked at once a minute). One that has not grown is never stopped, whoever fills the
    disk. What a sandbox holds is what lies in its work folder, so those that share a folder are stopped together. A
    folder too large to be measured counts as growing if the sandbox has used a second of processor time.

    Parameters
    ----------
    workspace, directory : Path
        Its work folder, and its directory on the host.
    floor : int or None
        Bytes; 0 for none, None for 1 GiB or 2 % of the file system, whichever is less.
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
        """Return what may be written to the work folder from outside; None for any number of bytes."""
        if self._floor == 0:
            return None
        left, floor = self._left(self._workspace)
        return Room(max(0, left), _tell(self._workspace, left + floor, floor), "Policy.min_free_disk", DiskFull)

    def find_breach(self, usage: Usage) -> End | None:
        """Tell why it is to be stopped, if it is. Blocks; cheap while there is space. Raises OSError."""
        if self._floor == 0:
            return None
        for path in (self._directory, self._workspace):
            left, floor = self._left(path)
            device = os.stat(path).st_dev
            if left > (NEAR - 1) * floor:
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
                if found.size - mark.size > floor // SHARE:
                    return _end(path, left + floor, floor)
            elif found.cpu - mark.cpu > MIN_CPU:
                return _end(path, left + floor, floor)
        return None

    def _measure(self, device: int, usage: Usage) -> _Mark:
        """Measure what it holds on one file system."""
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


def _tell(path: Path, free: int, floor: int) -> str:
    return (
        f"the disk of {path} has {format_size(max(0, free))} left, and {format_size(floor)} of it stay free. Delete"
        " files there, or lower Policy.min_free_disk"
    )


def _end(path: Path, free: int, floor: int) -> End:
    sentence = f"disk full: it was filling a disk. {_tell(path, free, floor)}"
    return End(Cause.DISK_FULL, 137, sentence, "Policy.min_free_disk")


def find_memory_room(limit: int) -> int:
    """Return the bytes of the limit that are kept free, by killing a program: 5 %, within 48 and 256 MiB and an 8th."""
    return min(limit // 8, max(48 * MIB, min(limit // 20, 256 * MIB)))


class MemoryWatch:
    """Has a program of a sandbox killed before its control group ends the whole sandbox. Only on the link's thread.

    It looks more often the less memory is left, and hardly ever where nothing runs. What allocates faster than
    `ALLOCATION_RATE` gets past it; then the control group ends the sandbox.

    Parameters
    ----------
    paths : sequence of str
        The sandbox's control groups.
    limit : int
        Bytes.
    is_busy, is_frozen : callable
        Whether something runs in it, and whether it is frozen.
    relieve : coroutine function
        Called with the bytes in use and with how much of them is too much; has a program killed and returns its size,
        or 0 where there was none.
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
        """Look at it: somebody has sent it something."""
        self._woken.set()

    async def run(self) -> None:
        """Watch it until this is cancelled; not at all where no control group counts its memory."""
        last = 0
        while self._paths:
            used = cgroups.read_pressure(self._paths, self._most)
            if used is None:  # no group counts it, or no file can be opened now
                await asyncio.sleep(MAX_LOOK)
                continue
            if used > self._most:
                freed = await self._relieve(used, used - self._most)
                await self._wait_freed(used - freed // 2 if freed else self._most)
            elif used > last + IDLE_GROWTH or time.monotonic() < self._awake_until or self._is_busy():
                await asyncio.sleep(min(MAX_LOOK, max(MIN_LOOK, (self._most - used) / ALLOCATION_RATE)))
            else:
                self._woken.clear()
                with suppress(asyncio.TimeoutError):
                    timeout = FROZEN_LOOK if self._is_frozen() else IDLE_LOOK
                    await asyncio.wait_for(self._woken.wait(), timeout)
                    self._awake_until = time.monotonic() + AWAKE_TIME
            last = used

    async def _wait_freed(self, goal: int) -> None:
        """Wait until no more than so many bytes are in use: gVisor takes a moment to return those of what has ended."""
        deadline = time.monotonic() + FREE_TIMEOUT
        goal = max(goal, self._most)
        while time.monotonic() < deadline:
            if (cgroups.read_pressure(self._paths, goal) or 0) <= goal:
                break
            await asyncio.sleep(MIN_LOOK)
