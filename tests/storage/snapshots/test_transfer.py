"""Exports: they come back whole, only under the same key, and nothing in them is believed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.snapshot_images import describe_tree, make_pages, make_store, meta, pages_of, put

from jupyter_agentbox.errors import AgentboxError, Damaged, InvalidRequest, LimitReached, NotAuthorized, NotFound
from jupyter_agentbox.storage.snapshots import SnapshotMeta, transfer
from jupyter_agentbox.storage.snapshots.tree import Entry

SECRET = b"k" * 32


def cut(data: bytes, rng: random.Random) -> Iterator[bytes]:
    while data:
        count = rng.choice([1, 7, 1000, 100_000, 3_000_000])
        yield data[:count]
        data = data[count:]


@pytest.mark.parametrize("kind", ["user", "template"])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_what_is_exported_can_be_imported(tmp_path: Path, secret: bytes | None, kind: str) -> None:
    store = make_store(tmp_path / "a", secret=secret)
    staged = store.stage()
    (staged / "image" / "pages.img").write_bytes(make_pages(300) + bytes(1 << 20) + make_pages(2))
    (staged / "image" / "checkpoint.img").write_bytes(b"state secret")
    work = staged / "work"
    (work / "sub").mkdir()
    (work / "sub" / "file").write_bytes(b"data secret")
    os.link(work / "sub" / "file", work / "sub" / "same")
    os.symlink("/etc/passwd", work / "link")
    with open(work / "sparse", "wb") as file:
        file.truncate(1 << 32)
    (work / "sub").chmod(0o500)
    made = store.commit(staged, meta(kind=kind, record=b"record secret", name="named", parent="0" * 20))
    data = b"".join(store.export(made.id, "ada"))
    assert (b"secret" in data) is (secret is None)
    assert len(data) < 3_000_000  # no holes
    # The same store, or another machine's that the administrator has given the same secret.
    other = store if secret is None else make_store(tmp_path / "b", secret=secret)
    again = other.import_(cut(data, random.Random(1)), "bob")
    assert again.meta == msgspec.structs.replace(made.meta, owner="bob", parent=None)
    with store.checkout(made.id, "ada") as one, other.checkout(again.id, "bob") as two:
        for name in ("pages.img", "checkpoint.img"):
            assert (one / "image" / name).read_bytes() == (two / "image" / name).read_bytes()
        for path in (one, two):
            assert (path / "work" / "sparse").stat().st_blocks == 0
            os.truncate(path / "work" / "sparse", 0)
            os.utime(path / "work" / "sparse", (1, 1))
        assert describe_tree(one / "work") == describe_tree(two / "work")
    for path in (tmp_path / "a", tmp_path / "b"):
        assert not path.exists() or os.listdir(path / "snapshots" / "live") == []
    with pytest.raises(NotFound):
        b"".join(store.export(made.id, "bob"))


def test_another_machines_is_refused_without_the_same_secret(tmp_path: Path) -> None:
    for number, (one, two) in enumerate([(None, None), (SECRET, b"x" * 32), (None, SECRET), (SECRET, None)]):
        store = make_store(tmp_path / f"a{number}", secret=one)
        data = b"".join(store.export(put(store, make_pages(2)).id, "ada"))
        other = make_store(tmp_path / f"b{number}", secret=two)
        with pytest.raises(Damaged, match=r"use the same Policy\.snapshot_key_file") as caught:
            other.import_([data], "ada")
        assert caught.value.setting == "Policy.snapshot_key_file"
        assert other.list() == []


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_what_was_changed_is_refused(tmp_path: Path, secret: bytes | None) -> None:
    store, rng = make_store(tmp_path / "state", secret=secret), random.Random(2)
    data = b"".join(store.export(put(store, make_pages(1), state=b"s", files={"f": b"f"}).id, "ada"))
    hostile = [data[:count] for count in (0, 5, 30, 60, len(data) // 2, len(data) - 1)]
    hostile += [data + b"x", data + data, b"x" + data, bytes(len(data)), b"PK\3\4" * 100]
    for _ in range(60):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        hostile.append(bytes(changed))
    # Frames in another order, left out, twice.
    frames, at = [], len(transfer._MAGIC) + 32
    head = data[:at]
    while at < len(data):
        size = 5 + int.from_bytes(data[at : at + 4], "little") + 32
        frames.append(data[at : at + size])
        at += size
    for number in range(len(frames) - 1):
        moved = list(frames)
        moved[number], moved[number + 1] = moved[number + 1], moved[number]
        hostile += [
            head + b"".join(some)
            for some in (moved, frames[:number] + frames[number + 1 :], [*frames[: number + 1], *frames[number:]])
        ]
    for stream in hostile:
        with pytest.raises(Damaged):
            store.import_([stream], "bob")
    assert store.list("bob") == []
    assert os.listdir(tmp_path / "state" / "snapshots" / "live") == []
    assert pages_of(store, store.import_([data], "bob")) == make_pages(1)


def test_one_that_must_not_be_is_refused_before_it_is(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    data = b"".join(store.export(put(store, make_pages(1), record=b"the record").id, "ada"))

    def refuse(told: SnapshotMeta) -> None:
        assert (told.owner, told.record) == ("ada", b"the record")
        assert store.list("bob") == []
        raise NotAuthorized("not for you")

    with pytest.raises(NotAuthorized, match="not for you"):
        store.import_([data], "bob", refuse)
    assert store.list("bob") == []
    assert os.listdir(tmp_path / "state" / "snapshots" / "live") == []


def forge(store_keys: transfer.Keys, *frames: tuple[int, bytes]) -> bytes:
    """Make a stream that the key is right for: as a store that hostile code had got hold of would."""
    salt = bytes(32)
    writer = transfer._Frames(store_keys, salt)
    return transfer._MAGIC + salt + b"".join(writer.write(kind, body) for kind, body in frames)


def entry(path: bytes, kind: str = "f", **fields: object) -> bytes:
    return msgspec.msgpack.encode(Entry(path, kind, **fields))  # type: ignore[arg-type]


META = (0, msgspec.msgpack.encode(meta()))
IMAGE = ((1, entry(b"pages.img", size=4)), (3, bytes(8) + b"page"))


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        (Damaged, []),
        (Damaged, [(4, b"")]),
        (InvalidRequest, [META, (4, b"")]),
        (Damaged, [META, META, *IMAGE, (4, b"")]),
        (Damaged, [*IMAGE, META, (4, b"")]),
        (Damaged, [META, *IMAGE]),
        (Damaged, [META, *IMAGE, (9, b"")]),
        (Damaged, [META, *IMAGE, (255, b"x"), (4, b"")]),
        (Damaged, [META, (3, bytes(8) + b"x"), *IMAGE, (4, b"")]),
        (Damaged, [META, *IMAGE, (3, (2).to_bytes(8, "little") + b"xyz"), (4, b"")]),
        (Damaged, [META, *IMAGE, (3, b"\xff" * 8 + b"xyz"), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, entry(b"d", "d")), (3, bytes(8) + b"x"), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, entry(b"../../x")), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, entry(b"/tmp/x")), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, entry(b"l", "l", target=b"/")), (2, entry(b"l/tmp/x")), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, entry(b"h", "h", target=b"../image/pages.img")), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, entry(b"x", size=1 << 62)), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, b"\xc1"), (4, b"")]),
        (Damaged, [META, *IMAGE, (2, msgspec.msgpack.encode(["x", "q"])), (4, b"")]),
        (Damaged, [META, (1, entry(b"sub/pages.img")), (4, b"")]),
        (Damaged, [META, (1, entry(b"pages.img", "l", target=b"/etc/passwd")), (4, b"")]),
        (InvalidRequest, [META, (1, entry(b"-odd name")), (4, b"")]),
        (Damaged, [(0, b"junk"), *IMAGE, (4, b"")]),
        (InvalidRequest, [(0, msgspec.msgpack.encode(meta(sandbox="../../x"))), *IMAGE, (4, b"")]),
        (InvalidRequest, [(0, msgspec.msgpack.encode(meta(record=b"x" * (5 << 20)))), *IMAGE, (4, b"")]),
        (LimitReached, [META, *IMAGE, *((3, bytes(8) + b"page"),) * 30_000, (4, b"")]),
    ],
)  # fmt: skip
def test_even_what_is_signed_is_not_believed(
    tmp_path: Path, kind: type[AgentboxError], frames: list[tuple[int, bytes]]
) -> None:
    store = make_store(tmp_path / "state", max_bytes=100_000)
    with pytest.raises(kind):
        store.import_([forge(store._keys, *frames)], "ada")
    assert store.list() == []
    assert sorted(os.listdir(tmp_path)) == ["state"]
    assert os.listdir(tmp_path / "state" / "snapshots" / "live") == []


def test_an_import_keeps_to_the_limits(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    data = b"".join(store.export(put(store, make_pages(50)).id, "ada"))
    for options in ({"max_bytes": 100_000}, {"max_count": 0}):
        with pytest.raises(LimitReached):
            make_store(tmp_path / "state", **options).import_([data], "bob")
    assert forge(store._keys, META)[:4] == data[:4]
    assert [found.meta.owner for found in store.list()] == ["ada"]
