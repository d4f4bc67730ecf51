"""Kernelspecs as files: what is shown, what is hidden, what a copy looks like."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from support import ROOT
from traitlets.config import Config

from jupyter_agentbox.errors import InvalidConfig, InvalidRequest, NotFound
from jupyter_agentbox.jupyter import kernelspecs
from jupyter_agentbox.jupyter.kernelspecs import (
    OWN_SPEC,
    AgentboxKernelSpecManager,
    find_shadowed,
    install_copy,
    install_own,
)
from jupyter_agentbox.jupyter.provisioner import AgentboxProvisioner


@pytest.fixture(autouse=True)
def user_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Two directories of kernels, the user's before the environment's."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setattr("jupyter_core.paths.ENV_JUPYTER_PATH", [str(tmp_path / "env" / "share" / "jupyter")])
    monkeypatch.setattr("jupyter_core.paths.SYSTEM_JUPYTER_PATH", [])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    return tmp_path / "user"


def write(base: Path, name: str, **spec: Any) -> Path:
    directory = base / "kernels" / name
    directory.mkdir(parents=True)
    full = {"argv": ["/opt/x/bin/k", "{connection_file}"], "display_name": name, "language": "x", **spec}
    (directory / "kernel.json").write_text(json.dumps(full))
    return directory


def test_the_spec_of_the_wheel_is_the_spec_in_code() -> None:
    path = ROOT / "kernelspecs" / "agentbox" / "kernel.json"
    assert json.loads(path.read_text()) == OWN_SPEC


def test_jupyter_starts_our_spec_with_our_provisioner() -> None:
    install_own(prefix=sys.prefix)
    manager = KernelManager(kernel_name="agentbox")
    made = KernelProvisionerFactory.instance().create_provisioner_instance("id", manager.kernel_spec, parent=manager)
    assert isinstance(made, AgentboxProvisioner)


def test_our_spec_is_for_this_user_where_the_environment_cannot_be_written_to(user_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("no folder")
    assert kernelspecs.ensure_installed() == user_dir / "kernels/agentbox"


def test_only_sandboxed_kernels_are_shown_and_startable(user_dir: Path) -> None:
    assert kernelspecs.ensure_installed() == kernelspecs.ensure_installed()
    write(user_dir, "plain")
    write(user_dir, "other", metadata={"kernel_provisioner": {"provisioner_name": "local-provisioner"}})
    (user_dir / "kernels" / "broken").mkdir()
    (user_dir / "kernels" / "broken" / "kernel.json").write_text("{")
    manager = AgentboxKernelSpecManager()
    assert set(manager.find_kernel_specs()) == {"agentbox"}
    assert set(manager.get_all_specs()) == {"agentbox"}
    for name in ("plain", "other", "PLAIN"):
        with pytest.raises(NoSuchKernel):
            manager.get_kernel_spec(name)
    assert {"plain", "other", "python3"} <= set(KernelSpecManager().find_kernel_specs()), "nothing is hidden unasked"


def test_an_admin_may_let_named_kernels_run_outside(user_dir: Path) -> None:
    write(user_dir, "plain")
    config = Config({"AgentboxKernelSpecManager": {"unsandboxed_kernelspecs": {"plain"}}})
    assert set(AgentboxKernelSpecManager(config=config).find_kernel_specs()) == {"plain"}


def test_a_users_spec_that_shadows_ours_is_hidden_and_found(user_dir: Path) -> None:
    ours = install_own(prefix=sys.prefix)
    theirs = write(user_dir, "Agentbox")
    with pytest.raises(NoSuchKernel):
        AgentboxKernelSpecManager().get_kernel_spec("agentbox")
    (shadowed,) = find_shadowed()
    assert (shadowed.name, shadowed.winner, shadowed.losers, shadowed.is_unboxed) == ("agentbox", theirs, (ours,), True)


def test_two_copies_of_a_sandboxed_spec_are_no_danger() -> None:
    first, second = install_own(), install_own(prefix=sys.prefix)
    (shadowed,) = find_shadowed()
    assert (shadowed.winner, shadowed.losers, shadowed.is_unboxed) == (first, (second,), False)


def test_a_copy_keeps_everything_except_where_it_runs(user_dir: Path) -> None:
    source = write(
        user_dir,
        "ir",
        argv=["/usr/lib/R/bin/R", "--args", str(user_dir / "kernels" / "ir" / "start.R"), "{connection_file}"],
        env={"A": "${B}"},
        interrupt_mode="message",
        metadata={"debugger": False, "x": 1},
    )
    (source / "start.R").write_text("1")
    (source / "logo-64x64.png").write_bytes(b"png")
    copy = install_copy("ir", profile="offline", prefix=sys.prefix)
    spec = json.loads((copy / "kernel.json").read_text())
    assert copy.name == "ir-agentbox"
    assert copy.parents[3] == Path(sys.prefix)
    assert (copy / "logo-64x64.png").read_bytes() == b"png"
    command = ["/usr/lib/R/bin/R", "--args", "{resource_dir}/start.R", "{connection_file}"]
    assert spec["argv"] == kernelspecs.guard_argv(command)
    assert spec["env"] == {"A": "${B}"}
    assert spec["interrupt_mode"] == "message"
    assert spec["display_name"] == "ir (sandboxed)"
    assert spec["metadata"] == {
        "debugger": False,
        "x": 1,
        "kernel_provisioner": {"provisioner_name": "agentbox-provisioner", "config": {"profile": "offline"}},
    }
    assert set(AgentboxKernelSpecManager().find_kernel_specs()) == {"ir-agentbox"}


def test_the_native_python_kernel_can_be_copied(user_dir: Path) -> None:
    copy = install_copy("python3", name="boxed", display_name="Boxed")
    assert copy == user_dir / "kernels" / "boxed"
    spec = json.loads((copy / "kernel.json").read_text())
    assert spec["display_name"] == "Boxed"
    assert "{connection_file}" in spec["argv"]
    assert (copy / "logo-svg.svg").exists()


def test_a_copy_of_an_unknown_or_sandboxed_kernelspec_is_refused() -> None:
    install_own()
    with pytest.raises(NotFound, match=r"kernelspec 'nope' is not installed; installed: .*python3"):
        install_copy("nope")
    with pytest.raises(InvalidRequest, match="is already sandboxed"):
        install_copy("agentbox")
    with pytest.raises(InvalidRequest, match="Invalid kernel name"):
        install_copy("python3", name="a b")


def test_enforcement_is_a_setting_that_is_added_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "jupyter_agentbox_config.json"
    assert kernelspecs.enforce(path.parent) == path
    assert json.loads(path.read_text()) == {"AgentboxExtension": {"enforce": True}}
    path.write_text('{"Policy": {"max_memory": "1 GiB"}, "AgentboxExtension": {"enforce": false, "terminals": "off"}}')
    kernelspecs.enforce(path.parent)
    assert json.loads(path.read_text()) == {
        "Policy": {"max_memory": "1 GiB"},
        "AgentboxExtension": {"enforce": True, "terminals": "off"},
    }
    for broken in ("{", "[]", '{"AgentboxExtension": 1}'):
        path.write_text(broken)
        with pytest.raises(InvalidConfig, match="cannot add"):
            kernelspecs.enforce(path.parent)
        assert path.read_text() == broken
    assert kernelspecs.enforce().parts[-3:] == ("etc", "jupyter", "jupyter_agentbox_config.json")


def test_python3_is_ours_where_there_is_no_other(user_dir: Path) -> None:
    install_own(prefix=sys.prefix)
    manager = AgentboxKernelSpecManager()
    for name in ("python3", "python", "Python3"):
        assert manager.get_kernel_spec(name).display_name == "Python (sandboxed)"
    assert set(manager.find_kernel_specs()) == {"agentbox"}
    install_copy("python3", name="python3")
    assert manager.get_kernel_spec("python3").display_name != "Python (sandboxed)"
    config = Config({"KernelSpecManager": {"allowed_kernelspecs": {"other"}}})
    with pytest.raises(NoSuchKernel, match="Offered kernels: none"):
        AgentboxKernelSpecManager(config=config).get_kernel_spec("python3")


def test_a_guarded_command_is_what_it_was(user_dir: Path) -> None:
    argv = ["k", "{connection_file}", "agentbox-command"]
    assert kernelspecs.real_argv(kernelspecs.guard_argv(argv)) == argv
    assert kernelspecs.real_argv(argv[:2]) == argv[:2]
