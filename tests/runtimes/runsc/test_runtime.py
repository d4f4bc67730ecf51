"""The runsc runtime: the contract, and what is its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from contract.box import STANDIN, Box
from contract.escapes import EscapeContract
from contract.runtime import MakeBox, RuntimeContract
from support import ROOT
from support.users import ordinary_user
from support.waiting import wait_until

from jupyter_agentbox.errors import RuntimeFailed, RuntimeUnavailable
from jupyter_agentbox.linux import find_processes, is_running
from jupyter_agentbox.runtimes import Handle, Runtime
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.spec import MIB, SandboxSpec


class TestRunsc(RuntimeContract):
    """The contract on runsc, with this machine's own privileges."""

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, state_dir: Path) -> Runtime:
        return RunscRuntime(state_dir=str(state_dir), guest_dir=str(STANDIN))

    def test_a_missing_runsc_says_how_to_get_it(self, state_dir: Path) -> None:
        with pytest.raises(RuntimeUnavailable, match="which is not a program"):
            RunscRuntime(runsc="/nonexistent").find_runsc()

    def test_a_runsc_that_fails_or_hangs_leaves_nothing(
        self, spec: SandboxSpec, state_dir: Path, tmp_path: Path
    ) -> None:
        broken = tmp_path / "runsc"
        for body, timeout, words in (
            ("echo no luck >&2; exit 3", 60.0, "no luck"),
            ("exec sleep 600", 2.0, "did not answer"),
        ):
            broken.write_text(f"#!/bin/sh\n{body}\n")
            broken.chmod(0o755)
            runtime = RunscRuntime(runsc=str(broken), state_dir=str(state_dir), start_timeout=timeout)
            with pytest.raises(RuntimeFailed, match=words):
                Box(runtime, state_dir, "broken", spec)
            directory = state_dir / "sandboxes" / "broken"
            assert sorted(os.listdir(directory)) == ["link", "log"]
            assert not find_processes(directory)
            # Others' groups come and go meanwhile, which os.walk bears.
            assert not [top for top, names, _ in os.walk("/sys/fs/cgroup") if "agentbox-broken" in names]
            shutil.rmtree(directory)

    def test_there_is_room_for_as_many_processes_as_allowed(self, make_box: MakeBox, spec: SandboxSpec) -> None:
        bomb = (
            "import os,time\nmade=[]\n"
            "try:\n while len(made)<200:\n  made.append(os.fork())\n  if not made[-1]: time.sleep(300); os._exit(0)\n"
            "except OSError as error: print(len(made), error.errno)\n"
            "for pid in made: os.kill(pid, 9); os.waitpid(pid, 0)"
        )
        with make_box(replace(spec, limits=replace(spec.limits, memory=1024 * MIB, processes=100))) as box:
            count, number = box.python(bomb, timeout=150).split()
            assert int(count) > 80
            assert number == "11"

    def test_an_unmapped_owner_of_work_files_is_the_user_inside(
        self, make_box: MakeBox, spec: SandboxSpec, workspace: Path
    ) -> None:
        for path in (workspace, workspace / "data.csv"):
            os.chown(path, 4321, 4321)
        for parent in workspace.parents[:3]:
            parent.chmod(0o755)
        with make_box(spec) as box:
            box.run("echo x > mine; echo y >> data.csv")
        assert (workspace / "mine").stat().st_uid == 4321
        assert (workspace / "data.csv").read_text().endswith("y\n")

    def test_nothing_outlives_a_killed_owner_and_its_lease(self, tmp_path: Path) -> None:
        state_dir = tmp_path / "state"
        state_dir.mkdir()
        command = [sys.executable, "-m", "support.owner", str(state_dir), "1"]
        with subprocess.Popen(command, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            handle = Handle.from_dict(json.loads(owner.stdout.readline()))
            time.sleep(2)  # longer than the lease: a live owner's sandbox is never touched
            assert owner.poll() is None
            assert is_running(handle.pid, handle.start_time)
            owner.kill()
        # Renamed first, and then removed.
        wait_until(lambda: not os.listdir(state_dir / "sandboxes"), 120, "the directory is removed")
        assert not [pid for pid, start in handle.processes if is_running(pid, start)]
        assert not [path for path in handle.cgroups if Path(path).exists()]
        assert str(state_dir) not in Path("/proc/mounts").read_text()

    def test_checkpoint_restore_and_link_work_here(self, runtime: Runtime) -> None:
        checks = {check.name: check for check in runtime.check()}
        assert {"runsc", "user namespaces", "sandbox", "link", "checkpoint and restore"} <= set(checks)
        assert not [check for check in checks.values() if not check.is_ok]


class TestRunscEscapes(EscapeContract):
    """Isolation, from inside."""

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, state_dir: Path) -> Runtime:
        return RunscRuntime(state_dir=str(state_dir), guest_dir=str(STANDIN))


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that everybody may enter, with what an ordinary user needs to run the package."""
    base = Path(f"/tmp/agentbox-test-{os.getpid()}")
    base.mkdir(mode=0o755)
    passing = shutil.ignore_patterns("*.pyc.*")  # which programs write and rename meanwhile
    shutil.copytree(ROOT / "jupyter_agentbox", base / "lib/jupyter_agentbox", ignore=passing)
    shutil.copytree(ROOT / "tests", base / "lib/tests", ignore=shutil.ignore_patterns("__pycache__"))
    import traitlets

    shutil.copytree(Path(traitlets.__file__).parent, base / "lib/traitlets", ignore=passing)
    subprocess.run(["chmod", "-R", "a+rX", str(base)], check=True)
    yield base
    shutil.rmtree(base)


@pytest.mark.parametrize("has_ids", [False, True], ids=["without subordinate ids", "with subordinate ids"])
def test_an_ordinary_user_without_root_and_delegated_control_groups(public_dir: Path, has_ids: bool) -> None:
    with ordinary_user(has_ids=has_ids) as user:
        command = ["/usr/bin/python3", "-m", "support.ordinary_user"]
        output = user.run(command, public_dir / "home", f"{public_dir}/lib:{public_dir}/lib/tests", 200)
    found = json.loads(output.splitlines()[-1])
    if user.unenforced:
        assert any(repr(limit) in found["refusal"] for limit in user.unenforced)
        assert "Policy.accept_unenforced" in found["refusal"]
    else:
        assert "refusal" not in found
    assert found["owner"] == found["uid"] == user.uid
    assert found["data"] == "a,b\n"
    assert found["canary"] == ""
    assert found["left"] == ["link", "log", "work"]
    assert found["is_alive_after"] is False
    assert found["usage"]["memory"] > 10 * MIB
    assert found["usage"]["disk"] > 4 * MIB
    assert found["processors"] == (1 if "cpus" in user.unenforced else len(os.sched_getaffinity(0)))
    assert found["inner"] == ("1000" if user.has_ids else "0")
