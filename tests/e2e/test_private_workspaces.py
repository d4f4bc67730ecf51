"""Kernels with a private workspace that die: whatever starts them again, their files are there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Env, KernelClient, Server, wait_until

pytestmark = pytest.mark.timeout(600)

#: Ways to die, each once the file is written.
DEATHS = {
    "memory": "[bytearray(2**26) for _ in range(16)]",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}
CONFIG = {"Policy": {"profiles": {"default": {"memory": "300 MiB"}}, "keep_ended_for": 20.0}}


def write(server: Server) -> KernelClient:
    kernel = server.kernel()
    kernel.check("open('/workspace/file', 'w').write('precious')")
    return kernel


def read(server: Server, kernel_id: str) -> str:
    """Read the file by a client of its own, once a kernel answers."""

    def try_to_read() -> str:
        with contextlib.suppress(AssertionError, OSError):
            return KernelClient(server, kernel_id).check("print(open('/workspace/file').read())", timeout=10)
        return ""

    return wait_until(try_to_read, 150, "the kernel answers")


def test_jupyters_own_restart_has_the_files(make_env: Callable[..., Env]) -> None:
    """Two kernels of one server, which die at the same time."""
    env = make_env(config=CONFIG)
    with env.server("server") as server:
        kernels = {how: write(server) for how in DEATHS}
        before = set(env.sandboxes())
        for how, kernel in kernels.items():
            kernel.start(DEATHS[how])
        wait_until(
            lambda: len(env.sandboxes()) == len(DEATHS) and before.isdisjoint(env.sandboxes()),
            150,
            "all are restarted",
        )
        for how, kernel in kernels.items():
            assert read(server, kernel.id) == "precious\n", how
    env.assert_clean()


def is_given_up(server: Server, kernel: KernelClient) -> bool:
    return server.http.get(server.url(f"api/kernels/{kernel.id}"), timeout=60).status_code == 404


def test_one_that_jupyter_gave_up_is_revived_with_its_files(make_env: Callable[..., Env]) -> None:
    env = make_env(config=CONFIG)
    with env.server("server", "--AsyncIOLoopKernelRestarter.restart_limit=0") as server:
        kernels = {how: write(server) for how in ("memory", "crash")}
        paths = {how: f"api/agentbox/sandboxes/{kernel.id}" for how, kernel in kernels.items()}
        assert server.http.post(server.url(f"{paths['crash']}/revive"), timeout=60).status_code == 409
        for how, kernel in kernels.items():
            kernel.start(DEATHS[how])
        for how, kernel in kernels.items():
            wait_until(lambda: is_given_up(server, kernel), 150, "Jupyter gives it up", pause=0.2)  # noqa: B023
            ended = wait_until(lambda: _get(server, paths[how]), 60, "it is told of")  # noqa: B023
            assert (ended["state"], ended["kind"]) == ("ended", "notebook")
            assert ended["end"]["kept_until"] > time.time()
            assert ended["end"]["cause"] == {"memory": "out_of_memory", "crash": "crashed"}[how]
            revived = server.call("POST", f"{paths[how]}/revive")
            assert (revived["state"], revived["kernels"][0]["id"]) == ("running", kernel.id)
        assert len(env.sandboxes()) == len(kernels)
        for kernel in kernels.values():
            assert read(server, kernel.id) == "precious\n"
        # A sandbox that is not revived is removed when its time expires, or immediately by a call.
        for kernel in kernels.values():
            KernelClient(server, kernel.id).start(DEATHS["crash"])
        for how, kernel in kernels.items():
            wait_until(lambda: is_given_up(server, kernel), 150, "Jupyter gives it up again", pause=0.2)  # noqa: B023
            wait_until(lambda: _get(server, paths[how]), 60, "it is told of")  # noqa: B023
        server.call("DELETE", paths["crash"])
        assert len(env.sandboxes()) <= 1
        wait_until(lambda: not env.sandboxes(), 100, "the time of the other one is over")
        assert server.http.post(server.url(f"{paths['memory']}/revive"), timeout=60).status_code == 404
    env.assert_clean()


def _get(server: Server, path: str) -> Any:
    answer = server.http.get(server.url(path), timeout=60)
    return answer.json() if answer.ok and answer.json()["end"] else None
