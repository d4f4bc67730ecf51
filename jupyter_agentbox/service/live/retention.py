"""Remove snapshots that are older than policy allows."""

from __future__ import annotations

import asyncio
import logging
import time

from jupyter_agentbox.errors import AgentboxError

from .live_snapshots import LiveSnapshots

log = logging.getLogger(__name__)

#: Maximum number of seconds between two checks for old snapshots.
INTERVAL = 600.0


async def keep_removing(snapshots: LiveSnapshots, max_age: float) -> None:
    """Remove snapshots that are older than `max_age` seconds, until cancelled."""
    while True:
        try:
            await remove_old(snapshots, max_age)
        except (AgentboxError, OSError) as error:
            log.warning("old snapshots were not removed: %s", error)
        await asyncio.sleep(min(INTERVAL, max_age / 4))


async def remove_old(snapshots: LiveSnapshots, max_age: float) -> int:
    """Remove the snapshots of all owners that are older than `max_age` seconds; return how many were removed.

    Parked sandboxes and templates are excluded.
    """
    store, removed = await asyncio.to_thread(lambda: snapshots.store), 0
    for found in await asyncio.to_thread(store.list):
        if found.meta.kind == "user" and time.time() - found.meta.created > max_age:
            await snapshots.expire(found)
            removed += 1
    return removed
