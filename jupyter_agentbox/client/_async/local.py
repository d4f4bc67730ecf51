"""What blocks on this machine, kept off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from typing import TypeVar

T = TypeVar("T")
Chunks = AsyncIterable[bytes]


async def blocking(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that blocks, in a thread."""
    return await asyncio.to_thread(function, *arguments)
