"""A server that is killed while a sandbox is parked, woken, saved, taken back or forked: it is before, or after.

Each operation is done once to the end, and then cut off at moments that are spread over a little more than it took.
``AGENTBOX_CRASHES`` says how often it is killed; once in each operation unless set.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from support.harness import Env, Server, wait_until

CRASHES = int(os.environ.get("AGENTBOX_CRASHES", "5"))
#: No other extensions, so that it starts quickly.
EXTENSIONS = {"jupyter_agentbox": True, "jupyterlab": False, "jupyter_lsp": False, "notebook_shim": False}
OPERATIONS = ("park", "wake", "snapshot", "restore", "fork")
#: Seconds that what nobody has lives on: more than a server takes to start on any machine.
LEASE = 600.0
#: Seconds for one call, and for a kernel that has answered to be idle.
TIMEOUT = 300.0
#: How far behind an operation's end it may still be killed, in parts of what that takes.
BEYOND = 1.2


def start(env: Env) -> Server:
    server = Server(env, "server", (f"--ServerApp.jpserver_extensions={EXTENSIONS}",), {})
    server.wait_ready()
    return server


class Round:
    """One operation on one kernel, and what may be found after it was cut off."""

    def __init__(self, server: Server, kernel_id: str, operation: str, number: int) -> None:
        self.server, self.operation = server, operation
        self.path = f"api/agentbox/sandboxes/{kernel_id}"
        self.allowed = {str(number)}
        self.body: Any = {}
        self.verb = {"snapshot": "snapshots"}.get(operation, operation)
        self.run(f"x = {number - 1}")
        if operation == "restore":
            self.body = {"snapshot": server.call("POST", f"{self.path}/snapshots", {})["id"]}
            self.allowed.add(str(number - 1))
        if operation == "fork":
            self.body = {"id": f"fork-{number}"}
        self.run(f"x = {number}")
        if operation == "wake":
            assert self.post("park", {})

    def run(self, code: str) -> Any:
        return self.server.call("POST", f"{self.path}/code", {"code": code})

    def act(self) -> bool:
        """Do it; whether it was answered before the server was gone."""
        return self.post(self.verb, {"json": self.body} if self.body or self.verb == "snapshots" else {})

    def post(self, verb: str, body: dict[str, Any]) -> bool:
        url, token = self.server.url(f"{self.path}/{verb}"), self.server.token
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                answer = requests.post(url, headers={"Authorization": f"token {token}"}, timeout=TIMEOUT, **body)
            except requests.RequestException:
                return False
            # A kernel's last word comes after its reply, and until then it is not parked.
            if answer.status_code != 409 or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert answer.ok, f"{answer.text}\n{self.server.log.read_text()[-3000:]}"
        return True

    def measure(self) -> float:
        """Do it to the end, and remove what came of it; the seconds that it took are returned."""
        began = time.monotonic()
        assert self.act()
        took = time.monotonic() - began
        if self.operation == "fork":
            self.server.call("DELETE", f"api/agentbox/sandboxes/{self.body['id']}")
        remove_snapshots(self.server)
        return took


def remove_snapshots(server: Server) -> None:
    for item in server.call("GET", "api/agentbox/snapshots")["snapshots"]:
        server.call("DELETE", f"api/agentbox/snapshots/{item['id']}")


def end_leases(env: Env, server: Server) -> None:
    """End the copies that were cut off before anybody knew of them, as their leases do after a while."""
    known = [item["sandbox_id"] for item in server.call("GET", "api/agentbox/sandboxes")["sandboxes"]]
    for directory in env.sandboxes():
        if directory.name not in known:
            with contextlib.suppress(FileNotFoundError):
                os.utime(directory / "lock", (0, 0))


def spread(rng: random.Random) -> list[tuple[str, float]]:
    """Choose operations in turns, and for each of one's turns a moment in another part of what it takes."""
    turns = -(-CRASHES // len(OPERATIONS))
    moments = {}
    for operation in OPERATIONS:
        parts = [BEYOND * (turn + rng.random()) / turns for turn in range(turns)]
        rng.shuffle(parts)
        moments[operation] = parts
    return [(OPERATIONS[n % len(OPERATIONS)], moments[OPERATIONS[n % len(OPERATIONS)]].pop()) for n in range(CRASHES)]


@pytest.mark.timeout(300 + 60 * CRASHES)
def test_killed_at_any_moment_a_kernel_is_what_it_was_before_or_after(agentbox_env: Env) -> None:
    agentbox_env.configure({"Policy": {"lease_timeout": LEASE}})
    rng = random.Random(CRASHES)
    server = start(agentbox_env)
    kernel_id = server.call("POST", "api/kernels", {"name": "agentbox"})["id"]
    took = {operation: Round(server, kernel_id, operation, 0).measure() for operation in OPERATIONS}
    cut_off: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    live, parked = agentbox_env.state_dir / "snapshots" / "live", agentbox_env.state_dir / "parked"
    with ThreadPoolExecutor(1) as pool:
        for number, (operation, part) in enumerate(spread(rng), 1):
            attempt = Round(server, kernel_id, operation, number)
            began = time.monotonic()
            acting = pool.submit(attempt.act)
            while not acting.done() and time.monotonic() - began < part * took[operation]:
                time.sleep(0.002)
            server.process.kill()
            if not acting.result():
                cut_off[operation].append(round(part, 2))
            server.stop(signal.SIGKILL)

            server = start(agentbox_env)
            assert [item["id"] for item in server.call("GET", "api/kernels")] == [kernel_id], operation
            listed = server.call("GET", "api/agentbox/sandboxes")["sandboxes"]
            own = [item for item in listed if kernel_id in [kernel["id"] for kernel in item["kernels"]]]
            assert len(own) == 1, (operation, listed)
            wait_until(lambda: not list(live.iterdir()), 60, "what was half made is cleared away")
            forks = [item["id"] for item in listed if item not in own]
            assert forks in ([], [f"fork-{number}"] if operation == "fork" else []), (operation, listed)
            for place in (attempt.path, *(f"api/agentbox/sandboxes/{fork}" for fork in forks)):
                ran = server.call("POST", f"{place}/code", {"code": "x"})
                assert ran["status"] == "ok", f"{operation}: {ran}\n{server.log.read_text()[-3000:]}"
                assert ran["result"]["data"]["text/plain"] in attempt.allowed, (operation, number)
            wait_until(lambda: not list(parked.iterdir()), 60, f"nothing is parked any more after {operation}")
            for fork in forks:
                server.call("DELETE", f"api/agentbox/sandboxes/{fork}")
            if operation == "snapshot":
                for item in server.call("GET", "api/agentbox/snapshots")["snapshots"]:
                    server.call("POST", f"{attempt.path}/restore", {"snapshot": item["id"]})
                    ran = server.call("POST", f"{attempt.path}/code", {"code": "x"})
                    assert ran["result"]["data"]["text/plain"] == str(number), "whole or not at all"
            remove_snapshots(server)
            end_leases(agentbox_env, server)
    print(f"{sum(map(len, cut_off.values()))} of {CRASHES} operations were cut off, at these parts of them: {cut_off}")
    server.call("DELETE", f"api/kernels/{kernel_id}")
    server.stop()
    agentbox_env.assert_clean(180)
