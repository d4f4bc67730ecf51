"""Bridge MCP over streamable HTTP from Tornado to the SDK's ASGI application, with limits.

No part of a request's body is kept before its sender is authenticated by a token. A cookie is not sufficient, because a
browser also sends it for requests of other pages. The application's output waits until the client has taken it. A
client that disconnects ends its calls, and so does the end of its token.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from jupyter_server.auth.decorator import allow_unauthenticated
from jupyter_server.base.handlers import APIHandler
from tornado import web
from tornado.iostream import StreamClosedError

from jupyter_agentbox.api.failures import describe
from jupyter_agentbox.api.identity import TokenMixin, caller_of, is_allowed
from jupyter_agentbox.api.service import Service
from jupyter_agentbox.errors import AgentboxError, RuntimeUnavailable, TooLarge
from jupyter_agentbox.sandbox.tokens import VERBS
from jupyter_agentbox.spec import format_size

from . import MISSING, is_available

if TYPE_CHECKING:
    from .endpoint import Endpoints

_SETTING = "agentbox_mcp"
#: Maximum number of bytes of one request; enough for the largest upload in base64.
MAX_BODY = 8 * 1024 * 1024
# Maximum number of bytes of a refused body that are read, so that the client can read the error.
_MAX_DRAINED = 8 * 1024 * 1024
#: Headers of the application that concern the connection, or that Tornado sets.
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "content-type"})


def endpoints_of(settings: dict[str, Any]) -> Endpoints:
    """Return the sessions of a server, created at first use. Raises RuntimeUnavailable."""
    if not is_available():
        raise RuntimeUnavailable(MISSING)
    from .endpoint import Endpoints

    found: Endpoints = settings.get(_SETTING) or settings.setdefault(_SETTING, Endpoints())
    return found


async def close_endpoints(settings: dict[str, Any]) -> None:
    """End the sessions of a server."""
    found: Endpoints | None = settings.pop(_SETTING, None)
    if found is not None:
        await found.aclose()


class _Message(msgspec.Struct):
    method: str = ""


def _is_opening(body: bytearray) -> bool:
    """Return whether a request opens a session. One that names an old session, such as before a restart, does too."""
    try:
        return msgspec.json.decode(body, type=_Message).method == "initialize"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


@web.stream_request_body
class MCPHandler(TokenMixin, APIHandler):
    """Handler of the MCP endpoint."""

    def initialize(self) -> None:
        self._body = bytearray()
        self._received = 0
        self._disconnected = asyncio.Event()
        self._refusal: web.HTTPError | None = None

    async def prepare(self) -> None:  # type: ignore[override]
        """Authenticate before any byte of the body is kept. A refusal is sent after the body was received."""
        if self.request.connection is not None:
            self.request.connection.set_max_body_size(1 << 62)  # type: ignore[attr-defined]
        try:
            await self._authenticate()
        except web.HTTPError as error:
            self._refusal = error

    async def _authenticate(self) -> None:
        await super().prepare()
        self._track_activity = self.request.method == "POST"
        self._check_token()
        if self.current_user is None:
            raise web.HTTPError(401)
        for verb in VERBS:
            if await is_allowed(self, verb):
                break
        else:
            raise web.HTTPError(403, "you have no permission to use sandboxes on this server")
        try:
            self._endpoints = endpoints_of(self.settings)
        except AgentboxError as error:
            raise web.HTTPError(501, str(error)) from None

    def _check_token(self) -> None:
        if self.identity_provider.auth_enabled and not self.token_authenticated:
            raise web.HTTPError(401)

    def check_xsrf_cookie(self) -> None:
        """Require a token. A cookie is not sufficient, unless the server has no authentication at all."""
        if hasattr(self, "_jupyter_current_user"):  # otherwise the user is not known yet
            self._check_token()
        super().check_xsrf_cookie()

    def data_received(self, chunk: bytes) -> None:
        """Receive a part of the body, up to the limit."""
        self._received += len(chunk)
        if self._refusal is None and self._received <= MAX_BODY:
            self._body += chunk
        elif self._received > MAX_BODY + _MAX_DRAINED and not self._finished:
            self._fail(TooLarge(f"the request is larger than the limit of {format_size(MAX_BODY)}"))

    async def _serve(self) -> None:
        if self._finished:
            return
        if self._refusal is not None:
            raise self._refusal
        if self._received > MAX_BODY:
            self._fail(TooLarge(f"the request is larger than the limit of {format_size(MAX_BODY)}"))
            return
        work = asyncio.ensure_future(self._run())
        watch = asyncio.ensure_future(self.scope_ended())
        try:
            await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                # A call ends with the token that it was made with.
                self._disconnected.set()
                work.cancel()
                await asyncio.wait([work])
                if self.request.connection is not None:
                    self.request.connection.stream.close()  # type: ignore[attr-defined]
        finally:
            watch.cancel()
            work.cancel()
        if self._disconnected.is_set() or self._finished:
            return
        error = work.exception() if not work.cancelled() else None
        if error is not None:
            self._fail(error)
        elif not self._finished:
            await self.finish()

    # Jupyter must not authenticate again: `prepare` did, by tokens only.
    get = post = delete = allow_unauthenticated(_serve)

    async def _run(self) -> None:
        from .endpoint import ACCESS
        from .tools import Access

        service: Service = self.settings["agentbox"]
        access = Access(
            service,
            caller=lambda verb: caller_of(self, verb),
            is_allowed=partial(is_allowed, self),
            disconnected=self._disconnected,
        )
        if self.scope is not None:
            principal = f"token {self.scope.id}"
        else:
            principal = f"user {(await caller_of(self)).name}"
        dropped = {"authorization", "cookie"}
        if _is_opening(self._body):
            dropped.add("mcp-session-id")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.request.method,
            "scheme": self.request.protocol,
            "path": self.request.path,
            "raw_path": self.request.path.encode("latin-1", "replace"),
            "query_string": b"",
            "root_path": "",
            # Credentials are not passed on.
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
                for name, value in self.request.headers.get_all()
                if name.lower() not in dropped
            ],
            "client": None,
            "server": None,
            ACCESS: access,
        }
        await self._endpoints.serve(principal, scope, self._make_receive(), self._send)

    def _make_receive(self) -> Any:
        parts = [bytes(self._body)]
        self._body.clear()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await self._disconnected.wait()
            return {"type": "http.disconnect"}

        return receive

    async def _send(self, message: dict[str, Any]) -> None:
        """Send a message of the application, and return when the client has received it."""
        if self._disconnected.is_set() or self._finished:
            return
        if message["type"] == "http.response.start":
            self.set_status(message["status"])
            self._type = "application/json"
            for name, value in message.get("headers", ()):
                if name.lower() == b"content-type":
                    self._type = value.decode("latin-1")
                elif name.decode("latin-1").lower() not in _HOP:
                    self.set_header(name.decode("latin-1"), value.decode("latin-1"))
            self.set_header("Content-Type", self._type)
            if self._type.startswith("text/event-stream"):
                self.set_header("X-Accel-Buffering", "no")
                with contextlib.suppress(StreamClosedError):
                    await self.flush()
            return
        body = message.get("body", b"")
        with contextlib.suppress(StreamClosedError):
            if message.get("more_body", False):
                if body:
                    self.write(body)
                await self.flush()
            else:
                await self.finish(body or None, set_content_type=self._type)

    def on_connection_close(self) -> None:
        """End the calls of a client that has disconnected."""
        super().on_connection_close()
        self._disconnected.set()

    def _fail(self, error: BaseException) -> None:
        status, answer = describe(error)
        if status == 500:
            self.log.error("agentbox: MCP request failed", exc_info=error)
        if self._headers_written:
            if self.request.connection is not None:
                self.request.connection.stream.close()  # type: ignore[attr-defined]
            return
        self.set_status(status)
        self.finish(msgspec.json.encode(answer))
