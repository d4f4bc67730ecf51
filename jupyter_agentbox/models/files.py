"""Bodies and answers about files."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body, Name
from .commands import Encoding

#: What Linux takes; and percent-encoded in a query it must fit the head of a request, 64 KiB with all else.
Path = Annotated[str, Meta(min_length=1, max_length=4096, description="Beneath the workspace, or `/workspace/...`.")]
Mode = Annotated[int, Meta(ge=0, le=0o777, description="Permission bits.")]


class PathQuery(Body, frozen=True):
    """An entry of the workspace."""

    path: Path


class DownloadQuery(Body, frozen=True):
    """A file; with `digest` the answer has the header `Content-Digest` (RFC 9530), with the SHA-256 of what comes."""

    path: Path
    digest: bool = False


class StatQuery(Body, frozen=True):
    """An entry of the workspace; `follow` leads on from a link."""

    path: Path
    follow: bool = True


class ReadQuery(Body, frozen=True):
    """A part of a file; a negative `offset` counts from the end."""

    path: Path
    offset: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    length: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] | None = None
    encoding: Encoding = "utf-8"


class FileContent(Answer, frozen=True):
    """A part of a file. In `utf-8`, other bytes have become U+FFFD, and `is_text` is false."""

    path: str
    size: int
    offset: int
    data: str
    truncated: bool
    encoding: Encoding
    is_text: bool


class Existence(Answer, frozen=True):
    """Whether there is something."""

    exists: bool


class ListQuery(Body, frozen=True):
    """A directory."""

    path: Path = "."
    recursive: bool = False
    depth: Annotated[int, Meta(ge=1, le=100)] | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class GlobQuery(Body, frozen=True):
    """Entries by pattern, such as `**/*.py`."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512)]
    path: Path = "."
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class GrepQuery(Body, frozen=True):
    """Lines by a regular expression of Python's, or by plain text."""

    pattern: Annotated[str, Meta(min_length=1, max_length=512)]
    path: Path = "."
    glob: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    is_literal: bool = False
    ignore_case: bool = False
    before: Annotated[int, Meta(ge=0, le=50)] = 0
    after: Annotated[int, Meta(ge=0, le=50)] = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 200


class WriteRequest(Body, frozen=True):
    """The whole content of a file, as text or as bytes."""

    path: Path
    text: str = ""
    base64: bytes = b""
    parents: bool = True
    overwrite: bool = True
    mode: Mode | None = None


class AppendRequest(Body, frozen=True):
    """What to add to a file."""

    path: Path
    text: str = ""
    base64: bytes = b""
    parents: bool = True


class EditRequest(Body, frozen=True):
    """A text to replace. It must be there once, or `count` times; `all` takes any number."""

    path: Path
    old: Annotated[str, Meta(min_length=1)]
    new: str
    count: Annotated[int, Meta(ge=1)] = 1
    all: bool = False


class MoveRequest(Body, frozen=True):
    """An entry and its new path."""

    source: Path
    target: Path
    parents: bool = True
    overwrite: bool = False


class CopyRequest(Body, frozen=True):
    """An entry and the copy's path."""

    source: Path
    target: Path
    recursive: bool = True
    parents: bool = True
    overwrite: bool = False


class MakeDirectoryRequest(Body, frozen=True):
    """A directory to make."""

    path: Path
    parents: bool = True
    exist_ok: bool = True


class DeleteRequest(Body, frozen=True):
    """An entry to delete."""

    path: Path
    recursive: bool = False
    missing_ok: bool = False


class Deleted(Answer, frozen=True):
    """How many entries were deleted."""

    deleted: int


class UploadQuery(Body, frozen=True):
    """Where an upload goes. A `size` or `sha256` that is given must be that of what comes, or nothing appears."""

    path: Path
    size: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$(?!\n)")] | None = None
    parents: bool = True
    overwrite: bool = True
    mode: Mode | None = None


class UnpackQuery(Body, frozen=True):
    """Where an archive (tar, tar.gz or zip) is unpacked."""

    path: Path = "."
    size: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$(?!\n)")] | None = None
    overwrite: bool = True


class PackQuery(Body, frozen=True):
    """A directory to be answered as an archive."""

    path: Path = "."
    kind: Literal["tar", "zip"] = "tar"


class ImportRequest(Body, frozen=True):
    """Files from another sandbox of the caller's, or from a host folder that policy names.

    Parameters
    ----------
    sandbox : str, optional
        Where they are.
    folder : str, optional
        Name of one of `Policy.import_folders`.
    source, target : str
        Path there, path here.
    """

    source: Path
    target: Path
    sandbox: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    folder: Name | None = None
    overwrite: bool = False


class ExportRequest(Body, frozen=True):
    """Files for a host folder that policy names in `Policy.export_folders`."""

    source: Path
    target: Path
    folder: Name
    overwrite: bool = False
