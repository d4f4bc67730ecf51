"""Call MCP over HTTP with the SDK's own client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult

from support.harness import Server

#: Long, so that the sandbox shared by all tests survives on a slow machine.
LEASE = 30.0


#: Protocols of the SDK's client: with sessions, as most clients today, and without, as newer ones.
MODES = ("legacy", "2026-07-28")


def text_of(result: CallToolResult) -> str:
    """Return all text of a result."""
    return "\n".join(block.text for block in result.content if block.type == "text")


async def upload_in_parts(client: Client, count: int, **where: str) -> None:
    """Upload a file in parts of the maximum size, and check the progress messages of each."""
    part = bytes(range(256)) * (4 * 1024 * 4)  # 4 MiB
    encoded = base64.b64encode(part).decode()
    for number in range(1, count + 1):
        told: list[tuple[float, str]] = []

        async def progress(done: float, total: float | None, message: str | None, told: Any = told) -> None:
            told.append((done, message or ""))

        arguments = {"path": "long.bin", "base64": encoded, "append": number > 1, **where}
        sent = await client.call_tool("upload", arguments, progress_callback=progress)
        assert not sent.is_error, text_of(sent)
        assert sent.structured_content["size"] == number * len(part)
        with anyio.fail_after(60):  # the SDK's client handles progress in a separate task
            while not (told and told[-1][1].endswith(f"[long.bin: {number * len(part):,} bytes so far]\n")):
                await asyncio.sleep(0.01)
        assert [done for done, _ in told] == sorted({done for done, _ in told})
    summed = await client.call_tool("bash", {"command": "sha256sum < long.bin; rm long.bin", **where})
    assert text_of(summed).split()[0] == hashlib.sha256(part * count).hexdigest()


class Endpoint:
    """MCP endpoint of one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = server.url("agentbox/mcp")

    @contextlib.asynccontextmanager
    async def connect(self, token: str | None = None, mode: str = "legacy") -> AsyncIterator[Client]:
        """Connect the SDK's client with a token, by default the server's own."""
        headers = {"Authorization": f"Bearer {token or self.server.token}"}
        async with (
            httpx2.AsyncClient(headers=headers, trust_env=False, timeout=150) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode, cache=None) as client,
        ):
            yield client

    def run(self, test: Callable[[Client], Awaitable[Any]], token: str | None = None, mode: str = "legacy") -> Any:
        """Run a test with a new client."""

        async def with_client() -> Any:
            async with self.connect(token, mode) as client:
                return await test(client)

        return asyncio.run(asyncio.wait_for(with_client(), 240))

    def call(self, name: str, token: str | None = None, mode: str = "legacy", **arguments: Any) -> CallToolResult:
        """Call one tool with a new client."""

        async def test(client: Client) -> CallToolResult:
            return await client.call_tool(name, arguments)

        result: CallToolResult = self.run(test, token, mode)
        return result
