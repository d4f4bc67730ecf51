"""A real Jupyter server, reached over MCP by the SDK's own client, and a sandbox that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.harness import Env, Server
from support.mcp_client import LEASE, Endpoint, text_of


@pytest.fixture(scope="session")
def mcp_server(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {"Policy": {"lease_timeout": LEASE, "blocked_commands": ["forbidden-program"], "user_may_allow": []}}
    env = Env(tmp_path_factory.mktemp("mcp"), config)
    try:
        arguments = (
            "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}",
            "--ServerApp.kernel_spec_manager_class=jupyter_agentbox.AgentboxKernelSpecManager",
        )
        with env.server("server", *arguments) as running:
            yield running
        env.assert_clean()
    finally:
        env.close()


@pytest.fixture(scope="session")
def endpoint(mcp_server: Server) -> Endpoint:
    return Endpoint(mcp_server)


@pytest.fixture(scope="session")
def box(endpoint: Endpoint) -> str:
    """Id of a sandbox that tests share."""
    made = endpoint.call("create_sandbox", id="shared", allowed_hosts=["pypi"])
    assert not made.is_error, text_of(made)
    return str(made.structured_content["id"])
