"""A project's own environment as a sandbox's Python: of venv, of uv, and of conda's layout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from support.boxes import Box
from support.environments import copy_kernel
from support.preparation import make_policy, start

from jupyter_agentbox.egress import presets
from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command
from jupyter_agentbox.sandbox.sandbox import Sandbox

SYSTEM_PYTHON = "/usr/bin/python3"


def make_venv(prefix: Path) -> None:
    venv.create(prefix, with_pip=False, symlinks=True)


def make_conda(prefix: Path) -> None:
    """Make what conda does: no link to any other Python, but a whole one of its own, its libraries in ``lib``."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (prefix / "bin").mkdir(parents=True)
    shutil.copy2(os.path.realpath(sys.executable), prefix / "bin" / version)
    for name in ("python3", "python"):
        (prefix / "bin" / name).symlink_to(version)
    unused = ("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "config-*", "ensurepip")
    shutil.copytree(sysconfig.get_path("stdlib"), prefix / "lib" / version, ignore=shutil.ignore_patterns(*unused))
    (prefix / "lib" / version / "site-packages").mkdir()
    (prefix / "conda-meta").mkdir()
    (prefix / "conda-meta" / "history").touch()
    scripts = prefix / "etc" / "conda" / "activate.d"
    scripts.mkdir(parents=True)
    (scripts / "x.sh").write_text("export ACTIVATED=yes\n")


@pytest.mark.parametrize("make", [make_venv, make_conda])
def test_a_projects_own_environment_is_the_sandboxs_python(
    has_runsc: None, manager: SandboxManager, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    project = tmp_path / "project" / ".venv"
    make(project)
    with pytest.raises(InvalidRequest, match="has no ipykernel"):
        make_policy(manager, python=str(project)).resolve({})
    (packages,) = project.glob("lib/python3*/site-packages")
    copy_kernel(packages)
    check(manager, project, packages)


def test_an_environment_whose_packages_are_links_into_a_cache(manager: SandboxManager, tmp_path: Path) -> None:
    """As uv makes one with ``--link-mode=symlink``, and conda from another disk if it is told to."""
    project = tmp_path / "project"
    make_venv(project)
    (packages,) = project.glob("lib/python3*/site-packages")
    cached = tmp_path / "cache" / "ipykernel" / "__init__.py"
    cached.parent.mkdir(parents=True)
    cached.touch()
    (packages / "ipykernel").mkdir()
    (packages / "ipykernel" / "__init__.py").symlink_to(cached)
    with pytest.raises(InvalidRequest, match="link-mode=copy"):
        make_policy(manager, python=str(project)).resolve({})


@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.parametrize("base", [sys.executable, SYSTEM_PYTHON])
def test_an_environment_of_uv(has_runsc: None, manager: SandboxManager, tmp_path: Path, base: str) -> None:
    project = tmp_path / "project" / ".venv"
    found = presets.pip_environment()
    names = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL": "UV_INDEX"}
    env = {**os.environ, **{names[name]: value for name, value in found.items() if name in names}}
    uv = str(Path(sys.executable).with_name("uv"))
    for arguments in (
        ("venv", f"--python={base}", project),
        ("pip", "install", f"--python={project}/bin/python", "ipykernel"),
    ):
        done = subprocess.run([uv, *arguments], env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    assert "uv = " in (project / "pyvenv.cfg").read_text()
    (packages,) = project.glob("lib/python3*/site-packages")
    check(manager, project, packages)


def check(manager: SandboxManager, project: Path, packages: Path) -> None:
    """Run code in a sandbox of an environment, which has a kernel and stays as it is."""
    (packages / "only_here.py").write_text("x = 'of the project'")

    async def work(sandbox: Sandbox) -> None:
        code = "import only_here, sys; print(sys.prefix); print(only_here.x)"
        result = await Runner.shared().run(sandbox, code)
        assert result.stdout == f"{project}\nof the project\n", result
        line = "python -c 'import only_here, sys; print(sys.prefix)'"
        said = await sandbox.processes.run(Command(line=line), timeout=60)
        assert said.stdout.decode() == f"{project}\n", said
        change = f"echo theirs >> {packages}/only_here.py; cat {packages}/only_here.py"
        assert "theirs" in (await Box(sandbox).run(change)).stdout.decode(), "what is written stays inside"

    start(manager, work, python=str(project))
    assert (packages / "only_here.py").read_text() == "x = 'of the project'"
    assert os.access(project / "bin" / "python", os.X_OK)
