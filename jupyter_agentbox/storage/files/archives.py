"""Pack directories as tar and zip streams from a hostile tree, and unpack archives into one.

Packing lists the tree first, so that a tree that is too large is refused before the first byte. Each file has the size
in the archive that it had at that moment. Tar keeps the bytes of names, and links as links. Zip supports only UTF-8, so
names are in written form (``\\xNN``), and links are left out.

Unpacking reads the whole archive once before anything is created. The sizes that it states are not trusted, but serve
as limits. No single read exceeds :data:`MAX_READ`, because a header may claim to be gigabytes long.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, TooLarge
from jupyter_agentbox.models.file_entries import Copied, kind_of
from jupyter_agentbox.storage.trees import closing

from .atomic import CHUNK
from .builder import Builder, Item, Skipped, make_plan
from .paths import MAX_PATH, Parts, parse_path, show, write_name, write_path
from .tree import KIND_NAMES, Budget, Tree

MAX_READ = 16 * 1024 * 1024
_ZIP_TIMES = 315532800, 4354819198  # 1980 to 2107
_INVALID_ARCHIVE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    RecursionError,
    RuntimeError,
    NotImplementedError,
    struct.error,
)


class Packed:
    """A directory that is being packed as an archive: an iterator of chunks that must be closed.

    Parameters
    ----------
    tree : Tree
        The directory. It is closed together with this object.
    kind : str
        ``tar`` or ``zip``.
    budget : Budget
        Limits on entries, and on the time for listing them.
    max_bytes : int
        Limit on the files' bytes, including holes.

    Attributes
    ----------
    entries : int
        Number of entries in the archive.
    bytes : int
        Bytes of its files.
    skipped : Skipped
        Entries that were left out; complete after the iteration.
    """

    def __init__(self, tree: Tree, kind: str, budget: Budget, max_bytes: int) -> None:
        self._tree, self.kind, self.skipped = tree, kind, Skipped()
        self._plan: list[Item] = []
        self.bytes = 0
        for item in make_plan(tree, budget):
            what = kind_of(item.status.st_mode)
            if what in ("fifo", "socket", "device"):
                self.skipped.add(write_path(item.parts), f"it is {KIND_NAMES[what]}")
            elif what == "link" and kind == "zip":
                self.skipped.add(write_path(item.parts), "it is a link, which not all zip programs support; use tar")
            else:
                self._plan.append(item)
                self.bytes += item.status.st_size if what == "file" else 0
                if self.bytes > max_bytes:
                    raise TooLarge(f"the directory's files are larger than the {max_bytes} bytes allowed in an archive")
        self.entries = len(self._plan)

    def __iter__(self) -> Iterator[bytes]:
        return self._tar() if self.kind == "tar" else self._zip()

    def _tar(self) -> Iterator[bytes]:
        for item in self._plan:
            info = tarfile.TarInfo("/".join(item.parts))
            info.mode, info.mtime = stat.S_IMODE(item.status.st_mode) & 0o777, int(item.status.st_mtime)
            if stat.S_ISDIR(item.status.st_mode):
                info.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(item.status.st_mode):
                info.type, info.linkname = tarfile.SYMTYPE, item.target
            else:
                fd = self._open(item)
                if fd is None:
                    continue
                with closing(fd):
                    info.size = item.status.st_size
                    yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
                    yield from self._data(fd, item)
                    yield bytes(-info.size % tarfile.BLOCKSIZE)
                continue
            yield info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        yield bytes(2 * tarfile.BLOCKSIZE)

    def _zip(self) -> Iterator[bytes]:
        sink = _Sink()
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for item in self._plan:
                date = time.gmtime(min(max(_ZIP_TIMES[0], item.status.st_mtime), _ZIP_TIMES[1]))
                is_directory = stat.S_ISDIR(item.status.st_mode)
                info = zipfile.ZipInfo(write_name("/".join(item.parts)) + "/" * is_directory, date[:6])
                info.compress_type = zipfile.ZIP_DEFLATED
                info.external_attr = (item.status.st_mode & 0o170777) << 16
                if is_directory:
                    info.compress_type = zipfile.ZIP_STORED
                    archive.writestr(info, b"")
                    yield sink.take()
                    continue
                fd = self._open(item)
                if fd is None:
                    continue
                with closing(fd):
                    info.file_size = item.status.st_size
                    with archive.open(info, "w", force_zip64=info.file_size >= 1 << 31) as member:
                        for data in self._data(fd, item):
                            member.write(data)
                            yield sink.take()
                yield sink.take()
        yield sink.take()

    def _open(self, item: Item) -> int | None:
        try:
            return self._tree.open_file(item.parts, follow=False)
        except AgentboxError as error:
            self.skipped.add(write_path(item.parts), str(error))
            return None

    def _data(self, fd: int, item: Item) -> Iterator[bytes]:
        """Yield exactly as many bytes as were announced: no more if the file grew, padded with zeros if it shrank."""
        position, end = 0, item.status.st_size
        while position < end:
            try:
                data = os.pread(fd, min(CHUNK, end - position), position)
            except OSError:
                data = b""
            if not data:
                self.skipped.add(
                    write_path(item.parts), f"the part after {position} bytes, because the file was shortened"
                )
                while position < end:
                    data = bytes(min(CHUNK, end - position))
                    position += len(data)
                    yield data
                return
            position += len(data)
            yield data

    def close(self) -> None:
        """Release the directory. An iteration in another thread leaves out the remaining files. Idempotent."""
        self._tree.retire()

    def __enter__(self) -> Packed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Sink(io.RawIOBase):
    """Write-only, unseekable file for zipfile, emptied between chunks."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._chunks.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._chunks)
        self._chunks.clear()
        return data


class _Bounded(io.RawIOBase):
    """A file that refuses reads so large that only a forged header can request them."""

    def __init__(self, file: io.BufferedIOBase, budget: Budget) -> None:
        self._file, self._budget = file, budget

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        self._budget.require()
        data = self._file.read(size) if 0 <= size <= MAX_READ else self._file.read(MAX_READ + 1) if size < 0 else None
        if data is None or len(data) > MAX_READ:
            raise TooLarge(f"the archive has a header of more than {MAX_READ} bytes", field="archive")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        # Seeking forward in compressed data means unpacking everything in between, so it is done in steps.
        if whence == 0:
            while offset - (at := self._file.tell()) > MAX_READ and isinstance(self._file, gzip.GzipFile):
                self._budget.require()
                self._file.seek(at + MAX_READ)
                if self._file.tell() == at:
                    break
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class _Member(NamedTuple):
    """A validated member of an archive. `open` returns a stream of the file's bytes."""

    parts: Parts
    kind: str  # a kind of Entry, or "hard link"
    mode: int
    size: int
    target: str
    open: Callable[[], object]


def unpack(archive: io.BufferedIOBase, builder: Builder, budget: Budget, max_bytes: int, digest: str) -> Copied:
    """Unpack a tar, tar.gz or zip file beneath the builder's directory.

    Raises
    ------
    InvalidRequest
        It is not an archive, or contains absolute names or ``..``. Nothing was created.
    TooLarge
        It exceeds the limits. Nothing was created, unless the archive stated false sizes.
    """
    try:
        # The first pass validates everything, the second one creates the entries.
        _validate(archive, builder, budget, max_bytes)
        _build(archive, builder, budget)
    except AgentboxError:
        raise
    except _INVALID_ARCHIVE as error:
        raise InvalidRequest(
            f"this is not a valid archive (tar, tar.gz or zip): {show(str(error))}", field="archive"
        ) from None
    return builder.result(digest)


def _validate(archive: io.BufferedIOBase, builder: Builder, budget: Budget, max_bytes: int) -> None:
    total = 0
    for member in _members(archive, budget):
        budget.require(1)
        if member.kind == "hard link":
            _parse(member.target)
        total += member.size
        if total > max_bytes:
            raise TooLarge(f"the archive unpacks to more than {max_bytes} bytes", field="archive")
        builder.room.check(total, builder.path(member.parts))


def _build(archive: io.BufferedIOBase, builder: Builder, budget: Budget) -> None:
    created: set[Parts] = set()
    for member in _members(archive, budget):
        budget.require()
        parts, path = member.parts, builder.path(member.parts)
        if not parts:
            continue  # the directory itself
        if refusal := builder.tree.find_refusal(parts, is_folder=member.kind == "directory"):
            builder.skipped.add(path, refusal[0])
        elif member.kind == "directory":
            builder.directory(parts, member.mode)
        elif member.kind == "link":
            builder.link(parts, member.target)
            created.discard(parts)  # what stays inside from this directory may lead outside from another one
        elif member.kind == "file":
            _unpack_file(member, builder, budget)
            created.add(parts)
        elif member.kind == "hard link" and (source := _parse(member.target)) in created:
            builder.hard_link(parts, source)
            created.add(parts)
        else:
            builder.skipped.add(path, f"it is a {member.kind}")


def _unpack_file(member: _Member, builder: Builder, budget: Budget) -> None:
    file = builder.new_file(member.parts)
    try:
        stream = member.open()
        assert isinstance(stream, (io.BufferedIOBase, io.RawIOBase))
        with stream:
            left = member.size
            while left:
                budget.require()
                data = stream.read(min(CHUNK, left))
                if not data:
                    raise EOFError(f"{show(builder.path(member.parts))} is truncated")
                file.write(data)
                left -= len(data)
            stream.read(1)  # at the end, zipfile verifies the member's checksum
        builder.commit(file, member.mode)
    finally:
        file.discard()


def _members(archive: io.BufferedIOBase, budget: Budget) -> Iterator[_Member]:
    archive.seek(0)
    head = archive.read(4)
    archive.seek(0)
    if head[:2] == b"PK":
        with zipfile.ZipFile(_Bounded(archive, budget)) as bundle:
            for info in bundle.infolist():
                yield _zip_member(bundle, info)
        return
    source: io.BufferedIOBase = gzip.GzipFile(fileobj=archive) if head[:2] == b"\x1f\x8b" else archive
    bounded = _Bounded(source, budget)
    with tarfile.open(fileobj=bounded, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
        while (each := tar.next()) is not None:
            yield _tar_member(tar, each)
        # tarfile treats a damaged header like the end of the archive. The actual end is a block of zeros.
        bounded.seek(tar.offset)
        if bounded.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise EOFError("it is truncated or damaged")


def _tar_member(tar: tarfile.TarFile, info: tarfile.TarInfo) -> _Member:
    if info.isreg():
        kind = "file"
    elif info.isdir():
        kind = "directory"
    elif info.issym():
        kind = "link"
    elif info.islnk():
        kind = "hard link"
    else:
        kind = "fifo" if info.isfifo() else "device"
    if info.size < 0:
        raise ValueError("a member has a negative size")
    size = info.size if kind == "file" else 0
    return _Member(_parse(info.name), kind, info.mode, size, info.linkname, lambda: tar.extractfile(info))


def _zip_member(bundle: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Member:
    mode, target = info.external_attr >> 16, ""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"compression method {info.compress_type} is not supported; use deflate")
    kind = "directory" if info.is_dir() else kind_of(mode) if stat.S_IFMT(mode) else "file"
    if kind == "link":
        if info.file_size > MAX_PATH:
            raise ValueError("a link's target is too long")
        with bundle.open(info) as stream:
            target = os.fsdecode(stream.read(MAX_PATH))
    size = info.file_size if kind == "file" else 0
    permissions = mode & 0o777 or (0o777 if kind == "directory" else 0o666) & ~0o022
    return _Member(_parse(info.filename), kind, permissions, size, target, lambda: bundle.open(info))


def _parse(name: str) -> Parts:
    """Validate a member's name. It is raw, so nothing in it is treated as an escape."""
    if name.startswith("/"):
        raise InvalidRequest(f"the archive contains the absolute name {show(name)}", field="archive")
    return parse_path(write_name(name), field="archive")
