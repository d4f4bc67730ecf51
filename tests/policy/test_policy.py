"""What requests, profiles and settings can and cannot do."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traitlets.config import Config, Configurable

from jupyter_agentbox.egress import PROXY_ENV
from jupyter_agentbox.errors import InvalidConfig, InvalidRequest, PolicyRefused
from jupyter_agentbox.names import HIDDEN_FILES, READ_ONLY_FILES
from jupyter_agentbox.policy import configfiles
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.profiles import PROFILE_KEYS, REQUEST_KEYS
from jupyter_agentbox.spec import GIB, MIB, Limits, Mount, SandboxSpec

HOSTS = ["example.org", "*.example.net", "db.example.org:5432"]


def make(**settings: Any) -> Policy:
    return Policy(config=Config({"Policy": {"allowed_hosts": HOSTS, **settings}}))


@pytest.fixture(autouse=True)
def _no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", str(tmp_path / "admin"))
    monkeypatch.setenv("JUPYTER_NO_CONFIG", "")
    configfiles._cache.clear()
    yield
    configfiles._cache.clear()


# Defaults


def test_the_defaults_are_safe() -> None:
    spec = make().resolve()
    assert spec.limits == Limits(4 * GIB, 4.0, 512, 20 * GIB)
    assert spec.runtime == "runsc"
    assert not spec.is_root
    assert spec.workspace is None
    assert (spec.hidden, spec.read_only) == (HIDDEN_FILES, READ_ONLY_FILES)
    assert spec.accept_unenforced == frozenset()
    assert spec.grant.hosts == tuple(HOSTS)
    assert spec.grant.private_hosts == ()
    assert spec.grant.setting == "Policy.allowed_hosts"
    assert not any(mount.is_writable for mount in spec.mounts)
    assert {name: spec.env[name] for name in PROXY_ENV} == PROXY_ENV


def test_the_default_hosts_are_presets_by_name() -> None:
    assert Policy(config=Config()).allowed_hosts == ["pypi", "npm", "debian", "github", "crates"]
    # Choosing one of them asks no other's package manager.
    grant = Policy(config=Config()).resolve({"allowed_hosts": ["github"]}).grant
    assert "github.com" in grant.hosts
    assert "github" not in grant.hosts


# Requests


def test_a_request_narrows() -> None:
    request = {
        "memory": "512 MiB",
        "cpus": 1,
        "processes": 64,
        "disk": 100 * MIB,
        "allowed_hosts": ["example.org:443", "a.example.net", "*.b.example.net"],
        "hidden_files": ["secret*"],
        "workspace": "private",
        "lease_timeout": 5,
    }
    spec = make().resolve(request, workspace="/nowhere", kernel_id="k", owner="o")
    assert spec.limits == Limits(512 * MIB, 1.0, 64, 100 * MIB)
    assert spec.grant.hosts == ("example.org:443", "a.example.net", "*.b.example.net")
    assert spec.hidden == (*HIDDEN_FILES, "secret*")
    assert spec.workspace is None
    assert spec.lease_timeout == 5
    assert (spec.kernel_id, spec.owner) == ("k", "o")
    assert make().resolve({"allowed_hosts": []}).grant.hosts == ()


@pytest.mark.parametrize(
    ("request_", "field", "setting"),
    [
        ({"memory": "5 GiB"}, "memory", "Policy.max_memory"),
        ({"cpus": 4.5}, "cpus", "Policy.max_cpus"),
        ({"processes": 513}, "processes", "Policy.max_processes"),
        ({"disk": "1 TiB"}, "disk", "Policy.max_disk"),
        ({"lease_timeout": 61}, "lease_timeout", "Policy.lease_timeout"),
        ({"allowed_hosts": ["evil.example.com"]}, "allowed_hosts", "Policy.allowed_hosts"),
        ({"allowed_hosts": ["example.org:22"]}, "allowed_hosts", "Policy.allowed_hosts"),
        ({"allowed_hosts": ["a.example.org"]}, "allowed_hosts", "Policy.allowed_hosts"),
        ({"allowed_hosts": ["example.net"]}, "allowed_hosts", "Policy.allowed_hosts"),
        ({"allowed_hosts": ["*.net"]}, "allowed_hosts", "Policy.allowed_hosts"),
        ({"allowed_hosts": ["*"]}, "allowed_hosts", "Policy.allowed_hosts"),
        ({"allowed_hosts": ["db.example.org"]}, "allowed_hosts", "Policy.allowed_hosts"),
        ({"allowed_hosts": ["github"]}, "allowed_hosts", "Policy.allowed_hosts"),
    ],
)
def test_a_request_for_more_is_refused_and_names_field_and_setting(
    request_: dict[str, Any], field: str, setting: str
) -> None:
    with pytest.raises(PolicyRefused) as caught:
        make().resolve(request_)
    assert caught.value.field == field
    assert caught.value.setting == setting
    assert setting in str(caught.value)


FORBIDDEN = (
    "is_root root mounts env runtime private_hosts config parent max_memory accept_unenforced allow_root profiles "
    "limits kernel_id log __class__"
)


@pytest.mark.parametrize("key", [*FORBIDDEN.split(), ""])
def test_what_a_request_cannot_ask_for_is_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown key") as caught:
        make(allow_root=True).resolve({key: True})
    assert caught.value.field == key
    assert all(name in str(caught.value) for name in REQUEST_KEYS)


def test_a_misspelt_key_or_profile_is_answered_with_the_right_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'memory'"):
        make().resolve({"memroy": 1})
    with pytest.raises(InvalidRequest, match=r"did you mean 'small'\?\); profiles are default, small"):
        make(profiles={"small": {}}).resolve({"profile": "smal"})


@pytest.mark.parametrize(
    "request_",
    [
        {"memory": "lots"},
        {"memory": -1},
        {"memory": "1 KiB"},
        {"cpus": True},
        {"cpus": float("nan")},
        {"cpus": "2"},
        {"processes": 1.5},
        {"processes": 3},
        {"allowed_hosts": "example.org"},
        {"allowed_hosts": ["https://example.org/"]},
        {"allowed_hosts": ["127.0.0.1"]},
        {"allowed_hosts": [5]},
        {"hidden_files": ["a/../b"]},
        {"read_only_files": ["/a"]},
        {"workspace": "/etc"},
        {"profile": ["x"]},
        {"lease_timeout": 0},
    ],
)
def test_a_malformed_value_is_refused_by_name(request_: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make().resolve(request_)
    assert caught.value.field == next(iter(request_))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.sampled_from([*HOSTS, "*", "9 TiB"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@functools.cache
def make_bounded() -> tuple[Policy, SandboxSpec]:
    policy = make(profiles={"default": {"memory": "1 GiB", "hidden_files": [".*", "keys"]}})
    return policy, policy.resolve()


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*REQUEST_KEYS, *PROFILE_KEYS]) | st.text(max_size=8), VALUES, max_size=5))
def test_no_request_whatever_gets_more_than_its_profile(request_: dict[str, Any]) -> None:
    policy, most = make_bounded()
    try:
        spec = policy.resolve(request_)
    except (InvalidRequest, PolicyRefused):
        return
    assert all(getattr(spec.limits, name) <= getattr(most.limits, name) for name in vars(most.limits))
    assert spec.lease_timeout <= most.lease_timeout
    assert set(spec.hidden) >= set(most.hidden)
    assert "*" not in spec.grant.hosts
    same = ("root", "mounts", "env", "is_root", "runtime", "accept_unenforced", "workspace")
    changed = {name for name in same if getattr(spec, name) != getattr(most, name)}
    assert changed <= {"env"}
    assert {k for k in spec.env if spec.env[k] != most.env.get(k)} <= {"OMP_NUM_THREADS"}


# Profiles


def test_a_profile_inherits_what_it_leaves_out() -> None:
    policy = make(
        max_memory="8 GiB",
        max_cpus=2.0,
        env={"A": "1", "B": "1"},
        profiles={"big": {"memory": "8 GiB", "env": {"B": "2"}, "allowed_hosts": ["example.org"], "hidden_files": []}},
    )
    assert policy.profile_names() == ("default", "big")
    assert policy.resolve().limits.memory == 4 * GIB
    spec = policy.resolve({"profile": "big"})
    assert spec.profile == "big"
    assert spec.limits == Limits(8 * GIB, 2.0, 512, 20 * GIB)
    assert (spec.env["A"], spec.env["B"]) == ("1", "2")
    assert spec.hidden == ()
    assert spec.grant.hosts == ("example.org",)
    assert spec.grant.setting == "Policy.profiles['big']['allowed_hosts']"


def test_a_request_is_bounded_by_its_profile_and_not_by_the_ceiling() -> None:
    policy = make(profiles={"small": {"memory": "1 GiB", "allowed_hosts": ["example.org"]}}, default_profile="small")
    for request, setting in (
        ({"memory": "2 GiB"}, "Policy.profiles['small']['memory']"),
        ({"allowed_hosts": ["a.example.net"]}, "Policy.profiles['small']['allowed_hosts']"),
    ):
        with pytest.raises(PolicyRefused) as caught:
            policy.resolve(request)
        assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profiles": {"x": {"memory": "9 GiB"}}}, r"more than Policy.max_memory \(4 GiB\)"),
        ({"profiles": {"x": {"allowed_hosts": ["evil.org"]}}}, "Policy.allowed_hosts does not allow"),
        ({"profiles": {"x": {"private_hosts": ["evil.org"]}}}, "Policy.private_hosts does not allow"),
        ({"private_hosts": ["pypi"]}, "Policy.private_hosts: 'pypi' is a preset"),
        ({"profiles": {"x": {"private_hosts": ["pypi"]}}}, "'pypi' is a preset"),
        ({"profiles": {"x": {"is_root": True}}}, "requires Policy.allow_root"),
        ({"profiles": {"x": {"is_root": 1}}}, "must be true or false"),
        ({"profiles": {"x": {"runtime": "runc"}}}, r"\['runtime'\] is 'runc', which is not in Policy.allowed_runtimes"),
        ({"runtime": "runc"}, "^Policy.runtime is 'runc', which is not in Policy.allowed_runtimes"),
        ({"profiles": {"x": {"memroy": 1}}}, "did you mean 'memory'"),
        ({"profiles": {"x": {"mounts": {"/workspace/a": "/srv"}}}}, "every sandbox uses it"),
        ({"profiles": {"x": {"mounts": {"/a/../proc": "/srv"}}}}, "must be a plain absolute path"),
        ({"profiles": {"x": {"env": {"A": 1}}}}, "not valid in an environment"),
        ({"profiles": {"x": {"root": "image"}}}, "must be an absolute path"),
        ({"profiles": {"x": []}}, "profiles"),
        ({"default_profile": "none"}, "Policy.default_profile 'none' does not exist"),
        ({"max_memory": "much"}, "not a size"),
        ({"max_memory": "1 MiB"}, "too low"),
        ({"max_cpus": -1.0}, "must be a number above 0"),
        ({"allowed_hosts": ["http://x"]}, "allowed_hosts"),
        ({"accept_unenforced": ["everything"]}, "accept_unenforced"),
        ({"lease_timeout": 0.0}, "lease_timeout"),
        ({"hidden_files": ["a//b"]}, "separated by single slashes"),
        ({"read_only_files": ["../b"]}, "separated by single slashes"),
        ({"mounts": {"/run/agentbox/x": "/srv"}}, "every sandbox uses it"),
        ({"allowed_host": ["x"]}, r"unknown setting Policy.allowed_host \(did you mean 'allowed_hosts'"),
        ({"max_memroy": 5}, "did you mean 'max_memory'"),
    ],
)
def test_a_wrong_setting_starts_nothing_and_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        make(**settings)


def test_root_inside_needs_the_policys_word() -> None:
    policy = make(allow_root=True, profiles={"apt": {"is_root": True}})
    assert policy.resolve({"profile": "apt"}).is_root
    assert not policy.resolve().is_root


def test_mounts_are_the_administrators_and_read_only(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    policy = make(
        mounts={"/data": str(tmp_path / "data")}, profiles={"x": {"mounts": {"/more": str(tmp_path / "data")}}}
    )
    shown = Mount(tmp_path / "data", "/data")
    assert shown in policy.resolve().mounts
    assert {shown, Mount(tmp_path / "data", "/more")} <= set(policy.resolve({"profile": "x"}).mounts)
    with pytest.raises(InvalidConfig, match="does not exist"):
        make(mounts={"/data": str(tmp_path / "none")}).resolve()
    with pytest.raises(PolicyRefused, match="system or home"):
        make(mounts={"/data": "/etc"}).resolve()


def test_an_image_brings_its_own_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/ssl/certs/ca.crt")
    monkeypatch.setenv("CURL_CA_BUNDLE", "/etc/none")
    (tmp_path / "image/etc/ssl/certs").mkdir(parents=True)
    (tmp_path / "image/etc/ssl/certs/ca.crt").touch()
    spec = make(profiles={"default": {"root": str(tmp_path / "image")}}).resolve(executable="python-of-the-image")
    assert spec.root == tmp_path / "image"
    assert spec.mounts == ()
    assert spec.env["SSL_CERT_FILE"] == "/etc/ssl/certs/ca.crt"
    assert "CURL_CA_BUNDLE" not in spec.env
    with pytest.raises(InvalidConfig, match="does not exist"):
        make(profiles={"default": {"root": str(tmp_path / "none")}}).resolve()


# Work folder


def test_the_state_directory_is_never_shown(tmp_path: Path) -> None:
    state = tmp_path / "a" / "b" / "state"
    state.mkdir(parents=True)
    policy = make(state_dir=str(state))
    assert policy.state_path == state
    with pytest.raises(PolicyRefused):
        policy.resolve(workspace=tmp_path / "a")
    with pytest.raises(PolicyRefused):
        make(state_dir=str(state), mounts={"/data": str(tmp_path / "a")}).resolve()
    assert policy.resolve(workspace=tmp_path / "a" / "b").hidden == (*HIDDEN_FILES, "state")


def test_a_profile_may_keep_the_notebooks_folder_out(tmp_path: Path) -> None:
    policy = make(profiles={"batch": {"workspace": "private"}})
    assert policy.resolve(workspace=tmp_path).workspace == tmp_path
    assert policy.resolve({"profile": "batch"}, workspace=tmp_path).workspace is None
    # A request asks for less only.
    assert policy.resolve({"profile": "batch", "workspace": "folder"}, workspace=tmp_path).workspace is None


# Where settings come from


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_the_administrators_files_hold_in_any_program(tmp_path: Path) -> None:
    write(tmp_path / "admin" / "jupyter_agentbox_config.json", json.dumps({"Policy": {"max_memory": "1 GiB"}}))
    write(tmp_path / "user" / "jupyter_agentbox_config.py", "c.Policy.allowed_hosts.append('example.org')\n")
    policy = Policy()
    assert policy.max_memory == GIB
    assert policy.allowed_hosts == ["pypi", "npm", "debian", "github", "crates", "example.org"]
    # A second time, from the remembered files: nothing is added twice.
    assert Policy().allowed_hosts == policy.allowed_hosts


def test_later_places_win(tmp_path: Path) -> None:
    write(
        tmp_path / "admin" / "jupyter_agentbox_config.json",
        json.dumps({"Policy": {"max_cpus": 1.0, "env": {"A": "1"}}}),
    )
    write(tmp_path / "user" / "jupyter_agentbox_config.json", json.dumps({"Policy": {"max_cpus": 2.0}}))
    assert Policy().max_cpus == 1.0  # JUPYTER_CONFIG_PATH goes above the user's own directory
    app = Configurable(config=Config({"Policy": {"max_cpus": 3.0}}))
    policy = Policy(parent=app)
    assert (policy.max_cpus, policy.env) == (3.0, {"A": "1"})


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "user" / "jupyter_agentbox_config.json"
    write(path, json.dumps({"Policy": {"max_cpus": 1.0}}))
    assert Policy().max_cpus == 1.0
    write(path, json.dumps({"Policy": {"max_cpus": 2.25}}))
    assert Policy().max_cpus == 2.25
    path.unlink()
    assert Policy().max_cpus == 4.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("py", "c.Policy.max_cpus = 1/0"),
        ("py", "syntax error"),
        ("py", "c.Polciy.allowed_hosts = []"),
        ("json", "{"),
        ("json", '{"Policy": {"max_cpu": 1}}'),
        ("json", '{"policy": {"max_cpus": 1}}'),
    ],
)
def test_a_broken_file_starts_nothing(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path / "admin" / f"jupyter_agentbox_config.{name}", text)
    with pytest.raises(InvalidConfig):
        Policy()


def test_a_file_in_the_current_directory_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "jupyter_agentbox_config.py", "c.Policy.max_memory = '100 GiB'\n")
    assert Policy().max_memory == 4 * GIB


# Kernelspecs


def test_a_hostile_kernelspec_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "secret-of-the-server")
    policy = make()
    plain = policy.resolve(executable="/bin/sh", workspace=tmp_path)
    spec = policy.resolve(
        executable="/bin/sh",
        workspace=tmp_path,
        kernelspec_env={"STOLEN": "${CANARY}", "HTTPS_PROXY": "http://evil.org:1", "JPY_PARENT_PID": "1"},
        launch_env=dict(os.environ),
    )
    assert "secret-of-the-server" not in spec.env.values()
    assert {k: v for k, v in spec.env.items() if plain.env.get(k) != v} == {"STOLEN": "${CANARY}"}
    for stanza in (
        {"config": {"Policy": {"allowed_hosts": ["*"]}}},
        {"Policy.allowed_hosts": ["*"]},
        {"policy": {"max_memory": "1 TiB"}},
        {"mounts": {"/host": "/"}},
        {"profile": "default", "is_root": True},
    ):
        with pytest.raises(InvalidRequest):
            policy.resolve(stanza)
    assert policy.resolve(executable="/bin/sh", workspace=tmp_path) == plain


def test_a_request_leaves_no_trace_in_the_policy() -> None:
    policy = make(profiles={"x": {"env": {"A": "1"}}})
    request = {"profile": "x", "allowed_hosts": ["example.org"], "hidden_files": ["k"]}
    first = policy.resolve(request)
    request["allowed_hosts"].append("evil.org")  # type: ignore[attr-defined]
    assert first.grant.hosts == ("example.org",)
    assert policy.resolve({"profile": "x"}).grant.hosts == tuple(HOSTS)
    assert make().allowed_hosts == HOSTS


def test_a_program_of_an_installation_that_is_shown_needs_no_mount_of_its_own() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # inside, /tmp is every sandbox's own
        program = Path(folder, "bin", "lang")
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)

        def targets(**settings: Any) -> set[str]:
            return {mount.target for mount in make(**settings).resolve(executable=str(program)).mounts}

        assert {str(program), folder} & targets() == {str(program)}
        assert {str(program), folder} & targets(mounts={folder: folder}) == {folder}
