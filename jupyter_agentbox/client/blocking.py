"""Make blocking calls: in a thread for the asynchronous client, directly for the synchronous one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
AsyncChunks = AsyncIterable[bytes]
Chunks = Iterable[bytes]


async def acall(function: Callable[..., T], *arguments: object) -> T:
    """Call a blocking function in a thread, and return its result."""
    return await asyncio.to_thread(function, *arguments)


def call(function: Callable[..., T], *arguments: object) -> T:
    """Call a blocking function, and return its result."""
    return function(*arguments)
