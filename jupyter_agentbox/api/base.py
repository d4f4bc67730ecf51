"""Share authentication, bodies, errors, streams and cancellation among all REST handlers.

Handler classes are generated from :data:`~jupyter_agentbox.api.routes.TABLE`, one for each path. Each verb is wrapped
for its own class: Jupyter's ``authorized`` remembers the first class's resource, so wrapped verbs are never inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterable
from copy import copy
from functools import cache, partial
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from tornado import web
from tornado.http1connection import HTTP1Connection
from tornado.iostream import StreamClosedError

from jupyter_agentbox.errors import InvalidRequest, NotAuthenticated, TooLarge
from jupyter_agentbox.models import ErrorAnswer
from jupyter_agentbox.spec import format_size

from .call import Bytes, Call, Chunks, blocking
from .failures import REASONS, describe, invalid
from .identity import RESOURCE, TokenMixin, caller_of, is_allowed, record_refusal
from .routes import EventStream, Route
from .service import Service

__all__ = ["RESOURCE", "AgentboxHandler", "TokenMixin", "caller_of", "is_allowed", "make_handlers"]

#: Seconds without an event after which a stream sends a keep-alive, which also detects a client that has disconnected.
KEEP_ALIVE_INTERVAL = 15.0
#: Seconds that an event stream waits for an immediate failure before it sends a success status.
FIRST_EVENT_TIMEOUT = 0.1
#: Seconds that a call may take to end by itself after its token has expired.
GRACE_TIMEOUT = 1.0
#: Maximum number of bytes of a refused body that are read, so that the client can read the error.
_MAX_DRAINED = 8 * 1024 * 1024
#: Bytes of an upload that are read at a time. Each upload in progress holds about twelve times as many in memory.
UPLOAD_PART = 512 * 1024
#: Query parameters of Jupyter itself.
_JUPYTER_QUERY = frozenset({"token", "_xsrf", "no_track_activity"})
_ENCODER = msgspec.json.Encoder(decimal_format="number")


@web.stream_request_body
class AgentboxHandler(TokenMixin, APIHandler):
    """Handler for every verb of one path."""

    auth_resource = RESOURCE
    routes: ClassVar[dict[str, Route]] = {}

    def initialize(self) -> None:
        self._chunks = Chunks()
        self._body = bytearray()
        self._received = 0
        self._work: asyncio.Task[Any] | None = None
        self._is_disconnected = False
        self._refused: ErrorAnswer | None = None
        self._is_complete = False
        self._deferred_finish: Callable[[], object] | None = None

    @property
    def service(self) -> Service:
        """The objects that all handlers of this server share."""
        service: Service = self.settings["agentbox"]
        return service

    @property
    def route(self) -> Route | None:
        """The route for the request's verb, or None."""
        return self.routes.get((self.request.method or "").lower())

    # -- before the body -------------------------------------------------------------------------

    async def prepare(self) -> None:  # type: ignore[override]
        """Check the head of a request. An upload's body is read only if its sender is allowed to send it."""
        # The limit on bodies is each route's own, applied here, instead of the server's general limit.
        if self.request.connection is not None:
            self.request.connection.set_max_body_size(1 << 62)  # type: ignore[attr-defined]
        await super().prepare()
        route = self.route
        if route is None:
            return
        self._track_activity = not route.is_poll
        if route.kind == "upload":
            await self._check_right(route)
            self._enlarge_parts()
            self._work = asyncio.ensure_future(self._call_in_scope(route, self.path_kwargs))
            self._work.add_done_callback(_retrieve)

    def _enlarge_parts(self) -> None:
        """Read this request's body in larger parts than other bodies: each part costs a turn of the event loop."""
        connection: Any = self.request.connection
        if isinstance(connection, HTTP1Connection):
            connection.params = copy(connection.params)
            connection.params.chunk_size = UPLOAD_PART
            connection.stream.read_chunk_size = UPLOAD_PART

    async def _check_right(self, route: Route) -> None:
        if self.current_user is None:
            raise web.HTTPError(403)
        if not await is_allowed(self, route.right):
            raise web.HTTPError(403, f"you have no {route.right} permission on {RESOURCE}")
        self._check_scope(route)

    def _check_scope(self, route: Route) -> None:
        """Refuse a scoped token if the route takes none. The registry checks that the token is for this sandbox."""
        if self.scope is not None and not route.takes_scope:
            raise web.HTTPError(403, "a token for one sandbox cannot be used for this call; use the server's token")

    async def data_received(self, chunk: bytes) -> None:
        """Receive a part of the body."""
        self._received += len(chunk)
        if self._deferred_finish is not None:
            if not self._finished and not self._must_drain():
                self._deferred_finish()
            return
        route = self.route
        if route is not None and route.kind == "upload" and self._work is not None:
            if not self._work.done():
                await self._chunks.put(chunk, self._work)
            elif self._received > _MAX_DRAINED and not self._finished:
                self._finish_work()  # refused already: send the error and stop reading
            return
        limit = route.max_body if route is not None else 0
        if self.current_user is not None and self._received <= limit:
            self._body += chunk
        elif self._received > limit + _MAX_DRAINED and not self._finished:
            self._fail(TooLarge(f"the body is larger than the limit of {format_size(limit)}"))

    # -- the verb --------------------------------------------------------------------------------

    async def serve(self, route: Route, params: dict[str, str]) -> None:
        """Run the operation, unless the client disconnects first."""
        if self._finished:
            return
        self._is_complete = True
        self._check_scope(route)
        if route.kind == "upload":
            self._chunks.end()
        elif self._work is None:
            self._work = asyncio.ensure_future(self._call_in_scope(route, params))
        assert self._work is not None
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.wait([self._work])
        if not self._finished:
            self._finish_work()

    def _finish_work(self) -> None:
        """Send the result of the work. Events and downloads have already sent their own response."""
        assert self._work is not None
        if self._is_disconnected or self._work.cancelled():
            if not self._is_disconnected and not self._headers_written:
                self._fail(InvalidRequest("the call was cancelled"))
            return
        error = self._work.exception()
        if error is not None:
            self._fail(error)

    async def _call_in_scope(self, route: Route, params: dict[str, str]) -> None:
        """Run the call, and cancel it when its token expires."""
        if self.scope is None:
            return await self._call(route, params)
        call, end = asyncio.ensure_future(self._call(route, params)), asyncio.ensure_future(self.scope_ended())
        try:
            await asyncio.wait([call, end], return_when=asyncio.FIRST_COMPLETED)
            # If the sandbox ended, the call itself has the more precise error.
            await asyncio.wait([call], timeout=0 if call.done() else GRACE_TIMEOUT)
            if call.done():
                return call.result()
            raise NotAuthenticated("the token has expired or was revoked, or its sandbox has ended")
        finally:
            end.cancel()
            call.cancel()
            await asyncio.wait([call])
            _retrieve(call)

    async def _call(self, route: Route, params: dict[str, str]) -> None:
        call = Call(
            route=route,
            params=params,
            query=self._read_query(route),
            body=self._read_body(route),
            caller=await caller_of(self, route.right),
            is_allowed=partial(is_allowed, self),
            sandboxes=self.service.sandboxes,
            headers=self.request.headers,
            chunks=self._chunks,
            service=self.service,
        )
        result = await route.operation(call)
        if route.kind == "events":
            await self._send_events(result)
        elif route.kind == "download":
            await self._send_bytes(result)
        else:
            self.set_status(call.status or route.status)
            if self.get_status() == 204:
                await self.finish()
            else:
                await self.finish(_ENCODER.encode(result))

    def _read_query(self, route: Route) -> Any:
        arguments = {
            name: values for name, values in self.request.query_arguments.items() if name not in _JUPYTER_QUERY
        }
        if route.query is None:
            if arguments:
                name = next(iter(arguments))
                raise InvalidRequest(f"the query: unknown parameter {name!r}", field=name)
            return None
        lists = _lists(route.query)
        try:
            texts = {name: [value.decode() for value in values] for name, values in arguments.items()}
            found = {name: values if name in lists else values[-1] for name, values in texts.items()}
            query = msgspec.convert(found, route.query, strict=False)
        except UnicodeDecodeError:
            raise InvalidRequest("the query is not valid UTF-8") from None
        except msgspec.MsgspecError as error:
            raise invalid(error, "the query") from None
        for name in found:
            if getattr(query, name) is None:  # msgspec converts the text `null` to None
                raise InvalidRequest(f"the query: {name} must not be null; omit it instead", field=name)
        return query

    def _read_body(self, route: Route) -> Any:
        if route.kind == "upload":
            return None
        if self._received > len(self._body):
            raise TooLarge(f"the body is larger than the limit of {format_size(route.max_body)}")
        if route.body is None:
            if bytes(self._body).strip() not in (b"", b"{}"):
                raise InvalidRequest("this call takes no request body")
            return None
        try:
            return msgspec.json.decode(self._body.decode() or "{}", type=route.body)
        except UnicodeDecodeError:
            raise InvalidRequest("the body is not valid UTF-8") from None
        except msgspec.MsgspecError as error:
            raise invalid(error, "the body") from None
        except RecursionError:
            raise InvalidRequest("the body is nested too deeply") from None

    def on_connection_close(self) -> None:
        """Cancel the call of a client that has disconnected."""
        super().on_connection_close()
        self._is_disconnected = True
        if self._work is not None:
            self._work.cancel()

    # -- answers ---------------------------------------------------------------------------------

    async def _send_events(self, events: EventStream) -> None:
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Accel-Buffering", "no")
        iterator = events.__aiter__()
        following: asyncio.Future[Any] | None = None
        try:
            await _next(iterator)  # READY
            following = asyncio.ensure_future(_next(iterator))
            # A call that fails immediately gets an ordinary error response.
            await asyncio.wait([following], timeout=FIRST_EVENT_TIMEOUT)
            if following.done() and not isinstance(following.exception(), (StopAsyncIteration, type(None))):
                following.result()
            await self.flush()
            while True:
                done, _ = await asyncio.wait([following], timeout=KEEP_ALIVE_INTERVAL)
                if not done:
                    self.write(": keep-alive\n\n")
                    await self.flush()
                    continue
                try:
                    self._write_event(*following.result())
                except StopAsyncIteration:
                    break
                except StreamClosedError:
                    raise
                except Exception as error:
                    self._log_failure(error)
                    self._write_event("failure", describe(error)[1])
                    break
                await self.flush()
                following = asyncio.ensure_future(_next(iterator))
            await self.finish(set_content_type="text/event-stream")
        except StreamClosedError:
            self._is_disconnected = True
        finally:
            if following is not None and not following.done():
                following.cancel()
                await asyncio.wait([following])
            close = getattr(iterator, "aclose", None)
            if close is not None:
                await close()

    def _write_event(self, name: str, event: msgspec.Struct) -> None:
        self.write(b"event: " + name.encode() + b"\ndata: " + _ENCODER.encode(event) + b"\n\n")

    async def _send_bytes(self, result: Bytes) -> None:
        iterator = iter(result.chunks)
        try:
            first = await blocking(next, iterator, None)
            self.set_status(result.status)
            self.set_header("Content-Type", result.content_type)
            self.set_header("Content-Disposition", f"attachment; filename*=UTF-8''{quote(result.name, safe='')}")
            self.set_header("Cache-Control", "no-store")
            self.set_header("X-Content-Type-Options", "nosniff")
            for name, value in result.headers.items():
                self.set_header(name, value)
            if result.size is not None:
                self.set_header("Content-Length", str(result.size))
            chunk = first
            while chunk is not None:
                self.write(chunk)
                # Read the next part while this one is sent.
                following = asyncio.ensure_future(blocking(next, iterator, None))
                try:
                    await self.flush()
                finally:
                    await asyncio.wait([following])
                chunk = following.result()
            await self.finish(set_content_type=result.content_type)
        except StreamClosedError:
            self._is_disconnected = True
        finally:
            await blocking(result.close)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, web.HTTPError):
            status = error.status_code
            answer = ErrorAnswer(error.log_message or error.reason or "", REASONS.get(status, "error"))
        else:
            status, answer = describe(error)
            self._log_failure(error)
        self._refused = None if getattr(error, "is_logged", False) else answer
        if self._headers_written:
            # Too late for an error response. Closing the connection early is the only way to report the error.
            if self.request.connection is not None:
                self.request.connection.stream.close()  # type: ignore[attr-defined]
            return
        self.clear()
        self.set_cors_headers()
        self.set_status(status)
        if (seconds := getattr(error, "retry_after", None)) is not None:
            self.set_header("Retry-After", str(seconds))
        self.finish(_ENCODER.encode(answer))

    def _log_failure(self, error: BaseException) -> None:
        status, answer = describe(error)
        if status == 500:
            self.log.error("agentbox: %s %s failed", self.request.method, self.request.path, exc_info=error)
        else:
            self.log.debug("agentbox: %s %s: %s", self.request.method, self.request.path, answer.message)

    def _must_drain(self) -> bool:
        """Return whether the rest of the body must be read before the response is sent.

        If it were left unread, the connection would be reset, and a client still sending would lose the response.
        """
        headers = self.request.headers
        size = headers.get("Content-Length", "")
        if self._is_complete or "Expect" in headers or not size.isdigit():
            return False
        return self._received < min(int(size), _MAX_DRAINED)

    def finish(self, *args: Any, **kwargs: Any) -> asyncio.Future[None]:
        """Send the response. If the body is not complete yet, read it first, and close the connection afterwards."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        if self._deferred_finish is not None:
            return done  # Tornado finishes a request that seems to be forgotten
        if not self._must_drain():
            return super().finish(*args, **kwargs)
        self.set_header("Connection", "close")
        self._deferred_finish = partial(super().finish, *args, **kwargs)
        return done

    def on_finish(self) -> None:
        """Write a refusal to the audit log."""
        super().on_finish()
        if self._refused is not None and self.route is not None:
            record_refusal(self, self.route.operation.__name__, self._refused, self.path_kwargs.get("id"))


class UnknownHandler(AgentboxHandler):
    """Handler for paths that do not exist in the API."""

    async def _answer(self) -> None:
        raise web.HTTPError(404, f"{self.request.path:.200} is not a path of this API; see openapi.json")

    get = head = post = put = patch = delete = web.authenticated(_answer)


class BrokenHandler(APIHandler):
    """Handler for the whole API if the extension's configuration is invalid."""

    auth_resource = RESOURCE

    def initialize(self, error: Exception) -> None:
        self._error = error

    @web.authenticated
    def get(self) -> None:
        """Report what is wrong."""
        answer = ErrorAnswer(
            f"sandboxes are not available on this server: {self._error}",
            "invalid_config",
            setting=getattr(self._error, "setting", None),
        )
        self.set_status(503)
        self.finish(_ENCODER.encode(answer))

    head = post = put = patch = delete = get


def _retrieve(work: asyncio.Future[Any]) -> None:
    if not work.cancelled():
        work.exception()  # reported to the client, if it is still connected


@cache
def _lists(query: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of a query's parameters that may be repeated. Cached, because computing them is slow."""
    fields = msgspec.structs.fields(query)
    return frozenset(item.encode_name for item in fields if item.default_factory is list)


async def _next(iterator: Any) -> Any:
    return await iterator.__anext__()


def _verb(route: Route) -> Callable[..., Awaitable[None] | None]:
    async def method(self: AgentboxHandler, **params: str) -> None:
        await self.serve(route, params)

    method.__name__ = route.verb
    method.__doc__ = route.summary
    wrapped: Callable[..., Awaitable[None] | None] = web.authenticated(authorized(route.action, RESOURCE)(method))
    return wrapped


def make_handlers(table: Iterable[Route], root: str) -> list[tuple[str, type[AgentboxHandler]]]:
    """Return Tornado handlers for a table of routes.

    Parameters
    ----------
    table : iterable of Route
    root : str
        Path of the API, including the server's base URL.
    """
    paths: dict[str, list[Route]] = {}
    for route in table:
        paths.setdefault(route.path, []).append(route)
    handlers = []
    for path, routes in paths.items():
        pattern = re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path)
        names: dict[str, Any] = {route.verb: _verb(route) for route in routes}
        names["routes"] = {route.verb: route for route in routes}
        handlers.append((re.escape(root) + pattern, type("AgentboxHandler", (AgentboxHandler,), names)))
    return handlers
