"""Carry allowed bytes between a stream of the guest and a server, and check the TLS hello.

A raw connection is checked once, at its TLS hello. :mod:`.http_forward` handles plain HTTP. This module knows nothing
of policy: :mod:`.gate` passes it connections, or the refusal to send to the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from jupyter_agentbox.errors import LinkClosed

from . import http1
from .rules import normal_name, printable
from .wire import WireError, client_hello_name, may_be_tls

PIECE = 64 * 1024
#: Fatal alert "unrecognized_name". With it, programs report the cause instead of "connection closed".
TLS_ALERT = b"\x15\x03\x01\x00\x02\x02\x70"


class Stream(Protocol):
    """Methods used of :class:`jupyter_agentbox.sandbox.link.link.Stream`."""

    header: dict[str, Any]

    async def read(self) -> bytes:
        """Return the next bytes; empty at the guest's EOF."""

    async def write(self, data: bytes) -> None:
        """Send data as fast as the guest reads it."""

    async def write_eof(self) -> None:
        """Signal that nothing more will be written."""

    def reset(self, reason: str = "") -> None:
        """Close both directions. Idempotent."""


class Refused(Exception):
    """A connection or request is refused; the text is the sentence for the guest.

    Parameters
    ----------
    sentence : str
        Printable ASCII text.
    status : int
        HTTP status: 403 for a decision, 400 and 5xx for failures.
    host, port
        Requested host and port, as far as they are known.
    detail : dict, optional
        Details for the audit log only.
    """

    def __init__(
        self, sentence: str, status: int = 403, host: str = "", port: int = 0, detail: dict[str, Any] | None = None
    ) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.status = status
        self.host = host
        self.port = port
        self.detail = detail


class Source:
    """Buffered reader for one side of a connection."""

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        self.buffer = bytearray()
        self.has_eof = False
        self._read = read

    async def fill(self) -> bool:
        """Read one more piece into the buffer. Return False at EOF."""
        if not self.has_eof:
            data = await self._read()
            self.buffer += data
            self.has_eof = not data
        return not self.has_eof

    async def read(self) -> bytes:
        """Return the buffered bytes, or the next piece; empty at EOF."""
        if not self.buffer:
            await self.fill()
        return self.take(len(self.buffer))

    def take(self, count: int) -> bytes:
        """Remove and return bytes from the front of the buffer."""
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    async def head(self, timeout: float) -> bytes | None:
        """Return an HTTP head, or None if EOF came before its first byte."""

        async def find() -> bytes | None:
            known = 0
            while True:
                size = http1.find_head(self.buffer, known)
                if size is not None:
                    return self.take(size)
                known = len(self.buffer)
                if not await self.fill():
                    if self.buffer:
                        raise WireError("the HTTP head is incomplete")
                    return None

        return await asyncio.wait_for(find(), timeout)


class Upstream:
    """Connection to a server that has been allowed, logged and opened.

    Parameters
    ----------
    host, port, rule
        Allowed host and port, and the pattern that allowed them.
    address : str
        Address of the connection.
    reader, writer
        Streams of the connection.
    on_close : callable
        Called once, with this object, when the connection closes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rule: str | None,
        address: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_close: Callable[[Upstream], None],
    ) -> None:
        self.host = host
        self.port = port
        self.rule = rule
        self.address = address
        self.writer = writer
        self.source = Source(self._read)
        self.bytes_up = 0
        self.bytes_down = 0
        self.started = self.last_used = time.monotonic()
        self._reader = reader
        self._on_close = on_close
        self._is_closed = False

    async def _read(self) -> bytes:
        data = await self._reader.read(PIECE)
        self.bytes_down += len(data)
        self.last_used = time.monotonic()
        return data

    async def write(self, data: bytes) -> None:
        """Send bytes, and wait while the server does not read them."""
        self.bytes_up += len(data)
        self.last_used = time.monotonic()
        self.writer.write(data)
        await self.writer.drain()
        self.last_used = time.monotonic()

    async def finish(self, timeout: float) -> None:
        """Close after all written bytes have been sent or the timeout has expired."""
        self.writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self.writer.wait_closed(), timeout)
        self.close()

    def close(self) -> None:
        """Close immediately. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.writer.transport.abort()
            self._on_close(self)


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of the gate, in seconds.

    Parameters
    ----------
    head : float
        For the first bytes of the guest: HTTP head, SOCKS request, TLS hello.
    slot : float
        For another connection to end, if the sandbox has as many as it may have.
    lookup, connect : float
        For one lookup, and for connecting to one address.
    idle, half_closed : float
        For a connection without traffic that is open in both directions, or in only one.
    keep_alive, reuse : float
        Between two HTTP requests, and between two requests to the HTTP proxy while other connections wait for a slot.
    linger : float
        For the guest to read a refusal before the connection is closed.
    """

    head: float = 30.0
    slot: float = 30.0
    lookup: float = 10.0
    connect: float = 10.0
    idle: float = 3600.0
    half_closed: float = 60.0
    keep_alive: float = 90.0
    reuse: float = 3.0
    linger: float = 5.0


async def finish(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, so that every exception is retrieved."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def send_and_close(stream: Stream, data: bytes, timeout: float) -> None:
    """Send final data, and give the guest time to read it before closing."""

    async def send() -> None:
        await stream.write(data)
        await stream.write_eof()
        while await stream.read():
            pass

    with contextlib.suppress(asyncio.TimeoutError, LinkClosed):
        await asyncio.wait_for(send(), timeout)
    stream.reset()


async def check_hello(client: Source, host: str, port: int, timeout: float) -> None:
    """Accept only a TLS hello for ``host``. On ports other than 443, accept protocols other than TLS too.

    The hello stays in the buffer. Raises :class:`Refused`.
    """

    async def hello() -> str | None:
        while True:
            if port != 443 and not may_be_tls(bytes(client.buffer[:2])):
                return None
            name = client_hello_name(bytes(client.buffer))
            if name is not None:
                return name
            if not await client.fill():
                if not client.buffer:
                    return None  # nothing was sent, so there is nothing to check
                raise WireError("the TLS hello is incomplete")

    try:
        if port == 443:
            name = await asyncio.wait_for(hello(), timeout)
        else:
            # The server may speak first here, so the client may stay silent indefinitely.
            if not client.buffer:
                await client.fill()
            name = await asyncio.wait_for(hello(), timeout)
    except asyncio.TimeoutError:
        raise Refused(f"{host}:{port} was closed: no TLS hello within {timeout:g} s", 403, host, port) from None
    except WireError as error:
        raise Refused(f"{host}:{port} was closed: {error}", 403, host, port) from None
    if name is None:
        return
    try:
        is_same = normal_name(name) == host
    except ValueError:
        is_same = False
    if not is_same:
        shown = printable(name)
        why = f"the TLS server name is {shown}, not {host}" if name else "the TLS hello has no server name"
        raise Refused(f"{host}:{port} was closed: {why}", 403, host, port, {"sni": shown})


class KeptOpen:
    """Connections that are open but unused: between two requests, or closed by the server and not by the guest.

    While others wait for a slot, those that have been unused for longest are closed.

    Parameters
    ----------
    is_full : callable
        Returns whether a connection waits for a slot.
    """

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self.is_full = is_full
        self._idle: dict[Callable[[], None], None] = {}

    def add(self, close: Callable[[], None]) -> None:
        """Add an idle connection, which may be closed immediately. ``close`` returns its slot."""
        self._idle[close] = None
        self.make_room()

    def discard(self, close: Callable[[], None]) -> None:
        """Remove a connection that is no longer idle, if it is there."""
        self._idle.pop(close, None)

    def make_room(self) -> None:
        """Close as many connections as others wait for."""
        while self._idle and self.is_full():
            close = next(iter(self._idle))
            del self._idle[close]
            close()


async def relay(
    client: Source,
    stream: Stream,
    upstream: Upstream,
    timeouts: Timeouts,
    check: Callable[[], Awaitable[None]] | None = None,
    kept: KeptOpen | None = None,
) -> None:
    """Carry bytes both ways until both sides are done.

    Parameters
    ----------
    client, stream
        The guest's side.
    upstream : Upstream
        The server's side.
    timeouts : Timeouts
        Limits on the time without traffic.
    check : callable, optional
        Must succeed before anything is sent to the server. Data from the server is carried in the meantime.
    kept : KeptOpen, optional
        Connections that may be closed, with this one once the server has closed it. Without it, this one is not.
    """

    async def up() -> None:
        if check is not None:
            await check()
        while data := await client.read():
            await upstream.write(data)
        if upstream.writer.can_write_eof():
            upstream.writer.write_eof()

    async def down() -> None:
        while data := await upstream.source.read():
            await stream.write(data)
        await stream.write_eof()

    sending, receiving = asyncio.create_task(up()), asyncio.create_task(down())
    tasks = pending = {sending, receiving}

    def close() -> None:
        if time.monotonic() - upstream.last_used >= timeouts.reuse:  # else: the guest still sends
            sending.cancel()
            upstream.close()  # its slot is free now

    try:
        while pending:
            end = upstream.last_used + (timeouts.idle if len(pending) == 2 else timeouts.half_closed)
            pause = left = end - time.monotonic()
            if kept is not None and pending == {sending}:
                # Many programs keep a connection that the server has closed until they need the next one.
                until_unused = upstream.last_used + timeouts.reuse - time.monotonic()
                if until_unused <= 0:
                    kept.add(close)
                else:
                    pause = min(left, until_unused)
            done, pending = await asyncio.wait(pending, timeout=max(pause, 0), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():
                    task.result()
            if not done and left <= 0:
                raise asyncio.TimeoutError
    finally:
        if kept is not None:
            kept.discard(close)
        await finish(tasks)
    await upstream.finish(timeouts.linger)
