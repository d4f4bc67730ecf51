"""Directories out as archives, hostile ones among them; archives in, hostile ones among them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.trees import make_device

from jupyter_agentbox.errors import AgentboxError, Conflict, InvalidRequest, TooLarge
from jupyter_agentbox.storage.files import Copied, Folder

ODD = os.fsdecode(b"odd\n\xff")


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8", errors="surrogateescape") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **values: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in values.items():
        setattr(info, key, value)
    return info, data


def zipped(*members: tuple[str, bytes], mode: int = 0o100644) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def unpack(folder: Folder, data: bytes, path: str = "in", **options: object) -> Copied:
    with folder.unpack(path, len(data), hashlib.sha256(data).hexdigest(), **options) as upload:  # type: ignore[arg-type]
        upload.write(data)
        return upload.finish()


@pytest.fixture
def tree(folder: Folder, root: Path, outside: Path) -> Path:
    """A tree of everything."""
    folder.write("t/sub/f", b"x" * 100_000, parents=True)
    folder.write("t/" + "n" * 200 + "/" + "m" * 200, b"long", parents=True)
    (root / "t" / ODD).write_text("odd")
    (root / "t/empty").mkdir()
    (root / "t/sub/f").chmod(0o6755)
    os.symlink("sub/f", root / "t/inner")
    os.symlink(str(outside / "secret"), root / "t/outer")
    os.symlink(str(outside), root / "t/outerdir")
    os.symlink("loop", root / "t/loop")
    os.mkfifo(root / "t/fifo")
    make_device(root / "t/device")
    return root / "t"


def test_tar_there_and_back(folder: Folder, root: Path, tree: Path) -> None:
    with folder.pack("t") as packed:
        data = b"".join(packed)
        assert packed.skipped.count == 2
        assert packed.skipped.sentences[1] == "fifo was left out: it is a FIFO"
        assert packed.bytes == 100_007
    assert b"canary" not in data
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        found = {info.name: info for info in archive.getmembers()}
    assert len(found) == packed.entries
    assert found["outer"].issym()
    assert found["sub/f"].mode == 0o755
    copied = unpack(folder, data)
    assert copied.sha256 == hashlib.sha256(data).hexdigest()
    assert (copied.bytes, copied.skipped_count) == (100_007, 2)
    assert "outside" in copied.skipped[0]
    assert (root / "in" / ODD).read_text() == "odd"
    assert (root / "in/sub/f").read_bytes() == b"x" * 100_000
    assert os.readlink(root / "in/inner") == "sub/f"
    assert not (root / "in/outer").is_symlink()
    again = unpack(folder, gzip.compress(data))
    assert again.entries == copied.entries


def test_zip_there_and_back(folder: Folder, root: Path, tree: Path) -> None:
    with folder.pack("t", "zip") as packed:
        data = b"".join(packed)
        assert packed.skipped.count == 6
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert "odd\n\\xff" in archive.namelist()
    assert unpack(folder, data).bytes == 100_007
    assert (root / "in/sub/f").read_bytes() == b"x" * 100_000
    assert (root / "in/empty").is_dir()


def test_an_archive_over_its_limits_is_refused_before_its_first_byte(folder: Folder, root: Path, tree: Path) -> None:
    for limits in ({"max_entries": 3}, {"max_bytes": 1000}):
        with pytest.raises(TooLarge):
            folder.pack("t", **limits)
    with open(root / "t/sparse", "wb") as file:
        file.truncate(1 << 40)
    for kind in ("tar", "zip"):
        with pytest.raises(TooLarge, match="larger than the"):
            folder.pack("t", kind)
    with pytest.raises(InvalidRequest):
        folder.pack("t", "rar")
    with pytest.raises(Conflict):
        folder.pack("t/sub/f")


def test_files_that_change_while_they_are_packed(folder: Folder, root: Path, outside: Path) -> None:
    for name in "abcd":
        folder.write(f"t/{name}", b"1" * 5000, parents=True)
    with folder.pack("t") as packed:
        os.truncate(root / "t/a", 10)
        (root / "t/b").write_bytes(b"2" * 9000)
        (root / "t/c").unlink()
        os.symlink(str(outside / "secret"), root / "t/c")
        (root / "t/d").unlink()
        os.mkfifo(root / "t/d")
        data = b"".join(packed)
        assert packed.skipped.count == 3
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert [(info.name, info.size) for info in archive.getmembers()] == [("a", 5000), ("b", 5000)]
        member = archive.extractfile("b")
        assert member is not None
        assert member.read() == b"2" * 5000


@pytest.mark.parametrize(
    "data",
    [
        tar(member("ok", data=b"1"), member("../evil", data=b"1")),
        tar(member("ok", data=b"1"), member("/evil", data=b"1")),
        tar(member("ok", data=b"1"), member("a/../../evil", data=b"1")),
        tar(member("ok", data=b"1"), member("x" * 256, data=b"1")),
        zipped(("ok", b"1"), ("../evil", b"1")),
        zipped(("ok", b"1"), ("/evil", b"1")),
        b"",
        b"PK\x03\x04 no zip",
        b"\x1f\x8b no gzip",
        os.urandom(5000),
        tar(member("ok", data=b"1" * 100_000))[:50_000],
        tar(member("ok", data=b"1"), member("two"))[: 3 * 512],
        tar(member("ok", data=b"1"), member("two")).replace(b"two", b"not"),
        gzip.compress(tar(member("ok", data=os.urandom(100_000))))[:50_000],
        zipped(("ok", b"1" * 1000))[:-30],
    ],
)
def test_a_hostile_or_broken_archive_makes_nothing(root: Path, outside: Path, data: bytes) -> None:
    with Folder(root) as folder:
        with pytest.raises(InvalidRequest):
            unpack(folder, data)
    assert os.listdir(root / "in") == []
    assert not (root / "evil").exists()


def test_links_never_carry_a_file_outside(folder: Folder, root: Path, outside: Path) -> None:
    out = str(outside)
    links = [
        member("abs", tarfile.SYMTYPE, linkname=out),
        member("up", tarfile.SYMTYPE, linkname="../../outside"),
        member("d/tricky", tarfile.SYMTYPE, linkname="../d/../../../outside"),
        member("gone", tarfile.LNKTYPE, linkname="nothing"),
        member("fifo", tarfile.FIFOTYPE),
        member("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        member("setuid", data=b"x", mode=0o6777),
        member("twin", tarfile.LNKTYPE, linkname="setuid"),
        member("good", tarfile.SYMTYPE, linkname="setuid"),
    ]
    for target in (out + "/secret", "../../outside/secret"):
        with pytest.raises(InvalidRequest):
            unpack(folder, tar(member("hard", tarfile.LNKTYPE, linkname=target)))
    copied = unpack(folder, tar(*links))
    assert copied.skipped_count == 6
    assert sorted(os.listdir(root / "in")) == ["good", "setuid", "twin"]
    assert (root / "in/setuid").stat().st_mode & 0o7777 == 0o777
    assert (root / "in/twin").samefile(root / "in/setuid")


def test_a_hard_link_does_not_carry_a_link_to_where_it_leads_outside(folder: Folder, root: Path) -> None:
    data = tar(
        member("a/b/x", data=b"x"),
        member("a/b/x", tarfile.SYMTYPE, linkname="../../y"),
        member("z", tarfile.LNKTYPE, linkname="a/b/x"),
    )
    assert unpack(folder, data).skipped == ["in/z was left out: it is a hard link"]
    assert os.readlink(root / "in/a/b/x") == "../../y"
    assert not (root / "in/z").is_symlink()


def test_a_member_behind_a_link_is_refused(folder: Folder, root: Path, outside: Path) -> None:
    (root / "in").mkdir()
    os.symlink(str(outside), root / "in/there")
    for data in (
        tar(member("there/secret", data=b"x")),
        tar(member("there", tarfile.DIRTYPE)),
        tar(member("a", tarfile.SYMTYPE, linkname="."), member("a/b", data=b"x")),
        zipped(("there/secret", b"x")),
        tar(member("there", data=b"x")),
    ):
        with pytest.raises(Conflict):
            unpack(folder, data)
    os.unlink(root / "in/there")


def test_hidden_members_are_left_out(root: Path) -> None:
    with Folder(root, hidden=(".*",)) as folder:
        copied = unpack(
            folder, tar(member(".git/config", data=b"x"), member("a/.env", data=b"x"), member("b", data=b"x"))
        )
        assert (copied.entries, copied.skipped_count) == (1, 2)
    assert os.listdir(root / "in") == ["b"]


def bomb_gzip() -> bytes:
    info = tarfile.TarInfo("zeros")
    info.size = 1 << 40
    return gzip.compress(info.tobuf() + bytes(50_000_000))


def bomb_long_name() -> bytes:
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 36
    return gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(50_000_000))


def bomb_pax_chain() -> bytes:
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 512
    record = b"12 comment=\n".ljust(512, b"\0")
    return gzip.compress((header.tobuf() + record) * 20_000)


def bomb_zip() -> bytes:
    return zipped(("a", bytes(30_000_000)), ("b", bytes(30_000_000)))


@pytest.mark.parametrize("make", [bomb_gzip, bomb_long_name, bomb_pax_chain, bomb_zip])
def test_bombs_are_refused_soon(root: Path, make: Callable[[], bytes]) -> None:
    data = make()
    began = time.monotonic()
    with Folder(root) as folder:
        with pytest.raises((TooLarge, InvalidRequest)):
            unpack(folder, data, max_bytes=40_000_000)
    assert time.monotonic() - began < 60
    assert os.listdir(root / "in") == []


def test_a_zip_that_lies_of_its_sizes(root: Path) -> None:
    data = zipped(("a", bytes(1_000_000)))
    lied = data.replace((1_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    with Folder(root) as folder:
        with pytest.raises(InvalidRequest, match="Bad CRC-32"):
            unpack(folder, lied)
    assert os.listdir(root / "in") == []


def test_entries_and_quota_bound_what_is_unpacked(root: Path) -> None:
    many = tar(*(member(f"f{number}") for number in range(50)))
    with Folder(root, quota=300_000) as folder:
        with pytest.raises(TooLarge, match="stopped after 20 entries"):
            unpack(folder, many, max_entries=20)
        with pytest.raises(TooLarge, match="limited to 300000 bytes"):
            unpack(folder, zipped(("a", bytes(400_000))))
        assert os.listdir(root / "in") == []


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
@given(st.integers(0, 3000), st.binary(min_size=1, max_size=20), st.sampled_from(["tar", "zip", "gz"]))
def test_damaged_archives_fail_in_words(root: Path, at: int, damage: bytes, kind: str) -> None:
    files = [member("a", data=b"1" * 600), member("b/c", data=b"2"), member("l", tarfile.SYMTYPE, linkname="a")]
    data = bytearray(zipped(("a", b"1" * 600), ("b/c", b"2")) if kind == "zip" else tar(*files))
    at %= len(data)
    data[at : at + len(damage)] = damage
    with Folder(root) as folder:
        try:
            unpack(folder, gzip.compress(bytes(data)) if kind == "gz" else bytes(data))
        except AgentboxError:
            pass
    assert set(os.listdir(root)) == {"in"}
