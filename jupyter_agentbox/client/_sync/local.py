"""What blocks on this machine, which a plain program waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
Chunks = Iterable[bytes]


def blocking(function: Callable[..., T], *arguments: object) -> T:
    """Call a function that blocks."""
    return function(*arguments)
