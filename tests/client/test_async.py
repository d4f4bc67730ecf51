"""The client for event loops: what differs from the other, which is made from it."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support import ROOT
from support.serving import Serving

from jupyter_agentbox.client import AsyncClient, NotFound, Output
from jupyter_agentbox.models import ExitEvent
from jupyter_agentbox.models.outputs import DoneEvent

TOOL = ROOT / "tools" / "make_sync_client.py"


def test_sandboxes_commands_code_and_files(serving: Serving, tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"abc"
        yield b"def"

    async def main() -> None:
        async with AsyncClient(serving.url, serving.token) as client:
            async with await client.create(id="async") as box:
                async with await box.stream("echo one; exit 3") as events:
                    seen = [event async for event in events]
                assert isinstance(seen[0], Output)
                assert isinstance(seen[-1], ExitEvent)
                assert (seen[0].text, seen[-1].exit_code) == ("one\n", 3)
                async with await box.stream_code("6 * 7") as outputs:
                    done = [event async for event in outputs][-1]
                assert isinstance(done, DoneEvent)
                assert done.result.result is not None
                assert done.result.result.data["text/plain"] == "42"
                await box.files.upload("f", chunks())
                await box.files.download("f", tmp_path / "f")
                assert (tmp_path / "f").read_bytes() == b"abcdef" == await box.files.read_bytes("f")
                process = await box.start(["cat"])
                await process.write("x", is_last=True)
                assert (await process.wait(60)).exit_code == 0
                results = await asyncio.gather(*(box.exec(["echo", str(n)]) for n in range(5)))
                assert [result.stdout for result in results] == [f"{n}\n" for n in range(5)]
            with pytest.raises(NotFound):
                await client.get("async")

    asyncio.run(asyncio.wait_for(main(), 200))


def test_a_cancelled_call_ends_its_command(serving: Serving) -> None:
    async def main() -> None:
        async with AsyncClient(serving.url, serving.token) as client, await client.create() as box:
            call = asyncio.ensure_future(box.exec("sleep 961", timeout=1000))
            while "sleep 961" not in (await box.exec("ps ax")).stdout:
                await asyncio.sleep(0.2)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while "sleep 961" in (await box.exec("ps ax")).stdout:
                await asyncio.sleep(0.2)

    asyncio.run(asyncio.wait_for(main(), 200))


def test_the_other_client_is_made_from_this_one() -> None:
    spec = importlib.util.spec_from_file_location("make_sync_client", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert len(tool.sources()) == 5
    for source in tool.sources():
        made = (tool.TARGET / source.name).read_text()
        fresh = ast.parse(tool.convert(source.read_text()))
        for module in (fresh, committed := ast.parse(made)):
            # Imports are put in order after the conversion.
            module.body.sort(key=lambda node: ast.dump(node) if isinstance(node, ast.ImportFrom) else "")
        assert ast.dump(fresh) == ast.dump(committed), f"run tools/make_sync_client.py: {source.name} has changed"
        assert not any(isinstance(node, (ast.AsyncFunctionDef, ast.Await)) for node in ast.walk(committed))


def test_the_client_imports_nothing_of_a_server() -> None:
    code = (
        "import sys, jupyter_agentbox.client\n"
        "heavy = {'jupyter_server', 'jupyter_client', 'jupyter_core', 'tornado', 'zmq', 'traitlets', 'ipykernel'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (answer.stdout.strip(), answer.stderr) == ("[]", "")
