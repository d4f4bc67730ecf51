"""Create, list and remove entries in the directory of a sandbox's link, on the host.

Code that is uid 0 inside can create, rename and replace any entry of this directory at any moment, even between two
system calls of the host. So the host never opens an entry of this directory by name. It creates and opens a FIFO in
the sandbox's own directory, which is never visible inside, and moves it into the link's directory once it is open. For
entries that earlier owners left, the host opens only a reference to the entry itself, without following links.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Name of a FIFO while it is created, in the directory above.
_PRIVATE_NAME = "fifo.new"
#: Maximum number of entries to read, because code inside can create any number.
MAX_ENTRIES = 4096


def share_fifo(directory: Path, name: str, flags: int) -> int:
    """Create a FIFO in the link's directory and return a nonblocking descriptor of the host's end.

    The guest sees the FIFO only after this end is open, because inside gVisor opening a FIFO without a reader hangs.

    Parameters
    ----------
    directory : Path
        The link's directory. Code inside cannot write to its parent directory.
    name : str
        Name of the new FIFO. An existing entry of this name is replaced.
    flags : int
        ``os.O_RDONLY`` or ``os.O_RDWR``.

    Raises
    ------
    OSError
        The FIFO could not be created or moved.
    """
    private = directory.parent / _PRIVATE_NAME
    private.unlink(missing_ok=True)  # left by an owner that was killed
    os.mkfifo(private, 0o600)
    fd = -1
    try:
        made = os.lstat(private)
        fd = os.open(private, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened = os.fstat(fd)
        if not stat.S_ISFIFO(opened.st_mode) or not os.path.samestat(made, opened):
            raise OSError(errno.ESTALE, "the FIFO was replaced while it was being opened", str(private))
        with _opened(directory) as handle:
            os.rename(private, name, dst_dir_fd=handle)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        private.unlink(missing_ok=True)
        raise
    return fd


def list_names(directory: Path) -> list[str]:
    """Return the names in the link's directory, at most :data:`MAX_ENTRIES` of them."""
    with _opened(directory) as handle, os.scandir(handle) as entries:
        return [entry.name for entry in itertools.islice(entries, MAX_ENTRIES)]


def remove_names(directory: Path, names: Iterable[str]) -> None:
    """Remove entries of the link's directory. Entries that cannot be removed are skipped."""
    with contextlib.suppress(OSError), _opened(directory) as handle:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=handle)


def reference_fifos(directory: Path, most: int) -> list[int]:
    """Return ``O_PATH`` descriptors of up to `most` FIFOs in the link's directory.

    Each descriptor keeps referring to its FIFO, even if another entry takes the name. To open the FIFO, open
    ``/proc/self/fd/N``.
    """
    found: list[int] = []
    with _opened(directory) as handle:
        for name in list_names(directory):
            if len(found) == most:
                break
            with contextlib.suppress(OSError):
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    found.append(fd)
                else:
                    os.close(fd)
    return found


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)
