"""Define the request and response bodies for snapshots."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .base import Answer, Body, Name

#: A snapshot's name and note.
Title = Annotated[str, Meta(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$(?!\n)")]
Note = Annotated[str, Meta(max_length=1000)]
SnapshotId = Annotated[str, Meta(pattern=r"^[0-9a-f]{20}$(?!\n)")]


class SnapshotRequest(Body, frozen=True):
    """A snapshot to take.

    Parameters
    ----------
    name : str
        Short name for people.
    note : str
        Description for people.
    """

    name: Title = ""
    note: Note = ""


class RestoreRequest(Body, frozen=True):
    """A snapshot to restore.

    Parameters
    ----------
    snapshot : str
        Id of a snapshot of this sandbox.
    """

    snapshot: SnapshotId


class ForkRequest(Body, frozen=True):
    """A sandbox to fork.

    Parameters
    ----------
    id : str, optional
        Id for the new sandbox. The id of a kernel cannot be chosen.
    snapshot : str, optional
        Snapshot to start from; by default, the current state of the sandbox.
    keep_seeds : bool
        Keep the state of the kernels' random generators. By default, they are reseeded.
    as_kernel : bool
        For a notebook's kernel: create a new Jupyter kernel, with which a notebook can be opened. By default, the fork
        is a sandbox whose context ``default`` is the kernel.
    """

    id: Name | None = None
    snapshot: SnapshotId | None = None
    keep_seeds: bool = False
    as_kernel: bool = False


class SnapshotInfo(Answer, frozen=True):
    """A saved state of a sandbox. Times are seconds since the epoch, sizes are in bytes.

    Parameters
    ----------
    sandbox : str
        Id of the sandbox, as its owner knows it.
    parent : str, optional
        The previous snapshot, on which this state is based.
    size : int
        Size of the restored state: memory, writable layer and private workspace.
    cost : int
        Disk space that only this snapshot uses. Pages shared with its parent are not counted.
    is_folder_kept : bool
        Whether it includes the files of the workspace. A mounted folder of the user is not included.
    """

    id: str
    sandbox: str
    owner: str
    name: str
    note: str
    parent: str | None
    created: float
    size: int
    cost: int
    is_folder_kept: bool


class SnapshotList(Answer, frozen=True):
    """Snapshots, oldest first."""

    snapshots: list[SnapshotInfo]
