"""Implement one endpoint of a ``kernels.front.front``: its clients, and the queue of messages for the kernel."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.guest import zmtp
from jupyter_agentbox.spec import MIB

from .cell_commands import HostCell
from .peers import LocalPeer, Peer, cut

if TYPE_CHECKING:
    from .front import Front, Kernel

MAX_SUBSCRIPTIONS = 256
MAX_QUEUED = 1000
MAX_QUEUED_BYTES = 16 * MIB


class Channel:
    """One endpoint: its clients, and the queue of messages that the kernel has not accepted yet."""

    def __init__(self, front: Front, name: str, port: int, socket_type: bytes) -> None:
        self.front = front
        self.name = name
        self.socket_type = socket_type
        self.path = front.directory / f"s-{port}"
        self.alias = front.directory / f"k-{port}"
        self.peers: set[Peer] = set()
        self.by_identity: dict[bytes, Peer] = {}
        self.is_paused = self.is_sending = False
        self.on_frames: Callable[[Peer, list[bytes]], None] = {
            b"ROUTER": self._enqueue,
            b"XPUB": self._subscribe,
            b"REP": self._beat,
        }[socket_type]
        self._queue: deque[list[bytes]] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._answering: asyncio.Task[None] | None = None

    async def open(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(str(self.path))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Peer(self), sock=listener)
        self.link()

    def link(self) -> None:
        """Create the address that clients use.

        KernelManager removes "its" ipc files at every restart. It removes this alias and not the socket.
        """
        with suppress(FileExistsError):
            self.alias.symlink_to(self.path.name)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers):
            peer.transport.abort()

    def _enqueue(self, peer: Peer | LocalPeer, frames: list[bytes]) -> None:
        if not self.front.answer_parked(self.name, peer, frames):
            self.put(peer.identity, frames)

    def put(self, identity: bytes, frames: list[bytes]) -> None:
        """Queue a client's message for the kernel."""
        self._track(identity, frames)
        self._queue.append([identity, *frames])
        self._queued_bytes += sum(map(len, frames))
        self._wake.set()
        if not self.is_paused and (len(self._queue) > MAX_QUEUED or self._queued_bytes > MAX_QUEUED_BYTES):
            self._pause(True)

    def _track(self, identity: bytes, frames: list[bytes]) -> None:
        if self.name != "stdin" and self._read_host_cell(identity, frames) is None:
            if self.front.cell.track_request(frames, identity, self.name) and identity not in self.front.local_peers:
                self.front.audience.note_client(identity)
            # A console sends a shutdown request and exits, without notifying its kernel manager.
            self.front.is_end_expected |= self.front.cell.is_shutdown_requested

    def _read_host_cell(self, identity: bytes, frames: list[bytes]) -> HostCell | None:
        return self.front.read_host_cell(identity, frames) if self.name == "shell" else None

    @property
    def waiting(self) -> list[list[bytes]]:
        """The queued messages that no kernel has received, each with its client's identity first."""
        return list(self._queue)

    def track_again(self) -> None:
        """Track the queued messages again, because another kernel will receive them."""
        for identity, *frames in self._queue:
            self._track(identity, frames)

    def _pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        for peer in self.peers:
            if not peer.transport.is_closing():
                (peer.transport.pause_reading if is_paused else peer.transport.resume_reading)()

    def _subscribe(self, peer: Peer, frames: list[bytes]) -> None:
        topic = frames[0][1:]
        if frames[0][:1] == b"\x01" and len(peer.topics) < MAX_SUBSCRIPTIONS:
            peer.topics.append(topic)
            # Clients that support it wait for this message before their first request. The kernel cannot send it to
            # them, because its only subscriber is the driver.
            subscription = topic.decode("utf-8", "replace")
            welcome = self.front.signer.message(topic, "iopub_welcome", {"subscription": subscription})
            peer.write(zmtp.encode(welcome))
            if self.front.is_parked and b"status".startswith(topic):
                idle = self.front.signer.message(b"status", "status", {"execution_state": "idle"})
                peer.write(zmtp.encode(idle))
        elif frames[0][:1] == b"\x00" and topic in peer.topics:
            peer.topics.remove(topic)

    def _beat(self, peer: Peer, frames: list[bytes]) -> None:
        if self.front.is_alive:
            peer.write(zmtp.encode(frames))

    async def pump(self, kernel: Kernel) -> None:
        """Send the kernel the messages of clients, for as long as it is attached."""
        while True:
            if self._answering is not None:
                await asyncio.wait([self._answering])  # completes even if this pump is cancelled
                self._answering = None
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            frames = self._queue[0]
            cell = self._read_host_cell(frames[0], frames[1:])
            if cell is not None:
                await self.front.wait_idle()
                if not self._queue or self._queue[0] is not frames:
                    continue  # the cell was aborted
            self._queue.popleft()
            self._queued_bytes -= sum(map(len, frames[1:]))
            if cell is not None:
                self._answering = asyncio.ensure_future(self.front.answer(cell))
                continue
            self.is_sending = True
            try:
                await kernel.send(self.name, frames)
            except AgentboxError as error:
                self.front.log.debug("front: a message on %s was not delivered: %s", self.name, error)
            finally:
                self.is_sending = False
            if self.is_paused and len(self._queue) <= MAX_QUEUED // 2 and self._queued_bytes <= MAX_QUEUED_BYTES // 2:
                self._pause(False)

    def abort_waiting(self) -> None:
        """Answer the queued cells as aborted, as the kernel does with its own queue when a cell fails."""
        remaining: deque[list[bytes]] = deque()
        for frames in self._queue:
            cell = self._read_host_cell(frames[0], frames[1:])
            request = cell.request if cell is not None else self.front.cell.withdraw(frames[1:])
            if request is None:
                remaining.append(frames)
            else:
                self.front.conclude(request, {"status": "aborted"})
        self._queue = remaining
        self._queued_bytes = sum(sum(map(len, frames[1:])) for frames in remaining)

    def drop_queue(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        if self.is_paused:
            self._pause(False)

    async def publish(self, frames: list[bytes]) -> None:
        """Send a message to every client that has subscribed to its topic."""
        topic, pieces = frames[0], cut(frames)
        for peer in list(self.peers):
            if any(topic.startswith(wanted) for wanted in peer.topics):
                await peer.deliver(pieces)

    async def route(self, frames: list[bytes]) -> None:
        """Send a message to the client whose identity is the first frame. Drop it if that client has disconnected."""
        peer = self.by_identity.get(frames[0])
        if peer is not None:
            await peer.deliver(cut(frames[1:]))
