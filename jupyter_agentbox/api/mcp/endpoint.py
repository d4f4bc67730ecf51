"""Serve MCP over HTTP: one SDK session manager for each caller, so that no caller can use another's session.

Plain ASGI, called by ``api.mcp.handler``. Runs on the server's own event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from jupyter_agentbox.errors import LimitReached

from .handler import MAX_BODY
from .server import make_server
from .tools import Access

#: Maximum number of concurrent callers, and of each caller's sessions and concurrent requests.
MAX_CALLERS = 200
MAX_SESSIONS = 16
MAX_REQUESTS = 64
#: Seconds without a request after which a session ends.
IDLE_TIMEOUT = 1800.0
#: Key of a request's access in its ASGI scope.
ACCESS = "agentbox.access"


def _access_of(context: Any) -> Access:
    access: Access = context.request.scope[ACCESS]
    return access


class _Caller:
    """The sessions of one caller."""

    def __init__(self, server: Server[Any]) -> None:
        self.manager = StreamableHTTPSessionManager(
            server, session_idle_timeout=IDLE_TIMEOUT, max_sessions=MAX_SESSIONS, max_request_body_size=MAX_BODY
        )
        self.requests = 0
        self.used = time.monotonic()
        self._stop = asyncio.Event()
        self._is_ready = asyncio.Event()
        self._running = asyncio.ensure_future(self._run())

    @property
    def is_idle(self) -> bool:
        """Whether it cannot have a session any more."""
        return not self.requests and time.monotonic() - self.used > IDLE_TIMEOUT

    async def _run(self) -> None:
        try:
            async with self.manager.run():
                self._is_ready.set()
                await self._stop.wait()
        finally:
            self._is_ready.set()

    async def serve(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.requests += 1
        try:
            await self._is_ready.wait()
            await self.manager.handle_request(scope, receive, send)
        finally:
            self.requests -= 1
            self.used = time.monotonic()

    async def aclose(self) -> None:
        self._stop.set()
        await asyncio.wait([self._running], timeout=5)


class Endpoints:
    """The sessions of all callers of one Jupyter server."""

    def __init__(self) -> None:
        self._server = make_server(_access_of)
        self._callers: dict[str, _Caller] = {}

    async def serve(self, principal: str, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve one request.

        Parameters
        ----------
        principal : str
            Identifies the caller: a user or a token.
        scope, receive, send
            As in ASGI. The scope has an :class:`~jupyter_agentbox.api.mcp.tools.Access` under :data:`ACCESS`.

        Raises
        ------
        LimitReached
            Too many callers, or too many requests of this caller.
        """
        caller = self._callers.get(principal) or await self._add(principal)
        if caller.requests >= MAX_REQUESTS:
            raise LimitReached(f"you have {MAX_REQUESTS} concurrent requests, the maximum; wait for one to end")
        await caller.serve(scope, receive, send)

    async def _add(self, principal: str) -> _Caller:
        for name, other in list(self._callers.items()):
            if other.is_idle:
                del self._callers[name]
                await other.aclose()
        if principal not in self._callers:
            if len(self._callers) >= MAX_CALLERS:
                raise LimitReached(f"{MAX_CALLERS} callers use MCP here, the maximum; try again later")
            self._callers[principal] = _Caller(self._server)
        return self._callers[principal]

    async def aclose(self) -> None:
        """End all sessions."""
        callers, self._callers = list(self._callers.values()), {}
        await asyncio.gather(*(caller.aclose() for caller in callers))
        # The SDK's event streams leave a task on the loop that waits for the shutdown of another kind of server.
        for task in asyncio.all_tasks():
            if getattr(task.get_coro(), "__name__", "") == "_shutdown_watcher":
                task.cancel()
