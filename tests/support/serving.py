"""Run ``jupyter agentbox serve`` as a process, and commands that call it."""

from __future__ import annotations

import atexit
import base64
import functools
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.harness import Env, kill_group
from support.waiting import scaled


@dataclass(frozen=True)
class Ran:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


class Serving:
    """Server that runs until :meth:`stop`.

    Parameters
    ----------
    env : Env
    arguments : str
        Arguments in addition to ``serve --json``.
    """

    def __init__(self, env: Env, *arguments: str) -> None:
        self.env = env
        self.log = env.base / "serve.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command_line(*arguments),
                cwd=env.work,
                env=env.variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"serve ended with {self.process.wait(10)}:\n{self.log.read_text()}"
        said: dict[str, Any] = json.loads(line)
        self.url, self.token = said["url"], said.get("token", "")

    @staticmethod
    def command_line(*arguments: str) -> list[str]:
        """Return the command line of a server."""
        return [sys.executable, "-m", "jupyter_agentbox.cli", "serve", "--json", *arguments]

    def stop(self, signum: int = signal.SIGTERM) -> str:
        """Stop the server as an operator would. Return its standard output after the first line."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            rest, _ = self.process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            kill_group(self.process)
            self.process.communicate()
            raise AssertionError(f"it did not end:\n{self.log.read_text()[-4000:]}") from None
        return rest

    def run(self, *arguments: str, stdin: bytes | None = None, timeout: float = 200) -> Ran:
        """Run ``jupyter agentbox`` with these arguments. It finds this server by itself."""
        return run(self.env, *arguments, stdin=stdin, timeout=timeout)


_FORKING = """
import base64, gc, importlib, json, os, signal, sys, tempfile, time
import jupyter_agentbox.client, jupyter_agentbox.service.live.parking
from jupyter_agentbox.cli import AgentboxCommand, main
requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
while line := requests.readline():
    request = json.loads(line)
    if (name := next(iter(request["arguments"]), "")) in AgentboxCommand.subcommands:
        importlib.import_module(AgentboxCommand.subcommands[name][0].rpartition(".")[0])
        gc.freeze()
    out, err, (reading, writing) = tempfile.TemporaryFile(), tempfile.TemporaryFile(), os.pipe()
    os.write(writing, base64.b64decode(request["stdin"]))  # fits, see below
    os.close(writing)
    child = os.fork()
    if not child:
        for number, file in enumerate((reading, out.fileno(), err.fileno())):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        requests.close()
        answers.close()
        main(request["arguments"])
        os._exit(99)
    os.close(reading)
    ended, deadline = 0, time.monotonic() + request["timeout"]
    while not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0 if ended else 0.005)
    for file in (out, err):
        file.seek(0)
    answer = [os.waitstatus_to_exitcode(status), *(base64.b64encode(file.read()).decode() for file in (out, err))]
    out.close()
    err.close()
    answers.write(json.dumps(answer).encode() + b"\\n")
"""
#: A pipe takes as much at once.
_MAX_STDIN = 64 * 1024


@functools.cache
def _start_forking() -> subprocess.Popen[bytes]:
    """Start the process that :func:`run` uses; it ends with this one."""
    process = subprocess.Popen(
        [sys.executable, "-c", _FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    atexit.register(_stop_forking, process)
    return process


def _stop_forking(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        kill_group(process)
        process.communicate()


def run(env: Env, *arguments: str, stdin: bytes | None = None, timeout: float = 200, **variables: str) -> Ran:
    """Run ``jupyter agentbox`` until it ends, as :func:`run_command` does."""
    ran = run_command(arguments, env.work, {**env.variables, **variables}, stdin=stdin or b"", timeout=timeout)
    assert "Traceback" not in ran.err, ran.err
    return ran


def run_command(
    arguments: Sequence[str], cwd: Path, env: dict[str, str], *, stdin: bytes = b"", timeout: float = 200
) -> Ran:
    """Run ``jupyter agentbox`` in a process that is forked from one with its modules, which is faster than a new one.

    Raises
    ------
    AssertionError
        It did not end in time.
    """
    assert len(stdin) <= _MAX_STDIN
    request = {"arguments": arguments, "cwd": str(cwd), "env": env, "timeout": scaled(timeout)}
    process = _start_forking()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({**request, "stdin": base64.b64encode(stdin).decode()}).encode() + b"\n")
        process.stdin.flush()
        status, out, err = json.loads(process.stdout.readline())
    except BaseException:  # such as the test's timeout; the next command gets an answer of its own
        _stop_forking(process)
        _start_forking.cache_clear()
        raise
    texts = [base64.b64decode(text).decode(errors="replace") for text in (out, err)]
    assert status != -signal.SIGKILL, (arguments, texts)
    return Ran(status, *texts)


def run_all(env: Env, *commands: tuple[str, ...], timeout: float = 200) -> list[Ran]:
    """Run ``jupyter agentbox`` once for each command."""
    return [run(env, *command, timeout=timeout) for command in commands]
