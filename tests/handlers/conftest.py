"""A real Jupyter server with the extension, reached over HTTP alone, and a sandbox that tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from e2e.harness import Env, Server

#: Long, so that a slow machine does not lose the sandbox that all tests share.
LEASE = 30.0


class Api:
    """Calls of the REST API of one server by one user."""

    def __init__(self, server: Server, token: str | None = None) -> None:
        self.server = server
        self.http = requests.Session()
        self.http.trust_env = False
        self.http.headers["Authorization"] = f"token {token or server.token}"

    def url(self, path: str) -> str:
        return self.server.url("api/agentbox" + path)

    def __call__(self, verb: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        """Make a call; nothing is asserted, but that the server is at no fault."""
        if body is not None:
            options["json" if isinstance(body, (dict, list)) else "data"] = body
        options.setdefault("timeout", 150)
        answer = self.http.request(verb, self.url(path), **options)
        assert answer.status_code != 500, f"{answer.text}\n{self.server.log.read_text()[-6000:]}"
        return answer

    def ok(self, verb: str, path: str, body: Any = None, **options: Any) -> Any:
        """Make a call that must succeed; return the decoded answer."""
        answer = self(verb, path, body, **options)
        assert answer.ok, f"{verb} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def fails(self, status: int, verb: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """Make a call that must fail so; return the error."""
        answer = self(verb, path, body, **options)
        assert answer.status_code == status, f"{verb} {path}: {answer.status_code} {answer.text}"
        error: dict[str, Any] = answer.json()
        assert error["message"]
        assert error["reason"]
        return error

    def counted(self, name: str) -> float:
        """Return the sum of the server's metrics whose lines begin so."""
        text = self.server.http.get(self.server.url("metrics"), timeout=60).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def events(self, verb: str, path: str, body: Any = None, **options: Any) -> Iterator[tuple[str, Any]]:
        """Read server-sent events."""
        answer = self(verb, path, body, stream=True, **options)
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"] == "text/event-stream"
        name = ""
        try:
            for line in answer.iter_lines(chunk_size=1):
                if line.startswith(b"event: "):
                    name = line[7:].decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])
        finally:
            answer.close()


def make_server_config(**policy: Any) -> dict[str, Any]:
    return {"Policy": {"lease_timeout": LEASE, **policy}}


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
        profiles={"small": {"memory": "300 MiB"}, "offline": {"allowed_hosts": []}},
        max_sandboxes_per_owner=8,
        max_tenant_disk="8 MiB",
    )
    env = Env(tmp_path_factory.mktemp("server"), config)
    try:
        arguments = (
            "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}",
            "--ServerApp.max_body_size=8388608",  # which is no bound of uploads: tests send more
            "--ServerApp.kernel_spec_manager_class=jupyter_agentbox.jupyter.kernelspecs.AgentboxKernelSpecManager",
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


Make = Callable[..., str]


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
