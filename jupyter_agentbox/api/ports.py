"""Proxy HTTP and websockets to programs that listen on a port inside: ``/sandboxes/{id}/ports/{port}/...``.

A request with a token of the server in its Authorization header is passed through. A browser, logged in by a cookie,
is redirected to an address with a key of its own, ``.../ports/{port}/~key/...``: a page from inside runs without an
origin, and so sends no cookie with its requests. The key is valid for this one port only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

import h11
import msgspec
from jupyter_server.auth.decorator import allow_unauthenticated
from jupyter_server.base.handlers import JupyterHandler
from tornado import web
from tornado.iostream import IOStream, StreamClosedError

from jupyter_agentbox.errors import AgentboxError, LinkClosed, NotAuthenticated, PolicyRefused
from jupyter_agentbox.models import ErrorAnswer
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.service.ports import Connection, PortGrants, answer_head, inner_request, socket_head, values
from jupyter_agentbox.service.registry import Caller

from .failures import describe
from .identity import RESOURCE, TokenMixin, caller_of, is_allowed, record_refusal
from .service import Service

_PATH = re.compile(r"(?P<prefix>.*/sandboxes/[^/]+/ports/[0-9]+)(?P<rest>/.*)?")
_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_CHUNK = 64 * 1024


@web.stream_request_body
class PortHandler(TokenMixin, JupyterHandler):
    """Handler of one request to a program inside."""

    SUPPORTED_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
    auth_resource = RESOURCE

    def initialize(self) -> None:
        self._managed: ManagedSandbox | None = None
        self._connection: Connection | None = None
        self._work: asyncio.Future[Any] | None = None
        self._is_shared = self._is_disconnected = False
        self._refused: ErrorAnswer | None = None
        self._prefix = self._target = ""
        match = _PATH.fullmatch(self.request.path)
        assert match is not None
        self._prefix, self._target = match["prefix"], match["rest"] or ""
        self._key = self._target[1:].partition("/")[0]
        if self._key.startswith("~"):
            self._is_shared = True
            self._prefix, self._target = f"{self._prefix}/{self._key}", self._target[len(self._key) + 1 :]
            # Logs contain the request's own URI.
            self.request.uri = str(self.request.uri).replace(self._key, "~", 1)

    def check_xsrf_cookie(self) -> None:
        """Skip the XSRF check if the address itself is the credential."""
        if not self._is_shared:
            super().check_xsrf_cookie()

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        """Send an error. An address with an expired key is not answered with a request for a token."""
        if self._is_shared:
            self._jupyter_current_user: Any = self._jupyter_current_user or ""
        super().send_error(status_code, **kwargs)

    def set_default_headers(self) -> None:
        """Close the connection after one exchange: many end before their body is read, or are detached."""
        super().set_default_headers()
        self.set_header("Connection", "close")

    # -- before the body -------------------------------------------------------------------------

    async def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Authenticate the request, connect, and send its head inside. No part of the body is read before that."""
        if self.request.connection is not None:
            self.request.connection.set_max_body_size(1 << 62)  # type: ignore[attr-defined]
        await super().prepare(*args, **kwargs)
        if self._finished:
            return
        try:
            await self._run(self._connect())
        except (AgentboxError, TimeoutError) as error:
            self._fail(error)

    async def _run(self, work: Awaitable[None]) -> None:
        """Await work, and cancel it when the client disconnects or its token expires."""
        self._work = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self.scope_ended())
        try:
            await asyncio.wait([self._work, watch], return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            self._work.cancel()  # has no effect if it is done
        with contextlib.suppress(asyncio.CancelledError):
            await self._work

    async def _connect(self) -> None:
        if "Service-Worker" in self.request.headers:
            raise PolicyRefused("pages from inside a sandbox cannot use service workers")
        if self._is_shared:
            sandbox_id, number = self.path_kwargs["id"], int(self.path_kwargs["port"])
            grant = self._grants.find(self._key[1:], sandbox_id, number)
            if grant is None:
                raise web.HTTPError(403, "this link has expired; reopen the port")
            self._managed, who = grant.managed, {**grant.who, "is_shared": True}
            if self.request.method == "OPTIONS" and "Access-Control-Request-Method" in self.request.headers:
                self._answer_preflight()
                return
        else:
            if self.current_user is None or not await is_allowed(self, "execute"):
                raise web.HTTPError(403)
            caller = await caller_of(self, "execute")
            who = caller.to_detail()
            self._managed = await self._find_sandbox(caller)
            if self._managed is None:
                return
        managed, port = self._managed, int(self.path_kwargs["port"])
        await self._record_visit(managed, port, who)
        query = self.request.query if self._is_shared else self._own_query()
        target = (self._target or "/") + (f"?{query}" if query else "")
        self._target = target
        headers = list(self.request.headers.get_all())
        request = inner_request(str(self.request.method), target, headers, port, is_socket=self._is_socket)
        self._connection = Connection(managed.running(), port)
        await self._connection.__aenter__()
        managed.touch()
        with contextlib.suppress(LinkClosed):  # reading the response reports the error
            await self._connection.send(request)

    @property
    def _grants(self) -> PortGrants:
        grants: PortGrants = self.settings.setdefault("agentbox_ports", PortGrants())
        return grants

    @property
    def _is_socket(self) -> bool:
        return self.request.method == "GET" and self.request.headers.get("Upgrade", "").lower() == "websocket"

    async def _record_visit(self, managed: ManagedSandbox, port: int, who: Mapping[str, Any]) -> None:
        """Record in the audit log who uses the port. Rate-limited, because one page makes many requests."""
        sandbox = managed.running().id
        omitted = self._grants.visits.admit((sandbox, port, who["by"], who.get("token"), who.get("is_shared")))
        if omitted is not None:
            service: Service = self.settings["agentbox"]
            detail = {"is_socket": self._is_socket, "left_out": omitted, **who}
            await service.sandboxes.registry.audit().arecord("port", sandbox, is_allowed=True, port=port, detail=detail)

    async def _find_sandbox(self, caller: Caller) -> ManagedSandbox | None:
        """Return the sandbox for an authenticated caller, or None after redirecting a browser."""
        service: Service = self.settings["agentbox"]
        name, port = self.path_kwargs["id"], int(self.path_kwargs["port"])
        managed = await service.sandboxes.registry.peek(name, None, caller=caller)
        if port not in managed.request.ports:
            known = ", ".join(map(str, managed.request.ports)) or "none"
            raise PolicyRefused(
                f"port {port} is not exposed by this sandbox (exposed: {known})",
                field="port",
                setting="ports of the sandbox's request",
            )
        if self.scope is not None or (self.token_authenticated and "Authorization" in self.request.headers):
            return managed
        if self.request.method not in ("GET", "HEAD") or self._is_socket:
            raise PolicyRefused("send a token in the Authorization header, or open the port's address in a browser")
        key = self._grants.make(managed, name, port, caller.to_detail())
        query = self._own_query()
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        self.redirect(f"{self._prefix}/~{key}{self._target or '/'}" + (f"?{query}" if query else ""))
        return None

    def _own_query(self) -> str:
        """Return the query without Jupyter's own parameters."""
        pairs = parse_qsl(self.request.query, keep_blank_values=True)
        if not any(name in ("token", "_xsrf") for name, _ in pairs):
            return self.request.query
        return urlencode([(name, value) for name, value in pairs if name not in ("token", "_xsrf")])

    def _answer_preflight(self) -> None:
        self.set_status(204)
        self.set_header("Access-Control-Allow-Origin", "*")
        self.set_header("Access-Control-Allow-Methods", _METHODS)
        self.set_header("Access-Control-Allow-Headers", "*")
        self.finish()

    # -- the exchange ----------------------------------------------------------------------------

    async def data_received(self, chunk: bytes) -> None:
        """Forward a part of the body, at the pace at which the program reads it."""
        if self._connection is None or self._finished:
            return
        assert self._managed is not None
        self._managed.touch()
        with contextlib.suppress(LinkClosed, asyncio.CancelledError):  # it has responded already, or never will
            self._work = asyncio.ensure_future(self._connection.send(h11.Data(data=chunk)))
            await self._work

    @allow_unauthenticated  # checked before the body was read
    async def get(self, **_: str) -> None:
        """Forward the response."""
        if self._finished or self._connection is None:
            return
        try:
            await self._run(self._forward())
            if not self._finished and not self._is_disconnected:
                self._fail(NotAuthenticated("the token has expired or was revoked"))
        except (AgentboxError, TimeoutError) as error:
            self._fail(error)
        finally:
            self._disconnect()

    head = post = put = patch = delete = options = get

    async def _forward(self) -> None:
        assert self._connection is not None
        assert self._managed is not None
        with contextlib.suppress(LinkClosed):
            await self._connection.send(h11.EndOfMessage())
        answer = await self._connection.read_head()
        if isinstance(answer, h11.InformationalResponse):
            await self._send_detached(socket_head(answer), self._relay_socket)
            return
        is_empty = self.request.method == "HEAD" or answer.status_code in (204, 304)
        is_chunked = not (is_empty or values(answer, b"content-length") or self.request.version == "HTTP/1.0")
        head = answer_head(
            answer,
            is_chunked=is_chunked,
            prefix=self._prefix,
            target=self._target,
            port=self._connection.port,
            host=self.request.host,
            is_shared=self._is_shared,
        )
        await self._send_detached(head, lambda stream: self._send_body(stream, is_chunked))

    async def _send_detached(self, head: bytes, send_body: Any) -> None:
        """Send a head, and then the body by `send_body`. The connection is not used for anything else afterwards."""
        assert self.request.connection is not None
        self._auto_finish, self._finished, self._headers_written = False, True, True
        stream: IOStream = self.request.connection.detach()  # type: ignore[attr-defined]
        work = self._work

        def closed() -> None:
            if work is not None:
                work.cancel()

        stream.set_close_callback(closed)
        try:
            await stream.write(head)
            await send_body(stream)
        except (StreamClosedError, LinkClosed):
            pass  # too late for an error response: the closed connection is the only sign
        finally:
            stream.set_close_callback(None)
            stream.close()

    async def _send_body(self, stream: IOStream, is_chunked: bool) -> None:
        assert self._connection is not None
        assert self._managed is not None
        async for data in self._connection.read_body():
            self._managed.touch()
            await stream.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
        if is_chunked:
            await stream.write(b"0\r\n\r\n")

    async def _relay_socket(self, stream: IOStream) -> None:
        tasks = [asyncio.ensure_future(work) for work in (self._relay_up(stream), self._relay_down(stream))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay_up(self, stream: IOStream) -> None:
        assert self._connection is not None
        assert self._managed is not None
        while data := await stream.read_bytes(_CHUNK, partial=True):
            self._managed.touch()
            await self._connection.send(data)

    async def _relay_down(self, stream: IOStream) -> None:
        assert self._connection is not None
        while data := await self._connection.read():
            await stream.write(data)

    # -- ends ------------------------------------------------------------------------------------

    def on_connection_close(self) -> None:
        """Close the connection inside when the client disconnects."""
        super().on_connection_close()
        self._is_disconnected = True
        if self._work is not None:
            self._work.cancel()
        self._disconnect()

    def on_finish(self) -> None:
        """Close the connection inside, and record a refusal."""
        super().on_finish()
        self._disconnect()
        if self._refused is not None:
            record_refusal(self, "ports", self._refused, self.path_kwargs.get("id"))

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            closing = asyncio.ensure_future(connection.__aexit__())
            closing.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _fail(self, error: BaseException) -> None:
        if not self._headers_written and not self._finished:
            status, answer = describe(error)
            self._refused = answer
            self.clear()
            self.set_status(status)
            self.set_header("Content-Type", "application/json")
            self.finish(msgspec.json.encode(answer))
