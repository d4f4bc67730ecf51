"""Names by glob and lines by grep, and that neither a pattern nor a tree can hold the server up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound
from jupyter_agentbox.storage.files import Folder
from jupyter_agentbox.storage.files.search import Glob


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("*.py", "a.py", True),
        ("*.py", "d/a.py", False),
        ("**/*.py", "a.py", True),
        ("**/*.py", "d/e/a.py", True),
        ("d/**", "d/e/f", True),
        ("d/**/f", "d/f", True),
        ("d/**/f", "d/x/y/f", True),
        ("d/**/f", "d/x/y/g", False),
        ("**/a/**/b", "x/a/y/b", True),
        ("[ab]?", "bc", True),
        ("*", ".hidden", True),
        ("*", "a\nb", True),
        ("A", "a", False),
    ],
)
def test_glob_patterns(pattern: str, path: str, is_match: bool) -> None:
    assert Glob(pattern).matches(tuple(path.split("/"))) is is_match


@pytest.mark.parametrize("pattern", ["", "/a", "../a", "a/../b", ".", "x" * 1001, "a\0", "\ud800"])
def test_glob_refuses(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        Glob(pattern)


@given(
    st.lists(st.sampled_from(["**", "a", "b", "*"]), min_size=1, max_size=5),
    st.lists(st.sampled_from("ab"), min_size=1, max_size=6),
)
def test_glob_never_prunes_what_matches(pattern: list[str], path: list[str]) -> None:
    def matches(pattern: list[str], path: list[str]) -> bool:
        if not pattern:
            return not path
        if pattern[0] == "**":
            return matches(pattern[1:], path) or (bool(path) and matches(pattern, path[1:]))
        return bool(path) and pattern[0] in ("*", path[0]) and matches(pattern[1:], path[1:])

    glob = Glob("/".join(pattern))
    assert glob.matches(tuple(path)) is matches(pattern, path)
    if glob.matches(tuple(path)):
        assert all(glob.may_match_beneath(tuple(path[:depth])) for depth in range(len(path)))


def test_glob(folder: Folder, root: Path, outside: Path) -> None:
    for path in ("a.py", "d/b.py", "d/e/c.py", "d/e/c.txt"):
        folder.write(path, b"", parents=True)
    os.symlink(str(outside), root / "link")
    os.symlink("d", root / "inner")
    assert [entry.path for entry in folder.glob("**/*.py").entries] == ["a.py", "d/b.py", "d/e/c.py"]
    assert [entry.path for entry in folder.glob("*.py", "d/e").entries] == ["d/e/c.py"]
    assert [entry.path for entry in folder.glob("inner/*").entries] == []
    assert [entry.path for entry in folder.glob("*.py", "inner").entries] == ["inner/b.py"]
    (root / os.fsdecode(b"\xff.py")).touch()
    assert [entry.path for entry in folder.glob(r"\xff.*").entries] == [r"\xff.py"]
    cut = folder.glob("**", limit=2)
    assert (len(cut.entries), cut.truncated, cut.note) == (2, True, "stopped after 2 entries")


def test_grep(folder: Folder, root: Path, outside: Path) -> None:
    folder.write("a.txt", b"one\ntwo \xff\r\nthree\nfour", parents=True)
    folder.write("d/b.py", b"TWO\n", parents=True)
    folder.write("binary", b"two\0")
    os.symlink(str(outside / "secret"), root / "out")
    os.symlink("a.txt", root / "in")
    os.mkfifo(root / "fifo")
    found = folder.grep("two", before=1, after=1)
    assert [(each.path, each.line, each.text, each.before, each.after) for each in found.matches] == [
        ("a.txt", 2, "two \ufffd", ["one"], ["three"])
    ]
    assert (found.files, found.skipped, found.truncated, found.note) == (2, 1, False, None)
    assert [each.path for each in folder.grep("two", ignore_case=True).matches] == ["a.txt", "d/b.py"]
    assert [each.path for each in folder.grep("^T", glob="*.py").matches] == ["d/b.py"]
    assert folder.grep("^T", glob="*.txt").matches == []
    assert [each.path for each in folder.grep("four$", "in").matches] == ["in"]
    assert folder.grep("t.o", is_literal=True).matches == []
    assert folder.grep("canary").matches == []
    cut = folder.grep("o", limit=1)
    assert (len(cut.matches), cut.truncated, cut.note) == (1, True, "stopped after 1 matches")
    exact = folder.grep("two", limit=1)
    assert (len(exact.matches), exact.truncated) == (1, False)
    with pytest.raises(Conflict, match="a FIFO"):
        folder.grep("x", "fifo")
    with pytest.raises(NotFound):
        folder.grep("x", "none")


@pytest.mark.parametrize(
    "pattern", ["(", "a{1000000000000}", "", "x" * 1001, "(?P<a>b)(?P<a>c)", "(" * 400, "[\ud800-a]"]
)
def test_a_bad_pattern_is_said(root: Path, pattern: str) -> None:
    with Folder(root) as folder:
        with pytest.raises(InvalidRequest) as caught:
            folder.grep(pattern)
    assert caught.value.field == "pattern"
    assert str(caught.value).encode()


def test_a_pattern_that_takes_for_ever_is_stopped(root: Path) -> None:
    (root / "a").write_text("found aab\n")
    (root / "b").write_text("a" * 60 + "!\n")
    with Folder(root) as folder:
        began = time.monotonic()
        found = folder.grep(r"(a+)+b", timeout=2.0)
        assert time.monotonic() - began < 60
    assert [each.path for each in found.matches] == ["a"]
    assert found.truncated
    assert "stopped at b" in (found.note or "")


def test_memory_and_text_are_bounded(root: Path) -> None:
    (root / "long").write_bytes(b"x" * 30_000_000)
    (root / "lines").write_bytes((b"y" * 3000 + b"\n") * 5000)
    with Folder(root) as folder:
        found = folder.grep("x", "long", timeout=90)
        assert len(found.matches[0].text) == 4096
        assert "only the first" in (found.note or "")
        found = folder.grep("y", "lines", limit=10_000, before=100, after=100, timeout=90)
        assert "characters of text" in (found.note or "")
        assert len(found.matches) < 20
