"""Reseed the random generators of a fork's kernels, so that the fork and its original draw different numbers."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.guest.ipykernel.embedded_claim import reseed as reseed_python
from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.sandbox.sandbox import Sandbox

#: Seconds that a fork waits for reseeding. If a cell is running, reseeding follows it in the background.
WAIT = 5.0
#: The reseeding code of a claimed kernel as source, for a kernel that may not have any of our modules inside.
_PYTHON = f"exec({f'import os, random, sys, uuid{chr(10)}{inspect.getsource(reseed_python)}reseed()'!r}, {{}})"
#: Reseeding code by language, in lower case. V8, which runs TypeScript and JavaScript, cannot be seeded from code.
SEEDS = {
    "python": _PYTHON,
    "r": 'if (exists(".Random.seed", envir = globalenv())) invisible(set.seed(NULL))',
    "bash": "RANDOM=${SRANDOM:-$(od -An -N2 -tu2 /dev/urandom)}",
}
#: Reseeding tasks that continue after the fork was returned to the caller.
_background_tasks: set[asyncio.Future[None]] = set()


async def reseed(sandbox: Sandbox) -> None:
    """Reseed the generators of a sandbox's kernels: immediately, or after the running cell. Never fails."""
    runner = Runner.shared()

    async def seed(context: str, code: str) -> None:
        with suppress(AgentboxError):
            await runner.run(sandbox, code, context=context, timeout=None, is_silent=True)

    found = await runner.contexts(sandbox)
    codes = {context.name: SEEDS.get(context.language.lower()) for context in found}
    seeding = {asyncio.ensure_future(seed(name, code)) for name, code in codes.items() if code is not None}
    if seeding:
        _, unfinished = await asyncio.wait(seeding, timeout=WAIT)
        for task in unfinished:
            _background_tasks.add(task)
            task.add_done_callback(_background_tasks.discard)
