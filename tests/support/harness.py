"""Provide the basis of the end-to-end tests: an isolated Jupyter, its clients as real processes, and a leak check.

Everything here uses public interfaces only: command lines, REST, websockets. Nothing of the package is
imported, so that these tests do not depend on its internals.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import websocket

from support.waiting import wait_until

KERNEL = "agentbox"
BIN = Path(sys.executable).parent
#: Runtime to run these tests on. The docker runtime needs an engine with gVisor at ``DOCKER_HOST``.
RUNTIME = os.environ.get("AGENTBOX_TEST_RUNTIME", "runsc")
#: Seconds for which a sandbox of these tests outlives its owner.
LEASE = 5.0
CANARY = "canary-5f1d0c9e"
#: Extensions to leave out, so that servers start faster in tests that do not need them.
UNUSED = ("jupyterlab", "jupyter_lsp", "notebook_shim", "jupytext")


def processes_naming(text: str) -> dict[int, str]:
    """Return the processes whose command line contains `text`, without this one and zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in line:
                    found[int(entry.name)] = line
    return found


def all_below(*folders: Path) -> list[Path]:
    """Return all files and directories beneath folders. Others may be created and removed meanwhile."""
    walks = (os.walk(folder) for folder in folders)  # tolerates removed folders, unlike pathlib's patterns
    return [Path(top, name) for walk in walks for top, folders_in, files in walk for name in folders_in + files]


def files_with(text: str, *folders: Path) -> list[Path]:
    """Return the files beneath folders that contain a text."""
    found = []
    for path in all_below(*folders):
        with contextlib.suppress(FileNotFoundError):  # a database's journal disappears with its transaction
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def link(source: str, target: str) -> None:
    """Link a file, or copy it to another file system."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


class Env:
    """Isolated Jupyter with its own home, configuration, data, runtime and state directories.

    Parameters
    ----------
    base : Path
        Empty directory that contains everything, so that its path in a command line identifies a leak.
    config : dict, optional
        Additional content of ``jupyter_agentbox_config.json``, by class.
    imports : Path, optional
        Import cache to put into the state directory.
    """

    def __init__(
        self, base: Path, config: dict[str, dict[str, Any]] | None = None, imports: Path | None = None
    ) -> None:
        self.base, self.bin = base, BIN
        self.home, self.work = base / "home", base / "work"
        self.data, self.config_dir = base / "data", base / "config"
        for path in (self.home, self.work, self.data, self.config_dir):
            path.mkdir(parents=True)
        # Short, because UNIX socket paths have a maximum length.
        self.runtime = Path(tempfile.mkdtemp(prefix="ab"))
        self.state_dir = self.data / "agentbox"
        if imports is not None:
            self.state_dir.mkdir(mode=0o700)
            shutil.copytree(imports, self.state_dir / imports.name)
        (self.home / "secret.txt").write_text(CANARY)
        self.variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JUPYTER", "JPY_", "IPYTHON", "COV_", "PYTEST"))
        } | {
            "HOME": str(self.home),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "JUPYTER_CONFIG_DIR": str(self.config_dir),
            "JUPYTER_DATA_DIR": str(self.data),
            "JUPYTER_RUNTIME_DIR": str(self.runtime / "j"),
            "JUPYTER_PLATFORM_DIRS": "1",
            "XDG_RUNTIME_DIR": str(self.runtime),
            "IPYTHONDIR": str(base / "ipython"),
            # Values that must never be visible inside.
            "CANARY": CANARY,
            "JUPYTER_TOKEN": f"token-{CANARY}",
            "AWS_SECRET_ACCESS_KEY": f"key-{CANARY}",
        }
        self.configure({"Policy": {"lease_timeout": LEASE}} | (config or {}))

    def configure(self, config: dict[str, dict[str, Any]]) -> None:
        """Write the configuration of sandboxes, which applies to every client."""
        # No templates: servers create them in the background, and most tests do not need them.
        common = {"templates": False, "runtime": RUNTIME, "allowed_runtimes": [RUNTIME]}
        config = {**config, "Policy": {**common, **config.get("Policy", {})}}
        (self.config_dir / "jupyter_agentbox_config.json").write_text(json.dumps(config))

    def run(self, *command: str | Path, timeout: float = 200, check: bool = True, **options: Any) -> Run:
        """Run a program of the environment until it ends.

        Raises
        ------
        AssertionError
            It failed and `check` is true. The message contains its complete output.
        """
        with self.spawn(*command, **options) as process:
            try:
                output, _ = process.communicate(options.get("input"), timeout=timeout)
            except subprocess.TimeoutExpired:
                kill_group(process)
                output, _ = process.communicate()
                raise AssertionError(f"{command} did not end in {timeout} s:\n{output}") from None
        if check:
            assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}"
        return Run(process.returncode, output)

    def spawn(self, *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None,
              input: str | None = None, stdin: Any = subprocess.DEVNULL,
              stdout: Any = subprocess.PIPE) -> subprocess.Popen[str]:  # fmt: skip
        """Start a program of the environment in a new session."""
        program, *arguments = map(str, command)
        return subprocess.Popen(
            [str(self.bin / program) if (self.bin / program).exists() else program, *arguments],
            cwd=cwd or self.work,
            env=self.variables | (env or {}),
            stdin=subprocess.PIPE if input is not None else stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    @contextlib.contextmanager
    def server(self, program: str = "lab", *arguments: str, **options: Any) -> Iterator[Server]:
        """Run a real JupyterLab, Jupyter Server or Kernel Gateway on a loopback port; options as for :meth:`spawn`."""
        server = Server(self, program, arguments, options)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()

    def sandboxes(self) -> list[Path]:
        """Return the directories of the existing sandboxes."""
        return sorted((self.state_dir / "sandboxes").glob("[!.]*"))

    def processes(self) -> dict[int, str]:
        """Return all processes of the environment except the sweeper, which runs for a while after the last sandbox."""
        return {pid: line for pid, line in processes_naming(str(self.base)).items() if "/sweep.py" not in line}

    def leaks(self) -> list[str]:
        """Return what is left of sandboxes: directories, processes, mounts, sockets."""
        left = [f"directory {path}" for path in (self.state_dir / "sandboxes").glob("*")]
        left += [f"process {pid}: {line[:200]}" for pid, line in self.processes().items()]
        left += [f"control group {path}" for path in all_below(Path("/sys/fs/cgroup")) if self.owns(path.name)]
        mounts = Path("/proc/self/mounts").read_text()
        left += [f"mount {line}" for line in mounts.splitlines() if str(self.base) in line]
        left += [f"socket {path}" for path in all_below(self.runtime) if path.is_socket()]
        return left

    def owns(self, name: str) -> bool:
        """Return whether a control group belongs to a sandbox in this environment's audit log."""
        log = self.state_dir / "audit.sqlite"
        sandbox = name.removeprefix("agentbox-")
        return sandbox != name and log.exists() and sandbox.encode() in log.read_bytes()

    def assert_clean(self, timeout: float = 2 * LEASE + 60) -> None:
        """Fail if anything of a sandbox is left after the lease has expired."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not self.leaks(), timeout, "nothing is left", pause=0.2)
        left = self.leaks()
        assert not left, "left behind:\n" + "\n".join(left)

    def close(self) -> None:
        """Kill all remaining processes, so that a failure does not affect the next test."""
        for pid in processes_naming(str(self.base)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.runtime, ignore_errors=True)


@dataclass(frozen=True)
class Run:
    """Exit status and output of a program."""

    code: int
    output: str


def kill_group(process: subprocess.Popen[Any], signum: int = signal.SIGKILL) -> None:
    """Send a signal to a spawned program and everything in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


class Server:
    """Jupyter server in a separate process, used only over REST and websockets."""

    def __init__(self, env: Env, program: str, arguments: Sequence[str], options: dict[str, Any]) -> None:
        self.env, self.token = env, uuid.uuid4().hex
        # Bound until the end, so that no other process is given the port. A server can listen on it nevertheless.
        self.port_holder = socket.socket()
        self.port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port_holder.bind(("127.0.0.1", 0))
        self.port = self.port_holder.getsockname()[1]
        self.log = env.base / f"server-{self.port}.log"
        # Python loses a signal whose handler logs, as Jupyter's does, while the program writes to a buffered log.
        variables = {"PYTHONUNBUFFERED": "1", **(options.get("env") or {})}
        with self.log.open("w") as log:
            self.process = env.spawn(*self.command(program, arguments), stdout=log, **{**options, "env": variables})
        self.sockets: list[websocket.WebSocket] = []
        self.http = requests.Session()
        self.http.trust_env = False
        self.http.headers["Authorization"] = f"token {self.token}"

    def command(self, program: str, arguments: Sequence[str]) -> list[str]:
        """Return the command line that starts the server."""
        if program == "kernelgateway":
            command = ["jupyter-kernelgateway", f"--KernelGatewayApp.port={self.port}",
                       "--KernelGatewayApp.port_retries=0", f"--KernelGatewayApp.auth_token={self.token}"]  # fmt: skip
        else:
            command = [f"jupyter-{program}", "--no-browser", "--allow-root", f"--ServerApp.port={self.port}",
                       "--ServerApp.port_retries=0", f"--IdentityProvider.token={self.token}",
                       "--ServerApp.root_dir=" + str(self.env.work),
                       ]  # fmt: skip
            option = "--ServerApp.jpserver_extensions="
            extensions = dict.fromkeys(UNUSED, False) if program == "server" else {"jupyter_lsp": False}
            for given in (text for text in arguments if text.startswith(option)):
                extensions |= ast.literal_eval(given.removeprefix(option))
            arguments = [*(text for text in arguments if not text.startswith(option)), f"{option}{extensions}"]
        # These tests do not test the server's own throttling of output.
        return [*command, "--ZMQChannelsWebsocketConnection.limit_rate=False", *arguments]

    def wait_ready(self, timeout: float = 150) -> None:
        """Wait until the server answers."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"server ended:\n{self.log.read_text()}"
            with contextlib.suppress(requests.ConnectionError, requests.Timeout):
                return self.http.get(self.url("api"), timeout=5).ok
            return False

        try:
            wait_until(is_ready, timeout, "the server answers")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()[-8000:]}") from None

    def url(self, path: str) -> str:
        """Return the URL of a path."""
        return f"http://127.0.0.1:{self.port}/{path}"

    def call(self, method: str, path: str, body: Any = None, timeout: float = 150) -> Any:
        """Make one REST call, and return the decoded answer."""
        answer = self.http.request(method, self.url(path), json=body, timeout=timeout)
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}\n{self.log.read_text()[-4000:]}"
        return answer.json() if answer.content else None

    def kernel(self, name: str = KERNEL, **body: Any) -> KernelClient:
        """Start a kernel over REST and connect to it."""
        return KernelClient(self, self.call("POST", "api/kernels", {"name": name, **body})["id"])

    def notebook(self, path: str, name: str = KERNEL) -> KernelClient:
        """Open a session for a notebook as JupyterLab does, and connect to its kernel."""
        body = {"path": path, "name": Path(path).name, "type": "notebook", "kernel": {"name": name}}
        return KernelClient(self, self.call("POST", "api/sessions", body)["kernel"]["id"])

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """Stop the server as an operator would, and kill it if it does not exit."""
        self.http.close()
        self.port_holder.close()
        for connection in self.sockets:
            connection.close()
            connection.shutdown()  # close() does nothing after the server's close frame
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            self.process.wait(100)
        except subprocess.TimeoutExpired:
            kill_group(self.process)
            self.process.wait()
            raise AssertionError(f"the server did not end:\n{self.log.read_text()[-4000:]}") from None


@dataclass
class Result:
    """Result of one execution."""

    reply: dict[str, Any] = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    #: Kernel state that ended the execution, ``restarting`` or ``dead``, if there was no reply.
    death: str = ""

    @property
    def text(self) -> str:
        """Complete stdout."""
        return self._stream("stdout")

    @property
    def notices(self) -> str:
        """Complete stderr: the kernel's output, and messages of the sandbox."""
        return self._stream("stderr")

    def _stream(self, name: str) -> str:
        contents = [output["content"] for output in self.outputs if output["msg_type"] == "stream"]
        return "".join(content["text"] for content in contents if content["name"] == name)

    @property
    def data(self) -> list[dict[str, Any]]:
        """MIME bundles, in order."""
        return [o["content"]["data"] for o in self.outputs if "data" in o["content"]]

    @property
    def error(self) -> str:
        """Name of the exception; empty without one."""
        return str(self.reply.get("ename", ""))


class KernelClient:
    """Websocket of a kernel, used as a notebook uses it."""

    def __init__(self, server: Server, kernel_id: str, session: str = "") -> None:
        self.server, self.id, self.session = server, kernel_id, session or uuid.uuid4().hex
        self.socket = websocket.create_connection(
            server.url(f"api/kernels/{kernel_id}/channels?session_id={self.session}").replace("http", "ws", 1),
            header=[f"Authorization: token {server.token}"],
            http_no_proxy=["127.0.0.1"],
            timeout=150,
        )
        server.sockets.append(self.socket)
        self._started: set[str] = set()
        self._others: list[dict[str, Any]] = []
        self.send("shell", "kernel_info_request", {})

    def send(self, channel: str, kind: str, content: dict[str, Any], parent: dict[str, Any] | None = None) -> str:
        """Send one message, and return its id."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": kind, "session": self.session, "username": "test",
                  "version": "5.3", "date": "2020-01-01T00:00:00Z"}  # fmt: skip
        message = {"header": header, "parent_header": parent or {}, "metadata": {}, "content": content,
                   "channel": channel, "buffers": []}  # fmt: skip
        self.socket.send(json.dumps(message))
        return str(header["msg_id"])

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message."""
        self.socket.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            return json.loads(self.socket.recv())  # type: ignore[no-any-return]
        except websocket.WebSocketTimeoutException:
            raise AssertionError(f"no message came in time:\n{self.server.log.read_text()[-4000:]}") from None

    def start(self, code: str, *, allow_stdin: bool = False) -> str:
        """Send code without waiting for it, and return the request's id."""
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {},
                   "allow_stdin": allow_stdin, "stop_on_error": True}  # fmt: skip
        request = self.send("shell", "execute_request", content)
        self._started.add(request)
        return request

    def finish(self, request: str, *, answers: Sequence[str] = (), timeout: float = 150) -> Result:
        """Collect the messages of a request until it ends or its kernel dies. Those of later requests are kept.

        The channels are not in order: one cell's output may come before the reply to the cell before it.
        """
        result, replies, is_idle = Result(), list(answers), False
        deadline = time.monotonic() + timeout
        self._started.discard(request)
        kept, self._others = self._others, []
        while not (is_idle and result.reply):
            message = kept.pop(0) if kept else self.receive(deadline)
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] in ("restarting", "dead"):
                result.death = content["execution_state"]
                return result
            if message["parent_header"].get("msg_id") != request:
                if message["parent_header"].get("msg_id") in self._started:
                    self._others.append(message)
                continue
            if kind == "status":
                is_idle = content["execution_state"] == "idle"
            elif kind == "execute_reply":
                result.reply = content
            elif kind == "input_request":
                self.send("stdin", "input_reply", {"value": replies.pop(0)}, message["header"])
            elif message["channel"] == "iopub" and kind != "execute_input":
                result.outputs.append(message)
        self._others += kept
        return result

    def execute(self, code: str, *, answers: Sequence[str] = (), timeout: float = 150) -> Result:
        """Run code, and wait until it ends."""
        return self.finish(self.start(code, allow_stdin=bool(answers)), answers=answers, timeout=timeout)

    def check(self, code: str, *, timeout: float = 150) -> str:
        """Run code that must succeed, and return its stdout."""
        result = self.execute(code, timeout=timeout)
        assert result.reply.get("status") == "ok", f"{code!r}: {result}"
        return result.text

    def restart(self) -> None:
        """Restart the kernel over REST. The websocket stays open."""
        self.server.call("POST", f"api/kernels/{self.id}/restart")

    def interrupt(self) -> None:
        """Interrupt the kernel over REST."""
        self.server.call("POST", f"api/kernels/{self.id}/interrupt")

    def shutdown(self) -> None:
        """End the kernel and close the websocket."""
        self.server.call("DELETE", f"api/kernels/{self.id}")
        self.socket.close()
        self.socket.shutdown()
