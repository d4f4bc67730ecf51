"""``jupyter agentbox shell`` on a real terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from support.harness import CANARY, Env, wait_until


@pytest.fixture(scope="module")
def env(make_env: Callable[..., Env]) -> Env:
    return make_env(config={"Policy": {"profiles": {"small": {"processes": 55}}}})


class Shell:
    """The command on a terminal of ours."""

    def __init__(self, env: Env, *arguments: str, cwd: Path | None = None) -> None:
        self.process = pexpect.spawn(
            str(Path(env.variables["PATH"].split(":")[0]) / "jupyter-agentbox"),
            ["shell", *arguments],
            dimensions=(31, 97),
            timeout=100,
            encoding="utf-8",
            env=env.variables | {"LC_ALL": "C.UTF-8"},
            cwd=str(cwd or env.work),
        )

    def run(self, line: str) -> str:
        self.process.sendline(f"echo be'gin'; {line}; echo en'd'")
        self.process.expect_exact("begin\r\n")
        self.process.expect_exact("end\r\n")
        return str(self.process.before)

    def finish(self) -> tuple[str, int | None]:
        """Wait for its end; what it said since, and its exit status."""
        self.process.expect(pexpect.EOF)
        self.process.close()
        return str(self.process.before), self.process.exitstatus


Open = Callable[..., Shell]


@pytest.fixture
def shell(env: Env) -> Iterator[Open]:
    opened: list[Shell] = []

    def open_shell(*arguments: str, cwd: Path | None = None) -> Shell:
        opened.append(Shell(env, *arguments, cwd=cwd))
        return opened[-1]

    yield open_shell
    for item in opened:
        item.process.close(force=True)


def test_a_shell_has_the_folder_the_size_and_a_status(env: Env, shell: Open) -> None:
    folder = env.work / "own"
    folder.mkdir()
    (folder / ".env").write_text(CANARY)
    (folder / "note.txt").write_text("from outside\n")
    inside = shell("--profile=small", str(folder))
    seen = inside.run("pwd; cat note.txt .env; dmesg | head -1; stty size; id -u; env")
    assert seen.startswith("/workspace\r\nfrom outside\r\n")
    assert "gVisor" in seen
    assert "31 97\r\n1000\r\n" in seen
    assert CANARY not in seen
    inside.process.setwinsize(20, 50)
    wait_until(lambda: "20 50" in inside.run("stty size"), 60, "the new size arrives")
    inside.process.sendline("exit 7")
    assert inside.finish()[1] == 7
    assert env.sandboxes() == []


def test_a_key_ends_a_program_and_hanging_up_ends_the_sandbox(env: Env, shell: Open) -> None:
    inside = shell()
    # A key that stops a program stops the one inside.
    inside.process.sendline("sh -c 'echo sleep\"ing\"; exec sleep 100'; echo awake")
    inside.process.expect("sleeping\r\n")
    inside.process.sendcontrol("c")
    inside.process.expect(r"\$ ")
    assert "awake" not in str(inside.process.before)
    inside.process.kill(signal.SIGHUP)
    assert inside.finish()[1] == 128 + signal.SIGHUP
    assert env.sandboxes() == []


def test_a_killed_owner_leaves_nothing_for_long(env: Env, shell: Open) -> None:
    inside = shell()
    inside.run("true")
    assert len(env.sandboxes()) == 1
    inside.process.kill(signal.SIGKILL)
    wait_until(lambda: not env.leaks(), 120, "the sweeper takes what is left")


def test_a_folder_that_policy_refuses_is_an_error_or_a_private_one(env: Env, shell: Open) -> None:
    text, status = shell(str(env.home)).finish()
    assert ("it is a home directory" in text, status) == (True, 1)
    inside = shell(cwd=env.home)
    inside.process.expect("Using a private work folder, which is deleted when the shell ends: ")
    assert inside.run("ls -A") == ""
    inside.process.expect(r"\$ ")  # before which the terminal would take the key for the end of a line
    inside.process.sendeof()
    assert inside.finish()[1] == 0


def test_what_can_not_be_is_told(env: Env, shell: Open) -> None:
    text, status = shell("--profile=nope").finish()
    assert ("profile 'nope' does not exist" in text, status) == (True, 1)
    held = shell("--profile=nope", "--from-server")
    held.process.expect("Press any key to close this terminal")
    held.process.send(" ")
    assert held.finish()[1] == 1
    answer = env.run("jupyter-agentbox", "shell", check=False)
    assert ("stdin and stdout must be a terminal" in answer.output, answer.code) == (True, 1)
    assert os.listdir(env.work) == ["own"]


def test_programs_that_use_terminals_find_them(shell: Open) -> None:
    opened = shell()
    assert opened.run("tty; python3 -c 'import os; print(os.ttyname(0))'").split() == ["/dev/pts/0", "/dev/pts/0"]
    assert opened.run("stty size; script -qec tty /dev/null").split() == ["31", "97", "/dev/pts/1"]
    opened.process.setwinsize(40, 120)
    wait_until(lambda: opened.run("stty size").split() == ["40", "120"], 30, "the new size is known inside")
    opened.run("tmux new -d -s work; tmux send-keys -t work 'tty > in-tmux' Enter")
    assert opened.run("until [ -s in-tmux ]; do sleep 0.1; done; cat in-tmux").startswith("/dev/pts/")
    assert "work: 1 windows" in opened.run("tmux ls")
    assert opened.run("sleep 600 & kill %1; wait %1; echo $?").endswith("143\r\n")


def test_the_prompt_of_a_language_is_opened(env: Env, shell: Open) -> None:
    python = shell("--language=python")
    python.process.expect_exact(">>> ")
    python.process.sendline("print(6 * 7)")
    python.process.expect_exact("42\r\n")
    python.process.sendline("exit(3)")
    assert python.finish()[1] == 3
    gone = shell("--image=nothing")
    gone.process.expect_exact("image 'nothing' does not exist")
    assert gone.finish()[1] == 1
