"""What file operations answer: frozen structs that go to JSON as they are. Paths are in written form."""

from __future__ import annotations

import os
import stat
from typing import Literal

import msgspec

Kind = Literal["file", "directory", "link", "fifo", "socket", "device"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the folder.

    Parameters
    ----------
    path : str
        Relative to the folder; ``.`` is the folder itself.
    kind : str
        ``file``, ``directory``, ``link``, ``fifo``, ``socket`` or ``device``.
    size : int
        Bytes; of a sparse file, the holes included.
    mtime : float
        When its content changed, in seconds since 1970.
    mode : int
        Permission bits.
    target : str, optional
        Where a link leads.
    """

    path: str
    kind: Kind
    size: int
    mtime: float
    mode: int
    target: str | None = None


class Listing(msgspec.Struct, frozen=True):
    """Entries, and whether these are all.

    Parameters
    ----------
    entries : list of Entry
        In order of directories, by name.
    truncated : bool
        There may be more.
    note : str, optional
        Why it was cut.
    """

    entries: list[Entry]
    truncated: bool = False
    note: str | None = None


class Content(msgspec.Struct, frozen=True):
    """A part of a file.

    Parameters
    ----------
    path : str
        The file.
    size : int
        Bytes of the whole file.
    offset : int
        Where `data` begins.
    data : bytes
        The bytes.
    truncated : bool
        The file goes on behind `data`.
    """

    path: str
    size: int
    offset: int
    data: bytes
    truncated: bool


class Match(msgspec.Struct, frozen=True, omit_defaults=True):
    """One matching line, with the lines around it that were asked for. Bytes that are no UTF-8 appear as U+FFFD."""

    path: str
    line: int
    text: str
    before: list[str] = []
    after: list[str] = []


class Matches(msgspec.Struct, frozen=True):
    """Answer of grep.

    Parameters
    ----------
    matches : list of Match
        By file, by line.
    files : int
        Files searched.
    skipped : int
        Files passed over: binary, or unreadable.
    truncated : bool
        There may be more.
    note : str, optional
        Why it was cut.
    """

    matches: list[Match]
    files: int = 0
    skipped: int = 0
    truncated: bool = False
    note: str | None = None


class Edited(msgspec.Struct, frozen=True):
    """A file after an edit, and how often the text was replaced."""

    entry: Entry
    replacements: int


class Copied(msgspec.Struct, frozen=True):
    """What a copy or an unpacked archive made.

    Parameters
    ----------
    entries : int
        Files, directories and links made.
    bytes : int
        Bytes of files.
    sha256 : str, optional
        Of the uploaded archive.
    skipped : list of str
        A sentence for each of the first entries that were left out.
    skipped_count : int
        How many were left out.
    """

    entries: int
    bytes: int
    sha256: str | None = None
    skipped: list[str] = []
    skipped_count: int = 0


class Used(msgspec.Struct, frozen=True):
    """How much the folder holds.

    Parameters
    ----------
    bytes : int
        Allocated on disk; each entry counts as 4 KiB at least.
    is_exact : bool
        False if the count was cut short: there is at least this much.
    """

    bytes: int
    is_exact: bool = True


def kind_of(mode: int) -> Kind:
    """Return the kind of entry by ``st_mode``."""
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISFIFO(mode):
        return "fifo"
    return "socket" if stat.S_ISSOCK(mode) else "device"


def make_entry(path: str, status: os.stat_result, target: str | None = None) -> Entry:
    """Return the entry of what was stat'ed; `path` and `target` in written form."""
    mode = stat.S_IMODE(status.st_mode)
    return Entry(path, kind_of(status.st_mode), status.st_size, status.st_mtime, mode, target)
