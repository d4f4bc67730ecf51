"""Locks, and files that are written whole."""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from jupyter_agentbox.linux import is_locked, open_locked, remove_unfinished, remove_unowned, try_lock, write_atomically


def test_a_file_is_replaced_whole_with_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    before = os.umask(0o077)
    try:
        write_atomically(path, b"1")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        write_atomically(path, b"2", 0o755, is_durable=True)
    finally:
        os.umask(before)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"2", 0o755)
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_is_new_does_not_replace_one_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"second"):
        write_atomically(path, data, is_new=True)
        assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_the_file_as_it_was_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new", is_durable=True)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_lock_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    held = open_locked(path)
    assert held is not None
    assert is_locked(path)
    assert open_locked(path) is None
    began = time.monotonic()
    with try_lock(path, timeout=0.2) as is_mine:
        assert not is_mine
    assert time.monotonic() - began >= 0.2
    closer = threading.Timer(0.1, os.close, (held,))
    closer.start()
    with try_lock(path, timeout=math.inf) as is_mine:
        assert is_mine
        assert is_locked(path)
    closer.join()
    assert not is_locked(path)


def test_only_folders_whose_lock_nobody_holds_are_removed(tmp_path: Path) -> None:
    for name in ("held", "left", "bare", "odd"):
        (tmp_path / name / "folder").mkdir(parents=True)
    for name in ("held", "left"):
        (tmp_path / name / "lock").touch()
    (tmp_path / "odd" / "lock").symlink_to("folder")  # it cannot be told
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("left")
    with try_lock(tmp_path / "held" / "lock"):
        assert remove_unowned(tmp_path) == ["bare", "left"]
    assert sorted(os.listdir(tmp_path)) == ["file", "held", "link", "odd"]


def test_only_what_is_unfinished_and_old_is_removed(tmp_path: Path) -> None:
    for name in (".new-old", ".new-young", "old"):
        (tmp_path / name / "folder").mkdir(parents=True)
    (tmp_path / ".new-file").touch()
    (tmp_path / ".new-link").symlink_to("old")
    for name in (".new-old", "old", ".new-file", ".new-link"):
        os.utime(tmp_path / name, (0, 0), follow_symlinks=False)
    remove_unfinished(tmp_path, 60)
    assert sorted(os.listdir(tmp_path)) == [".new-young", "old"]
    assert (tmp_path / "old" / "folder").is_dir()
    remove_unfinished(tmp_path / "gone", 60)
