"""Disk space: deleted files that are kept open, and the floor of free space."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.boxes import Box, boxed, run
from support.harness import Env
from support.serving import Serving
from support.waiting import wait_until, wait_until_async

from jupyter_agentbox.client import ApiError, Client
from jupyter_agentbox.errors import SandboxEnded
from jupyter_agentbox.linux import measure_tree
from jupyter_agentbox.runtimes.runsc import open_files
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import MIB, Cause, Limits, SandboxSpec

SIZE = 8 * MIB


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a maker of small file systems, each of so many MiB."""
    made: list[Path] = []

    def make(size: int) -> Path:
        path = tmp_path / f"disk{len(made)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}m,mode=755", "tmpfs", str(path)]
        subprocess.run(command, check=True, timeout=60)
        made.append(path)
        return path

    yield make
    for path in made:
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=60)


def free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def kept(path: Path) -> int:
    """Return the bytes in use on a file system that no file has which can be seen."""
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize - measure_tree(path, 1_000_000, 60)[0]


def held(sandbox: Sandbox) -> int:
    """Return the bytes of deleted files of its work folder that its processes keep, as the host sees them."""
    assert sandbox._handle is not None
    files = open_files.list_open_files([pid for pid, _ in sandbox._handle.processes])
    return sum(file.size for file in files if not file.name.startswith(("/memfd:", str(sandbox.directory / "fs"))))


async def until_measured(box: Box) -> None:
    before = box.sandbox.measured
    await wait_until_async(lambda: box.sandbox.measured != before, 60, "it is measured")


async def fill(box: Box, *names: str) -> None:
    """Write files inside, and read them."""
    for name in names:
        line = f"mkdir -p $(dirname {name}) && head -c {SIZE} /dev/zero > {name} && cksum {name}"
        assert (await box.run(line)).exit_code == 0


@pytest.mark.parametrize("is_private", [True, False])
def test_the_space_of_what_is_deleted_from_outside_comes_back(
    manager: SandboxManager, tmp_path: Path, is_private: bool
) -> None:
    folder = tmp_path / "notebooks"
    folder.mkdir()

    def replace(work: Path) -> None:
        (work / "new").write_text("new")
        os.replace(work / "new", work / "f")

    def move(work: Path) -> None:
        os.rename(work / "f", work / "g")
        os.unlink(work / "g")

    def move_folder(work: Path) -> None:
        os.rename(work / "f", work / "g")
        shutil.rmtree(work / "g")

    ways: list[tuple[str, list[str], list[str], Callable[[Path], object]]] = [
        ("deleted", ["f"], [], lambda work: os.unlink(work / "f")),
        ("replaced", ["f"], [], replace),
        ("moved and deleted", ["f"], ["f"], move),
        ("a tree", ["d/e/f1", "d/e/f2", "d/f3"], [], lambda work: shutil.rmtree(work / "d")),
        ("a moved tree", ["f/e/f1", "f/f2"], ["f"], move_folder),
        ("odd names", ["'d/a\nb'", "'d/c (deleted)'", "\"$(printf 'd/\\377')\""], [],
         lambda work: shutil.rmtree(work / "d")),
    ]  # fmt: skip

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, workspace=None if is_private else folder, limits=Limits(disk=1024 * MIB)) as box:
            sandbox = box.sandbox
            for name, files, moved, change in ways:
                await fill(box, *files)
                change(sandbox.workspace)
                sandbox.note_change(*moved)
                await wait_until_async(lambda: held(sandbox) == 0, 60, f"{name}: the bytes are free")
                if (sandbox.workspace / "f").exists():
                    os.unlink(sandbox.workspace / "f")
            assert sandbox.end is None

    run(test, manager)


def test_deleted_files_that_code_inside_keeps_open_count_towards_the_limit(manager: SandboxManager) -> None:
    keep = "import os, time; f = open('/workspace/f', 'wb'); f.write(bytes({0})); f.flush(); print(1, flush=True); {1}"

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(disk=64 * MIB)) as box:
            line = keep.format(40 * MIB, "time.sleep(600)")
            await box.run(f'(/usr/bin/python3 -c "{line}" > started 2>&1 &) ; until [ -s started ]; do sleep .1; done')
            os.unlink(box.sandbox.workspace / "f")
            box.sandbox.note_change()

            def usage() -> int:
                return box.sandbox.measured[1].held if box.sandbox.measured is not None else 0

            await wait_until_async(lambda: usage() >= 40 * MIB, 60, "what is held is counted")
            assert box.sandbox.measured is not None
            assert box.sandbox.measured[1].disk >= 40 * MIB
            assert box.sandbox.end is None
            await box.run("head -c 40000000 /dev/zero > more")
            await wait_until_async(lambda: bool(box.sandbox._is_stop_sent), 60, "nothing more may be written")
            assert (await box.run("echo x > again")).exit_code != 0

    run(test, manager)


def test_what_fills_a_disk_is_stopped_and_its_neighbours_are_not(
    manager: SandboxManager, make_disk: Callable[[int], Path]
) -> None:
    disk, floor = make_disk(128), 32 * MIB
    folders = [disk / "loop", disk / "quiet", disk / "late"]
    for folder in folders:
        folder.mkdir()

    async def test(manager: SandboxManager) -> None:
        made: list[Sandbox] = []

        async def make(folder: Path) -> Box:
            made.append(await manager.create(SandboxSpec(workspace=folder, min_free_disk=floor)))
            return Box(made[-1])

        try:
            loop, quiet = await make(folders[0]), await make(folders[1])
            await quiet.text("head -c 1000000 /dev/zero > own")
            line = f"while [ $n -lt 50 ]; do n=$((n+1)); head -c {4 * MIB} /dev/zero > $n; sleep .8; done"
            with pytest.raises(SandboxEnded, match="32 MiB must stay free"):
                await loop.run(f"n=0; {line}", timeout=200)
            end = await asyncio.wait_for(LinkThread.instance().run(loop.sandbox.wait_ended()), 60)
            assert (end.cause, end.setting) == (Cause.DISK_FULL, "Policy.min_free_disk")
            assert "32 MiB must stay free" in end.message
            assert 0 < free(disk) < floor
            assert (folders[0] / "1").stat().st_size == 4 * MIB, "what is there stays there"
            # Another that is not to blame runs on, and one that starts now too, until it writes.
            for box in (quiet, await make(folders[2])):
                await until_measured(box)
                assert (await box.text("echo alive")) == "alive"
                assert box.sandbox.end is None
        finally:
            for sandbox in made:
                await manager.stop(sandbox)

    run(test, manager)


def test_a_floor_of_zero_and_the_default_leave_other_disks_alone(
    manager: SandboxManager, make_disk: Callable[[int], Path]
) -> None:
    disk = make_disk(64)

    async def test(manager: SandboxManager) -> None:
        for floor in (0, None):
            async with boxed(manager, workspace=disk, min_free_disk=floor) as box:
                # The default of such a disk is 1.28 MiB.
                await box.text("head -c 50000000 /dev/zero > big; sync")
                await until_measured(box)
                assert box.sandbox.end is None
                await box.text("rm big")

    run(test, manager)


def test_over_rest_space_comes_back_and_the_floor_refuses_writes(
    has_runsc: None, make_disk: Callable[[int], Path]
) -> None:
    disk = make_disk(512)
    policy = {"min_free_disk": "64 MiB", "templates": False, "lease_timeout": 30.0}
    env = Env(disk / "env", {"Policy": policy})
    try:
        serving = Serving(env)
        with Client(serving.url, serving.token) as client, client.create(id="writer") as box:
            box.files.write("kept", "kept")
            before = kept(disk)
            for name in ("a", "b", "c", "d/e"):
                box.exec(f"mkdir -p d; head -c {SIZE} /dev/zero > {name}; cksum {name}", check=True)
            box.files.delete("a")
            box.files.write("b", "new")
            box.files.move("c", "f")
            box.files.delete("f")
            box.files.delete("d", recursive=True)
            wait_until(lambda: kept(disk) <= before + 4 * MIB, 60, "the space comes back")
            with (disk / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free(disk) - 40 * MIB)
            with pytest.raises(ApiError, match=r"Policy\.min_free_disk") as caught:
                box.files.write("more", "x")
            assert (caught.value.status, caught.value.reason) == (507, "disk_full")
            assert caught.value.setting == "Policy.min_free_disk"
            assert box.files.read_bytes("kept") == b"kept"
            assert box.refresh().state == "running"
            (disk / "filler").unlink()
            box.files.write("more", "x")
        serving.stop()
        env.assert_clean()
    finally:
        env.close()
