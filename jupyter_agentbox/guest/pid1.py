"""Run as PID 1 of a sandbox: find an owner on the link, serve its requests, and exit when the lease expires.

``AGENTBOX_GUEST`` contains the settings as JSON: ``lease`` (seconds without an owner after which the sandbox ends),
``uid`` and ``gid`` of user code, ``memory`` (bytes of the largest allocation), ``python`` and ``path`` (the interpreter
of user code, and its PATH), and ``is_waiting`` for a sandbox that must be claimed first (:mod:`.claim`).
"""

from __future__ import annotations

import json
import os
import signal

from . import child_kernels, own_locks, own_pip
from .call_filter import install_filter
from .connect import open_connection
from .egress import Egress
from .jobs import Job, open_job
from .kernels import Kernel, make_shared_directory, open_kernel
from .load import open_load
from .locks import Locks
from .lookup import open_lookup
from .loop import Link, Loop, Stream
from .memory import open_memory
from .processes import Processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .claim import Claim

#: Seconds between SIGTERM and SIGKILL for programs when the sandbox ends.
TERM_TIMEOUT = 2.0
#: Seconds between two checks of the remaining lease.
LEASE_STEP = 1.0
LINK_DIR = "/run/agentbox/link"
CONNECTION_DIR = "/run/kernels"


class Guest:
    """The guest: loop, link, processes, kernels and egress of one sandbox."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.loop = Loop()
        self.processes = Processes(self.loop, settings["uid"], settings["gid"])
        self.kernels: dict[str, Kernel] = {}
        self.jobs: dict[str, Job] = {}
        self._lease = settings["lease"]
        self._python, self._path = settings.get("python", ""), settings.get("path", "")
        self._provided: set[str] = set()
        self._claim = self._wait() if settings.get("is_waiting") else None
        self._count_down(self._lease)
        self.link = Link(self.loop, LINK_DIR, self._stream_opened, self._owner_found, self._owner_lost)
        self.egress = Egress(self.loop, self.link)
        self.locks = Locks(self.loop, self.link)
        make_shared_directory(CONNECTION_DIR)
        signal.signal(signal.SIGTERM, lambda *_: self.terminate())

    def run(self) -> None:
        """Run until the lease expires or the host ends the sandbox."""
        self.egress.start()
        self.locks.start()
        self.link.dial()
        self.loop.run()

    def terminate(self) -> None:
        """Send SIGTERM to every program, and end the sandbox after :data:`TERM_TIMEOUT`."""
        self.processes.is_ending = True
        self.processes.signal_all(signal.SIGTERM)
        self.loop.later(TERM_TIMEOUT, self.end)

    def end(self) -> None:
        """End the sandbox now: it ends when PID 1 exits."""
        self.loop.is_running = False

    def _owner_found(self, info: dict[str, Any]) -> None:
        self.loop.cancel(self._lease_timer)

    def _owner_lost(self) -> None:
        self.loop.cancel(self._lease_timer)
        self._count_down(self._lease)

    def _count_down(self, left: float) -> None:
        """End the sandbox after ``left`` seconds, not counting time in which it is stopped, as while it is saved."""
        if left <= 0:
            self.end()
            return
        step = min(left, LEASE_STEP)
        self._lease_timer = self.loop.later(step, lambda: self._count_down(left - step))

    def _wait(self) -> Claim:
        from .claim import Claim  # imported only here because its imports take a while

        return Claim(self._set_lease, self.end)

    def _set_lease(self, lease: float) -> None:
        self._lease = lease

    def _provide(self, header: dict[str, Any]) -> None:
        """Prepare the Python environments of the sandbox before the first program in each starts."""
        if not self._provided and self._python:
            own_pip.provide(self._python, self._path)
            child_kernels.provide(self._python)
        pythons = {self._python or "python3", "/usr/bin/python3"}
        if header["kind"] == "kernel" and header.get("argv"):  # else it runs already
            pythons.add(header["argv"][0])
        for python in pythons - self._provided:
            own_locks.provide(python, self._path)
        self._provided |= pythons

    def _stream_opened(self, stream: Stream) -> None:
        kind = stream.header.get("kind")
        if kind in ("process", "kernel"):
            self._provide(stream.header)
        if kind in ("process", "stdin"):
            open_job(self.loop, self.processes, self.jobs, stream)
        elif kind in ("kernel", "channel"):
            open_kernel(self.loop, self.processes, self.kernels, stream)
        elif kind == "connect":
            open_connection(self.loop, stream)
        elif kind == "claim" and self._claim is not None:
            self._claim.open(stream)
        elif kind == "suspend":
            self.link.suspend(str(stream.header.get("token")))
        elif kind == "lookup":
            open_lookup(stream)
        elif kind == "memory":
            open_memory(stream, self.kernels, self.jobs)
        elif kind == "disk":
            from .disk import open_disk  # only a sandbox with a full disk needs it

            open_disk(stream, self.processes, self.jobs)
        elif kind == "load":
            open_load(self.loop, stream, self.kernels.values())
        else:
            stream.reset(f"unknown stream kind {kind!r}")


def main() -> int:
    """Run the guest. Return the exit status of the sandbox."""
    settings = json.loads(os.environ.pop("AGENTBOX_GUEST"))
    install_filter(settings["memory"])
    Guest(settings).run()
    return 0
