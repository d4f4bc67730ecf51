"""A server that ends and starts again within the lease has its kernels as they were."""

from __future__ import annotations

import signal
import time

import nbformat
import pytest
from support.harness import KERNEL, Env, KernelClient, Server, wait_until
from support.parking import EXTENSION


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["told to end", "killed"])
def test_a_server_takes_its_kernels_back_with_all_they_hold(agentbox_env: Env, signum: int) -> None:
    agentbox_env.configure({"Policy": {"lease_timeout": 300.0}})
    first = Server(agentbox_env, "server", (EXTENSION, "--AgentboxExtension.keep_sandboxes=True"), {})
    first.wait_ready()
    nbformat.write(nbformat.v4.new_notebook(), agentbox_env.work / "book.ipynb")
    session = first.call(
        "POST", "api/sessions", {"path": "book.ipynb", "name": "", "type": "notebook", "kernel": {"name": KERNEL}}
    )
    kernel_id = session["kernel"]["id"]
    client = KernelClient(first, kernel_id)
    client.check("x = 41")
    path = f"api/agentbox/sandboxes/{kernel_id}"
    first.call("PATCH", path, {"allowed_hosts": []})
    asked = first.call("POST", path + "/egress/asks", {"host": "github.com", "why": "to clone"})
    assert asked["state"] == "pending"
    # It counts for others, before it says so, how often it was there; one of the two runs still with the next server.
    request = client.start(
        "import os, time\ni = 0\nwhile not os.path.exists('enough'):\n"
        "    with open('count', 'a') as file: file.write('.')\n"
        "    print(i, flush=True); i += 1; time.sleep(0.1)\n"
        "open('done', 'w').close(); 'end'"
    )
    seen: list[str] = []
    while len(seen) < 8:
        message = client.receive(time.monotonic() + 60)
        seen += message["content"].get("text", "").split() if message["msg_type"] == "stream" else []
    first.stop(signum)
    count = agentbox_env.work / "count"
    at_the_end = count.stat().st_size
    wait_until(lambda: count.stat().st_size > at_the_end + 10, 60, "the cell goes on without a server")
    if signum == signal.SIGTERM:
        (agentbox_env.work / "enough").touch()
        wait_until((agentbox_env.work / "done").exists, 60, "the cell ends without a server")

        # A server of another root directory takes nothing.
        work, agentbox_env.work = agentbox_env.work, agentbox_env.work / "elsewhere"
        agentbox_env.work.mkdir()
        with agentbox_env.server("server", EXTENSION) as other:
            assert other.call("GET", "api/kernels") == []
        agentbox_env.work = work

    with agentbox_env.server("server", EXTENSION) as second:
        assert [kernel["id"] for kernel in second.call("GET", "api/kernels")] == [kernel_id]
        (again,) = second.call("GET", "api/sessions")
        assert (again["id"], again["path"], again["kernel"]["id"]) == (session["id"], "book.ipynb", kernel_id)
        # What an agent has asked for waits for a person still.
        assert second.call("GET", path + "/egress/asks")["asks"] == [asked]
        # The page comes back, and what the cell put out meanwhile with it.
        follower = KernelClient(second, kernel_id, client.session)
        if signum == signal.SIGKILL:
            assert again["kernel"]["execution_state"] == "busy"
            begin = follower.receive(time.monotonic() + 60)
            while begin["msg_type"] != "stream":
                begin = follower.receive(time.monotonic() + 60)
            assert int(begin["content"]["text"].split()[0]) <= at_the_end, "the first of it was kept"
            follower.interrupt()
            assert follower.finish(request).error == "KeyboardInterrupt"
        else:
            result = follower.finish(request)
            numbers = [int(line) for line in result.text.split()]
            assert numbers == list(range(numbers[0], count.stat().st_size))
            assert numbers[0] <= at_the_end, "the first of it was kept"
            assert result.outputs[-1]["content"]["data"] == {"text/plain": "'end'"}
        # The variable is there.
        assert follower.check("print(x + 1)", timeout=60).strip() == "42"
        follower.restart()
        assert "NameError" in follower.execute("x").error
        (kept,) = second.call("GET", path + "/egress/asks")["asks"]
        assert (kept["id"], kept["state"], kept["sandbox"] == asked["sandbox"]) == (asked["id"], "pending", False)
        second.call("DELETE", f"api/kernels/{kernel_id}")


def test_sandboxes_of_programs_are_taken_back_running_or_parked(agentbox_env: Env) -> None:
    agentbox_env.configure({"Policy": {"lease_timeout": 120.0}})
    first = Server(agentbox_env, "server", (EXTENSION,), {})
    first.wait_ready()
    for name in ("runner", "sleeper"):
        first.call("POST", "api/agentbox/sandboxes", {"id": name})
        first.call("POST", f"api/agentbox/sandboxes/{name}/code", {"code": f"x = '{name}'"})
    first.call("POST", "api/agentbox/sandboxes/sleeper/park")
    first.stop(signal.SIGKILL)

    with agentbox_env.server("server", EXTENSION) as second:
        known = second.call("GET", "api/agentbox/sandboxes")["sandboxes"]
        assert {item["id"]: item["state"] for item in known} == {"runner": "running", "sleeper": "parked"}
        for name in ("runner", "sleeper"):
            ran = second.call("POST", f"api/agentbox/sandboxes/{name}/code", {"code": "x"})
            assert ran["result"]["data"]["text/plain"] == repr(name)
            second.call("DELETE", f"api/agentbox/sandboxes/{name}")
