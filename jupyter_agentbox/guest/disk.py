"""Stop programs from writing while the work folder of the sandbox holds more than the disk limit allows.

The root has a layer of limited size, but gVisor cannot limit a folder of the host. The owner measures such a folder.
While it is too large, every program has a file size limit of 0: a write to any file fails with ``EFBIG``, and deleting
files works. Code can raise its limit again, so this is for programs that mean no harm. The owner ends a sandbox that
continues to grow.
"""

from __future__ import annotations

import os
import resource

from .framing import pack_json
from .loop import LinkDown
from .processes import Processes, read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .jobs import Job
    from .loop import Stream

#: Maximum number of searches for programs that start while others are stopped.
ROUNDS = 5


def open_disk(stream: Stream, processes: Processes, jobs: dict[str, Job]) -> None:
    """Serve a stream of kind ``disk``.

    Each message ``{"is_full": bool, "sentence": text}`` is answered with ``{"ok": true}``. A sentence is added to the
    output of the running jobs.
    """

    def on_request(request: dict[str, Any]) -> None:
        processes.is_full = bool(request["is_full"])
        _apply(processes)
        if request["sentence"]:
            for job in list(jobs.values()):
                job.note(f"agentbox: {request['sentence']}")
        try:
            stream.write(pack_json({"ok": True}))
        except LinkDown:
            pass

    read_requests(stream, on_request)


def _apply(processes: Processes) -> None:
    own = str(os.getpid())
    with processes.as_user():  # the limits of another user's programs cannot be changed
        for _ in range(ROUNDS):
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and name != own]
            if not [pid for pid in pids if _set(pid, processes)] or not processes.is_full:
                break  # else: look for programs that were started meanwhile


def _set(pid: int, processes: Processes) -> bool:
    """Set the limit of one process. Return whether it was changed."""
    try:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        wanted = 0 if processes.is_full else hard
        if soft == wanted or (soft and not processes.is_full):
            return False  # else: a limit that the program itself has set
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (wanted, hard))
    except (OSError, ValueError):
        return False  # it has exited, or belongs to another user
    return True
