"""The client in this process against a scripted kernel: what only a contrary kernel does."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest

from jupyter_agentbox.errors import RuntimeFailed
from jupyter_agentbox.kernels.front.front import Front
from jupyter_agentbox.kernels.kernelclient import Feed, KernelClient
from jupyter_agentbox.models.outputs import ClearEvent, Display, DisplayEvent, OutputLimits, StreamEvent
from jupyter_agentbox.sandbox.drivers.messages import Signer
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.spec import Cause, End


class ScriptedKernel:
    """Answers each execute request by what ``script`` says: a list of (channel, kind, content)."""

    def __init__(self, script: Callable[[str], list[tuple[str, str, dict[str, Any]]]]) -> None:
        self.end: End | None = None
        self.lost = 0
        self.on_message: Any = None
        self.codes: list[str] = []
        self.is_mute = False
        self._script = script
        self._signer = Signer(b"key")
        self._callbacks: list[Callable[[], None]] = []

    def add_end_callback(self, callback: Callable[..., None]) -> None:
        self._callbacks.append(callback)

    def die(self) -> None:
        self.end = End(Cause.CRASHED, 139, "it crashed")
        for callback in self._callbacks:
            callback()

    async def send(self, channel: str, frames: list[bytes]) -> None:
        header = json.loads(frames[3])
        if self.is_mute:
            return
        if header["msg_type"] == "kernel_info_request":
            await self.say(frames, "iopub", "status", {"execution_state": "idle"})
            return
        code = json.loads(frames[6])["code"]
        self.codes.append(code)
        for answer in self._script(code):
            await self.say(frames, *answer)

    async def say(self, request: list[bytes], channel: str, kind: str, content: dict[str, Any]) -> None:
        topic = b"topic" if channel == "iopub" else request[0]
        await self.on_message(channel, self._signer.message(topic, kind, content, request[3]))


BUSY = ("iopub", "status", {"execution_state": "busy"})
IDLE = ("iopub", "status", {"execution_state": "idle"})
OK = ("shell", "execute_reply", {"status": "ok", "execution_count": 1})


def go(work: Callable[[Front, KernelClient, list[int]], Awaitable[None]]) -> None:
    async def inner() -> None:
        front = await Front.open(key=b"key")
        signals: list[int] = []

        async def send_signal(number: int) -> None:
            signals.append(number)

        try:
            await asyncio.wait_for(work(front, KernelClient.of(front, send_signal, "default"), signals), 60)
        finally:
            front.close()

    LinkThread.instance().submit(inner()).result(90)


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Any:
    with tempfile.TemporaryDirectory(prefix="f") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield


async def run(client: KernelClient, code: str = "1", timeout: float | None = 30.0) -> Any:
    return await client.run(code, timeout=timeout, limits=OutputLimits())


def test_code_that_was_aborted_with_somebodys_failure_is_sent_again() -> None:
    async def work(front: Front, client: KernelClient, signals: list[int]) -> None:
        answers = [[BUSY, ("shell", "execute_reply", {"status": "aborted"}), IDLE], [BUSY, OK, IDLE]]
        kernel = ScriptedKernel(lambda code: answers.pop(0))
        front.attach(kernel)
        assert (await run(client)).status == "ok"
        assert kernel.codes == ["1", "1"]
        assert KernelClient.of(front, client._send_signal, "default") is client

    go(work)


def test_a_kernel_that_says_nothing_is_an_error_and_one_that_never_ends_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("START_TIMEOUT", 0.3), ("ASK_INTERVAL", 0.1), ("INTERRUPT_GRACE", 0.1)):
        monkeypatch.setattr(f"jupyter_agentbox.kernels.kernelclient.{name}", value)

    async def work(front: Front, client: KernelClient, signals: list[int]) -> None:
        kernel = ScriptedKernel(lambda code: [BUSY])
        kernel.is_mute = True
        front.attach(kernel)
        with pytest.raises(RuntimeFailed):
            await run(client)
        monkeypatch.setattr("jupyter_agentbox.kernels.kernelclient.START_TIMEOUT", 30.0)
        kernel.is_mute = False
        result = await run(client, timeout=1.0)
        assert (result.status, result.is_busy, signals) == ("timed_out", True, [2])

    go(work)


def test_a_reply_without_idle_and_outputs_of_a_strange_form_still_make_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jupyter_agentbox.kernels.kernelclient.IDLE_GRACE", 0.1)

    async def work(front: Front, client: KernelClient, signals: list[int]) -> None:
        strange = ("iopub", "stream", {"name": ["stdout"], "text": 1})
        front.attach(ScriptedKernel(lambda code: [BUSY, strange, ("iopub", "stream", {"text": "x"}), OK]))
        result = await run(client)
        assert (result.status, result.stdout) == ("ok", "x")

    go(work)


def test_a_request_that_the_kernel_never_answers_holds_nobody_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_agentbox.kernels.kernelclient.QUIET_TIME", 0.3)

    async def work(front: Front, client: KernelClient, signals: list[int]) -> None:
        kernel = ScriptedKernel(lambda code: [BUSY, OK, IDLE])
        front.attach(kernel)
        assert (await run(client)).status == "ok"
        # As from a client with a wrong key: the kernel drops it.
        kernel.is_mute = True
        front.submit(client, "shell", Signer(b"other").message(b"", "execute_request", {"code": "forged"})[1:])
        await asyncio.sleep(0.05)
        kernel.is_mute = False
        assert front.cell.is_busy
        assert (await run(client)).status == "ok"

    go(work)


def test_code_that_waits_is_told_of_the_end_or_runs_in_the_next_kernel() -> None:
    async def work(front: Front, client: KernelClient, signals: list[int]) -> None:
        first = ScriptedKernel(lambda code: [BUSY])
        front.attach(first)
        running, waiting = (asyncio.create_task(run(client, code)) for code in ("a", "b"))
        while first.codes != ["a"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        first.die()
        assert [(await task).status for task in (running, waiting)] == ["kernel_died", "kernel_died"]
        assert ((await running).has_started, (await waiting).has_started) == (True, False)
        # One that is on its way is waited for.
        front.restarting()
        later = asyncio.create_task(run(client, "c"))
        await asyncio.sleep(0.1)
        second = ScriptedKernel(lambda code: [BUSY, OK, IDLE])
        front.attach(second)
        assert ((await later).status, (await later).epoch) == ("ok", 2)
        assert (first.codes, second.codes) == (["a"], ["c"])

    go(work)


def test_a_run_that_was_given_up_in_the_kernels_queue_is_interrupted_when_it_begins() -> None:
    async def work(front: Front, client: KernelClient, signals: list[int]) -> None:
        kernel = ScriptedKernel(lambda code: [])
        front.attach(kernel)
        requests: list[list[bytes]] = []
        send = kernel.send

        async def record(channel: str, frames: list[bytes]) -> None:
            requests.append(frames)
            await send(channel, frames)

        kernel.send = record  # type: ignore[method-assign]
        result = await run(client, timeout=1.0)
        assert (result.status, result.has_started, signals) == ("timed_out", False, [])
        await kernel.say(requests[-1], *BUSY)
        while not signals:
            await asyncio.sleep(0.01)
        assert signals == [2]
        await kernel.say(requests[-1], *IDLE)
        assert client._sent == {}

    go(work)


def test_events_that_wait_are_joined_and_outdated_ones_dropped() -> None:
    async def work() -> None:
        feed = Feed(10_000)
        for text in "abc":
            feed.put(StreamEvent("stdout", text))
        for value in ("1", "2"):
            feed.put(DisplayEvent(Display({"text/plain": value}, {}, "id"), is_update=True))
        assert await feed.read() == [
            StreamEvent("stdout", "abc"),
            DisplayEvent(Display({"text/plain": "2"}, {}, "id"), is_update=True),
        ]
        feed.put(StreamEvent("stderr", "gone"))
        feed.put(ClearEvent())
        feed.close()
        assert await feed.read() == [ClearEvent()]
        assert await feed.read() == []

    asyncio.run(work())


def test_events_that_no_one_reads_take_bounded_memory_and_keep_the_end() -> None:
    async def work() -> None:
        feed = Feed(10_000)
        names: tuple[Literal["stdout", "stderr"], ...] = ("stdout", "stderr")
        for i in range(100_000):
            feed.put(StreamEvent(names[i % 2], f"{i}\n"))
            feed.put(DisplayEvent(Display({"text/plain": str(i)}, {}, "id"), is_update=True))
        feed.put(StreamEvent("stdout", "RESULT 42\n"))
        events = await feed.read()
        assert len(events) < 200
        texts = [event.text for event in events if isinstance(event, StreamEvent)]
        assert sum(map(len, texts)) < 40_000
        assert texts[:2] == ["0\n", "1\n"]  # in order while the queue is short
        assert any(text.endswith("RESULT 42\n") and "bytes of output left out]" in text for text in texts[-2:])
        feed.put(StreamEvent("stderr", "next"))
        assert await feed.read() == [StreamEvent("stderr", "next")]

    asyncio.run(work())
