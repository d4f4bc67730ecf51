"""``jupyter agentbox serve`` as a process, and commands that speak to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from e2e.harness import Env, kill_group


@dataclass(frozen=True)
class Ran:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str


class Serving:
    """A server that runs until :meth:`stop`.

    Parameters
    ----------
    env : Env
    arguments : str
        More than ``serve --json``.
    """

    def __init__(self, env: Env, *arguments: str) -> None:
        self.env = env
        self.log = env.base / "serve.log"
        self.command = [sys.executable, "-m", "jupyter_agentbox.cli", "serve", "--json", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
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

    def stop(self, signum: int = signal.SIGTERM) -> str:
        """End it as an operator would; return what it said on standard output after its first line."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            rest, _ = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            kill_group(self.process)
            self.process.communicate()
            raise AssertionError(f"it did not end:\n{self.log.read_text()[-4000:]}") from None
        return rest

    def run(self, *arguments: str, stdin: bytes | None = None, timeout: float = 60) -> Ran:
        """Run ``jupyter agentbox`` with these arguments, where it finds this server by itself."""
        return run(self.env, *arguments, stdin=stdin, timeout=timeout)


def run(env: Env, *arguments: str, stdin: bytes | None = None, timeout: float = 60, **variables: str) -> Ran:
    """Run ``jupyter agentbox`` to its end."""
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
