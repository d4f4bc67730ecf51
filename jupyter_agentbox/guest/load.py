"""Measure what runs inside, at the owner's request before it freezes a sandbox."""

from __future__ import annotations

import os

from .loop import LinkDown, Loop, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .kernels import Kernel

#: Seconds over which processor time is measured.
INTERVAL = 1.0


def measure(kernels: set[int]) -> tuple[int, int]:
    """Return the number of processes besides PID 1 and kernels, and the processor ticks used by all processes."""
    others = ticks = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                fields = file.read(4096).rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] == b"Z":
            continue
        others += int(name) not in kernels
        ticks += int(fields[11]) + int(fields[12])
    return others, ticks


def open_load(loop: Loop, stream: Stream, kernels: Iterable[Kernel]) -> None:
    """Answer with one JSON object.

    ``others`` is the number of processes besides kernels, ``ticks`` what all use in the next second, and ``waits`` the
    number of timers and threads that kernels wait for. A kernel that does not answer waits for one.
    """
    kernels = list(kernels)
    pids = {kernel.pid for kernel in kernels}
    waits: list[int] = []
    for kernel in kernels:
        kernel.count_waits(waits.append)
    _, before = measure(pids)

    def answer() -> None:
        others, after = measure(pids)
        count = sum(waits) + len(kernels) - len(waits)
        try:
            stream.write(b'{"others": %d, "ticks": %d, "waits": %d}' % (others, after - before, count))
            stream.write_eof()
        except LinkDown:
            pass

    loop.later(INTERVAL, answer)
