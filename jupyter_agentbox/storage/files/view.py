"""List and read files beneath one directory that a sandbox writes to, through the class FolderView."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound, TooLarge
from jupyter_agentbox.models.file_entries import Content, Entry, Listing, Matches, kind_of, make_entry
from jupyter_agentbox.names import Names
from jupyter_agentbox.storage.trees import Found, closing

from . import archives, search
from .atomic import CHUNK
from .paths import Parts, parse_path, show, write_name, write_path
from .transfer import Download
from .tree import KIND_NAMES, Budget, Tree, translate_os_errors

MIB = 1024 * 1024
#: Maximum bytes of one read, and of a file to edit.
MAX_READ = 16 * MIB
#: Maximum number of entries in one answer.
MAX_ENTRIES = 10_000
#: Maximum bytes of one download, and of a tree to copy or archive. Holes of sparse files count where they are sent.
MAX_DOWNLOAD = 64 * 1024 * MIB
#: Maximum number of entries of a tree to copy or archive.
MAX_TREE = 100_000


class FolderView:
    """The files beneath one directory, for listing and reading. The package's docstring describes the rules.

    All methods block; call them in worker threads. Any number of threads may share an object. Paths have the
    form that ``storage.files.paths`` describes; ``.`` or the mount point is the folder itself.

    Every method raises :class:`~jupyter_agentbox.errors.InvalidRequest` for an invalid value,
    :class:`~jupyter_agentbox.errors.NotFound` for a missing entry, :class:`~jupyter_agentbox.errors.Conflict` if an
    existing entry, such as a link, a FIFO or a file, prevents the operation, and
    :class:`~jupyter_agentbox.errors.TooLarge` if a limit is exceeded.

    Parameters
    ----------
    root : Path
        The directory. It is opened now and never looked up again.
    hidden, read_only : tuple of str
        Patterns of names that are treated as nonexistent, and of names that are not changed, at any depth; see
        :class:`~jupyter_agentbox.names.Names`.
    mount : str
        Path by which callers know the folder. Absolute paths begin with it.
    """

    def __init__(
        self, root: Path, hidden: tuple[str, ...] = (), *, read_only: tuple[str, ...] = (), mount: str = "/workspace"
    ) -> None:
        with translate_os_errors(str(root)):
            self._tree = Tree(root, Names(hidden, read_only))
        self.mount = mount

    def close(self) -> None:
        """Release the directory. Operations of other threads on it fail. Idempotent."""
        self._tree.retire()

    def __enter__(self) -> FolderView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parse(self, path: str, field: str = "path") -> Parts:
        return parse_path(path, mount=self.mount, field=field)

    # Listing and searching

    def stat(self, path: str, *, follow: bool = True) -> Entry:
        """Return what `path` is. For a link, return what it leads to, unless `follow` is false."""
        parts = self._parse(path)
        with closing(self._tree.open(parts, follow=follow)) as fd, translate_os_errors(write_path(parts)):
            status = os.fstat(fd)
            target = write_name(os.readlink("", dir_fd=fd)) if stat.S_ISLNK(status.st_mode) else None
            return make_entry(write_path(parts), status, target)

    def exists(self, path: str) -> bool:
        """Return whether an entry exists. A link counts if it leads to something inside."""
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
        """List a directory. Links in it are shown, not followed.

        Parameters
        ----------
        path : str
            The directory.
        recursive : bool
            Whether to list everything beneath as well.
        depth : int, optional
            Maximum number of levels of a recursive list.
        limit : int
            Maximum number of entries to look at, including hidden ones; at most :data:`MAX_ENTRIES`.
        timeout : float
            Seconds after which the entries found so far are returned.
        """
        if depth is not None and depth < 1:
            raise InvalidRequest("the depth must be 1 or more", field="depth")
        budget = Budget(_check_limit(limit), timeout)
        with self._beneath(path) as (tree, parts):
            found = tree.walk(budget, depth=depth if recursive else 1)
            entries = [_entry(parts, each) for each in found]
        return Listing(entries, budget.reason is not None, budget.reason)

    def glob(self, pattern: str, path: str = ".", *, limit: int = 1000, timeout: float = 10.0) -> Listing:
        """Find entries beneath `path` by a pattern such as ``**/*.py``. ``*`` also matches names with a leading dot.

        Parameters
        ----------
        pattern : str
            ``*``, ``?`` and ``[...]`` within one name; ``**`` for any number of directories.
        path : str
            Directory in which to start.
        limit : int
            Maximum number of entries to return; at most :data:`MAX_ENTRIES`.
        timeout : float
            Seconds after which the entries found so far are returned.
        """
        wanted = search.Glob(pattern)
        _check_limit(limit)
        budget = Budget(1_000_000, timeout)
        entries: list[Entry] = []
        with self._beneath(path) as (tree, parts):
            for found in tree.walk(budget, enter=wanted.may_match_beneath):
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
        """Find lines that match a Python regular expression, in one file or in all files beneath a directory.

        Binary files (with a NUL byte in the first 8 KiB) are skipped. The first 16 MiB of each file and the first 4096
        characters of each line are searched.

        Parameters
        ----------
        pattern : str
            The pattern to find in a line.
        path : str
            A file or a directory.
        glob : str, optional
            Restricts the search to files that match: by name, or by path beneath `path` if the pattern contains a
            slash.
        is_literal : bool
            Whether the pattern is plain text.
        ignore_case : bool
            Whether to ignore case.
        before, after : int
            Number of context lines.
        limit : int
            Maximum number of matching lines to return; at most :data:`MAX_ENTRIES`.
        timeout : float
            Seconds after which the matches found so far are returned.
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
            The file. Links that stay inside are followed.
        offset : int
            Position to start at; counted from the end if negative.
        length : int, optional
            Bytes to read; by default all, up to :data:`MAX_READ`.
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
        """Open a file, or a part of one, for reading in chunks. Links that stay inside are followed."""
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
                    f"{show(write_path(parts))} has {end - start} bytes, more than the {max_size} allowed in one "
                    "download; request a part of it",
                    field="path",
                )
            return Download(fd, make_entry(write_path(parts), status), start, end)
        except BaseException:
            os.close(fd)
            raise

    def pack(
        self, path: str = ".", kind: str = "tar", *, max_entries: int = MAX_TREE, max_bytes: int = MAX_DOWNLOAD
    ) -> archives.Packed:
        """Open a directory for reading as an archive; see :class:`~jupyter_agentbox.storage.files.archives.Packed`.

        Parameters
        ----------
        path : str
            The directory. A link that stays inside is followed. Links in it are stored (tar) or left out (zip).
        kind : str
            ``tar`` or ``zip``.
        max_entries, max_bytes : int
            Limits above which it is refused before the first byte.
        """
        if kind not in ("tar", "zip"):
            raise InvalidRequest("an archive's kind must be tar or zip", field="kind")
        parts = self._parse(path)
        opened, real = self._tree.resolve(parts, follow=True)
        with closing(opened) as fd:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise Conflict(f"{show(write_path(parts))} is not a directory", field="path")
            tree = self._tree.beneath(fd, real)
        try:
            return archives.Packed(tree, kind, Budget(max_entries, 60.0), max_bytes)
        except BaseException:
            tree.close()
            raise

    # Helpers

    @contextmanager
    def _beneath(self, path: str) -> Iterator[tuple[Tree, Parts]]:
        """Open a directory as a separate tree, following links that stay inside."""
        parts = self._parse(path)
        opened, real = self._tree.resolve(parts, follow=True)
        with closing(opened) as fd:
            if not stat.S_ISDIR(mode := os.fstat(fd).st_mode):
                kind = KIND_NAMES[kind_of(mode)]
                raise Conflict(f"{show(write_path(parts))} is {kind}, not a directory", field="path")
            tree = self._tree.beneath(fd, real)
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
    """Read `size` bytes, or fewer at the end of the file."""
    chunks: list[bytes] = []
    while size > 0:
        data = os.pread(fd, min(size, CHUNK), start)
        if not data:
            break
        chunks.append(data)
        start += len(data)
        size -= len(data)
    return b"".join(chunks)
