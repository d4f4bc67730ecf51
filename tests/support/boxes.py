"""Create sandboxes for tests, run shell lines in them, and check that they leave nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command, ExecResult, ProcessTable
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import SandboxSpec

ENV = {"PATH": "/usr/bin:/bin", "HOME": "/home/user"}


class Box:
    """Sandbox with short methods to run a shell line."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @property
    def processes(self) -> ProcessTable:
        return self.sandbox.processes

    async def run(self, line: str, stdin: bytes = b"", timeout: float = 60.0) -> ExecResult:
        return await self.argv(["/bin/sh", "-c", line], stdin, timeout)

    async def argv(self, argv: list[str], stdin: bytes = b"", timeout: float = 60.0) -> ExecResult:
        return await self.processes.run(Command(argv=argv, env=ENV), stdin=stdin, timeout=timeout)

    async def text(self, line: str) -> str:
        result = await self.run(line)
        assert (result.exit_code, result.stderr) == (0, b"")
        return result.stdout.decode().strip()

    async def python(self, code: str, timeout: float = 120.0) -> str:
        result = await self.argv(["/usr/bin/python3", "-c", code], timeout=timeout)
        assert (result.exit_code, result.stderr) == (0, b"")
        return result.stdout.decode().strip()


@asynccontextmanager
async def boxed(manager: SandboxManager, **spec: object) -> AsyncIterator[Box]:
    """Run a sandbox, and check afterwards that nothing of it is left."""
    sandbox = await manager.create(SandboxSpec(**spec))  # type: ignore[arg-type]
    try:
        yield Box(sandbox)
    finally:
        await manager.stop(sandbox)
        assert not list((manager.state_dir / "sandboxes").iterdir())


def run(test: Callable[[SandboxManager], Awaitable[None]], manager: SandboxManager) -> None:
    """Run a test on a new event loop."""
    asyncio.run(asyncio.wait_for(test(manager), 250))  # type: ignore[arg-type]
