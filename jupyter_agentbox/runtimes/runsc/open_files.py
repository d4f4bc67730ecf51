"""List the deleted files that a sandbox's processes keep open, which still use disk space.

Run as ``python -I -S -B open_files.py pid...``, it prints them. An ordinary user's sandbox runs under a subordinate id,
and not even that user may see its open files. But the user that created its user namespace may join the namespace and
see them from there. Joining requires a process with a single thread, so the server cannot do it itself.
"""

import ctypes
import os
import sys
from typing import NamedTuple

CLONE_NEWUSER = 0x10000000
_DELETED = " (deleted)"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class OpenFile(NamedTuple):
    """A deleted file that is still open: its allocated bytes, its inode, and its name in ``/proc``."""

    size: int
    inode: int
    name: str


def list_open_files(pids: "Iterable[int]") -> "list[OpenFile]":
    """Return the deleted files that the processes have open, without duplicates."""
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
                continue  # closed in the meantime
    return list(found.values())


def parse(output: bytes) -> "list[OpenFile]":
    """Parse the output of this program."""
    rows = [os.fsdecode(row).split(" ", 2) for row in output.split(b"\0") if row]
    return [OpenFile(int(size), int(inode), name) for size, inode, name in rows]


def main(pids: "Sequence[int]") -> None:
    """Print the list: size, inode and name of each file, followed by NUL."""
    with open(f"/proc/{pids[0]}/ns/user") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), "setns")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    for file in list_open_files(pids):
        sys.stdout.buffer.write(b"%d %d %s\0" % (file.size, file.inode, os.fsencode(file.name)))


if __name__ == "__main__":
    main([int(pid) for pid in sys.argv[1:]])
