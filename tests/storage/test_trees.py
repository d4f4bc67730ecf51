"""The walk of trees that hostile code has made, or changes meanwhile."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_agentbox.storage import trees
from jupyter_agentbox.storage.trees import Found, libc, walk


@pytest.fixture(params=[True, False], ids=["openat2", "by name"], autouse=True)
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not libc.has_openat2:
        pytest.skip("this kernel has no openat2")
    monkeypatch.setattr(libc, "has_openat2", request.param)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def paths(top: Path, **options: Any) -> list[str]:
    with opened(top) as fd:
        return [found.path for found in walk(fd, **options)]


def in_depth(top: Path, prefix: str = "") -> list[str]:
    """The order of a walk, as a recursion says it."""
    found = []
    for name in sorted(os.listdir(top), key=os.fsencode):
        found.append(prefix + name)
        if (top / name).is_dir() and not (top / name).is_symlink():
            found += in_depth(top / name, f"{prefix}{name}/")
    return found


def by_siblings(top: Path, prefix: str = "") -> list[str]:
    names = sorted(os.listdir(top), key=os.fsencode)
    found = [prefix + name for name in names]
    for name in names:
        if (top / name).is_dir() and not (top / name).is_symlink():
            found += by_siblings(top / name, f"{prefix}{name}/")
    return found


NAMES = st.binary(min_size=1, max_size=6).filter(lambda name: name not in (b".", b"..") and not set(name) & {0, 47})


@given(st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=4), st.sampled_from("dfl")), max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_entry_is_found_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[list[bytes], str]]
) -> None:
    top = tmp_path_factory.mktemp("tree")
    for parts, kind in entries:
        place = os.path.join(os.fsencode(top), *parts)
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if kind == "d":
                os.mkdir(place)
            elif kind == "f":
                os.close(os.open(place, os.O_CREAT | os.O_EXCL))
            else:
                os.symlink(b"..", place)
        except (FileExistsError, NotADirectoryError):
            continue
    assert paths(top) == in_depth(top)
    assert paths(top, siblings_first=True) == by_siblings(top)


def test_options(tmp_path: Path) -> None:
    for name in ("a/x/1", "a/y/2", "b/3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert paths(tmp_path, enter=lambda found: found.name != "x") == ["a", "a/x", "a/y", "a/y/2", "b", "b/3"]
    for order in (True, False):
        for count in range(8):
            left = iter([True] * count)
            found = paths(tmp_path, siblings_first=order, take=lambda left=left: next(left, False))
            assert len(found) <= count
            assert set(found) <= set(in_depth(tmp_path))
    assert paths(tmp_path, take=lambda: False) == []
    with opened(tmp_path) as fd:
        found = next(walk(fd))
        assert (found.parts, found.name, stat.S_ISDIR(found.status.st_mode)) == (("a",), "a", True)


def test_errors_are_raised_or_told(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "in").touch()
    (tmp_path / "outside").symlink_to("/etc")
    told: list[str] = []

    def swap(found: Found) -> bool:
        if found.path == "b":
            (tmp_path / "b").rename(tmp_path / "was")
            (tmp_path / "b").symlink_to("/etc")
        if found.path == "c":
            (tmp_path / "c" / "in").unlink()
            (tmp_path / "c").rmdir()
        return True

    found = paths(tmp_path, enter=swap, on_error=lambda path, error: told.append(path))
    assert (found, told) == (["a", "a/in", "b", "c", "outside"], ["b", "c"])
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError):
        paths(tmp_path, enter=lambda found: found.path != "c" or bool((tmp_path / "c").rmdir()) or True)
    with opened(tmp_path / "was") as fd:
        (tmp_path / "was" / "in").unlink()
        (tmp_path / "was").rmdir()
        assert list(walk(fd)) == []


@pytest.mark.parametrize("siblings_first", [True, False])
def test_depth_uses_up_no_descriptors(tmp_path: Path, siblings_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_MAX_OPEN", 5)
    handle = os.open(tmp_path, os.O_RDONLY)
    for _ in range(300):
        for name in ("d", "e"):
            os.mkdir(name, dir_fd=handle)
        below = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)
    before = len(os.listdir("/proc/self/fd"))
    most, found = 0, []
    with opened(tmp_path) as fd:
        for each in walk(fd, siblings_first=siblings_first):
            most = max(most, len(os.listdir("/proc/self/fd")))
            found.append(each.path)
    assert found == (by_siblings if siblings_first else in_depth)(tmp_path)
    assert most <= before + 10
    assert len(os.listdir("/proc/self/fd")) == before


def test_unreadable_directories_are_read_and_get_their_modes_back() -> None:
    """As root nothing is forbidden, so another user does it, where there is one."""
    program = textwrap.dedent("""
        import os, stat, tempfile
        from pathlib import Path
        from jupyter_agentbox.storage.trees import walk
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        modes = {"a": 0, "a/b": 0o400, "a/b/c": 0o300}
        for count in (1, 2, 3, 4):
            with tempfile.TemporaryDirectory() as base:
                top = Path(base)
                (top / "a/b/c").mkdir(parents=True)
                for path, mode in reversed(modes.items()):
                    (top / path).chmod(mode)
                fd = os.open(top, os.O_PATH)
                told = []
                found = [found.path for found in walk(fd, on_error=lambda path, error: told.append(path))]
                assert found == told == ["a"]
                walking = walk(fd, is_forced=True)
                assert [found.path for _, found in zip(range(count), walking)] == [*modes][:count]
                walking.close()
                for path, mode in modes.items():
                    assert stat.S_IMODE((top / path).stat().st_mode) == mode
                    (top / path).chmod(0o700)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("siblings_first", [True, False])
def test_a_directory_that_becomes_a_link_leads_nowhere(tmp_path: Path, siblings_first: bool) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    for folder, name in ((top / "real", "mine"), (outside, "secret")):
        (folder / "in").mkdir(parents=True)
        (folder / "in" / name).touch()
    (top / "link").symlink_to(outside)
    is_done = threading.Event()

    def swap() -> None:
        while not is_done.is_set():
            for source, target in (("real", "kept"), ("link", "real"), ("real", "link"), ("kept", "real")):
                os.rename(top / source, top / target)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(300):
            found = paths(top, siblings_first=siblings_first, on_error=lambda path, error: None)
            assert not any("secret" in path for path in found)
    finally:
        is_done.set()
        thread.join()
