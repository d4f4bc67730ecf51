"""Park kernels and sandboxes over a server's REST API."""

from __future__ import annotations

from typing import Any

from support.harness import KernelClient, Server, wait_until

#: No other extensions, so that the server starts fast.
EXTENSIONS = {"jupyter_agentbox": True, "jupyterlab": False, "jupyter_lsp": False, "notebook_shim": False}


EXTENSION = f"--ServerApp.jpserver_extensions={EXTENSIONS}"


def call(server: Server, verb: str, path: str, body: Any = None) -> Any:
    return server.call(verb, f"api/agentbox/{path}", body)


def park(kernel: KernelClient) -> None:
    """Park a kernel as soon as it is idle."""
    park_box(kernel.server, kernel.id)
    assert is_parked(kernel)


def park_box(server: Server, name: str) -> None:
    """Park a sandbox as soon as no call uses it and its last message was delivered."""

    def try_it() -> bool:
        answer = server.http.post(server.url(f"api/agentbox/sandboxes/{name}/park"), timeout=150)
        assert answer.status_code in (200, 409), f"{answer.text}\n{server.log.read_text()[-4000:]}"
        assert not answer.ok or answer.json()["state"] == "parked"
        return answer.ok

    wait_until(try_it, 60, "it is parked")


def is_parked(kernel: KernelClient) -> bool:
    info = call(kernel.server, "GET", f"sandboxes/{kernel.id}")
    assert info["end"] is None
    return bool(info["state"] == "parked")
