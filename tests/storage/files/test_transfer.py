"""Streams in and out: whole and verified, or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound, RuntimeFailed, TooLarge
from jupyter_agentbox.storage.files import Folder

DATA = os.urandom(3_000_000)
DIGEST = hashlib.sha256(DATA).hexdigest()


def send(folder: Folder, **options: object) -> object:
    with folder.upload("a/file", parents=True, **options) as upload:  # type: ignore[arg-type]
        for start in range(0, len(DATA), 700_000):
            upload.write(DATA[start : start + 700_000])
            assert not folder.exists("a/file")
        return upload.finish()


def test_up_and_down(folder: Folder) -> None:
    assert send(folder, size=len(DATA), sha256=DIGEST.upper()) == folder.stat("a/file")
    with folder.download("a/file") as download:
        assert download.size == len(DATA)
        assert b"".join(download) == DATA
        assert download.sha256() == DIGEST
    with folder.download("a/file", offset=10, length=5) as download:
        assert download.sha256() == hashlib.sha256(DATA[10:15]).hexdigest()
        assert b"".join(download) == DATA[10:15]
    with pytest.raises(NotFound):
        folder.download("b")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"size": len(DATA) + 1}, InvalidRequest),
        ({"size": len(DATA) - 1}, InvalidRequest),
        ({"size": -1}, InvalidRequest),
        ({"sha256": "0" * 64}, InvalidRequest),
        ({"sha256": "0" * 63}, InvalidRequest),
        ({"max_size": 1_000_000}, TooLarge),
        ({"max_size": 1_000_000, "size": len(DATA)}, TooLarge),
    ],
)
def test_nothing_appears_unless_it_is_what_was_announced(
    folder: Folder, root: Path, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        send(folder, **options)
    assert not (root / "a").exists() or os.listdir(root / "a") == []


def test_a_client_that_hangs_up_leaves_nothing(folder: Folder, root: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with folder.upload("f") as upload:
            upload.write(b"x")
            raise ZeroDivisionError
    with folder.upload("f") as upload:
        upload.write(b"x")
    assert os.listdir(root) == []


def test_two_uploads_of_one_new_file(folder: Folder) -> None:
    with folder.upload("f", overwrite=False) as one, folder.upload("f", overwrite=False) as two:
        one.write(b"1")
        two.write(b"2")
        two.finish()
        with pytest.raises(Conflict, match="already exists"):
            one.finish()
    assert folder.read("f").data == b"2"


def test_a_file_that_changes_under_a_download(folder: Folder, root: Path) -> None:
    folder.write("f", DATA)
    with folder.download("f") as download:
        download.sha256()
        with open(root / "f", "r+b") as file:
            file.write(b"other")
        with pytest.raises(Conflict, match="changed"):
            list(download)
        os.truncate(root / "f", 100)
        with pytest.raises(Conflict, match="shorter"):
            list(download)
        with open(root / "f", "ab") as file:
            file.write(DATA * 2)
        with folder.download("f", length=10) as part:
            assert sum(map(len, part)) == 10


def test_what_is_closed_is_no_other_file(folder: Folder, root: Path, tmp_path: Path) -> None:
    # A thread still at work must not find its descriptor's number taken by somebody else's file.
    folder.write("f", DATA)
    download = folder.download("f")
    chunks = iter(download)
    next(chunks)
    with download:
        pass
    fds = [os.open(tmp_path, os.O_RDONLY) for _ in range(5)]
    assert download.fd not in fds
    with pytest.raises(RuntimeFailed):
        next(chunks)
    with Folder(root) as other:
        tree = other._tree
    fds += [os.open(tmp_path, os.O_RDONLY) for _ in range(5)]
    assert tree.fd not in fds
    for attempt in (lambda: other.read("f"), lambda: other.write("g", b""), other.list, other.used):
        with pytest.raises(Conflict, match="not a directory"):
            attempt()
    upload = folder.upload("h")
    upload.abort()
    with pytest.raises(RuntimeFailed, match="Bad file descriptor"):
        upload.write(b"x")
    with pytest.raises(RuntimeFailed, match="Bad file descriptor"):
        upload.finish()
    for fd in fds:
        os.close(fd)
    del download, chunks
