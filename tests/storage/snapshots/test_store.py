"""The store: what it keeps, for whom, how much of it, and what it clears away."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.snapshot_images import describe_tree, make_pages, make_store, meta, pages_of, put, store_files

from jupyter_agentbox.errors import (
    AgentboxError,
    Damaged,
    InvalidConfig,
    InvalidRequest,
    LimitReached,
    NotFound,
    TooLarge,
)
from jupyter_agentbox.sandbox.sweep import sweep_directories
from jupyter_agentbox.storage.snapshots import SnapshotStore, tree

SECRET = b"s" * 32


@pytest.fixture(params=[None, SECRET], ids=["plain", "encrypted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotStore:
    return make_store(tmp_path / "state", secret=request.param)


@pytest.mark.parametrize("kind", ["user", "auto", "park", "template"])
def test_what_was_put_in_comes_out(store: SnapshotStore, kind: str) -> None:
    pages = make_pages(300) + bytes(40960) + make_pages(3, 1)[:5000]
    made = put(
        store,
        pages,
        files={"a": b"hello", "empty": b"", "big": b"x" * 200_000},
        kind=kind,
        name="before the change",
        note="two\nlines",
        fingerprint={"runsc": "1"},
        record=b"\0record",
    )
    with store.checkout(made.id, "ada") as path:
        assert sorted(os.listdir(path / "image")) == ["checkpoint.img", "pages.img", "pages_meta.img"]
        assert (path / "image" / "pages.img").read_bytes() == pages
        assert (path / "image" / "checkpoint.img").read_bytes() == b"state " * 20_000
        assert {name: data[3] for name, data in describe_tree(path / "work").items()} == {
            b"a": b"hello",
            b"empty": b"",
            b"big": b"x" * 200_000,
        }
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not path.exists()
    assert store.list("ada") == [store.get(made.id, "ada")] == [made]
    assert (made.meta.name, made.meta.note, made.meta.record) == ("before the change", "two\nlines", b"\0record")
    assert made.size >= len(pages) - 40960


def test_everything_is_this_users_only(store: SnapshotStore, tmp_path: Path) -> None:
    os.umask(os.umask(0o022))
    put(store, make_pages(4))
    put(store, make_pages(4), kind="template")
    for path in (tmp_path / "state").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_an_encrypted_store_shows_nothing(tmp_path: Path) -> None:
    made = put(
        make_store(tmp_path / "state", secret=SECRET),
        b"memory secret " * 1000,
        state=b"state secret " * 9,
        record=b"record secret",
        files={"file-name": b"file secret"},
        kind="park",
        note="note secret",
    )
    kept = b"".join(path.read_bytes() for path in store_files(tmp_path / "state"))
    assert b"secret" not in kept
    assert b"file-name" not in kept
    with make_store(tmp_path / "state", secret=SECRET).checkout(made.id, "ada") as path:
        assert (path / "work" / "file-name").read_bytes() == b"file secret"


def test_another_key_opens_nothing(tmp_path: Path) -> None:
    made = put(make_store(tmp_path / "state", secret=SECRET), make_pages(2))
    for secret in (b"t" * 32, None):
        other = make_store(tmp_path / "state", secret=secret)
        assert other.list("ada") == []
        assert "another key" in other.damaged("ada")[made.id]
    with pytest.raises(InvalidConfig) as caught:
        make_store(tmp_path / "state", secret=b"short")
    assert caught.value.setting == "Policy.snapshot_key_file"


def test_the_key_is_made_once_and_must_be_private(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: make_store(tmp_path / "state"), range(16)))
    key = tmp_path / "state" / "snapshots.key"
    assert len({store._keys.id for store in stores}) == 1
    assert (stat.S_IMODE(key.stat().st_mode), key.stat().st_size) == (0o600, 32)
    key.chmod(0o644)
    with pytest.raises(InvalidConfig):
        make_store(tmp_path / "state")
    key.unlink()
    key.symlink_to("/etc/hostname")
    with pytest.raises(InvalidConfig):
        make_store(tmp_path / "state")


def test_nobody_sees_what_is_anothers(store: SnapshotStore) -> None:
    mine, other = put(store, make_pages(10)), put(store, make_pages(10), owner="bob/../ada")
    assert [found.id for found in store.list("ada")] == [mine.id]
    assert {found.id for found in store.list()} == {mine.id, other.id}
    for call in (store.get, store.delete, lambda *args: store.checkout(*args).__enter__()):
        for name in (other.id, "0" * 20, "../" + mine.id, "", "x" * 1000, ".new-" + mine.id):
            with pytest.raises(NotFound):
                call(name, "ada")
    # Nothing is shared either.
    assert abs(other.cost - mine.cost) <= 8192
    for owner in ("", "a\0b", "\udc80", "x" * 300):
        with pytest.raises(InvalidRequest):
            store.list(owner)


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", "x" * 101), ("name", "a\nb"), ("note", "\x1b[0m"), ("sandbox", "../x"), ("kind", "odd"), ("parent", "x"),
     ("fingerprint", {"a": "x" * 2000}), ("record", b"x" * (1 << 23)), ("owner", ""), ("created", float("nan"))],
)  # fmt: skip
def test_what_is_malformed_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        put(make_store(tmp_path / "state"), make_pages(1), **{field: value})
    assert caught.value.field == field


def test_too_many_are_refused_and_automatic_ones_give_way(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state", max_count=3)
    pages = make_pages(5)
    auto, named, user = (
        put(store, pages, kind=kind, name=name) for kind, name in (("auto", ""), ("auto", "keep"), ("user", ""))
    )
    fourth = put(store, pages, kind="auto", parent=auto.id)
    assert [found.id for found in store.list("ada")] == [named.id, user.id, fourth.id]
    fifth = put(store, pages)
    with pytest.raises(LimitReached) as caught:
        put(store, pages)
    assert caught.value.setting == "Policy.max_snapshots"
    assert [found.id for found in store.list("ada")] == [named.id, user.id, fifth.id]
    put(store, pages, owner="bob")
    assert all(pages_of(store, found) == pages for found in store.list())


def test_too_large_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state", max_bytes=3 << 20)
    with pytest.raises(LimitReached) as caught:
        put(store, make_pages(800))
    assert caught.value.setting == "Policy.max_snapshot_bytes"
    autos = [put(store, make_pages(300, seed), kind="auto", sandbox=f"s{seed}") for seed in range(2)]
    with pytest.raises(LimitReached):  # all of them would have to go, and it would still not fit
        put(store, make_pages(600), state=os.urandom(700_000))
    assert [found.id for found in store.list("ada")] == [found.id for found in autos]
    third = put(store, make_pages(300, 3), kind="park")
    assert [found.id for found in store.list("ada")] == [autos[1].id, third.id]
    staged = store.stage()
    (staged / "image" / "pages.img").write_bytes(make_pages(600))
    for kind in ("park", "user"):
        with pytest.raises(LimitReached):
            store.commit(staged, meta(kind=kind))
        assert (staged / "image" / "pages.img").stat().st_size == 600 * 4096  # still the caller's
    store.delete(third.id, "ada")
    store.commit(staged, meta())
    assert sum(found.cost for found in store.list("ada")) <= 3 << 20


def test_an_image_that_is_none_is_refused(store: SnapshotStore, tmp_path: Path) -> None:
    cases: list[tuple[type[AgentboxError], Callable[[Path], object]]] = [
        (InvalidRequest, lambda image: None),
        (InvalidRequest, lambda image: (image / "-odd").write_bytes(b"x")),
        (InvalidRequest, lambda image: [(image / f"f{number}").touch() for number in range(17)]),
        (Damaged, lambda image: (image / "folder").mkdir()),
        (Damaged, lambda image: (image / "pages.img").symlink_to("/etc/passwd")),
        (Damaged, lambda image: os.mkfifo(image / "pages.img")),
    ]
    for kind, make in cases:
        staged = store.stage()
        make(staged / "image")
        with pytest.raises(kind, match="the image") as caught:
            store.commit(staged, meta())
        assert type(caught.value) is kind
        assert caught.value.field == ("image" if kind is InvalidRequest else None)
        store.discard(staged)
    assert store.list() == []
    assert not list((tmp_path / "state" / "snapshots" / "owners").glob("*/packs/*"))


@pytest.mark.parametrize("by", ["the next server", "the sweeper"])
def test_what_killed_processes_left_is_removed_and_nothing_else(by: str, tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    made = put(store, make_pages(3))
    program = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from jupyter_agentbox.storage.snapshots import SnapshotStore
        store = SnapshotStore(Path(sys.argv[1]), max_bytes=1 << 30, max_count=9)
        staged = store.stage()
        (staged / "work" / "x").write_text("x")
        with store.checkout(sys.argv[2], "ada") as path:
            print(staged.name, path.name)
            sys.stdout.flush()
            os.kill(os.getpid(), 9)
    """)
    command = [sys.executable, "-c", program, str(tmp_path / "state"), made.id]
    names = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split()
    mine = store.stage()
    with store.checkout(made.id, "ada") as path:
        assert {*names} < {*os.listdir(mine.parent)}
        if by == "the sweeper":
            assert sweep_directories(tmp_path / "state") == []
        else:
            assert sorted(make_store(tmp_path / "state").sweep()) == sorted(names)
        assert sorted(os.listdir(mine.parent)) == sorted([mine.name, path.name])
        assert (mine / "work").is_dir()
        assert (path / "image").is_dir()
    store.discard(mine)
    assert os.listdir(mine.parent) == [] == store.sweep()


def test_memory_that_is_kept_is_read_again_unless_it_was_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_agentbox.storage.snapshots import store as module

    store = make_store(tmp_path / "state")
    made = put(store, make_pages(10), kind="template")
    read: list[int] = []
    real = module.hash_big
    monkeypatch.setattr(module, "hash_big", lambda *args: read.append(1) or real(*args))
    for verify, files in (("once", 3), ("once", 0), ("always", 3), ("once", 0)):
        read.clear()
        with store.checkout(made.id, "ada", verify=verify) as path:  # type: ignore[arg-type]
            assert len(read) == files
            assert (path / "image" / "pages.img").stat().st_mode & 0o222 == 0
            store.get(made.id, "ada")
    with store.checkout(made.id, "ada") as path:
        store.delete(made.id, "ada")
        assert (path / "image" / "pages.img").read_bytes() == make_pages(10)


def test_what_a_runtime_wrote_as_another_user_is_kept() -> None:
    """An ordinary user's runtime writes as one of the user's spare ids, whose files the user can only read."""
    program = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from jupyter_agentbox.storage.snapshots import SnapshotMeta, SnapshotStore
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(sys.argv[1], 65534, 65534)
            os.setegid(65534); os.seteuid(65534)
        store = SnapshotStore(Path(sys.argv[1]), max_bytes=1 << 30, max_count=9)
        for kind in ("user", "park"):
            staged = store.stage()
            image = staged / "image" / "pages.img"
            if is_root:
                os.seteuid(0)
            image.write_bytes(b"page" * 2000)
            image.chmod(0o644)
            if is_root:
                os.chown(image, 4321, 4321)
                os.seteuid(65534)
            made = store.commit(staged, SnapshotMeta(sandbox="a", owner="ada", kind=kind, created=1.0))
            with store.checkout(made.id, "ada") as path:
                assert (path / "image" / "pages.img").read_bytes() == b"page" * 2000
                assert (path / "image" / "pages.img").stat().st_uid == os.geteuid()
            store.delete(made.id, "ada")
    """)
    with tempfile.TemporaryDirectory() as base:  # pytest's own are closed to others
        os.chmod(base, 0o711)
        state = Path(base, "state")
        state.mkdir(mode=0o700)
        done = subprocess.run([sys.executable, "-c", program, str(state)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_owners_and_threads_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")

    def work(number: int) -> None:
        owner, pages = f"owner-{number % 2}", make_pages(20, number)
        made = put(store, pages, owner=owner)
        assert pages_of(store, made) == pages
        if number % 3 == 0:
            store.delete(made.id, owner)
        store.sweep()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(18)))
    assert len(store.list()) == 12


def test_what_is_deleted_while_it_is_laid_out_is_not_found_and_never_damaged(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    common = make_pages(300)
    kinds = ("user", "user", "park", "user", "template", "user", "user", "user")
    made = {put(store, make_pages(200, seed) + common, kind=kind).id: seed for seed, kind in enumerate(kinds)}

    def read(name: str) -> None:
        for _ in range(8):
            try:
                with store.checkout(name, "ada") as path:
                    assert (path / "image" / "pages.img").read_bytes() == make_pages(200, made[name]) + common
            except NotFound:
                assert name != list(made)[-1]

    with ThreadPoolExecutor(9) as pool:
        readers = [pool.submit(read, name) for name in made]
        for name in list(made)[:-1]:
            store.delete(name, "ada")
        for reader in readers:
            reader.result()
    assert [found.id for found in store.list("ada")] == list(made)[-1:]


def test_a_workspace_with_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MAX_ENTRIES", 5)
    store = make_store(tmp_path / "state")
    with pytest.raises(TooLarge):
        put(store, make_pages(1), files={str(number): b"" for number in range(6)})
    put(store, make_pages(1), files={str(number): b"" for number in range(5)})
