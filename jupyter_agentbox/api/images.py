"""Reduce large images in results, because models and their clients refuse them.

Images are hostile. This process reads no more than their headers. They are decoded and reduced by a program inside the
sandbox, with the sandbox's own Pillow. What that program returns is checked like any other image. Notebooks get their
images from the kernel, unchanged.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import struct
import sys

import msgspec

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.models.outputs import CodeResult, Display, FullImage
from jupyter_agentbox.sandbox.processes import Command
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox

#: Directory of the workspace in which the full images are saved.
DIRECTORY = "agentbox-images"
#: Largest image that is decoded, in pixels, and seconds that this may take.
MAX_DECODED = 64_000_000
REDUCE_TIMEOUT = 20.0
#: Maximum number of images that are reduced for one result. Others that are too large are left out.
MAX_REDUCED = 20
#: Maximum number of images that are saved for one result.
MAX_SAVED = 100
#: Maximum number of parts of a JPEG file that are read to find its size.
_MAX_SEGMENTS = 1000

SVG = "image/svg+xml"
#: The images in a display, in the order in which they are preferred, and the suffixes of their files.
SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/gif": ".gif", "image/webp": ".webp", SVG: ".svg"}
_BITMAPS = (("image/png", b"\x89PNG\r\n\x1a\n"), ("image/jpeg", b"\xff\xd8\xff"), ("image/gif", b"GIF8"))

_REDUCE = r"""
import io, re, sys
from PIL import Image
pixels, limit = map(int, sys.argv[1:])
image = Image.open(sys.stdin.buffer)
with open("/proc/meminfo") as file:
    available = int(re.search(r"MemAvailable:\s+(\d+)", file.read())[1]) * 1024
if 16 * image.width * image.height > available:
    sys.exit("not enough memory")
image.draft("RGB", (pixels, pixels))
if image.mode not in ("L", "RGB", "RGBA"):
    image = image.convert("RGBA" if "transparency" in image.info or "A" in image.mode else "RGB")
image.thumbnail((pixels, pixels))
while True:
    for options in ({"format": "PNG", "optimize": True}, {"format": "JPEG", "quality": 80}):
        shown = image
        if options["format"] == "JPEG" and image.mode == "RGBA":
            shown = Image.new("RGB", image.size, "white")
            shown.paste(image, mask=image.getchannel("A"))
        file = io.BytesIO()
        shown.save(file, **options)
        if file.tell() <= limit or max(image.size) < 16:
            sys.stdout.buffer.write(file.getvalue())
            sys.exit()
    image = image.resize((max(1, image.width * 3 // 4), max(1, image.height * 3 // 4)))
"""


def bitmap_type(content: bytes) -> str | None:
    """Return the MIME type of an image by its first bytes, or None."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for mime, magic in _BITMAPS if content.startswith(magic)), None)


def bitmap_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height by an image's header, in pixels, or None if it has none."""
    try:
        kind = bitmap_type(content)
        if kind == "image/png" and content[12:16] == b"IHDR":
            return struct.unpack_from(">II", content, 16)
        if kind == "image/gif":
            return struct.unpack_from("<HH", content, 6)
        if kind == "image/jpeg":
            return _jpeg_size(content)
        if kind == "image/webp":
            return _webp_size(content)
    except (struct.error, IndexError):
        pass
    return None


def _jpeg_size(content: bytes) -> tuple[int, int] | None:
    position = 2
    for _ in range(_MAX_SEGMENTS):
        while content[position] == 0xFF and content[position + 1] == 0xFF:
            position += 1
        marker, length = struct.unpack_from(">xBH", content, position)
        if content[position] != 0xFF:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", content, position + 5)
            return width, height
        position += 2 + length
    return None


def _webp_size(content: bytes) -> tuple[int, int] | None:
    kind = content[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(content[24:27], "little"), 1 + int.from_bytes(content[27:30], "little")
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", content, 26)
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return None


class Images:
    """The images of one result.

    Parameters
    ----------
    managed : ManagedSandbox
        Where they are reduced and saved.
    pixels : int or None
        Maximum number of pixels of a side.
    max_bytes : int or None
        Maximum number of bytes.
    """

    def __init__(self, managed: ManagedSandbox, pixels: int | None, max_bytes: int | None) -> None:
        self._managed = managed
        self._pixels = pixels
        self._max_bytes = max_bytes
        self._done: dict[bytes, tuple[bytes | None, FullImage]] = {}

    async def fit_result(self, result: CodeResult) -> CodeResult:
        """Return a result with its images reduced."""
        shown = await self.fit_display(result.result) if result.result is not None else None
        displays = [await self.fit_display(display) for display in result.displays]
        return msgspec.structs.replace(result, result=shown, displays=displays)

    async def fit_display(self, display: Display) -> Display:
        """Return a display with its images reduced, or left out if they cannot be."""
        found = {mime: decode(value, mime) for mime in SUFFIXES if isinstance(value := display.data.get(mime), str)}
        large = {mime: content for mime, content in found.items() if content and not self._fits(content, mime)}
        if not large:
            return display
        data = {mime: value for mime, value in display.data.items() if mime not in large}
        # The others are the same image in other formats.
        mime, content = next(iter(large.items()))
        reduced, full = await self.fit(content, mime)
        if reduced is not None:
            data.setdefault(bitmap_type(reduced) or mime, base64.b64encode(reduced).decode())
        metadata = {name: value for name, value in display.metadata.items() if name not in SUFFIXES}
        return Display(data, metadata, display.display_id, full)

    def _fits(self, content: bytes, mime: str) -> bool:
        if self._max_bytes is not None and len(content) > self._max_bytes:
            return False
        if self._pixels is None or mime == SVG:
            return True
        size = bitmap_size(content)
        return size is not None and min(size) > 0 and max(size) <= self._pixels

    async def fit(self, content: bytes, mime: str, path: str | None = None) -> tuple[bytes | None, FullImage | None]:
        """Return an image within the limits, and a description of the full one if it is another.

        Parameters
        ----------
        content : bytes
        mime : str
        path : str, optional
            Path of the full image in the workspace. By default, it is saved.

        Returns
        -------
        bytes or None
            None if the image cannot be reduced.
        FullImage or None
            None if the image is within the limits.
        """
        if self._fits(content, mime):
            return content, None
        key = hashlib.sha256(content).digest()
        if key in self._done:
            return self._done[key]
        width, height = bitmap_size(content) or (None, None)
        if len(self._done) >= MAX_SAVED:
            return None, FullImage(mime, len(content), width, height, path)
        reduced = await self._reduce(content) if len(self._done) < MAX_REDUCED else None
        path = path or await self._save(content, f"{DIRECTORY}/{key.hex()[:16]}{SUFFIXES[mime]}")
        self._done[key] = reduced, FullImage(mime, len(content), width, height, path)
        return self._done[key]

    async def _reduce(self, content: bytes) -> bytes | None:
        width, height = bitmap_size(content) or (0, 0)
        if not 0 < width * height <= MAX_DECODED:
            return None
        limit = self._max_bytes or len(content)
        try:
            sandbox = self._managed.running()
            # In a directory without modules that could be imported in place of Pillow.
            program = [sandbox.spec.python or sys.executable, "-c", _REDUCE, str(self._pixels or 65_535), str(limit)]
            done = await sandbox.processes.run(
                Command(argv=program, workdir="/"), stdin=content, timeout=REDUCE_TIMEOUT, max_output=limit
            )
        except AgentboxError:
            return None
        kind = bitmap_type(done.stdout)
        return done.stdout if not done.truncated and kind and self._fits(done.stdout, kind) else None

    async def _save(self, content: bytes, path: str) -> str | None:
        try:
            folder = self._managed.folder()
            await asyncio.to_thread(lambda: folder.write(path, content, parents=True))
        except AgentboxError:
            return None
        return path


def decode(value: str, mime: str) -> bytes | None:
    """Return the bytes of an image in a display, or None if they are not of this type."""
    if mime == SVG:
        head = value[:1000].lstrip().lower()
        is_svg = head.startswith(("<svg", "<?xml", "<!doctype svg", "<!--"))
        return value.encode("utf-8", "replace") if is_svg else None
    try:
        content = base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        return None
    return content if bitmap_type(content) == mime else None
