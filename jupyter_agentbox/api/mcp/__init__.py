"""Serve the sandboxes' tools over MCP with the official SDK, as streamable HTTP and on standard input and output.

``api.mcp.tools`` is the table of tools. Each is a thin function over an operation of the REST API, so that rights, tool
allowlists, guard rails and the audit log are the same. ``api.mcp.server`` serves them to a client of the SDK,
``api.mcp.endpoint`` keeps the sessions of HTTP clients, and ``api.mcp.stdio`` and ``api.mcp.forward`` serve the client
that started this process. The SDK is optional: only modules of this package import it, and this one does not.
"""

from __future__ import annotations

from importlib.util import find_spec

#: Message if the SDK is not installed.
MISSING = "MCP requires the package mcp: run pip install 'mcp>=2.3,<3' and restart this program"


def is_available() -> bool:
    """Return whether the SDK is installed."""
    return find_spec("mcp") is not None
