"""Define the request and response bodies for files."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body, Name
from .commands import Encoding

#: Linux's own limit. Percent-encoded in a query, the path must also fit in the 64 KiB of a request's head.
Path = Annotated[str, Meta(min_length=1, max_length=4096, description="Path in the workspace, relative or absolute.")]
Mode = Annotated[int, Meta(ge=0, le=0o777, description="Permission bits.")]


class PathQuery(Body, frozen=True):
    """An entry of the workspace."""

    path: Path


class DownloadQuery(Body, frozen=True):
    """A file to download. With `digest`, the `Content-Digest` header (RFC 9530) has the SHA-256 of the data."""

    path: Path
    digest: bool = False


class StatQuery(Body, frozen=True):
    """An entry of the workspace; unless `follow` is false, the target of a link."""

    path: Path
    follow: bool = True


class ReadQuery(Body, frozen=True):
    """Which part of a file to read; a negative `offset` counts from the end."""

    path: Path
    offset: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    length: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] | None = None
    encoding: Encoding = "utf-8"


class FileContent(Answer, frozen=True):
    """A part of a file. With `utf-8`, invalid bytes are replaced by U+FFFD, and `is_text` is false."""

    path: str
    size: int
    offset: int
    data: str
    truncated: bool
    encoding: Encoding
    is_text: bool


class Existence(Answer, frozen=True):
    """Whether the entry exists."""

    exists: bool


class ListQuery(Body, frozen=True):
    """A directory."""

    path: Path = "."
    recursive: bool = False
    depth: Annotated[int, Meta(ge=1, le=100)] | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class GlobQuery(Body, frozen=True):
    """Which entries to find, by a pattern such as `**/*.py`."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512)]
    path: Path = "."
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class GrepQuery(Body, frozen=True):
    """Which lines to find, by a Python regular expression or by plain text."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512)]
    path: Path = "."
    glob: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    is_literal: bool = False
    ignore_case: bool = False
    before: Annotated[int, Meta(ge=0, le=50)] = 0
    after: Annotated[int, Meta(ge=0, le=50)] = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 200


class WriteRequest(Body, frozen=True):
    """A file to write, with its whole content as text or bytes.

    Parameters
    ----------
    mode : int, optional
        Permission bits of the file.
    """

    path: Path
    text: str = ""
    base64: bytes = b""
    parents: bool = True
    overwrite: bool = True
    mode: Mode | None = None


class AppendRequest(Body, frozen=True):
    """Content to append to a file."""

    path: Path
    text: str = ""
    base64: bytes = b""
    parents: bool = True


class EditRequest(Body, frozen=True):
    """A text to replace in a file. It must occur exactly `count` times, or any number of times with `all`.

    Newlines match any line ends of the file, which are kept.
    """

    path: Path
    old: Annotated[str, Meta(min_length=1)]
    new: str
    count: Annotated[int, Meta(ge=1)] = 1
    all: bool = False


class MoveRequest(Body, frozen=True):
    """An entry to move, and its new path."""

    source: Path
    target: Path
    parents: bool = True
    overwrite: bool = False


class CopyRequest(Body, frozen=True):
    """An entry to copy, and the path of the copy."""

    source: Path
    target: Path
    recursive: bool = True
    parents: bool = True
    overwrite: bool = False


class MakeDirectoryRequest(Body, frozen=True):
    """A directory to create."""

    path: Path
    parents: bool = True
    exist_ok: bool = True


class DeleteRequest(Body, frozen=True):
    """An entry to delete."""

    path: Path
    recursive: bool = False
    missing_ok: bool = False


class Deleted(Answer, frozen=True):
    """The number of deleted entries."""

    deleted: int


class UploadQuery(Body, frozen=True):
    """Where to write an upload. If `size` or `sha256` is given and the data differs, no file is created."""

    path: Path
    size: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$(?!\n)")] | None = None
    parents: bool = True
    overwrite: bool = True
    mode: Mode | None = None


class UnpackQuery(Body, frozen=True):
    """Where to unpack an archive (tar, tar.gz or zip)."""

    path: Path = "."
    size: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$(?!\n)")] | None = None
    overwrite: bool = True


class PackQuery(Body, frozen=True):
    """A directory to download as an archive."""

    path: Path = "."
    kind: Annotated[Literal["tar", "zip"], Meta(description="Format of the archive.")] = "tar"


class ImportRequest(Body, frozen=True):
    """Files to copy from another sandbox of the caller, or from a host folder that policy allows.

    Parameters
    ----------
    sandbox : str, optional
        Id of the sandbox to copy from.
    folder : str, optional
        Name of one of `Policy.import_folders`.
    source, target : str
        Path to copy from, and path to copy to.
    """

    source: Path
    target: Path
    sandbox: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    folder: Name | None = None
    overwrite: bool = False


class ExportRequest(Body, frozen=True):
    """Files to copy to a host folder in `Policy.export_folders`."""

    source: Path
    target: Path
    folder: Name
    overwrite: bool = False
