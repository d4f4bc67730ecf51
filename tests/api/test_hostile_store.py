"""Whatever is done to the store on the disk, a live server refuses it, says so, and goes on with its sandboxes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.api import Api, Make

Change = Callable[[Path, Path, Path], object]


def flip(path: Path, other: Path, aside: Path) -> None:
    data = bytearray(aside.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


#: By name: from the place, the file of the same part of another snapshot, and what lay there.
CHANGES: dict[str, Change] = {
    "a bit flips": flip,
    "cut off": lambda path, other, aside: path.write_bytes(aside.read_bytes()[:-1]),
    "grown": lambda path, other, aside: path.write_bytes(aside.read_bytes() + b"x") if path.name != "pack" else None,
    "swapped": lambda path, other, aside: shutil.copy(other, path),
    "a link to the same": lambda path, other, aside: path.symlink_to(aside),
    "a link to what never ends": lambda path, other, aside: path.symlink_to("/dev/zero"),
    "a FIFO": lambda path, other, aside: os.mkfifo(path),
    "a folder": lambda path, other, aside: path.mkdir(),
    "gone": lambda path, other, aside: None,
}


@contextmanager
def changed(path: Path, other: Path, change: Change, aside: Path) -> Iterator[None]:
    path.rename(aside)
    try:
        change(path, other, aside)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


class Store:
    """A sandbox with two snapshots, and where they lie."""

    def __init__(self, api: Api, path: str, base: Path) -> None:
        self.api, self.path = api, path
        api.ok(
            "POST", path + "/code", {"code": "x = 'then'\nopen('kept', 'wb').write(__import__('os').urandom(200000))"}
        )
        self.saved = api.ok("POST", path + "/snapshots", {})
        api.ok("POST", path + "/code", {"code": "x = 'then, too'"})
        self.other = api.ok("POST", path + "/snapshots", {})
        api.ok("POST", path + "/code", {"code": "x = 'now'"})
        (self.folder,) = (
            found.parent.parent
            for found in (api.server.env.state_dir / "snapshots" / "owners").glob(f"*/snapshots/{self.saved['id']}")
        )

    def part(self, snapshot: str, name: str) -> Path:
        return self.folder / "packs" / snapshot if name == "pack" else self.folder / "snapshots" / snapshot / name

    def is_refused(self, snapshot: str) -> str:
        """Try all that opens a snapshot; return what was said."""
        error = self.api.fails(409, "POST", self.path + "/restore", {"snapshot": snapshot})
        assert error["reason"] == "damaged", error
        self.api.fails(409, "POST", self.path + "/fork", {"snapshot": snapshot, "id": "never"})
        self.api.fails(409, "GET", f"/snapshots/{snapshot}/export")
        self.api.ok("GET", self.path + "/snapshots")
        ran = self.api.ok("POST", self.path + "/code", {"code": "x"})
        assert ran["result"]["data"]["text/plain"] == "'now'", "the sandbox goes on as it was"
        self.api.fails(404, "GET", "/sandboxes/never")
        return str(error["message"])


@pytest.fixture
def store(api: Api, make: Make, tmp_path: Path) -> Iterator[Store]:
    made = Store(api, make(), tmp_path)
    yield made
    for snapshot in (made.saved, made.other):
        api("DELETE", f"/snapshots/{snapshot['id']}")


def test_what_was_changed_is_refused_and_said(store: Store, api: Api, tmp_path: Path) -> None:
    snapshot, other = store.saved["id"], store.other["id"]
    words = {"head": "head|description", "table": "table|description", "pack": "memory|kernel state|files|chunks"}
    for part, word in words.items():
        for name, change in CHANGES.items():
            if (part, name) == ("pack", "grown"):
                continue  # what nothing refers to is not read
            with changed(store.part(snapshot, part), store.part(other, part), change, tmp_path / "aside"):
                said = store.is_refused(snapshot)
                assert any(found in said for found in word.split("|")), (part, name, said)
    assert api.ok("GET", "/health")["status"] in ("ok", "degraded")
    api.ok("POST", store.path + "/restore", {"snapshot": snapshot})
    ran = api.ok("POST", store.path + "/code", {"code": "x"})
    assert ran["result"]["data"]["text/plain"] == "'then'", "all is as it was"


def test_what_another_wrote_is_refused(store: Store, api: Api, tmp_path: Path) -> None:
    """The same under another id; as another owner's; and with the files of the other in between."""
    snapshot = store.saved["id"]
    copies = [store.folder / "snapshots" / ("0" * 20)]
    shutil.copytree(store.part(snapshot, "head").parent, copies[0])
    assert "description" in store.is_refused("0" * 20)
    # Another owner's whole directory, under its own name.
    owners = store.folder.parent
    stranger = owners / ("f" * 32)
    shutil.copytree(store.folder, stranger)
    (stranger / "owner").write_text("stranger")
    copies.append(stranger)
    assert api.ok("GET", f"/snapshots/{snapshot}")["owner"] == store.saved["owner"]
    # What can't be read is its owner's to delete.
    damaged = store.part(store.other["id"], "head")
    damaged.write_bytes(b"nothing")
    store.is_refused(store.other["id"])
    assert api("DELETE", f"/snapshots/{store.other['id']}").status_code == 204
    api.fails(404, "POST", store.path + "/restore", {"snapshot": store.other["id"]})
    assert api("DELETE", "/snapshots/" + "0" * 20).status_code == 204
    shutil.rmtree(stranger)
