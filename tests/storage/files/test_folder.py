"""The operations, as an honest caller uses them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound, PolicyRefused, TooLarge
from jupyter_agentbox.storage.files import Folder, FolderView

ODD = os.fsdecode(b"new\nline \xff.txt")


def test_write_read_append(folder: Folder, root: Path) -> None:
    entry = folder.write("a/b.txt", b"one\n", parents=True)
    assert (entry.path, entry.kind, entry.size) == ("a/b.txt", "file", 4)
    assert folder.append("/workspace/a/b.txt", b"two\n").size == 8
    assert folder.append("fresh", b"x").size == 1
    content = folder.read("a/b.txt", offset=2, length=4)
    assert (content.data, content.size, content.truncated) == (b"e\ntw", 8, True)
    assert folder.read("a/b.txt", offset=-4).data == b"two\n"
    assert folder.read("a/b.txt", offset=99).data == b""
    assert (root / "a/b.txt").read_bytes() == b"one\ntwo\n"
    with pytest.raises(NotFound, match=r"^c does not exist$"):
        folder.write("c/d", b"")
    with pytest.raises(Conflict, match="already exists"):
        folder.write("fresh", b"", overwrite=False)
    with pytest.raises(InvalidRequest):
        folder.read("fresh", length=1 << 30)


def test_a_write_keeps_the_mode_and_leaves_other_names_alone(folder: Folder, root: Path) -> None:
    (root / "run").write_text("old")
    (root / "run").chmod(0o4750)
    os.link(root / "run", root / "other")
    assert folder.write("run", b"new").mode == 0o750
    assert (root / "other").read_text() == "old"
    assert folder.write("run", b"", mode=0o600).mode == 0o600
    with pytest.raises(InvalidRequest):
        folder.write("run", b"", mode=0o4755)
    os.link(root / "run", root / "second")
    with pytest.raises(Conflict, match="hard links"):
        folder.append("run", b"x")


def test_no_half_written_file_is_ever_seen(folder: Folder, root: Path) -> None:
    folder.write("file", b"a" * 300_000)
    done = threading.Event()
    seen: set[bytes] = set()

    def look() -> None:
        while not done.is_set():
            data = (root / "file").read_bytes()
            seen.add(data[:1] + data[-1:] + str(len(data)).encode())

    thread = threading.Thread(target=look)
    thread.start()
    for letter in (b"b", b"c") * 30:
        folder.write("file", letter * 300_000)
    done.set()
    thread.join(10)
    assert seen <= {b"aa300000", b"bb300000", b"cc300000"}
    assert os.listdir(root) == ["file"]


def test_without_nameless_files(folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    with folder.upload("a") as upload:
        upload.write(b"x")
        assert len(os.listdir(root)) == 1
    assert os.listdir(root) == []
    folder.write("a", b"1")
    folder.write("a", b"2")
    with pytest.raises(Conflict):
        folder.write("a", b"3", overwrite=False)
    assert folder.read("a").data == b"2"
    assert os.listdir(root) == ["a"]


def test_edit(folder: Folder, root: Path) -> None:
    folder.write("f", b"one two two\r\n\xff")
    with pytest.raises(Conflict, match=r"2 times, not once"):
        folder.edit("f", "two", "2")
    with pytest.raises(Conflict, match="does not occur in f"):
        folder.edit("f", "three", "3")
    with pytest.raises(Conflict, match=r"2 times, not 3 times"):
        folder.edit("f", "two", "2", count=3)
    assert folder.edit("f", "two", "2", count=2).replacements == 2
    assert folder.edit("f", "one", "zwei", count=None).replacements == 1
    assert (root / "f").read_bytes() == b"zwei 2 2\r\n\xff"
    for wrong in ({"old": "", "new": ""}, {"old": "a", "new": "\ud800"}, {"old": "a", "new": "", "count": 0}):
        with pytest.raises(InvalidRequest):
            folder.edit("f", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"a = 1\r\nb = 2\r\n", "a = 1\nb = 2", "a = 1\nb = 3", b"a = 1\r\nb = 3\r\n"),
        (b"a = 1\r\nb = 2\r\n", "a = 1\r\nb = 2", "a = 1\r\nb = 3", b"a = 1\r\nb = 3\r\n"),
        (b"a = 1\r\nb = 2", "b = 2", "b = 2\nc = 3\n", b"a = 1\r\nb = 2\r\nc = 3\r\n"),
        (b"a = 1\nb = 2\n", "a = 1\r\nb = 2", "c\r\nd", b"c\nd\n"),
        # A file of mixed line ends keeps those of each place.
        (b"a\r\nb\nc\r\n", "a\nb", "1\n2\n3", b"1\r\n2\r\n3\nc\r\n"),
        (b"a\r\nb\nc\r\n", "a\nb\nc", "1\n2\n3\n4", b"1\r\n2\n3\n4\r\n"),
        (b"a\r\nb\nc\r\n", "b\nc", "2\n3", b"a\r\n2\n3\r\n"),
        (b"a\r\nb\nc\r\n", "b", "1\n2", b"a\r\n1\n2\nc\r\n"),
        (b"\xef\xbb\xbfa\r\nb\r\n", "a\nb", "c\nd", b"\xef\xbb\xbfc\r\nd\r\n"),
        (b"\xef\xbb\xbfa\r\nb\r\n", "\ufeffa\nb", "\ufeffc\nd", b"\xef\xbb\xbfc\r\nd\r\n"),
        # To change line ends, give them.
        (b"a\r\nb\r\n", "a\r\n", "a\n", b"a\nb\r\n"),
        (b"a\rb\r\n", "a\rb", "c", b"c\r\n"),
        (bytes(range(256)) + b"a\r\nb", "a\r\nb", "c", bytes(range(256)) + b"c"),
        (bytes(range(256)) + b"ba\r\n", "ba", "c", bytes(range(256)) + b"c\r\n"),
    ],
)
def test_an_edit_keeps_line_ends(folder: Folder, root: Path, before: bytes, old: str, new: str, after: bytes) -> None:
    folder.write("f", before)
    assert folder.edit("f", old, new).replacements == 1
    assert (root / "f").read_bytes() == after


def test_an_edit_of_text_that_occurs_with_both_line_ends_is_ambiguous(folder: Folder, root: Path) -> None:
    folder.write("f", b"a\r\nb\r\na\nb\n")
    with pytest.raises(Conflict, match="2 times, not once"):
        folder.edit("f", "a\nb", "c\nd")
    assert folder.edit("f", "a\nb", "c\nd", count=None).replacements == 2
    assert (root / "f").read_bytes() == b"c\r\nd\r\nc\nd\n"


@given(st.lists(st.sampled_from(["a", "b", "\n", "\r\n", "\r"]), max_size=20).map("".join))
def test_an_edit_that_changes_nothing_changes_nothing(text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name))
        folder.write("f", text.encode())
        for old in ("a\n", "a\nb", "b", "\n\n"):
            with contextlib.suppress(Conflict):
                folder.edit("f", old, old, count=None)
        assert folder.read("f").data == text.encode()


def test_an_edit_notes_that_the_file_changed_meanwhile(
    folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("f", b"one")
    real = Folder._new_file

    def meanwhile(self: Folder, *args: object, **options: object) -> object:
        (root / "f").write_text("one and more")
        return real(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "_new_file", meanwhile)
    with pytest.raises(Conflict, match="changed in the meantime"):
        folder.edit("f", "one", "1")
    assert (root / "f").read_text() == "one and more"


def test_directories(folder: Folder, root: Path) -> None:
    assert folder.mkdir("a").kind == "directory"
    with pytest.raises(Conflict):
        folder.mkdir("a")
    assert folder.mkdir("a", exist_ok=True).kind == "directory"
    with pytest.raises(NotFound):
        folder.mkdir("x/y")
    folder.mkdir("x/y/z", parents=True)
    folder.write("x/f", b"")
    with pytest.raises(Conflict):
        folder.mkdir("x/f", exist_ok=True)
    with pytest.raises(Conflict, match="not a directory"):
        folder.mkdir("x/f/g", parents=True)
    with pytest.raises(InvalidRequest):
        folder.mkdir(".")
    assert [entry.path for entry in folder.list().entries] == ["a", "x"]
    assert [entry.path for entry in folder.list("x", recursive=True).entries] == ["x/f", "x/y", "x/y/z"]
    assert [entry.path for entry in folder.list(recursive=True, depth=2).entries] == ["a", "x", "x/f", "x/y"]
    with pytest.raises(Conflict, match="is a file, not a directory"):
        folder.list("x/f")


def test_move(folder: Folder, root: Path) -> None:
    folder.write("a", b"1")
    folder.write("b", b"2")
    with pytest.raises(Conflict, match="already exists"):
        folder.move("a", "b")
    assert folder.move("a", "b", overwrite=True).path == "b"
    assert folder.read("b").data == b"1"
    folder.move("b", "new/dir/c", parents=True)
    with pytest.raises(InvalidRequest, match="into itself"):
        folder.move("new", "new/dir/x")
    with pytest.raises(NotFound, match="nothing does not exist"):
        folder.move("nothing", "x")
    os.symlink("/etc/passwd", root / "l")
    assert folder.move("l", "m").kind == "link"


def test_copy(folder: Folder, root: Path, outside: Path, tmp_path: Path) -> None:
    folder.write("tree/sub/f", b"1", parents=True)
    (root / "tree/sub/f").chmod(0o6711)
    os.symlink("sub/f", root / "tree/inner")
    os.symlink(str(outside), root / "tree/outer")
    os.mkfifo(root / "tree/fifo")
    with pytest.raises(Conflict, match="set recursive"):
        folder.copy("tree", "copy")
    copied = folder.copy("tree", "copy", recursive=True)
    assert (copied.entries, copied.bytes, copied.skipped_count) == (4, 1, 2)
    assert "copy/fifo was left out: it is a FIFO" in copied.skipped
    assert os.readlink(root / "copy/inner") == "sub/f"
    assert (root / "copy/sub/f").stat().st_mode & 0o7777 == 0o711
    with pytest.raises(Conflict):
        folder.copy("tree", "copy", recursive=True)
    folder.copy("tree", "copy", recursive=True, overwrite=True)
    folder.copy("tree", "tree/self", recursive=True)  # ends
    other = tmp_path / "other"
    other.mkdir()
    with Folder(other, hidden=("f",)) as target, FolderView(root, hidden=("sub",)) as view:
        assert target.copy("tree", "t", view=view, recursive=True).entries >= 1
        assert sorted(os.listdir(other / "t")) == ["inner", "self"]
        with pytest.raises(NotFound):
            target.copy("tree/sub/f", "g", view=view)
        with pytest.raises(PolicyRefused):
            target.copy("copy/inner", "f", view=folder)
        assert target.copy("copy/inner", "deep/g", view=folder, parents=True).bytes == 1


def test_delete(folder: Folder, root: Path, outside: Path) -> None:
    folder.write("a/b/c", b"", parents=True)
    for name, target in (("out", str(outside)), ("in", "b"), ("loop", "loop")):
        os.symlink(target, root / "a" / name)
    with pytest.raises(Conflict, match="not empty"):
        folder.delete("a")
    assert folder.delete("a", recursive=True) == 6
    assert folder.delete("a", missing_ok=True) == 0
    with pytest.raises(NotFound):
        folder.delete("a")
    with pytest.raises(InvalidRequest, match="folder itself"):
        folder.delete("/workspace", recursive=True)


def test_odd_names_travel(folder: Folder, root: Path) -> None:
    (root / ODD).write_text("here")
    (entry,) = folder.list().entries
    carried = msgspec.json.decode(msgspec.json.encode(entry))["path"]
    assert carried == "new\nline \\xff.txt"
    assert folder.read(carried).data == folder.read(ODD).data == b"here"
    folder.move(carried, carried + "2")
    folder.copy(carried + "2", r"\x5cx41")
    assert set(os.listdir(root)) == {ODD + "2", r"\x41"}
    assert folder.delete(carried + "2") == 1


def test_read_only_names_are_read_and_not_changed(root: Path, has_openat2: bool) -> None:
    (root / "a/.git/hooks").mkdir(parents=True)
    (root / "a/.git/HEAD").write_text("ref")
    (root / "a/.git/hooks/pre-commit").write_text("exit")
    (root / "a/.envrc").write_text("exit")
    os.symlink("a/.git", root / "git")
    os.symlink("a/.git/hooks", root / "hooks")
    (root / "tree/.vscode").mkdir(parents=True)
    (root / "tree/.vscode/tasks.json").write_text("{}")
    (root / "tree/file").write_text("x")
    with Folder(root, (".env*",), read_only=(".git/hooks", ".vscode", ".envrc")) as folder:
        assert not folder.exists("a/.envrc"), "what both lists match is hidden"
    with Folder(root, read_only=(".git/hooks", ".git/config", ".vscode", ".envrc")) as folder:
        for path in ("a/.git/hooks/pre-commit", "git/hooks/pre-commit", "hooks/pre-commit", "a/.envrc"):
            assert folder.read(path).data.startswith(b"exit")
        assert len(folder.grep("exit").matches) == 2
        changes = (
            lambda path: folder.write(path, b"evil", parents=True),
            lambda path: folder.append(path, b"evil"),
            lambda path: folder.edit(path, "exit", "evil"),
            lambda path: folder.mkdir(path, parents=True),
            lambda path: folder.move("a/.git/HEAD", path, overwrite=True),
            lambda path: folder.move(path, "away"),
            lambda path: folder.copy("a/.git/HEAD", path, overwrite=True),
            lambda path: folder.delete(path, recursive=True),
            lambda path: folder.unpack(path),
        )
        for path in (
            "a/.git/hooks",
            "a/.git/hooks/pre-commit",
            "a/.git/hooks/new",
            "a/.GIT/HOOKS/new",
            "a/.git/config",
        ):
            for change in changes:
                with pytest.raises(
                    PolicyRefused, match=r"is read-only in sandboxes \(Policy\.read_only_files\)"
                ) as caught:
                    change(path)
                assert caught.value.setting == "Policy.read_only_files"
        for path in ("git/hooks/new", "hooks/new"):
            with pytest.raises((PolicyRefused, Conflict)):
                folder.write(path, b"evil")
        # A Git directory can be filled, and is neither replaced nor moved, and its parents are not either.
        folder.write("a/.git/refs/heads/config", b"1", parents=True)
        folder.mkdir("new/.git", parents=True)
        for change in (
            lambda: folder.write("new2/.git", b"gitdir: x", parents=True),
            lambda: folder.move("a/.git", "g"),
        ):
            with pytest.raises(PolicyRefused):
                change()
        for change in (lambda: folder.move("a", "b"), lambda: folder.delete("a", recursive=True)):
            with pytest.raises(Conflict, match="read-only in sandboxes"):
                change()
        copied = folder.copy("tree", "copy", recursive=True)
        assert sorted(os.listdir(root / "copy")) == ["file"]
        assert any("Policy.read_only_files" in sentence for sentence in copied.skipped)
    assert (root / "a/.git/hooks/pre-commit").read_text() == "exit"
    assert sorted(os.listdir(root / "a/.git")) == ["HEAD", "hooks", "refs"]


def test_names_of_several_parts_have_no_second_path(root: Path, has_openat2: bool) -> None:
    (root / ".config/gcloud").mkdir(parents=True)
    (root / ".config/gcloud/key").write_text("secret")
    os.symlink(".config", root / "settings")
    with Folder(root, (".config/gcloud",)) as folder:
        assert [entry.path for entry in folder.list("settings").entries] == []
        assert [entry.path for entry in folder.list(".config", recursive=True).entries] == []
        for path in ("settings/gcloud/key", "settings/gcloud", ".config/gcloud/key"):
            with pytest.raises(NotFound, match="hidden in sandboxes"):
                folder.stat(path)
        assert folder.grep("secret", "settings").matches == []
        folder.copy("settings", "copied", recursive=True)
    assert list((root / "copied").iterdir()) == []


def test_hidden_names_do_not_exist(root: Path, has_openat2: bool) -> None:
    (root / "a/.git").mkdir(parents=True)
    (root / "a/.git/config").write_text("secret")
    (root / ".env").write_text("secret")
    (root / "a/file").write_text("shown")
    os.symlink("../.env", root / "a/link")
    os.symlink("a/.git", root / "git")
    with Folder(root, hidden=(".*",)) as folder:
        for path in (".env", "a/.git", "a/.git/config", "a/link", "git/config", "git"):
            for look in (folder.stat, folder.read, folder.list, folder.download, folder.pack, folder.grep):
                with pytest.raises(NotFound, match="hidden in sandboxes") as caught:
                    look("secret", path) if look == folder.grep else look(path)
                assert caught.value.setting == "Policy.hidden_files"
            assert not folder.exists(path)
            with pytest.raises(NotFound):
                folder.copy(path, "copy", recursive=True)
        for path in (".new", ".d/x", "a/.git/x", ".env"):
            for make in (folder.mkdir, lambda path: folder.write(path, b""), lambda path: folder.move("a/file", path)):
                with pytest.raises(PolicyRefused, match="hidden in sandboxes"):
                    make(path)
            with pytest.raises((NotFound, PolicyRefused)):
                folder.delete(path, recursive=True)
        assert [entry.path for entry in folder.list(recursive=True).entries] == ["a", "git", "a/file", "a/link"]
        assert folder.glob("**/.*").entries == []
        assert folder.grep("secret").matches == []
        for change in (lambda: folder.delete("a", recursive=True), lambda: folder.move("a", "c")):
            with pytest.raises(Conflict, match="contains entries that are hidden"):
                change()
        assert (root / "a/file").exists()
        folder.copy("a", "b", recursive=True)
        assert sorted(os.listdir(root / "b")) == ["file"]
    assert (root / "a/.git/config").read_text() == "secret"


def test_quota(root: Path) -> None:
    with Folder(root, quota=100_000, quota_setting="Policy.profiles['x']['disk']") as folder:
        folder.write("a", b"x" * 50_000)
        with pytest.raises(TooLarge, match=r"limited to 100000 bytes \(Policy.profiles") as caught:
            folder.write("b", b"x" * 60_000)
        assert caught.value.setting == "Policy.profiles['x']['disk']"
        for refused in (
            lambda: folder.append("a", b"x" * 60_000),
            lambda: folder.copy("a", "c/d", parents=True) and folder.copy("a", "e"),
        ):
            with pytest.raises(TooLarge):
                refused()
        with folder.upload("b") as upload:
            with pytest.raises(TooLarge):
                upload.write(b"x" * 60_000)
        assert sorted(os.listdir(root)) in (["a"], ["a", "c"])
        folder.delete("a")
        folder.delete("c", recursive=True, missing_ok=True)
        folder.write("b", b"x" * 60_000)
        for number in range(40):
            (root / str(number)).touch()
        folder._used_until = 0.0
        assert folder.used().bytes > 100_000
        with pytest.raises(TooLarge):
            folder.write("z", b"x")


def test_many_threads(folder: Folder) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                folder.write(f"d{number}/f{turn}", b"x" * 1000, parents=True)
                folder.list(recursive=True)
                assert len(folder.list(f"d{number}").entries) == turn + 1
                folder.write("shared", str(number).encode())
            folder.delete(f"d{number}", recursive=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert [entry.path for entry in folder.list().entries] == ["shared"]
