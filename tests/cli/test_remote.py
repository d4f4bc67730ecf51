"""exec, cp, logs, ps, stop and the commands on snapshots, as a shell runs them, against one running server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.sandboxes import FILL_MEMORY
from support.harness import Env, wait_until
from support.serving import Serving, run, run_all

from jupyter_agentbox.client import Client, Sandbox


@pytest.fixture(scope="module")
def serving(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    env = Env(tmp_path_factory.mktemp("serve"), {"Policy": {"lease_timeout": 30.0}})
    try:
        serving = Serving(env)
        yield serving
        serving.stop()
        env.assert_clean()
    finally:
        env.close()


@pytest.fixture(scope="module")
def box(serving: Serving) -> Iterator[Sandbox]:
    with Client(serving.url, serving.token) as client:
        yield client.create(id="demo", allowed_hosts=[], keep=True)


def test_exec_passes_on_arguments_output_input_and_status(serving: Serving, box: Sandbox) -> None:
    ran = serving.run("exec", "demo", "--", "sh", "-c", 'echo "$1"; echo err >&2; exit 7', "-", "--help")
    assert (ran.status, ran.out, ran.err) == (7, "--help\n", "err\n")
    assert serving.run("exec", "demo", "echo a | tr a b").out == "b\n"
    fed = serving.run("exec", "--stdin", "--workdir=/tmp", "demo", "wc -c; pwd", stdin=b"\0" * 5000)
    assert fed.out == "5000\n/tmp\n"
    late = serving.run("exec", "--timeout=0.5", "demo", "--", "sleep", "60")
    assert (late.status, late.err) == (124, "jupyter agentbox exec: killed after 0.5 s\n")
    refused = serving.run("exec", "demo", "curl -sS -m 5 https://not-listed.example/ || true")
    assert "jupyter agentbox exec: Blocked by sandbox: not-listed.example:443." in refused.err


def test_an_interrupted_exec_ends_its_command(serving: Serving, box: Sandbox) -> None:
    command = [sys.executable, "-m", "jupyter_agentbox.cli", "exec", "demo", "--", "sh", "-c", "echo up; sleep 62"]
    with subprocess.Popen(
        command, env=serving.env.variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    wait_until(lambda: "sleep 62" not in box.exec("ps ax").stdout, 60, "the command ends")


def test_a_reader_that_leaves_ends_exec_quietly(serving: Serving, box: Sandbox) -> None:
    line = f"{sys.executable} -m jupyter_agentbox.cli exec demo yes | head -1; echo ${{PIPESTATUS[0]}}"
    answer = subprocess.run(
        ["bash", "-c", line], env=serving.env.variables, capture_output=True, text=True, timeout=200
    )
    assert (answer.stdout, answer.stderr) == ("y\n141\n", "")


def test_cp_copies_files_both_ways(serving: Serving, box: Sandbox) -> None:
    work = serving.env.work
    data = os.urandom(300_000)
    (work / "a.bin").write_bytes(data)
    assert serving.run("cp", "a.bin", "demo:dir/b.bin").status == 0
    assert serving.run("cp", "demo:/workspace/dir/b.bin", ".").status == 0
    assert (work / "b.bin").read_bytes() == data
    assert serving.run("cp", "b.bin", "demo:dir").status == 0  # into the directory
    assert serving.run("cp", "demo:dir/b.bin", "c.bin").status == 0
    assert (work / "c.bin").read_bytes() == data
    assert serving.run("cp", "-", "demo:in", stdin=b"piped").status == 0
    assert serving.run("cp", "demo:in", "-").out == "piped"


def test_cp_copies_directories_and_takes_no_harm_from_hostile_ones(serving: Serving, box: Sandbox) -> None:
    work = serving.env.work
    (work / "tree" / "sub").mkdir(parents=True)
    (work / "tree" / "sub" / "x").write_text("x")
    (work / "tree" / ".hidden").write_text("h")
    assert serving.run("cp", "tree", "demo:up").status == 0
    assert box.exec("cat up/sub/x up/.hidden").stdout == "xh"
    box.exec("mkdir evil && cd evil && echo y > y && ln -s /etc/passwd abs && ln -s ../../../out rel && mkfifo f")
    ran = serving.run("cp", "demo:evil", "down")
    assert ran.status == 0
    assert sorted(path.name for path in (work / "down").iterdir()) == ["y"]
    assert "skipped" in ran.err


def test_logs_show_decisions_and_what_processes_printed(serving: Serving, box: Sandbox) -> None:
    box.exec("curl -sS -m 5 https://logged.example/ || true")
    serving.run("exec", "demo", "true")
    assert box.audit(kind="call")[-1].reason is None  # and not cancelled
    line = next(line for line in serving.run("logs", "demo").out.splitlines() if "logged.example" in line)
    assert "REFUSED  logged.example:443" in line
    rows = [json.loads(line) for line in serving.run("logs", "--json", "demo").out.splitlines()]
    assert "logged.example" in {row["host"] for row in rows}
    process = box.start("echo out; echo err >&2; sleep 1; echo more")
    followed = serving.run("logs", "--follow", "demo", process.id)
    assert (followed.out, followed.err) == ("out\nmore\n", "err\n")
    kept = serving.run("logs", "demo", process.id)
    assert (kept.out, kept.err) == ("out\nmore\n", "err\n")
    table = serving.run("ps", "demo").out.splitlines()
    assert table[1].split()[:3] == [process.id, "exited", "0"]


def test_ps_lists_and_stop_ends(serving: Serving, box: Sandbox) -> None:
    with Client(serving.url, serving.token) as client:
        client.create(id="brief", keep=True)
        listed = json.loads(serving.run("ps", "--json").out)
        assert {"demo", "brief"} <= {item["id"] for item in listed}
        assert serving.run("stop", "brief").out == "stopped brief\n"
        assert "brief" not in serving.run("ps").out


def test_snapshots_are_taken_listed_restored_moved_and_deleted(serving: Serving, box: Sandbox, tmp_path: Path) -> None:
    box.files.write("state", "then")
    taken = serving.run("snapshot", "demo", "--name=before")
    saved = taken.out.strip()
    assert (taken.status, len(saved)) == (0, 20), taken.err
    box.files.write("state", "now")
    table, forked, restored = run_all(
        serving.env,
        ("snapshots", "demo"),
        ("fork", "demo", f"--snapshot={saved}", "--id=forked"),
        ("restore", "demo", saved),
    )
    assert table.out.splitlines()[1].split()[:3] == [saved, "demo", "before"]
    assert (forked.out, restored.out) == ("forked\n", "restored demo\n"), forked.err + restored.err
    assert box.files.read_text("state") == "then"
    with Client(serving.url, serving.token) as client:
        assert client.sandbox("forked").files.read_text("state") == "then"
        client.sandbox("forked").delete()
    assert [item["id"] for item in json.loads(serving.run("snapshots", "--json").out)] == [saved]
    file = tmp_path / "demo.snapshot"
    assert serving.run("snapshot", "export", saved, str(file)).out.startswith(f"exported {saved}: ")
    assert file.stat().st_mode & 0o077 == 0
    again = serving.run("snapshot", "export", saved, str(file))
    assert (again.status, "already exists" in again.err) == (1, True)
    imported = serving.run("snapshot", "import", str(file)).out.strip()
    assert {item["id"] for item in json.loads(serving.run("snapshots", "--json").out)} == {saved, imported}
    file.write_bytes(file.read_bytes()[:-1])
    assert "is truncated" in serving.run("snapshot", "import", str(file)).err
    assert serving.run("delete-snapshot", imported).out == f"deleted {imported}\n"
    assert serving.run("delete-snapshot", saved).out == f"deleted {saved}\n"


def test_what_is_wrong_is_one_line_and_a_status(serving: Serving, box: Sandbox) -> None:
    work = serving.env.work
    wrong = (
        (("exec", "nobody", "true"), "nobody"),
        (("cp", "a", "b"), "one of source and target must be in a sandbox"),
        (("cp", "demo:missing", "x"), "missing"),
        (("cp", "no-such-file", "demo:x"), "cannot be read"),
        (("cp", "demo:in-none", "no-dir/x"), "in-none"),
        (("stop", ".."), "is not a valid name"),
        (("logs", "demo", "none"), "none"),
        (("restore", "demo", "0" * 20), "does not exist"),
        (("ps", "--url=http://127.0.0.1:1/"), "cannot be reached"),
        (("ps", "--url=http://127.0.0.1:1/?token=x"), "must not contain a token"),
        (("ps", "--token-file=missing"), "cannot read the token file"),
    )
    found = run_all(serving.env, *(arguments for arguments, _ in wrong))
    for (arguments, words), ran in zip(wrong, found, strict=True):
        assert (ran.status, ran.out) == (1, ""), (arguments, ran)
        assert words in ran.err
        assert len(ran.err.splitlines()) == 1, ran.err
    (work / "token").write_text(serving.token + "\n")
    elsewhere = {"JUPYTER_RUNTIME_DIR": str(work)}
    assert "jupyter agentbox serve" in run(serving.env, "ps", **elsewhere).err
    assert run(serving.env, "ps", f"--url={serving.url}", "--token-file=token", **elsewhere).status == 0
    refused = run(serving.env, "ps", f"--url={serving.url}", **elsewhere)
    assert (refused.status, "refused the token" in refused.err) == (1, True)


def test_a_sandbox_that_ran_out_of_memory_is_revived(serving: Serving) -> None:
    with Client(serving.url, serving.token) as client:
        box = client.create(id="hungry", memory="300 MiB", keep=True)
        box.files.write("file", "precious\n")
        assert serving.run("exec", "hungry", FILL_MEMORY).status != 0
        ended = box.refresh()
        assert ended.end is not None
        assert ended.end.kept_until is not None
        assert serving.run("revive", "hungry").out == "revived hungry\n"
        assert serving.run("exec", "hungry", "cat file").out == "precious\n"
        box.delete()
        gone = serving.run("revive", "hungry")
        assert (gone.status, "sandbox 'hungry' does not exist" in gone.err) == (1, True)
