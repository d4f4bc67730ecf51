"""Upload and download files of any size in chunks, with their size and SHA-256."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from jupyter_agentbox.errors import Conflict, InvalidRequest
from jupyter_agentbox.models.file_entries import Entry

from .atomic import CHUNK, NewFile
from .paths import show
from .tree import Held, translate_os_errors

Result = TypeVar("Result")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
#: Minimum number of bytes for which hashing in another thread is worthwhile.
LARGE = 256 * 1024
_HASHERS = ThreadPoolExecutor(4, thread_name_prefix="agentbox-hash")


class Upload(Generic[Result]):
    """A file that is being uploaded. It appears at :meth:`finish`, complete and verified, or not at all.

    As a context manager, it discards an unfinished file at the end, so that a client that disconnects leaves nothing.

    Parameters
    ----------
    file : NewFile
        The file that receives the bytes.
    size : int, optional
        Expected number of bytes.
    sha256 : str, optional
        Expected SHA-256 in hexadecimal digits.
    deliver : callable
        Called with the verified file and its SHA-256; makes the file appear.
    """

    def __init__(
        self, file: NewFile, size: int | None, sha256: str | None, deliver: Callable[[NewFile, str], Result]
    ) -> None:
        self._file, self._size, self._deliver = file, size, deliver
        self._expected = sha256.lower() if sha256 else None
        self._hash = hashlib.sha256()
        self._hashed: Future[None] = Future()  # resolved when all earlier bytes are in the hash
        self._hashed.set_result(None)
        # A client can disconnect while a thread writes for it. The lock prevents aborting a file that is in use.
        self._lock = threading.RLock()

    @property
    def size(self) -> int:
        """Number of bytes received."""
        return self._file.size

    def write(self, *parts: bytes) -> None:
        """Write the next bytes, in one or several parts.

        Raises
        ------
        InvalidRequest
            They exceed the announced size.
        TooLarge
            They exceed the quota or the limit.
        """
        with self._lock:
            if self._size is not None and self.size + sum(map(len, parts)) > self._size:
                self.abort()
                raise InvalidRequest(f"received more than the announced {self._size} bytes", field="size")
            # Hashing takes most of an upload's time. Large parts are hashed while they and the next parts are written.
            self._hashed.result()
            if sum(map(len, parts)) >= LARGE:
                self._hashed = _HASHERS.submit(self._digest, parts)
            else:
                self._digest(parts)
            for data in parts:
                self._file.write(data)

    def _digest(self, parts: tuple[bytes, ...]) -> None:
        for data in parts:
            self._hash.update(data)

    def finish(self) -> Result:
        """Verify the received bytes and make the file appear.

        Raises
        ------
        InvalidRequest
            The size or SHA-256 differs from what was announced. Nothing appears.
        """
        with self._lock:
            try:
                if self._size is not None and self.size != self._size:
                    raise InvalidRequest(f"received {self.size} bytes, but {self._size} were announced", field="size")
                self._hashed.result()
                found = self._hash.hexdigest()
                if self._expected is not None and found != self._expected:
                    raise InvalidRequest(
                        f"the SHA-256 of the received data is {found}, not {self._expected}", field="sha256"
                    )
                return self._deliver(self._file, found)
            finally:
                self.abort()

    def abort(self) -> None:
        """Discard the file after other threads have finished with it. Idempotent; does nothing after :meth:`finish`."""
        with self._lock:
            self._file.discard()

    def __enter__(self) -> Upload[Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def check_announced(size: int | None, sha256: str | None) -> None:
    """Refuse an invalid size or SHA-256."""
    if size is not None and size < 0:
        raise InvalidRequest("the size must not be negative", field="size")
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise InvalidRequest("the SHA-256 must be 64 hexadecimal digits", field="sha256")


class Download(Held):
    """A download of a file or a part of one: an iterator of chunks, and a context manager.

    Parameters
    ----------
    fd : int
        The open file, owned by this object.
    entry : Entry
        The file as it was when it was opened.
    start, end : int
        Range of the part.

    Attributes
    ----------
    size : int
        Number of bytes that the iterator yields. If the file has fewer, the iteration raises an error.
    """

    def __init__(self, fd: int, entry: Entry, start: int, end: int) -> None:
        self.fd, self.entry = fd, entry
        self.start, self.size = start, end - start
        self._sha256: str | None = None

    def sha256(self) -> str:
        """Return the SHA-256 of the part in hexadecimal digits.

        After the iteration, the hash is known. Before it, the part is read an additional time.
        """
        if self._sha256 is None:
            for _ in self:
                pass
        assert self._sha256 is not None
        return self._sha256

    def __iter__(self) -> Iterator[bytes]:
        position, end, digest = self.start, self.start + self.size, hashlib.sha256()
        while position < end:
            with translate_os_errors(self.entry.path):
                data = os.pread(self.fd, min(CHUNK, end - position), position)
            if not data:
                raise Conflict(f"{show(self.entry.path)} became shorter while it was read", field="path")
            position += len(data)
            digest.update(data)
            yield data
        found = digest.hexdigest()
        if self._sha256 not in (None, found):
            raise Conflict(f"{show(self.entry.path)} changed while it was read", field="path")
        self._sha256 = found

    def __enter__(self) -> Download:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.retire()
