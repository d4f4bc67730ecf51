"""A real Jupyter server with the extension, reached over HTTP alone, and a sandbox that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api import Api, Make, make_server_config
from support.harness import Env, Server


@pytest.fixture(scope="session")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the host that policy names."""
    base = tmp_path_factory.mktemp("exchange")
    folders = {name: base / name for name in ("datasets", "results")}
    for folder in folders.values():
        folder.mkdir()
    (folders["datasets"] / "a.csv").write_text("x\n1\n")
    return folders


@pytest.fixture(scope="session")
def server(has_runsc: None, tmp_path_factory: pytest.TempPathFactory, exchange: dict[str, Path]) -> Iterator[Server]:
    config = make_server_config(
        blocked_commands=["forbidden-program"],
        import_folders={"datasets": str(exchange["datasets"])},
        export_folders={"results": str(exchange["results"])},
        user_may_allow=["walk.example:*"],
        profiles={"small": {"memory": "300 MiB"}, "offline": {"allowed_hosts": []}},
        max_sandboxes_per_owner=8,
        max_tenant_disk="8 MiB",
    )
    env = Env(tmp_path_factory.mktemp("server"), config)
    try:
        arguments = (
            "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}",
            "--ServerApp.max_body_size=8388608",  # which is no bound of uploads: tests send more
            "--ServerApp.kernel_spec_manager_class=jupyter_agentbox.AgentboxKernelSpecManager",
        )
        with env.server("server", *arguments) as running:
            yield running
        env.assert_clean()
    finally:
        env.close()


@pytest.fixture(scope="session")
def api(server: Server) -> Iterator[Api]:
    made = Api(server)
    yield made
    made.http.close()


@pytest.fixture
def make(api: Api) -> Iterator[Make]:
    """Return a maker of sandboxes for one test."""
    made: list[str] = []

    def make(**request: Any) -> str:
        made.append(api.ok("POST", "/sandboxes", request)["id"])
        return f"/sandboxes/{made[-1]}"

    yield make
    for name in made:
        api("DELETE", f"/sandboxes/{name}")


@pytest.fixture(scope="module")
def box(api: Api) -> Iterator[str]:
    """Path of a sandbox that the tests of a file share."""
    path = "/sandboxes/" + api.ok("POST", "/sandboxes", {"id": "shared", "allowed_hosts": ["pypi"]})["id"]
    yield path
    api.ok("DELETE", path)
