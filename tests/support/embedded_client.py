"""Send requests to an embedded kernel directly, without Jupyter in between."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.session import Session

from jupyter_agentbox.sandbox.drivers import Kernel
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import Mount, SandboxSpec
from support.boxes import ENV

KEY = b"secret"


ARGV = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]


def spec() -> SandboxSpec:
    prefixes = {sys.prefix, sys.base_prefix}
    mounts = tuple(Mount(Path(prefix), prefix) for prefix in prefixes)
    return SandboxSpec(mounts=mounts, env=ENV, lease_timeout=20, driver="auto")


async def start(sandbox: Sandbox) -> Kernel:
    return await sandbox.start_kernel(ARGV, ENV, "/workspace", key=KEY.decode(), signature_scheme="hmac-sha256")


class Client:
    """Client that speaks Jupyter's protocol to a driver, from the test's own thread."""

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

    def _do(self, work: Any, timeout: float = 100) -> Any:
        return LinkThread.instance().submit(asyncio.wait_for(work, timeout)).result(timeout + 5)

    def send(self, channel: str, kind: str, content: dict[str, Any], **more: Any) -> str:
        buffers = more.pop("buffers", [])
        message = self.session.msg(kind, content)
        message["header"].update(more)
        self._do(self.kernel.send(channel, [b"test", *self.session.serialize(message), *buffers]))
        return str(message["header"]["msg_id"])

    def find(self, wanted: Callable[[str, dict[str, Any]], bool], timeout: float = 100) -> dict[str, Any]:
        """Wait for a message, and return it."""

        async def look() -> dict[str, Any]:
            seen = 0
            while True:
                for channel, message in self.messages[seen:]:
                    seen += 1
                    if wanted(channel, message):
                        return message
                self._news.clear()
                await self._news.wait()

        try:
            found: dict[str, Any] = self._do(look(), timeout)
        except asyncio.TimeoutError:
            last = str(self.messages[-5:])[-3000:]
            raise AssertionError(f"not within {timeout} s; the kernel's end: {self.kernel.end}; last: {last}") from None
        return found

    def reply(self, request: str, channel: str = "shell", timeout: float = 100) -> dict[str, Any]:
        return self.find(lambda c, m: c == channel and m["parent_header"].get("msg_id") == request, timeout)

    def start(self, code: str, **more: Any) -> str:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": True}
        header = {key: more.pop(key) for key in list(more) if key == "subshell_id"}
        return self.send("shell", "execute_request", {**content, **more}, **header)

    def outputs(self, request: str, timeout: float = 100) -> list[dict[str, Any]]:
        """Wait until a request has ended, and return everything that was published for it."""
        self.find(
            lambda c, m: (
                c == "iopub"
                and m["parent_header"].get("msg_id") == request
                and m["content"].get("execution_state") == "idle"
            ),
            timeout,
        )
        return [m for c, m in self.messages if c == "iopub" and m["parent_header"].get("msg_id") == request]

    def text(self, request: str, name: str = "stdout", timeout: float = 100) -> str:
        streams = [m["content"] for m in self.outputs(request, timeout) if m["msg_type"] == "stream"]
        return "".join(content["text"] for content in streams if content["name"] == name)

    def run(self, code: str, timeout: float = 100, **more: Any) -> str:
        """Run code. Return what it printed, its result and the name of its error."""
        request = self.start(code, **more)
        outputs = self.outputs(request, timeout)
        text = self.text(request)
        text += "".join(m["content"]["data"]["text/plain"] for m in outputs if m["msg_type"] == "execute_result")
        return text + "".join(m["content"]["ename"] for m in outputs if m["msg_type"] == "error")

    def until(self, code: str, wanted: str, timeout: float = 60) -> str:
        """Start code, wait until it has printed something, and return the request."""
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
