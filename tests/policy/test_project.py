"""Which environments in a work folder can be a sandbox's Python, and what of the host they bring with them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.guest.own_pip import APART
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.project import find_project_python, find_relative
from jupyter_agentbox.spec import Mount

OWN = f"python3.{sys.version_info[1]}"


def make_environment(path: Path, home: str = "/usr/bin", library: str = OWN, *, has_kernel: bool = False) -> Path:
    packages = path / "lib" / library / "site-packages"
    packages.mkdir(parents=True)
    (path / "bin").mkdir()
    (path / "bin" / "python").symlink_to("/bin/false")
    (path / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    if has_kernel:
        (packages / "ipykernel").mkdir()
    return path


def resolve(folder: Path, request: dict[str, Any], **settings: Any) -> Any:
    return Policy(config=Config({"Policy": settings})).resolve(request, workspace=folder, executable=sys.executable)


def test_an_environment_with_ipykernel_needs_nothing_of_the_server(tmp_path: Path) -> None:
    make_environment(tmp_path / ".venv", library="python3.99", has_kernel=True)
    found = find_project_python(tmp_path, ".venv")
    assert (found.python, found.mounts, found.packages) == ("/workspace/.venv/bin/python", (), "")
    assert found.env == {"VIRTUAL_ENV": "/workspace/.venv"}


def test_one_without_pip_is_given_a_directory_of_its_own_for_it(tmp_path: Path) -> None:
    made = make_environment(tmp_path / ".venv")
    settings = {"profiles": {"default": {"env": {"PYTHONPATH": "/srv/mine"}}}}
    env = resolve(tmp_path, {"python": ".venv"}, **settings).env
    assert env["PYTHONPATH"] == f"/srv/mine:{APART}"
    assert env["PATH"].startswith(f"/workspace/.venv/bin:{APART}/bin:")
    (made / "lib" / OWN / "site-packages" / "pip").mkdir()
    env = resolve(tmp_path, {"python": ".venv"}, **settings).env
    assert (env["PYTHONPATH"], APART in env["PATH"]) == ("/srv/mine", False)


def test_another_one_takes_it_from_the_server_if_it_is_of_the_same_python(tmp_path: Path) -> None:
    make_environment(tmp_path / ".venv")
    assert find_project_python(tmp_path, ".venv").env["AGENTBOX_PACKAGES"]
    make_environment(tmp_path / "other", library="python3.99")
    with pytest.raises(
        InvalidRequest, match=r"not python3\.99. Install it there \(`uv add --dev ipykernel`\)"
    ) as caught:
        find_project_python(tmp_path, "other")
    assert caught.value.field == "python"


def test_what_code_inside_writes_mounts_nothing_of_the_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    make_environment(secret / "env")
    folder = tmp_path / "work"
    folder.mkdir()
    for name, home in (("a", str(secret / "env" / "bin")), ("b", "/usr/../" + str(secret)), ("c", str(tmp_path))):
        make_environment(folder / name, home, has_kernel=True)
        with pytest.raises(InvalidRequest, match=r"sandboxes cannot see. Add that Python's folder to Policy\.mounts"):
            find_project_python(folder, name)
    mount = Mount(secret, str(secret))
    assert find_project_python(folder, "a", mounts=[mount]).mounts == ()
    (folder / "link").symlink_to(secret / "env")
    (folder / "fifo").mkdir()
    os.mkfifo(folder / "fifo" / "pyvenv.cfg")
    for name in ("link", "fifo", "none", "a/bin"):
        with pytest.raises(InvalidRequest, match="not a virtual environment"):
            find_project_python(folder, name)


def test_interpreters_of_uv_are_mounted_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "pythons"
    (store / "cpython-3.12.1" / "bin").mkdir(parents=True)
    (store / "cpython-3.12").symlink_to("cpython-3.12.1")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(store))
    make_environment(tmp_path / "work" / ".venv", str(store / "cpython-3.12" / "bin"), has_kernel=True)
    found = {mount.target for mount in find_project_python(tmp_path / "work", ".venv").mounts}
    assert found == {str(store / "cpython-3.12"), str(store / "cpython-3.12.1")}
    make_environment(tmp_path / "work" / "all", str(store), has_kernel=True)
    with pytest.raises(InvalidRequest):
        find_project_python(tmp_path / "work", "all")


def test_every_way_to_name_it_is_the_same(tmp_path: Path) -> None:
    make_environment(tmp_path / ".venv")
    for value in (".venv", str(tmp_path / ".venv")):
        spec = resolve(tmp_path, {"python": value})
        assert spec.python == "/workspace/.venv/bin/python"
        assert spec.env["PATH"].startswith("/workspace/.venv/bin:")
        assert spec.env["VIRTUAL_ENV"] == "/workspace/.venv"
    assert resolve(tmp_path, {}, profiles={"default": {"python": ".venv"}}).python == "/workspace/.venv/bin/python"
    assert find_relative(tmp_path, str(tmp_path / ".venv" / "bin" / "python3")) == ".venv"
    assert find_relative(tmp_path, "/usr/bin/python3") is None
    with pytest.raises(InvalidRequest, match="private one"):
        resolve(tmp_path, {"python": ".venv", "workspace": "private"})
    for value in ("../x", "a//b", "./.venv"):
        with pytest.raises(InvalidRequest, match="must be an absolute path"):
            resolve(tmp_path, {"python": value})


def test_the_servers_own_environment_stays_hidden_and_is_used_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    assert resolve(tmp_path, {"python": ".venv"}).python == sys.executable
