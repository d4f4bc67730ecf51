"""PID 1 of a sandbox: finds its owner on the link, does what the owner asks, and ends with its lease.

``AGENTBOX_GUEST`` holds its settings as JSON: ``lease`` (seconds without an owner until it ends itself),
``uid`` and ``gid`` of user code, and ``is_waiting`` where it is to be claimed first (:mod:`.claim`).
"""

from __future__ import annotations

import json
import os
import signal

from .connect import open_connection
from .egress import Egress
from .jobs import Job, open_job
from .kernels import Kernel, make_shared_directory, open_kernel
from .load import open_load
from .lookup import open_lookup
from .loop import Link, Loop, Stream
from .memory import open_memory
from .processes import Processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .claim import Claim

#: Seconds that programs have between SIGTERM and SIGKILL when the sandbox is told to end.
TERM_TIMEOUT = 2.0
#: Seconds between two looks at how much of the lease is left.
LEASE_STEP = 1.0
LINK_DIR = "/run/agentbox/link"
CONNECTION_DIR = "/run/kernels"


class Guest:
    """Wires loop, link, processes, kernels and egress together."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.loop = Loop()
        self.processes = Processes(self.loop, settings["uid"], settings["gid"])
        self.kernels: dict[str, Kernel] = {}
        self.jobs: dict[str, Job] = {}
        self._lease = settings["lease"]
        self._claim = self._wait() if settings.get("is_waiting") else None
        self._count_down(self._lease)
        self.link = Link(self.loop, LINK_DIR, self._stream_opened, self._owner_found, self._owner_lost)
        self.egress = Egress(self.loop, self.link)
        make_shared_directory(CONNECTION_DIR)
        signal.signal(signal.SIGTERM, lambda *_: self.terminate())

    def run(self) -> None:
        """Run until the lease is over or the host ends the sandbox."""
        self.egress.start()
        self.link.dial()
        self.loop.run()

    def terminate(self) -> None:
        """Ask every program to end, then end."""
        self.processes.signal_all(signal.SIGTERM)
        self.loop.later(TERM_TIMEOUT, self.end)

    def end(self) -> None:
        """End now; the end of PID 1 is the end of the sandbox."""
        self.loop.is_running = False

    def _owner_found(self, info: dict[str, Any]) -> None:
        self.loop.cancel(self._lease_timer)

    def _owner_lost(self) -> None:
        self.loop.cancel(self._lease_timer)
        self._count_down(self._lease)

    def _count_down(self, left: float) -> None:
        """End after so many seconds, without those in which the sandbox stands still, as it does while it is saved."""
        if left <= 0:
            self.end()
            return
        step = min(left, LEASE_STEP)
        self._lease_timer = self.loop.later(step, lambda: self._count_down(left - step))

    def _wait(self) -> Claim:
        from .claim import Claim  # not for others: what it imports takes a while

        return Claim(self._set_lease, self.end)

    def _set_lease(self, lease: float) -> None:
        self._lease = lease

    def _stream_opened(self, stream: Stream) -> None:
        kind = stream.header.get("kind")
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
        elif kind == "load":
            open_load(self.loop, stream, {kernel.pid for kernel in self.kernels.values()})
        else:
            stream.reset(f"this guest knows no {kind!r}")


def main() -> int:
    """Entry point; the exit status of the sandbox."""
    settings = json.loads(os.environ.pop("AGENTBOX_GUEST"))
    Guest(settings).run()
    return 0
