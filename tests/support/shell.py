"""Run ``jupyter agentbox`` with Jupyter directories of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.serving import Ran, run_command


class Shell:
    """Runner of ``jupyter agentbox`` with its own Jupyter directories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        }

    def __call__(self, *arguments: str, status: int = 0) -> str:
        return self._check(run_command(arguments, self.folder, self.env), status)

    def run_as_jupyter_does(self, *arguments: str, status: int = 0) -> str:
        """Run it by ``jupyter``, which looks for it on the path."""
        command = [sys.executable, "-m", "jupyter", "agentbox", *arguments]
        answer = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=200)
        return self._check(Ran(answer.returncode, answer.stdout, answer.stderr), status)

    def _check(self, ran: Ran, status: int) -> str:
        assert ran.status == status, ran.out + ran.err
        assert "Traceback" not in ran.err
        return ran.out if status == 0 else ran.out + ran.err
