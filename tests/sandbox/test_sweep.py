"""What an owner leaves behind is cleared away, and what has an owner is not."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_agentbox.linux import (
    find_processes,
    is_running,
    kill_processes,
    make_bare_command,
    read_start_time,
    remove_cgroups,
    remove_tree,
    try_lock,
)
from jupyter_agentbox.runtimes import cgroups
from jupyter_agentbox.runtimes.docker import orphans
from jupyter_agentbox.sandbox import sweep as module
from jupyter_agentbox.sandbox.sweep import ensure_sweeper, remove_lost, run_sweeper, sweep
from jupyter_agentbox.spec import Limits


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    (tmp_path / "sandboxes").mkdir()
    return tmp_path


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


def make_sandbox(
    state_dir: Path, name: str = "one", *, pid: int = 0, age: float = 0.0, lease: float = 60.0, **more: object
) -> Path:
    directory = state_dir / "sandboxes" / name
    directory.mkdir()
    handle = {"runtime": "x", "pid": pid, "start_time": read_start_time(pid) or 0, "helpers": [], "cgroups": []}
    state = {"id": name, "spec": {}, "handle": handle, "lease_timeout": lease, **more}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "lock").touch()
    os.utime(directory / "lock", (time.time() - age,) * 2)
    return directory


def test_a_live_owner_is_never_touched(state_dir: Path, sleeper: subprocess.Popen[bytes]) -> None:
    directory = make_sandbox(state_dir, pid=sleeper.pid, age=9999)
    with (directory / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert sweep(state_dir) == []
        assert sleeper.poll() is None
    assert sweep(state_dir) == ["one"]
    assert read_start_time(sleeper.pid) is None
    assert not directory.exists()


def test_within_the_lease_it_waits_to_be_adopted(state_dir: Path, sleeper: subprocess.Popen[bytes]) -> None:
    directory = make_sandbox(state_dir, pid=sleeper.pid, age=30)
    assert sweep(state_dir) == []
    os.utime(directory / "lock", (time.time() - 61,) * 2)
    assert sweep(state_dir) == ["one"]
    assert read_start_time(sleeper.pid) is None


def test_one_that_waits_is_never_locked_so_that_nobody_takes_it_for_owned(
    state_dir: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sandbox(state_dir, pid=sleeper.pid)
    locked, try_lock = [], module.try_lock

    def note(path: Path, *arguments: int) -> contextlib.AbstractContextManager[bool]:
        locked.append(path.parent.name)
        return try_lock(path, *arguments)

    monkeypatch.setattr(module, "try_lock", note)
    assert sweep(state_dir) == []
    assert "one" not in locked
    make_sandbox(state_dir, "two")
    assert sweep(state_dir) == ["two"]
    assert "two" in locked


def test_one_whose_processes_are_gone_goes_at_once(state_dir: Path, sleeper: subprocess.Popen[bytes]) -> None:
    make_sandbox(state_dir, pid=sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert sweep(state_dir) == ["one"]


def test_a_pid_that_is_somebody_elses_by_now_is_not_killed(state_dir: Path, sleeper: subprocess.Popen[bytes]) -> None:
    directory = make_sandbox(state_dir, pid=sleeper.pid, age=9999)
    state = json.loads((directory / "state.json").read_text())
    state["handle"]["start_time"] -= 1
    (directory / "state.json").write_text(json.dumps(state))
    assert sweep(state_dir) == ["one"]
    assert sleeper.poll() is None


def test_a_start_that_was_cut_short_is_found_without_a_state(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = state_dir / "sandboxes" / "half"
    directory.mkdir()
    marked = [sys.executable, "-c", "import time; time.sleep(300)", f"--root={directory}/state"]
    with subprocess.Popen(marked) as process:
        try:
            while not find_processes(directory):
                time.sleep(0.01)
            assert sweep(state_dir) == []
            (directory / "lock").touch()
            os.utime(directory, (time.time() - 61,) * 2)
            (directory / "bundle").mkdir()
            (directory / "bundle" / "cgroups").write_text("/sys/fs/cgroup/agentbox-half\n/etc")
            os.utime(directory, (time.time() - 61,) * 2)
            removed: list[str] = []
            monkeypatch.setattr(module, "remove_cgroups", removed.extend)
            assert sweep(state_dir) == ["half"]
            assert "/sys/fs/cgroup/agentbox-half" in removed
            assert read_start_time(process.pid) is None
        finally:
            process.kill()
    assert not directory.exists()


def test_what_names_a_control_group_stays_until_that_is_gone(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cgroups.detect()
    assert found.parents, "control groups are needed"
    group = Path(found.create(f"test{os.getpid()}", Limits())[0])
    (group / "busy").mkdir()  # keeps it from being removed
    try:
        directory = make_sandbox(state_dir)
        (directory / "bundle").mkdir()
        (directory / "bundle" / "cgroups").write_text("\n".join(found.name(f"test{os.getpid()}")))
        with monkeypatch.context() as patch:
            patch.setattr(module, "remove_cgroups", functools.partial(remove_cgroups, timeout=0.0))
            assert sweep(state_dir) == []
        assert directory.exists()
    finally:
        (group / "busy").rmdir()
    assert sweep(state_dir) == ["one"]
    assert not any(Path(path).exists() for path in found.name(f"test{os.getpid()}"))


def test_registered_paths_go_only_where_they_are_ours(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    own = tmp_path / "run" / "agentbox"
    own.mkdir(parents=True, mode=0o700)
    front, deep, precious = own / "front", own / "a" / "b", tmp_path / "precious"
    for path in (front, deep, precious):
        path.mkdir(parents=True)
        (path / "file").touch()
    (own / "link").symlink_to(precious)
    wanted = [front, own / "link", deep, precious, own, own / "..", f"{own}/../agentbox/a", f"{own}/", "/", "", 3, None]
    make_sandbox(state_dir, cleanup=[item if isinstance(item, (int, type(None))) else str(item) for item in wanted])
    assert sweep(state_dir) == ["one"]
    assert not front.exists()
    assert not (own / "link").is_symlink()
    assert (deep / "file").exists()
    assert (precious / "file").exists()


def test_a_lock_that_its_owner_removes_at_this_moment_is_not_made_anew(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, try_lock = make_sandbox(state_dir), module.try_lock

    def try_late(path: Path, *arguments: int) -> contextlib.AbstractContextManager[bool]:
        for file in directory.iterdir():
            file.unlink()
        return try_lock(path, *arguments)

    monkeypatch.setattr(module, "try_lock", try_late)
    assert sweep(state_dir) == []
    directory.rmdir()  # as the owner does next


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"handle": 3}', '{"handle": {"pid": "x"}}', '{"lease_timeout": "for ever"}', "\0" * 100,
     '{"handle": null, "cleanup": {}}', '{"handle": {"pid": 1, "start_time": 2, "helpers": [3]}}',
     '{"handle": {"pid": 1e30, "start_time": 2}}', '{"handle": {"pid": 1, "start_time": Infinity}}',
     pytest.param("[" * 100_000, id="deep")],
)  # fmt: skip
def test_a_broken_state_is_no_obstacle(state_dir: Path, text: str) -> None:
    directory = make_sandbox(state_dir)
    (directory / "state.json").write_text(text)
    (directory / "work").mkdir()
    (directory / "bundle").mkdir()
    os.utime(directory, (time.time() - 61,) * 2)
    make_sandbox(state_dir, "two")
    assert sweep(state_dir) == ["one", "two"]
    # A person decides about its files.
    assert sorted(path.name for path in (state_dir / "lost" / "one").iterdir()) == ["lock", "state.json", "work"]
    assert not list((state_dir / "sandboxes").iterdir())
    assert remove_lost(state_dir / "lost" / "one")
    assert not list((state_dir / "lost").iterdir())


def test_hostile_trees_are_removed_and_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    here = os.open(tree, os.O_RDONLY)
    (tree / "link").symlink_to(outside)
    os.mkfifo(tree / "fifo")
    os.mkdir(b"\xff\xfe\n" * 50, dir_fd=here)
    (tree / "closed").mkdir()
    (tree / "closed" / "in").mkdir()
    (tree / "closed" / "in").chmod(0)
    (tree / "closed").chmod(0)
    for _ in range(3000):  # deeper than any path can be written, and than Python recurses
        os.mkdir("d", dir_fd=here)
        (below, here) = (os.open("d", os.O_RDONLY, dir_fd=here), here)
        os.close(here)
        here = below
    os.symlink(outside, "link", dir_fd=here)
    os.close(here)
    remove_tree(tree)
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (outside / "kept").exists()
    remove_tree(tree)
    (tmp_path / "alias").symlink_to(outside)
    remove_tree(tmp_path / "alias")
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (outside / "kept").exists()


def test_only_our_own_control_groups_are_removed() -> None:
    assert remove_cgroups(["/sys/fs/cgroup/memory", "/etc/agentbox-x", "/sys/fs/cgroup/../../../tmp/agentbox-y"]) == []
    assert Path("/sys/fs/cgroup").exists()


def test_processes_are_told_apart_by_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    started = read_start_time(sleeper.pid)
    assert started is not None
    assert is_running(sleeper.pid, started)
    assert not is_running(sleeper.pid, started + 1)
    assert kill_processes([(sleeper.pid, started + 1)]) == []
    assert sleeper.poll() is None
    assert kill_processes([(sleeper.pid, started), (2**22 + 1, 5)]) == []
    assert read_start_time(sleeper.pid) is None


def find_sweepers(state_dir: Path) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and str(state_dir).encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


def test_the_sweeper_is_one_ends_orphans_and_then_itself(state_dir: Path) -> None:
    orphan = subprocess.run(
        ["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    pid = int(orphan.stdout)
    directory = make_sandbox(state_dir, pid=pid, age=0, lease=1.5)
    assert ensure_sweeper(state_dir)
    deadline = time.monotonic() + 150
    while ensure_sweeper(state_dir):
        assert time.monotonic() < deadline, "the sweeper holds no lock"
        time.sleep(0.05)
    while directory.exists():
        assert time.monotonic() < deadline, "the orphan is not swept"
        time.sleep(0.05)
    assert read_start_time(pid) is None
    while len(sweepers := find_sweepers(state_dir)) != 1:  # those that found the lock held take a while to end
        assert time.monotonic() < deadline, sweepers
        time.sleep(0.05)
    status = Path(f"/proc/{sweepers[0]}/status").read_text()
    assert int(status.split("RssAnon:")[1].split()[0]) < 12_000  # KiB
    kill_processes([(sweepers[0], read_start_time(sweepers[0]) or 0)])


def test_the_sweeper_ends_when_nothing_is_left(state_dir: Path) -> None:
    make_sandbox(state_dir)
    run_sweeper(state_dir, interval=0.01, idle_timeout=0.05)
    assert not list((state_dir / "sandboxes").iterdir())


def test_it_stands_alone(tmp_path: Path) -> None:
    """It ends at once where it has nothing to do, which it would not if it could not be imported."""
    command = make_bare_command(str(module.__file__), str(tmp_path), sys.executable)
    (tmp_path / "sweeper.lock").touch()
    with try_lock(tmp_path / "sweeper.lock"):
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, b"")


def test_an_engine_that_is_away_is_no_obstacle(state_dir: Path, tmp_path: Path) -> None:
    make_sandbox(state_dir)
    address = f"unix://{tmp_path}/none.sock"
    for _ in range(2):
        orphans.note_engine(state_dir, address)
    with (state_dir / "engines").open("a") as file:
        file.write("tcp://elsewhere:1\n\n")
    assert orphans.read_engines(state_dir) == [address]
    assert sweep(state_dir) == ["one"]
    look = module.ContainerSweep(state_dir)
    assert look.wait() == []
    assert not look.is_done


def test_without_the_servers_environment_containers_are_left_for_later(state_dir: Path, tmp_path: Path) -> None:
    (state_dir / "engines").write_text(f"unix://{tmp_path}/none.sock\n")
    for python in (str(tmp_path / "uninstalled/bin/python"), ""):  # the latter has no package at all
        look = module.ContainerSweep(state_dir, python)
        assert look.wait() == []
        assert not look.is_done


def test_what_a_killed_owner_had_begun_to_remove_is_gone_with_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "sandboxes" / "one"
    (directory / "work").mkdir(parents=True)
    (directory / "lock").touch()

    def remove_a_part(path: Path) -> None:
        (path / "lock").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "remove_tree", remove_a_part)
        with pytest.raises(KeyboardInterrupt):
            module.remove_directory(directory)
    assert not directory.exists()
    module.sweep_directories(tmp_path)
    assert list((tmp_path / "sandboxes").iterdir()) == []
    module.remove_directory(directory)  # which is gone
