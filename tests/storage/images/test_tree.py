"""Archives that may be hostile, and trees: unpacked, cleaned, hashed, kept, moved."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.trees import SYSTEM, keep, make_tar

from jupyter_agentbox.errors import Conflict, Damaged, InvalidRequest, NotFound, TooLarge
from jupyter_agentbox.storage.images import ImageStore, archive, customize, tree
from jupyter_agentbox.storage.images.values import make_recipe


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder outside of the tree, which stays as it is."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("mine")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "mine"


@pytest.fixture
def unpack(tmp_path: Path) -> Callable[..., Path]:
    def unpack(archive: io.BytesIO, max_bytes: int = 10**9) -> Path:
        top = tmp_path / "top"
        top.mkdir()
        unpacker = tree.Unpacker(top, max_bytes)
        unpacker.add(archive)
        unpacker.finish()
        return top

    return unpack


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "state")


def test_a_system_is_unpacked_without_owners_devices_and_set_user_id_bits(unpack: Callable[..., Path]) -> None:
    top = unpack(
        make_tar(*SYSTEM, ("device", "dev/null", None), ("pipe", "run/pipe", None), ("hard", "x", "usr/bin/sh"))
    )
    assert os.readlink(top / "bin") == "usr/bin"
    assert stat.S_IMODE((top / "usr/bin/sh").stat().st_mode) == 0o755
    assert (top / "x").samefile(top / "usr/bin/sh")
    assert not (top / "dev/null").exists()
    assert not (top / "run/pipe").exists()


@pytest.mark.parametrize("name", ["../x", "usr/../../x", "/..", "a/" * 200 + "x", "a" * 256, "x/.."])
def test_no_name_leads_out(unpack: Callable[..., Path], name: str) -> None:
    with pytest.raises(Damaged):
        unpack(make_tar(("file", name, "x")))


@pytest.mark.parametrize("target", ["{victim}", "../outside", "../../../../../../../../../..{victim}"])
def test_no_link_leads_out(unpack: Callable[..., Path], victim: Path, target: str) -> None:
    target = target.format(victim=victim)
    top = unpack(
        make_tar(
            ("link", "way", target),
            ("file", "way/file", "theirs"),
            ("folder", "way/folder", None),
            ("link", "way/link", "x"),
            ("link", "etc", target),
            ("file", "etc/file", "theirs"),
        )
    )
    assert os.readlink(top / "way") == target
    assert not list(victim.glob("folder"))


def test_no_second_name_is_of_a_file_outside(unpack: Callable[..., Path], victim: Path) -> None:
    with pytest.raises(Damaged):
        unpack(make_tar(("link", "way", str(victim)), ("hard", "stolen", "way/file")))


def test_links_in_a_circle_end(unpack: Callable[..., Path]) -> None:
    with pytest.raises(Damaged, match="circle"):
        unpack(make_tar(("link", "a", "b"), ("link", "b", "a"), ("file", "a/x", "")))


def test_what_comes_later_replaces_what_was(unpack: Callable[..., Path]) -> None:
    top = unpack(
        make_tar(
            ("file", "a", "1"), ("file", "a", "2"), ("folder", "b/c", None), ("file", "b", "3"), ("link", "b", "a")
        )
    )
    assert (top / "a").read_text() == "2"
    assert os.readlink(top / "b") == "a"


def test_what_is_too_large_is_refused(
    unpack: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(TooLarge, match="larger than"):
        unpack(make_tar(("file", "a", "x" * 60), ("file", "b", "x" * 60)), max_bytes=100)
    monkeypatch.setattr(tree, "MAX_ENTRIES", 3)
    (tmp_path / "top").rename(tmp_path / "first")
    with pytest.raises(TooLarge, match="3 files"):
        unpack(make_tar(*SYSTEM))


ONE_HEADER = make_tar(("folder", "a", "")).getvalue()[:512]


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("before", [b"", ONE_HEADER], ids=["first", "later"])
def test_a_name_of_a_gigabyte_is_not_read(unpack: Callable[..., Path], kind: bytes, before: bytes) -> None:
    member = tarfile.TarInfo("././@LongLink")
    member.type, member.size = kind, 1 << 30
    with pytest.raises(Damaged, match="too long"):
        unpack(io.BytesIO(before + member.tobuf(tarfile.GNU_FORMAT) + bytes(1024)))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"nothing of the kind", gzip.compress(b"x" * 2000), make_tar(*SYSTEM).getvalue()[:1800],
        ONE_HEADER, ONE_HEADER + b"?" * 512 + bytes(1024),
    ],
    ids=["empty", "text", "no archive in gzip", "cut off", "cut off at a header", "damaged header"],
)  # fmt: skip
def test_what_is_no_archive_is_damaged(unpack: Callable[..., Path], data: bytes) -> None:
    with pytest.raises(Damaged):
        unpack(io.BytesIO(data))


def test_an_address_is_that_of_the_content_alone(store: ImageStore, tmp_path: Path) -> None:
    first = keep(store, "one", ("file", "var/log/x", "a"), ("file", "etc/machine-id", "5678"))
    (tmp_path / "state" / "images" / first.address).rename(tmp_path / "kept")
    again = keep(store, "one", ("file", "tmp/x", "b"), ("device", "dev/x", None), ("file", "var/cache/apt/x", "c"))
    assert again.address == first.address
    assert not (store.root(again) / "etc/machine-id").exists()
    others = [keep(store, "two"), keep(store, "one", ("file", "a", "")), keep(store, "one", ("program", "a", ""))]
    others += [keep(store, "one", ("folder", "a", None)), keep(store, "one", ("link", "a", "x"))]
    assert len({first.address, *(image.address for image in others)}) == 6


def test_an_image_is_found_by_name_and_address_and_the_newest_is_meant(store: ImageStore) -> None:
    old, new = keep(store, "one", ("file", "a", "1")), keep(store, "one", ("file", "a", "2"))
    assert store.get("one") == new
    for reference in (old.address, old.address[:12], f"one@{old.address[:12]}"):
        assert store.get(reference) == old
    assert keep(store, "one", ("file", "a", "1")).address == old.address
    assert store.get("one").address == old.address, "what was built last"
    assert len(store.list()) == 2
    for reference in ("other", "two@" + old.address, old.address[:11]):
        with pytest.raises(NotFound, match="images are: one"):
            store.get(reference)
    for reference in ("../x", "one@", "One", "one@../x", ""):
        with pytest.raises(InvalidRequest):
            store.get(reference)


def test_a_changed_image_is_found_out(store: ImageStore) -> None:
    image = keep(store, "one")
    store.verify(image)
    (store.root(image) / "usr/bin/sh").write_text("evil")
    with pytest.raises(Damaged, match="was changed"):
        store.verify(image)
    described = store.directory / image.address / "image.json"
    described.write_text(described.read_text().replace(image.address, "0" * 64))
    assert store.list() == []


@pytest.mark.parametrize("name", ["usr/bin/python3", "usr/bin/python3.11", "bin"])
def test_a_tree_that_no_sandbox_can_run_on_is_refused_and_leaves_nothing(store: ImageStore, name: str) -> None:
    left = [entry for entry in SYSTEM if entry[1] != name]
    with pytest.raises(InvalidRequest), store.staging() as folder:
        (folder / "rootfs").mkdir()
        unpacker = tree.Unpacker(folder / "rootfs")
        unpacker.add(make_tar(*left))
        unpacker.finish()
        store.add(folder, make_recipe("one"))
    assert list(store.directory.iterdir()) == []


def test_an_image_that_a_sandbox_runs_on_stays(store: ImageStore) -> None:
    image = keep(store, "one")
    box = store.state_dir / "sandboxes" / "x"
    box.mkdir(parents=True)
    (box / "state.json").write_text(json.dumps({"spec": {"root": str(store.root(image))}}))
    with pytest.raises(Conflict, match="sandbox x"):
        store.remove(image)
    (box / "state.json").unlink()
    store.remove(image)
    assert store.list() == []
    assert list(store.directory.iterdir()) == []


@pytest.mark.parametrize("name", ["image.tar", "image.tar.gz"])
def test_an_image_goes_to_another_machine_in_a_file(store: ImageStore, tmp_path: Path, name: str) -> None:
    image = keep(store, "one", ("file", "opt/é", "ü"), ("file", "opt/long" + "g" * 150, "x"))
    archive.export_image(store, image, tmp_path / name)
    with pytest.raises(Conflict):
        archive.export_image(store, image, tmp_path / name)
    other = ImageStore(tmp_path / "other")
    assert archive.import_image(other, tmp_path / name).address == image.address
    other.verify(other.get("one"))


def test_a_file_that_was_changed_on_its_way_is_refused(store: ImageStore, tmp_path: Path) -> None:
    image = keep(store, "one", ("file", "opt/x", "innocent"))
    archive.export_image(store, image, tmp_path / "image.tar")
    data = (tmp_path / "image.tar").read_bytes()
    other = ImageStore(tmp_path / "other")
    described = data.index(b'"name"')
    for changed in (
        data.replace(b"innocent", b"infected"),
        data[:described] + data[described:].replace(b'"one"', b'"two"', 1),
        data[: len(data) // 2],
        data[:-20480] if len(data) > 40960 else data[:2048],
    ):
        (tmp_path / "changed.tar").write_bytes(changed)
        with pytest.raises((Damaged, InvalidRequest)):
            archive.import_image(other, tmp_path / "changed.tar")
    assert list(other.directory.iterdir()) == []


def test_only_exported_images_are_imported(store: ImageStore, tmp_path: Path) -> None:
    manifest = ("file", "manifest.json", "[]")
    for entries in ([("file", ".dockerenv", ""), *SYSTEM], [manifest, *SYSTEM], [("link", "image.json", "x")], []):
        (tmp_path / "other.tar").write_bytes(make_tar(*entries).getvalue())
        with pytest.raises(Damaged, match="not written by `jupyter agentbox image export`"):
            archive.import_image(store, tmp_path / "other.tar")
    (tmp_path / "other.tar").write_bytes(make_tar(("file", "image.json", "{}"), *SYSTEM).getvalue())
    with pytest.raises(InvalidRequest, match="malformed"):
        archive.import_image(store, tmp_path / "other.tar")
    assert list(store.directory.iterdir()) == []


def test_what_a_recipe_adds_stays_in_the_tree(unpack: Callable[..., Path], victim: Path) -> None:
    top = unpack(make_tar(*SYSTEM, ("link", "opt", str(victim)), ("link", "etc/x", str(victim / "file"))))
    customize.write_file(top, "/etc/x", "theirs")
    customize.write_file(top, "/bin/tool", "#!/bin/sh\n")
    customize.make_link(top, "/bin/py", "/usr/bin/python3.*")
    assert not (top / "etc/x").is_symlink()
    assert stat.S_IMODE((top / "usr/bin/tool").stat().st_mode) == 0o755
    assert os.readlink(top / "usr/bin/py") == "/usr/bin/python3.11"
    with pytest.raises(InvalidRequest):
        customize.write_file(top, "/../x", "theirs")
    for name in ("/opt/file", "/opt/folder/file"):
        with pytest.raises(InvalidRequest, match="broken link"):
            customize.write_file(top, name, "theirs")
    tree.clean(top)


def test_a_tree_deeper_than_python_can_recurse_is_walked_in_order_and_removed(tmp_path: Path) -> None:
    top = tmp_path / "tmp"
    deepest = top.joinpath(*["d"] * 1200)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        for name in ("tmp", *["d"] * 1200):
            os.mkdir(name, dir_fd=handle)
            below = os.open(name, os.O_RDONLY, dir_fd=handle)
            os.close(handle)
            handle = below
    finally:
        os.close(handle)
    (top / "a").touch()
    (top / "d" / "a").touch()
    names = [path.relative_to(top).as_posix() for path, _ in tree.walk(top)]
    assert names[:4] == ["a", "d", "d/a", "d/d"]
    assert names[-1] == deepest.relative_to(top).as_posix()
    tree.clean(tmp_path)
    assert os.listdir(top) == []
