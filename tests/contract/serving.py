"""Run a server of the REST API for the suite of sandboxes, in its own process and directories."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jupyter_agentbox.client import Client

#: Names that the server's resolver maps to this machine, for tests of egress.
SITE, OTHER = "site.test", "other.test"
_RESOLVE = f"""\
import socket
find = socket.getaddrinfo
names = ("{SITE}", "{OTHER}")
socket.getaddrinfo = lambda host, *more, **named: find("127.0.0.1" if host in names else host, *more, **named)
"""
_START_TIMEOUT, _STOP_TIMEOUT = 120.0, 60.0


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 90.0) -> Any:
    """Return the first true value of `condition`, or fail with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.1)
    return value


class Serving:
    """``jupyter agentbox serve``, which can be killed and restarted with the same state.

    Parameters
    ----------
    config : dict of str to dict
        Settings by class, as in ``jupyter_agentbox_config.json``.
    images : Path or None
        State directory whose images the server uses.
    port : int
        Port on this machine that sandboxes may reach as ``SITE``. ``OTHER`` resolves to it too.

    Attributes
    ----------
    client : Client
        Client of the running server.
    """

    client: Client

    def __init__(self, config: Mapping[str, Mapping[str, Any]], images: Path | None, port: int) -> None:
        self._config, self._port = config, port
        self.base = Path(tempfile.mkdtemp(prefix="ab"))  # short, because socket paths have a maximum length
        self.state_dir = self.base / "state"
        for name in ("home", "config", "data"):
            (self.base / name).mkdir()
        (self.state_dir / "images").mkdir(mode=0o700, parents=True)
        for image in (images / "images").iterdir() if images is not None else ():
            (self.state_dir / "images" / image.name).symlink_to(image)
        (self.base / "config/jupyter_server_config.py").write_text(_RESOLVE)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **policy: Any) -> None:
        """Start the server with these additional settings of ``Policy``, and wait until it answers."""
        config = {name: dict(values) for name, values in self._config.items()}
        own = {"state_dir": str(self.state_dir), "templates": False, "allowed_hosts": [f"{SITE}:{self._port}"],
               "private_hosts": [f"{SITE}:{self._port}"]}  # fmt: skip
        config["Policy"] = {**own, **config.get("Policy", {}), **policy}
        (self.base / "config/jupyter_agentbox_config.json").write_text(json.dumps(config))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "JPY_", "PYTEST"))}
        env = {
            **kept,
            "HOME": str(self.base / "home"),
            "XDG_RUNTIME_DIR": str(self.base),
            "JUPYTER_CONFIG_DIR": str(self.base / "config"),
            "JUPYTER_DATA_DIR": str(self.base / "data"),
            "JUPYTER_RUNTIME_DIR": str(self.base / "j"),
        }
        out = self.base / "out"
        with out.open("wb") as stdout, (self.base / "log").open("ab") as log:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "jupyter_agentbox.cli", "serve", "--json"],
                cwd=self.base, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=log, start_new_session=True,
            )  # fmt: skip

        def is_told() -> bool:
            assert process.poll() is None, f"the server has ended:\n{self.log}"
            return out.read_bytes().endswith(b"\n")

        wait_until(is_told, "the server starts", _START_TIMEOUT)
        said = json.loads(out.read_text())
        self.client = Client(said["url"], said["token"])

    @property
    def log(self) -> str:
        """Last part of the server's log."""
        return (self.base / "log").read_text(errors="replace")[-6000:]

    def end(self, signum: int = signal.SIGKILL) -> None:
        """End only the server, as a crash does. Its sandboxes keep running."""
        if self._process is None:
            return
        self.client.close()
        self._process.send_signal(signum)
        self._process.wait(_STOP_TIMEOUT)
        self._process = None

    def close(self) -> None:
        """End the sandboxes and the server, check that nothing is left of them, and remove all directories."""
        try:
            if self._process is not None:
                for info in self.client.list():
                    self.client.sandbox(info.id).delete()
                self.end(signal.SIGTERM)
            left = [path.name for path in (self.state_dir / "sandboxes").glob("*")]
            assert not left, f"sandboxes are left: {left}\n{self.log}"
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait(_STOP_TIMEOUT)
            shutil.rmtree(self.base, ignore_errors=True)


__all__ = ["OTHER", "SITE", "Serving", "wait_until"]
