"""Operations on the files of a sandbox's workspace."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, NotFound
from jupyter_agentbox.models import (
    AppendRequest,
    CopyRequest,
    Deleted,
    DeleteRequest,
    DownloadQuery,
    EditRequest,
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
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.spec import MIB
from jupyter_agentbox.storage.files import Folder, FolderView
from jupyter_agentbox.storage.files.paths import parse_path
from jupyter_agentbox.storage.files.transfer import Upload

from .call import Bytes, Call, blocking
from .routes import route

FILES = "/sandboxes/{id}/files"
T = TypeVar("T")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


async def _on_folder(call: Call, work: Callable[[Folder], T], *, moved: str | None = None) -> T:
    async with call.use() as managed:
        try:
            return await blocking(lambda: work(managed.folder()))
        finally:
            _close_replaced(call, managed, moved)


def _close_replaced(call: Call, managed: ManagedSandbox, moved: str | None = None) -> None:
    """Close the sandbox's handles of files that were deleted or replaced."""
    if call.route.action == "write" and managed.sandbox is not None:
        managed.sandbox.note_change(*([moved] if moved is not None else []))


@route("GET", FILES + "/content", "read", query=ReadQuery, answer=FileContent, tool="read", errors=(409, 413))
async def read_file(call: Call) -> FileContent:
    """Read a file or a part of it, up to 16 MiB."""
    query: ReadQuery = call.query
    content = await _on_folder(call, lambda folder: folder.read(query.path, offset=query.offset, length=query.length))
    is_text = True
    if query.encoding == "base64":
        data = base64.b64encode(content.data).decode()
    else:
        data = content.data.decode("utf-8", "replace")
        is_text = "\0" not in data and "\N{REPLACEMENT CHARACTER}" not in data
    return FileContent(content.path, content.size, content.offset, data, content.truncated, query.encoding, is_text)


@route(
    "PUT", FILES + "/content", "write", body=WriteRequest, answer=Entry, tool="write", errors=(409,), max_body=32 * MIB
)
async def write_file(call: Call) -> Entry:
    """Write a whole file atomically.

    To write a file of any size, use `upload_file`.
    """
    body: WriteRequest = call.body
    data = _bytes(body)
    return await _on_folder(
        call,
        lambda folder: folder.write(body.path, data, parents=body.parents, overwrite=body.overwrite, mode=body.mode),
    )


@route(
    "POST", FILES + "/append", "write", body=AppendRequest, answer=Entry, tool="write", errors=(409,), max_body=32 * MIB
)
async def append_file(call: Call) -> Entry:
    """Append to a file, or create it."""
    body: AppendRequest = call.body
    data = _bytes(body)
    return await _on_folder(call, lambda folder: folder.append(body.path, data, parents=body.parents))


@route("POST", FILES + "/edit", "write", body=EditRequest, answer=Edited, tool="edit", errors=(409,), max_body=32 * MIB)
async def edit_file(call: Call) -> Edited:
    """Replace a text in a file. It must occur exactly `count` times (default 1), unless `all` is set."""
    body: EditRequest = call.body
    count = None if body.all else body.count
    return await _on_folder(call, lambda folder: folder.edit(body.path, body.old, body.new, count=count))


@route("GET", FILES + "/stat", "read", query=StatQuery, answer=Entry, tool="read", errors=(409,))
async def stat_file(call: Call) -> Entry:
    """Get the metadata of a file, directory or link."""
    query: StatQuery = call.query
    return await _on_folder(call, lambda folder: folder.stat(query.path, follow=query.follow))


@route("GET", FILES + "/exists", "read", query=PathQuery, answer=Existence, tool="read")
async def file_exists(call: Call) -> Existence:
    """Check whether an entry exists."""
    return Existence(await _on_folder(call, lambda folder: folder.exists(call.query.path)))


@route("GET", FILES, "read", query=ListQuery, answer=Listing, tool="list", errors=(409,))
async def list_files(call: Call) -> Listing:
    """List a directory, or everything beneath it."""
    query: ListQuery = call.query
    return await _on_folder(
        call,
        lambda folder: folder.list(query.path, recursive=query.recursive, depth=query.depth, limit=query.limit),
    )


@route("GET", FILES + "/glob", "read", query=GlobQuery, answer=Listing, tool="glob", errors=(409,))
async def glob_files(call: Call) -> Listing:
    """Find entries by a path pattern."""
    query: GlobQuery = call.query
    return await _on_folder(call, lambda folder: folder.glob(query.pattern, query.path, limit=query.limit))


@route("GET", FILES + "/grep", "read", query=GrepQuery, answer=Matches, tool="grep", errors=(409,))
async def grep_files(call: Call) -> Matches:
    """Search for lines that match a pattern, in one file or in all files beneath a directory."""
    query: GrepQuery = call.query
    return await _on_folder(
        call,
        lambda folder: folder.grep(
            query.pattern,
            query.path,
            glob=query.glob,
            is_literal=query.is_literal,
            ignore_case=query.ignore_case,
            before=query.before,
            after=query.after,
            limit=query.limit,
        ),
    )


@route("POST", FILES + "/mkdir", "write", body=MakeDirectoryRequest, answer=Entry, tool="write", errors=(409,))
async def make_directory(call: Call) -> Entry:
    """Create a directory."""
    body: MakeDirectoryRequest = call.body
    return await _on_folder(call, lambda folder: folder.mkdir(body.path, parents=body.parents, exist_ok=body.exist_ok))


@route("POST", FILES + "/move", "write", body=MoveRequest, answer=Entry, tool="write", errors=(409,))
async def move_file(call: Call) -> Entry:
    """Move an entry to another path."""
    body: MoveRequest = call.body
    return await _on_folder(
        call,
        lambda folder: folder.move(body.source, body.target, parents=body.parents, overwrite=body.overwrite),
        moved="/".join(parse_path(body.source, field="source")),
    )


@route("POST", FILES + "/copy", "write", body=CopyRequest, answer=Copied, tool="write", errors=(409,))
async def copy_file(call: Call) -> Copied:
    """Copy a file, or a directory with everything beneath it."""
    body: CopyRequest = call.body
    return await _on_folder(
        call,
        lambda folder: folder.copy(
            body.source, body.target, recursive=body.recursive, parents=body.parents, overwrite=body.overwrite
        ),
    )


@route("POST", FILES + "/delete", "write", body=DeleteRequest, answer=Deleted, tool="write", errors=(409,))
async def delete_file(call: Call) -> Deleted:
    """Delete an entry, and with `recursive` everything beneath it."""
    body: DeleteRequest = call.body
    return Deleted(
        await _on_folder(
            call, lambda folder: folder.delete(body.path, recursive=body.recursive, missing_ok=body.missing_ok)
        )
    )


# -- any size ------------------------------------------------------------------------------------------


@route(
    "GET", FILES + "/download", "read", query=DownloadQuery, kind="download", tool="read", errors=(206, 409, 413, 416)
)
async def download_file(call: Call) -> Bytes:
    """Download a file of any size, or a part of it with a `Range` header.

    With `digest`, the file is read once before it is sent, and the header `Content-Digest` has its SHA-256.
    """
    async with call.use() as managed:
        return await blocking(_open_download, managed.folder, call.query, call.headers.get("Range"))


def _open_download(folder: Callable[[], Folder], query: DownloadQuery, range_header: str | None) -> Bytes:
    view, path = folder(), query.path
    offset, length = 0, None
    size = view.stat(path).size
    match = _RANGE.fullmatch(range_header.strip()) if range_header else None
    if match is not None and (match[1] or match[2]):
        first = int(match[1]) if match[1] else max(0, size - int(match[2]))
        last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
        if first >= size or last < first:
            match = None  # unsatisfiable: the whole file is sent, as HTTP allows
        else:
            offset, length = first, last - first + 1
    else:
        match = None
    download = view.download(path, offset=offset, length=length)
    headers = {"Accept-Ranges": "bytes"}
    if match is not None:
        headers["Content-Range"] = f"bytes {offset}-{offset + download.size - 1}/{size}"
    if query.digest:
        try:
            found = bytes.fromhex(download.sha256())
        except AgentboxError:
            download.close()
            raise
        headers["Content-Digest"] = f"sha-256=:{base64.b64encode(found).decode()}:"
    name = download.entry.path.rpartition("/")[2]
    return Bytes(iter(download), name, download.size, headers, 206 if match is not None else 200, close=download.close)


@route("PUT", FILES + "/upload", "write", query=UploadQuery, answer=Entry, kind="upload", tool="write", errors=(409,))
async def upload_file(call: Call) -> Entry:
    """Upload a file of any size: the body is its bytes.

    The file appears only when the upload is complete and matches `size` and `sha256`.
    """
    query: UploadQuery = call.query
    async with call.use() as managed:
        upload = await blocking(
            lambda: managed.folder().upload(
                query.path,
                query.size if query.size is not None else _content_length(call),
                query.sha256,
                parents=query.parents,
                overwrite=query.overwrite,
                mode=query.mode,
            )
        )
        return await _receive(call, managed, upload)


@route("PUT", FILES + "/archive", "write", query=UnpackQuery, answer=Copied, kind="upload", tool="write", errors=(409,))
async def upload_archive(call: Call) -> Copied:
    """Upload an archive (tar, tar.gz or zip), and unpack it into a directory."""
    query: UnpackQuery = call.query
    async with call.use() as managed:
        upload = await blocking(
            lambda: managed.folder().unpack(query.path, query.size, query.sha256, overwrite=query.overwrite)
        )
        return await _receive(call, managed, upload)


async def _receive(call: Call, managed: ManagedSandbox, upload: Upload[T]) -> T:
    try:
        async for parts in call.chunks.parts():
            await blocking(upload.write, *parts)
        return await blocking(upload.finish)
    finally:
        await blocking(upload.abort)
        _close_replaced(call, managed)


def _content_length(call: Call) -> int | None:
    text = call.headers.get("Content-Length", "")
    return int(text) if text.isdigit() else None


@route("GET", FILES + "/archive", "read", query=PackQuery, kind="download", tool="read", errors=(409, 413))
async def download_archive(call: Call) -> Bytes:
    """Download a directory as a tar or zip archive."""
    query: PackQuery = call.query
    async with call.use() as managed:
        packed = await blocking(lambda: managed.folder().pack(query.path, query.kind))
        name = query.path.rstrip("/").rpartition("/")[2].strip(".") or "workspace"
        return Bytes(iter(packed), f"{name}.{query.kind}", close=packed.close)


# -- between sandboxes and the host -------------------------------------------------------------------


@route("POST", FILES + "/import", "write", body=ImportRequest, answer=Copied, tool="write", errors=(409,))
async def import_files(call: Call) -> Copied:
    """Copy files from another sandbox, or from a host folder that policy allows."""
    body: ImportRequest = call.body
    if (body.sandbox is None) == (body.folder is None):
        raise InvalidRequest("give either sandbox or folder, not both or neither", field="sandbox")

    def copy(target: Folder, source: FolderView) -> Copied:
        return target.copy(
            body.source, body.target, view=source, recursive=True, parents=True, overwrite=body.overwrite
        )

    async with call.use() as managed:
        if body.sandbox is not None:
            async with call.sandboxes.registry.use(body.sandbox, "read", caller=call.caller) as other:
                try:
                    return await blocking(lambda: copy(managed.folder(), other.folder()))
                finally:
                    _close_replaced(call, managed)
        root = _host_folder(call.sandboxes.policy.import_folders, body.folder, "Policy.import_folders")

        def import_() -> Copied:
            with FolderView(root, mount="/") as view:
                return copy(managed.folder(), view)

        try:
            return await blocking(import_)
        finally:
            _close_replaced(call, managed)


@route("POST", FILES + "/export", "write", body=ExportRequest, answer=Copied, tool="read", errors=(409,))
async def export_files(call: Call) -> Copied:
    """Copy files to a host folder that policy allows."""
    body: ExportRequest = call.body
    root = _host_folder(call.sandboxes.policy.export_folders, body.folder, "Policy.export_folders")
    async with call.use() as managed:

        def export() -> Copied:
            with Folder(root, mount="/") as target:
                assert isinstance(target, Folder)
                return target.copy(
                    body.source,
                    body.target,
                    view=managed.folder(),
                    recursive=True,
                    parents=True,
                    overwrite=body.overwrite,
                )

        return await blocking(export)


def _host_folder(folders: dict[str, str], name: str | None, setting: str) -> Path:
    if name not in folders:
        known = ", ".join(folders) or "none"
        raise NotFound(f"{name!r} is not one of the allowed host folders ({known})", field="folder", setting=setting)
    return Path(folders[name]).expanduser()


def _bytes(body: WriteRequest | AppendRequest) -> bytes:
    if body.text and body.base64:
        raise InvalidRequest("give either text or base64, not both", field="base64")
    return body.base64 or body.text.encode()
