"""Define the request bodies for running code."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .base import Body, Name

ImagePixels = Annotated[int, Meta(ge=16, le=65_535)]
ImageBytes = Annotated[int, Meta(ge=1000, le=64 * 1024 * 1024)]


class CodeRequest(Body, frozen=True):
    """Code to run in a persistent kernel.

    Parameters
    ----------
    code : str
        The code.
    context : str
        Name of the kernel to run it in, which is started at first use. In a notebook's sandbox, `default` is the
        notebook's own kernel.
    language : str, optional
        Language of the code: `python`, or another language whose kernel the sandbox has. A context has one language.
        If no context is given, each language other than Python has its own, named after its kernel.
    timeout : float, optional
        Seconds after which the code is interrupted; null for no limit.
    stream_bytes : int
        Maximum number of bytes kept of stdout and of stderr each: the beginning and the end, with a line between that
        says how much is left out. A stream has all output, unless its client is too slow.
    display_bytes : int
        Maximum number of bytes kept of all displays together, and of the result.
    displays : int
        Maximum number of displays kept.
    image_pixels, image_bytes : int, optional
        Maximum number of pixels of an image's side, and of its bytes; null for no limit. A larger image is saved in the
        directory `agentbox-images` of the workspace, and reduced with the sandbox's Pillow. Without Pillow, it is left
        out. `full_image` of its display says where it is.
    keep_running : bool
        Let the code run on when the client disconnects, instead of interrupting it.
    """

    code: str
    context: Name = "default"
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = 60.0
    stream_bytes: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 1024 * 1024
    display_bytes: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 10 * 1024 * 1024
    displays: Annotated[int, Meta(ge=0, le=10_000)] = 1000
    image_pixels: ImagePixels | None = 2000
    image_bytes: ImageBytes | None = 1_000_000
    keep_running: bool = False


class ContextRequest(Body, frozen=True):
    """A kernel to start before its first use."""

    name: Name = "default"
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
