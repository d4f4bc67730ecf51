"""Large messages that a snapshot, a park or a restore comes upon: each is there whole, or its sender is answered.

``AGENTBOX_LARGE_MESSAGES`` says how often each is tried; once unless set.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import websocket
from jupyter_server.services.kernels.connection.base import serialize_binary_message
from support.api import Api
from support.harness import KernelClient

ROUNDS = int(os.environ.get("AGENTBOX_LARGE_MESSAGES", "1"))
#: Bytes of a comm's buffer, near the largest that a websocket of Jupyter's takes, and of code.
BUFFER, CODE = 9_000_000, 1_000_000

RECEIVE = """
got = []
def opened(comm, message):
    @comm.on_msg
    def said(message):
        (body,) = message["buffers"]
        got.append([message["content"]["data"]["n"], len(body), bytes(body[-1:]).decode()])
get_ipython().kernel.comm_manager.register_target("sink", opened)
"""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def tell(kernel: KernelClient, number: int, body: bytes) -> None:
    """Send a comm's message with a buffer, as a widget does."""
    header = {"msg_id": uuid.uuid4().hex, "msg_type": "comm_msg", "session": kernel.session, "username": "test",
              "version": "5.3", "date": "2020-01-01T00:00:00Z"}  # fmt: skip
    message = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "buffers": [body],
               "content": {"comm_id": "c", "data": {"n": number}}}  # fmt: skip
    kernel.socket.send(serialize_binary_message(message), websocket.ABNF.OPCODE_BINARY)


def ask(api: Api, verb: str, path: str, body: Any) -> Any:
    """Make a call with connections of its own, as it is one of several at a time."""
    other = Api(api.server)
    try:
        answer = other(verb, path, body)
        return answer.status_code, answer.json()
    finally:
        other.http.close()


def test_they_are_whole_or_answered(api: Api, pool: ThreadPoolExecutor) -> None:
    kernel = api.server.kernel()
    path = f"/sandboxes/{kernel.id}"
    kernel.check(RECEIVE)
    kernel.send("shell", "comm_open", {"comm_id": "c", "target_name": "sink", "data": {}})
    assert json.loads(kernel.check("import json; print(json.dumps(got))")) == []
    saved = api.ok("POST", path + "/snapshots", {})["id"]
    large, small = [1, BUFFER, "x"], [2, 5, "r"]
    try:
        for number, action in enumerate(["snapshots", "park", "restore"] * ROUNDS):
            body = {"snapshot": saved} if action == "restore" else {}
            acting: Future[Any] = pool.submit(ask, api, "POST", f"{path}/{action}", body)
            running: Future[Any] = pool.submit(
                ask, api, "POST", path + "/code", {"code": f"{'#' * CODE}\nprint({number})"}
            )
            tell(kernel, 1, bytes(BUFFER - 1) + b"x")
            tell(kernel, 2, b"after")
            cell = kernel.start(f"{'#' * CODE}\nprint(json.dumps(got)); got.clear()")
            status, answer = acting.result()
            assert status in ((201,) if action == "snapshots" else (200,) if action == "restore" else (200, 409)), (
                answer
            )
            shown = kernel.finish(cell)
            status, ran = running.result()
            if action == "restore":
                assert shown.reply["status"] in ("ok", "aborted"), shown
                assert status in (200, 409, 410), ran
                assert not shown.text or json.loads(shown.text) in ([], [small], [large, small])
                left = json.loads(kernel.check("print(json.dumps(got)); got.clear()"))
                assert left in ([], [small], [large, small])
            else:
                assert (shown.reply["status"], json.loads(shown.text)) == ("ok", [large, small]), shown
                assert (
                    (status, ran["stdout"]) == (200, f"{number}\n") if action == "snapshots" else status in (200, 409)
                )
            # What comes next is read as what it is.
            tell(kernel, 2, b"after")
            assert json.loads(kernel.check("print(json.dumps(got)); got.clear()")) == [small]
            if action == "snapshots":
                api("DELETE", f"/snapshots/{answer['id']}")
    finally:
        kernel.shutdown()
        api("DELETE", f"/snapshots/{saved}")
