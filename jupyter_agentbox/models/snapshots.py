"""Bodies and answers about snapshots."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .base import Answer, Body, Name

#: What a person calls a snapshot, and says about it.
Title = Annotated[str, Meta(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$(?!\n)")]
Note = Annotated[str, Meta(max_length=1000)]
SnapshotId = Annotated[str, Meta(pattern=r"^[0-9a-f]{20}$(?!\n)")]


class SnapshotRequest(Body, frozen=True):
    """What to call a snapshot.

    Parameters
    ----------
    name, note : str
        For people.
    """

    name: Title = ""
    note: Note = ""


class RestoreRequest(Body, frozen=True):
    """Where to go back to.

    Parameters
    ----------
    snapshot : str
        Id of a snapshot of the same sandbox.
    """

    snapshot: SnapshotId


class ForkRequest(Body, frozen=True):
    """What the new sandbox is to be like.

    Parameters
    ----------
    id : str, optional
        An id of the caller's own for it. Jupyter chooses those of kernels.
    snapshot : str, optional
        Where it begins; as the sandbox is now unless given.
    keep_seeds : bool
        Let random generators of a kernel go on from where they were. Unless set they are seeded anew.
    as_kernel : bool
        Of a notebook's kernel: make a Jupyter kernel of it, which a notebook can be opened with. Otherwise it is a
        sandbox whose context ``default`` is the kernel.
    """

    id: Name | None = None
    snapshot: SnapshotId | None = None
    keep_seeds: bool = False
    as_kernel: bool = False


class SnapshotInfo(Answer, frozen=True):
    """A saved state of a sandbox. Times are seconds since the epoch, sizes bytes.

    Parameters
    ----------
    sandbox : str
        Id of the sandbox that it is of, as its owner calls it.
    parent : str, optional
        The snapshot that this state came from.
    size : int
        Of what is restored: memory, writable layer and private workspace.
    cost : int
        What it alone takes on the disk; pages that its parent has are shared.
    is_folder_kept : bool
        Whether the files of the workspace are part of it. A folder of the user's that is shown is not.
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
