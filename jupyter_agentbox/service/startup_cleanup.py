"""Remove what killed processes left outside sandboxes, when a server starts.

The sweeper removes sandboxes, unfinished snapshots and checked-out snapshots: see ``sandbox.sweep``. Parked sandboxes
stay parked: see ``service.live.parking``.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from subprocess import SubprocessError

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.kernels.front import endpoints
from jupyter_agentbox.linux import remove_unfinished
from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.runtimes.runsc.checks import end_probes
from jupyter_agentbox.sandbox.sweep import ensure_sweeper, has_left
from jupyter_agentbox.storage.images import ImageStore

log = logging.getLogger(__name__)

#: Folders whose files get their final name only when they are complete: keys, settings, and a downloaded runsc.
FOLDERS = ("", "servers", "bin")
#: Seconds after which an unfinished file is assumed to belong to a killed process.
MAX_AGE = 60.0


def clear(state_dir: Path) -> None:
    """Remove leftovers that no running process uses. Blocks. Never fails."""
    for folder in FOLDERS:
        remove_unfinished(state_dir / folder, MAX_AGE)
    for work in (end_probes, partial(import_cache.clear, state_dir), ImageStore(state_dir).clear, endpoints.clear):
        try:
            work()
        except (AgentboxError, OSError) as error:
            log.warning("cannot remove leftovers of earlier processes: %s", error)
    try:
        if has_left(state_dir):
            ensure_sweeper(state_dir)
    except (OSError, SubprocessError) as error:
        log.warning("cannot start the sweeper, which removes leftovers of earlier processes: %s", error)
