"""A sandbox makes the folder as hostile as it can: nothing outside is read or changed, and nothing hangs."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.trees import make_device

from jupyter_agentbox.errors import AgentboxError, Conflict, NotFound, TooLarge
from jupyter_agentbox.storage.files import Folder
from jupyter_agentbox.storage.files.tree import libc

CANARY = b"canary"
pytestmark = pytest.mark.timeout(200)


def every_read(folder: Folder, path: str) -> dict[str, Callable[[], object]]:
    def download() -> bytes:
        with folder.download(path) as stream:
            return b"".join(stream)

    def pack(kind: str) -> bytes:
        with folder.pack(path, kind) as stream:
            return b"".join(stream)

    return {
        "read": lambda: folder.read(path),
        "download": download,
        "list": lambda: folder.list(path, recursive=True),
        "glob": lambda: folder.glob("**", path),
        "grep": lambda: folder.grep("canary", path),
        "tar": lambda: pack("tar"),
        "zip": lambda: pack("zip"),
        "copy": lambda: folder.copy(path, f"copy-{time.monotonic_ns()}", recursive=True),
        "stat": lambda: folder.stat(path),
    }


def every_change(folder: Folder, path: str) -> dict[str, Callable[[], object]]:
    def upload() -> None:
        with folder.upload(path) as stream:
            stream.write(b"evil")
            stream.finish()

    def unpack() -> None:
        with folder.unpack(path):
            pass

    return {
        "write": lambda: folder.write(path, b"evil"),
        "parents": lambda: folder.write(path + "/new", b"evil", parents=True),
        "append": lambda: folder.append(path, b"evil"),
        "edit": lambda: folder.edit(path, "canary", "evil"),
        "upload": upload,
        "unpack": unpack,
        "mkdir": lambda: folder.mkdir(path + "/new", parents=True),
        "move in": lambda: folder.move("mine", path + "/mine"),
        "copy in": lambda: folder.copy("mine", path + "/mine"),
        "copy over": lambda: folder.copy("mine", path, overwrite=True),
    }


TARGETS = (
    *("{outside}", "{outside}/secret", "../outside", "../outside/secret", "inner/../../outside/secret", "self/outside"),
    *("/proc/self/root", "/proc/self/cwd", "/", "..", "/workspace", "hostile", "missing", "a/b/../../../outside"),
)


@pytest.mark.parametrize("target", TARGETS)
def test_links_lead_nowhere_outside(folder: Folder, root: Path, outside: Path, target: str) -> None:
    (root / "a/b").mkdir(parents=True)
    os.symlink("a/b", root / "inner")
    os.symlink("..", root / "self")
    folder.write("mine", b"mine")
    os.symlink(target.format(outside=outside), root / "hostile")
    for suffix in ("", "/secret", "/sub", "/sub/deep"):
        for name, look in every_read(folder, "hostile" + suffix).items():
            with pytest.raises((Conflict, NotFound)):
                look()
            assert name
        for change in every_change(folder, "hostile" + suffix).values():
            with pytest.raises((Conflict, NotFound)):
                change()
        assert not folder.exists("hostile" + suffix)
        if suffix:
            with pytest.raises((Conflict, NotFound)):
                folder.delete("hostile" + suffix, recursive=True)
    assert folder.stat("hostile", follow=False).kind == "link"
    # The link itself is the sandbox's own.
    folder.move("hostile", "moved")
    assert folder.delete("moved") == 1
    assert folder.read("mine").data == b"mine"


def test_links_inside_are_followed_for_reading_alone(folder: Folder, root: Path) -> None:
    folder.write("data/deep/file", b"here", parents=True)
    os.symlink("data/deep", root / "one")
    os.symlink("../data/../one/file", root / "data/two")
    os.symlink("./data//two", root / "three")
    os.symlink("one/", root / "slash")
    for path in ("one/file", "data/two", "three", "slash/file"):
        assert folder.read(path).data == b"here"
        assert folder.stat(path).kind == "file"
    with pytest.raises(Conflict, match=r"goes through a link|not a directory"):
        folder.write("one/file", b"")
    with pytest.raises(Conflict, match="is a link, not a regular file; writes never follow links"):
        folder.write("three", b"")
    with pytest.raises(Conflict):
        folder.delete("one/file")
    assert folder.delete("one", recursive=True) == 1
    assert (root / "data/deep/file").read_bytes() == b"here"
    for number in range(45):
        os.symlink(f"chain{number + 1}", root / f"chain{number}")
    with pytest.raises(Conflict, match="too many links"):
        folder.read("chain0")


def test_what_is_no_file_is_never_opened(folder: Folder, root: Path) -> None:
    os.mkfifo(root / "fifo")
    device = "a device" if make_device(root / "device") else "a FIFO"
    os.chdir(root)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        os.chdir("/")
        folder.write("mine", b"mine")
        for path, kind in (("fifo", "a FIFO"), ("device", device), ("socket", "a socket")):
            for name, look in every_read(folder, path).items():
                if name == "stat":
                    assert kind.endswith(folder.stat(path).kind.replace("fifo", "FIFO"))
                    continue
                with pytest.raises(Conflict, match=f"{path} is {kind}, not|is not a directory"):
                    look()
            for change in every_change(folder, path).values():
                with pytest.raises(Conflict):
                    change()
        assert len(folder.list().entries) == 4
        assert folder.grep("x").files == 1
        with folder.pack() as packed:
            assert sum(map(len, packed))
            assert packed.skipped.count == 3
        folder.move("fifo", "fifo2")
        for path in ("fifo2", "device", "socket"):
            assert folder.delete(path) == 1


def test_hard_links_from_outside_are_not_written_through(folder: Folder, root: Path, outside: Path) -> None:
    os.link(outside / "secret", root / "twin")
    with pytest.raises(Conflict, match="hard links"):
        folder.append("twin", b"evil")
    folder.edit("twin", "canary", "evil")
    assert (root / "twin").read_text() == "evil"
    os.unlink(root / "twin")
    os.link(outside / "secret", root / "twin")
    folder.write("twin", b"evil", mode=0o777)
    folder.delete("twin")


@contextmanager
def flipping(*flips: Callable[[], object]) -> Iterator[None]:
    """Do each of `flips` in turn, as fast as it goes, in a thread of its own."""
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            for flip in flips:
                with suppress(OSError):
                    flip()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(90)
    assert not thread.is_alive()


def test_a_folder_swapped_for_a_link_in_a_race(folder: Folder, root: Path, outside: Path) -> None:
    def swap() -> None:
        os.rename(root / "d", root / "aside")
        os.symlink(str(outside), root / "d")

    def swap_back() -> None:
        os.unlink(root / "d")
        os.rename(root / "aside", root / "d")

    def swap_file() -> None:
        os.symlink(str(outside / "secret"), root / "d/evil")
        os.rename(root / "d/evil", root / "d/secret")

    def make() -> None:
        os.makedirs(root / "d/sub", exist_ok=True)
        (root / "aside-file").write_bytes(b"inside")
        os.rename(root / "aside-file", root / "d/secret")

    os.mkdir(root / "d")
    (root / "mine").write_bytes(b"mine")
    reads = changes = 0
    # `make` is only called where d is the folder, by this same thread: nothing is written outside by the test.
    with flipping(make, swap_file, swap, swap_back):
        begun = time.monotonic()
        while time.monotonic() - begun < (2.0 if min(reads, changes) > 10 else 90.0):
            for path in ("d/secret", "d"):
                for name, look in every_read(folder, path).items():
                    if name == "grep" and reads % 10:
                        continue  # a process each
                    try:
                        found = look()
                    except AgentboxError:
                        continue
                    reads += 1
                    assert CANARY not in repr(found).encode()
                    if name == "copy":
                        for at in root.glob("copy-*"):
                            folder.delete(at.name, recursive=True)
                changers = every_change(folder, path)
                changers["delete"] = lambda path=path: folder.delete(path, recursive=True)  # type: ignore[misc]
                del changers["unpack"], changers["edit"]
                for change in changers.values():
                    try:
                        change()
                    except AgentboxError:
                        continue
                    changes += 1
            with suppress(AgentboxError):
                folder.write("mine", b"mine")
    assert reads > 10
    assert changes > 10


def test_a_folder_that_fills_as_fast_as_it_is_emptied(root: Path) -> None:
    number = iter(range(10**9))

    def fill() -> None:
        (root / "d").mkdir(exist_ok=True)
        (root / "d" / str(next(number))).touch()

    fill()
    with Folder(root) as folder, flipping(fill):
        began = time.monotonic()
        with suppress(TooLarge, Conflict):
            folder.delete("d", recursive=True, timeout=1.0)
        with suppress(NotFound):
            folder.list("d", timeout=1.0)
        with suppress(TooLarge, NotFound):
            folder.copy("d", "e", recursive=True, timeout=1.0)
        assert time.monotonic() - began < 60


def test_many_entries(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkdir(root / "many")
    directory = os.open(root / "many", os.O_RDONLY)
    for number in range(5_000):
        os.close(os.open(str(number), os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory))
    os.close(directory)
    with Folder(root, quota=5_000_000) as folder:
        listed = folder.list("many")
        assert (len(listed.entries), listed.truncated, listed.note) == (1000, True, "stopped after 1000 entries")
        assert folder.glob("many/3777").entries[0].path == "many/3777"
        assert folder.used().bytes > 5_000_000
        with pytest.raises(TooLarge, match="limited to 5000000 bytes"):
            folder.write("x", b"1")
        with pytest.raises(TooLarge, match="stopped after 1000 entries"):
            folder.pack("many", max_entries=1000)
        with pytest.raises(TooLarge, match="stopped after 1000 entries"):
            folder.copy("many", "copy", recursive=True, max_entries=1000)
        assert not (root / "copy").exists()
        with pytest.raises(TooLarge, match=r"^the deletion of many stopped .* 0 entries deleted; .*again to continue"):
            folder.delete("many", recursive=True, timeout=0.0)
        monkeypatch.setattr("jupyter_agentbox.storage.files.folder.MAX_DELETE", 3_750)
        with pytest.raises(TooLarge, match=r"^the deletion of many stopped .* 3[67][0-9]{2} entries deleted"):
            folder.delete("many", recursive=True)
        monkeypatch.setattr("jupyter_agentbox.storage.files.folder.MAX_DELETE", 1_500)
        with Folder(root, (".*",)) as hiding:  # that none is hidden is looked at before, and not counted
            assert 1_251 <= hiding.delete("many", recursive=True) <= 1_351


def test_a_tree_deeper_than_any_path(folder: Folder, root: Path) -> None:
    deep = os.open(root, os.O_RDONLY)
    for _ in range(120):
        os.mkdir("d" * 100, dir_fd=deep)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=deep)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        os.close(deep)
        deep = inner
    os.close(deep)
    listed = folder.list(recursive=True)
    assert listed.truncated
    assert "paths longer than" in (listed.note or "")
    assert folder.grep("x").truncated
    with pytest.raises(TooLarge):
        folder.pack()
    assert folder.used().bytes > 38 * 8192
    assert folder.delete("d" * 100, recursive=True) == 240
    assert os.listdir(root) == []


def test_a_sparse_terabyte(root: Path) -> None:
    with open(root / "huge", "wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - 4)
        file.write(b"end!")
    with Folder(root, quota=10_000_000) as folder:
        began = time.monotonic()
        assert folder.stat("huge").size == 1 << 40
        assert folder.read("huge", offset=-4).data == b"end!"
        assert folder.read("huge", offset=1 << 39, length=10).data == bytes(10)
        assert folder.read("huge").truncated
        with pytest.raises(TooLarge, match="request a part"):
            folder.download("huge")
        with folder.download("huge", offset=-4) as stream:
            assert b"".join(stream) == b"end!"
        with pytest.raises(TooLarge):
            folder.edit("huge", "a", "b")
        assert folder.grep("end").skipped == 1
        assert folder.used().bytes < 1_000_000
        copied = folder.copy("huge", "copy")
        assert copied.bytes == 1 << 40
        assert folder.stat("copy").size == 1 << 40
        assert (root / "copy").stat().st_blocks < 1000
        assert folder.append("huge", b"more").size == (1 << 40) + 4
        assert time.monotonic() - began < 60


def test_a_kernel_without_openat2_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "f").write_text("x")

    def refuse(*args: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(libc, "has_openat2", True)
    monkeypatch.setattr(libc, "openat2", refuse)
    with Folder(root) as folder:
        assert folder.read("f").data == b"x"
        assert not libc.has_openat2


def test_the_folder_stays_the_one_that_was_opened(folder: Folder, root: Path, outside: Path) -> None:
    folder.write("f", b"x")
    root.rename(root.with_name("moved"))
    os.symlink(str(outside), root)
    assert [entry.path for entry in folder.list().entries] == ["f"]
    folder.write("secret", b"y")
    folder.delete("secret")


def test_no_descriptor_is_left(folder: Folder, root: Path, outside: Path) -> None:
    folder.write("d/mine", b"mine", parents=True)
    folder.write("mine", b"mine")
    os.symlink(str(outside), root / "d/link")
    os.symlink("mine", root / "d/inner")
    os.mkfifo(root / "d/fifo")

    def round_trip() -> None:
        for path in ("d", "d/mine", "d/link", "d/inner", "d/fifo", "nothing", "d/mine/x"):
            for call in (*every_read(folder, path).values(), *every_change(folder, path).values()):
                with suppress(AgentboxError):
                    call()
        for name in os.listdir(root):
            if name.startswith("copy"):
                folder.delete(name, recursive=True)

    round_trip()
    for _ in range(5):  # another thread of this process may have opened one meanwhile; what is left is left each time
        gc.collect()
        before = os.listdir("/proc/self/fd")
        round_trip()
        gc.collect()
        if len(after := os.listdir("/proc/self/fd")) <= len(before):
            break
    assert len(after) <= len(before)
