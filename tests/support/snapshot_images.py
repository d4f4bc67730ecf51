"""Write images as a runtime would, and workspaces, without a sandbox."""

from __future__ import annotations

import os
import random
import stat
import time
from pathlib import Path
from typing import Any

from jupyter_agentbox.storage.snapshots import Snapshot, SnapshotMeta, SnapshotStore

PAGE = 4096
GIB = 1 << 30


def make_store(state: Path, **options: Any) -> SnapshotStore:
    state.mkdir(mode=0o700, exist_ok=True)
    return SnapshotStore(state, **{"max_bytes": GIB, "max_count": 100, **options})


def meta(**changes: Any) -> SnapshotMeta:
    return SnapshotMeta(**{"sandbox": "box-1", "owner": "ada", "kind": "user", "created": time.time(), **changes})


def make_pages(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count * PAGE)


def put(
    store: SnapshotStore,
    pages: bytes,
    *,
    state: bytes = b"state " * 20_000,
    files: dict[str, bytes] | None = None,
    **changes: Any,
) -> Snapshot:
    staged = store.stage()
    try:
        (staged / "image" / "pages.img").write_bytes(pages)
        (staged / "image" / "pages_meta.img").write_bytes(b"meta")
        (staged / "image" / "checkpoint.img").write_bytes(state)
        for name, data in (files or {}).items():
            (staged / "work" / name).write_bytes(data)
        return store.commit(staged, meta(**changes))
    finally:
        store.discard(staged)


def pages_of(store: SnapshotStore, snapshot: Snapshot) -> bytes:
    with store.checkout(snapshot.id, snapshot.meta.owner) as path:
        return (path / "image" / "pages.img").read_bytes()


def describe_tree(top: Path) -> dict[bytes, tuple[Any, ...]]:
    """Return what is visible of a tree: kinds, modes, times, link targets, data, and which names are one file."""
    found: dict[bytes, tuple[Any, ...]] = {}
    numbers: dict[int, bytes] = {}
    base = os.fsencode(top)
    for folder, folders, files in os.walk(base):
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            facts, short = os.lstat(path), os.path.relpath(path, base)
            if stat.S_ISLNK(facts.st_mode):
                found[short] = ("link", os.readlink(path), facts.st_mtime_ns)
            elif stat.S_ISDIR(facts.st_mode):
                found[short] = ("folder", stat.S_IMODE(facts.st_mode), facts.st_mtime_ns)
            else:
                first = numbers.setdefault(facts.st_ino, short)
                with open(path, "rb") as file:
                    found[short] = ("file", stat.S_IMODE(facts.st_mode), facts.st_mtime_ns, file.read(), first)
    return found


def store_files(state: Path) -> list[Path]:
    """Return all non-empty files in the store."""
    return sorted(path for path in state.rglob("*") if path.is_file() and not path.is_symlink() and path.stat().st_size)
