"""The embedded driver on real gVisor: every part of Jupyter's protocol, and what must hold when owners come and go."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from boxes import ENV
from jupyter_client.session import Session

from jupyter_agentbox.driver import Kernel
from jupyter_agentbox.link import LinkThread
from jupyter_agentbox.manager import SandboxManager
from jupyter_agentbox.runtimes.runsc import RunscRuntime
from jupyter_agentbox.sandbox import Sandbox
from jupyter_agentbox.spec import Mount, SandboxSpec

pytestmark = pytest.mark.usefixtures("has_runsc")

KEY = b"secret"
ARGV = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]


def spec() -> SandboxSpec:
    prefixes = {sys.prefix, sys.base_prefix}
    mounts = tuple(Mount(Path(prefix), prefix) for prefix in prefixes)
    return SandboxSpec(mounts=mounts, env=ENV, lease_timeout=20, driver="auto")


async def start(sandbox: Sandbox) -> Kernel:
    return await sandbox.start_kernel(ARGV, ENV, "/workspace", key=KEY.decode(), signature_scheme="hmac-sha256")


class Client:
    """Speaks Jupyter's protocol to a driver, from the test's own thread."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.session = Session(key=KEY)
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Event()
        kernel.on_message = self._on_message

    async def _on_message(self, channel: str, frames: list[bytes]) -> None:
        _, parts = self.session.feed_identities(frames)
        self.messages.append((channel, self.session.deserialize(parts)))
        self._news.set()

    def _do(self, work: Any, timeout: float = 60) -> Any:
        return LinkThread.instance().submit(asyncio.wait_for(work, timeout)).result(timeout + 5)

    def send(self, channel: str, kind: str, content: dict[str, Any], **more: Any) -> str:
        buffers = more.pop("buffers", [])
        message = self.session.msg(kind, content)
        message["header"].update(more)
        self._do(self.kernel.send(channel, [b"test", *self.session.serialize(message), *buffers]))
        return str(message["header"]["msg_id"])

    def find(self, wanted: Callable[[str, dict[str, Any]], bool], timeout: float = 30) -> dict[str, Any]:
        """Wait for a message, and take it with all before it."""

        async def look() -> dict[str, Any]:
            seen = 0
            while True:
                for channel, message in self.messages[seen:]:
                    seen += 1
                    if wanted(channel, message):
                        return message
                self._news.clear()
                await self._news.wait()

        found: dict[str, Any] = self._do(look(), timeout)
        return found

    def reply(self, request: str, channel: str = "shell", timeout: float = 30) -> dict[str, Any]:
        return self.find(lambda c, m: c == channel and m["parent_header"].get("msg_id") == request, timeout)

    def start(self, code: str, **more: Any) -> str:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": True}
        header = {key: more.pop(key) for key in list(more) if key == "subshell_id"}
        return self.send("shell", "execute_request", {**content, **more}, **header)

    def outputs(self, request: str, timeout: float = 30) -> list[dict[str, Any]]:
        """All that was published for a request, which is over."""
        self.find(
            lambda c, m: (
                c == "iopub"
                and m["parent_header"].get("msg_id") == request
                and m["content"].get("execution_state") == "idle"
            ),
            timeout,
        )
        return [m for c, m in self.messages if c == "iopub" and m["parent_header"].get("msg_id") == request]

    def text(self, request: str, name: str = "stdout", timeout: float = 30) -> str:
        streams = [m["content"] for m in self.outputs(request, timeout) if m["msg_type"] == "stream"]
        return "".join(content["text"] for content in streams if content["name"] == name)

    def run(self, code: str, timeout: float = 30, **more: Any) -> str:
        """Run code and return what it printed, its result and its error's name."""
        request = self.start(code, **more)
        outputs = self.outputs(request, timeout)
        text = self.text(request)
        text += "".join(m["content"]["data"]["text/plain"] for m in outputs if m["msg_type"] == "execute_result")
        return text + "".join(m["content"]["ename"] for m in outputs if m["msg_type"] == "error")

    def until(self, code: str, wanted: str, timeout: float = 10) -> str:
        """Start code and wait until it has printed something; the request is returned."""
        request = self.start(code)
        self.find(
            lambda c, m: (
                m["msg_type"] == "stream"
                and m["parent_header"].get("msg_id") == request
                and wanted in m["content"]["text"]
            ),
            timeout,
        )
        return request


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    state = tmp_path_factory.mktemp("embedded") / "state"
    manager = SandboxManager(state, RunscRuntime(state_dir=str(state)))
    thread = LinkThread.instance()
    made = thread.submit(manager.create(spec())).result(60)
    yield made
    thread.submit(manager.stop(made)).result(60)
    assert not list((state / "sandboxes").iterdir())


@pytest.fixture(scope="module")
def client(sandbox: Sandbox) -> Client:
    client = Client(LinkThread.instance().submit(start(sandbox)).result(60))
    assert client.kernel.driver == "embedded"
    client.reply(client.send("shell", "kernel_info_request", {}), timeout=60)
    return client


def test_code_runs(client: Client) -> None:
    assert client.run("print('hello'); 1 + 1") == "hello\n2"
