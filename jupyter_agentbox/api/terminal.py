"""Connect clients to a sandbox's terminal over a websocket.

Binary frames are the terminal's input and output. Text frames are JSON: ``{"rows", "columns"}`` sets the size, and
``{"exit_code"}`` reports the end. The terminal keeps running when its socket is closed; a client that reconnects gets
the most recent output. Input counts as use of the sandbox, an open socket alone does not.

A browser cannot set headers: it offers the subprotocols ``agentbox`` and its token, and ``agentbox`` is agreed on. A
token is never part of the URL, which is logged. The socket is closed when the token is no longer valid.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated, Any

import msgspec
from jupyter_server.auth.decorator import ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from tornado import web
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from jupyter_agentbox.errors import AgentboxError, NotFound
from jupyter_agentbox.models import ErrorAnswer
from jupyter_agentbox.sandbox.processes import Exit
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox

from .failures import describe
from .identity import RESOURCE, SUBPROTOCOL, TokenMixin, caller_of, is_allowed, record_refusal
from .service import Service

#: Maximum number of bytes of one frame, and of all input in the queue.
MAX_FRAME = 1024 * 1024
MAX_INPUT = 4 * 1024 * 1024


class _Size(msgspec.Struct, forbid_unknown_fields=True):
    rows: Annotated[int, msgspec.Meta(ge=1, le=1000)]
    columns: Annotated[int, msgspec.Meta(ge=1, le=1000)]


class _Ended(msgspec.Struct):
    exit_code: int


class TerminalSocket(TokenMixin, WebSocketMixin, WebSocketHandler, JupyterHandler):
    """Connection of one client to one terminal."""

    auth_resource = RESOURCE

    def initialize(self) -> None:
        self._managed: ManagedSandbox | None = None
        self._name = ""
        self._caller_detail: dict[str, Any] = {}
        self._tasks: list[asyncio.Future[None]] = []
        self._input: asyncio.Queue[bytes | _Size] = asyncio.Queue()
        self._input_size = 0

    @property
    def max_message_size(self) -> int:
        """Maximum number of bytes of one frame."""
        return MAX_FRAME

    @ws_authenticated
    async def get(self, *args: Any, **kwargs: str) -> None:
        """Authenticate the request and find the terminal before the connection becomes a websocket."""
        if not await is_allowed(self, "execute"):
            raise web.HTTPError(403)
        service: Service = self.settings["agentbox"]
        try:
            caller = await caller_of(self, "execute")
            self._managed = await service.sandboxes.registry.peek(kwargs["id"], "terminal", caller=caller)
            self._name = kwargs["process"]
            info = self._managed.running().processes.get(self._name)
            if not info.is_terminal:
                raise NotFound(f"process {self._name!r:.100} is not a terminal")
            self._caller_detail = caller.to_detail()
        except AgentboxError as error:
            status, answer = describe(error)
            record_refusal(self, "terminal", answer, kwargs["id"])
            self.set_status(status)
            self.set_header("Content-Type", "application/json")
            self.finish(msgspec.json.encode(answer))
            return
        await super().get(*args, **kwargs)

    async def open(self, *args: Any, **kwargs: Any) -> None:
        """Start to forward output, after the visit was written to the audit log."""
        super().open(*args, **kwargs)
        assert self._managed is not None
        service: Service = self.settings["agentbox"]
        detail = {"tool": "terminal", "process": self._name, **self._caller_detail}
        try:
            sandbox = self._managed.running().id
            await service.sandboxes.registry.audit().arecord(
                "call", sandbox, is_allowed=True, duration=0.0, detail=detail
            )
        except AgentboxError as error:
            self._close_with(describe(error)[1])
            return
        if self.ws_connection is None:
            return  # the client has disconnected in the meantime
        self._tasks = [
            asyncio.ensure_future(work) for work in (self._forward_output(), self._forward_input(), self._watch())
        ]

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        """Agree on our subprotocol, and never echo a token."""
        return SUBPROTOCOL if SUBPROTOCOL in subprotocols else None

    async def _watch(self) -> None:
        await self.scope_ended()
        self.close(1008, "the token has expired or was revoked")

    async def _forward_output(self) -> None:
        assert self._managed is not None
        try:
            async with await self._managed.running().processes.follow(self._name) as events:
                async for event in events:
                    if isinstance(event, Exit):
                        await self.write_message(msgspec.json.encode(_Ended(event.exit_code)).decode())
                    else:
                        await self.write_message(event.data, binary=True)
            self.close(1000, "the terminal has ended")
        except WebSocketClosedError:
            pass
        except AgentboxError as error:
            self._close_with(describe(error)[1])

    async def _forward_input(self) -> None:
        assert self._managed is not None
        while True:
            item = await self._input.get()
            try:
                processes = self._managed.running().processes
                if isinstance(item, bytes):
                    self._input_size -= len(item)
                    await processes.write(self._name, item)
                else:
                    await processes.resize(self._name, item.rows, item.columns)
            except (AgentboxError, TimeoutError) as error:
                self._close_with(describe(error)[1])
                return

    def on_message(self, message: str | bytes) -> None:
        """Handle input or a new size."""
        assert self._managed is not None
        self._managed.touch()
        if isinstance(message, bytes):
            self._input_size += len(message)
            if self._input_size > MAX_INPUT:
                self.close(1009, "the terminal's input queue is full")
                return
            self._input.put_nowait(message)
            return
        try:
            self._input.put_nowait(msgspec.json.decode(message, type=_Size))
        except msgspec.MsgspecError as error:
            self._close_with(
                ErrorAnswer(f"a text frame must be JSON with rows and columns: {error}", "invalid_request")
            )

    def _close_with(self, answer: ErrorAnswer) -> None:
        """Close the socket with a reason, truncated to the length that fits."""
        with contextlib.suppress(WebSocketClosedError):
            self.close(1011, answer.message.encode()[:120].decode("utf-8", "ignore"))

    def on_close(self) -> None:
        """Stop forwarding. The terminal keeps running."""
        super().on_close()
        for task in self._tasks:
            task.cancel()
