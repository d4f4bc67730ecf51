"""The limits on images in results; no sandbox is needed to read a header."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.api import Api

from jupyter_agentbox.api.images import bitmap_size, bitmap_type, decode


@pytest.mark.parametrize(
    "options", [{}, {"lossless": True}, {"exif": b"Exif\0\0" + bytes(3000)}, {"progressive": True}]
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_the_size_is_that_in_the_header(kind: str, options: dict[str, Any]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (310, 207), "red").save(file, kind, **options)
    content = file.getvalue()
    assert bitmap_size(content) == (310, 207)
    assert decode(base64.b64encode(content).decode(), str(bitmap_type(content))) == content


@given(
    st.sampled_from(
        [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"\xff\xd8" + b"\xff" * 5000, b"GIF89a", b"RIFF0000WEBPVP8X"]
    ),
    st.binary(max_size=60),
)
def test_any_header_is_read(start: bytes, rest: bytes) -> None:
    size = bitmap_size(start + rest)
    assert size is None or min(size) >= 0


def test_images_over_rest(api: Api, box: str) -> None:
    code = (
        "from PIL import Image\nfrom IPython.display import display\n"
        "Image.new('RGB', (2500, 500), 'blue').save('i.png')\ndisplay(Image.open('i.png'))\nImage.open('i.png')"
    )
    ran = api.ok("POST", box + "/code", {"code": code})
    (display,) = ran["displays"]
    for shown in (display, ran["result"]):
        assert Image.open(io.BytesIO(base64.b64decode(shown["data"]["image/png"]))).size == (2000, 400)
        full = shown["full_image"]
        assert (full["mime"], full["width"], full["height"]) == ("image/png", 2500, 500)
    assert display["full_image"]["path"] == ran["result"]["full_image"]["path"]
    read = api.ok("GET", f"{box}/files/content?encoding=base64&path={full['path']}")
    assert Image.open(io.BytesIO(base64.b64decode(read["data"]))).size == (2500, 500)
    events = dict(api.events("POST", box + "/code/stream", {"code": code}))
    assert events["display"]["display"] == display == events["done"]["result"]["displays"][0]
    assert events["result"]["display"]["full_image"] == full
    whole = api.ok("POST", box + "/code", {"code": code, "image_pixels": None, "image_bytes": None})["result"]
    assert whole["full_image"] is None
    assert Image.open(io.BytesIO(base64.b64decode(whole["data"]["image/png"]))).size == (2500, 500)
