"""A pip for environments that have none: what is written where, and what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from jupyter_agentbox.guest import own_pip

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    venv.create(tmp_path / "it's", with_pip=False, symlinks=True)
    return tmp_path / "it's"


@pytest.fixture
def site(prefix: Path) -> Path:
    return prefix / "lib" / f"python{VERSION}" / "site-packages"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=100)


def test_the_pip_that_comes_with_python_is_unpacked_at_its_first_run(prefix: Path, site: Path) -> None:
    own_pip.provide(str(prefix / "bin" / "python"), "")
    assert sorted(path.name for path in (prefix / "bin").glob("pip*")) == ["pip", "pip3", f"pip{VERSION}"]
    assert [path.name for path in site.iterdir()] == ["pip.py"], "nothing is unpacked at a start"
    for command in ((prefix / "bin" / "pip",), (prefix / "bin" / "python", "-m", "pip")):
        done = run(*command, "--version")
        assert f"from {site}/pip (python {VERSION})" in done.stdout, done.stderr
    assert not (site / "pip.py").exists()
    assert not list(site.glob(".pip-*"))
    assert "pip" in run(prefix / "bin" / "pip3", "list", "--format=freeze").stdout


def test_two_first_runs_at_once_both_work(prefix: Path, site: Path) -> None:
    own_pip.provide(str(prefix / "bin" / "python"), "")
    started = [
        subprocess.Popen(
            [prefix / "bin" / "pip", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in started:
        out, err = process.communicate(timeout=100)
        assert out.startswith("pip "), err
    assert not list(site.glob(".pip-*"))


def test_an_environment_in_the_work_folder_is_left_alone(
    prefix: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = prefix.parent.parent / f"{prefix.parent.name}-link"
    link.symlink_to(prefix.parent)
    monkeypatch.setattr(own_pip, "WORKSPACE", str(prefix.parent))
    for python in (prefix / "bin" / "python", link / prefix.name / "bin" / "python"):
        own_pip.provide(str(python), "")
        assert own_pip.find_sites(str(python), "") == []
    assert not list(site.iterdir())
    assert not list((prefix / "bin").glob("pip*"))


def test_for_an_environment_in_the_work_folder_it_is_beside(
    prefix: Path, site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    apart = tmp_path / "apart"
    monkeypatch.setattr(own_pip, "WORKSPACE", str(prefix.parent))
    monkeypatch.setattr(own_pip, "APART", str(apart))
    own_pip.provide(str(prefix / "bin" / "python"), f"{prefix}/bin:{apart}/bin:/usr/bin")
    before = sorted(prefix.rglob("*"))
    env = {**os.environ, "PYTHONPATH": str(apart)}
    for command in ([apart / "bin" / "pip"], [prefix / "bin" / "python", "-m", "pip"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=100, env=env)
        assert f"from {apart}/pip (python {VERSION})" in done.stdout, done.stderr
    assert sorted(prefix.rglob("*")) == before


def test_an_environment_with_pip_is_left_alone_and_so_are_its_scripts(prefix: Path, site: Path) -> None:
    (site / "pip").mkdir()
    (prefix / "bin" / "pip").write_text("mine")
    own_pip.provide("python", f"relative:/nonexistent:{prefix}/bin")
    assert not (site / "pip.py").exists()
    assert (prefix / "bin" / "pip").read_text() == "mine"
    assert "-m pip" in (prefix / "bin" / "pip3").read_text(), "without it, PATH would lead to another Python's"


def test_packages_of_the_base_count_if_the_environment_uses_them(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "lib" / f"python{VERSION}" / "site-packages" / "pip").mkdir(parents=True)
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    for word, is_written in (("true", False), ("false", True)):
        text = f"home = {base}/bin\ninclude-system-site-packages = {word}\n"
        (tmp_path / "venv" / "pyvenv.cfg").write_text(text)
        own_pip.provide(str(tmp_path / "venv" / "bin" / "python"), "")
        assert (tmp_path / "venv" / "lib" / f"python{VERSION}" / "site-packages" / "pip.py").exists() is is_written


@pytest.mark.parametrize("python", ["/nonexistent/python", "python", ""])
def test_what_is_no_interpreter_is_no_error(python: str, tmp_path: Path) -> None:
    own_pip.provide(python, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_without_any_copy_the_message_says_what_to_do(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_pip, "find_wheel", lambda folder, version: "")
    own_pip.provide(str(prefix / "bin" / "python"), "")
    done = run(prefix / "bin" / "pip", "install", "x")
    assert done.returncode == 1
    assert "Install pip into the environment outside" in done.stderr


def test_the_interpreters_own_wheel_is_preferred(tmp_path: Path) -> None:
    bundled = tmp_path / "lib" / "python3.99" / "ensurepip" / "_bundled"
    bundled.mkdir(parents=True)
    with zipfile.ZipFile(bundled / "pip-1-py3-none-any.whl", "w"):
        pass
    assert own_pip.find_wheel(str(tmp_path / "bin"), "3.99") == str(bundled / "pip-1-py3-none-any.whl")
    assert os.path.isfile(own_pip.find_wheel("/nonexistent/bin", "3.99"))
