"""What killed processes leave beside sandboxes is cleared away when a server starts, and nothing that is in use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from jupyter_agentbox.kernels.front import endpoints
from jupyter_agentbox.linux import find_processes
from jupyter_agentbox.sandbox.sweep import ensure_sweeper
from jupyter_agentbox.service import startup_cleanup
from jupyter_agentbox.storage.images import ImageStore

#: Begins to make an image, to remove another, and to open a front; and is killed.
PROGRAM = """
    import os, shutil, sys
    from pathlib import Path
    from jupyter_agentbox.kernels.front import endpoints
    from jupyter_agentbox.storage.images import ImageStore, store
    state = Path(sys.argv[1])
    def killed(folder):
        assert folder.name.startswith(".gone-")
        os.kill(os.getpid(), 9)
    endpoints.make_directory()
    with ImageStore(state).staging() as folder:
        (folder / "rootfs" / "usr").mkdir(parents=True)
        store.remove_tree = killed
        ImageStore(state).remove(ImageStore(state).list()[0])
"""
IMAGE = '{"address": "%s", "name": "old", "recipe": {}, "created": 1, "size": 1, "env": {}, "packages": {}}'


@pytest.fixture
def runtime_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return endpoints.runtime_directory()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


def hidden(state_dir: Path) -> list[str]:
    return [path.name for path in (state_dir / "images").glob(".*")]


def test_what_a_killed_process_was_at_goes_and_what_a_living_one_is_at_stays(
    state_dir: Path, runtime_dir: Path
) -> None:
    image = state_dir / "images" / ("ab" * 32)
    (image / "rootfs").mkdir(parents=True)
    (image / "image.json").write_text(IMAGE % image.name)
    own, lock = endpoints.make_directory()
    try:
        with ImageStore(state_dir).staging() as folder:
            (folder / "rootfs").mkdir()
            command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(state_dir)]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert ended.returncode == -9, ended.stderr
            assert not image.exists()
            assert len(hidden(state_dir)) == 3, "one in the making is ours"
            assert len([path for path in runtime_dir.iterdir() if path.is_dir()]) == 2
            startup_cleanup.clear(state_dir)
            assert hidden(state_dir) == [folder.name]
            assert (folder / "rootfs").is_dir()
            assert [path for path in runtime_dir.iterdir() if path.is_dir()] == [own]
        assert hidden(state_dir) == []
    finally:
        os.close(lock)


@pytest.mark.parametrize(
    "name", [".new-token.key-ab", "servers/.new-settings-ab.json-77", "bin/.new-runsc-ab", "imports/.new-ab/x"]
)
def test_what_was_not_given_its_name_goes_once_it_is_old(name: str, state_dir: Path, runtime_dir: Path) -> None:
    fresh = state_dir / name
    old, kept = fresh.with_name(fresh.name + "1"), state_dir / "servers" / "settings-ab.json"
    if name.startswith("imports"):
        old = state_dir / "imports" / ".new-old" / "x"
    for path in (fresh, old, kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if path != fresh:
            os.utime(path, (0, 0))
    os.utime(old.parent, (0, 0))
    startup_cleanup.clear(state_dir)
    assert not old.exists()
    assert fresh.exists()
    assert kept.exists()


def test_a_probe_whose_asker_was_killed_ends_and_another_ones_goes_on(
    state_dir: Path, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.ExitStack() as stack:
        probes = {}
        for name in ("agentbox-check-old", "agentbox-check-new", "another"):
            folder = tmp_path / name
            (folder / "bundle").mkdir(parents=True)
            command = [sys.executable, "-c", "import time; time.sleep(100)", f"--root={folder}/state"]
            probes[name] = stack.enter_context(subprocess.Popen(command))
            stack.callback(probes[name].kill)
            while not find_processes(folder):
                time.sleep(0.01)
            os.utime(folder, (0, 0 if name != "agentbox-check-new" else time.time()))
        startup_cleanup.clear(state_dir)
        left = [name for name, process in probes.items() if process.poll() is None]
        assert left == ["agentbox-check-new", "another"]
        assert not (tmp_path / "agentbox-check-old").exists()
        assert (tmp_path / "agentbox-check-new" / "bundle").is_dir()


def test_a_sandbox_that_nobody_watches_gets_a_sweeper(state_dir: Path, runtime_dir: Path) -> None:
    (state_dir / "sandboxes" / "one").mkdir(parents=True)
    startup_cleanup.clear(state_dir)
    while ensure_sweeper(state_dir):  # it takes the lock in a moment
        pass
    (state_dir / "sandboxes" / "one").rmdir()
