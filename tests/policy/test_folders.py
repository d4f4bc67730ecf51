"""Which host folders may be shown, and which written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from traitlets.config import Config

from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.policy.folders import check_mount, check_workspace, is_beneath, private_directories
from jupyter_agentbox.policy.policy import Policy


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.mark.parametrize(
    ("path", "directory", "is_inside"),
    [("/a/b", "/a", True), ("/a", "/a", True), ("/ab", "/a", False), ("/a", "/a/b", False), ("/a", "/", True)],
)
def test_beneath_goes_by_whole_names(path: str, directory: str, is_inside: bool) -> None:
    assert is_beneath(path, [directory]) is is_inside


@pytest.mark.parametrize(
    "path", ["/", "/etc", "/root", "/home", "/home/somebody", "/var", "/tmp", "/proc/1", "/dev", "/run"]
)
def test_system_directories_and_homes_are_never_mounted(path: str) -> None:
    with pytest.raises(PolicyRefused, match="Cannot mount"):
        check_mount(Path(path))


def test_a_mount_neither_holds_nor_touches_private_state(tmp_path: Path, home: Path) -> None:
    state = tmp_path / "data" / "agentbox"
    state.mkdir(parents=True)
    link = tmp_path / "harmless"
    link.symlink_to(state.parent)
    for path in (home, state, state / "sandboxes", state.parent, link):
        with pytest.raises(PolicyRefused):
            check_mount(path, [state])
    check_mount(tmp_path / "data" / "other", [state])


def test_a_notebooks_own_folder_is_fine(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert check_workspace(link, (".*",)) == (folder, (".*",))


def test_a_home_itself_is_refused_unless_it_is_named(home: Path) -> None:
    with pytest.raises(PolicyRefused, match=r"home directory.*bash_profile") as caught:
        check_workspace(home, (".*",))
    assert caught.value.setting == "Policy.allowed_workspaces"
    assert check_workspace(home, (".*",), allowed=[str(home)])[0] == home


@pytest.mark.parametrize("path", ["/", "/usr/share", "/etc", "/proc", "/dev/shm", "/tmp", "/root"])
def test_system_directories_are_never_work_folders(path: str) -> None:
    with pytest.raises(PolicyRefused, match="work folder"):
        check_workspace(Path(path), (".*",), allowed=["/", path])


def test_a_folder_that_is_yet_to_be_made_is_judged_by_its_path(home: Path, tmp_path: Path) -> None:
    policy = Policy(config=Config({"Policy": {"state_dir": str(tmp_path / "state")}}))
    assert policy.may_use(home / "notebooks")
    assert not policy.may_use(home)
    assert not policy.may_use(Path("/usr/notebooks"))
    assert not policy.may_use(tmp_path / "state" / "notebooks")
    narrow = Policy(config=Config({"Policy": {"allowed_workspaces": [str(tmp_path / "projects")]}}))
    assert narrow.may_use(tmp_path / "projects" / "notebooks")
    assert not narrow.may_use(home / "notebooks")


def test_a_folder_that_everybody_writes_is_refused_unless_it_is_named(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(PolicyRefused, match="a shared directory"):
        check_workspace(shared, ())
    assert check_workspace(shared, (), allowed=[str(shared)])[0] == shared


def test_allowed_workspaces_holds_against_links_and_dots(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    allowed = [str(tmp_path / "in")]
    assert check_workspace(tmp_path / "in" / "deep", (), allowed=allowed)[0] == tmp_path / "in" / "deep"
    for path in (tmp_path / "in" / "link", tmp_path / "in" / ".." / "out", tmp_path):
        with pytest.raises(PolicyRefused, match=r"not in Policy\.allowed_workspaces"):
            check_workspace(path, (), allowed=allowed)


def test_private_state_is_neither_work_folder_nor_in_one(tmp_path: Path) -> None:
    state = tmp_path / "work" / "deep" / "state"
    state.mkdir(parents=True)
    for path in (state, tmp_path / "work"):
        with pytest.raises(PolicyRefused):
            check_workspace(path, (".*",), private=[state])
    # At the top level its name is hidden instead, and so it is wherever a pattern hides it already.
    assert check_workspace(state.parent, (".*",), private=[state])[1] == (".*", "state")
    assert check_workspace(state.parent, ("st*",), private=[state])[1] == ("st*",)


def test_the_servers_own_python_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv[1]").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv[1]"))
    assert check_workspace(tmp_path, (".*",))[1] == (".*", "venv[[]1]")
    with pytest.raises(PolicyRefused, match="could escape"):
        check_workspace(tmp_path / "venv[1]", (".*",))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "tools" / "venv"))
    with pytest.raises(PolicyRefused, match="could escape"):
        check_workspace(tmp_path, (".*",))


def test_a_missing_folder_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_workspace(tmp_path / "none", ())
    assert caught.value.field == "workspace"


def test_jupyters_tokens_and_our_sockets_are_private() -> None:
    from jupyter_core.paths import jupyter_config_dir, jupyter_runtime_dir

    private = private_directories()
    assert {Path(jupyter_runtime_dir()), Path(jupyter_config_dir()), Path(f"/tmp/agentbox-{os.geteuid()}")} <= set(
        private
    )
