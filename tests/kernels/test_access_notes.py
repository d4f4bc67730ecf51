"""Which errors of cells are explained."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.notes import explain

from jupyter_agentbox.kernels.access_notes import AccessNotes
from jupyter_agentbox.sandbox.drivers.messages import Signer
from jupyter_agentbox.spec import Mount, SandboxSpec


def error(text: str, kind: str = "error") -> list[bytes]:
    return Signer(b"").message(b"topic", kind, {"ename": "OSError", "evalue": text, "traceback": ["x" * 100_000]})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    for name in ("a/.ssh", "a/.git"):
        (folder / name).mkdir(parents=True)
    for name in (".env", "a/.git/config", ".envrc"):
        (folder / name).touch()
    (tmp_path / "outside" / ".ssh").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to("loop")
    return folder


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[Errno 2] No such file or directory: 'a/.ssh/id_rsa'", "`a/.ssh` is hidden in sandboxes"),
        ("[Errno 13] Permission denied: '/workspace/.env'", "`.env` is hidden in sandboxes (Policy.hidden_files)"),
        ("ENOENT: no such file or directory, open './a/.ssh/x'", "`a/.ssh` is hidden"),
        ("No such file or directory (os error 2): \"a/.ssh/x\"", "`a/.ssh` is hidden"),
        ("[Errno 16] Device or resource busy: 'b' -> 'a/.git'", "`a/.git` contains entries that are read-only"),
        ("[Errno 30] Read-only file system: 'a/.git/config'", "`a/.git/config` is read-only in sandboxes"),
        ("[Errno 30] Read-only file system: '.envrc'", "`.envrc` is read-only in sandboxes (Policy.read_only_files)"),
    ],
)  # fmt: skip
def test_an_error_about_a_covered_entry_is_explained_once(folder: Path, text: str, words: str) -> None:
    notes = AccessNotes(SandboxSpec(workspace=folder), folder)
    (sentence,) = explain(notes, error(text))
    assert sentence.startswith(words)
    assert explain(notes, error(text)) == []


@pytest.mark.parametrize(
    "path", ["../data/x.csv", "/home/me/data/x.csv", "/srv/data", "elsewhere/x.csv", "a/up/x.csv", "/mnt/x"]
)
def test_a_missing_file_outside_the_work_folder_is_explained_once(folder: Path, path: str) -> None:
    (folder / "elsewhere").symlink_to("/home/me/data")
    (folder / "a" / "up").symlink_to("../../data")
    notes = AccessNotes(SandboxSpec(workspace=folder, mounts=(Mount(Path("/srv/shown"), "/mnt/shown"),)), folder)
    (sentence,) = explain(notes, error(f"[Errno 2] No such file or directory: '{path}'"))
    assert sentence.startswith(f"`{path}` is outside the notebook's folder")
    assert explain(notes, error(f"[Errno 2] No such file or directory: '{path}'")) == []
    assert explain(notes, error("[Errno 2] No such file or directory: '/mnt/shown/x'")) == []


@pytest.mark.parametrize(
    "message",
    [
        error("[Errno 2] No such file or directory: 'data.csv'"),
        error("[Errno 2] No such file or directory: '.env.local'"),
        error("[Errno 2] No such file or directory: '/etc/.env'"),
        error("[Errno 2] No such file or directory: 'a/../.env'"),
        error("[Errno 2] No such file or directory: 'link/.ssh'"),
        error("'.env'"),
        error("[Errno 13] Permission denied: '/srv/data'"),
        error("[Errno 2] No such file or directory: '/home/user/data'"),
        error("[Errno 2] No such file or directory: 'loop/x'"),
        error("[Errno 2] No such file or directory: '.env'", "stream"),
        error("Errno 2 '" + "x/" * 5000 + ".env'"),
        [b"nothing"],
    ],
)
def test_nothing_else_is_explained(folder: Path, message: list[bytes]) -> None:
    assert explain(AccessNotes(SandboxSpec(workspace=folder), folder), message) == []
