"""Run a Docker engine for the tests in its own directory and mount namespace, with gVisor registered."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.runtimes.docker.engine import RUNTIME_NAME, Engine
from jupyter_agentbox.runtimes.docker.setup import make_runtime

START_TIMEOUT = 60.0


class Dockerd:
    """Process of the engine. Fails instead of skipping without Docker: tests of Docker must not pass without it.

    Parameters
    ----------
    base : Path
        Empty directory with a short path, because it contains sockets.
    live_restore : bool
        Whether containers outlive a restart of the engine.
    """

    def __init__(self, base: Path, *, live_restore: bool = True) -> None:
        self.base = base
        self.socket = base / "d.sock"
        self.host = f"unix://{self.socket}"
        runsc = shutil.which("runsc")
        assert runsc, "runsc is needed: run `make setup`"
        self.program = shutil.which("dockerd")
        assert self.program, "dockerd is needed: apt-get install docker.io"
        bare = {"path": runsc, "runtimeArgs": ["--network=none"]}
        config = {"runtimes": {RUNTIME_NAME: make_runtime(runsc), "bare-runsc": bare}, "live-restore": live_restore}
        (base / "daemon.json").write_text(json.dumps(config))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the engine and wait until it answers."""
        assert self.program is not None
        with (self.base / "log").open("ab") as log:
            # Other processes do not see its mounts, which disappear with it, and it does not outlive these tests. The
            # machine's containerd could not see the mounts either, so it is hidden: the engine starts its own.
            containerd = Path("/run/containerd")
            for folder in (containerd, self.base / "containerd"):
                folder.mkdir(mode=0o711, exist_ok=True)
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private",
                 "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', self.base / "containerd", containerd,
                 "setpriv", "--pdeathsig", "TERM", self.program,
                 f"--config-file={self.base}/daemon.json", f"--data-root={self.base}/data",
                 f"--exec-root={self.base}/exec", f"--pidfile={self.base}/pid", f"--host={self.host}",
                 "--iptables=false", "--bridge=none", "--log-level=warn"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        engine, deadline = Engine(self.host, 5.0), time.monotonic() + START_TIMEOUT
        while True:
            with contextlib.suppress(AgentboxError):
                engine.ping(2.0)
                return
            assert self.process.poll() is None, f"dockerd ended:\n{self.log}"
            assert time.monotonic() < deadline, f"dockerd does not answer:\n{self.log}"
            time.sleep(0.1)

    @property
    def log(self) -> str:
        return (self.base / "log").read_text(errors="replace")[-4000:]

    def signal(self, number: int) -> None:
        """Send a signal to the engine only, not to its child processes."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        """Stop the engine as for a restart. Its containers keep running if it has live-restore."""
        self.signal(signal.SIGTERM)
        assert self.process is not None
        self.process.wait(100)

    def close(self) -> None:
        """Remove all containers and stop the engine."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(Exception):
                engine = Engine(self.host, 20.0)
                for item in engine.list():
                    engine.remove(item["Id"])
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        shutil.rmtree(self.base, ignore_errors=True)
