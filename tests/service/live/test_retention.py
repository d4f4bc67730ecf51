"""Snapshots that became too old."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from support.snapshot_images import make_pages, put

from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.service.live.live_snapshots import LiveSnapshots
from jupyter_agentbox.service.live.retention import remove_old
from jupyter_agentbox.service.service import SandboxService


def test_only_snapshots_go_and_only_old_ones(tmp_path: Path) -> None:
    service = SandboxService(Policy(state_dir=str(tmp_path / "state"), snapshot_max_age=100.0))
    snapshots = LiveSnapshots(service)
    old, pages = time.time() - 101, make_pages(4)
    parked = put(snapshots.store, pages, created=old, kind="park")
    template = put(snapshots.store, pages, created=old, kind="template")
    first = put(snapshots.store, pages, created=old, name="named")
    others = put(snapshots.store, pages, created=old, owner="bob")
    fresh = put(snapshots.store, pages, parent=first.id)
    assert asyncio.run(remove_old(snapshots, 100.0)) == 2
    assert {item.id for item in snapshots.store.list()} == {parked.id, template.id, fresh.id}
    assert asyncio.run(remove_old(snapshots, 100.0)) == 0
    with snapshots.store.checkout(fresh.id, "ada") as path:
        assert (path / "image" / "pages.img").read_bytes() == pages, "what shared with the old ones is whole"
    rows = service.registry.audit().query(kind="lifecycle")
    assert {row.detail["snapshot"] for row in rows} == {first.id, others.id}
    assert {row.detail["event"] for row in rows} == {"snapshot_expired"}
