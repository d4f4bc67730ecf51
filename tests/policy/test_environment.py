"""Variables and mounts that come from the host."""

from __future__ import annotations

import os
import venv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_agentbox.egress import PROXY_ENV
from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.policy.environment import bin_dirs, environment_mounts, kernel_environment
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


def make_python(prefix: Path) -> Path:
    """Make what tells an installation of Python from a folder with programs; return its interpreter."""
    (prefix / "lib" / "python3.11").mkdir(parents=True)
    (prefix / "lib" / "python3.11" / "os.py").touch()
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python3").symlink_to("/bin/sh")
    return prefix / "bin" / "python3"


def make_program(path: Path, text: str = "\x7fELF") -> str:
    """Make an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_an_environment_made_from_another_brings_both(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    make_python(first)
    program = make_program(second / "bin" / "python3")
    (second / "pyvenv.cfg").write_text(f"home = {first}/bin\n")
    assert {str(first), str(second)} <= set(targets(program))


def test_links_and_scripts_are_followed(tmp_path: Path, base: list[str]) -> None:
    make_python(tmp_path / "other")
    tool = make_program(tmp_path / "opt" / "bin" / "tool", f"#!{tmp_path}/other/bin/python3 -x\n")
    (tmp_path / "alias").symlink_to("opt/bin/tool")
    assert targets(str(tmp_path / "alias")) == sorted([*base, str(tmp_path / "alias"), tool, str(tmp_path / "other")])


def test_a_program_of_a_folder_that_is_no_environment_comes_alone(tmp_path: Path, base: list[str]) -> None:
    program = make_program(tmp_path / "app" / "bin" / "python3")
    (tmp_path / "app" / "secret.txt").write_text("secret")
    # Packages that were installed there make no environment of it, nor does a Python somewhere below.
    (tmp_path / "app" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    make_python(tmp_path / "app" / "runtime")
    assert targets(program) == sorted([*base, program])


@pytest.mark.parametrize("mark", ["pyvenv.cfg", "conda-meta", "lib/python3.11/os.py", "lib/pypy3.10/os.py"])
def test_a_python_environment_comes_whole(tmp_path: Path, base: list[str], mark: str) -> None:
    program = make_program(tmp_path / "env" / "bin" / "python3")
    make_program(tmp_path / "env" / mark, "")
    for name in (".gitignore", ".lock", ".condarc", "CACHEDIR.TAG"):
        (tmp_path / "env" / name).touch()
    assert targets(program) == sorted([*base, str(tmp_path / "env")])


@pytest.mark.parametrize("name", [".git", ".env", ".env.local", ".ssh/id", ".aws/credentials", ".netrc", ".venv/x"])
def test_an_environment_in_the_midst_of_other_files_is_refused(tmp_path: Path, name: str) -> None:
    program = make_program(tmp_path / "project" / "bin" / "python3")
    (tmp_path / "project" / "pyvenv.cfg").write_text("home = /usr/bin\n")
    make_program(tmp_path / "project" / name)
    with pytest.raises(PolicyRefused, match=rf"also contains \{name.split('/')[0]}, .*folder of its own"):
        targets(program)


def test_a_script_shows_no_file_or_folder_that_is_no_program(tmp_path: Path, base: list[str]) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    for name in ("secrets", "secrets/key"):
        script = make_program(tmp_path / "script", f"#!{tmp_path}/{name}\n")
        assert targets(script) == sorted([*base, script])


def test_a_circle_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidRequest, match="not installed on this machine"):
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
    with pytest.raises(InvalidRequest, match="'no-such-kernel' is not installed on this machine"):
        targets("no-such-kernel")
