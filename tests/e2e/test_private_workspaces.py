"""Kernels with a private workspace that die: whatever starts them again, their files are there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Env, KernelClient, Server, wait_until

pytestmark = pytest.mark.timeout(600)

#: Ways to die, each once the file is written.
DEATHS = {
    "memory": "bytearray(2**30)",
    "disk": "for n in range(99): open(f'/workspace/large-{n}', 'wb').write(bytes(2**22))",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}
CONFIG = {"Policy": {"profiles": {"default": {"memory": "300 MiB", "disk": "64 MiB"}}, "keep_ended_for": 20.0}}


def write_and_die(kernel: KernelClient, how: str) -> None:
    kernel.check("open('/workspace/file', 'w').write('precious')")
    kernel.start(DEATHS[how])


def read(server: Server, kernel_id: str) -> str:
    """Read the file by a client of its own, once a kernel answers."""
    deadline = time.monotonic() + 150
    while True:
        try:
            return KernelClient(server, kernel_id).check("print(open('/workspace/file').read())", timeout=10)
        except (AssertionError, OSError):
            assert time.monotonic() < deadline


@pytest.mark.parametrize("how", list(DEATHS))
def test_jupyters_own_restart_has_the_files(make_env: Callable[..., Env], how: str) -> None:
    env = make_env(config=CONFIG)
    with env.server("server") as server:
        kernel = server.kernel()
        before = env.sandboxes()
        write_and_die(kernel, how)
        wait_until(lambda: len(env.sandboxes()) == 1 and env.sandboxes() != before, 150, "it is restarted")
        assert read(server, kernel.id) == "precious\n"
        if how == "disk":  # it lives on, and has room again when files are deleted
            alive = env.sandboxes()
            client = KernelClient(server, kernel.id)
            client.check("import glob, os, time; time.sleep(6); [os.unlink(p) for p in glob.glob('/workspace/large*')]")
            client.check("open('/workspace/new', 'wb').write(bytes(2**22)); time.sleep(5)")
            assert env.sandboxes() == alive
    env.assert_clean()


def is_given_up(server: Server, kernel: KernelClient) -> bool:
    return server.http.get(server.url(f"api/kernels/{kernel.id}"), timeout=60).status_code == 404


@pytest.mark.parametrize("how", ["memory", "crash"])
def test_one_that_jupyter_gave_up_is_revived_with_its_files(make_env: Callable[..., Env], how: str) -> None:
    env = make_env(config=CONFIG)
    with env.server("server", "--AsyncIOLoopKernelRestarter.restart_limit=0") as server:
        kernel = server.kernel()
        path = f"api/agentbox/sandboxes/{kernel.id}"
        assert server.http.post(server.url(f"{path}/revive"), timeout=60).status_code == 409
        write_and_die(kernel, how)
        wait_until(lambda: is_given_up(server, kernel) and len(env.sandboxes()) == 1, 150, "Jupyter gives it up")
        ended = wait_until(lambda: _get(server, path), 60, "it is told of")
        assert (ended["state"], ended["kind"]) == ("ended", "notebook")
        assert ended["end"]["kept_until"] > time.time()
        assert ended["end"]["cause"] == {"memory": "out_of_memory", "crash": "crashed"}[how]
        revived = server.call("POST", f"{path}/revive")
        assert (revived["state"], revived["kernels"][0]["id"]) == ("running", kernel.id)
        assert read(server, kernel.id) == "precious\n"
        # Where nobody does, it goes after its time, and by a call at once.
        KernelClient(server, kernel.id).start(DEATHS["crash"])
        wait_until(lambda: is_given_up(server, kernel), 150, "Jupyter gives it up again")
        wait_until(lambda: _get(server, path), 60, "it is told of")
        wait_until(lambda: not env.sandboxes(), 100, "its time is over")
        assert server.http.post(server.url(f"{path}/revive"), timeout=60).status_code == 404
        other = server.kernel()
        write_and_die(other, "crash")
        wait_until(lambda: is_given_up(server, other), 150, "Jupyter gives this one up")
        wait_until(lambda: _get(server, f"api/agentbox/sandboxes/{other.id}"), 60, "it is told of")
        server.call("DELETE", f"api/agentbox/sandboxes/{other.id}")
        assert env.sandboxes() == []
    env.assert_clean()


def _get(server: Server, path: str) -> Any:
    answer = server.http.get(server.url(path), timeout=60)
    return answer.json() if answer.ok and answer.json()["end"] else None
