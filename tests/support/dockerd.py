"""A Docker engine of the tests' own: in a directory and a mount namespace of its own, with gVisor registered."""

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
    """The engine's process. Fails, not skips, where there is none: what claims to cover Docker must not pass without.

    Parameters
    ----------
    base : Path
        An empty directory, with a short path since sockets lie in it.
    """

    def __init__(self, base: Path) -> None:
        self.base = base
        self.socket = base / "d.sock"
        self.host = f"unix://{self.socket}"
        runsc = shutil.which("runsc")
        assert runsc, "runsc is needed: run `make setup`"
        self.program = shutil.which("dockerd")
        assert self.program, "dockerd is needed: apt-get install docker.io"
        bare = {"path": runsc, "runtimeArgs": ["--network=none"]}
        config = {"runtimes": {RUNTIME_NAME: make_runtime(runsc), "bare-runsc": bare}, "live-restore": True}
        (base / "daemon.json").write_text(json.dumps(config))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        assert self.program is not None
        with (self.base / "log").open("ab") as log:
            # What it mounts is seen by nobody else, and is gone with it; and it does not outlive these tests. The
            # machine's containerd could not see it either, so that is kept out of its sight: it starts its own.
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
        """Signal it, and nothing that it has started."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        """End it as a restart does; its containers live on."""
        self.signal(signal.SIGTERM)
        assert self.process is not None
        self.process.wait(100)

    def close(self) -> None:
        """Remove what is left and end it."""
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
