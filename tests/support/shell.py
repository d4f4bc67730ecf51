"""Run ``jupyter agentbox`` in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


class Shell:
    """Runner of ``jupyter agentbox`` with its own Jupyter directories."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        }

    def __call__(self, *arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "jupyter", "agentbox", *arguments]
        env = {**self.env, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        answer = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=200)
        assert answer.returncode == status, answer.stdout + answer.stderr
        assert "Traceback" not in answer.stderr
        return answer.stdout if status == 0 else answer.stdout + answer.stderr
