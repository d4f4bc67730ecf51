"""Ask for the sentences that explain the output of a cell."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol


class Notes(Protocol):
    """What explains messages of a kernel."""

    def explain(self, frames: Sequence[bytes]) -> Awaitable[list[str]]: ...


def explain(notes: Notes, frames: Sequence[bytes]) -> list[str]:
    """Return the sentences for one message."""

    async def ask() -> list[str]:
        return await notes.explain(frames)

    return asyncio.run(ask())
