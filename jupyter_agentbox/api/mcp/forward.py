"""Forward MCP on standard input and output to a Jupyter server, so that a client shares its notebooks' kernels.

The server decides rights, limits and results. This module imports nothing about sandboxes, so that it starts fast.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import httpx2
from mcp import Client, MCPError, stdio_server, types
from mcp.client.streamable_http import streamable_http_client
from mcp.server import Server

from jupyter_agentbox import __version__
from jupyter_agentbox.errors import AgentboxError, InvalidRequest

#: Path below a Jupyter server's base URL.
PATH = "agentbox/mcp"
# While a server works, it sends something every 15 s.
_TIMEOUT = httpx2.Timeout(30, read=120)


def address_of(url: str) -> str:
    """Return the MCP URL of a Jupyter server. Raises InvalidRequest."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{url!r:.200} is not a Jupyter server's URL, such as http://localhost:8888")
    if parts.query or parts.username or parts.password:
        raise InvalidRequest("the URL must not contain a token; set JUPYTER_AGENTBOX_TOKEN instead")
    path = parts.path.rstrip("/").removesuffix("/lab").removesuffix("/tree").removesuffix("/" + PATH)
    return f"{parts.scheme}://{parts.netloc}{path}/{PATH}"


async def forward(url: str, token: str) -> None:
    """Forward all requests to a Jupyter server, until standard input ends.

    Parameters
    ----------
    url : str
        URL of the server.
    token : str
        The server's own token, or a token for one sandbox.

    Raises
    ------
    AgentboxError
        The server cannot be reached, or refuses the token.
    """
    address = address_of(url)
    try:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=_TIMEOUT) as http,
            Client(streamable_http_client(address, http_client=http), cache=None) as remote,
            stdio_server() as (reader, writer),
        ):
            server = _make_server(remote)
            await server.run(reader, writer, server.create_initialization_options())
    except Exception as error:
        raise AgentboxError(f"cannot use MCP at {address}: {_reason(error)}") from error


def _make_server(remote: Client) -> Server[Any]:
    async def on_list_tools(context: Any, params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        return await remote.list_tools(cursor=params.cursor if params is not None else None)

    async def on_call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        return await remote.call_tool(params.name, params.arguments, progress_callback=context.session.report_progress)

    return Server(
        "jupyter-agentbox",
        version=__version__,
        instructions=remote.instructions,
        on_list_tools=on_list_tools,
        on_call_tool=on_call_tool,
    )


def _reason(error: BaseException) -> str:
    """Return the message of the first error in an error group."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return error.message if isinstance(error, MCPError) else str(error) or type(error).__name__
