"""Run a server of the REST API in a separate process, and count what it holds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

#: Timeout for the server to end its sandboxes and itself, in seconds.
STOP_TIMEOUT = 60.0


@dataclass(frozen=True)
class Served:
    """Running server.

    Parameters
    ----------
    url, token : str
        Base URL, and the token for it.
    pid : int
    base : str
        Directory that appears in the command lines of its sandboxes' processes.
    """

    url: str
    token: str
    pid: int
    base: str

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    @property
    def root(self) -> str:
        """Path of the API."""
        return urlsplit(self.url).path.rstrip("/") + "/api/agentbox"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every call."""
        return {"Host": "{}:{}".format(*self.address), "Authorization": f"token {self.token}"}

    def held(self) -> Held:
        """Return the resources that the server holds now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return Held(
            descriptors=len(os.listdir(f"/proc/{self.pid}/fd")),
            threads=int(fields["Threads"]),
            processes=sum(self.base in line for line in _command_lines()),
            memory=int(fields["VmRSS"].split()[0]) * 1024,
        )


@dataclass(frozen=True)
class Held:
    """Resources of a server: its own descriptors and threads, processes of all its sandboxes, bytes of memory."""

    descriptors: int
    threads: int
    processes: int
    memory: int


@contextlib.contextmanager
def serving(base: Path) -> Iterator[Served]:
    """Run ``jupyter agentbox serve`` with its files below `base`, an empty directory. End its sandboxes afterwards."""
    places = {"JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "run", "JUPYTER_CONFIG_DIR": "config"}
    for place in places.values():
        (base / place).mkdir(mode=0o700)
    command = [sys.executable, "-m", "jupyter_agentbox.cli", "serve", "--json"]
    environment = os.environ | {name: str(base / place) for name, place in places.items()}
    with (base / "serve.log").open("w") as log:
        process = subprocess.Popen(command, cwd=base, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start:\n{(base / 'serve.log').read_text()}")
        answer = json.loads(line)
        yield Served(answer["url"], answer["token"], process.pid, str(base))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise


def _command_lines() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes().decode(errors="replace")
