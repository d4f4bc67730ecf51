"""Sandboxes of agents and programs that ended while no server was there, since their lease was over.

When it happens there is nobody to say so. The sweeper leaves what each of them was in a folder; the next server tells
of it, in the audit log and to whoever asks for the sandbox.
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

#: Beneath the state directory; files by the sandboxes' own ids.
FOLDER = "lapsed"
END = End(Cause.LEASE_OVER, 137, "its lease was over before a server took it back", "Policy.lease_timeout")


async def tell(state_dir: Path, audit: AuditLog) -> list[ManagedSandbox]:
    """Note in the audit log which have ended since, and return them, ended. Once for each; never fails."""
    found = []
    for path in await asyncio.to_thread(_collect, state_dir):
        try:
            managed = ManagedSandbox.of(msgspec.json.decode(path.read_bytes(), type=SessionRecord))
            managed.end, managed.ended_at = managed.end or END, path.stat().st_ctime  # when it was put there
            try:
                rows = await audit.aquery(sandbox=path.name, kind="lifecycle")
                if any(row.detail.get("event") == "ended" for row in rows):
                    continue  # its server was killed just as it had ended it
                await audit.arecord("lifecycle", path.name, detail=managed.end.to_detail(""))
            except AgentboxError as error:
                log.error("the end of sandbox %s is not in the audit log: %s", path.name, error)
            found.append(managed)
        except (OSError, ValueError, RecursionError) as error:
            log.error("sandbox %s ended, as its lease was over; its managed cannot be read: %s", path.name, error)
        finally:
            with suppress(OSError):
                path.unlink()
    return found


def _collect(state_dir: Path) -> list[Path]:
    try:
        (state_dir / FOLDER).mkdir(mode=0o700, exist_ok=True)  # from now on something is left in it
        sweep_directories(state_dir)
        return sorted((state_dir / FOLDER).iterdir())
    except OSError as error:
        log.warning("which sandboxes have ended since can't be told: %s", error)
        return []
