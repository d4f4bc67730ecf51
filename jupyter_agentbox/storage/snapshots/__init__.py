"""Keep snapshots, which are a sandbox's memory and workspace, on disk.

    stage() -> the runtime writes image/, the workspace is copied to work/ -> commit() -> checkout() -> restore

Other packages use :mod:`.store`. :mod:`.owner` manages the part of the store that belongs to one owner. :mod:`.pages`
deduplicates contents. :mod:`.tree` reads and writes hostile files. :mod:`.keys` protects stored data from being changed
or read. :mod:`.transfer` exports and imports snapshots.
"""

from .store import SnapshotStore
from .tree import copy_tree
from .values import Kind, Snapshot, SnapshotMeta

__all__ = ["Kind", "Snapshot", "SnapshotMeta", "SnapshotStore", "copy_tree"]
