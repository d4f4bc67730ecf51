"""Implement the clients of a ``kernels.front.front``: those that connect, and those in this process.

Each connected client has its own bounded buffer. A client that does not read loses messages, and cannot block others
for long. This is why ZMTP is implemented here instead of using libzmq. libzmq cannot report how much it buffers for
which client, and would cost a thread and two context switches for each message.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import TYPE_CHECKING, Protocol

from jupyter_agentbox.guest import zmtp

if TYPE_CHECKING:
    from .channels import Channel

MAX_PEERS = 256
#: Maximum number of frames in one message. A kernel accepts one more, for the client's identity.
MAX_FRAMES = 4095
#: Bytes buffered for one client from which they are written immediately, not at the end of the event loop's iteration.
FLUSH_SIZE = 64 * 1024
#: Bytes queued for one client before the kernel has to wait. Only little should be queued when a cell is answered:
#: nbclient drops everything that it has not read four seconds later.
WRITE_BUFFER = 128 * 1024


def cut(frames: list[bytes]) -> list[bytes | memoryview]:
    """Encode a message: a small one as one piece, a large one as pieces in which large frames are not copied."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes] = []
    for part in zmtp.split(frames):
        if len(part) <= FLUSH_SIZE:
            small.append(part)
            continue
        pieces.append(b"".join(small))
        small = []
        view = memoryview(part)
        pieces.extend(view[start : start + WRITE_BUFFER] for start in range(0, len(part), WRITE_BUFFER))
    if small:
        pieces.append(b"".join(small))
    return pieces


class LocalPeer(Protocol):
    """A client in this process, which exchanges the same messages as any other, without a socket.

    Its methods must not block. It accepts messages immediately, so it never delays others, and decides itself how many
    to keep.
    """

    @property
    def identity(self) -> bytes:
        """The client's routing identity."""

    def on_message(self, channel: str, frames: list[bytes]) -> None:
        """Handle a message of the kernel: every iopub message, and those addressed to this client."""

    def on_kernel(self) -> None:
        """Handle a change of the kernel: another one was attached, or it has ended. See the front's attributes."""


class Peer(asyncio.Protocol):
    """One client's connection to one channel.

    Attributes
    ----------
    identity : bytes
        The client's routing identity; empty until the handshake is complete.
    topics : list of bytes
        The client's subscriptions.
    """

    transport: asyncio.Transport

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._handshake = zmtp.Handshake()
        self._decoder = zmtp.Decoder(channel.front.max_message, MAX_FRAMES)
        self.identity = b""
        self.topics: list[bytes] = []
        self.lost = 0
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._is_amid_message = False
        self._turn = asyncio.Lock()  # serializes delivery
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        channel = self.channel
        if len(channel.peers) >= MAX_PEERS:
            transport.abort()
            return
        channel.peers.add(self)
        if channel.is_paused:
            transport.pause_reading()
        transport.write(zmtp.greeting() + zmtp.ready(channel.socket_type))

    def data_received(self, data: bytes) -> None:
        try:
            if not self.identity:
                rest = self._handshake.feed(data)
                if rest is None:
                    return
                data = rest
                self._introduce(self._handshake.identity)
            for frames in self._decoder.feed(data):
                self.channel.on_frames(self, frames)
        except zmtp.ZmtpError as error:
            self.channel.front.log.warning("front: a client of %s was disconnected: %s", self.channel.name, error)
            self.transport.abort()

    def _introduce(self, identity: bytes) -> None:
        self.identity = identity or b"\0" + uuid.uuid4().bytes
        # The newest connection with an identity wins, as with ROUTER_HANDOVER, because a page reconnects before its old
        # socket is closed.
        self.channel.by_identity[self.identity] = self

    def connection_lost(self, exc: Exception | None) -> None:
        channel = self.channel
        channel.peers.discard(self)
        if channel.by_identity.get(self.identity) is self:
            del channel.by_identity[self.identity]
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        if self.lost:
            lost, self.lost = self.lost, 0
            front = self.channel.front
            if self.topics:
                text = f"this client did not read for {front.slow_client_timeout:g} s and lost {lost} messages"
                self.write(zmtp.encode(front.stream_message(text)))

    def write(self, data: bytes) -> None:
        """Write an encoded message, whatever is queued before it.

        Messages of one iteration of the event loop are written in one system call, because each call competes for the
        GIL.
        """
        if not self._pending and not self._is_amid_message:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(data)
        self._pending_size += len(data)
        if self._pending_size > FLUSH_SIZE:
            self._flush()

    def _flush(self) -> None:
        if self._is_amid_message:
            return
        pending, self._pending, self._pending_size = self._pending, [], 0
        if pending:
            self.transport.write(pending[0] if len(pending) == 1 else b"".join(pending))

    async def deliver(self, pieces: list[bytes | memoryview]) -> None:
        """Write a message from :func:`cut`, and wait for a client that still reads.

        A client that does not loses the message.

        Each of several pieces waits until the previous one has left room, because a transport copies data that it has
        no room for.
        """
        async with self._turn:
            if not self._writable.is_set() and not await self._wait():
                if not self.lost:
                    self.channel.front.log.warning(
                        "front: a client of %s has not read for %g s; its messages are dropped until it reads again",
                        self.channel.name,
                        self.channel.front.slow_client_timeout,
                    )
                self.lost += 1
            elif len(pieces) == 1:
                self.write(bytes(pieces[0]))
            else:
                await self._write_pieces(pieces)

    async def _write_pieces(self, pieces: list[bytes | memoryview]) -> None:
        self._flush()
        self._is_amid_message = True
        rest = deque(pieces)
        try:
            while rest and (self._writable.is_set() or await self._wait()):
                if self.transport.is_closing():
                    return
                self.transport.write(rest.popleft())
        finally:
            # A message that was begun is written completely, even if the client stops reading.
            self._is_amid_message = False
            if rest and not self.transport.is_closing():
                self.transport.write(b"".join(rest))
            self._flush()

    async def _wait(self) -> bool:
        if self.lost:
            return False
        while True:
            size = self.transport.get_write_buffer_size()
            try:
                await asyncio.wait_for(self._writable.wait(), self.channel.front.slow_client_timeout)
                return True
            except asyncio.TimeoutError:
                pass
            if self.transport.get_write_buffer_size() >= size:
                return False
