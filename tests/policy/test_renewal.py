"""What lies in a snapshot, under policy as it is now."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_images import meta

from jupyter_agentbox.errors import AgentboxError, Conflict, InvalidRequest, PolicyRefused
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.renewal import intersect_grants, reapply_policy
from jupyter_agentbox.service.live.live_snapshots import LiveSnapshots
from jupyter_agentbox.service.service import SandboxService
from jupyter_agentbox.service.tenants import Tenant
from jupyter_agentbox.spec import MIB, Grant, Mount, SandboxSpec
from jupyter_agentbox.storage.snapshots import Snapshot

HOSTS = ["one.example", "*.two.example", "three.example:8443"]


def policy_of(tmp_path: Path, **settings: Any) -> Policy:
    return Policy(**{"allowed_hosts": HOSTS, "state_dir": str(tmp_path / "state"), **settings})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "books"
    made.mkdir()
    return made


@pytest.fixture
def then(tmp_path: Path, folder: Path) -> SandboxSpec:
    """What was decided about the sandbox that was saved."""
    policy = policy_of(tmp_path, profiles={"big": {"memory": "900 MiB"}})
    return policy.resolve({"profile": "big"}, workspace=folder, owner="then")


def test_what_is_still_allowed_stays_and_has_its_new_owner(tmp_path: Path, then: SandboxSpec) -> None:
    now = reapply_policy(policy_of(tmp_path, profiles={"big": {"memory": "900 MiB"}}), then, owner="now")
    assert now == replace(then, owner="now")


@pytest.mark.parametrize(
    ("settings", "hosts", "memory"),
    [
        ({"allowed_hosts": [*HOSTS, "more.example"]}, HOSTS, 900 * MIB),
        ({"allowed_hosts": ["one.example", "a.two.example"]}, ["one.example"], 900 * MIB),
        ({"allowed_hosts": []}, [], 900 * MIB),
        ({"profiles": {"big": {"memory": "300 MiB"}}}, HOSTS, 300 * MIB),
        ({"profiles": {"big": {"memory": "2 GiB"}}}, HOSTS, 900 * MIB),
        ({"profiles": {"big": {"memory": "900 MiB", "allowed_hosts": ["three.example:8443"]}}},
         ["three.example:8443"], 900 * MIB),
    ],
)  # fmt: skip
def test_hosts_and_limits_are_what_both_times_allow(
    tmp_path: Path, then: SandboxSpec, settings: Mapping[str, Any], hosts: list[str], memory: int
) -> None:
    policy = policy_of(tmp_path, **{"profiles": {"big": {"memory": "900 MiB"}}, **settings})
    now = reapply_policy(policy, then, owner="now")
    assert list(now.grant.hosts) == hosts
    assert now.limits == replace(then.limits, memory=memory)


@pytest.mark.parametrize(
    ("settings", "changes", "error", "words", "setting"),
    [
        ({"profiles": {}}, {}, InvalidRequest, "profile 'big' does not exist", "Policy.profiles"),
        ({}, {"root": Path("/srv/image")}, PolicyRefused, "root = ", "Policy.profiles['big']['root']"),
        ({}, {"is_root": True}, PolicyRefused, "is_root = True", "Policy.profiles['big']['is_root']"),
        ({}, {"runtime": "docker"}, PolicyRefused, "runtime = 'docker'", "Policy.profiles['big']['runtime']"),
        ({}, {"mounts": (Mount(Path("/usr"), "/data"),)}, PolicyRefused, "/data", "Policy.mounts"),
        ({}, {"mounts": (Mount(Path("/usr/share"), "/usr/share", is_policys=True),)}, PolicyRefused, "/usr/share",
         "Policy.mounts"),
        ({"profiles": {"big": {"workspace": "private"}}}, {}, PolicyRefused, "only private folders",
         "Policy.profiles['big']['workspace']"),
        ({"hidden_files": [".*", "*.pem"]}, {}, PolicyRefused, "now hides", "Policy.hidden_files"),
        ({"allowed_workspaces": ["/nowhere"]}, {}, PolicyRefused, "books", "Policy.allowed_workspaces"),
        ({}, {"workspace": Path("/no/such/folder")}, AgentboxError, "/no/such/folder", None),
    ],
)  # fmt: skip
def test_what_lies_in_memory_and_is_not_allowed_any_more_is_refused(
    tmp_path: Path,
    then: SandboxSpec,
    settings: Mapping[str, Any],
    changes: Mapping[str, Any],
    error: type[AgentboxError],
    words: str,
    setting: str | None,
) -> None:
    policy = policy_of(tmp_path, **{"profiles": {"big": {"memory": "900 MiB"}}, **settings})
    with pytest.raises(error, match=words.replace("[", r"\[")) as refused:
        reapply_policy(policy, replace(then, **changes), owner="now")
    if setting is not None:
        assert refused.value.setting == setting


def test_the_folder_of_one_that_runs_may_have_been_renamed_but_not_out_of_what_is_allowed(
    tmp_path: Path, then: SandboxSpec, folder: Path
) -> None:
    folder.rename(tmp_path / "elsewhere")
    profiles = {"big": {"memory": "900 MiB"}}
    assert reapply_policy(policy_of(tmp_path, profiles=profiles), then, owner="then", is_running=True) == then
    with pytest.raises(PolicyRefused):
        reapply_policy(
            policy_of(tmp_path, profiles=profiles, allowed_workspaces=["/nowhere"]), then, owner="", is_running=True
        )


@pytest.mark.parametrize(
    ("then_hosts", "now_hosts", "hosts"),
    [
        (["a.example", "b.example"], ["b.example"], ["b.example"]),
        (["a.example"], [], []),
        ([], ["a.example"], []),
        (["*.example"], ["a.example"], ["a.example"]),
        (["a.example"], ["*.example", "b.test"], ["a.example"]),
        (["a.example"], ["a.example:443"], ["a.example:443"]),
        (["a.example:80"], ["a.example:443"], []),
    ],
)
def test_of_two_grants_there_is_what_both_allow(then_hosts: list[str], now_hosts: list[str], hosts: list[str]) -> None:
    then, now = (Grant(tuple(hosts), setting=name) for name, hosts in (("then", then_hosts), ("now", now_hosts)))
    capped = intersect_grants(then, now)
    assert list(capped.hosts) == hosts
    assert capped.setting == ("then" if then_hosts == hosts else "now")
    assert intersect_grants(Grant((), ("db.example:5432",)), Grant()).private_hosts == ()


def test_another_machine_release_or_image_is_told_plainly(has_runsc: None, tmp_path: Path, then: SandboxSpec) -> None:
    snapshots = LiveSnapshots(SandboxService(policy_of(tmp_path)))
    now = snapshots.manager_of(then).runtime.fingerprint(then)

    def check(fingerprint: dict[str, str]) -> None:
        taken = Snapshot(id="0" * 20, meta=meta(fingerprint=fingerprint), size=0, cost=0)
        asyncio.run(snapshots._check_same(taken, then))

    check(now)
    assert len(now) >= 3
    for name in now:
        with pytest.raises(Conflict) as refused:
            check({**now, name: "another"})
        assert f"{name}: another then, {now[name]} now" in str(refused.value)
        assert refused.value.field == "snapshot"
    with pytest.raises(Conflict, match="gpu: one then, None now"):
        check({**now, "gpu": "one"})


def test_tenants_of_two_owners_and_two_of_one_are_apart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    opened = [Tenant.open(state, *who) for who in (("ada", "acme"), ("bob", "acme"), ("ada", "other"))]
    folders = {folder for tenant in opened for folder in (tenant.workspace, tenant.outputs)}
    assert len(folders) == 6
    assert not any(one in other.parents for one in folders for other in folders)
    (opened[0].workspace / "a").write_bytes(b"x" * 100_000)
    assert [tenant.used() >= 100_000 for tenant in opened] == [True, False, False]
    assert Tenant.open(state, "ada", "acme") == opened[0]
    assert not any(path.is_relative_to(state) for path in folders)


def test_no_umask_lets_others_into_what_tenants_keep(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Tenant.open(tmp_path / "state", "ada", "acme")
    finally:
        os.umask(before)
    assert (tmp_path / "state-tenants").stat().st_mode & 0o777 == 0o700
