"""Start sandboxes from templates, and run code in their kernels."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from traitlets.config import Config

from jupyter_agentbox.kernels.warm.pool import Keeper
from jupyter_agentbox.kernels.warm.starts import WarmStarts
from jupyter_agentbox.kernels.warm.template_key import make_key
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.drivers.messages import Signer, header_index
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import SandboxSpec

ARGV = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]


PRELOADED = "numpy"


class Place:
    """State directory with policy, manager and templates."""

    def __init__(self, base: Path, **policy: Any) -> None:
        self.base = base
        config = Config({"Policy": {"state_dir": str(base / "state"), **policy}})
        self.policy = Policy(config=config)
        state = self.policy.state_path
        self.manager = SandboxManager(state, RunscRuntime(state_dir=str(state)))
        self.warm = WarmStarts(self.manager, self.policy)
        self.templates = self.warm.templates

    def spec(self, folder: Path | None = None, **request: Any) -> SandboxSpec:
        """Resolve the request for a kernel as the provisioner does."""
        env = request.pop("env", {})
        return self.policy.resolve(request, workspace=folder, executable=sys.executable, launch_env=env)

    def folder(self, name: str) -> Path:
        """Create a work folder."""
        path = self.base / name
        path.mkdir()
        return path

    def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a coroutine function on the link's thread, and return its result."""
        return LinkThread.instance().submit(asyncio.wait_for(work(), 250)).result(260)  # type: ignore[arg-type]


class Talk:
    """Kernel with a client that runs code and returns its output."""

    def __init__(self, sandbox: Sandbox, key: str) -> None:
        self.sandbox = sandbox
        self.kernel = next(iter(sandbox.kernels.values()))
        self.signer = Signer(key.encode())
        self.heard: asyncio.Queue[tuple[str, dict[str, Any], dict[str, Any], bytes]] = asyncio.Queue()
        self.kernel.on_message = self._take

    async def _take(self, channel: str, frames: list[bytes]) -> None:
        index = header_index(frames)
        assert index is not None
        self.heard.put_nowait((channel, json.loads(frames[index]), json.loads(frames[index + 3]), frames[0]))

    async def say(self, code: str) -> str:
        """Run code and return its output. The kernel would not answer an unsigned or foreign message."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        await self.kernel.send("shell", [b"me", *self.signer.message(b"", "execute_request", content)[1:]])
        text, is_idle, reply = "", False, None
        while not (is_idle and reply):
            _, header, found, _ = await self.heard.get()
            if header["msg_type"] == "stream":
                text += found["text"]
            is_idle |= found.get("execution_state") == "idle"
            reply = found if header["msg_type"] == "execute_reply" else reply
        assert reply["status"] == "ok", reply
        return text.strip()


class Kept(Place):
    """Place with a pool that the test fills."""

    def __init__(self, base: Path) -> None:
        super().__init__(base, pool_size=1, lease_timeout=2.0)
        self.keeper = Keeper(self.templates, self.policy)

    def key(self, spec: SandboxSpec) -> str:
        """Return the key of a kernel's template."""
        inputs = self.templates.inputs(spec, ARGV)
        assert inputs is not None
        return make_key(inputs)

    async def filled(self) -> Path:
        """Fill the pool, and return the directory of its sandbox."""
        self.keeper.record_start(self.key(self.spec()), self.spec(), ARGV)
        for _ in range(1500):
            if found := await asyncio.to_thread(self.warm.pool.find, self.key(self.spec())):
                return found[0]
            await asyncio.sleep(0.1)
        raise AssertionError("nothing came to wait in the pool")
