"""Snapshots: a sandbox's memory and workspace, kept on disk.

    stage() -> the runtime writes image/, the workspace is copied to work/ -> commit() -> checkout() -> restore

:mod:`.store` is what others use; :mod:`.owner` is one owner's part of it, :mod:`.pages` how little of a snapshot is
new, :mod:`.tree` how hostile files are read, :mod:`.keys` what keeps all of it from being changed or read, and
:mod:`.transfer` how one leaves for another machine.
"""

from .store import SnapshotStore
from .tree import copy_tree
from .values import Kind, Snapshot, SnapshotMeta

__all__ = ["Kind", "Snapshot", "SnapshotMeta", "SnapshotStore", "copy_tree"]
