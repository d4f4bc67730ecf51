"""Start Jupyter servers as the documentation says, for the tests of its promises.

The package is built as a wheel and installed with ``pip`` into a fresh environment. The environment has its own user
(home, notebooks, runtime directory). ``jupyter agentbox setup`` runs in it, and then plain ``jupyter lab``,
``jupyter server`` or ``jupyter agentbox serve``. Nothing comes from the checkout. No test passes a setting on a command
line: :meth:`Installation.start` refuses all but ``--port``, ``--no-browser``, ``--allow-root`` and the token. A promise
that depends on a setting is tested with a documented file (:meth:`Installation.write_config`).

Environments take seconds to create, so tests share two of them, one for ``setup`` and one for ``setup --enforce``. A
test that changes an environment restores it. Users are created in a moment: a test that needs its own configuration or
state directory takes its own user.

Fixtures, all with session scope (``conftest.py``):

``plain``, ``enforced``
    An :class:`Installation` after ``setup``, and after ``setup --enforce``.
``make_user``
    ``make_user()`` returns an :class:`Installation` of another user in the environment of ``plain``. ``setup`` would
    change nothing for this user, except that it creates a template.
``plain_lab``, ``enforced_lab``, ``served``
    A :class:`Started` server of ``jupyter lab``, the same with enforcement, and ``jupyter agentbox serve``. Tests share
    them, so none may stop them. Start your own server for that::

        with plain.start("server") as server:
            kernel = server.notebook("proj/book.ipynb")
            assert kernel.check("print(6 * 7)") == "42\\n"
            server.kill()
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests

from support import ROOT
from support.harness import CANARY, Env, KernelClient, Server, kill_group, wait_until


def build_wheel(folder: Path) -> Path:
    """Build the package's wheel unless the folder contains it, and return its path. Other processes may do the same."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
            subprocess.run(command, check=True, timeout=600, stdin=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, prefix: Path) -> None:
    """Create a virtual environment with the wheel. Its dependencies are hard-linked from this environment."""
    options: dict[str, Any] = {"check": True, "timeout": 600, "stdin": subprocess.DEVNULL}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], **options)
    # Running programs write and rename the compiled files. jupytext, once installed, changes every server. Every import
    # of rfc3987_syntax compiles a grammar for more than a second; jsonschema works without it (see quick_imports).
    ignored = shutil.ignore_patterns("*agentbox*", "jupytext.json", "*.pyc.*", "rfc3987_syntax")
    for folder in (Path(sysconfig.get_path("purelib")), Path(sys.prefix, "share"), Path(sys.prefix, "etc")):
        target = prefix / folder.relative_to(sys.prefix)
        shutil.copytree(folder, target, copy_function=_link, dirs_exist_ok=True, ignore=ignored)
    python = prefix / "bin" / "python"
    for script in Path(sys.prefix, "bin").glob("jupyter*"):
        first, _, rest = script.read_text().partition("\n")
        if first.startswith("#!") and "agentbox" not in script.name:
            copy = prefix / "bin" / script.name
            copy.write_text(f"#!{python}\n{rest}")
            copy.chmod(0o755)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(command, **options)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


class Installation(Env):
    """Installed package, and a user with no configuration except what ``setup`` wrote.

    Parameters
    ----------
    base : Path
        Directory that will contain the user's home, ``home``.
    prefix : Path
        Virtual environment with the package.
    """

    def __init__(self, base: Path, prefix: Path) -> None:
        self.base, self.prefix = base, prefix
        self.bin = self.prefix / "bin"
        self.home = base / "home"
        #: Folder in which servers are started.
        self.work = self.home / "notebooks"
        self.work.mkdir(parents=True)
        self.config_dir, self.data = self.home / ".jupyter", self.home / ".local" / "share" / "jupyter"
        self.state_dir = self.data / "agentbox"
        self.runtime = Path(tempfile.mkdtemp(prefix="ab"))  # short, because UNIX socket paths have a maximum length
        (self.home / "secret.txt").write_text(CANARY)
        kept = ("LANG", "LC_ALL", "TZ", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "SSL_CERT_FILE")
        self.variables = {name: value for name, value in os.environ.items() if name in kept} | {
            "HOME": str(self.home),
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(self.runtime),
            # Values that must never be visible inside.
            "CANARY": CANARY,
            "AWS_SECRET_ACCESS_KEY": f"key-{CANARY}",
        }

    def setup(self, *arguments: str) -> str:
        """Run ``jupyter agentbox setup``, and return its output."""
        return self.run("jupyter", "agentbox", "setup", *arguments).output

    def write_config(self, config: dict[str, dict[str, Any]], name: str = "jupyter_agentbox_config.json") -> Path:
        """Write one of the user's configuration files, next to ``~/.jupyter/jupyter_server_config.py``."""
        self.config_dir.mkdir(exist_ok=True)
        path = self.config_dir / name
        path.write_text(json.dumps(config))
        return path

    @contextlib.contextmanager
    def start(self, program: str = "lab", **options: Any) -> Iterator[Started]:
        """Run ``jupyter lab``, ``jupyter server`` or ``jupyter agentbox serve`` until the block ends.

        Parameters
        ----------
        program : str
            ``lab``, ``server`` or ``serve``.
        **options
            As for :meth:`spawn`: ``cwd``, and ``env`` for more environment variables.
        """
        server = Started(self, program, (), options)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()

    def start_refused(self, program: str = "lab", *, timeout: float = 120, **options: Any) -> str:
        """Start a server that must exit by itself with status 1. Return its output."""
        server = Started(self, program, (), options)
        try:
            status = server.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server was not refused:\n{server.text}") from None
        finally:
            kill_group(server.process)
            server.process.wait()
            server.stop()
        assert status == 1, f"exit status {status}:\n{server.text}"
        return server.text


class Started(Server):
    """Running server: :meth:`request`, :meth:`call`, :meth:`kernel`, :meth:`notebook`, :meth:`stop`, :meth:`kill`."""

    def command(self, program: str, arguments: Sequence[str]) -> list[str]:
        """Return the documented command line, with a port and a token."""
        self.program = program
        if program == "serve":
            return ["jupyter", "agentbox", "serve", f"--port={self.port}", "--json"]
        started = ["jupyter", program, "--no-browser", f"--port={self.port}", f"--IdentityProvider.token={self.token}"]
        return [*started, *(["--allow-root"] if os.geteuid() == 0 else [])]

    def wait_ready(self, timeout: float = 150) -> None:
        """Wait until the server answers."""
        if self.program == "serve":
            said = wait_until(lambda: _first_json(self), timeout, "serve prints its address")
            self.token = said["token"]
            self.http.headers["Authorization"] = f"token {self.token}"
        super().wait_ready(timeout)

    @property
    def text(self) -> str:
        """Complete output of the server."""
        return self.log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """Id of the server's process."""
        return self.process.pid

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        """Make one call with the server's token, and return the answer with any status. Options as for ``requests``."""
        return self.http.request(method, self.url(path), json=body, timeout=options.pop("timeout", 150), **options)

    def request_as(self, token: str | None, method: str, path: str, body: Any = None) -> requests.Response:
        """Make one call with another token or none, without the cookie left by a call with the server's own token."""
        with requests.Session() as http:
            http.trust_env = False
            headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
            return http.request(method, self.url(path), json=body, headers=headers, timeout=150)

    def notebook(self, path: str, name: str = "agentbox") -> KernelClient:
        """Open a notebook as JupyterLab does, create its folder if necessary, and connect to its kernel."""
        (self.env.work / path).parent.mkdir(parents=True, exist_ok=True)
        return super().notebook(path, name)

    def run_command(self, argv: Sequence[str], **body: Any) -> dict[str, Any]:
        """Create a sandbox over REST, run one command in it, end it, and return the command's result."""
        made = self.call("POST", "api/agentbox/sandboxes", body)
        try:
            return dict(self.call("POST", f"api/agentbox/sandboxes/{made['id']}/exec", {"argv": list(argv)}))
        finally:
            self.call("DELETE", f"api/agentbox/sandboxes/{made['id']}")

    def kill(self) -> None:
        """Kill only the server's process, as ``kill -9`` does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


def _first_json(server: Started) -> dict[str, Any] | None:
    assert server.process.poll() is None, f"server ended:\n{server.text}"
    lines = [line for line in server.text.splitlines() if line.startswith('{"url"')]
    return dict(json.loads(lines[0])) if lines else None
