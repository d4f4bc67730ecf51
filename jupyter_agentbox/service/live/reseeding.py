"""Random generators of a fork's kernels, seeded anew: what was drawn in one is not drawn in the other."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.guest.ipykernel.embedded_claim import reseed as reseed_python
from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.sandbox.sandbox import Sandbox

#: Seconds that a fork waits for it; where a cell runs, it comes after that.
WAIT = 5.0
#: What a kernel does that is claimed, for one that may have nothing of ours inside.
_PYTHON = f"exec({f'import os, random, sys, uuid{chr(10)}{inspect.getsource(reseed_python)}reseed()'!r}, {{}})"
#: Code by language, in small letters. V8, which runs TypeScript and JavaScript, takes no seed from code.
SEEDS = {
    "python": _PYTHON,
    "r": 'if (exists(".Random.seed", envir = globalenv())) invisible(set.seed(NULL))',
    "bash": "RANDOM=${SRANDOM:-$(od -An -N2 -tu2 /dev/urandom)}",
}
#: What goes on after its fork was answered.
_late: set[asyncio.Future[None]] = set()


async def reseed(sandbox: Sandbox) -> None:
    """Seed the generators of a sandbox's kernels anew: at once, or where a cell runs, after it. Never fails."""
    runner = Runner.shared()

    async def seed(context: str, code: str) -> None:
        with suppress(AgentboxError):
            await runner.run(sandbox, code, context=context, timeout=None, is_silent=True)

    found = await runner.contexts(sandbox)
    codes = {context.name: SEEDS.get(context.language.lower()) for context in found}
    seeding = {asyncio.ensure_future(seed(name, code)) for name, code in codes.items() if code is not None}
    if seeding:
        _, late = await asyncio.wait(seeding, timeout=WAIT)
        for task in late:
            _late.add(task)
            task.add_done_callback(_late.discard)
