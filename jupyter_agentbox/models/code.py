"""Bodies and answers about code."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .base import Body, Name


class CodeRequest(Body, frozen=True):
    """Code for a persistent kernel.

    Parameters
    ----------
    code : str
        What to run.
    context : str
        Which of the sandbox's kernels; it is started at first use. In a notebook's sandbox, `default` is the
        notebook's own.
    language : str, optional
        What the code is written in: `python`, and others where the sandbox has their kernels. A context runs one
        language. Without a context, languages other than Python have one of their own, called by their kernel.
    timeout : float, optional
        Seconds until it is interrupted; null for none.
    stream_bytes, display_bytes : int
        Bytes kept of stdout and of stderr, and of all displays together.
    displays : int
        Displays kept.
    keep_running : bool
        Let it run on when the caller goes away, instead of interrupting it.
    """

    code: str
    context: Name = "default"
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = 60.0
    stream_bytes: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 1024 * 1024
    display_bytes: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 10 * 1024 * 1024
    displays: Annotated[int, Meta(ge=0, le=10_000)] = 1000
    keep_running: bool = False


class ContextRequest(Body, frozen=True):
    """A kernel to start before it is needed."""

    name: Name = "default"
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
