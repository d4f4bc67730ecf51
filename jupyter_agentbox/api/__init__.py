"""Serve the REST API. Each operation is a thin function over the objects that do the work.

``api.routes`` is the table of operations, ``api.base`` turns it into Tornado handlers, and ``api.failures`` maps errors
to HTTP.
"""

from __future__ import annotations

from typing import Any

from jupyter_server.utils import url_path_join

from . import about, code, commands, files, packages, sandboxes, snapshots, tokens
from .base import BrokenHandler, UnknownHandler, make_handlers
from .mcp.handler import MCPHandler
from .page import PageHandler, ScriptHandler
from .ports import PortHandler
from .routes import TABLE
from .terminal import TerminalSocket

__all__ = ["ROOT", "TABLE", "BrokenHandler", "make_all"]

#: Paths of the API, of its documentation page and of MCP, below the server's base URL.
ROOT = "api/agentbox"
PAGE = "agentbox/docs"
MCP = "agentbox/mcp"

# Importing these modules fills the table.
_OPERATIONS = (about, code, commands, files, packages, sandboxes, snapshots, tokens)


def make_all(base_url: str) -> list[tuple[str, Any]]:
    """Return all handlers of the extension, with their URL patterns."""
    root = url_path_join(base_url, ROOT)
    page = url_path_join(base_url, PAGE)
    return [
        *make_handlers(TABLE, root),
        (root + r"/sandboxes/(?P<id>[^/]+)/terminals/(?P<process>[^/]+)/socket", TerminalSocket),
        (root + r"/sandboxes/(?P<id>[^/]+)/ports/(?P<port>[0-9]{1,5})(?:/.*)?", PortHandler),
        (root + r"(?:/.*)?", UnknownHandler),
        (url_path_join(base_url, MCP), MCPHandler),
        (page, PageHandler),
        (page + r"\.js", ScriptHandler),
    ]
