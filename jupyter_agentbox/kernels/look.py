"""Look at the work folder to explain an error, without holding up the messages of the kernel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds to wait for a folder, which may be on a network share that does not respond.
TIMEOUT = 2.0


async def look(function: Callable[..., T], *arguments: object) -> T | None:
    """Call a function that looks at files, in a thread. Return None if it fails or takes too long."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(function, *arguments), TIMEOUT)
    except (OSError, asyncio.TimeoutError):
        return None
