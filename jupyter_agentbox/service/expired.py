"""Report sandboxes of agents and programs whose lease expired while no server was running.

No server can report such an end when it happens. The sweeper therefore leaves the record of each sandbox in a folder.
The next server reads the folder, and reports the end in the audit log and to callers that request the sandbox.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.sandbox.sweep import sweep_directories
from jupyter_agentbox.spec import Cause, End
from jupyter_agentbox.storage.audit.log import AuditLog

from .managed_sandbox import ManagedSandbox, SessionRecord

log = logging.getLogger(__name__)

#: Name of the folder below the state directory. It contains one file for each sandbox, named by the sandbox's own id.
FOLDER = "lapsed"
END = End(Cause.LEASE_OVER, 137, "its lease expired before a server adopted it", "Policy.lease_timeout")


async def report_expired(state_dir: Path, audit: AuditLog) -> list[ManagedSandbox]:
    """Write the expired sandboxes to the audit log, and return them as ended. Reports each one once. Never fails."""
    found = []
    for path in await asyncio.to_thread(_collect, state_dir):
        try:
            managed = ManagedSandbox.of(msgspec.json.decode(path.read_bytes(), type=SessionRecord))
            managed.end, managed.ended_at = managed.end or END, path.stat().st_ctime  # when the sweeper put it there
            try:
                rows = await audit.aquery(sandbox=path.name, kind="lifecycle")
                if any(row.detail.get("event") == "ended" for row in rows):
                    continue  # its server was killed immediately after reporting the end
                await audit.arecord("lifecycle", path.name, detail=managed.end.to_detail(""))
            except AgentboxError as error:
                log.error("the end of sandbox %s is not in the audit log: %s", path.name, error)
            found.append(managed)
        except (OSError, ValueError, RecursionError) as error:
            log.error("the lease of sandbox %s expired, and its record cannot be read: %s", path.name, error)
        finally:
            with suppress(OSError):
                path.unlink()
    return found


def _collect(state_dir: Path) -> list[Path]:
    try:
        (state_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)  # the sweeper uses the folder only if it exists
        sweep_directories(state_dir)
        return sorted((state_dir / FOLDER).iterdir())
    except OSError as error:
        log.warning("cannot report the sandboxes whose lease has expired: %s", error)
        return []
