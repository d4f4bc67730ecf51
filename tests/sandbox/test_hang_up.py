"""Checkpoints in the midst of what is sent: each message comes once, and a kernel that fails holds up no other.

``AGENTBOX_HANG_UPS`` says how many large messages are sent; four unless set.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.embedded_client import Client, spec, start

from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.guest.kernels import MAX_MESSAGE
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.drivers.embedded import Writer
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sandbox import Sandbox

ROUNDS = int(os.environ.get("AGENTBOX_HANG_UPS", "4"))
SIZE = 20_000_000


@pytest.fixture(scope="module")
def manager(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> SandboxManager:
    state = tmp_path_factory.mktemp("hang") / "state"
    return SandboxManager(state, RunscRuntime(state_dir=str(state)))


@pytest.fixture(scope="module")
def sandbox(manager: SandboxManager) -> Iterator[Sandbox]:
    thread = LinkThread.instance()
    made = thread.submit(manager.create(spec())).result(100)
    yield made
    thread.submit(manager.stop(made)).result(100)
    assert not list((manager.state_dir / "sandboxes").iterdir())


def make_client(sandbox: Sandbox) -> Client:
    client = Client(LinkThread.instance().submit(start(sandbox)).result(100))
    client.reply(client.send("shell", "kernel_info_request", {}), timeout=60)
    return client


@pytest.fixture(scope="module")
def client(sandbox: Sandbox) -> Client:
    return make_client(sandbox)


async def save(sandbox: Sandbox, staged: Path) -> None:
    """Take a checkpoint that nobody wants."""
    for name in ("image", "work"):
        (staged / name).mkdir(parents=True)
    try:
        await sandbox.checkpoint(staged)
    finally:
        shutil.rmtree(staged)


def send_and_save(
    client: Client, sandbox: Sandbox, frames: tuple[str, list[bytes]], staged: Path, delay: float
) -> float:
    """Send a message, and after so many seconds, while it may be under way, save the sandbox; how long it took."""

    async def both() -> float:
        began = time.monotonic()
        sending = asyncio.ensure_future(client.kernel.send(*frames))
        await asyncio.sleep(delay)
        await save(sandbox, staged)
        (sandbox.workspace / f"saved-{staged.name}").touch()
        await sending
        return time.monotonic() - began

    return float(client._do(both(), 100))


def make_message(client: Client, kind: str, content: dict[str, Any], buffers: list[bytes]) -> list[bytes]:
    return [b"test", *client.session.serialize(client.session.msg(kind, content)), *buffers]


RECEIVE = """
got = []
def opened(comm, message):
    @comm.on_msg
    def said(message):
        (body,) = message["buffers"]
        got.append((message["content"]["data"]["n"], len(body), bytes(body[-1:])))
get_ipython().kernel.comm_manager.register_target("sink", opened)
"""


def test_a_large_message_that_a_checkpoint_comes_upon_is_there_once(
    client: Client, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, cut = random.Random(1), 0
    write = Writer.write

    async def counted(self: Writer, data: bytes) -> bool:
        nonlocal cut
        is_written = await write(self, data)
        cut += not is_written
        return is_written

    monkeypatch.setattr(Writer, "write", counted)
    client.run(RECEIVE)
    client.send("shell", "comm_open", {"comm_id": "c", "target_name": "sink", "data": {}})
    cut_while_busy = 0
    for number in range(ROUNDS):
        body = bytes(SIZE - 1) + bytes([number])
        content = {"comm_id": "c", "data": {"n": number}}
        before, is_busy = cut, number % 2
        # One that works reads nothing, so that it has a part of the message for sure.
        wait = f"while not os.path.exists('/workspace/saved-{number}'): time.sleep(0.05)"
        code = f"import os, time; print('works', flush=True)\n{wait}"
        cell = client.until(code, "works", 60) if is_busy else ""
        frames = make_message(client, "comm_msg", content, [body])
        send_and_save(
            client, sandbox, ("shell", frames), tmp_path / str(number), 0.1 if is_busy else rng.uniform(0, 0.1)
        )
        cut_while_busy += is_busy and cut > before
        if cell:
            assert client.reply(cell, timeout=60)["content"]["status"] == "ok"
        client.send("shell", "comm_msg", {"comm_id": "c", "data": {"n": -1}}, buffers=[b"after"])
    wanted = [item for n in range(ROUNDS) for item in ((n, SIZE, bytes([n])), (-1, 5, b"r"))]
    assert client.run("print(got)", timeout=60) == f"{wanted}\n"
    assert cut_while_busy > 0, "no checkpoint came upon a half written message"
    client.run("got.clear()")


def test_a_copy_has_a_message_that_the_checkpoint_came_upon_whole_or_not_at_all(
    client: Client, sandbox: Sandbox, manager: SandboxManager, tmp_path: Path
) -> None:
    size = 64_000_000
    client.run(RECEIVE)
    client.send("shell", "comm_open", {"comm_id": "d", "target_name": "sink", "data": {}})
    # While a cell runs the kernel reads nothing, so that it has a part for sure.
    code = "import os, time; print('works', flush=True)\nwhile not os.path.exists('/workspace/go'): time.sleep(0.05)"
    cell = client.until(code, "works", 60)
    frames = make_message(client, "comm_msg", {"comm_id": "d", "data": {"n": 1}}, [bytes(size)])
    staged = tmp_path / "staged"
    for name in ("image", "work"):
        (staged / name).mkdir(parents=True)

    async def copy_meanwhile() -> Sandbox:
        sending = asyncio.ensure_future(client.kernel.send("shell", frames))
        await asyncio.sleep(0.1)
        assert not sending.done()
        record = Record.from_bytes(await sandbox.checkpoint(staged))
        (sandbox.workspace / "go").touch()
        await sending
        copy = await manager.restore(record.spec, record, staged)
        (copy.workspace / "go").touch()
        return copy

    copy = client._do(copy_meanwhile())
    try:
        other = Client(copy.kernels[client.kernel.name])
        wanted = f"[(1, {size}, {bytes(1)!r})]\n"
        for who, has in ((client, wanted), (other, "[]\n")):
            if who is client:
                assert client.reply(cell, timeout=60)["content"]["status"] == "ok"
            assert who.run("print(got); got.clear()", timeout=60) == has
            who.send("shell", "comm_msg", {"comm_id": "d", "data": {"n": 2}}, buffers=[b"after"])
            assert who.run("print(got)", timeout=60) == "[(2, 5, b'r')]\n", "what comes next is read as what it is"
    finally:
        client._do(manager.stop(copy))


def test_a_large_input_that_a_checkpoint_comes_upon_is_there_once(
    client: Client, sandbox: Sandbox, tmp_path: Path
) -> None:
    rng = random.Random(2)
    for number in range(2):
        cell = client.start("line = input(); print(len(line), line[-1])")
        asked = client.reply(cell, "stdin", timeout=60)
        message = client.session.msg("input_reply", {"value": "x" * SIZE + str(number)}, parent=asked)
        frames = [b"test", *client.session.serialize(message)]
        send_and_save(client, sandbox, ("stdin", frames), tmp_path / str(number), rng.uniform(0, 0.1))
        assert client.text(cell, timeout=60) == f"{SIZE + 1} {number}\n"


def test_a_large_message_by_the_relay_is_there_once(manager: SandboxManager, tmp_path: Path) -> None:
    thread, rng = LinkThread.instance(), random.Random(3)
    made = thread.submit(manager.create(replace(spec(), driver="relay"))).result(100)
    try:
        client = make_client(made)
        assert client.kernel.driver == "relay"
        client.run(RECEIVE)
        client.send("shell", "comm_open", {"comm_id": "c", "target_name": "sink", "data": {}})
        for number in range(2):
            content = {"comm_id": "c", "data": {"n": number}}
            frames = make_message(client, "comm_msg", content, [bytes(SIZE - 1) + bytes([number])])
            send_and_save(client, made, ("shell", frames), tmp_path / str(number), rng.uniform(0, 0.1))
            client.send("shell", "comm_msg", {"comm_id": "c", "data": {"n": -1}}, buffers=[b"after"])
        wanted = [item for n in range(2) for item in ((n, SIZE, bytes([n])), (-1, 5, b"r"))]
        assert client.run("print(got)") == f"{wanted}\n"
        # More than what a kernel may say at a time, and no more than a client may.
        large = make_message(client, "comm_msg", {"comm_id": "c", "data": {"n": 9}}, [bytes(MAX_MESSAGE)])
        client._do(client.kernel.send("shell", large))
        assert client.run("print(got[4:])") == f"{[(9, MAX_MESSAGE, bytes(1))]}\n"
    finally:
        thread.submit(manager.stop(made)).result(100)


def test_a_kernel_that_does_not_hang_up_leaves_the_others_and_the_sandbox_running(
    client: Client, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_client(sandbox)
    cell = other.until("import time\nfor i in range(4): print(i, flush=True); time.sleep(0.2)", "0", 60)

    async def fail() -> None:
        raise LinkClosed("the kernel did not hang up: a fault of the test")

    with monkeypatch.context() as patch:
        patch.setattr(client.kernel, "hang_up", fail)
        with pytest.raises(LinkClosed, match="a fault of the test"):
            client._do(save(sandbox, tmp_path / "failed"))
    assert sandbox.end is None
    assert other.text(cell, timeout=60) == "0\n1\n2\n3\n"
    assert [each.run("6 * 7", timeout=60) for each in (client, other)] == ["42", "42"]
    client._do(save(sandbox, tmp_path / "again"))
    assert [each.run("6 * 7", timeout=60) for each in (client, other)] == ["42", "42"]
