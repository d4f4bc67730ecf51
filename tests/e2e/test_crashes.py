"""A server that is killed while a sandbox is parked, woken, saved, taken back or forked: it is before, or after.

``AGENTBOX_CRASHES`` says how often it is killed; ten times unless set.
"""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from .harness import Env, Server, wait_until

CRASHES = int(os.environ.get("AGENTBOX_CRASHES", "10"))
#: No other extensions, so that it starts quickly.
EXTENSIONS = {"jupyter_agentbox": True, "jupyterlab": False, "jupyter_lsp": False, "notebook_shim": False}
OPERATIONS = ("park", "wake", "snapshot", "restore", "fork")


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
            server.call("POST", f"{self.path}/park")

    def run(self, code: str) -> Any:
        return self.server.call("POST", f"{self.path}/code", {"code": code})

    def act(self) -> bool:
        """Do it; whether it was answered before the server was gone."""
        url, token = self.server.url(f"{self.path}/{self.verb}"), self.server.token
        body = {"json": self.body} if self.body or self.verb == "snapshots" else {}
        try:
            answer = requests.post(url, headers={"Authorization": f"token {token}"}, timeout=100, **body)
        except requests.RequestException:
            return False
        assert answer.ok, f"{answer.text}\n{self.server.log.read_text()[-3000:]}"
        return True


@pytest.mark.timeout(60 + 40 * CRASHES)
def test_killed_at_any_moment_a_kernel_is_what_it_was_before_or_after(agentbox_env: Env) -> None:
    agentbox_env.configure({"Policy": {"lease_timeout": 120.0}})
    rng = random.Random(CRASHES)
    took = dict.fromkeys(OPERATIONS, 1.0)
    server = start(agentbox_env)
    kernel_id = server.call("POST", "api/kernels", {"name": "agentbox"})["id"]
    cut_off = 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, CRASHES + 1):
            operation = OPERATIONS[number % len(OPERATIONS)]
            attempt = Round(server, kernel_id, operation, number)
            began = time.monotonic()
            acting = pool.submit(attempt.act)
            wait = rng.uniform(0.0, 1.1 * took[operation])
            while not acting.done() and time.monotonic() - began < wait:
                time.sleep(0.002)
            server.process.kill()
            if acting.result():
                took[operation] = time.monotonic() - began
            else:
                cut_off += 1
                took[operation] *= 1.5  # so that its later moments have their turn on a slow machine
            server.stop(signal.SIGKILL)

            server = start(agentbox_env)
            assert [item["id"] for item in server.call("GET", "api/kernels")] == [kernel_id], operation
            listed = server.call("GET", "api/agentbox/sandboxes")["sandboxes"]
            own = [item for item in listed if kernel_id in [kernel["id"] for kernel in item["kernels"]]]
            assert len(own) == 1, (operation, listed)
            forks = [item["id"] for item in listed if item not in own]
            assert forks in ([], [f"fork-{number}"] if operation == "fork" else []), (operation, listed)
            for place in (attempt.path, *(f"api/agentbox/sandboxes/{fork}" for fork in forks)):
                ran = server.call("POST", f"{place}/code", {"code": "x"})
                assert ran["status"] == "ok", (operation, ran)
                assert ran["result"]["data"]["text/plain"] in attempt.allowed, (operation, number)
            for fork in forks:
                server.call("DELETE", f"api/agentbox/sandboxes/{fork}")
            for item in server.call("GET", "api/agentbox/snapshots")["snapshots"]:
                if operation == "snapshot":
                    server.call("POST", f"{attempt.path}/restore", {"snapshot": item["id"]})
                    ran = server.call("POST", f"{attempt.path}/code", {"code": "x"})
                    assert ran["result"]["data"]["text/plain"] == str(number), "whole or not at all"
                server.call("DELETE", f"api/agentbox/snapshots/{item['id']}")
    print(f"{cut_off} of {CRASHES} operations were cut off")
    server.call("DELETE", f"api/kernels/{kernel_id}")
    wait_until(lambda: not list(agentbox_env.state_dir.glob("parked/*")), 10, "nothing is parked any more")
    server.stop()
