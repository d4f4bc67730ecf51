"""Find the locales of a root file system by its files, which may be hostile. Nothing in it is executed."""

from __future__ import annotations

import os
import re
import stat
import struct
from pathlib import Path

#: Locales that every C library has.
_BUILT_IN = frozenset({"C", "POSIX", "C.utf8"})
_DIRECTORY = "usr/lib/locale"
# The archive of the GNU C library begins with its magic number; offset and size of the names are its sixth and seventh.
_HEADER = struct.Struct("<7I")
_MAGIC = 0xDE020109
#: Bytes of names, and entries of the directory, that are read.
_MAX_NAMES = 1 << 20
_MAX_ENTRIES = 10_000


def has_locale(name: str, root: Path | None) -> bool:
    """Return whether a root file system has a locale.

    Parameters
    ----------
    name : str
        Such as ``de_DE.UTF-8``.
    root : Path or None
        The directory of the root; None for this machine's own.
    """
    wanted = _normalize(name)
    return wanted in _BUILT_IN or wanted in _installed((root or Path("/")) / _DIRECTORY)


def _normalize(name: str) -> str:
    """Return a locale with its encoding as the C library compares it."""
    found = re.fullmatch(r"([^.@]*)\.([^@]*)(@.*)?", name)
    if found is None:
        return name
    encoding = re.sub(r"[^a-z0-9]", "", found[2].lower())
    return f"{found[1]}.{encoding}{found[3] or ''}"


def _installed(directory: Path) -> set[str]:
    names: set[str] = set()
    try:
        with os.scandir(directory) as entries:
            for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False):
                if entry.is_dir(follow_symlinks=False):
                    names.add(_normalize(entry.name))
    except OSError:
        return names
    return names | _archived(directory / "locale-archive")


def _archived(path: Path) -> set[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return set()
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return set()
        magic, *_, offset, size = _HEADER.unpack(os.pread(fd, _HEADER.size, 0))
        names = os.pread(fd, min(size, _MAX_NAMES), offset) if magic == _MAGIC else b""
    except (OSError, struct.error):
        return set()
    finally:
        os.close(fd)
    return {_normalize(name.decode("ascii", "replace")) for name in names.split(b"\0") if name}
