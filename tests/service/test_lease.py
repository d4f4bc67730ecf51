"""The lease of a sandbox: how long it outlives its owner, and what is not counted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from support.boxes import boxed, run

from jupyter_agentbox.sandbox import sandbox
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.storage.snapshots import copy_tree

#: Seconds, of which most are left when the sandbox goes on.
LEASE = 8.0


def test_no_lease_runs_out_while_a_sandbox_stands_still_to_be_saved(
    has_runsc: None, manager: SandboxManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_slowly(*arguments: Any, **options: Any) -> None:
        """As where there are many files, or a slow disk."""
        time.sleep(LEASE + 2)
        copy_tree(*arguments, **options)

    monkeypatch.setattr(sandbox, "copy_tree", copy_slowly)
    for name in ("image", "work"):
        (tmp_path / "staged" / name).mkdir(parents=True)

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, lease_timeout=LEASE) as box:
            await box.run("echo kept > /workspace/file; sleep 1000 >/dev/null 2>&1 &")
            await LinkThread.instance().run(box.sandbox.checkpoint(tmp_path / "staged"))
            await asyncio.sleep(1)  # in which it would end
            assert await box.text("cat /workspace/file") == "kept"

    run(test, manager)
    assert (tmp_path / "staged" / "work" / "file").read_text() == "kept\n"
