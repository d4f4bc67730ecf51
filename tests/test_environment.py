"""Variables and mounts that come from the host."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_agentbox.egress import PROXY_ENV
from jupyter_agentbox.environment import bin_dirs, environment_mounts, kernel_environment
from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.spec import Limits

SECRETS = {
    "CANARY": "x",
    "JUPYTER_TOKEN": "t",
    "JPY_API_TOKEN": "t",
    "AWS_SECRET_ACCESS_KEY": "k",
    "PYTHONPATH": "/srv",
    "PYTHONSTARTUP": "/srv/x",
    "LD_PRELOAD": "/srv/x.so",
    "JPY_PARENT_PID": "1",
    "SSH_AUTH_SOCK": "/tmp/s",
    "HOME": "/home/alice",
    "KERNEL_SECRET": "inherited",
}


def build(host: dict[str, str] | None = None, **more: object) -> dict[str, str]:
    return kernel_environment(host or {}, **{"limits": Limits(), **more})  # type: ignore[arg-type]


def test_nothing_of_the_servers_environment_goes_inside() -> None:
    env = build(SECRETS, request=dict(SECRETS))
    assert not set(SECRETS) - {"HOME"} & set(env)
    assert env["HOME"] == "/home/user"
    assert not {"x", "t", "k", "/home/alice", "inherited"} & set(env.values())


@settings(deadline=None)
@given(
    st.dictionaries(st.text(st.characters(codec="ascii", exclude_characters="=\0"), min_size=1), st.text(max_size=9))
)
def test_only_allowed_names_come_from_the_host(host: dict[str, str]) -> None:
    fixed = set(build())
    for name in set(build(host)) - fixed:
        assert name in {"TZ", "COLORTERM", "NO_COLOR", "OPENBLAS_CORETYPE", "LANG", "LANGUAGE"} or name.startswith(
            "LC_"
        )


def test_locale_and_time_zone_do_go_inside_and_there_is_always_a_utf8_locale() -> None:
    env = build({"LANG": "de_DE.UTF-8", "LC_TIME": "C", "TZ": "Europe/Berlin"})
    assert (env["LANG"], env["LC_TIME"], env["TZ"]) == ("de_DE.UTF-8", "C", "Europe/Berlin")
    assert build()["LANG"] == "C.UTF-8"
    assert "LANG" not in build({"LC_ALL": "C.UTF-8"})


def test_a_launch_request_adds_the_notebooks_path_and_what_its_caller_set() -> None:
    host = {"KERNEL_GATEWAY_KEY": "secret", "FOO": "1"}
    env = build(host, request={**host, "JPY_SESSION_NAME": "/srv/a.ipynb", "KERNEL_USERNAME": "bob", "FOO": "2"})
    assert env["JPY_SESSION_NAME"] == "/workspace/a.ipynb"
    assert env["KERNEL_USERNAME"] == "bob"
    assert "KERNEL_GATEWAY_KEY" not in env
    assert "FOO" not in env
    assert build(host, request={"FOO": "2"}, passthrough=["FOO"])["FOO"] == "2"


def test_a_kernelspec_sets_variables_and_learns_none_of_the_hosts() -> None:
    env = build(
        {"CANARY": "x"}, templates={"A": "${CANARY}-$CANARY", "B": "${HOME}/b", "C": "5$$", "LD_PRELOAD": "/w/x.so"}
    )
    assert env["A"] == "${CANARY}-$CANARY"
    assert env["B"] == "/home/user/b"
    assert env["C"] == "5$"
    assert env["LD_PRELOAD"] == "/w/x.so"  # its author's code runs inside anyway


@pytest.mark.parametrize("templates", [{"A=B": "x"}, {"": "x"}, {"A": "x\0"}, {"A": 5}])
def test_a_kernelspecs_malformed_variables_are_refused(templates: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="kernelspec's env"):
        build(templates=templates)


def test_nobodys_proxy_replaces_the_gates() -> None:
    theirs = dict.fromkeys(PROXY_ENV, "http://proxy.example.org:3128")
    env = build(theirs, request=theirs, templates=theirs, profile=theirs, passthrough=list(theirs), egress=PROXY_ENV)
    assert {name: env[name] for name in PROXY_ENV} == PROXY_ENV


def test_jpy_parent_pid_never_goes_inside_by_any_way() -> None:
    pid = {"JPY_PARENT_PID": "1"}
    assert "JPY_PARENT_PID" not in build(pid, request=pid, templates=pid, profile=pid, passthrough=list(pid))


def test_certificate_bundles_go_inside_only_where_they_can_be_read() -> None:
    host = {"SSL_CERT_FILE": "/etc/ssl/certs/ca.crt", "REQUESTS_CA_BUNDLE": "/home/alice/ca.pem", "PIP_CERT": ""}
    env = build(host, is_visible=lambda path: path.startswith("/etc/ssl"))
    assert env["SSL_CERT_FILE"] == "/etc/ssl/certs/ca.crt"
    assert not {"REQUESTS_CA_BUNDLE", "PIP_CERT"} & set(env)


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, 1), (1.0, 1), (1.5, min(2, os.cpu_count() or 1))])
def test_numeric_libraries_start_no_more_threads_than_the_limit(cpus: float, threads: int) -> None:
    assert build(limits=Limits(cpus=cpus))["OMP_NUM_THREADS"] == str(threads)


def targets(executable: str | None, **more: object) -> list[str]:
    mounts = environment_mounts(executable, **more)  # type: ignore[arg-type]
    assert all(str(mount.source) == mount.target and not mount.is_writable for mount in mounts)
    return [mount.target for mount in mounts]


@pytest.fixture
def base() -> list[str]:
    """What the guest's interpreter needs on this machine by itself."""
    return targets("/bin/sh")


def test_the_system_needs_no_mount(base: list[str]) -> None:
    assert all(not path.startswith(("/usr/", "/bin")) for path in base)
    assert targets("sh") == base
    assert bin_dirs("/usr/bin/env") == ()


def test_a_virtual_environment_brings_its_prefix_and_its_base(tmp_path: Path, base: list[str]) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    found = targets(str(python))
    assert found == sorted({*base, str(tmp_path / "env")})
    # What is mounted is enough for every link of the chain.
    assert any(str(python.resolve()).startswith((path + "/", "/usr/")) for path in found)
    assert bin_dirs(str(python)) == (str(tmp_path / "env" / "bin"),)


def test_an_environment_made_from_another_brings_both(tmp_path: Path) -> None:
    first = tmp_path / "first" / "bin"
    first.mkdir(parents=True)
    (first / "python3").symlink_to(sys.executable)
    second = tmp_path / "second"
    (second / "bin").mkdir(parents=True)
    (second / "pyvenv.cfg").write_text(f"home = {first}\n")
    subprocess.run(["cp", "-L", "/bin/sh", second / "bin" / "python3"], check=True, timeout=10)
    assert {str(tmp_path / "first"), str(second)} <= set(targets(str(second / "bin" / "python3")))


def test_links_and_scripts_are_followed(tmp_path: Path) -> None:
    (tmp_path / "opt" / "bin").mkdir(parents=True)
    real = tmp_path / "opt" / "bin" / "tool"
    real.write_text(f"#!{tmp_path}/other/bin/lang -x\n")
    real.chmod(0o755)
    (tmp_path / "other" / "bin").mkdir(parents=True)
    (tmp_path / "other" / "bin" / "lang").symlink_to("/bin/sh")
    (tmp_path / "alias").symlink_to("opt/bin/tool")
    assert {str(tmp_path / name) for name in ("alias", "opt", "other")} <= set(targets(str(tmp_path / "alias")))


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidRequest, match="not on this machine"):
        targets(str(tmp_path / "a"))


def test_a_program_in_a_home_comes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: list[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("bin", ".local/bin"):
        program = tmp_path / folder / "kernel"
        program.parent.mkdir(parents=True)
        program.write_bytes(b"\x7fELF")
        program.chmod(0o755)
        assert targets(str(program)) == sorted([*base, str(program)])


def test_an_environment_that_is_a_home_or_holds_state_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    python = str(tmp_path / "env" / "bin" / "python")
    with pytest.raises(PolicyRefused, match="private state"):
        targets(python, private=[tmp_path / "env" / "share" / "agentbox"])
    monkeypatch.setenv("HOME", str(tmp_path / "env"))
    with pytest.raises(PolicyRefused, match="system or home directory"):
        targets(python)


def test_a_kernelspecs_own_folder_is_shown_unless_it_is_too_much(tmp_path: Path) -> None:
    assert str(tmp_path) in targets("sh", resource_dir=tmp_path)
    with pytest.raises(PolicyRefused):
        targets("sh", resource_dir=Path("/root"))


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidRequest, match="'no-such-kernel' is not on this machine"):
        targets("no-such-kernel")
