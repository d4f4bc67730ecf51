"""Kill one program, at the owner's request, before the memory limit ends the whole sandbox."""

from __future__ import annotations

import json
import os
import signal

from .loop import LinkDown, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .jobs import Job
    from .kernels import Kernel


class Program:
    """Process and its memory use in bytes."""

    def __init__(self, pid: int, status: bytes) -> None:
        fields = dict(line.partition(b":")[::2] for line in status.splitlines())
        self.pid = pid
        self.name = fields.get(b"Name", b"").strip().decode("utf-8", "replace")
        self.size = int((fields.get(b"VmRSS") or b"0").split()[0]) * 1024
        self.groups = frozenset(map(int, fields.get(b"Groups", b"").split()))


def read_programs() -> list[Program]:
    """Return all processes except PID 1 and those without memory."""
    found: list[Program] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/status", "rb", buffering=0) as file:
                    program = Program(int(name), file.read(4096))
            except (OSError, ValueError):
                continue
            if program.size:
                found.append(program)
    return found


def choose(programs: list[Program], kernels: set[int], used: int, excess: int, limit: int) -> Program | None:
    """Choose the program to kill. A kernel is chosen only if no other program is large enough to matter.

    Parameters
    ----------
    programs : list of Program
    kernels : set of int
        Process ids of the kernels.
    used, excess, limit : int
        Memory use of the sandbox, the excess to be freed, and the limit, in bytes.

    Returns
    -------
    Program or None
        None if less than half of the memory belongs to programs: killing one does not free files in memory.
    """
    if sum(program.size for program in programs) < used // 2:
        return None
    by_size = sorted(programs, key=lambda program: program.size, reverse=True)
    others = [program for program in by_size if program.pid not in kernels]
    own = [program for program in by_size if program.pid in kernels]
    for candidates, least in (
        (others, max(excess, limit // 10)),
        (own, limit // 4),
        (others, limit // 50),
        (own, 0),
    ):
        if candidates and candidates[0].size >= least:
            return candidates[0]
    return None


def open_memory(stream: Stream, kernels: dict[str, Kernel], jobs: dict[str, Job]) -> None:
    """Kill one program. Answer with one JSON object: its ``pid``, ``name``, ``size`` and ``kernel``, or nothing.

    The header has ``used``, ``excess`` and ``limit``, and a ``sentence`` that is added to the output of the program's
    job.
    """
    header = stream.header
    own = {kernel.pid: (name, kernel) for name, kernel in kernels.items() if kernel.pid}
    victim = choose(read_programs(), set(own), header["used"], header["excess"], header["limit"])
    answer: dict[str, object] = {}
    if victim is not None:
        name, kernel = own.get(victim.pid, ("", None))
        if kernel is not None:
            kernel.is_out_of_memory = True
        for job in list(jobs.values()):
            if job.mark in victim.groups:
                job.note(f"agentbox: out of memory: killed {victim.name} (process {victim.pid}) {header['sentence']}")
        try:
            os.kill(victim.pid, signal.SIGKILL)
            answer = {"pid": victim.pid, "name": victim.name, "size": victim.size, "kernel": name}
        except OSError:
            pass  # it has exited
    try:
        stream.write(json.dumps(answer).encode())
        stream.write_eof()
    except LinkDown:
        pass
