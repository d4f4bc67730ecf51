"""Convert the results of operations into MCP content: text, images, bytes and errors. Sans-I/O.

All of it is hostile. Text is limited in length, and terminal control sequences are removed. An image is accepted only
if its first bytes match its type. Whatever is left out is reported.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from mcp import types

from jupyter_agentbox.api.images import SUFFIXES, SVG, bitmap_size, bitmap_type, decode
from jupyter_agentbox.models import ErrorAnswer, RefusedHost, long_output
from jupyter_agentbox.models.long_output import apply_movements
from jupyter_agentbox.models.outputs import CodeResult, Display, FullImage
from jupyter_agentbox.spec import MIB, format_size

#: Maximum number of images in one result, and of their bytes together.
MAX_IMAGES = 20
MAX_IMAGE_BYTES = 8 * MIB

Block = types.TextContent | types.ImageContent | types.EmbeddedResource
Result = types.CallToolResult

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def to_utf8(text: str) -> str:
    """Return a text with everything replaced that UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def strip_control(text: str) -> str:
    """Return a text without terminal control.

    Cursor movements are applied, so that progress bars show their last state. Colours are removed, and other control
    characters become U+FFFD.
    """
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE.sub("", apply_movements(to_utf8(text))))


def shorten(text: str, limit: int) -> str:
    """Shorten a text in the middle to a number of bytes, with a note, and strip its terminal control."""
    return strip_control(long_output.shorten(text, limit))


def text_block(text: str) -> types.TextContent:
    """Return a block of text."""
    return types.TextContent(type="text", text=to_utf8(text))


def answer(*parts: str | Block, structured: Any = None, is_error: bool = False) -> Result:
    """Return a result of texts and blocks. Empty texts are omitted."""
    blocks: list[Any] = [text_block(part) if isinstance(part, str) else part for part in parts if part != ""]
    return types.CallToolResult(
        content=blocks or [text_block("done, no output")],
        structured_content=structured,
        is_error=is_error,
    )


def data(value: msgspec.Struct, *texts: str) -> Result:
    """Return a result with a value. Texts, if given, show it to models instead of its JSON."""
    value_json = msgspec.json.decode(to_utf8(msgspec.json.encode(value).decode()))
    return answer(*(texts or (to_utf8(msgspec.json.encode(value).decode()),)), structured=value_json)


def failure(error: ErrorAnswer) -> Result:
    """Return a result for an error: its message, and the setting that controls it."""
    hint = f" (setting: {error.setting})" if error.setting and error.setting not in error.message else ""
    return answer(strip_control(error.message) + hint, structured=msgspec.to_builtins(error), is_error=True)


def refusals(refused: Iterable[RefusedHost]) -> str:
    """Return a line for each connection that the gate refused."""
    return "\n".join(f"[refused: {strip_control(item.message)}]" for item in list(refused)[:20])


# -- files -----------------------------------------------------------------------------------------


def image(content: bytes, mime: str) -> types.ImageContent:
    """Return a block with an image."""
    return types.ImageContent(type="image", data=base64.b64encode(content).decode(), mime_type=mime)


def resource(path: str, content: bytes) -> types.EmbeddedResource:
    """Return a block with bytes."""
    blob = types.BlobResourceContents(
        uri=f"file:///workspace/{quote(to_utf8(path))}",
        mime_type=bitmap_type(content) or "application/octet-stream",
        blob=base64.b64encode(content).decode(),
    )
    return types.EmbeddedResource(type="resource", resource=blob)


def whole_text(content: bytes, is_end: bool) -> str | None:
    """Decode a part of a file, without an incomplete character at its end. Return None if it is not text."""
    if b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        if not is_end and error.reason == "unexpected end of data" and error.start:
            return content[: error.start].decode()
        return None


# -- code ------------------------------------------------------------------------------------------


def code(result: CodeResult, limit: int) -> Result:
    """Return a result for a run of code: its text, then its images."""
    images = _Images()
    parts = [
        strip_control(result.stdout),
        f"[stderr]\n{strip_control(result.stderr)}" if result.stderr else "",
        shorten("\n".join(filter(None, map(images.take, result.displays))), limit),
    ]
    if result.result is not None:
        parts.append(shorten(images.take(result.result), limit))
    if result.error is not None:
        lines = result.error.traceback or [f"{result.error.ename}: {result.error.evalue}"]
        parts.append(shorten("\n".join(lines), limit))
    if result.status not in ("ok", "error"):
        parts.append(f"[{result.status.replace('_', ' ')}]")
    if result.message:
        parts.append(f"[{strip_control(result.message)}]")
    if result.end is not None and result.end.message not in (result.message or ""):
        parts.append(f"[{strip_control(result.end.message)}]")
    if result.truncated:
        total = result.total_bytes
        parts.append(
            f"[output truncated; in total: {total.stdout:,} bytes to stdout, {total.stderr:,} bytes to stderr, "
            f"{total.displays:,} bytes of displays]"
        )
    parts += images.notes
    text = "\n".join(part.rstrip("\n") for part in parts if part)
    return answer(text, *images.blocks, is_error=result.status != "ok")


class _Images:
    """Collector of the images of displays."""

    def __init__(self) -> None:
        self.blocks: list[types.ImageContent] = []
        self.notes: list[str] = []
        self._size = 0

    def take(self, display: Display) -> str:
        """Take a display's image, if it has one; otherwise return its text."""
        full = display.full_image
        is_shown = any(mime in display.data for mime in SUFFIXES)
        if full is not None:
            self.notes.append(full_image(full, is_shown))
            if not is_shown:
                return ""
        for mime in SUFFIXES:
            value = display.data.get(mime)
            if isinstance(value, str):
                content = decode(value, mime)
                if content is None or (mime != SVG and bitmap_size(content) is None):
                    self.notes.append(f"[a display omitted: its data is not {mime}]")
                elif len(self.blocks) >= MAX_IMAGES or self._size + len(content) > MAX_IMAGE_BYTES:
                    self.notes.append(f"[an image of {format_size(len(content))} omitted: too many images]")
                else:
                    self._size += len(content)
                    self.blocks.append(image(content, mime))
                    return ""
        for mime in ("text/markdown", "text/plain", "text/latex"):
            value = display.data.get(mime)
            if isinstance(value, str):
                return value
        kinds = ", ".join(strip_control(mime) for mime in list(display.data)[:10])
        return f"[a display without a text form: {kinds or 'empty'}]"


def full_image(full: FullImage, is_shown: bool) -> str:
    """Return a line about an image that was reduced or left out."""
    pixels = f" of {full.width} x {full.height} pixels" if full.width and full.height else ""
    place = f"in full: {strip_control(full.path)}" if full.path else "it could not be saved in full"
    done = "was reduced" if is_shown else "could not be reduced to the limits"
    return f"[the image{pixels} ({format_size(full.bytes)}) {done}; {place}]"


def listing(lines: Sequence[str], note: str | None, is_truncated: bool) -> str:
    """Join lines, with a note if the list is incomplete."""
    end = f"\n[truncated: {note or 'there are more'}]" if is_truncated else ""
    return ("\n".join(strip_control(line) for line in lines) or "no results") + end
