"""Send calls to one server: JSON in both directions, event streams, uploads and downloads.

No call is sent twice, no redirect is followed, and neither proxies nor tokens are taken from the environment's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

import httpx
import msgspec

from jupyter_agentbox.client.blocking import AsyncChunks, acall
from jupyter_agentbox.client.errors import ApiError, TimedOut, UnexpectedAnswer, Unreachable
from jupyter_agentbox.client.find import Server, find_server
from jupyter_agentbox.client.wire import (
    MAX_ANSWER,
    SLACK,
    STREAM_TIMEOUT,
    Decode,
    EventReader,
    check_digest,
    decode_answer,
    decode_error,
    make_query,
)

T = TypeVar("T")
#: Timeouts for connecting, and for the server to accept sent data, in seconds.
CONNECT_TIMEOUT, WRITE_TIMEOUT = 10.0, 60.0


class AsyncStream(Generic[T]):
    """Stream of live events.

    Unless you read it to the end, close it or use it in a ``with`` statement. This ends its call.
    """

    def __init__(self, response: httpx.Response, reader: EventReader, place: str) -> None:
        self._response, self._reader, self._place = response, reader, place
        self._chunks = response.aiter_raw()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        try:
            while not self._reader.found:
                if self._response.is_closed:
                    raise StopAsyncIteration
                async for chunk in self._chunks:
                    # The answer ends after the last event. Closing the connection before that would cancel the call.
                    if not self._reader.is_done:
                        self._reader.feed(chunk)
                    break
                else:
                    self._reader.end()
                    raise StopAsyncIteration
            event = self._reader.found.popleft()
            if isinstance(event, ApiError):
                raise event
        except httpx.HTTPError as error:
            await self.aclose()
            raise _failure(error, self._place) from error
        except BaseException:
            await self.aclose()
            raise
        found: T = event
        return found

    async def aclose(self) -> None:
        """Close the stream. A command or code that is running for it is ended."""
        self._reader.found.clear()
        await self._response.aclose()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncConnection:
    """Connection to one server. Without an address, the first call looks for a server.

    Parameters
    ----------
    url, token : str, optional
        See :func:`~jupyter_agentbox.client.find.find_server`.
    """

    def __init__(self, url: str | None, token: str | None) -> None:
        self._named = (url, token)
        self._server: Server | None = None
        self._http: httpx.AsyncClient | None = None
        self._is_closed = False

    async def server(self) -> Server:
        """Return the server. Raises NotFound, InvalidRequest."""
        if self._server is None:
            self._server = await acall(find_server, *self._named)
        return self._server

    async def _client(self) -> httpx.AsyncClient:
        if self._is_closed:
            raise ApiError("the client is closed")
        if self._http is None:
            server = await self.server()
            verify = await acall(server.verify)
            self._http = self._http or httpx.AsyncClient(
                headers=server.headers(), verify=verify, follow_redirects=False, trust_env=False
            )
        return self._http

    async def aclose(self) -> None:
        """Close the connection. Idempotent."""
        self._is_closed = True
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def send(
        self,
        verb: str,
        path: str,
        *,
        query: msgspec.Struct | None = None,
        body: msgspec.Struct | None = None,
        content: bytes | AsyncChunks | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = SLACK,
    ) -> httpx.Response:
        """Send a call once, and return its answer with the body unread. Raises the error of an error answer."""
        http, server = await self._client(), await self.server()
        sent = dict(headers or {})
        if body is not None:
            content = msgspec.json.encode(body)
            sent["Content-Type"] = "application/json"
        request = http.build_request(
            verb,
            server.root + path,
            params=make_query(query) or None,
            content=content,
            headers=sent,
            timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT, write=WRITE_TIMEOUT),
        )
        try:
            response = await http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _failure(error, server.url) from error
        if response.is_success:
            return response
        try:
            data = await _read(response, server.url)
        finally:
            await response.aclose()
        raise decode_error(response.status_code, data, server.url)

    async def call(
        self,
        verb: str,
        path: str,
        answer: type[T],
        *,
        query: msgspec.Struct | None = None,
        body: msgspec.Struct | None = None,
        content: bytes | AsyncChunks | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 0.0,
    ) -> T:
        """Make a call and return its answer. `timeout` is the server's own time for the call, in seconds."""
        return await self.read(
            await self.send(
                verb, path, query=query, body=body, content=content, headers=headers, timeout=timeout + SLACK
            ),
            answer,
        )

    async def read(self, response: httpx.Response, answer: type[T]) -> T:
        """Read an answer completely, and decode it."""
        try:
            data = await _read(response, (await self.server()).url)
        finally:
            await response.aclose()
        found: T = decode_answer(data, answer)
        return found

    async def events(
        self,
        verb: str,
        path: str,
        decoders: Mapping[str, Decode],
        last: str,
        *,
        query: msgspec.Struct | None = None,
        body: msgspec.Struct | None = None,
    ) -> AsyncStream[Any]:
        """Open a stream of events."""
        response = await self.send(verb, path, query=query, body=body, timeout=STREAM_TIMEOUT)
        return AsyncStream(response, EventReader(decoders, last), (await self.server()).url)

    async def download(
        self,
        path: str,
        *,
        query: msgspec.Struct | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of an answer as they arrive. Verifies its length, and its `Content-Digest` if it has one."""
        response = await self.send("GET", path, query=query, headers=headers, timeout=STREAM_TIMEOUT)
        try:
            announced, digest = response.headers.get("Content-Digest"), hashlib.sha256()
            async for chunk in response.aiter_raw():
                if announced is not None:
                    digest.update(chunk)
                yield chunk
            if announced is not None:
                check_digest(announced, digest.digest())
        except httpx.HTTPError as error:
            raise _failure(error, (await self.server()).url) from error
        finally:
            await response.aclose()


async def _read(response: httpx.Response, place: str) -> bytes:
    data = bytearray()
    try:
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > MAX_ANSWER:
                raise UnexpectedAnswer(f"the response of {place} is too large", status=response.status_code)
    except httpx.HTTPError as error:
        raise _failure(error, place) from error
    return bytes(data)


def _failure(error: httpx.HTTPError, place: str) -> ApiError:
    if isinstance(error, httpx.TimeoutException):
        return TimedOut(f"{place} did not answer in time", reason="timeout")
    return Unreachable(f"{place} cannot be reached: {str(error) or type(error).__name__}", reason="unreachable")
