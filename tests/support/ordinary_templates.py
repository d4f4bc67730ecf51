"""Create a template and start kernels from it and from a pool, as an ordinary user. Print the results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from traitlets.config import Config

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.kernels.warm.starts import WarmStarts, context_argv
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.thread import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.spec import SandboxSpec

home, packages = Path.home(), Path(sys.argv[1])
settings = {
    "state_dir": str(home / "state"),
    "accept_unenforced": ["memory", "cpus"],
    "mounts": {"/packages": str(packages)},
    "env": {"PYTHONPATH": "/packages"},
    "pool_size": 1,
}
policy = Policy(config=Config({"Policy": settings}))
manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
warm = WarmStarts.shared(manager, policy)
found: dict[str, object] = {}


async def use(spec: SandboxSpec) -> tuple[str, str, str]:
    sandbox = await warm.create(spec)
    try:
        ran = await Runner.shared().run(
            sandbox, "import os; open('f', 'w').write('x'); print(os.getuid(), os.getcwd())"
        )
        return sandbox.spec.layout, ran.stdout or str(ran), sandbox.id
    finally:
        await manager.stop(sandbox)


async def work() -> None:
    spec = policy.resolve({}, executable=sys.executable)
    try:
        await warm.templates.make(spec, context_argv(spec))
        found["made"] = len(warm.templates.list())
    except AgentboxError as error:
        found["refusal"] = str(error)
    WarmStarts.is_keeping = "made" in found
    found["layout"], found["said"], _ = await use(spec)
    if WarmStarts.is_keeping:
        while not warm.keeper.waiting:
            await asyncio.sleep(0.1)
        waiting = {path.name for path in (home / "state" / "sandboxes").iterdir()}
        _, found["said_by_pooled"], sandbox_id = await use(spec)
        found["is_pooled"] = sandbox_id in waiting
    await WarmStarts.aclose_all()


LinkThread.instance().submit(asyncio.wait_for(work(), 200)).result(220)
found["left"] = sorted(path.name for path in (home / "state" / "sandboxes").iterdir())
print(json.dumps(found))
