"""Workspaces as hostile code leaves them."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.snapshot_images import describe_tree, make_pages, make_store, meta

from jupyter_agentbox.errors import Damaged, TooLarge
from jupyter_agentbox.storage.snapshots import copy_tree, tree
from jupyter_agentbox.storage.snapshots.tree import Entry, Writer


def make_hostile(top: Path, secret: Path) -> dict[str, int]:
    """Fill a directory with whatever a file system can hold; returns what no snapshot keeps."""
    base = os.fsencode(top)
    for name in (b"plain", b"\xff\xfe odd \n name", b"-rf", b"..."):
        with open(base + b"/" + name, "wb") as file:
            file.write(b"data of " + name)
    os.chmod(top / "plain", 0o4755)
    os.symlink(secret, top / "absolute")
    os.symlink("../" * 20 + "etc/passwd", top / "upwards")
    os.symlink("loop", top / "loop")
    os.symlink(secret.parent, top / "folder-link")
    os.link(top / "plain", top / "zz-same")
    os.mkdir(top / "sub")
    os.link(top / "plain", top / "sub" / "same")
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(top)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
    with open(top / "sparse", "wb") as file:
        file.write(b"start")
        file.seek(1 << 33)
        file.write(b"end")
        file.truncate((1 << 34) + 7)
    (top / "locked").write_bytes(b"no mode")
    (top / "locked").chmod(0)
    (top / "shut" / "in").mkdir(parents=True)
    (top / "shut" / "in" / "file").write_bytes(b"inside")
    (top / "shut").chmod(0o2000)
    deep = top
    for _ in range(100):
        deep /= "d"
    deep.mkdir(parents=True)
    os.utime(top / "plain", ns=(1, 1_234_567_890_123_456_789))
    os.utime(top / "absolute", ns=(5, 6), follow_symlinks=False)
    os.utime(top / "sub", ns=(7, -8_000_000_000))
    return {"fifos": 1, "sockets": 1}


def describe(top: Path) -> dict[bytes, tuple[object, ...]]:
    """As describe_tree, without reading gigabytes of holes, sockets and FIFOs; and without set-id bits."""
    sparse = (top / "sparse").stat()
    held = (sparse.st_size, sparse.st_blocks <= 2 * 128 + 8)
    with open(top / "sparse", "rb") as file:
        ends = (file.read(8), file.seek((1 << 33) - 1), file.read(8))
    os.truncate(top / "sparse", 0)
    for name in ("fifo", "socket"):
        (top / name).unlink(missing_ok=True)
    found = describe_tree(top)
    found[b"sparse"] = (held, ends)
    return {
        name: (entry[0], entry[1] & 0o1777, *entry[2:]) if entry[0] in ("file", "folder") else entry
        for name, entry in found.items()
    }


@pytest.mark.parametrize("secret", [None, b"k" * 32], ids=["plain", "encrypted"])
def test_a_hostile_workspace_comes_back_as_it_was(tmp_path: Path, secret: bytes | None) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_text("canary")
    (tmp_path / "work").mkdir()
    dropped = make_hostile(tmp_path / "work", outside / "canary")
    store = make_store(tmp_path / "state", secret=secret)
    staged = store.stage()
    assert copy_tree(tmp_path / "work", staged / "work", max_bytes=1 << 30) == dropped
    (staged / "image" / "pages.img").write_bytes(make_pages(1))
    os.mkfifo(staged / "work" / "another")
    made = store.commit(staged, meta())
    assert made.dropped == {"fifos": 1}
    assert made.size < 1 << 20
    with store.checkout(made.id, "ada") as path:
        os.rename(path / "work", tmp_path / "restored")
    # Its mode forbids even its owner to read these.
    for top in (tmp_path / "work", tmp_path / "restored"):
        assert stat.S_IMODE((top / "locked").stat().st_mode) == 0
        assert (top / "shut").stat().st_mode & 0o1777 == 0
    assert not (tmp_path / "restored" / "plain").stat().st_mode & 0o4000
    assert describe(tmp_path / "restored") == describe(tmp_path / "work")
    assert (outside / "canary").read_text() == "canary"
    assert os.listdir(outside) == ["canary"]


def test_an_ordinary_user_reads_what_its_modes_forbid(tmp_path: Path) -> None:
    """As root nothing is forbidden, so another user does it, where there is one."""
    program = textwrap.dedent("""
        import os, sys, tempfile
        from pathlib import Path
        from jupyter_agentbox.storage.snapshots import copy_tree
        if os.geteuid() == 0:
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        with tempfile.TemporaryDirectory() as base:
            source, target = Path(base, "source"), Path(base, "target")
            (source / "shut").mkdir(parents=True); target.mkdir()
            (source / "shut" / "file").write_text("read")
            (source / "shut" / "file").chmod(0)
            (source / "shut").chmod(0)
            assert copy_tree(source, target, max_bytes=100) == {}
            for top in (source, target):
                assert (top / "shut").stat().st_mode & 0o777 == 0
                (top / "shut").chmod(0o700)
                assert (top / "shut" / "file").stat().st_mode & 0o777 == 0
                (top / "shut" / "file").chmod(0o600)
                assert (top / "shut" / "file").read_text() == "read"
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr


def test_depth_number_and_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        os.mkdir("source", dir_fd=handle)
        for name in ("source", *("x" * 200,) * 30):
            below = os.open(name, os.O_RDONLY, dir_fd=handle)
            os.close(handle)
            handle = below
            os.mkdir("x" * 200, dir_fd=handle)
    finally:
        os.close(handle)
    (tmp_path / "a").mkdir()
    with pytest.raises(TooLarge):
        copy_tree(source, tmp_path / "a", max_bytes=100)
    monkeypatch.setattr(tree, "MAX_DEPTH", 3)
    (tmp_path / "b").mkdir()
    with pytest.raises(TooLarge):
        copy_tree(source, tmp_path / "b", max_bytes=100)
    files, target = tmp_path / "files", tmp_path / "c"
    files.mkdir(), target.mkdir()
    (files / "f").write_bytes(bytes(range(101)))
    with pytest.raises(TooLarge) as caught:
        copy_tree(files, target, max_bytes=100)
    assert caught.value.setting == "Policy.max_snapshot_bytes"


def test_a_workspace_that_changes_while_it_is_copied_leads_nowhere_else(tmp_path: Path) -> None:
    """A folder becomes a link again and again: the copy holds what was in the folder, never what the link names."""
    source, outside = tmp_path / "source", tmp_path / "outside"
    for top, text in ((source / "real", "mine"), (outside, "secret")):
        top.mkdir(parents=True)
        for number in range(20):
            (top / f"f{number}").write_text(text)
    program = textwrap.dedent("""
        import os, sys
        os.chdir(sys.argv[1])
        os.symlink(sys.argv[2], "link")
        print("ready", flush=True)
        while True:
            os.rename("real", "kept"); os.rename("link", "real")
            os.rename("real", "link"); os.rename("kept", "real")
    """)
    command = [sys.executable, "-c", program, str(source), str(outside)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as swapper:
        assert swapper.stdout is not None
        swapper.stdout.readline()
        try:
            for number in range(50):
                target = tmp_path / f"t{number}"
                target.mkdir()
                copy_tree(source, target, max_bytes=10_000)
                for path in target.rglob("f*"):
                    if not any(part.is_symlink() for part in path.parents):
                        assert path.read_text() == "mine"
        finally:
            swapper.kill()


@pytest.mark.parametrize(
    "entries",
    [
        [Entry(b"../x", "f")],
        [Entry(b"/x", "f")],
        [Entry(b"", "f")],
        [Entry(b"a/./x", "f")],
        [Entry(b"a", "d"), Entry(b"a/../../x", "f")],
        [Entry(b"a\0b", "f")],
        [Entry(b"x" * 256, "f")],
        [Entry(b"l", "l", target=b"OUTSIDE"), Entry(b"l/x", "f")],
        [Entry(b"l", "l", target=b"OUTSIDE/canary"), Entry(b"l", "f")],
        [Entry(b"h", "h", target=b"../outside/canary")],
        [Entry(b"l", "l", target=b"OUTSIDE"), Entry(b"h", "h", target=b"l/canary")],
        [Entry(b"l", "l", target=b"OUTSIDE/canary"), Entry(b"h", "h", target=b"l")],
        [Entry(b"f", "f"), Entry(b"f", "f")],
        [Entry(b"f", "f", size=1 << 60)],
        [Entry(b"f", "f", size=-1)],
        [Entry(b"f", "f", mtime=1 << 63)],
        [Entry(b"l", "l", target=b"x" * 5000)],
    ],
)
def test_no_entry_is_written_outside(tmp_path: Path, entries: list[Entry]) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir(), inside.mkdir()
    (outside / "canary").write_text("canary")

    def write() -> None:
        with Writer(inside) as writer:
            for entry in entries:
                entry.target = entry.target.replace(b"OUTSIDE", os.fsencode(outside))
                if (handle := writer.add(entry)) is not None:
                    writer.finish(entry, handle)

    with pytest.raises(Damaged):
        write()
    assert os.listdir(outside) == ["canary"]
    assert sorted(os.listdir(tmp_path)) == ["inside", "outside"]
    assert (outside / "canary").stat().st_nlink == 1
