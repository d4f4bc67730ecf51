"""Sandboxes are frozen when nothing runs in them, and only then; on real gVisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.boxes import Box, boxed, run
from support.embedded_client import Client, spec, start
from support.waiting import wait_until, wait_until_async

from jupyter_agentbox.runtimes.runsc.runtime import PAUSED, RunscRuntime
from jupyter_agentbox.sandbox.drivers import messages
from jupyter_agentbox.sandbox.drivers.messages import RunningCell
from jupyter_agentbox.sandbox.freezer import Freezer
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command, Output
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import SandboxSpec

pytestmark = pytest.mark.usefixtures("has_runsc")


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    await wait_until_async(condition, timeout, "the condition")


def read_stat(sandbox: Sandbox) -> tuple[str, int]:
    """State of gVisor's own process, and its ticks of processor time."""
    assert sandbox._handle is not None
    fields = Path(f"/proc/{sandbox._handle.pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def test_a_quiet_sandbox_costs_nothing_and_answers_at_once(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, freeze_after=0.5) as box:
            for _ in range(2):
                await until(lambda: box.sandbox.is_frozen)
                await until(lambda: read_stat(box.sandbox)[0] == "T")  # a moment later than the signal
                _, before = read_stat(box.sandbox)
                await asyncio.sleep(1)
                assert read_stat(box.sandbox)[1] - before <= 1
                async with await box.processes.stream(Command("echo awake; sleep 1000")) as events:
                    assert await events.__anext__() == Output("stdout", 0, b"awake\n")
                    assert not box.sandbox.is_frozen

    run(test, manager)


def test_it_stays_awake_while_something_is_there(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        lines = ("sleep 1000", "(setsid sleep 1000 &)")
        boxes = [Box(await manager.create(SandboxSpec(freeze_after=0.5))) for _ in lines]
        try:
            for box, line in zip(boxes, lines, strict=True):
                await box.processes.start(Command(line))
            await asyncio.sleep(5)
            assert [box.sandbox.is_frozen for box in boxes] == [False, False]
            for box in boxes:
                await box.run("pkill sleep")
            await until(lambda: all(box.sandbox.is_frozen for box in boxes))
        finally:
            for box in boxes:
                await manager.stop(box.sandbox)
        assert not list((manager.state_dir / "sandboxes").iterdir())

    run(test, manager)


#: What an idle kernel may leave behind: whether something happens by itself later, and the code.
LEFT = {
    "nothing": (False, "x = 1"),
    "idle workers": (False, "pool = concurrent.futures.ThreadPoolExecutor(2); list(pool.map(abs, [1, 2]))"),
    "a thread that waits for others": (False, "threading.Thread(target=queue.Queue().get, daemon=True).start()"),
    "a timer": (True, "timer = threading.Timer(600, print); timer.start()"),
    "a task": (True, "task = asyncio.get_running_loop().create_task(asyncio.sleep(600))"),
    "a thread that sleeps": (True, "threading.Thread(target=time.sleep, args=[600], daemon=True).start()"),
    "a scheduler": (True, "threading.Thread(target=threading.Event().wait, args=[600], daemon=True).start()"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_a_kernel_stays_awake_for_what_it_has_scheduled(manager: SandboxManager, name: str) -> None:
    is_awake, code = LEFT[name]
    thread = LinkThread.instance()
    sandbox = thread.submit(manager.create(replace(spec(), freeze_after=0.5))).result(150)
    try:
        client = Client(thread.submit(start(sandbox)).result(150))
        client.kernel.is_busy = lambda: False  # as a front says between cells
        client.run(f"import asyncio, concurrent.futures, queue, threading, time\n{code}")
        if is_awake:
            time.sleep(5)
            assert not sandbox.is_frozen
        if name == "a timer":
            client.run("timer.cancel()")
        if name == "a timer" or not is_awake:
            wait_until(lambda: sandbox.is_frozen, 60, "it is frozen")
        assert client.run("1 + 1") == "2"
    finally:
        thread.submit(manager.stop(sandbox)).result(150)


def test_a_frozen_one_is_taken_over_and_ended(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, freeze_after=0.5) as box:
            await until(lambda: box.sandbox.is_frozen)
            # What the loss of an owner leaves: the lock is free, and nobody has thawed it.
            assert box.sandbox._freezer is not None
            box.sandbox._freezer.is_frozen = False
            await manager.leave(box.sandbox)
            successor = SandboxManager(manager.state_dir, RunscRuntime(state_dir=str(manager.state_dir)))
            sandbox = await successor.adopt(box.sandbox.id)
            assert (await sandbox.run(["/bin/echo", "here"], {})).stdout == b"here\n"
            await until(lambda: sandbox.is_frozen)
            await successor.stop(sandbox)

    run(test, manager)


def status(state: str, parent: str = "1") -> list[bytes]:
    return [
        b"x", b"<IDS|MSG>", b"", b'{"msg_type": "status"}', b'{"msg_id": "%s"}' % parent.encode(), b"{}",
        b'{"execution_state": "%s"}' % state.encode(),
    ]  # fmt: skip


def request(name: str, kind: str = "kernel_info_request") -> list[bytes]:
    header = f'{{"msg_type": "{kind}", "msg_id": "{name}"}}'.encode()
    return [b"<IDS|MSG>", b"", header, b"{}", b"{}", b"{}"]


def reply(name: str, kind: str) -> list[bytes]:
    return [b"id", *request("", f"{kind}_reply")[:3], request(name)[2], b"{}", b"{}"]


def test_a_kernel_works_until_every_request_is_answered() -> None:
    cell = RunningCell()
    assert cell.is_working, "nobody knows yet"
    cell.track_request(request("1"))
    cell.track_request(request("2"))
    states = []
    for name in ("0", "1", "2", "3"):
        for state in ("busy", "idle"):
            cell.track_output(status(state, name))
            states.append(cell.is_working)
    assert states == [True, True, True, True, True, False, True, False]
    cell.clear()
    assert cell.is_working


def test_a_kernel_does_not_work_for_ever_if_the_news_of_an_end_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(cell: RunningCell, name: str) -> None:
        cell.track_output(status("busy", name))
        cell.track_output(status("idle", name))

    cell = RunningCell()
    cell.track_request(request("1", "execute_request"))
    cell.track_output(status("busy"))
    cell.track_output(reply("1", "execute"))  # which is none
    cell.track_reply(reply("1", "execute"))
    assert cell.is_working
    assert cell.is_busy
    monkeypatch.setattr(messages, "LOST_TIME", 0.0)
    cell.track_reply(reply("1", "execute"))
    cell.track_output(status("busy"))  # by a slow client's leave
    assert not cell.is_busy
    assert not cell.is_working
    assert cell.header is None
    # What gets no reply is over when what came after it is; and what the kernel never spoke of.
    for name, kind in (
        ("2", "comm_msg"),
        ("3", "execute_request"),
        ("4", "history_request"),
        ("5", "is_complete_request"),
    ):
        cell.track_request(request(name, kind))
    cell.track_output(status("busy", "2"))
    finish(cell, "3")
    assert cell.is_working
    finish(cell, "5")
    assert not cell.is_working
    # But not what it is at, in another line or in this one.
    cell.track_request(request("6", "execute_request"))
    cell.track_output(status("busy", "6"))
    cell.track_request(request("7"), channel="control")
    cell.track_request(request("8"))
    for name in ("7", "8"):
        finish(cell, name)
        assert cell.is_working
    finish(cell, "6")
    # A kernel that answers nothing on control is asked there as well.
    cell.track_request(request("9", "interrupt_request"), channel="control")
    assert not cell.is_working


@pytest.mark.parametrize(
    "answer",
    [b"", b"{", b"[]", b"[" * 60_000, b'{"others": Infinity, "ticks": 0, "waits": 0}',
     b'{"others": 0, "ticks": "0", "waits": 0}', b'{"others": 0, "ticks": NaN, "waits": 0}',
     b'{"others": 0, "ticks": -1, "waits": 0}', b'{"others": 0, "waits": 0}', b'{"others": 0, "ticks": 0}'],
)  # fmt: skip
def test_a_hostile_answer_freezes_nothing_and_breaks_nothing(manager: SandboxManager, answer: bytes) -> None:
    class Guest:
        """Answers as code inside may have the guest answer."""

        def open(self, header: dict[str, str]) -> Guest:
            return self

        async def read(self) -> bytes:
            return answer

        def reset(self) -> None:
            pass

    freezer = Freezer(manager.runtime, None, Guest(), lambda: False, 1.0)  # type: ignore[arg-type]
    assert not asyncio.run(freezer._is_still())


def test_one_whose_owner_was_lost_while_it_was_saved_goes_on(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, freeze_after=0.0) as box:
            assert isinstance(manager.runtime, RunscRuntime)
            (box.sandbox.directory / PAUSED).touch()
            await asyncio.to_thread(manager.runtime.run_once, box.sandbox.directory, "pause", box.sandbox.id)
            await manager.leave(box.sandbox)
            successor = SandboxManager(manager.state_dir, RunscRuntime(state_dir=str(manager.state_dir)))
            sandbox = await successor.adopt(box.sandbox.id)
            assert (await sandbox.run(["/bin/echo", "here"], {})).stdout == b"here\n"
            assert not (sandbox.directory / PAUSED).exists()
            await successor.stop(sandbox)

    run(test, manager)
