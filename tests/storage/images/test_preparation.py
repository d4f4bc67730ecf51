"""What runs before a sandbox is ready, how its failure is told, and a project's own environment as its Python."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.boxes import Box
from support.preparation import make_policy, start

from jupyter_agentbox.errors import InvalidConfig, InvalidRequest, NotFound, PolicyRefused, RuntimeFailed
from jupyter_agentbox.policy.languages import find_kernels, find_language, list_languages
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox


def test_init_scripts_run_in_order_and_services_after_them(has_runsc: None, manager: SandboxManager) -> None:
    async def look(sandbox: Sandbox) -> str:
        (service,) = sandbox.processes.list()
        assert service.state == "running"
        return await Box(sandbox).text("cat /workspace/log")

    found = start(
        manager,
        look,
        init=["echo one >> log; echo $WHO >> log", "echo two >> log"],
        services=[
            {"name": "late", "line": "sleep 0.3; touch up; echo three >> log; sleep 1000", "ready": "test -e up"}
        ],
        env={"WHO": "me"},
    )
    assert found.split() == ["one", "me", "two", "three"]


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"init": ["true", "echo why >&2; exit 3", "true"]}, ["init script 2 of 3", "exited with 3", "why"]),
        (
            {"services": [{"name": "db", "line": "echo no port >&2; exit 4", "ready": "false"}]},
            ["'db'", "with status 4", "no port"],
        ),
        (
            {"services": [{"name": "db", "line": "sleep 1000", "ready": "echo not yet >&2; false", "timeout": 0.5}]},
            ["'db' was not ready within 0.5 s", "not yet"],
        ),
    ],
)
def test_what_fails_before_is_told_and_leaves_nothing(
    has_runsc: None, manager: SandboxManager, profile: dict[str, Any], words: list[str]
) -> None:
    async def never(sandbox: Sandbox) -> None:
        raise AssertionError("it started")

    with pytest.raises(RuntimeFailed) as caught:
        start(manager, never, **profile)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "profile",
    [
        {"init": "ls"},
        {"init": ["a\0b"]},
        {"services": ["x"]},
        {"services": {"x": "y"}},
        {"services": [{"name": "x", "line": "y", "more": 1}]},
        {"services": [{"name": "x", "line": "y", "timeout": -1}]},
        {"services": [{"name": "X", "line": "y"}]},
        {"services": [{"name": "x"}]},
        {"python": "../relative"},
        {"image": ""},
    ],
)
def test_what_no_profile_may_say(manager: SandboxManager, profile: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        make_policy(manager, **profile).profile("default")


def test_a_request_chooses_what_it_may(manager: SandboxManager, tmp_path: Path) -> None:
    policy = make_policy(manager)
    with pytest.raises(NotFound, match="images are: none"):
        policy.resolve({"image": "r"})
    with pytest.raises(InvalidRequest, match="not a Python interpreter"):
        policy.resolve({"python": str(tmp_path / "python")})
    with pytest.raises(InvalidRequest, match="image has its own"):
        policy.resolve({"python": sys.executable, "image": "r"})
    for key in ("init", "services"):
        with pytest.raises(InvalidRequest, match="unknown key"):
            policy.resolve({key: []})
    with pytest.raises(PolicyRefused, match="its own root"):
        make_policy(manager, root=str(tmp_path)).resolve({"image": "r"})


def test_the_hosts_kernels_are_found_by_their_files(tmp_path: Path) -> None:
    for name in ("usr/bin/R", "usr/local/bin/deno"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch(mode=0o755)
    python = str(tmp_path / "env/bin/python")
    assert [kernel.name for kernel in find_kernels(python, tmp_path)] == ["deno"], "R has no IRkernel"
    (tmp_path / "usr/lib/R/site-library/IRkernel").mkdir(parents=True)
    module = tmp_path / "env/lib/python3.11/site-packages/bash_kernel/__init__.py"
    module.parent.mkdir(parents=True)
    module.touch()
    kernels = find_kernels(python, tmp_path)
    assert list_languages(kernels) == ("python", "bash", "typescript", "javascript", "r")
    found = find_language(kernels, "JavaScript")
    assert found is not None
    assert found.argv[0] == "/usr/local/bin/deno"
    assert find_language(kernels, "perl") is None
