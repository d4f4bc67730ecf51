"""Measure what a sandbox holds on the disk: the deleted files that its processes keep open, and folders.

Run as ``python -I -S -B measure.py pid...`` it prints the first. An ordinary user's sandbox runs under a subordinate
id, whose open files not even that user may see; but whoever made its user namespace may join it, and sees them from
there. That takes a process with one thread, so it cannot be done in the server.
"""

import contextlib
import ctypes
import os
import sys
import time
from typing import NamedTuple

CLONE_NEWUSER = 0x10000000
_DELETED = " (deleted)"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class OpenFile(NamedTuple):
    """A deleted file that is kept open: its allocated bytes, its inode, and what ``/proc`` calls it."""

    size: int
    inode: int
    name: str


def list_open_files(pids: "Iterable[int]") -> "list[OpenFile]":
    """Return the deleted files that the processes have open, each once."""
    found = {}
    for pid in pids:
        base = f"/proc/{pid}/fd"
        for number in os.listdir(base):
            try:
                name = os.readlink(base + "/" + number)
                if name.endswith(_DELETED):
                    status = os.stat(base + "/" + number)
                    key = status.st_dev, status.st_ino
                    found[key] = OpenFile(status.st_blocks * 512, status.st_ino, name.removesuffix(_DELETED))
            except OSError:
                continue  # closed meanwhile
    return list(found.values())


def measure_tree(
    path: "str | os.PathLike[str]", max_entries: int = 100_000, max_time: float = 1.0
) -> "tuple[int, bool]":
    """Return the allocated bytes beneath a folder that hostile code fills, and whether all of it was seen.

    No link is followed, not even one that replaces a folder meanwhile. Bounded in entries and seconds.
    """
    total, seen, deadline = 0, 0, time.monotonic() + max_time
    folders: list[tuple[str, ...]] = [()]
    while folders:
        parts = folders.pop()
        with contextlib.suppress(OSError), _opened_below(path, parts) as handle, os.scandir(handle) as entries:
            for entry in entries:
                seen += 1
                if seen > max_entries or time.monotonic() > deadline:
                    return total, False
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((*parts, entry.name))
    return total, True


@contextlib.contextmanager
def _opened_below(top: "str | os.PathLike[str]", parts: "Sequence[str]") -> "Iterator[int]":
    """Open a folder component by component, following no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(top, flags)
    try:
        for part in parts:
            below = os.open(part, flags, dir_fd=handle)
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def parse(output: bytes) -> "list[OpenFile]":
    """Read what the program printed."""
    rows = [os.fsdecode(row).split(" ", 2) for row in output.split(b"\0") if row]
    return [OpenFile(int(size), int(inode), name) for size, inode, name in rows]


def main(pids: "Sequence[int]") -> None:
    """Print the list: size, inode, name and NUL of each."""
    with open(f"/proc/{pids[0]}/ns/user") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), "setns")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    for file in list_open_files(pids):
        sys.stdout.buffer.write(b"%d %d %s\0" % (file.size, file.inode, os.fsencode(file.name)))


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
