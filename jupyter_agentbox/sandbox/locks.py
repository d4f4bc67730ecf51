"""Take the file locks of programs inside on the host's files, so that sandboxes and host programs exclude each other.

gVisor handles locks itself and passes none to the host. The guest's end is ``guest/locks.py``. Each stream of kind
``locks`` belongs to one process inside. Its locks are released when the stream ends, at the latest with the link.

Everything from inside is hostile: requests are small, the number of open files is bounded, files are opened beneath the
work folder without following links, and only lock calls that do not wait are made. A sandbox can keep a host program
from locking a file of its own work folder, as any program of the user can.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jupyter_agentbox.errors import AgentboxError, LinkClosed, NotFound
from jupyter_agentbox.names import Names
from jupyter_agentbox.storage.files.tree import Tree

from .link.link import Stream

log = logging.getLogger(__name__)

#: Maximum number of bytes of one request, of files that one sandbox may have locked, and of streams.
MAX_REQUEST, MAX_FILES, MAX_STREAMS = 8192, 256, 256
#: Answer that no lock of this sandbox has to be asked for.
NOT_SHARED = -1
#: Largest offset in a file.
MAX_OFFSET = 1 << 62
# Locks of one open file description, which exclude those of other processes and are not lost when another descriptor of
# the same file is closed.
_FLOCK = struct.Struct("hhqqi4x")
_KINDS = {"s": (fcntl.LOCK_SH, fcntl.F_RDLCK), "x": (fcntl.LOCK_EX, fcntl.F_WRLCK), "u": (fcntl.LOCK_UN, fcntl.F_UNLCK)}
#: Answers to a test: no other lock, a shared lock, an exclusive lock.
_TESTED = {fcntl.F_UNLCK: 0, fcntl.F_RDLCK: errno.EBUSY, fcntl.F_WRLCK: errno.EAGAIN}

Held = dict[tuple[object, ...], int]


class Request(NamedTuple):
    """A request of a program inside.

    Parameters
    ----------
    kind : str
        ``f`` for ``flock``, ``p`` for a POSIX lock.
    how : str
        ``s`` for shared, ``x`` for exclusive, ``u`` to unlock, ``t`` to test for the locks of others.
    fd : int
        The program's descriptor, which owns an ``flock``.
    path : str
        Path relative to the work folder.
    start, length : int
        Range of a POSIX lock in bytes; length 0 extends to the end of the file.
    """

    kind: str
    how: str
    fd: int
    path: str
    start: int
    length: int


class FolderLocks:
    """The locks of one sandbox.

    Parameters
    ----------
    folder : Path or None
        The work folder, or None if the sandbox does not share it. Then nothing is locked.
    names : Names
        Names in it that the sandbox does not see.
    """

    def __init__(self, folder: Path | None, names: Names) -> None:
        self._folder = folder
        self._names = names
        #: For each stream, the files that it keeps open, by what it locks.
        self._streams: list[Held] = []

    async def handle(self, stream: Stream) -> None:
        """Serve the stream of one process until it ends. Never raises."""
        held: Held = {}
        self._streams.append(held)
        try:
            if len(self._streams) <= MAX_STREAMS:
                await self._serve(stream, held)
        except (LinkClosed, ValueError, TypeError, UnicodeError) as error:
            log.debug("a stream of locks ended: %r", error)
        finally:
            self._streams = [other for other in self._streams if other is not held]
            for fd in held.values():
                os.close(fd)
            stream.reset()

    async def _serve(self, stream: Stream, held: Held) -> None:
        pending = b""
        while data := await stream.read():
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) > MAX_REQUEST:
                raise ValueError("the request is too long")
            for line in lines:
                request = _parse(line)
                # In a thread, because a folder may be on a slow network; to the end, so that no descriptor is lost.
                task = asyncio.ensure_future(asyncio.to_thread(self._carry_out, request, held))
                try:
                    number = await asyncio.shield(task)
                except asyncio.CancelledError:
                    with suppress(Exception):
                        await task
                    raise
                await stream.write(b"%d\n" % number)

    def _carry_out(self, request: Request, held: Held) -> int:
        """Carry out one request. Return 0 or the error number."""
        if self._folder is None:
            return NOT_SHARED
        key: tuple[object, ...] = (request.kind, request.path, request.fd if request.kind == "f" else -1)
        try:
            if request.how == "u":
                return _lock(held[key], request) if key in held else 0
            fd = self._open(request.path)
            # Another file may have taken the place of the one that is open.
            if key in held and os.path.sameopenfile(fd, held[key]):
                os.close(fd)
            elif key not in held and sum(map(len, self._streams)) >= MAX_FILES:
                os.close(fd)
                return errno.ENOLCK
            else:
                if key in held:
                    os.close(held[key])
                held[key] = fd
            return _lock(held[key], request)
        except NotFound:
            return 0  # a deleted file, which no other program can open
        except AgentboxError:
            return errno.EACCES
        except OSError as error:
            return errno.EAGAIN if error.errno in (errno.EACCES, errno.EAGAIN) else error.errno or errno.EIO
        finally:
            if key in held and _is_free(request):
                os.close(held.pop(key))

    def _open(self, path: str) -> int:
        assert self._folder is not None
        parts = tuple(path.split("/"))
        if any(part in ("", ".", "..") for part in parts):
            raise OSError(errno.EINVAL, "not a path beneath the work folder")
        tree = Tree(self._folder, self._names)
        try:
            found = tree.open(parts)
        finally:
            tree.close()
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            name = f"/proc/self/fd/{found}"
            try:
                return os.open(name, os.O_RDWR | os.O_CLOEXEC)
            except PermissionError:
                return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(found)


def _parse(line: bytes) -> Request:
    """Parse a request. Raises ValueError."""
    fields: Any = json.loads(line)
    if not isinstance(fields, list) or len(fields) != 6:
        raise ValueError("not a request")
    request = Request(*fields)
    texts, numbers = (request.kind, request.how, request.path), (request.fd, request.start, request.length)
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is int for number in numbers):
        raise ValueError("not a request")
    is_known = request.kind in ("f", "p") and request.how in ("s", "x", "u", "t") and "\0" not in request.path
    if not is_known or not all(0 <= number <= MAX_OFFSET for number in (request.start, request.length)):
        raise ValueError("not a request")
    return request


def _lock(fd: int, request: Request) -> int:
    if request.how == "t":
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, request.start, request.length, 0)
        return _TESTED[_FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]]
    operation, kind = _KINDS[request.how]
    if request.kind == "f":
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    else:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, request.start, request.length, 0))
    return 0


def _is_free(request: Request) -> bool:
    """Return whether an unlocked file need not be kept open: nothing else of it may be locked by this owner."""
    return request.how == "u" and (request.kind == "f" or (request.start == 0 and request.length == 0))
