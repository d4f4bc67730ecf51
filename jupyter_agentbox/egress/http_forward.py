"""Forward plain HTTP and check each request, so that a kept-alive connection cannot bypass the rules.

This serves the proxy, where each request names its own host, and connections to port 80, which lead to one host.
:mod:`.http1` parses the bytes, :mod:`.forward` provides the two sides, and :mod:`.gate` decides.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from . import http1
from .forward import KeptOpen, Refused, Source, Stream, Timeouts, Upstream, finish, relay, send_and_close
from .rules import is_malformed, normal_name, printable
from .wire import WireError

#: Decides on a host and port and connects to it.
Open = Callable[[str, int], Awaitable[Upstream]]


class HttpForwarder:
    """Server for the HTTP requests of one connection of the guest, handled one after the other.

    Parameters
    ----------
    client, stream
        The guest's side.
    open_upstream : callable
        Decides and connects; raises :class:`Refused`.
    is_allowed : callable
        Returns whether an open connection may still be used.
    timeouts : Timeouts
        Timeouts of every wait.
    fixed : tuple of (str, int), optional
        The one host and port that the connection leads to. Without it this is a proxy.
    connect : callable, optional
        Serves ``CONNECT host:port``, which takes over the connection.
    kept : KeptOpen, optional
        Connections that may be closed between two requests, with this one. Without it, this one is not closed.
    """

    def __init__(
        self,
        client: Source,
        stream: Stream,
        open_upstream: Open,
        is_allowed: Callable[[str, int], bool],
        timeouts: Timeouts,
        fixed: tuple[str, int] | None = None,
        connect: Callable[[str, int], Awaitable[None]] | None = None,
        kept: KeptOpen | None = None,
    ) -> None:
        self._client = client
        self._stream = stream
        self._open = open_upstream
        self._is_allowed = is_allowed
        self._timeouts = timeouts
        self._fixed = fixed
        self._connect = connect
        self._kept = kept or KeptOpen(lambda: False)
        self._upstream: Upstream | None = None
        self._is_sent = False
        #: Method of the current request; a refusal of HEAD has no body.
        self.method = "GET"
        #: Whether an answer has begun, in which case a refusal can no longer be sent.
        self.has_answered = False

    async def run(self, upstream: Upstream | None = None) -> None:
        """Serve requests until the guest is done. Raises :class:`Refused` and WireError."""
        self._upstream = upstream
        try:
            while (head := await self._client.head(self._timeouts.head)) is not None:
                self.has_answered = False
                request = http1.parse_request(head)
                self.method = request.method
                if request.method == "CONNECT":
                    await self._serve_connect(request)
                    return
                if not await self._serve(request):
                    return
        finally:
            if self._upstream is not None:
                self._upstream.close()

    async def _serve_connect(self, request: http1.Request) -> None:
        if self._connect is None or request.framing != http1.Framing():
            raise WireError("CONNECT is not supported on this connection")
        host, port = http1.split_authority(request.target, 0)
        if self._upstream is not None:
            self._upstream.close()
        await self._connect(host, port)

    def _target(self, request: http1.Request) -> tuple[str, int, str]:
        """Return host, port and origin form. The URL, the Host header and a fixed target must agree."""
        if self._fixed is not None and (request.target.startswith("/") or request.target == "*"):
            host, port, path = *self._fixed, request.target
        elif request.target.startswith("/"):
            raise WireError("this is a proxy: the request needs an absolute URL")
        else:
            host, port, path = http1.split_url(request.target)
        expected = self._fixed or (host, port)
        named = [(host, port)]
        if header := http1.host_of(request):
            named.append(http1.split_authority(header, 80))
        for claim in named:
            if is_malformed(claim[0]):
                raise Refused(f"{printable(claim[0])} is not a host name", 400, printable(claim[0]), claim[1])
            if not _is_same(claim, expected):
                wanted, got = f"{printable(expected[0])}:{expected[1]}", f"{printable(claim[0])}:{claim[1]}"
                why = f"{got} is not allowed on a connection to {wanted}: the request names a different host"
                raise Refused(why, 403, printable(claim[0]), claim[1], {"connection": wanted})
        if port == 443:
            raise Refused(f"{printable(host)}:443 accepts only TLS, not plain HTTP", 403, printable(host), port)
        return host, port, path

    async def _serve(self, request: http1.Request) -> bool:
        host, port, path = self._target(request)
        upstream = self._upstream
        if upstream is not None and (
            not _is_same((host, port), (upstream.host, upstream.port))
            or not self._is_allowed(upstream.host, port)
            or upstream.source.has_eof
        ):
            upstream.close()
            upstream = self._upstream = None
        if upstream is None:
            upstream = self._upstream = await self._open(host, port)
        authority = upstream.host if port == 80 else f"{upstream.host}:{port}"
        response = await self._exchange(request, http1.forwarded(request, path, authority), upstream)
        if response.status == 101:
            await relay(self._client, self._stream, upstream, self._timeouts)
            return False
        is_last = response.is_last or request.is_last
        if is_last or not (self._client.buffer or await self._wait_for_request(upstream)):
            upstream.close()  # its slot is free before the guest has closed its side
            await send_and_close(self._stream, b"", self._timeouts.linger)
            return False
        return True

    async def _wait_for_request(self, upstream: Upstream) -> bool:
        """Wait for the first bytes of the next request, or EOF. Return False if the connection must be closed."""
        fill = asyncio.create_task(self._client.fill())

        def close() -> None:
            if not fill.done():
                fill.cancel()
                upstream.close()

        timer = asyncio.get_running_loop().call_later(self._timeouts.reuse, self._kept.add, close)
        try:
            done, _ = await asyncio.wait((fill,), timeout=self._timeouts.keep_alive)
        finally:
            timer.cancel()
            self._kept.discard(close)
            await finish((fill,))
        return bool(done) and not fill.cancelled()

    async def _exchange(self, request: http1.Request, head: bytes, upstream: Upstream) -> http1.Response:
        """Send a request and carry its answer back at the same time, because either may be long."""
        self._is_sent = False
        receive = asyncio.create_task(self._receive(request, upstream))
        send = asyncio.create_task(self._send(request, head, upstream))
        pending = {receive, send}
        try:
            while not receive.done():
                left = max(upstream.last_used + self._timeouts.idle - time.monotonic(), 0)
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # an error in either task ends both
                if not done and upstream.last_used + self._timeouts.idle <= time.monotonic():
                    raise asyncio.TimeoutError
            response = receive.result()
            if not self._is_sent:
                response.is_last = True  # the start of the next request is unknown
            return response
        finally:
            await finish((receive, send))

    async def _send(self, request: http1.Request, head: bytes, upstream: Upstream) -> None:
        await upstream.write(head)
        await self._carry(self._client, http1.BodyReader(request.framing), upstream.write)
        self._is_sent = True
        # Keep reading, to notice when the guest disconnects while the server prepares its answer.
        if not self._client.buffer:
            await self._client.fill()

    async def _receive(self, request: http1.Request, upstream: Upstream) -> http1.Response:
        while True:
            try:
                head = await upstream.source.head(self._timeouts.idle)
                if head is None:
                    raise WireError("the server closed the connection without a response")
                response = http1.parse_response(head, request.method)
            except asyncio.TimeoutError:
                raise
            except (WireError, OSError) as error:
                host, port = upstream.host, upstream.port
                raise Refused(f"{host}:{port} failed: {error}", 502, host, port) from None
            self.has_answered = True
            if response.status >= 200 and self._kept.is_full():
                response = http1.as_last(response)  # so that the guest sends no other request on this connection
            await self._stream.write(response.raw)
            if response.status == 101 and not request.is_upgrade:
                raise WireError("the server changed the protocol without a request")
            if response.status >= 200 or response.status == 101:
                break
        await self._carry(upstream.source, http1.BodyReader(response.framing), self._stream.write)
        return response

    async def _carry(self, source: Source, body: http1.BodyReader, write: Callable[[bytes], Awaitable[None]]) -> None:
        while not body.is_done:
            if not source.buffer and not await source.fill():
                if body.ends_with_connection:
                    return
                raise WireError("an HTTP body is incomplete")
            if count := body.feed(source.buffer):
                await write(source.take(count))


def _is_same(claim: tuple[str, int], expected: tuple[str, int]) -> bool:
    if claim == expected:
        return True
    try:
        return (normal_name(claim[0]), claim[1]) == (normal_name(expected[0]), expected[1])
    except ValueError:
        return False
