"""Call the REST API: :class:`Client` is synchronous, :class:`AsyncClient` asynchronous::

    from jupyter_agentbox.client import Client

    with Client() as client, client.create(packages=["pandas"]) as box:
        print(box.run_code("import pandas; pandas.__version__").result)

Both have the same methods. ``tools/make_sync_client.py`` generates ``_sync`` from ``_async``. Calls return the structs
of :mod:`jupyter_agentbox.models`, and raise an :class:`ApiError` when they fail. The client imports nothing of the
server.

Modules: ``find`` selects the server, ``wire`` holds code without I/O, ``blocking`` makes blocking calls, and ``errors``
defines the errors. For each client there are ``client``, ``sandbox``, ``process`` and ``files``, above ``connection``.
"""

from __future__ import annotations

from ._async.client import AsyncClient
from ._async.connection import AsyncStream
from ._async.files import AsyncFiles
from ._async.process import AsyncProcess
from ._async.sandbox import AsyncSandbox
from ._sync.client import Client
from ._sync.connection import Stream
from ._sync.files import Files
from ._sync.process import Process
from ._sync.sandbox import Sandbox
from .errors import (
    ApiError,
    ChecksumMismatch,
    CommandFailed,
    Conflict,
    InvalidConfig,
    InvalidRequest,
    LimitReached,
    LinkClosed,
    NotAuthenticated,
    NotAuthorized,
    NotFound,
    PolicyRefused,
    RuntimeFailed,
    RuntimeUnavailable,
    SandboxEnded,
    TimedOut,
    TooLarge,
    UnexpectedAnswer,
    Unreachable,
)
from .find import Server, find_server, running_servers
from .wire import Output, Transferred

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncFiles",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncStream",
    "ChecksumMismatch",
    "Client",
    "CommandFailed",
    "Conflict",
    "Files",
    "InvalidConfig",
    "InvalidRequest",
    "LimitReached",
    "LinkClosed",
    "NotAuthenticated",
    "NotAuthorized",
    "NotFound",
    "Output",
    "PolicyRefused",
    "Process",
    "RuntimeFailed",
    "RuntimeUnavailable",
    "Sandbox",
    "SandboxEnded",
    "Server",
    "Stream",
    "TimedOut",
    "TooLarge",
    "Transferred",
    "UnexpectedAnswer",
    "Unreachable",
    "find_server",
    "running_servers",
]
