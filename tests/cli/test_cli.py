"""The commands, as a shell runs them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.shell import Shell
from traitlets import Bool, Unicode

from jupyter_agentbox.cli.base import ALIASES, FLAGS, Command, format_age, printable, until_signal
from jupyter_agentbox.errors import SandboxEnded
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.spec import Cause, End, SandboxSpec


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_help_names_every_command(shell: Shell) -> None:
    text = shell.run_as_jupyter_does("--help")
    assert all(f"\n  {name} " in text for name in ("setup", "doctor", "kernelspec", "list", "prune"))
    assert text == shell(status=2)


def test_an_unknown_command_or_argument_is_told_with_the_right_one(shell: Shell) -> None:
    assert "unknown command 'docter' (did you mean 'doctor'?)" in shell("docter", status=2)
    assert "takes no arguments, got 'x'" in shell("prune", "x", status=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("list", "--jsno"), "unknown option --jsno (did you mean '--json'?)"),
        (("list", "--jsno=1"), "unknown option --jsno (did you mean '--json'?)"),
        (("list", "--json=1"), "--json takes no value, got '1'"),
        (("run", "--offlin=1", "-c", "1"), "unknown option --offlin (did you mean '--offline'?)"),
        (("run", "--mount"), "--mount needs a value"),
        (("run", "--mount", "--offline", "-c", "1"), "--mount needs a value"),
        (("run", "--timeout=soon", "-c", "1"), "--timeout must be a number of at least 0, got 'soon'"),
        (("run", "--RunCommand.timout=1", "-c", "1"), "(did you mean 'timeout'?)"),
        (("serve", "--port=99999"), "--port must be a whole number from 0 to 65535, got '99999'"),
        (("list", "--Polciy.allowed_hosts=[]"), "unknown settings class Polciy (did you mean 'Policy'?)"),
        (("token", "create", "x", "--verbs=wirte"), "unknown verb 'wirte'"),
        (("restore", "x"), "name a sandbox and one of its snapshots"),
    ],
)
def test_no_command_does_half_of_what_was_asked_for(shell: Shell, arguments: tuple[str, ...], sentence: str) -> None:
    told = shell(*arguments, status=2)
    assert sentence in told
    assert len(told.splitlines()) == 1
    assert not (shell.folder / "data").exists()


def test_each_setting_of_a_command_is_an_option() -> None:
    class First(Command):
        token_file = Unicode(help="A file.").tag(config=True)
        title = Unicode().tag(config=True, option="name")
        hidden = Unicode().tag(config=True, option="")
        kept_to_itself = Unicode()

    class Second(First):
        dry_run = Bool(help="Print only.").tag(config=True)

    assert Second.aliases == {**ALIASES, "token-file": "Second.token_file", "name": "Second.title"}
    assert Second.flags == {**FLAGS, "dry-run": ({"Second": {"dry_run": True}}, "Print only.")}
    assert First.flags == FLAGS


def test_setup_is_quick_where_all_is_there(shell: Shell, has_runsc: None) -> None:
    text = shell("setup", "--dry-run")
    assert "is already installed" in text
    assert "would install" in text
    assert not (shell.folder / "data" / "agentbox").exists()


def test_doctor_tells_a_wrong_setting_by_status_text_and_json(shell: Shell) -> None:
    text = shell("doctor", "--Policy.max_memroy=1", status=1)
    assert "FAIL   settings: unknown setting Policy.max_memroy (did you mean 'max_memory'?)" in text
    found = json.loads(shell("doctor", "--json", "--Policy.max_memroy=1", status=1))
    assert [(check["name"], check["is_ok"]) for check in found] == [("settings", False)]


def test_doctor_finds_this_machine_fit(shell: Shell, has_runsc: None) -> None:
    found = json.loads(shell("doctor", "--json", "--Policy.allowed_hosts=example.org"))
    assert {"runsc", "sandbox", "link", "limit on memory", "kernelspecs"} <= {check["name"] for check in found}
    assert all(check["is_ok"] for check in found)


def test_a_file_of_settings_can_be_named_and_the_current_directory_has_no_say(shell: Shell) -> None:
    for name in ("jupyter_agentbox_config.py", "jupyter_config.py"):
        (shell.folder / name).write_text("raise SystemExit('a sandbox wrote this')\n")
    assert shell("list", "--json").strip() == "[]"
    (shell.folder / "mine.py").write_text("c.Policy.max_cpus = 'many'\n")
    assert "max_cpus" in shell("list", "--config=mine.py", status=1)
    (shell.folder / "mine.py").write_text("oops\n")
    assert "mine.py" in shell("list", "--config=mine.py", status=1)
    for missing in ("none.py", "mine", "."):
        assert f"cannot read the configuration file {missing}: " in shell("list", f"--config={missing}", status=1)


def test_output_that_nobody_reads_and_ctrl_c_are_an_exit_status(shell: Shell) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jupyter_agentbox.cli"]
    with open(writing, "wb") as unread:
        answer = subprocess.run([*command, "list"], env=shell.env, stdout=unread, stderr=subprocess.PIPE, timeout=200)
    assert (answer.returncode, answer.stderr) == (141, b"")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"--url=http://127.0.0.1:{silent.getsockname()[1]}"
        with subprocess.Popen([*command, "ps", url], env=shell.env, stderr=subprocess.PIPE) as process:
            silent.settimeout(200)
            with silent.accept()[0]:
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            assert process.stderr is not None
            assert process.stderr.read() == b""


def test_a_signal_ends_what_a_command_waits_for() -> None:
    cleared = []

    async def work() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleared.append(True)
        return 0

    async def none() -> int:
        return 7

    assert asyncio.run(until_signal(work())) == 128 + signal.SIGTERM
    assert cleared
    assert asyncio.run(until_signal(none())) == 7


def test_kernelspec_makes_a_sandboxed_twin(shell: Shell) -> None:
    assert "kernelspec 'nope' is not installed" in shell("kernelspec", "nope", status=1)
    assert "name one installed kernelspec" in shell("kernelspec", status=2)
    assert "profile 'nope' does not exist" in shell("kernelspec", "python3", "--profile=nope", status=1)
    shell("kernelspec", "python3", "--name=boxed", "--profile=default")
    spec = json.loads((shell.folder / "data/kernels/boxed/kernel.json").read_text())
    stanza = {"provisioner_name": "agentbox-provisioner", "config": {"profile": "default"}}
    assert spec["metadata"]["kernel_provisioner"] == stanza


def test_list_and_prune_deal_with_what_a_dead_owner_left(shell: Shell) -> None:
    assert shell("list").split()[:2] == ["ID", "STATE"]
    assert shell("prune").strip() == "nothing to remove"
    box = shell.folder / "data/agentbox/sandboxes/0123456789abcdef"
    box.mkdir(parents=True)
    handle = {"runtime": "runsc", "pid": 2**22 + 5, "start_time": 1, "helpers": [], "cgroups": [], "user": 0}
    spec = SandboxSpec(workspace=Path("/srv/\x1b[31mred"), kernel_id="k")
    Record("0123456789abcdef", "runsc", spec, time.time() - 7200, 1.0, 1, handle).save(box)
    (box / "lock").touch()
    os.utime(box / "lock", (0, 0))
    text = shell("list")
    assert "0123456789abcdef  ended  default  2 h  -       k       /srv/?[31mred" in text
    assert json.loads(shell("list", "--json"))[0]["state"] == "ended"
    assert shell("prune").strip() == "removed 0123456789abcdef"
    assert not box.exists()


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (42, "42 s"), (90, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_ages_are_written_for_people(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_a_terminal_is_safe_from_what_errors_quote(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Command):
        name = "failing"

        def run(self) -> int:
            raise SandboxEnded(End(Cause.CRASHED, 127, "it did not start: \x1b]0;owned\x07\nforged line"))

    with pytest.raises(SystemExit):
        Failing().start()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("failing: ")
    assert line.isprintable()
    assert "?]0;owned??forged line" in line


def test_a_terminal_is_safe_from_names() -> None:
    assert printable("a\x1b]0;x\x07\n\u202eé") == "a?]0;x???é"
