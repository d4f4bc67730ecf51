"""One server for the tests of the client, which is ``jupyter agentbox serve``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.harness import Env
from support.serving import Serving

from jupyter_agentbox.client import Client, Sandbox

#: Long, so that a slow machine does not lose the sandbox that all tests share.
LEASE = 30.0


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the host that policy names."""
    base = tmp_path_factory.mktemp("folders")
    for name in ("datasets", "results"):
        (base / name).mkdir()
    (base / "datasets" / "a.csv").write_text("x\n1\n")
    return {name: base / name for name in ("datasets", "results")}


@pytest.fixture(scope="session")
def serving(has_runsc: None, tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[Serving]:
    policy = {
        "lease_timeout": LEASE,
        "import_folders": {"datasets": str(folders["datasets"])},
        "export_folders": {"results": str(folders["results"])},
        "profiles": {"offline": {"allowed_hosts": []}},
    }
    env = Env(tmp_path_factory.mktemp("serve"), {"Policy": policy})
    try:
        serving = Serving(env)
        yield serving
        serving.stop()
        env.assert_clean()
    finally:
        env.close()


@pytest.fixture(scope="session")
def client(serving: Serving) -> Iterator[Client]:
    with Client(serving.url, serving.token) as client:
        yield client


@pytest.fixture(scope="session")
def box(client: Client) -> Sandbox:
    """A sandbox that tests share."""
    return client.create(id="shared", labels={"for": "tests"}, keep=True)
