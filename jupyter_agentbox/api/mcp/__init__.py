"""MCP: the sandboxes' tools for AI agents, over the official SDK, as streamable HTTP and on standard input and output.

``api.mcp.tools`` is the table of tools, each a few lines above an operation of the REST API, so that
rights, tool lists, guard rails and the audit log are the same. ``api.mcp.server`` serves them to a
client of the SDK; ``api.mcp.endpoint`` keeps the sessions of those who come over HTTP, and
``api.mcp.stdio`` and ``api.mcp.forward`` serve the one that has started this process.
The SDK is optional: only modules of this package import it, and this one does not.
"""

from __future__ import annotations

from importlib.util import find_spec

#: What to tell whoever asks for MCP where the SDK is missing.
MISSING = "MCP needs the package mcp: pip install 'mcp>=2.3,<3', and start this program again"


def is_available() -> bool:
    """Whether the SDK is installed."""
    return find_spec("mcp") is not None
