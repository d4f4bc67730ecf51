"""Define the results of file operations: frozen structs that are encoded as JSON. Paths are in written form."""

from __future__ import annotations

import os
import stat
from typing import Literal

import msgspec

Kind = Literal["file", "directory", "link", "fifo", "socket", "device"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file, directory or other entry.

    Parameters
    ----------
    path : str
        Relative to the folder; ``.`` is the folder itself.
    kind : str
        ``file``, ``directory``, ``link``, ``fifo``, ``socket`` or ``device``.
    size : int
        Size in bytes, including holes of a sparse file.
    mtime : float
        Time of the last change of its content, in seconds since the epoch.
    mode : int
        Permission bits.
    target : str, optional
        Target of a link.
    """

    path: str
    kind: Kind
    size: int
    mtime: float
    mode: int
    target: str | None = None


class Listing(msgspec.Struct, frozen=True):
    """A list of entries.

    Parameters
    ----------
    entries : list of Entry
        Sorted by directory, then by name.
    truncated : bool
        Whether there may be more.
    note : str, optional
        Why the list is incomplete.
    """

    entries: list[Entry]
    truncated: bool = False
    note: str | None = None


class Content(msgspec.Struct, frozen=True):
    """A part of a file.

    Parameters
    ----------
    path : str
        Path of the file.
    size : int
        Size of the whole file in bytes.
    offset : int
        Offset of the first byte of `data`.
    data : bytes
        Content of this part.
    truncated : bool
        Whether the file continues after `data`.
    """

    path: str
    size: int
    offset: int
    data: bytes
    truncated: bool


class Match(msgspec.Struct, frozen=True, omit_defaults=True):
    """A matching line with its context lines. Bytes that are not valid UTF-8 appear as U+FFFD."""

    path: str
    line: int
    text: str
    before: list[str] = []
    after: list[str] = []


class Matches(msgspec.Struct, frozen=True):
    """The result of a search.

    Parameters
    ----------
    matches : list of Match
        Sorted by file, then by line.
    files : int
        Number of files searched.
    skipped : int
        Number of files skipped because they are binary or unreadable.
    truncated : bool
        Whether there may be more.
    note : str, optional
        Why the result is incomplete.
    """

    matches: list[Match]
    files: int = 0
    skipped: int = 0
    truncated: bool = False
    note: str | None = None


class Edited(msgspec.Struct, frozen=True):
    """An edited file, and the number of replacements."""

    entry: Entry
    replacements: int


class Copied(msgspec.Struct, frozen=True):
    """The result of copying files or unpacking an archive.

    Parameters
    ----------
    entries : int
        Number of files, directories and links created.
    bytes : int
        Size of the created files in bytes.
    sha256 : str, optional
        SHA-256 of the uploaded archive.
    skipped : list of str
        Messages about the first entries that were skipped.
    skipped_count : int
        Number of entries that were skipped.
    """

    entries: int
    bytes: int
    sha256: str | None = None
    skipped: list[str] = []
    skipped_count: int = 0


class Used(msgspec.Struct, frozen=True):
    """Disk use of the workspace.

    Parameters
    ----------
    bytes : int
        Allocated bytes on disk; each entry counts as at least 4 KiB.
    is_exact : bool
        Whether the count is complete. If not, at least this much is used.
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
    """Return the entry for a stat result; `path` and `target` are in written form."""
    mode = stat.S_IMODE(status.st_mode)
    return Entry(path, kind_of(status.st_mode), status.st_size, status.st_mtime, mode, target)
