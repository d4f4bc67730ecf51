"""MCP on standard input and output, passed on to a Jupyter server, so that a client shares its notebooks' kernels.

It decides nothing: rights, bounds and answers are the server's. It imports nothing of sandboxes, and starts fast.
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

#: Beneath a Jupyter server's base URL.
PATH = "agentbox/mcp"
# Of a server that works on something something comes every 15 s.
_TIMEOUT = httpx2.Timeout(30, read=120)


def address_of(url: str) -> str:
    """Return where MCP is at a Jupyter server. Raises InvalidRequest."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"{url!r:.200} is no address of a Jupyter server, such as http://localhost:8888")
    if parts.query or parts.username or parts.password:
        raise InvalidRequest("give the address without a token; it is taken from JUPYTER_AGENTBOX_TOKEN")
    path = parts.path.rstrip("/").removesuffix("/lab").removesuffix("/tree").removesuffix("/" + PATH)
    return f"{parts.scheme}://{parts.netloc}{path}/{PATH}"


async def forward(url: str, token: str) -> None:
    """Pass all on to a Jupyter server, until standard input ends.

    Parameters
    ----------
    url : str
        Of the server.
    token : str
        The server's own, or one for a sandbox.

    Raises
    ------
    AgentboxError
        The server can't be reached, or refuses the token.
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
        raise AgentboxError(f"{address} can't be used: {_reason(error)}") from error


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
    """Say what is behind a group of errors."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return error.message if isinstance(error, MCPError) else str(error) or type(error).__name__
