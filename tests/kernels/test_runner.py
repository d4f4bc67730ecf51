"""Code in persistent kernels, on real gVisor: what comes back, who is interrupted, how an end is told."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from support.harness import wait_until
from traitlets.config import Config

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound, SandboxEnded, TooLarge
from jupyter_agentbox.jupyter.kernelspecs import OWN_SPEC
from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.models.outputs import ClearEvent, CodeResult, DoneEvent, OutputLimits, ResultEvent, StreamEvent
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import Cause

pytestmark = pytest.mark.usefixtures("has_runsc")

#: Python that says so once it runs and then takes long, in small steps.
LOOP = "import time\nprint('started', flush=True)\nwhile True: time.sleep(0.02)"


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """Directories of these tests' own, on short paths; nothing may be left in them."""
    with tempfile.TemporaryDirectory(prefix="ab") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", name)
        patch.setenv("JUPYTER_RUNTIME_DIR", f"{name}/runtime")
        patch.setenv("JUPYTER_CONFIG_DIR", f"{name}/config")
        yield Path(name)
        assert list(Path(name, "state", "sandboxes").glob("*")) == []
        wait_until(lambda: not list(Path(name, "agentbox").glob("[!l]*")), 60, "fronts go a moment after")
        shutil.rmtree(Path(name, "state"), ignore_errors=True)


@pytest.fixture(scope="module")
def config(base: Path) -> Config:
    return Config({"Policy": {"state_dir": str(base / "state"), "lease_timeout": 10.0}})


@pytest.fixture(scope="module")
def create(base: Path, config: Config) -> Iterator[Callable[[], Sandbox]]:
    state = base / "state"
    manager = SandboxManager(state, RunscRuntime(state_dir=str(state)))
    made = []

    def create() -> Sandbox:
        spec = Policy(config=config).resolve({}, executable=sys.executable)
        made.append(LinkThread.instance().submit(manager.create(spec)).result(150))
        return made[-1]

    yield create
    for sandbox in made:
        LinkThread.instance().submit(manager.stop(sandbox)).result(100)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(max_contexts=3)


class Here:
    """A sandbox and the runner."""

    def __init__(self, runner: Runner, sandbox: Sandbox) -> None:
        self.runner = runner
        self.sandbox = sandbox

    async def run(self, code: str, **options: Any) -> CodeResult:
        return await self.runner.run(self.sandbox, code, **options)

    async def text(self, code: str, **options: Any) -> str:
        result = await self.run(code, **options)
        assert result.status == "ok", result
        return result.stdout

    async def started(self, code: str = LOOP, **options: Any) -> asyncio.Task[CodeResult]:
        """Run code that says 'started'; return once it does."""
        is_started = asyncio.Event()

        async def follow() -> CodeResult:
            async for event in self.runner.stream(self.sandbox, code, **options):
                if isinstance(event, StreamEvent) and "started" in event.text:
                    is_started.set()
                if isinstance(event, DoneEvent):
                    return event.result
            raise AssertionError("no last event")

        task = asyncio.create_task(follow())
        await asyncio.wait_for(is_started.wait(), 100)
        return task


@pytest.fixture(scope="module")
def here(runner: Runner, create: Callable[[], Sandbox]) -> Here:
    return Here(runner, create())


def wait_for(name: str) -> str:
    """Return code that goes on when :func:`let` has let it."""
    return f"import os, time\nwhile not os.path.exists('/tmp/{name}'): time.sleep(0.02)"


async def let(sandbox: Sandbox, name: str) -> None:
    await sandbox.run(["/bin/touch", f"/tmp/{name}"], {})


def go(work: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 280)

    return asyncio.run(bounded())


# What comes back


def test_state_persists_and_every_kind_of_output_comes_back(here: Here) -> None:
    async def test() -> None:
        assert (await here.run("x = 41")).result is None
        result = await here.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\nx + 1")
        assert (result.status, result.stdout, result.stderr) == ("ok", "out\n", "err\n")
        assert result.result is not None
        assert result.result.data == {"text/plain": "42"}
        assert result.execution_count == 2
        assert not result.truncated
        assert result.total_bytes.stdout == 4
        assert await here.text("import os; print(os.getcwd(), os.getuid())") == "/workspace 1000\n"
        # Top-level await, and what `name?` shows.
        assert await here.text("import asyncio; await asyncio.sleep(0); print(1)") == "1\n"
        assert "Return the length" not in (page := await here.run("len?")).stdout
        assert "Return the number of items" in page.displays[0].data["text/plain"]

    go(test())


def test_figures_come_as_images_and_json_as_json(here: Here) -> None:
    async def test() -> None:
        result = await here.run("import matplotlib.pyplot as plt\nplt.plot([1, 3]); plt.show()")
        assert result.status == "ok", result
        assert base64.b64decode(result.displays[0].data["image/png"]).startswith(b"\x89PNG")
        result = await here.run("from IPython.display import JSON; display(JSON({'a': [1, 2]}))")
        answer = msgspec.json.decode(msgspec.json.encode(result))
        assert answer["displays"][0]["data"]["application/json"] == {"a": [1, 2]}

    go(test())


def test_an_error_has_its_traceback_and_input_is_refused(here: Here) -> None:
    async def test() -> None:
        result = await here.run("def f():\n    return 1/0\nprint('before')\nf()")
        assert (result.status, result.stdout) == ("error", "before\n")
        assert result.error is not None
        assert (result.error.ename, result.error.evalue) == ("ZeroDivisionError", "division by zero")
        assert any("return" in line for line in result.error.traceback)
        result = await here.run("input('?')")
        assert result.error is not None
        assert result.error.ename == "StdinNotImplementedError"

    go(test())


def test_displays_are_updated_and_cleared(here: Here) -> None:
    async def test() -> None:
        result = await here.run(
            "from IPython.display import clear_output\nprint('gone'); display('gone')\nclear_output(wait=True)\n"
            "print('kept')\nh = display('first', display_id=True)\nh.update('second')"
        )
        assert result.stdout == "kept\n"
        assert [display.data["text/plain"] for display in result.displays] == ["'second'"]

    go(test())


def test_output_beyond_the_limits_is_cut_and_said(here: Here) -> None:
    async def test() -> None:
        code = "print('x' * 10_000_000)\nfrom IPython.display import HTML\ndisplay(HTML('y' * 5000))\n1"
        result = await here.run(code, limits=OutputLimits(stream_bytes=1000, display_bytes=2000))
        assert result.status == "ok"
        assert (result.truncated, result.stdout.count("x"), result.stdout[-2:]) == (True, 999, "x\n")
        assert "\n[9,999,001 bytes of output left out]\n" in result.stdout
        assert result.total_bytes.stdout == 10_000_001
        assert result.displays == []
        assert result.total_bytes.displays > 5000
        assert result.result is not None
        result = await here.run("print('x' * 10_000_000)", limits=OutputLimits(stream_bytes=20_000_000))
        assert (result.truncated, len(result.stdout)) == (False, 10_000_001)
        # As many messages as there are lines.
        many = "for i in range(2_500): print(f'{i:099d}', flush=True)\nprint('hi')"
        whole = await here.run(many)
        assert (whole.status, whole.truncated, whole.stdout.count("\n")) == ("ok", False, 2_501)
        assert whole.stdout.endswith(f"{2_499:099d}\nhi\n")
        cut = await here.run(many, limits=OutputLimits(stream_bytes=1000))
        assert (cut.status, cut.truncated, cut.stdout[-4:]) == ("ok", True, "\nhi\n")
        assert len(cut.stdout) < 1100
        assert cut.total_bytes.stdout == whole.total_bytes.stdout == 250_003

    go(test())


def test_events_come_as_they_happen(here: Here) -> None:
    async def test() -> None:
        code = (
            f"print('one', flush=True)\n{wait_for('heard')}\nfrom IPython.display import clear_output\n"
            "clear_output()\nprint('two')\n3"
        )
        seen: list[Any] = []
        async for event in here.runner.stream(here.sandbox, code):
            if not seen:
                await let(here.sandbox, "heard")
            seen.append(event)
        kinds = [type(event) for event in seen]
        assert kinds == [StreamEvent, ClearEvent, StreamEvent, ResultEvent, DoneEvent]
        assert seen[-1].result.stdout == "two\n"
        assert msgspec.json.decode(msgspec.json.encode(seen[0])) == {
            "event": "stream",
            "name": "stdout",
            "text": "one\n",
        }

    go(test())


# Interrupts


def test_interrupt_ends_the_code_and_keeps_the_variables(here: Here) -> None:
    async def test() -> None:
        await here.run("kept = 7")
        task = await here.started()
        (info,) = await here.runner.contexts(here.sandbox)
        assert (info.name, info.state, info.epoch) == ("default", "busy", 1)
        await here.runner.interrupt(here.sandbox)
        result = await task
        assert result.status == "interrupted"
        assert result.stdout == "started\n"
        assert await here.text("print(kept)") == "7\n"

    go(test())


def test_a_timeout_interrupts_and_gives_what_there_was(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_agentbox.kernels.kernelclient.INTERRUPT_GRACE", 60.0)

    async def test() -> None:
        result = await here.run(LOOP, timeout=3.0)
        assert (result.status, result.stdout, result.is_busy) == ("timed_out", "started\n", False)
        assert 3.0 <= result.duration < 60
        assert await here.text("print(kept)") == "7\n"

    go(test())


def test_code_that_heeds_no_interrupt_is_said_to_be_busy(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_agentbox.kernels.kernelclient.INTERRUPT_GRACE", 0.5)

    async def test() -> None:
        stubborn = f"import signal\nsignal.signal(signal.SIGINT, lambda *_: None)\n{wait_for('over')}"
        result = await here.run(stubborn, timeout=3.0)
        assert (result.status, result.is_busy) == ("timed_out", True)
        assert result.message is not None
        assert "still runs" in result.message
        # What waits behind it is withdrawn, not run later.
        result = await here.run("withdrawn = 1", timeout=0.5)
        assert (result.status, result.has_started) == ("timed_out", False)
        await let(here.sandbox, "over")
        assert await here.text("print('withdrawn' in globals())") == "False\n"

    go(test())


def test_a_caller_that_goes_away_interrupts_its_run(here: Here) -> None:
    async def test() -> None:
        task = await here.started()
        task.cancel()
        assert await here.text("print('free')", timeout=60) == "free\n"
        # One that waits in line is just taken out of it; a kernel at work for another goes on.
        task = await here.started(f"print('started', flush=True)\n{wait_for('cancelled')}\ndone = 1")
        waiting = asyncio.create_task(here.run("never = 1"))
        await asyncio.sleep(0.2)
        waiting.cancel()
        await let(here.sandbox, "cancelled")
        assert (await task).status == "ok"
        assert await here.text("print(done, 'never' in globals())") == "1 False\n"
        # Unless it is told to go on.
        code = "import time\nprint('started', flush=True)\ntime.sleep(0.5)\nlate = 1"
        (await here.started(code, keep_running=True)).cancel()
        assert await here.text("print(late)") == "1\n"

    go(test())


# Contexts


def test_contexts_are_apart_and_share_the_files(here: Here) -> None:
    async def test() -> None:
        runner, sandbox = here.runner, here.sandbox
        await here.run("x = 'first'; open('shared.txt', 'w').write('seen')")
        one, two = await asyncio.gather(
            here.text("x = 'second'; print(open('shared.txt').read())", context="two"),
            here.text("print(x)", context="two"),
            return_exceptions=True,
        )
        assert (one, two) == ("seen\n", "second\n")
        assert await here.text("print(x)") == "first\n"
        assert [info.name for info in await runner.contexts(sandbox)] == ["default", "two"]
        assert (await runner.restart_context(sandbox, "two")).epoch == 2
        result = await here.run("x", context="two")
        assert (result.status, result.epoch, result.context) == ("error", 2, "two")
        await runner.delete_context(sandbox, "two")
        assert [info.name for info in await runner.contexts(sandbox)] == ["default"]
        assert list(sandbox.kernels) == ["kernel-1"]
        for attempt, error in (
            (runner.delete_context(sandbox, "two"), NotFound),
            (runner.run(sandbox, "1", context="../x"), InvalidRequest),
            (runner.run(sandbox, "1", language="cobol"), InvalidRequest),
            (runner.run(sandbox, "1", timeout=-1), InvalidRequest),
            (runner.run(sandbox, "1", limits=OutputLimits(stream_bytes=-1)), InvalidRequest),
            (runner.run(sandbox, "#" * 5_000_000), TooLarge),
        ):
            with pytest.raises(error):
                await attempt

    go(test())


def test_a_jupyter_client_attaches_to_a_context(here: Here) -> None:
    async def test() -> None:
        await here.run("mine = 5")
        info = await here.runner.connection_info(here.sandbox)
        client = AsyncKernelClient()
        client.load_connection_info({**info, "key": info["key"].encode()})
        client.hb_channel.time_to_dead = 60.0  # a machine that stands still for a moment is no dead kernel
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=60)
            reply = await client.execute_interactive("yours = mine + 1", timeout=60)
            assert reply["content"]["status"] == "ok"
        finally:
            client.stop_channels()
        assert await here.text("print(yours)") == "6\n"

    go(test())


# Ends


def test_the_end_of_the_kernel_is_told_at_once_and_the_next_run_has_a_new_one(here: Here) -> None:
    async def test() -> None:
        die = f"def die():\n    {wait_for('die').splitlines()[1]}\n    os.kill(os.getpid(), 9)"
        task = await here.started(f"import os, threading, time\n{die}\nthreading.Thread(target=die).start()\n{LOOP}")
        waiting = asyncio.create_task(here.run("1"))
        await asyncio.sleep(0.2)
        await let(here.sandbox, "die")
        result = await task
        assert (result.status, result.stdout, result.epoch) == ("kernel_died", "started\n", 1)
        assert result.end is not None
        assert (result.end.cause, result.end.exit_code) == (Cause.KILLED, 137)
        assert (await waiting).status == "kernel_died"
        (info,) = await here.runner.contexts(here.sandbox)
        assert info.state == "dead"
        result = await here.run("'x' in globals()")
        assert (result.status, result.epoch) == ("ok", 2)
        assert result.result is not None
        assert result.result.data["text/plain"] == "False"

    go(test())


def test_a_refused_host_is_told_in_the_output_of_the_code(here: Here) -> None:
    async def test() -> None:
        code = "import urllib.request\ntry: urllib.request.urlopen('https://refused.example/')\nexcept OSError: pass"
        result = await here.run(code)
        assert "refused.example" in result.stderr
        assert "Policy.allowed_hosts" in result.stderr

    go(test())


def test_the_end_of_the_sandbox_is_told_with_its_cause(
    runner: Runner, create: Callable[[], Sandbox], base: Path
) -> None:
    async def test() -> None:
        other = Here(runner, create())
        task = await other.started()
        os.kill(other.sandbox._handle.pid, 9)  # type: ignore[union-attr]
        result = await task
        assert result.status == "kernel_died"
        assert result.end is not None
        assert result.end.cause is not Cause.STOPPED
        with pytest.raises(SandboxEnded):
            await other.run("1")

    go(test())


# With a notebook


@asynccontextmanager
async def notebook(config: Config) -> AsyncIterator[tuple[AsyncKernelManager, Callable[[str], Awaitable[Any]]]]:
    """An open notebook: its kernel manager, and a function that runs a cell and returns the reply."""
    manager = AsyncKernelManager(config=config)
    manager._kernel_spec = KernelSpec(**OWN_SPEC)
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=100)

        async def cell(code: str) -> Any:
            return (await client.execute_interactive(code, timeout=100, output_hook=lambda m: None))["content"]

        yield manager, cell
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


async def busy(runner: Runner, slot: SandboxedKernel) -> None:
    """Wait until the notebook's kernel has something to do."""
    while (await runner.contexts(slot))[0].state != "busy":
        await asyncio.sleep(0.02)


def test_a_person_and_an_agent_share_a_notebooks_kernel(runner: Runner, config: Config) -> None:
    async def test() -> None:
        async with notebook(config) as (manager, cell):
            slot = runner.notebook(manager.kernel_id)
            assert (await cell("shared = 'from the notebook'"))["status"] == "ok"
            result = await runner.run(slot, "print(shared); back = 'from the agent'")
            assert (result.status, result.stdout) == ("ok", "from the notebook\n")
            assert (await cell("assert back == 'from the agent'"))["status"] == "ok"
            # By its sandbox, too, and beside a context of its own.
            assert slot.sandbox is not None
            assert (await runner.run(slot.sandbox, "print(back)")).stdout == "from the agent\n"
            assert (await runner.run(slot, "'back' in globals()", context="own")).result.data["text/plain"] == "False"
            assert [(i.name, i.is_notebook) for i in await runner.contexts(slot)] == [("default", True), ("own", False)]
            with pytest.raises(Conflict):
                await runner.restart_context(slot)

            # A run that waits for the person's cell does not interrupt it.
            theirs = asyncio.create_task(cell(f"{wait_for('theirs')}\nslept = 1"))
            await busy(runner, slot)
            result = await runner.run(slot, "never = 1", timeout=0.5)
            assert (result.status, result.has_started) == ("timed_out", False)
            await let(slot.sandbox, "theirs")
            assert (await theirs)["status"] == "ok"
            # The agent's failure takes no cell along that waits behind it.
            mine = asyncio.create_task(runner.run(slot, f"{wait_for('mine')}\n1/0"))
            await busy(runner, slot)
            behind = asyncio.create_task(cell("assert slept and 'never' not in globals()"))
            await asyncio.sleep(0.2)
            await let(slot.sandbox, "mine")
            assert (await behind)["status"] == "ok"
            assert (await mine).status == "error"

            # A restart from the notebook ends the agent's run, and the next is in the new kernel.
            mine = asyncio.create_task(runner.run(slot, "time.sleep(600)"))
            await busy(runner, slot)
            await manager.restart_kernel(now=True)
            result = await asyncio.wait_for(mine, 100)
            # Jupyter interrupts it first, and it may have the time to say so.
            assert result.status in ("kernel_died", "interrupted")
            assert result.epoch == 1
            result = await runner.run(slot, "'shared' in globals()")
            assert (result.status, result.epoch) == ("ok", 2)
            assert result.result is not None
            assert result.result.data["text/plain"] == "False"
        with pytest.raises(NotFound):
            runner.notebook(manager.kernel_id)

    go(test())
