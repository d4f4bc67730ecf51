"""Ids, and running commands in namespaces of their own."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from jupyter_agentbox.errors import AgentboxError, RuntimeFailed
from jupyter_agentbox.linux import find_processes, find_python, kill_processes
from jupyter_agentbox.runtimes.launcher import MEMBARRIER
from jupyter_agentbox.runtimes.namespaces import (
    IdMaps,
    Launch,
    find_forbidding,
    find_spare_ids,
    make_id_maps,
    namespace_remedy,
    read_tail,
    run,
)


def test_root_maps_user_code_to_itself_and_the_guest_to_nobody() -> None:
    maps = make_id_maps(0, 0, spare=(65534, 65534))
    assert maps == IdMaps(((0, 65534, 1), (1000, 0, 1)), ((0, 65534, 1), (1000, 0, 1)), 1000, True, True)


def test_work_files_of_somebody_else_belong_to_user_code() -> None:
    maps = make_id_maps(0, 0, owner=(4321, 99), spare=(65534, 65534))
    assert maps.uids == ((0, 65534, 1), (1000, 4321, 1), (1001, 0, 1))
    assert maps.gids == ((0, 65534, 1), (1000, 99, 1), (1001, 0, 1))
    # Only root can be somebody else to its files.
    assert make_id_maps(500, 500, owner=(4321, 99), spare=(7, 7)).uids == ((0, 7, 1), (1000, 500, 1))
    assert make_id_maps(0, 0, owner=(65534, 65534), spare=(65534, 65534)).uids == ((0, 65534, 1), (1000, 0, 1))


def test_without_spare_ids_or_for_root_inside_there_is_one_id() -> None:
    assert make_id_maps(500, 600) == IdMaps(((0, 500, 1),), ((0, 600, 1),), 0, True, False)
    assert make_id_maps(0, 0, is_root=True, spare=(65534, 65534)).uids == ((0, 0, 1),)


def test_subordinate_ids_are_found_by_name_or_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "subuid").write_text("other:1:5\n\nbroken\n54321:x:y\n54321:200000:65536\n")
    (tmp_path / "subgid").write_text("54321:300000:1\n")
    assert find_spare_ids(54321, etc=tmp_path) == (200000, 300000)
    assert find_spare_ids(54322, etc=tmp_path) is None
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert find_spare_ids(54321, etc=tmp_path) is None


def test_root_of_a_container_of_few_ids_has_none_to_spare(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    for name in ("uid_map", "gid_map"):
        (tmp_path / "self" / name).write_text("0 1000 1\n1 100000 5000\n")
    assert find_spare_ids(0, proc=tmp_path) is None
    for name in ("uid_map", "gid_map"):
        (tmp_path / "self" / name).write_text("0 0 4294967295\n")
    assert find_spare_ids(0, proc=tmp_path) == (65534, 65534)


def launch(*command: str) -> Launch:
    return Launch(command, make_id_maps(os.geteuid(), os.getegid(), spare=find_spare_ids(os.geteuid())))


def test_a_sweep_finds_it_before_it_is_what_it_is_to_become(tmp_path: Path) -> None:
    (tmp_path / "stage").mkdir()
    os.mkfifo(tmp_path / "config")  # nobody reads it, so it stays where it writes that
    maps = make_id_maps(os.geteuid(), os.getegid(), is_root=True)  # it may enter here
    plan = [("config", str(tmp_path / "config"), "{}")]
    starting = replace(launch("/bin/true"), maps=maps, stage=tmp_path / "stage", plan=plan)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, starting, tmp_path / "log", 100.0)
        while not running.done() and not (found := find_processes(tmp_path)):
            time.sleep(0.01)
        assert len(found) == 1
        assert kill_processes(found) == []
        with contextlib.suppress(AgentboxError, OSError):  # whatever it was at
            running.result()
    assert find_processes(tmp_path) == []


def test_the_remedy_is_of_the_switch_that_forbids_here(tmp_path: Path) -> None:
    (tmp_path / "sys" / "kernel").mkdir(parents=True)
    switch = tmp_path / "sys" / "kernel" / "apparmor_restrict_unprivileged_userns"
    switch.write_text("1\n")
    assert namespace_remedy(1000, tmp_path) == "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    assert find_forbidding(0, tmp_path) == []  # it is for ordinary users alone
    (tmp_path / "sys" / "user").mkdir()
    (tmp_path / "sys" / "user" / "max_user_namespaces").write_text("0\n")
    assert find_forbidding(0, tmp_path) == ["sysctl -w user.max_user_namespaces=15000"]
    switch.write_text("0\n")
    assert find_forbidding(1000, tmp_path) == ["sysctl -w user.max_user_namespaces=15000"]


def test_doctor_says_what_lifts_a_ban_on_namespaces() -> None:
    script = (
        "from jupyter_agentbox.runtimes.runsc import checks\n"
        "found = checks._check_namespaces()\n"
        "print(found.is_ok, found.remedy, found.message, sep='\\n')"
    )
    ban = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", ban, "sh", sys.executable, "-c", script]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    is_ok, remedy, message = answer.stdout.splitlines()[:3]
    assert (is_ok, remedy) == ("False", "sysctl -w user.max_user_namespaces=15000")
    assert "Cannot create a user namespace" in message
    assert "sysctl -w user.max_user_namespaces=15000" in message


def test_a_command_runs_apart_from_everything(tmp_path: Path) -> None:
    os.environ["CANARY"] = "secret"
    try:
        script = (
            "id -u; env; cat; ls /proc/self/fd | wc -l; grep NoNewPrivs /proc/self/status; ps -o sid= -p $$; echo $$"
        )
        assert run(launch("/bin/sh", "-c", script), tmp_path / "log", 20) == 0
    finally:
        del os.environ["CANARY"]
    words = (tmp_path / "log").read_text()
    assert "secret" not in words
    lines = words.split("\n")
    assert lines[0] == "0"
    assert "NoNewPrivs:\t1" in lines
    session, pid = (line.strip() for line in lines[-3:-1])
    assert session == pid


def test_failure_and_silence_are_told_apart(tmp_path: Path) -> None:
    assert run(launch("/bin/sh", "-c", "exit 7"), tmp_path / "log", 20) == 7
    assert run(launch("/nonexistent"), tmp_path / "log", 20) == 111
    assert "nonexistent" in read_tail(tmp_path / "log")
    started = time.monotonic()
    with pytest.raises(RuntimeFailed, match=r"did not answer within 0\.5 s"):
        run(launch("/bin/sleep", "60"), tmp_path / "log", 0.5)
    assert time.monotonic() - started < 50


def test_it_runs_in_its_control_groups_or_not_at_all(tmp_path: Path) -> None:
    asked = launch("/bin/sh", "-c", "echo $$")
    (tmp_path / "cgroup.procs").touch()
    assert run(replace(asked, cgroups=[str(tmp_path / "cgroup.procs")]), tmp_path / "log", 20) == 0
    assert (tmp_path / "cgroup.procs").read_text() == (tmp_path / "log").read_text().strip()
    with pytest.raises(RuntimeFailed, match="cannot move the sandbox into its control group"):
        run(replace(asked, cgroups=[str(tmp_path / "none" / "cgroup.procs")]), tmp_path / "other", 20)
    assert (tmp_path / "other").read_text() == ""


def test_no_process_of_gvisors_waits_for_all_processors(tmp_path: Path) -> None:
    number = MEMBARRIER[os.uname().machine]
    script = (
        f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True); c.syscall({number}, 0); print(ctypes.get_errno())"
    )
    assert run(launch(find_python(), "-I", "-S", "-c", script), tmp_path / "log", 20) == 0
    assert int((tmp_path / "log").read_text()) == errno.ENOSYS


def test_tails_hold_no_control_characters(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x" * 5000 + b"\n\x1b[31mred\xff\n\nlast\x00\n")
    assert read_tail(tmp_path / "log").endswith("[31mred\ufffd; last")
    assert len(read_tail(tmp_path / "log")) <= 2000
    assert read_tail(tmp_path / "none") == ""
