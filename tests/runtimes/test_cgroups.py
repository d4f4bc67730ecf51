"""Where control groups are made, on made-up trees of both versions and on the real one."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_agentbox.runtimes import cgroups
from jupyter_agentbox.spec import MIB, Limits


class Tree:
    """A made-up hierarchy of version 2."""

    def __init__(self, base: Path, own: str) -> None:
        self.base = base / "fs"
        self.base.mkdir()
        self.mountinfo, self.own = base / "mountinfo", base / "cgroup"
        self.mountinfo.write_text(f"30 20 0:25 / {self.base} rw,nosuid - cgroup2 cgroup2 rw\n")
        self.own.write_text(f"0::{own}\n")

    def add(self, path: str, *, controllers: str = "memory cpu pids", given: str = "", procs: str = "") -> Path:
        place = self.base / path
        place.mkdir(parents=True, exist_ok=True)
        (place / "cgroup.controllers").write_text(controllers)
        (place / "cgroup.subtree_control").write_text(given)
        (place / "cgroup.procs").write_text(procs)
        return place

    def detect(self, parent: str = "") -> cgroups.Cgroups:
        return cgroups.detect(parent, mountinfo=self.mountinfo, own=self.own)


def test_the_nearest_delegated_group_is_used(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/user/app/scope")
    tree.add("user", given="memory cpu pids")
    app = tree.add("user/app", controllers="memory pids", given="memory pids")
    tree.add("user/app/scope", procs="1\n2\n")
    found = tree.detect()
    assert found.parents["memory"] == app
    assert found.enforceable()["memory"] is None
    assert "cpu controller is not delegated" in str(found.enforceable()["cpus"])


def test_where_nothing_is_delegated_it_says_so(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/scope")
    tree.add("", controllers="", procs="1\n")
    tree.add("scope", controllers="", procs="2\n")
    assert tree.detect().enforceable() == {
        "memory": "no control group was delegated to this user",
        "cpus": "no control group was delegated to this user",
        "processes": None,
        "disk": None,
    }


def test_a_group_can_be_set(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/")
    place = tree.add("mine", given="memory cpu pids")
    assert set(tree.detect(str(place)).parents.values()) == {place}
    assert set(tree.detect("/mine").parents.values()) == {place}


def test_unreadable_tables_are_a_reason(tmp_path: Path) -> None:
    found = cgroups.detect(mountinfo=tmp_path / "none", own=tmp_path / "none")
    assert "cannot be read" in str(found.enforceable()["memory"])


def test_a_container_that_sees_a_part_of_the_hierarchy(tmp_path: Path) -> None:
    point = tmp_path / "memory"
    (point / "inner").mkdir(parents=True)
    (tmp_path / "mountinfo").write_text(f"1 2 0:3 /docker/abc {point} rw - cgroup cgroup rw,memory\n")
    (tmp_path / "own").write_text("4:memory:/docker/abc/inner\n")
    found = cgroups.detect(mountinfo=tmp_path / "mountinfo", own=tmp_path / "own")
    assert found.parents == {"memory": point / "inner"}
    assert "cpus" in {name for name, reason in found.enforceable().items() if reason}


def test_settings() -> None:
    settings = cgroups.make_settings(Limits(memory=512 * MIB, cpus=1.5, processes=100))
    assert settings["memory.max"] == settings["memory.limit_in_bytes"] == str(512 * MIB)
    assert settings["memory.swap.max"] == "0"
    assert settings["cpu.max"] == "150000 100000"
    assert settings["cpu.cfs_quota_us"] == "150000"
    assert settings["pids.max"] == "1424"


def test_counters_of_version_2(tmp_path: Path) -> None:
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\n")
    assert cgroups.read_memory([str(tmp_path)]) == 700
    assert cgroups.read_cpu([str(tmp_path)]) == 2.5
    assert cgroups.read_oom_kills([str(tmp_path)]) == 3
    assert cgroups.read_memory(["/nonexistent"]) is None
    assert cgroups.read_oom_kills(["/nonexistent"]) == 0


def test_the_real_tree() -> None:
    found = cgroups.detect()
    reasons = {limit: reason for limit, reason in found.enforceable().items() if reason is not None}
    assert not reasons or os.geteuid() != 0, "root can enforce every limit"
    assert reasons.keys() <= {"memory", "cpus"}
    has_memory = "memory" not in reasons
    paths = found.create(f"test-{os.getpid()}", Limits(memory=64 * MIB, cpus=0.5, processes=10))
    try:
        texts = [file.read_text().split() for path in paths for file in Path(path).glob("memory.*max*")]
        texts += [file.read_text().split() for path in paths for file in Path(path).glob("memory.limit_in_bytes")]
        assert ([str(64 * MIB)] in texts) == has_memory
        assert (cgroups.read_memory(paths) is not None) == has_memory
    finally:
        assert cgroups.remove_cgroups(paths) == []
    assert not [path for path in paths if Path(path).exists()]
