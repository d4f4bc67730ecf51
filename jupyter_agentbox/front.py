"""The front: five ZeroMQ endpoints on the host, held for as long as the kernel id lives.

Clients connect here and never notice that the kernel behind was replaced: addresses stay the same
over restarts, what they send meanwhile waits, and heartbeats are answered true to the state. The
front speaks ZMTP itself (:mod:`~jupyter_agentbox.zmtp`) on UNIX sockets in a 0700 directory, and
hands whole messages to a *driver* (:class:`Kernel`), which is all it knows of sandboxes.

It does not verify signatures: who can reach the sockets is the user, and the kernel checks every
request with the same key as it does without a sandbox. The key serves the front's own notices only.

All of it runs on one event loop, that of the link thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from . import zmtp
from .endpoints import make_directory
from .errors import AgentboxError
from .messages import RunningCell, Signer
from .peers import LocalPeer, Peer
from .spec import MIB, Cause, End

#: Channel name, port, and the type of socket that a kernel has there.
CHANNELS = (
    ("shell", 1, b"ROUTER"),
    ("iopub", 2, b"XPUB"),
    ("stdin", 3, b"ROUTER"),
    ("hb", 4, b"REP"),
    ("control", 5, b"ROUTER"),
)
MAX_SUBSCRIPTIONS = 256
MAX_QUEUED = 1000
MAX_QUEUED_BYTES = 16 * MIB
MAX_REFUSALS_A_CELL = 5
MAX_NOTICE = 2000

OnMessage = Callable[[str, list[bytes]], Awaitable[None]]


class Kernel(Protocol):
    """What the front drives: a kernel in a sandbox."""

    on_message: OnMessage
    is_busy: Callable[[], bool]

    @property
    def end(self) -> End | None: ...
    def add_end_callback(self, callback: Callable[..., None]) -> None: ...
    async def send(self, channel: str, frames: list[bytes]) -> None: ...


def end_notice(end: End) -> str:
    """Make the sentence that tells a person why a kernel ended, and what to do about it."""
    remedy = f". Raise {end.setting} to allow more" if end.setting else ""
    return f"the kernel ended: {end.message}{remedy}"


class Channel:
    """One endpoint: its clients, and what they sent that the kernel has not taken yet."""

    def __init__(self, front: Front, name: str, port: int, socket_type: bytes) -> None:
        self.front = front
        self.name = name
        self.socket_type = socket_type
        self.path = front.directory / f"s-{port}"
        self.alias = front.directory / f"k-{port}"
        self.peers: set[Peer] = set()
        self.by_identity: dict[bytes, Peer] = {}
        self.is_paused = False
        self.on_frames: Callable[[Peer, list[bytes]], None] = {
            b"ROUTER": self._enqueue,
            b"XPUB": self._subscribe,
            b"REP": self._beat,
        }[socket_type]
        self._queue: deque[list[bytes]] = deque()
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(str(self.path))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: Peer(self), sock=listener)
        self.link()

    def link(self) -> None:
        """Make the address that clients are told.

        KernelManager removes "its" ipc files at every restart: what it removes is this alias, not the socket.
        """
        with suppress(FileExistsError):
            self.alias.symlink_to(self.path.name)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers):
            peer.transport.abort()

    def _enqueue(self, peer: Peer | LocalPeer, frames: list[bytes]) -> None:
        if self.name != "stdin":
            self.front.cell.saw_request(frames, peer.identity)
            # A console says so and leaves, with no word to its kernel manager.
            self.front.is_end_expected |= self.front.cell.is_shutdown_asked
        self._queue.append([peer.identity, *frames])
        self._queued_bytes += sum(map(len, frames))
        self._wake.set()
        if not self.is_paused and (len(self._queue) > MAX_QUEUED or self._queued_bytes > MAX_QUEUED_BYTES):
            self._pause(True)

    def _pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        for peer in self.peers:
            if not peer.transport.is_closing():
                (peer.transport.pause_reading if is_paused else peer.transport.resume_reading)()

    def _subscribe(self, peer: Peer, frames: list[bytes]) -> None:
        topic = frames[0][1:]
        if frames[0][:1] == b"\x01" and len(peer.topics) < MAX_SUBSCRIPTIONS:
            peer.topics.append(topic)
            # Clients that know it wait for this before their first request. The kernel cannot say it to
            # them: its one subscriber is the driver.
            subscription = topic.decode("utf-8", "replace")
            welcome = self.front.signer.message(topic, "iopub_welcome", {"subscription": subscription})
            peer.write(zmtp.encode(welcome))
        elif frames[0][:1] == b"\x00" and topic in peer.topics:
            peer.topics.remove(topic)

    def _beat(self, peer: Peer, frames: list[bytes]) -> None:
        if self.front.is_alive:
            peer.write(zmtp.encode(frames))

    async def pump(self, kernel: Kernel) -> None:
        """Hand the kernel what clients send, for as long as it is the one attached."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            frames = self._queue.popleft()
            self._queued_bytes -= sum(map(len, frames[1:]))
            try:
                await kernel.send(self.name, frames)
            except AgentboxError as error:
                self.front.log.debug("front: a message on %s was not delivered: %s", self.name, error)
            if self.is_paused and len(self._queue) <= MAX_QUEUED // 2 and self._queued_bytes <= MAX_QUEUED_BYTES // 2:
                self._pause(False)

    def drop_queue(self) -> None:
        self._queue.clear()
        self._queued_bytes = 0
        if self.is_paused:
            self._pause(False)

    async def publish(self, frames: list[bytes]) -> None:
        """Send to every client that subscribed to the topic."""
        topic, data = frames[0], zmtp.encode(frames)
        for peer in list(self.peers):
            if any(topic.startswith(wanted) for wanted in peer.topics):
                await peer.deliver(data)

    async def route(self, frames: list[bytes]) -> None:
        """Send to the client whose identity is the first frame; nowhere when it has gone."""
        peer = self.by_identity.get(frames[0])
        if peer is not None:
            await peer.deliver(zmtp.encode(frames[1:]))


class Front:
    """The endpoints of one kernel id. Make it with :meth:`open`.

    Parameters
    ----------
    key, signature_scheme
        The session's, for notices.
    slow_client_timeout : float
        Seconds without reading a byte after which a client loses messages instead of holding up the kernel.
    max_message : int
        Bytes that one message of a client may have.
    log : logger
        Where it says what it cut.

    Attributes
    ----------
    is_alive : bool
        Whether heartbeats are answered: the kernel lives or is being started.
    is_end_expected : bool
        Somebody asked for the end, so nobody needs to be told. Reset with each kernel.
    is_heard : bool
        The present kernel has said something on iopub, so nothing that it says there is lost from here on.
    epoch : int
        Counts the kernels attached.
    local_peers : dict of bytes to LocalPeer
        Clients in this process, by identity; see :meth:`join`.
    """

    def __init__(
        self,
        *,
        key: bytes,
        signature_scheme: str = "hmac-sha256",
        slow_client_timeout: float = 30.0,
        max_message: int = 512 * MIB,
        log: Any = None,
    ) -> None:
        self.signer = Signer(key, signature_scheme)
        self.slow_client_timeout = slow_client_timeout
        self.max_message = max_message
        self.log = log or logging.getLogger(__name__)
        self.cell = RunningCell()
        self.is_alive = True
        self.is_end_expected = False
        self.is_heard = False
        self.epoch = 0
        self.local_peers: dict[bytes, LocalPeer] = {}
        self.directory, self._lock = make_directory()
        self._channels = {name: Channel(self, name, port, kind) for name, port, kind in CHANNELS}
        self._kernel: Kernel | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._refusals: set[str] = set()
        self._refusals_of: bytes | None = None
        self._is_closed = False

    @classmethod
    async def open(cls, **kwargs: Any) -> Front:
        """Make the directory and bind all five endpoints, or nothing.

        Raises
        ------
        AgentboxError
            The directory cannot be made private.
        """
        front = cls(**kwargs)
        try:
            for channel in front._channels.values():
                await channel.open()
        except BaseException:
            front.close()
            raise
        return front

    @property
    def connection_info(self) -> dict[str, Any]:
        """Transport, ip and ports as Jupyter wants them; the same for the front's whole life."""
        ports: dict[str, Any] = {f"{name}_port": port for name, port, _ in CHANNELS}
        return {"transport": "ipc", "ip": str(self.directory / "k"), **ports}

    def attach(self, kernel: Kernel) -> None:
        """Put this kernel behind the endpoints, in place of any other."""
        self.detach()
        self.link()
        self._kernel = kernel
        self.is_alive = True
        self.is_end_expected = False
        self.is_heard = False
        self.epoch += 1
        kernel.on_message = lambda channel, frames: self._on_message(kernel, channel, frames)
        kernel.is_busy = lambda: kernel is not self._kernel or not self.is_heard or self.cell.is_working
        kernel.add_end_callback(lambda *_: self._on_end(kernel))
        if kernel.end is not None:
            self._on_end(kernel)
            return
        loop = asyncio.get_running_loop()
        self._pumps = [
            loop.create_task(channel.pump(kernel))
            for channel in self._channels.values()
            if channel.socket_type == b"ROUTER"
        ]
        self._tell_local_peers()

    def abort_pending(self) -> None:
        """Answer the cells that the present kernel has not answered: another takes its place, and never will."""
        for request in self.cell.pending:
            for kind, content in (("execute_reply", {"status": "aborted"}), ("status", {"execution_state": "idle"})):
                frames = self.signer.message(kind.encode(), kind, content, request.header)
                peer = self._channels["shell"].by_identity.get(request.identity)
                if kind == "status":
                    self._show(frames)
                elif peer is not None:
                    peer.write(zmtp.encode(frames[1:]))

    @property
    def is_attached(self) -> bool:
        """Whether there is a kernel that takes messages now."""
        return bool(self._pumps)

    @property
    def end(self) -> End | None:
        """How the kernel ended; None while there is one, and while another is on its way."""
        if self._is_closed:
            return End(Cause.STOPPED, 0, "it was removed")
        return self._kernel.end if self._kernel is not None and not self.is_alive else None

    def join(self, peer: LocalPeer) -> None:
        """Add a client of this process."""
        self.local_peers[peer.identity] = peer

    def submit(self, peer: LocalPeer, channel: str, frames: list[bytes]) -> None:
        """Send a message of a client of this process: its frames from the delimiter on."""
        self._channels[channel]._enqueue(peer, frames)

    def _tell_local_peers(self) -> None:
        for peer in list(self.local_peers.values()):
            peer.on_kernel()

    def detach(self) -> None:
        """Take the kernel away. What clients send from here on waits for the next one."""
        self._kernel = None
        self._stop_pumps()

    def _stop_pumps(self) -> None:
        self.is_alive = False
        self.cell.clear()
        for pump in self._pumps:
            pump.cancel()
        self._pumps = []

    def restarting(self) -> None:
        """A new kernel is on its way: heartbeats are answered, and the addresses are there again."""
        self.is_alive = True
        self.link()

    def link(self) -> None:
        """Bring back the addresses that ``KernelManager.cleanup_ipc_files`` removed."""
        for channel in self._channels.values():
            channel.link()

    def _on_end(self, kernel: Kernel) -> None:
        if kernel is not self._kernel:
            return
        if kernel.end is not None and not self.is_end_expected:
            self._show(self.stream_message(end_notice(kernel.end)))
        # It stays attached: the last it said may still be on its way to the clients.
        self._stop_pumps()
        # What waits was meant for the kernel that is gone. What comes later is for its successor.
        for channel in self._channels.values():
            channel.drop_queue()
        self._tell_local_peers()

    async def _on_message(self, kernel: Kernel, channel: str, frames: list[bytes]) -> None:
        if kernel is not self._kernel or not frames:
            return
        if channel == "iopub":
            self.is_heard = True
            self.cell.saw_output(frames)
            for peer in list(self.local_peers.values()):
                peer.on_message(channel, frames)
            await self._channels["iopub"].publish(frames)
        elif channel in ("shell", "control", "stdin") and frames[0] in self.local_peers:
            self.local_peers[frames[0]].on_message(channel, frames[1:])
        elif channel in ("shell", "control", "stdin"):
            await self._channels[channel].route(frames)

    def stream_message(self, text: str, name: str = "stderr") -> list[bytes]:
        """Make the frames of a stream message, as output of the running cell."""
        clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text[:MAX_NOTICE])
        content = {"name": name, "text": f"agentbox: {clean}\n"}
        return self.signer.message(b"stream." + name.encode(), "stream", content, self.cell.header or b"{}")

    def notice(self, text: str, name: str = "stderr") -> None:
        """Show a line to every client, as output of the running cell. Needs no kernel; waits for nobody."""
        frames = self.stream_message(text, name)
        self._show(frames)
        for peer in list(self.local_peers.values()):
            peer.on_message("iopub", frames)

    def _show(self, frames: list[bytes]) -> None:
        data = zmtp.encode(frames)
        for peer in self._channels["iopub"].peers:
            if any(frames[0].startswith(topic) for topic in peer.topics):
                peer.write(data)

    def refusal(self, host: str, port: int, sentence: str) -> None:
        """Show a refusal of the egress gate: each host and port once a cell, and few of them."""
        cell = self.cell.header
        if cell is None:
            return
        if cell is not self._refusals_of:
            self._refusals_of = cell
            self._refusals = set()
        target = f"{host}:{port}"
        if target in self._refusals or len(self._refusals) >= MAX_REFUSALS_A_CELL:
            return
        self._refusals.add(target)
        self.notice(sentence)

    def close(self) -> None:
        """Close the endpoints and remove their directory; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.detach()
        self._tell_local_peers()
        for channel in self._channels.values():
            channel.close()
        # The lock is held until the directory is gone, so that nobody takes it for an abandoned one meanwhile.
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
