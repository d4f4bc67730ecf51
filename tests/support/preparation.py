"""Run sandboxes of a profile, prepared as a server prepares them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from traitlets.config import Config

from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox


def make_policy(manager: SandboxManager, **profile: Any) -> Policy:
    own = {"state_dir": str(manager.state_dir), "profiles": {"default": profile}}
    return Policy(config=Config({"Policy": own}))


def start(manager: SandboxManager, work: Callable[[Sandbox], Any], **profile: Any) -> Any:
    """Start a sandbox of a profile, call `work` with it, and end it."""

    async def go() -> Any:
        spec = await asyncio.to_thread(make_policy(manager, **profile).resolve, {}, executable=sys.executable)
        sandbox = await manager.create(spec)
        try:
            return await work(sandbox)
        finally:
            await manager.stop(sandbox)

    try:
        return asyncio.run(asyncio.wait_for(go(), 200))
    finally:
        assert not list((manager.state_dir / "sandboxes").iterdir())
