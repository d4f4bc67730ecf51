"""The asynchronous client: what differs from the synchronous one, which is generated from it."""

from __future__ import annotations

import ast
import asyncio
import shutil
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


def test_the_synchronous_client_has_the_same_modules_and_awaits_nothing() -> None:
    client = ROOT / "jupyter_agentbox" / "client"
    names = {path.name for path in (client / "_async").glob("*.py")}
    assert {path.name for path in (client / "_sync").glob("*.py")} == names
    asynchronous = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    for name in names:
        text = (client / "_sync" / name).read_text()
        assert not any(isinstance(node, asynchronous) for node in ast.walk(ast.parse(text))), name
        assert "Async" not in text, name


def test_the_synchronous_client_is_generated_and_not_committed(tmp_path: Path) -> None:
    """What a clone has, without what git ignores, generates it and can be imported."""
    listed = ["git", "ls-files", "jupyter_agentbox", "tools"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert not [name for name in names if "_sync/" in name]
    for name in names:
        if name.endswith(".py") and (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    tool = [sys.executable, "tools/make_sync_client.py"]
    subprocess.run(tool, cwd=tmp_path, timeout=60, check=True)
    made = tmp_path / "jupyter_agentbox" / "client" / "_sync"
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    (made / "gone.py").write_text("left by an older version")
    subprocess.run(tool, cwd=tmp_path, timeout=60, check=True)
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before
    code = "import jupyter_agentbox.client._sync.client as m; print(m.__file__, m.Client.create)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert answer.stdout.startswith(str(made)), answer.stderr


def test_the_client_imports_nothing_of_a_server() -> None:
    code = (
        "import sys, jupyter_agentbox.client\n"
        "heavy = {'jupyter_server', 'jupyter_client', 'jupyter_core', 'tornado', 'zmq', 'traitlets', 'ipykernel'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (answer.stdout.strip(), answer.stderr) == ("[]", "")
