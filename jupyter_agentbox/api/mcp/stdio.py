"""Serve MCP on standard input and output to the client that started this process, with sandboxes that end with it.

``api.mcp.forward`` uses the sandboxes of a Jupyter server instead.
"""

from __future__ import annotations

from mcp import stdio_server

from jupyter_agentbox.api.service import Service
from jupyter_agentbox.sandbox.tokens import Verb
from jupyter_agentbox.service.registry import Caller

from .server import make_server
from .tools import Access


async def serve(service: Service) -> None:
    """Serve the user of this process, until standard input ends."""

    async def caller(verb: Verb) -> Caller:
        return Caller(service.sandboxes.registry.server_owner).acting(verb)

    async def is_allowed(action: str) -> bool:
        return True

    access = Access(service, caller, is_allowed)
    server = make_server(lambda context: access)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())
