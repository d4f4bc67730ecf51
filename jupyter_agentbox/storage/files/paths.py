"""Paths as callers write them: judged, split, and written back so that every name survives JSON.

A *path* is text, relative to the folder or absolute beneath its mount point (``/workspace``). A byte of a name that is
no UTF-8 is written ``\\xNN``, as JSON has no other way to carry it (lone surrogates are no JSON); a name that holds the
four characters ``\\xNN`` itself has its backslash written ``\\x5c``. So each name has exactly one written form, and
names without such bytes, which is nearly all of them, are written as they are. What comes from :func:`os.fsdecode` is
understood too.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence

from jupyter_agentbox.errors import InvalidRequest

#: What Linux takes: a whole path, and one name, in bytes.
MAX_PATH = 4096
MAX_NAME = 255

_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_TO_WRITE = re.compile(r"[\udc80-\udcff]|\\(?=x[0-9a-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Parts = tuple[str, ...]


def write_name(name: str) -> str:
    """Return the written form of a name or path as :func:`os.fsdecode` gives it."""
    return _TO_WRITE.sub(lambda found: f"\\x{ord(found[0]) & 0xFF:02x}", name)


def read_name(text: str) -> str:
    """Return what `text` in written form names, as :func:`os.fsdecode` would give it."""

    def decode(found: re.Match[str]) -> str:
        code = int(found[1], 16)
        return "\\" if code == 0x5C else chr(0xDC00 + code) if code >= 0x80 else found[0]

    # There and back: bytes given one by one may be good UTF-8 together, and must then be the same name.
    return os.fsdecode(os.fsencode(_ESCAPE.sub(decode, text)))


def write_path(parts: Sequence[str]) -> str:
    """Return the written form of a path beneath the folder; ``.`` is the folder itself."""
    return write_name("/".join(parts)) or "."


def parse_path(text: str, *, mount: str = "/workspace", field: str = "path") -> Parts:
    """Judge and split a path; the folder itself has no parts.

    Parameters
    ----------
    text : str
        The path in written form.
    mount : str
        What absolute paths must begin with.
    field : str
        The field of the request that an error names.

    Raises
    ------
    InvalidRequest
        It is too long, holds NUL or ``..``, or is absolute and outside of `mount`.
    """
    if len(text) > 4 * MAX_PATH:
        raise InvalidRequest(f"the path is longer than {MAX_PATH} bytes", field=field)
    try:
        name = read_name(text)
        size = len(os.fsencode(name))
    except UnicodeEncodeError:
        raise InvalidRequest(
            rf"the path {show(text)} holds a character that no file name can hold; write odd bytes as \xNN", field=field
        ) from None
    if "\0" in name:
        raise InvalidRequest("the path holds a NUL character", field=field)
    if name.startswith("/"):
        top = mount.rstrip("/")
        if name != top and not name.startswith(top + "/"):
            raise InvalidRequest(
                f"the path {show(text)} is outside of {mount}; give one beneath it, or a relative one", field=field
            )
        name = name[len(top) :]
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise InvalidRequest(f"the path {show(text)} holds '..', which is not followed", field=field)
    if size > MAX_PATH or any(len(os.fsencode(part)) > MAX_NAME for part in parts):
        raise InvalidRequest(
            f"the path {show(text)} is too long: at most {MAX_PATH} bytes, and {MAX_NAME} in one name", field=field
        )
    return parts


def show(text: str) -> str:
    """Return a path for a sentence: in written form, shortened, on one line, unable to reorder the text around it."""
    clean = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], write_name(text))
    clean = clean.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= 200 else f"{clean[:120]}…{clean[-70:]}"


def make_matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a predicate on single names from shell patterns, such as ``.*``."""
    if not patterns:
        return lambda name: False
    # Atomic in fnmatch's own translation, so that no name makes it slow.
    expression = re.compile("|".join(fnmatch.translate(pattern) for pattern in dict.fromkeys(patterns)))
    return lambda name: expression.match(name) is not None


def is_inner_link(depth: int, target: str) -> bool:
    """Whether a link `depth` directories below a tree's top leads nowhere but into that tree.

    ``..`` may stand only at the front: behind another name, which may be a link too, it could climb further than it
    seems to. Holds as long as the link lies in real directories.
    """
    if target.startswith("/") or not target:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    return climbs <= depth and ".." not in parts[climbs:]
