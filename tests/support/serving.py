"""Run ``jupyter agentbox serve`` as a process, and commands that call it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from support.harness import Env, kill_group


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


def run(env: Env, *arguments: str, stdin: bytes | None = None, timeout: float = 200, **variables: str) -> Ran:
    """Run ``jupyter agentbox`` until it ends."""
    answer = subprocess.run(
        [sys.executable, "-m", "jupyter_agentbox.cli", *arguments],
        cwd=env.work,
        env={**env.variables, **variables},
        input=stdin if stdin is not None else b"",
        capture_output=True,
        timeout=timeout,
    )
    out, err = answer.stdout.decode(errors="replace"), answer.stderr.decode(errors="replace")
    assert "Traceback" not in err, err
    return Ran(answer.returncode, out, err)


_FORKING = """
import io, json, os, sys, tempfile
from jupyter_agentbox.cli import main, oneshot, remote, serve
found = []
for arguments in json.loads(sys.argv[1]):
    files = [tempfile.TemporaryFile() for _ in range(2)]
    child = os.fork()
    if not child:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        main(arguments)
        os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    found.append([status, *(file.read().decode(errors="replace") for file in files)])
print(json.dumps(found))
"""


def run_all(env: Env, *commands: tuple[str, ...], timeout: float = 200) -> list[Ran]:
    """Run ``jupyter agentbox`` once for each command in forked processes, which is faster than starting each anew."""
    answer = subprocess.run(
        [sys.executable, "-c", _FORKING, json.dumps(commands)],
        cwd=env.work,
        env=env.variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=True,
    )
    found = [Ran(*item) for item in json.loads(answer.stdout)]
    assert not any("Traceback" in item.err for item in found), found
    return found
