"""What becomes of sandboxes when their server ends: every cell of the table in docs/security.md."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from support.harness import Env, KernelClient, Server, wait_until
from support.serving import Serving

#: Longer than any test here: what is gone before has not ended by its lease.
LEASE = 600.0
AGENTS = "api/agentbox/sandboxes"
#: Those that ask a server to end, and what it is to be told nothing by.
ENDS = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT, "SIGINT without a terminal": signal.SIGINT}
CRASH = "kill -9"
HOW = pytest.mark.parametrize("how", [*ENDS, CRASH])
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


@HOW
def test_a_shutdown_ends_sandboxes_and_a_crash_keeps_them(env: Env, how: str) -> None:
    first = start(env, "lab", how=how)
    kernel = first.kernel()
    kernel.check("x = 41")
    first.call("POST", AGENTS, {"id": "agent"})
    run(first, "agent", "y = 7")
    end(first, how)
    if how != CRASH:
        assert_gone(env)
    second = start(env, "server")
    kernels = [item["id"] for item in second.call("GET", "api/kernels")]
    sandboxes = [item["id"] for item in second.call("GET", AGENTS)["sandboxes"] if item["kind"] == "session"]
    if how == CRASH:
        assert (kernels, sandboxes) == ([kernel.id], ["agent"])
        assert KernelClient(second, kernel.id).check("print(x)") == "41\n"
        assert run(second, "agent", "y") == "7"
    else:
        assert (kernels, sandboxes) == ([], [])
    second.stop()
    assert_gone(env)


@pytest.mark.parametrize("how", ENDS)
def test_a_shutdown_keeps_sandboxes_where_the_server_is_told_to(env: Env, how: str) -> None:
    first = start(env, "server", KEEP, how=how)
    kernel = first.kernel()
    kernel.check("x = 41")
    first.call("POST", AGENTS, {"id": "agent"})
    run(first, "agent", "y = 7")
    end(first, how)
    second = start(env, "server")
    found = [item["id"] for item in second.call("GET", "api/kernels")]
    assert found == [kernel.id], first.log.read_text() + second.log.read_text()
    assert KernelClient(second, kernel.id).check("print(x)") == "41\n"
    assert run(second, "agent", "y") == "7"
    second.stop()
    assert_gone(env)


@HOW
@pytest.mark.parametrize("arguments", [(), ("--keep-sandboxes",)], ids=["default", "keep"])
def test_serve_does_the_same(env: Env, arguments: tuple[str, ...], how: str) -> None:
    first = Serving(env, *arguments)
    headers = {"Authorization": f"token {first.token}"}
    requests.post(first.url + AGENTS, headers=headers, json={"id": "agent"}, timeout=150).raise_for_status()
    first.stop(ENDS.get(how, signal.SIGKILL))
    is_kept = bool(arguments) or how == CRASH
    if not is_kept:
        assert_gone(env)
    second = Serving(env)
    try:
        headers = {"Authorization": f"token {second.token}"}
        listed = requests.get(second.url + AGENTS, headers=headers, timeout=150).json()["sandboxes"]
        assert [item["id"] for item in listed] == (["agent"] if is_kept else [])
    finally:
        second.stop()
    assert_gone(env)


@HOW
def test_kernel_gateway_ends_its_kernels_and_after_a_crash_a_server_takes_them_back(env: Env, how: str) -> None:
    gateway = start(env, "kernelgateway", "--JupyterWebsocketPersonality.list_kernels=True", how=how)
    kernel = gateway.kernel()
    kernel.check("x = 41")
    end(gateway, how)
    if how != CRASH:
        assert_gone(env)
    with env.server("server") as server:
        kernels = [item["id"] for item in server.call("GET", "api/kernels")]
        assert kernels == ([kernel.id] if how == CRASH else [])
        if kernels:
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
    return (directory / "lock").stat().st_mtime == 0


def kill(server: Server) -> None:
    server.process.kill()
    server.stop(signal.SIGKILL)


def assert_nothing_revived(env: Env) -> None:
    with env.server("server") as second:
        assert second.call("GET", "api/kernels") == []
        assert second.call("GET", AGENTS)["sandboxes"] == []
        wait_until(lambda: not env.sandboxes(), 60, "the sandbox is gone long before its lease")


def test_a_shutdown_that_is_cut_short_is_one(env: Env) -> None:
    first = start(env, "server")
    busy(first)
    first.call("POST", AGENTS, {"id": "agent"})
    with full_audit_log(env):
        first.process.send_signal(signal.SIGTERM)
        wait_until(lambda: all(was_told_to_end(path) for path in env.sandboxes()), 60, "it begins to end")
        kill(first)
    assert env.sandboxes(), "it was killed before it had ended them"
    assert_nothing_revived(env)


def test_a_kernel_that_was_being_shut_down_is_not_revived(env: Env) -> None:
    first = start(env, "server")
    kernel = busy(first)
    deleting = threading.Thread(target=delete, args=(first, f"api/kernels/{kernel.id}"))
    deleting.start()
    wait_until(lambda: f"Kernel shutdown: {kernel.id}" in first.log.read_text(), 60, "it begins to end the kernel")
    kill(first)
    deleting.join(60)
    assert env.sandboxes(), "it was killed before it had ended it"
    assert_nothing_revived(env)


def test_a_sandbox_that_was_being_deleted_is_not_revived(env: Env) -> None:
    first = start(env, "server")
    first.call("POST", AGENTS, {"id": "agent"})
    with full_audit_log(env):
        deleting = threading.Thread(target=delete, args=(first, f"{AGENTS}/agent"))
        deleting.start()
        wait_until(lambda: first.call("GET", f"{AGENTS}/agent")["state"] == "ended", 60, "it begins to end")
        kill(first)
    deleting.join(60)
    assert_nothing_revived(env)


def delete(server: Server, path: str) -> None:
    with contextlib.suppress(requests.RequestException):
        requests.delete(server.url(path), headers=dict(server.http.headers), timeout=100)
