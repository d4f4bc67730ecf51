"""Validate and split paths as callers write them, and write paths so that every name survives JSON.

A *path* is text, relative to the folder or absolute beneath its mount point (``/workspace``). A byte of a name that is
not UTF-8 is written ``\\xNN``, because JSON has no other way to represent it (lone surrogates are not valid JSON). If a
name itself contains the four characters ``\\xNN``, its backslash is written ``\\x5c``. So each name has exactly one
written form, and names without such bytes, which is nearly all of them, are written unchanged. Names as returned by
:func:`os.fsdecode` are also accepted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from jupyter_agentbox.errors import InvalidRequest

#: Limits of Linux, in bytes: for a whole path, and for one name.
MAX_PATH = 4096
MAX_NAME = 255

_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_TO_WRITE = re.compile(r"[\udc80-\udcff]|\\(?=x[0-9a-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Parts = tuple[str, ...]


def write_name(name: str) -> str:
    """Return the written form of a name or path, given in the form of :func:`os.fsdecode`."""
    return _TO_WRITE.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", name)


def read_name(text: str) -> str:
    """Return the name for a `text` in written form, in the form of :func:`os.fsdecode`."""

    def decode(found: re.Match[str]) -> str:
        code = int(found[1], 16)
        return "\\" if code == 0x5C else chr(0xDC00 + code) if code >= 0x80 else found[0]

    # Encode and decode again: bytes that were escaped one by one can form valid UTF-8 together, and must then yield the
    # same name.
    return os.fsdecode(os.fsencode(_ESCAPE.sub(decode, text)))


def write_path(parts: Sequence[str]) -> str:
    """Return the written form of a path beneath the folder; ``.`` is the folder itself."""
    return write_name("/".join(parts)) or "."


def parse_path(text: str, *, mount: str = "/workspace", field: str = "path") -> Parts:
    """Validate and split a path. The folder itself has no parts.

    Parameters
    ----------
    text : str
        The path in written form.
    mount : str
        Prefix that absolute paths must have.
    field : str
        The request field to name in an error.

    Raises
    ------
    InvalidRequest
        It is too long, contains NUL or ``..``, or is absolute and outside `mount`.
    """
    if len(text) > 4 * MAX_PATH:
        raise InvalidRequest(f"the path is longer than {MAX_PATH} bytes", field=field)
    try:
        name = read_name(text)
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        raise InvalidRequest(
            rf"the path {show(text)} contains an invalid character; write bytes that are not UTF-8 as \xNN", field=field
        ) from None
    if "\0" in name:
        raise InvalidRequest("the path contains a NUL character", field=field)
    if name.startswith("/"):
        top = mount.rstrip("/")
        if name != top and not name.startswith(top + "/"):
            raise InvalidRequest(
                f"the path {show(text)} is outside {mount}; use a path in it, or a relative path", field=field
            )
        name = name[len(top) :]
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise InvalidRequest(f"the path {show(text)} contains '..', which is not allowed", field=field)
    if size > MAX_PATH or any(len(os.fsencode(part)) > MAX_NAME for part in parts):
        raise InvalidRequest(
            f"the path {show(text)} is too long: the maximum is {MAX_PATH} bytes, and {MAX_NAME} for each name",
            field=field,
        )
    return parts


def show(text: str) -> str:
    """Return a path for use in a sentence: in written form, shortened, on one line, unable to reorder nearby text."""
    clean = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], write_name(text))
    clean = clean.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= 200 else f"{clean[:120]}…{clean[-70:]}"


def is_inner_link(depth: int, target: str) -> bool:
    """Return whether a link at `depth` directories below a tree's top can lead only into that tree.

    ``..`` is allowed only at the beginning. After another name, which may itself be a link, it could climb further than
    it appears to. The result is valid as long as the link is in real directories.
    """
    if target.startswith("/") or not target:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return climbs <= depth and ".." not in parts[climbs:]
