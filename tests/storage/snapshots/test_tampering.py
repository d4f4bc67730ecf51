"""Whatever is changed on the disk, no snapshot opens as anything but what it was."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import pytest
from support.snapshot_images import describe_tree, make_pages, make_store, put, store_files

from jupyter_agentbox.errors import Damaged, NotFound
from jupyter_agentbox.storage.snapshots import Snapshot, SnapshotStore

SECRETS = [None, b"k" * 32]


def look(store: SnapshotStore, snapshot: Snapshot) -> object:
    with store.checkout(snapshot.id, "ada", verify="once") as path:
        image = {name: (path / "image" / name).read_bytes() for name in os.listdir(path / "image")}
        return store.get(snapshot.id, "ada").meta, image, describe_tree(path / "work")


def make_three(store: SnapshotStore) -> list[Snapshot]:
    first = put(store, make_pages(8), state=b"s" * 5000, files={"f": b"data" * 50})
    second = put(store, make_pages(8) + make_pages(2, 1), parent=first.id, files={"f": b"data" * 50, "g": b"g"})
    return [first, second, put(store, make_pages(3, 2), kind="template", state=b"t" * 100)]


@pytest.mark.parametrize("secret", SECRETS, ids=["plain", "encrypted"])
def test_any_bit_that_flips_is_found(tmp_path: Path, secret: bytes | None) -> None:
    """In every file, at the ends and in between: what needs the byte does not open, and the rest is as it was."""
    state = tmp_path / "state"
    store = make_store(state, secret=secret)
    made = make_three(store)
    expected = [look(store, snapshot) for snapshot in made]
    rng = random.Random(0)
    files = [path for path in store_files(state / "snapshots") if path.name != "owner"]
    assert len(files) >= 8
    for path in files:
        whole, times, mode = path.read_bytes(), path.stat(), path.stat().st_mode
        places = {
            0,
            min(8, len(whole) - 1),
            len(whole) - 1,
            len(whole) // 2,
            *(rng.randrange(len(whole)) for _ in range(2)),
        }
        for place in places:
            changed = bytearray(whole)
            changed[place] ^= 1 << rng.randrange(8)
            path.chmod(0o600)
            path.write_bytes(changed)
            path.chmod(mode)
            refused = 0
            for snapshot, was in zip(made, expected, strict=True):
                try:
                    # In a new process, as nothing that this one has verified counts then.
                    assert look(make_store(state, secret=secret), snapshot) == was
                except Damaged:
                    refused += 1
            assert refused, (path, place)
        path.chmod(0o600)
        path.write_bytes(whole)
        path.chmod(mode)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [look(make_store(state, secret=secret), snapshot) for snapshot in made] == expected


def damage(path: Path, data: bytes) -> None:
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["user", "template"])
def test_the_error_says_which_part(tmp_path: Path, kind: str) -> None:
    store = make_store(tmp_path / "state")
    made = put(store, make_pages(4), state=b"KERNEL" + os.urandom(3000), files={"f": b"FILES" * 100}, kind=kind)
    (owner,) = (tmp_path / "state" / "snapshots" / "owners").iterdir()
    texts = {"memory": make_pages(4)[:100], "kernel state": b"KERNEL", "files": b"FILES"}
    for part, text in texts.items():
        (path,) = [path for path in store_files(owner) if text in path.read_bytes()]
        whole = path.read_bytes()
        damage(path, whole.replace(text, text[:-1] + bytes([text[-1] ^ 1]), 1))
        with pytest.raises(Damaged, match=f"the snapshot's {part} was changed on disk"):
            look(store, made)
        damage(path, whole)
    damage(owner / "snapshots" / made.id / "head", b"x" * 1000)
    with pytest.raises(Damaged, match="description"):
        look(store, made)
    assert store.list("ada") == []
    assert list(store.damaged("ada")) == [made.id]
    store.delete(made.id, "ada")
    assert store.damaged("ada") == {}


def test_cut_off_swapped_linked_and_missing_files_are_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    store = make_store(state)
    made = make_three(store)
    for path in store_files(state / "snapshots" / "owners"):
        if path.name == "owner":
            continue
        whole, aside = path.read_bytes(), tmp_path / "aside"
        path.rename(aside)
        for make in (
            lambda path: None,
            lambda path: path.symlink_to(tmp_path / "aside"),
            lambda path: os.mkfifo(path),
            lambda path: path.mkdir(),
            lambda path, whole=whole: path.write_bytes(whole[:-1]),
            lambda path: path.write_bytes(b""),
            lambda path, whole=whole: path.write_bytes(bytes(len(whole))),
            lambda path: path.symlink_to("/dev/zero"),
        ):
            make(path)
            results = []
            for snapshot in made:
                try:
                    look(make_store(state), snapshot)
                except Damaged as error:
                    results.append(str(error))
            assert results, path
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        aside.rename(path)
    for snapshot in made:
        look(make_store(state), snapshot)


def test_what_is_moved_to_another_id_owner_or_kind_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    mine, other = put(store, make_pages(3)), put(store, make_pages(3), owner="bob")
    owners = tmp_path / "state" / "snapshots" / "owners"
    folders = {path.read_text(): path.parent for path in owners.glob("*/owner")}
    theirs, own = folders["bob"], folders["ada"]
    # Another's snapshot, under its own id and under mine; with its pack.
    for name in (other.id, "0" * 20):
        shutil.copytree(theirs / "snapshots" / other.id, own / "snapshots" / name)
    shutil.copy(theirs / "packs" / other.id, own / "packs" / other.id)
    # Mine under another id; a snapshot with the table of another of mine.
    shutil.copytree(own / "snapshots" / mine.id, own / "snapshots" / ("1" * 20))
    second = put(store, make_pages(2))
    shutil.copy(own / "snapshots" / mine.id / "table", own / "snapshots" / second.id / "table")
    for name in (other.id, "0" * 20, "1" * 20, second.id):
        with pytest.raises(Damaged), store.checkout(name, "ada"):
            pass
    (own / "snapshots" / ("2" * 20)).symlink_to(theirs / "snapshots" / other.id)
    with pytest.raises((Damaged, NotFound)), store.checkout("2" * 20, "ada"):
        pass
    # The whole directory of another owner's under my name.
    shutil.rmtree(own)
    shutil.copytree(theirs, own)
    (own / "owner").write_text("ada")
    with pytest.raises(Damaged), make_store(tmp_path / "state").checkout(other.id, "ada"):
        pass


def test_what_is_damaged_keeps_the_rest_from_nothing(tmp_path: Path) -> None:
    """Nobody knows what it needs, so nothing is freed until it goes; then all is."""
    store = make_store(tmp_path / "state", max_count=4)
    first = put(store, make_pages(100))
    second = put(store, make_pages(99) + make_pages(1, 7), parent=first.id)
    (owner,) = (tmp_path / "state" / "snapshots" / "owners").iterdir()
    whole = (owner / "snapshots" / second.id / "head").read_bytes()
    damage(owner / "snapshots" / second.id / "head", whole[:-1])
    store.delete(first.id, "ada")
    damage(owner / "snapshots" / second.id / "head", whole)
    assert look(store, second)
    damage(owner / "snapshots" / second.id / "head", whole[:-1])
    put(store, make_pages(1, 8), parent=second.id)
    store.delete(second.id, "ada")
    assert len(list((owner / "packs").iterdir())) == 1


def test_errors_tell_no_secret_and_no_path(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    made = put(store, make_pages(2), record=b"hidden")
    for path in (tmp_path / "state" / "snapshots" / "owners").glob("*/packs/*"):
        path.unlink()
    with pytest.raises(Damaged) as caught:
        look(store, made)
    assert not re.search(r"hidden|/", str(caught.value))
