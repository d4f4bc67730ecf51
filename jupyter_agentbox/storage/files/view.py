"""FolderView: all that can be looked at and read beneath one directory that a sandbox writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound, TooLarge
from jupyter_agentbox.models.file_entries import Content, Entry, Listing, Matches, kind_of, make_entry

from . import archives, search
from .atomic import CHUNK
from .paths import Parts, parse_path, show, write_name, write_path
from .transfer import Download
from .tree import KIND_NAMES, Budget, Found, Tree, closing, translate_os_errors

MIB = 1024 * 1024
#: Bytes of one read, and of a file that is edited.
MAX_READ = 16 * MIB
#: Entries in one answer.
MAX_ENTRIES = 10_000
#: Bytes of one download and of a copied or archived tree; the holes of sparse files count where they are sent.
MAX_DOWNLOAD = 64 * 1024 * MIB
#: Entries of a tree that is copied or archived.
MAX_TREE = 100_000


class FolderView:
    """The files beneath one directory, to look at and to read. The rules are in the package's docstring.

    All methods block; call them in worker threads. Safe for many threads at once. Paths are as
    ``storage.files.paths`` says; ``.`` or the mount point is the folder itself.

    Every method raises :class:`~jupyter_agentbox.errors.InvalidRequest` for a value that can't be,
    :class:`~jupyter_agentbox.errors.NotFound` for what is not there,
    :class:`~jupyter_agentbox.errors.Conflict` where what is there stands against it, such as a link, a FIFO or an
    existing file, and :class:`~jupyter_agentbox.errors.TooLarge` over a limit.

    Parameters
    ----------
    root : Path
        The directory; opened now, never looked up again.
    hidden : tuple of str
        Shell patterns of names that do not exist here, at any depth.
    mount : str
        Where callers know the folder: absolute paths begin with it.
    """

    def __init__(self, root: Path, hidden: tuple[str, ...] = (), *, mount: str = "/workspace") -> None:
        with translate_os_errors(str(root)):
            self._tree = Tree(root, hidden)
        self.mount = mount

    def close(self) -> None:
        """Let go of the directory: what other threads are doing there fails. Idempotent."""
        self._tree.retire()

    def __enter__(self) -> FolderView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parse(self, path: str, field: str = "path") -> Parts:
        return parse_path(path, mount=self.mount, field=field)

    # Looking

    def stat(self, path: str, *, follow: bool = True) -> Entry:
        """Return what `path` is; of a link, what it leads to unless `follow` is false."""
        parts = self._parse(path)
        with closing(self._tree.open(parts, follow=follow)) as fd, translate_os_errors(write_path(parts)):
            status = os.fstat(fd)
            target = write_name(os.readlink("", dir_fd=fd)) if stat.S_ISLNK(status.st_mode) else None
            return make_entry(write_path(parts), status, target)

    def exists(self, path: str) -> bool:
        """Whether there is something; a link counts if it leads to something inside."""
        try:
            self.stat(path)
        except (NotFound, Conflict):
            return False
        return True

    def list(
        self,
        path: str = ".",
        *,
        recursive: bool = False,
        depth: int | None = None,
        limit: int = 1000,
        timeout: float = 10.0,
    ) -> Listing:
        """List a directory; links in it are shown, not followed.

        Parameters
        ----------
        path : str
            The directory.
        recursive : bool
            List what is beneath, too.
        depth : int, optional
            Levels of a recursive list.
        limit : int
            Entries looked at, hidden ones included; at most :data:`MAX_ENTRIES`.
        timeout : float
            Seconds after which what was found is returned.
        """
        if depth is not None and depth < 1:
            raise InvalidRequest("the depth must be 1 or more", field="depth")
        budget = Budget(_check_limit(limit), timeout)
        with self._beneath(path) as (tree, parts):
            found = tree.walk((), budget, depth=depth if recursive else 1)
            entries = [_entry(parts, each) for each in found]
        return Listing(entries, budget.reason is not None, budget.reason)

    def glob(self, pattern: str, path: str = ".", *, limit: int = 1000, timeout: float = 10.0) -> Listing:
        """Find entries beneath `path` by a pattern such as ``**/*.py``; ``*`` matches names with a leading dot, too.

        Parameters
        ----------
        pattern : str
            ``*``, ``?`` and ``[...]`` in one name; ``**`` for any number of directories.
        path : str
            Where to begin.
        limit : int
            Entries returned; at most :data:`MAX_ENTRIES`.
        timeout : float
            Seconds after which what was found is returned.
        """
        wanted = search.Glob(pattern)
        _check_limit(limit)
        budget = Budget(1_000_000, timeout)
        entries: list[Entry] = []
        with self._beneath(path) as (tree, parts):
            for found in tree.walk((), budget, enter=wanted.may_match_beneath):
                if wanted.matches(found.parts):
                    if len(entries) >= limit:
                        budget.cut(f"stopped after {limit} entries")
                        break
                    entries.append(_entry(parts, found))
        return Listing(entries, budget.reason is not None, budget.reason)

    def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        is_literal: bool = False,
        ignore_case: bool = False,
        before: int = 0,
        after: int = 0,
        limit: int = 200,
        timeout: float = 10.0,
    ) -> Matches:
        """Find lines that match a regular expression of Python's, in one file or in all beneath a directory.

        Binary files (a NUL byte in the first 8 KiB) are passed over; of a file the first 16 MiB are searched, of a line
        the first 4096 characters.

        Parameters
        ----------
        pattern : str
            What a line must hold.
        path : str
            A file or a directory.
        glob : str, optional
            Only files that match it: by name, or by path beneath `path` if it has a slash.
        is_literal : bool
            The pattern is plain text.
        ignore_case : bool
            Whether case matters not.
        before, after : int
            Lines of context.
        limit : int
            Matching lines returned; at most :data:`MAX_ENTRIES`.
        timeout : float
            Seconds after which what was found is returned.
        """
        return search.grep(
            self._tree,
            self._parse(path),
            pattern,
            glob=glob,
            is_literal=is_literal,
            ignore_case=ignore_case,
            before=before,
            after=after,
            limit=_check_limit(limit),
            budget=Budget(1_000_000, timeout),
        )

    # Reading

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Content:
        """Read a part of a file.

        Parameters
        ----------
        path : str
            The file; links that stay inside are followed.
        offset : int
            Where to begin; counted from the end if negative.
        length : int, optional
            Bytes to read; as many as there are, up to :data:`MAX_READ`, by default.
        """
        if length is not None and not 0 <= length <= MAX_READ:
            raise InvalidRequest(f"the length must be 0 to {MAX_READ} bytes", field="length")
        parts = self._parse(path)
        with closing(self._tree.open_file(parts)) as fd, translate_os_errors(write_path(parts)):
            size = os.fstat(fd).st_size
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            data = read_at(fd, start, min(size - start, MAX_READ if length is None else length))
            return Content(write_path(parts), size, start, data, start + len(data) < size)

    def download(
        self, path: str, *, offset: int = 0, length: int | None = None, max_size: int = MAX_DOWNLOAD
    ) -> Download:
        """Open a file, or a part of one, to be read in chunks; links that stay inside are followed."""
        if length is not None and length < 0:
            raise InvalidRequest("the length must not be negative", field="length")
        parts = self._parse(path)
        fd = self._tree.open_file(parts)
        try:
            with translate_os_errors(write_path(parts)):
                status = os.fstat(fd)
            start = max(0, status.st_size + offset) if offset < 0 else min(offset, status.st_size)
            end = status.st_size if length is None else min(status.st_size, start + length)
            if end - start > max_size:
                raise TooLarge(
                    f"{show(write_path(parts))} has {end - start} bytes, more than the {max_size} of one download; "
                    "ask for a part of it",
                    field="path",
                )
            return Download(fd, make_entry(write_path(parts), status), start, end)
        except BaseException:
            os.close(fd)
            raise

    def pack(
        self, path: str = ".", kind: str = "tar", *, max_entries: int = MAX_TREE, max_bytes: int = MAX_DOWNLOAD
    ) -> archives.Packed:
        """Open a directory to be read as an archive; see :class:`~jupyter_agentbox.storage.files.archives.Packed`.

        Parameters
        ----------
        path : str
            The directory; a link that stays inside is followed, those in it are stored (tar) or left out (zip).
        kind : str
            ``tar`` or ``zip``.
        max_entries, max_bytes : int
            Over these it is refused before the first byte.
        """
        if kind not in ("tar", "zip"):
            raise InvalidRequest("an archive's kind must be tar or zip", field="kind")
        parts = self._parse(path)
        with closing(self._tree.open(parts, follow=True)) as fd:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise Conflict(f"{show(write_path(parts))} is no directory", field="path")
            tree = Tree(os.dup(fd), self._tree.hidden)
        try:
            return archives.Packed(tree, kind, Budget(max_entries, 60.0), max_bytes)
        except BaseException:
            tree.close()
            raise

    # Helpers

    @contextmanager
    def _beneath(self, path: str) -> Iterator[tuple[Tree, Parts]]:
        """Open a directory, by links inside if need be, as a tree of its own."""
        parts = self._parse(path)
        with closing(self._tree.open(parts, follow=True)) as fd:
            if not stat.S_ISDIR(mode := os.fstat(fd).st_mode):
                kind = KIND_NAMES[kind_of(mode)]
                raise Conflict(f"{show(write_path(parts))} is {kind}, no directory", field="path")
            tree = Tree(os.dup(fd), self._tree.hidden)
        try:
            yield tree, parts
        finally:
            tree.close()


def _entry(top: Parts, found: Found) -> Entry:
    target = None
    if stat.S_ISLNK(found.status.st_mode):
        try:
            target = write_name(os.readlink(found.name, dir_fd=found.directory))
        except OSError:
            pass
    return make_entry(write_path(top + found.parts), found.status, target)


def _check_limit(limit: int) -> int:
    if not 1 <= limit <= MAX_ENTRIES:
        raise InvalidRequest(f"the limit must be 1 to {MAX_ENTRIES}", field="limit")
    return limit


def read_at(fd: int, start: int, size: int) -> bytes:
    """Read `size` bytes, or up to the end."""
    chunks: list[bytes] = []
    while size > 0:
        data = os.pread(fd, min(size, CHUNK), start)
        if not data:
            break
        chunks.append(data)
        start += len(data)
        size -= len(data)
    return b"".join(chunks)
