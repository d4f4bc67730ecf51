"""Who listens after a server took a kernel back: what it says waits for them, within bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq

from jupyter_agentbox.kernels.front import reconnect
from jupyter_agentbox.kernels.front.front import Front
from jupyter_agentbox.kernels.front.reconnect import Audience, BoundedBuffer
from jupyter_agentbox.sandbox.drivers.messages import Signer, parse

SIGNER = Signer(b"key")
HEADER = b'{"msg_id": "cell"}'


def output(text: str) -> tuple[str, list[Any]]:
    return "iopub", SIGNER.message(b"stream", "stream", {"name": "stdout", "text": text}, HEADER)


def state(name: str) -> tuple[str, list[Any]]:
    return "iopub", SIGNER.message(b"status", "status", {"execution_state": name}, HEADER)


class Notices:
    def stream_message(self, text: str, parent: bytes) -> list[bytes]:
        return SIGNER.message(b"stream", "stream", {"name": "stderr", "text": text}, parent)


def test_what_is_kept_for_a_page_is_bounded_and_its_cell_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnect, "MAX_KEPT", 10_000)
    kept = BoundedBuffer(Notices())  # type: ignore[arg-type]
    for number in range(100):
        kept.append(output(f"{number} " + "x" * 1000))
    kept.append(("shell", [b"page", *SIGNER.message(b"", "execute_reply", {"status": "ok"}, HEADER)[1:]]))
    kept.append(state("idle"))
    texts = [parse(frames[6]).get("text", "") for channel, frames in kept if channel == "iopub"]
    assert [text.split()[0] for text in texts[:3]] == ["0", "1", "2"]
    assert sum("kept for a disconnected page" in text for text in texts) == 1
    assert [parse(frames[4])["msg_id"] for _, frames in kept[-3:-2]] == ["cell"], "the notice belongs to the cell"
    assert [channel for channel, _ in kept[-2:]] == ["shell", "iopub"], "the reply and the end of the cell are kept"
    for _ in range(1000):
        kept.append(state("busy"))  # a kernel's own messages have no end either
    assert sum(len(frame) for _, frames in kept for frame in frames) < 25_000


def test_only_a_clients_plain_id_is_kept() -> None:
    found: list[str] = []
    listeners = Audience()
    listeners.on_client = found.append
    for identity in (b"page", b"page", b"\x00\xff", b"x" * 1000, b"other"):
        listeners.note_client(identity)
    assert found == ["page", "other"]


def test_a_kernel_that_was_taken_back_speaks_when_its_listeners_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("TIMEOUT", "ANSWER_TIMEOUT"):
        monkeypatch.setattr(reconnect, name, 60.0)

    class Kernel:
        end = None
        on_message: Any = None
        is_busy: Any = None
        lost = 3

        def add_end_callback(self, callback: Any) -> None: ...

        async def send(self, channel: str, frames: list[bytes]) -> None: ...

    async def test() -> None:
        front = await Front.open(key=b"key")
        kernel = Kernel()
        front.audience.expect()
        front.attach(kernel)
        front.ask()
        said = asyncio.ensure_future(kernel.on_message("iopub", output("early")[1]))
        gathered = asyncio.ensure_future(front.audience.gather(front, "page", 1, lambda: False))
        await asyncio.sleep(0.1)
        assert not said.done()
        context = zmq.Context()
        with context, context.socket(zmq.SUB) as subscriber, context.socket(zmq.DEALER) as page:
            with context.socket(zmq.DEALER) as answers:
                for dealer, port in ((page, 1), (answers, 3)):
                    dealer.linger = 0
                    dealer.identity = b"page"
                    dealer.connect(f"ipc://{front.directory}/k-{port}")
                subscriber.linger = 0
                subscriber.subscribe(b"stream")
                subscriber.connect(f"ipc://{front.directory}/k-2")
                await asyncio.wait_for(said, 30)
                await kernel.on_message(
                    "shell", [reconnect.FRONT_IDENTITY, *SIGNER.message(b"", "kernel_info_reply", {})[1:]]
                )
                assert await asyncio.wait_for(gathered, 30) is True
                texts = []
                for number in range(3):
                    assert await asyncio.to_thread(subscriber.poll, 30_000)
                    frames = subscriber.recv_multipart()
                    if number == 0:
                        continue  # the front's welcome
                    assert frames[4] == HEADER
                    texts.append(parse(frames[6])["text"])
        assert texts == ["agentbox: 3 messages were dropped because no client was connected\n", "early"]
        front.close()

    asyncio.run(test())
