"""What doctor finds around the runtime, which checks itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config, Configurable

from jupyter_agentbox.cli import doctor
from jupyter_agentbox.cli.machine import DoctorCommand
from jupyter_agentbox.errors import RuntimeUnavailable
from jupyter_agentbox.jupyter.kernelspecs import OWN_SPEC
from jupyter_agentbox.policy import configfiles
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes import Check, namespaces
from jupyter_agentbox.runtimes.runsc import checks


class FakeRuntime:
    """Finds what the test says."""

    def __init__(self, *found: Check | Exception) -> None:
        self.found = found

    def check(self) -> list[Check]:
        for item in self.found:
            if isinstance(item, Exception):
                raise item
        return list(self.found)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "first"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "second"))
    configfiles._cache.clear()
    # What it asks of a started server is tested in tests/promises.
    monkeypatch.setattr(doctor, "check_server", lambda: iter(()))
    yield tmp_path
    configfiles._cache.clear()


def use(monkeypatch: pytest.MonkeyPatch, *found: Check | Exception) -> None:
    monkeypatch.setattr(doctor, "load_runtime", lambda name, **options: FakeRuntime(*found))


def examine(**settings: Any) -> dict[str, Check]:
    parent = Configurable(config=Config({"Policy": {"allowed_hosts": ["example.org"], **settings}}))
    return {check.name: check for check in doctor.examine(parent)}


def install(folder: Path, spec: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))


def test_without_subordinate_ids_it_says_what_that_means_and_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "find_spare_ids", lambda uid: None)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("LOGNAME", "ada")
    found = checks._check_spare_ids()
    assert found.is_ok
    for words in (
        "uid 0 inside",
        "DAC_OVERRIDE, KILL, NET_BIND_SERVICE, SETGID, SETUID",
        "guest program",
        "start cold",
    ):
        assert words in found.message
    assert found.remedy.startswith("apt-get install uidmap && usermod --add-subuids")
    assert found.remedy.endswith(" ada")


def test_what_works_and_can_be_made_better_is_printed_as_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Check("limits", True, "enforced"), Check("ids", True, "none\nwhich means this", "get some")]
    monkeypatch.setattr(doctor, "examine", lambda *arguments, **options: found)
    assert DoctorCommand().run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["ok     limits: enforced", "note   ids: none", "       which means this"]
    assert lines[3] == "       fix: get some"


def test_a_wrong_setting_is_the_only_finding() -> None:
    found = examine(max_memroy=1)
    assert list(found) == ["settings"]
    assert not found["settings"].is_ok
    assert "max_memory" in found["settings"].message


def test_no_gvisor_names_the_command_that_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, RuntimeUnavailable("no runsc"))
    found = examine()["runtime"]
    assert (found.is_ok, found.message, found.remedy) == (False, "no runsc", "jupyter agentbox setup")


def test_a_check_that_breaks_is_a_finding_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, ZeroDivisionError("oops"))
    found = examine()
    assert not found["runtime"].is_ok
    assert "oops" in found["runtime"].message
    assert "kernelspecs" in found


def test_a_limit_that_policy_gives_up_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Check("limit on cpus", False, "no control group"), Check("limit on memory", False, "none"))
    found = examine(accept_unenforced=["cpus"])
    assert found["limit on cpus"].is_ok
    assert "accepted by Policy.accept_unenforced" in found["limit on cpus"].message
    assert not found["limit on memory"].is_ok


def test_a_state_directory_open_to_others_is_found(places: Path) -> None:
    state = places / "state"
    assert next(doctor.check_state(state)).is_ok
    state.mkdir(mode=0o755)
    state.chmod(0o755)
    found = next(doctor.check_state(state))
    assert (found.is_ok, found.remedy) == (False, f"chmod 700 {state}")
    state.chmod(0o700)
    found = next(doctor.check_state(state))
    assert (found.is_ok, found.remedy) == (True, "")


def test_a_kernelspec_that_hides_a_sandboxed_one_is_found(places: Path) -> None:
    plain = {"argv": ["python"], "display_name": "x", "language": "python"}
    install(places / "first/kernels/twin", plain)
    install(places / "second/kernels/twin", dict(OWN_SPEC))
    found = [check for check in doctor.check_kernelspecs() if not check.is_ok]
    assert "'twin'" in found[0].message
    assert found[0].remedy == f"rm -r {places / 'first/kernels/twin'}"


def test_hosts_that_anybody_can_put_files_on_are_noted() -> None:
    policy = Policy(config=Config({"Policy": {"allowed_hosts": ["example.org", "storage.googleapis.com"]}}))
    found = next(doctor.check_hosts(policy))
    assert found.message.startswith("hosts: example.org, storage.googleapis.com")
    assert "note: storage.googleapis.com serve files of many owners" in found.message
    policy = Policy(config=Config({"Policy": {"allowed_hosts": []}}))
    assert next(doctor.check_hosts(policy)).message == "hosts: none\nhosts that a person may allow: *:*"


def test_a_preset_that_stands_for_nothing_is_noted_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = next(doctor.check_hosts(Policy(config=Config({"Policy": {"allowed_hosts": ["npm", "github"]}}))))
    assert "note: the preset 'npm' is empty: npm is not installed" in found.message
    assert "'github' is empty" not in found.message
