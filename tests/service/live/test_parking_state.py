"""What is parked and woken with its ports and widgets, and what is in the midst of something and is not parked."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.harness import Env, KernelClient, Server, wait_until
from support.parking import EXTENSION, call, park, park_box


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    env = make_env(config={"Policy": {"lease_timeout": 60.0}})
    with env.server("server", EXTENSION) as running:
        yield running


@pytest.fixture(scope="module")
def kernel(server: Server) -> Iterator[KernelClient]:
    made = server.kernel()
    yield made
    made.shutdown()


def receive(kernel: KernelClient, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first message of that kind."""
    deadline = time.monotonic() + 100
    while not wanted(message := kernel.receive(deadline)):
        pass
    return message


def refuse_to_park(kernel: KernelClient) -> str:
    """Try to park it, which must fail for a reason that is returned."""
    url = kernel.server.url(f"api/agentbox/sandboxes/{kernel.id}/park")
    answer = kernel.server.http.post(url, timeout=100)
    assert (answer.status_code, answer.json()["reason"]) == (409, "conflict"), answer.text
    return str(answer.json()["message"])


def answer(kernel: KernelClient, request: str) -> dict[str, Any]:
    """Return the answer to what was asked on the control channel."""
    found = receive(kernel, lambda m: m["channel"] == "control" and m["parent_header"].get("msg_id") == request)
    content: dict[str, Any] = found["content"]
    return content


def control(kernel: KernelClient, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    """Ask on the control channel; return the answer."""
    return answer(kernel, kernel.send("control", kind, content))


def test_a_widget_is_connected_as_before(kernel: KernelClient) -> None:
    made = kernel.execute(
        "import ipywidgets\nseen = []\nslider = ipywidgets.IntSlider(value=3)\n"
        "slider.observe(lambda change: seen.append(change['new']), 'value')\nprint(slider.comm.comm_id)"
    )
    comm = made.text.strip()
    assert comm in [output["content"].get("comm_id") for output in made.outputs]
    park(kernel)
    # What a person does to it wakes the kernel.
    kernel.send(
        "shell", "comm_msg", {"comm_id": comm, "data": {"method": "update", "state": {"value": 7}, "buffer_paths": []}}
    )
    assert kernel.check("print(seen, slider.value)") == "[7] 7\n"
    park(kernel)
    updates = [item["content"] for item in kernel.execute("slider.value = 9").outputs if item["msg_type"] == "comm_msg"]
    assert [(item["comm_id"], item["data"]["state"]) for item in updates] == [(comm, {"value": 9})]


def test_a_server_inside_is_reached_by_its_port_when_it_was_woken(server: Server) -> None:
    made = call(server, "POST", "sandboxes", {"ports": [8000], "files": {"index.html": "from inside"}})
    path = f"sandboxes/{made['id']}"
    try:
        command = "exec python3 -m http.server 8000 --bind 127.0.0.1"
        call(server, "POST", f"{path}/processes", {"command": command})

        def get() -> str:
            answer = server.http.get(server.url(f"api/agentbox/{path}/ports/8000/"), timeout=100)
            return answer.text if answer.ok else ""

        wait_until(lambda: get() == "from inside", 60, "the server inside answers")
        for _ in range(2):
            park_box(server, made["id"])
            assert get() == "from inside", "a call by the port wakes it"
            assert call(server, "GET", path)["state"] == "running"
        (process,) = call(server, "GET", f"{path}/processes")["processes"]
        assert process["state"] == "running"
    finally:
        call(server, "DELETE", path)


def test_a_kernel_that_waits_for_input_is_not_parked(kernel: KernelClient) -> None:
    cell = kernel.start("print(input() * 2)", allow_stdin=True)
    asked = receive(kernel, lambda m: m["msg_type"] == "input_request")
    assert "code is running" in refuse_to_park(kernel)
    kernel.send("stdin", "input_reply", {"value": "ab"}, asked["header"])
    assert kernel.finish(cell).text == "abab\n"


def test_a_kernel_whose_subshell_works_is_not_parked(kernel: KernelClient) -> None:
    subshell = control(kernel, "create_subshell_request", {})["subshell_id"]
    header = {
        "msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": kernel.session, "username": "test",
        "version": "5.3", "date": "2020-01-01T00:00:00Z", "subshell_id": subshell,
    }  # fmt: skip
    content = {
        "code": "import time\nprint('works', flush=True)\nwhile 'is_over' not in globals(): time.sleep(0.05)",
        "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False,
    }  # fmt: skip
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    kernel.socket.send(json.dumps({**message, "buffers": []}))
    receive(kernel, lambda m: m["msg_type"] == "stream")
    assert kernel.check("print('the main shell is idle')")
    assert "code is running" in refuse_to_park(kernel)
    wanted = {header["msg_id"], kernel.start("is_over = True")}
    while wanted:
        found = receive(kernel, lambda m: m["msg_type"] == "execute_reply")
        wanted.discard(found["parent_header"]["msg_id"])
    park(kernel)
    assert control(kernel, "list_subshell_request", {})["subshell_id"] == [subshell]
    assert control(kernel, "delete_subshell_request", {"subshell_id": subshell})["status"] == "ok"


def test_a_kernel_that_stands_at_a_breakpoint_is_not_parked(kernel: KernelClient) -> None:
    sequence = iter(range(1, 100))

    def ask(command: str, **arguments: Any) -> str:
        content = {"type": "request", "seq": next(sequence), "command": command, "arguments": arguments}
        return kernel.send("control", "debug_request", content)

    def debug(command: str, **arguments: Any) -> dict[str, Any]:
        return answer(kernel, ask(command, **arguments))

    debug("initialize", clientID="test", adapterID="")
    assert debug("attach")["success"]
    code = "def f():\n    x = 41\n    return x + 1\nprint(f())"
    source = debug("dumpCell", code=code)["body"]["sourcePath"]
    debug("setBreakpoints", source={"path": source}, breakpoints=[{"line": 3}])
    debug("configurationDone")
    cell = kernel.start(code)
    stopped = receive(kernel, lambda m: m["msg_type"] == "debug_event" and m["content"].get("event") == "stopped")
    assert "code is running" in refuse_to_park(kernel)
    ask("continue", threadId=stopped["content"]["body"]["threadId"])  # whose answer comes among the cell's messages
    assert kernel.finish(cell).text == "42\n"
    debug("disconnect", terminateDebuggee=False)
    park(kernel)
    assert kernel.check("print('goes on')") == "goes on\n"
