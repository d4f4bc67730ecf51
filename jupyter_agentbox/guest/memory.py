"""Memory: asked by the owner, kill one program before the memory limit ends the whole sandbox."""

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
    """A process and the bytes that it has in memory."""

    def __init__(self, pid: int, status: bytes) -> None:
        fields = dict(line.partition(b":")[::2] for line in status.splitlines())
        self.pid = pid
        self.name = fields.get(b"Name", b"").strip().decode("utf-8", "replace")
        self.size = int((fields.get(b"VmRSS") or b"0").split()[0]) * 1024
        self.groups = frozenset(map(int, fields.get(b"Groups", b"").split()))


def read_programs() -> list[Program]:
    """Return all processes but PID 1 and those that have no memory."""
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
    """Choose the one to kill: a kernel only if no other program is large enough to matter.

    Parameters
    ----------
    programs : list of Program
    kernels : set of int
        The processes of kernels.
    used, excess, limit : int
        Bytes: what the sandbox uses, how much of it is too much, and its limit.

    Returns
    -------
    Program or None
        None where less than half of what is used belongs to programs: files in memory do not go with them.
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
    """Kill one program and answer with one JSON object: its ``pid``, ``name``, ``size`` and ``kernel``, or nothing.

    The header has ``used``, ``excess`` and ``limit``, and a ``sentence`` for whoever reads what the program prints.
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
            pass  # it has ended by itself
    try:
        stream.write(json.dumps(answer).encode())
        stream.write_eof()
    except LinkDown:
        pass
