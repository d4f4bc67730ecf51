"""The streams of an embedded kernel, without a kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from jupyter_client.session import Session
from support.waiting import scaled, wait_until

from jupyter_agentbox.guest.ipykernel.embedded_protocol import Sender, Unpacker
from jupyter_agentbox.guest.ipykernel.embedded_streams import Output, Publisher, Stream


class SlowSession(Session):
    """Session that stands still in the middle of the first message."""

    def __init__(self) -> None:
        super().__init__(key=b"key")
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def msg(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not self.has_begun.is_set():
            self.has_begun.set()
            assert self.may_go_on.wait(scaled(60))
        return super().msg(*args, **kwargs)


@pytest.fixture
def session() -> SlowSession:
    return SlowSession()


@pytest.fixture
def sender() -> Sender:
    return Sender(1 << 20)


@pytest.fixture
def output(session: SlowSession, sender: Sender) -> Iterator[Output]:
    """Standard output whose messages are kept, as no owner is connected."""
    stream = Stream("iopub", sender, cast(Any, None))
    made = Output(session, Publisher(stream, session), "stdout", watchfd=False)
    made.set_parent({})
    made._last = float("inf")  # lines wait for a flush
    yield made
    Output._all.remove(made)


def list_texts(sender: Sender, session: Session) -> list[str]:
    data = b"".join(data for _, data in sender._find_unread())
    return [session.unpack(message[-1])["text"] for message in Unpacker(1 << 20, bytes).feed(data)]


def test_output_keeps_its_order_whichever_thread_flushes_it(
    session: SlowSession, sender: Sender, output: Output
) -> None:
    output.write("first")
    threads = [threading.Thread(target=output.flush) for _ in range(2)]
    threads[0].start()
    assert session.has_begun.wait(scaled(60))
    output.write("second")
    threads[1].start()
    threads[1].join(0.3)  # time enough to overtake
    session.may_go_on.set()
    for thread in threads:
        thread.join(scaled(60))
    assert list_texts(sender, session) == ["first", "second"]


def test_what_a_finalizer_prints_amid_a_flush_is_sent_later(
    session: SlowSession, sender: Sender, output: Output
) -> None:
    session.may_go_on.set()
    output.register_hook(lambda message: (output.write("late"), output.flush(), output._hooks.clear(), message)[-1])
    output.write("first")
    output.flush()
    assert list_texts(sender, session)[0] == "first"
    wait_until(lambda: list_texts(sender, session) == ["first", "late"], 10, "the thread that flushes sends it")
