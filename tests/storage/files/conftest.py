"""A folder with a canary beside it, opened both ways: by openat2, and as on a kernel that lacks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_agentbox.storage.files import Folder
from jupyter_agentbox.storage.files.tree import libc


@pytest.fixture(params=[True, False], ids=["openat2", "walk"])
def has_openat2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(libc, "has_openat2", request.param)
    return bool(request.param)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "work"
    root.mkdir()
    return root


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A directory that nothing here may read or change."""
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "secret").write_text("canary")
    (outside / "sub" / "deep").write_text("canary")
    before = snapshot(outside)
    yield outside
    assert snapshot(outside) == before


def snapshot(top: Path) -> dict[str, tuple[int, int, int, bytes]]:
    found = {}
    for path in [top, *sorted(top.rglob("*"))]:
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_ino, status.st_mode, status.st_mtime_ns, data)
    return found


@pytest.fixture
def folder(root: Path, has_openat2: bool) -> Iterator[Folder]:
    with Folder(root) as folder:
        yield folder
