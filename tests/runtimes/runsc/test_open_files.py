"""How much code inside has written, where it writes while that is measured."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from jupyter_agentbox.linux import measure_tree
from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.runtimes.runsc.runtime import measure_shared
from jupyter_agentbox.spec import KIB, MIB


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "state" / "sandboxes" / "one"
    for name in ("work", "link"):
        (made / name).mkdir(parents=True)
    return made


def fill(path: Path, size: int) -> None:
    path.write_bytes(b"x" * size)


def test_files_in_the_links_folder_count(directory: Path) -> None:
    before = measure_shared(directory)
    fill(directory / "work" / "file", MIB)
    fill(directory / "link" / "file", 2 * MIB)
    (directory / "link" / "folder").mkdir()
    fill(directory / "link" / "folder" / "file", 4 * MIB)
    assert 7 * MIB <= measure_shared(directory) - before < 8 * MIB


def test_the_import_cache_counts_only_beyond_its_own_size(directory: Path) -> None:
    before = measure_shared(directory)
    cache = import_cache._find(directory.parents[1])
    cache.parent.mkdir()
    fill(cache, MIB)
    fill(directory / "link" / import_cache.NAME, MIB)
    assert measure_shared(directory) - before < 64 * KIB
    fill(directory / "link" / import_cache.NAME, 3 * MIB)
    assert 2 * MIB <= measure_shared(directory) - before < 2 * MIB + 64 * KIB


def test_no_folder_outside_is_measured_though_links_take_the_place_of_folders(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    fill(outside / "large", 16 * MIB)
    for number in range(20):
        (inside / f"{number}" / "below").mkdir(parents=True)
    done = threading.Event()

    def swap() -> None:
        os.symlink(outside, tmp_path / "link")
        while not done.is_set():
            for number in range(20):
                os.rename(inside / f"{number}", tmp_path / "kept")
                os.rename(tmp_path / "link", inside / f"{number}")
                os.rename(inside / f"{number}", tmp_path / "link")
                os.rename(tmp_path / "kept", inside / f"{number}")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        assert max(measure_tree(inside)[0] for _ in range(500)) < MIB
    finally:
        done.set()
        thread.join(60)


def test_the_measure_ends_in_time_whatever_is_there(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(300):
        deep /= "d"
    deep.mkdir(parents=True)
    fill(deep / "file", MIB)
    assert measure_tree(tmp_path, max_time=30)[0] >= MIB
    assert measure_tree(tmp_path, max_entries=100)[0] < MIB
    assert measure_tree(tmp_path / "gone") == (0, True)
