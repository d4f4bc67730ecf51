"""What becomes of sandboxes when their server ends: every cell of the table in docs/security.md.

Most tests start one server after the other: each finds what the one before it left, and ends in another way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import signal
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from support.harness import Env, KernelClient, Server, wait_until
from support.serving import Serving

pytestmark = pytest.mark.timeout(900)

#: Longer than any test here: what is gone before has not ended by its lease.
LEASE = 600.0
AGENTS = "api/agentbox/sandboxes"
#: Those that ask a server to end, and what it is to be told nothing by.
ENDS = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT, "SIGINT without a terminal": signal.SIGINT}
CRASH = "kill -9"
#: ``serve`` asks no question, so both kinds of Ctrl-C are one.
SERVE_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
KEEP = "--AgentboxExtension.keep_sandboxes=True"


@pytest.fixture
def env(agentbox_env: Env) -> Env:
    agentbox_env.configure({"Policy": {"lease_timeout": LEASE}})
    return agentbox_env


def start(env: Env, program: str, *arguments: str, how: str = "SIGTERM") -> Server:
    """Start a server as it has to be started to be ended so; Ctrl-C asks no question, as with ``-y``."""
    if how == "Ctrl-C":  # of which a server knows only where its standard input is a terminal
        ours, terminal = pty.openpty()
        server = Server(env, program, ("--JupyterApp.answer_yes=True", *arguments), {"stdin": terminal})
        os.close(terminal)
        weakref.finalize(server, os.close, ours)
    else:
        server = Server(env, program, arguments, {})
    server.wait_ready()
    return server


def end(server: Server, how: str) -> None:
    server.stop(ENDS.get(how, signal.SIGKILL))


def run(server: Server, sandbox: str, code: str) -> str:
    ran = server.call("POST", f"{AGENTS}/{sandbox}/code", {"code": code})
    assert ran["status"] == "ok", ran
    return str((ran["result"] or {"data": {"text/plain": ""}})["data"]["text/plain"])


def assert_gone(env: Env) -> None:
    wait_until(lambda: not env.sandboxes(), 60, "no sandbox is left")
    wait_until(lambda: not env.processes(), 60, "no process is left")


def make_both(server: Server) -> KernelClient:
    """Start a kernel and a sandbox by the API, each with a variable."""
    kernel = server.kernel()
    kernel.check("x = 41")
    server.call("POST", AGENTS, {"id": "agent"})
    run(server, "agent", "y = 7")
    return kernel


def assert_both(server: Server, kernel: KernelClient) -> None:
    assert list_kernels(server) == [kernel.id], server.log.read_text()
    assert list_agents(server) == ["agent"]
    assert KernelClient(server, kernel.id).check("print(x)") == "41\n"
    assert run(server, "agent", "y") == "7"


def list_kernels(server: Server) -> list[str]:
    return [item["id"] for item in server.call("GET", "api/kernels")]


def list_agents(server: Server) -> list[str]:
    return [item["id"] for item in server.call("GET", AGENTS)["sandboxes"] if item["kind"] == "session"]


def test_a_shutdown_ends_sandboxes_and_a_crash_keeps_them(env: Env) -> None:
    ways = [*ENDS, CRASH]
    server = start(env, "lab", how=ways[0])
    for how, following in itertools.zip_longest(ways, ways[1:], fillvalue="SIGTERM"):
        kernel = make_both(server)
        end(server, how)
        if how != CRASH:
            assert_gone(env)
        server = start(env, "lab", how=following)
        if how == CRASH:
            assert_both(server, kernel)
        else:
            assert (list_kernels(server), list_agents(server)) == ([], []), how
    server.stop()
    assert_gone(env)


def test_a_shutdown_keeps_sandboxes_where_the_server_is_told_to(env: Env) -> None:
    ways = list(ENDS)
    server = start(env, "server", KEEP, how=ways[0])
    kernel = make_both(server)
    for how, following in itertools.zip_longest(ways, ways[1:]):
        end(server, how)
        server = start(env, "server", KEEP, how=following) if following else start(env, "server")
        assert_both(server, kernel)
    server.stop()
    assert_gone(env)


def test_serve_does_the_same(env: Env) -> None:
    serving, is_there = Serving(env), False
    runs = [((), signum) for signum in SERVE_ENDS] + [(("--keep-sandboxes",), signum) for signum in SERVE_ENDS]
    for (arguments, signum), (following, _) in itertools.zip_longest(runs, runs[1:], fillvalue=((), 0)):
        if not is_there:
            call(serving, "POST", {"id": "agent"})
        serving.stop(signum)
        is_there = bool(arguments) or signum == signal.SIGKILL
        if not is_there:
            assert_gone(env)
        serving = Serving(env, *following)
        listed = [item["id"] for item in call(serving, "GET")["sandboxes"]]
        assert listed == (["agent"] if is_there else []), (arguments, signum)
    serving.stop()
    assert_gone(env)


def call(serving: Serving, method: str, body: object = None) -> Any:
    headers = {"Authorization": f"token {serving.token}"}
    answer = requests.request(method, serving.url + AGENTS, headers=headers, json=body, timeout=150)
    answer.raise_for_status()
    return answer.json()


def test_kernel_gateway_ends_its_kernels_and_after_a_crash_a_server_takes_them_back(env: Env) -> None:
    for how in (*ENDS, CRASH):
        gateway = start(env, "kernelgateway", "--JupyterWebsocketPersonality.list_kernels=True", how=how)
        assert list_kernels(gateway) == []
        kernel = gateway.kernel()
        kernel.check("x = 41")
        end(gateway, how)
        if how != CRASH:
            assert_gone(env)
    with env.server("server") as server:
        assert list_kernels(server) == [kernel.id]
        assert KernelClient(server, kernel.id).check("print(x)") == "41\n"
    assert_gone(env)


def test_what_is_parked_stays_when_the_server_is_told_to_end(env: Env) -> None:
    first = start(env, "server")
    kernel = first.notebook("book.ipynb")
    kernel.check("x = 41")
    first.call("POST", AGENTS, {"id": "agent"})
    run(first, "agent", "y = 7")
    for name in (kernel.id, "agent"):
        first.call("POST", f"{AGENTS}/{name}/park")
    first.stop()
    assert_gone(env)
    second = start(env, "server")
    states = {item["id"]: item["state"] for item in second.call("GET", AGENTS)["sandboxes"] if item["id"] == "agent"}
    assert states == {"agent": "parked"}
    assert [item["kernel"]["id"] for item in second.call("GET", "api/sessions")] == [kernel.id]
    assert KernelClient(second, kernel.id).check("print(x)") == "41\n"
    assert run(second, "agent", "y") == "7"
    second.stop()
    assert_gone(env)


# -- an end that is cut short ---------------------------------------------------------------------


def busy(server: Server) -> KernelClient:
    """Start a kernel that takes no notice of interrupts, so that to shut it down takes seconds."""
    kernel = server.kernel()
    kernel.check("import time")
    kernel.start(
        "while True:\n    try:\n        print('on', flush=True); time.sleep(30)\n    except BaseException: pass"
    )
    while kernel.receive(time.monotonic() + 60)["msg_type"] != "stream":
        pass
    return kernel


@contextlib.contextmanager
def full_audit_log(env: Env) -> Iterator[None]:
    """Have all that is written to the audit log wait, and so all that waits for that."""
    database = sqlite3.connect(env.state_dir / "audit.sqlite", isolation_level=None, timeout=60)
    try:
        database.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        database.close()


def was_told_to_end(directory: Path) -> bool:
    try:
        return (directory / "lock").stat().st_mtime == 0
    except FileNotFoundError:  # it has ended
        return True


def kill(server: Server) -> None:
    server.process.kill()
    server.stop(signal.SIGKILL)


def start_and_find_nothing(env: Env) -> Server:
    server = start(env, "server")
    assert list_kernels(server) == []
    assert server.call("GET", AGENTS)["sandboxes"] == []
    wait_until(lambda: not env.sandboxes(), 60, "the sandbox is gone long before its lease")
    return server


def test_a_shutdown_that_is_cut_short_is_one(env: Env) -> None:
    """Of the server, of a kernel, and of a sandbox by the API."""
    server = start(env, "server")
    busy(server)
    server.call("POST", AGENTS, {"id": "agent"})
    with full_audit_log(env):
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: all(was_told_to_end(path) for path in env.sandboxes()), 60, "it begins to end")
        kill(server)
    assert env.sandboxes(), "it was killed before it had ended them"

    server = start_and_find_nothing(env)
    kernel = busy(server)
    with deleting(server, f"api/kernels/{kernel.id}"):
        log = server.log
        wait_until(lambda: f"Kernel shutdown: {kernel.id}" in log.read_text(), 60, "it begins to end the kernel")
        kill(server)
    assert env.sandboxes(), "it was killed before it had ended it"

    server = start_and_find_nothing(env)
    path = f"{AGENTS}/agent"
    server.call("POST", AGENTS, {"id": "agent"})
    with full_audit_log(env), deleting(server, path):
        wait_until(lambda: server.call("GET", path)["state"] == "ended", 60, "it begins to end")
        kill(server)
    start_and_find_nothing(env).stop()


@contextlib.contextmanager
def deleting(server: Server, path: str) -> Iterator[None]:
    """Have a call to delete something under way, which ends with the server."""
    thread = threading.Thread(target=delete, args=(server, path))
    thread.start()
    yield
    thread.join(60)


def delete(server: Server, path: str) -> None:
    with contextlib.suppress(requests.RequestException):
        requests.delete(server.url(path), headers=dict(server.http.headers), timeout=100)
