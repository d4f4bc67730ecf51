"""Read and write the files of a sandbox's workspace."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import BinaryIO, Literal, cast

from jupyter_agentbox.client.blocking import AsyncChunks, acall
from jupyter_agentbox.client.errors import ChecksumMismatch
from jupyter_agentbox.client.wire import CHUNK, Transferred, content
from jupyter_agentbox.models import (
    AppendRequest,
    CopyRequest,
    Deleted,
    DeleteRequest,
    DownloadQuery,
    EditRequest,
    Encoding,
    Existence,
    ExportRequest,
    FileContent,
    GlobQuery,
    GrepQuery,
    ImportRequest,
    ListQuery,
    MakeDirectoryRequest,
    MoveRequest,
    PackQuery,
    PathQuery,
    ReadQuery,
    StatQuery,
    UnpackQuery,
    UploadQuery,
    WriteRequest,
)
from jupyter_agentbox.models.file_entries import Copied, Edited, Entry, Listing, Matches

from .connection import AsyncConnection

#: Timeout for operations on many files, in seconds.
_LONG = 300.0


class AsyncFiles:
    """Files of the workspace. Paths are relative to it, or begin with ``/workspace``."""

    def __init__(self, connection: AsyncConnection, sandbox: str) -> None:
        self._connection = connection
        self._path = f"{sandbox}/files"

    # -- whole files and parts -------------------------------------------------------------------

    async def read(
        self, path: str, *, offset: int = 0, length: int | None = None, encoding: Encoding = "utf-8"
    ) -> FileContent:
        """Read a file, or up to 16 MiB of it. A negative offset counts from the end."""
        query = ReadQuery(path=path, offset=offset, length=length, encoding=encoding)
        return await self._connection.call("GET", f"{self._path}/content", FileContent, query=query)

    async def read_text(self, path: str) -> str:
        """Return the text of a file of any size that fits in memory. Bytes that are not UTF-8 become U+FFFD."""
        return (await self.read_bytes(path)).decode("utf-8", "replace")

    async def read_bytes(self, path: str) -> bytes:
        """Return the bytes of a file of any size that fits in memory."""
        data = bytearray()
        async for chunk in self.download_chunks(path):
            data += chunk
        return bytes(data)

    async def write(
        self, path: str, data: str | bytes, *, parents: bool = True, overwrite: bool = True, mode: int | None = None
    ) -> Entry:
        """Write a whole file atomically. For large files use :meth:`upload`."""
        body = WriteRequest(path=path, parents=parents, overwrite=overwrite, mode=mode, **content(data))
        return await self._connection.call("PUT", f"{self._path}/content", Entry, body=body)

    async def append(self, path: str, data: str | bytes, *, parents: bool = True) -> Entry:
        """Append to a file, or create it."""
        body = AppendRequest(path=path, parents=parents, **content(data))
        return await self._connection.call("POST", f"{self._path}/append", Entry, body=body)

    async def edit(self, path: str, old: str, new: str, *, count: int = 1, all: bool = False) -> Edited:
        """Replace a text, which must occur `count` times, or with `all` any number of times."""
        body = EditRequest(path=path, old=old, new=new, count=count, all=all)
        return await self._connection.call("POST", f"{self._path}/edit", Edited, body=body)

    # -- looking ---------------------------------------------------------------------------------

    async def stat(self, path: str, *, follow: bool = True) -> Entry:
        """Return the description of an entry. For a link, describe its target unless `follow` is false."""
        query = StatQuery(path=path, follow=follow)
        return await self._connection.call("GET", f"{self._path}/stat", Entry, query=query)

    async def exists(self, path: str) -> bool:
        """Return whether an entry exists."""
        query = PathQuery(path=path)
        return (await self._connection.call("GET", f"{self._path}/exists", Existence, query=query)).exists

    async def list(
        self, path: str = ".", *, recursive: bool = False, depth: int | None = None, limit: int = 1000
    ) -> Listing:
        """List a directory, or everything beneath it."""
        query = ListQuery(path=path, recursive=recursive, depth=depth, limit=limit)
        return await self._connection.call("GET", self._path, Listing, query=query)

    async def glob(self, pattern: str, path: str = ".", *, limit: int = 1000) -> Listing:
        """Find entries by a pattern such as ``**/*.py``."""
        query = GlobQuery(pattern=pattern, path=path, limit=limit)
        return await self._connection.call("GET", f"{self._path}/glob", Listing, query=query)

    async def grep(
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
    ) -> Matches:
        """Find lines by a regular expression, or with `is_literal` by plain text."""
        query = GrepQuery(
            pattern=pattern,
            path=path,
            glob=glob,
            is_literal=is_literal,
            ignore_case=ignore_case,
            before=before,
            after=after,
            limit=limit,
        )
        return await self._connection.call("GET", f"{self._path}/grep", Matches, query=query)

    # -- changing the tree -----------------------------------------------------------------------

    async def mkdir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> Entry:
        """Create a directory."""
        body = MakeDirectoryRequest(path=path, parents=parents, exist_ok=exist_ok)
        return await self._connection.call("POST", f"{self._path}/mkdir", Entry, body=body)

    async def move(self, source: str, target: str, *, parents: bool = True, overwrite: bool = False) -> Entry:
        """Move an entry to another path."""
        body = MoveRequest(source=source, target=target, parents=parents, overwrite=overwrite)
        return await self._connection.call("POST", f"{self._path}/move", Entry, body=body)

    async def copy(
        self, source: str, target: str, *, recursive: bool = True, parents: bool = True, overwrite: bool = False
    ) -> Copied:
        """Copy a file, or a directory with everything beneath it."""
        body = CopyRequest(source=source, target=target, recursive=recursive, parents=parents, overwrite=overwrite)
        return await self._connection.call("POST", f"{self._path}/copy", Copied, body=body, timeout=_LONG)

    async def delete(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> int:
        """Delete an entry, with `recursive` everything beneath it. Return the number of deleted entries."""
        body = DeleteRequest(path=path, recursive=recursive, missing_ok=missing_ok)
        return (await self._connection.call("POST", f"{self._path}/delete", Deleted, body=body, timeout=_LONG)).deleted

    # -- any size --------------------------------------------------------------------------------

    async def upload(
        self,
        path: str,
        source: bytes | Path | BinaryIO | AsyncChunks,
        *,
        size: int | None = None,
        sha256: str | None = None,
        parents: bool = True,
        overwrite: bool = True,
        mode: int | None = None,
    ) -> Entry:
        """Upload a file of any size. It appears only when it is complete and verified.

        Parameters
        ----------
        path : str
            Path in the workspace.
        source : bytes, Path, binary file or iterable of bytes
            For bytes, paths and files that can be read twice, size and SHA-256 are computed here and verified by the
            server. For a stream they are verified if you give them.
        size, sha256 : optional
            Expected size and SHA-256.
        """
        measured, chunks = await open_source(source, size, sha256)
        query = UploadQuery(
            path=path,
            size=measured.size if measured is not None else size,
            sha256=measured.sha256 if measured is not None else sha256,
            parents=parents,
            overwrite=overwrite,
            mode=mode,
        )
        return await self._connection.call(
            "PUT",
            f"{self._path}/upload",
            Entry,
            query=query,
            content=chunks,
            headers=_length(query.size),
            timeout=_LONG,
        )

    async def unpack(
        self, source: bytes | Path | BinaryIO | AsyncChunks, path: str = ".", *, overwrite: bool = True
    ) -> Copied:
        """Upload an archive (tar, tar.gz or zip) and unpack it into a directory. Verified as by :meth:`upload`."""
        measured, chunks = await open_source(source, None, None)
        query = UnpackQuery(
            path=path,
            size=measured.size if measured is not None else None,
            sha256=measured.sha256 if measured is not None else None,
            overwrite=overwrite,
        )
        copied = await self._connection.call(
            "PUT",
            f"{self._path}/archive",
            Copied,
            query=query,
            content=chunks,
            headers=_length(query.size),
            timeout=_LONG,
        )
        return copied

    def download_chunks(self, path: str, *, offset: int = 0) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file as they arrive, from an offset on."""
        headers = {"Range": f"bytes={offset}-"} if offset else None
        return self._connection.download(f"{self._path}/download", query=DownloadQuery(path=path), headers=headers)

    async def download(self, path: str, target: Path | BinaryIO, *, sha256: str | None = None) -> Transferred:
        """Download a file of any size. If `target` is a path, it appears only when the file is complete and verified.

        The server sends the SHA-256 first, and the received data is compared with it.

        Returns
        -------
        Transferred
            Size and SHA-256 of the file.

        Raises
        ------
        ChecksumMismatch
            The file does not have the given `sha256`, or the data differs from what the server has read.
        """
        query = DownloadQuery(path=path, digest=True)
        return await save(self._connection.download(f"{self._path}/download", query=query), target, sha256)

    def pack_chunks(self, path: str = ".", *, kind: Literal["tar", "zip"] = "tar") -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a directory's archive as they arrive. They come from a sandbox: unpack them with care."""
        return self._connection.download(f"{self._path}/archive", query=PackQuery(path=path, kind=kind))

    async def pack(
        self, target: Path | BinaryIO, path: str = ".", *, kind: Literal["tar", "zip"] = "tar"
    ) -> Transferred:
        """Download a directory as an archive. It comes from a sandbox: unpack it with care."""
        return await save(self.pack_chunks(path, kind=kind), target, None)

    # -- between sandboxes and the server's host -------------------------------------------------

    async def import_(
        self,
        source: str,
        target: str,
        *,
        sandbox: str | None = None,
        folder: str | None = None,
        overwrite: bool = False,
    ) -> Copied:
        """Copy from another sandbox, or from a folder of the server's host that policy names."""
        body = ImportRequest(source=source, target=target, sandbox=sandbox, folder=folder, overwrite=overwrite)
        return await self._connection.call("POST", f"{self._path}/import", Copied, body=body, timeout=_LONG)

    async def export(self, source: str, target: str, *, folder: str, overwrite: bool = False) -> Copied:
        """Copy to a folder of the server's host that policy names."""
        body = ExportRequest(source=source, target=target, folder=folder, overwrite=overwrite)
        return await self._connection.call("POST", f"{self._path}/export", Copied, body=body, timeout=_LONG)


async def open_source(
    source: bytes | Path | BinaryIO | AsyncChunks, size: int | None, sha256: str | None
) -> tuple[Transferred | None, bytes | AsyncChunks]:
    """Return a source's size and SHA-256, if it can be read twice, and its bytes."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
        return Transferred(size if size is not None else len(data), sha256 or hashlib.sha256(data).hexdigest()), data
    if isinstance(source, Path):
        file = await acall(_open, source)
        return Transferred(*await _measure(file, True, size, sha256)), _read_file(file, True)
    if not hasattr(source, "read"):
        return None, source
    given = cast("BinaryIO", source)
    if given.seekable():
        return Transferred(*await _measure(given, False, size, sha256)), _read_file(given, False)
    return None, _read_file(given, False)


async def _measure(file: BinaryIO, is_ours: bool, size: int | None, sha256: str | None) -> tuple[int, str]:
    """Return size and SHA-256 of the rest of a file, unless they are given, and return to the start position."""
    try:
        start = await acall(file.tell)
        digest, found = hashlib.sha256(), 0
        while chunk := await acall(file.read, CHUNK):
            digest.update(chunk)
            found += len(chunk)
        await acall(file.seek, start)
    except BaseException:
        if is_ours:
            file.close()
        raise
    return size if size is not None else found, sha256 or digest.hexdigest()


async def _read_file(file: BinaryIO, is_ours: bool) -> AsyncGenerator[bytes, None]:
    try:
        while chunk := await acall(file.read, CHUNK):
            yield chunk
    finally:
        if is_ours:
            file.close()


def _length(size: int | None) -> dict[str, str] | None:
    return {"Content-Length": str(size)} if size is not None else None


async def save(
    chunks: AsyncGenerator[bytes, None], target: Path | BinaryIO, sha256: str | None, *, mode: int = 0o666
) -> Transferred:
    """Write received data to a file. A target path appears only when the data is complete and verified."""
    fresh = target.with_name(f".{secrets.token_hex(6)}.part") if isinstance(target, Path) else None
    file = await acall(_create, fresh, mode) if fresh is not None else target
    assert not isinstance(file, Path)
    try:
        digest, size = hashlib.sha256(), 0
        async for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            await acall(file.write, chunk)
        if sha256 is not None and digest.hexdigest() != sha256.lower():
            raise ChecksumMismatch(f"the SHA-256 is {digest.hexdigest()} instead of {sha256:.64}", field="sha256")
        if fresh is not None:
            file.close()
            await acall(os.replace, fresh, target)
    except BaseException:
        await chunks.aclose()
        if fresh is not None:
            file.close()
            fresh.unlink(missing_ok=True)
        raise
    return Transferred(size, digest.hexdigest())


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _create(path: Path, mode: int) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
