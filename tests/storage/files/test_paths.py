"""What callers may write as a path, and that every name comes back as it was."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.names import Names
from jupyter_agentbox.storage.files.paths import (
    is_inner_link,
    parse_path,
    read_name,
    show,
    write_name,
    write_path,
)

PIECES = [b"\\", b"\\x", b"5c", b"x80", b"\x80", b"\xc3", b"\xa9", b"a", b"\n", b"."]
# Bytes of which the kernel makes names, with much of what could confuse.
names = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.lists(
        st.sampled_from([b"\\", b"\\x", b"5c", b"x80", b"\x80", b"\xc3", b"\xa9", b"a", b"\n", b"."]), min_size=1
    ).map(b"".join),
).filter(lambda name: not set(name) & set(b"\0/") and name not in (b".", b".."))


@given(names)
def test_every_name_survives_json(name: bytes) -> None:
    text = write_name(os.fsdecode(name))
    carried = msgspec.json.decode(msgspec.json.encode(text))
    assert os.fsencode(read_name(carried)) == name


@given(st.lists(names, min_size=1, max_size=5))
def test_every_path_is_read_back(path: list[bytes]) -> None:
    parts = tuple(map(os.fsdecode, path))
    text = write_path(parts)
    assert parse_path(text) == parse_path("/workspace/" + text) == parts
    assert parse_path("/".join(parts)) == parts or "\\x" in "/".join(parts)


@given(st.text(max_size=300))
def test_a_path_is_refused_or_beneath(text: str) -> None:
    try:
        parts = parse_path(text)
    except InvalidRequest:
        return
    for part in parts:
        assert part not in ("", ".", "..")
        assert not set(part) & set("/\0")
        assert len(os.fsencode(part)) <= 255
    assert parse_path(write_path(parts)) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ()),
        (".", ()),
        ("./", ()),
        ("/workspace", ()),
        ("/workspace/", ()),
        ("a//b/./c/", ("a", "b", "c")),
        ("/workspace//a", ("a",)),
        ("...", ("...",)),
        (r"\xc3\xa9", ("é",)),
        (r"\x5cx80", (r"\x80",)),
        (r"\x41", (r"\x41",)),
        (r"a\b", (r"a\b",)),
    ],
)
def test_forms(text: str, parts: tuple[str, ...]) -> None:
    assert parse_path(text) == parts


@pytest.mark.parametrize(
    "text",
    [
        "..",
        "a/../b",
        "/",
        "/etc/passwd",
        "/workspace2/a",
        "/workspace/../a",
        "a\0b",
        "\ud800",
        "x" * 256,
        "x/" * 2100,
        "é" * 128,
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_path(text)


def test_hidden_names_have_no_second_spelling() -> None:
    (name,) = parse_path(r".\xc3\xa9nv")
    assert Names((".é*",)).is_hidden([name])


def test_sentences_stay_on_one_line() -> None:
    assert show("a\nb\x1b[31m\u202e\udc80") == r"a\nb\x1b[31m\u202e\x80"
    assert len(show("x" * 4000)) < 200


@given(st.integers(0, 3), st.lists(st.sampled_from(["..", ".", "", "a", "l"]), max_size=6))
def test_inner_links_never_leave(tmp_path_factory: pytest.TempPathFactory, depth: int, target: list[str]) -> None:
    # Worst case: each name on the way is itself a link to the top.
    text = "/".join(target)
    if not is_inner_link(depth, text):
        return
    level = depth
    for part in (part for part in target if part not in ("", ".")):
        level = level - 1 if part == ".." else 0 if part == "l" else level + 1
        assert level >= 0


@pytest.mark.parametrize(
    ("depth", "target", "is_inner"),
    [(0, "a", True), (0, "../a", False), (1, "../a", True), (1, "../../a", False), (2, "a/../b", False)],
)
def test_inner_links(depth: int, target: str, is_inner: bool) -> None:
    assert is_inner_link(depth, target) is is_inner
