"""Decide what programs inside see of the machine: as many processors and as much memory as the limits allow.

Numeric libraries, databases and language runtimes choose their number of threads and the size of their caches by these
values. If they saw the host's, they would be killed, or slow.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable

from jupyter_agentbox.spec import MIB, Limits

#: Bytes of the memory limit that gVisor itself uses in an ordinary sandbox.
OVERHEAD = 64 * MIB
#: Most rounds of :func:`release_processors`. Each one finds the threads that pinned threads have started meanwhile.
MAX_ROUNDS = 10


def count_processors(limits: Limits) -> int:
    """Return the number of processors that programs inside see: the limit, rounded up, but no more than exist."""
    return max(1, min(math.ceil(limits.cpus), len(os.sched_getaffinity(0))))


def find_memory_room(limit: int) -> int:
    """Return how many bytes of the memory limit to keep free, by killing programs.

    This is 5 % of the limit, at least 48 MiB and at most 256 MiB, but never more than an eighth of the limit.
    """
    return min(limit // 8, max(48 * MIB, min(limit // 20, 256 * MIB)))


def find_visible_memory(limit: int) -> int:
    """Return the bytes of memory that programs inside see: what is left of the limit for them to use."""
    return max(limit // 2, limit - find_memory_room(limit) - OVERHEAD)


def release_processors(pids: Iterable[str | int]) -> None:
    """Let all threads of these processes run on any processor that this process may use.

    gVisor shows as many processors as it may run on when it starts. It needs no restriction afterward, because a
    control group limits the sandbox's share of processor time. Threads that cannot be changed stay restricted.
    """
    allowed = os.sched_getaffinity(0)
    todo = list(pids)
    for _ in range(MAX_ROUNDS):
        is_done = True
        for pid in todo:
            with contextlib.suppress(OSError):  # it has ended
                for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                    with contextlib.suppress(OSError):
                        if os.sched_getaffinity(thread) != allowed:
                            os.sched_setaffinity(thread, allowed)
                            is_done = False
        if is_done:
            return
