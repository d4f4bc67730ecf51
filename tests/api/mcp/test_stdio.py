"""MCP on standard input and output: sandboxes of its own, and passed on to a server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import requests
from mcp import Client, StdioServerParameters
from support.harness import BIN, Env, wait_until
from support.mcp_client import MODES, Endpoint, text_of, upload_in_parts

from jupyter_agentbox.api.mcp.forward import address_of
from jupyter_agentbox.errors import InvalidRequest

PROGRAM = str(BIN / "jupyter-agentbox")


@pytest.fixture(scope="module")
def env(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    env = Env(tmp_path_factory.mktemp("stdio"))
    try:
        yield env
        env.assert_clean()
    finally:
        env.close()


def run(env: Env, test: Callable[[Client], Any], *arguments: str, mode: str = "legacy", **variables: str) -> None:
    """Run a test with a client of a process of its own."""
    parameters = StdioServerParameters(
        command=PROGRAM, args=["mcp", *arguments], env={**env.variables, **variables}, cwd=str(env.work)
    )

    async def with_client() -> None:
        async with Client(parameters, mode=mode, cache=None) as client:
            await test(client)

    asyncio.run(asyncio.wait_for(with_client(), 240))


#: A command that waits until no process has this in its command line.
GONE = "for i in $(seq 100); do pgrep -f '{}' >/dev/null || {{ echo gone; exit; }}; sleep 0.2; done"


async def heard(told: list[str], text: str) -> None:
    """Wait until the client, in a task of its own, was told just this, but for words that the work goes on."""
    with anyio.fail_after(60):
        while "".join(item for item in told if not item.startswith("[")) != text:
            await asyncio.sleep(0.01)


async def cancelled(client: Client, arguments: dict[str, str]) -> None:
    """Cancel a command once it has put something out."""
    with anyio.CancelScope() as scope:

        async def begun(done: float, total: float | None, message: str | None) -> None:
            scope.cancel()

        await client.call_tool("bash", arguments, progress_callback=begun)
    assert scope.cancelled_caught


def test_sandboxes_of_its_own_end_with_it(env: Env) -> None:
    async def test(client: Client) -> None:
        assert "bash" in {tool.name for tool in (await client.list_tools()).tools}
        none = await client.call_tool("bash", {"command": "true"})
        assert none.is_error
        assert "create one with create_sandbox" in text_of(none)
        assert not (await client.call_tool("create_sandbox", {})).is_error
        assert len(env.sandboxes()) == 1
        told: list[str] = []

        async def progress(done: float, total: float | None, message: str | None) -> None:
            told.append(message or "")

        ran = await client.call_tool("bash", {"command": "echo $((6*7)); sleep 0.5"}, progress_callback=progress)
        assert text_of(ran) == "42"
        await heard(told, "42\n")
        # What is cancelled ends, and the next call is served.
        await cancelled(client, {"command": "echo begun; sleep 3041"})
        left = await client.call_tool("bash", {"command": GONE.format("[3]041")})
        assert text_of(left) == "gone"
        await upload_in_parts(client, 4)

    run(env, test)
    wait_until(lambda: not env.sandboxes(), 60, "the sandbox has ended with the process")


def test_a_signal_ends_it_with_its_sandboxes(env: Env) -> None:
    version = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": version},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "create_sandbox", "arguments": {}}},
    ]
    with subprocess.Popen(
        [PROGRAM, "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env.variables, cwd=env.work, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for message in messages:
            process.stdin.write(json.dumps(message) + "\n")
        process.stdin.flush()
        answers = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert answers[1]["result"]["isError"] is False
        assert env.sandboxes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
    assert not env.sandboxes()


def test_it_passes_on_to_a_server(env: Env, endpoint: Endpoint, box: str) -> None:
    async def test(client: Client) -> None:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert listed["bash"].annotations.destructive_hint is True
        told: list[str] = []

        async def progress(done: float, total: float | None, message: str | None) -> None:
            told.append(message or "")

        code = {"sandbox": box, "code": "print('first', flush=True)\nimport time; time.sleep(1)\n6 * 7"}
        ran = await client.call_tool("run_code", code, progress_callback=progress)
        assert text_of(ran) == "first\n42"
        await heard(told, "first\n")
        refused = await client.call_tool("read", {"sandbox": box, "path": "none"})
        assert refused.is_error
        await cancelled(client, {"sandbox": box, "command": "echo begun; sleep 3051"})
        left = await client.call_tool("bash", {"sandbox": box, "command": GONE.format("[3]051")})
        assert text_of(left) == "gone"
        await upload_in_parts(client, 4, sandbox=box)

    url = endpoint.server.url("")
    run(env, test, "--url", url, mode="2026-07-28", JUPYTER_AGENTBOX_TOKEN=endpoint.server.token)


@pytest.mark.parametrize("mode", MODES)
def test_it_connects_again_after_the_server_has_restarted(env: Env, mode: str) -> None:
    sandbox = {"sandbox": "kept"}
    options = ("--Policy.lease_timeout=120",)

    def restart() -> None:
        server.process.kill()
        server.process.wait(60)
        with server.log.open("a") as log:
            server.process = env.spawn(*server.command("lab", options), stdout=log)
        server.wait_ready()

    async def test(client: Client) -> None:
        assert not (await client.call_tool("create_sandbox", {"id": "kept"})).is_error
        assert not (await client.call_tool("run_code", {**sandbox, "code": "x = 1"})).is_error
        await asyncio.to_thread(restart)
        assert text_of(await client.call_tool("run_code", {**sandbox, "code": "x"})) == "1"
        assert "bash" in {tool.name for tool in (await client.list_tools()).tools}
        await client.call_tool("stop_sandbox", sandbox)

    with env.server("lab", *options) as server:
        run(env, test, "--url", server.url(""), mode=mode, JUPYTER_AGENTBOX_TOKEN=server.token)


def test_a_server_that_refuses_is_told(env: Env, endpoint: Endpoint) -> None:
    def fails(url: str, **variables: str) -> str:
        run = env.run(PROGRAM, "mcp", "--url", url, env=variables, check=False, timeout=150)
        assert run.code == 1
        assert "Traceback" not in run.output
        return run.output

    url = endpoint.server.url("")
    assert "JUPYTER_AGENTBOX_TOKEN" in fails(url)
    wrong = fails(url, JUPYTER_AGENTBOX_TOKEN="wrong-canary")
    assert "cannot use MCP at" in wrong
    assert "wrong-canary" not in wrong
    assert "cannot use MCP at" in fails("http://127.0.0.1:9/", JUPYTER_AGENTBOX_TOKEN="x")
    with pytest.raises(InvalidRequest, match="must not contain a token"):
        address_of(url + "?token=abc")
    assert address_of("https://hub.example/user/me/lab") == "https://hub.example/user/me/agentbox/mcp"


def test_without_the_sdk(env: Env, tmp_path: Path) -> None:
    """All else works, and both ways in say how to get it."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mcp'] = None\n")
    without = {"PYTHONPATH": str(tmp_path)}
    told = env.run(PROGRAM, "mcp", env=without, check=False)
    assert told.code == 1
    assert "pip install 'mcp>=2.3" in told.output
    with env.server("server", "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}", env=without) as server:
        assert server.call("GET", "api/agentbox/tools")
        headers = {"Authorization": f"token {server.token}"}
        answer = requests.post(server.url("agentbox/mcp"), json={}, headers=headers, timeout=60)
        assert answer.status_code == 501
        assert "pip install" in answer.json()["message"]
