"""Provide the front of a kernel: five ZeroMQ endpoints on the host that exist as long as the kernel id.

Clients connect here and do not notice when the kernel is replaced. The addresses stay the same over restarts, messages
sent meanwhile are queued, and heartbeats reflect the kernel's state. The front speaks ZMTP itself (``guest.zmtp``) on
UNIX sockets in a directory with mode 0700, and passes whole messages to a *driver* (:class:`Kernel`). It knows nothing
else of sandboxes.

It does not verify the signatures of messages for the kernel. Only the user can reach the sockets, and the kernel checks
every request with the same key as it does without a sandbox. The front uses the key to sign its own messages, and to
check requests that it answers itself.

Everything here runs on one event loop, that of the link thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jupyter_agentbox.egress.rules import BLOCKED
from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.guest import zmtp
from jupyter_agentbox.policy.recipes import raise_limit
from jupyter_agentbox.sandbox.drivers.messages import Request, RunningCell, Signer, header_index, parse
from jupyter_agentbox.spec import MIB, Cause, End, SandboxSpec

from .cell_commands import HostCell, read_host_cell
from .channels import Channel
from .endpoints import make_directory
from .peers import LocalPeer, Peer
from .reconnect import FRONT_IDENTITY, Audience

#: Channel name, port, and type of the socket that a kernel has there.
CHANNELS = (
    ("shell", 1, b"ROUTER"),
    ("iopub", 2, b"XPUB"),
    ("stdin", 3, b"ROUTER"),
    ("hb", 4, b"REP"),
    ("control", 5, b"ROUTER"),
)
MAX_REFUSALS_A_CELL = 5
MAX_NOTICE = 2000

#: Seconds without any message after which a cell that never started, such as one with a wrong signature, is no longer
#: waited for; and seconds that a reply may arrive after the cell's ``idle`` status.
QUIET_TIME, REPLY_GRACE = 3.0, 0.05

OnMessage = Callable[[str, list[bytes]], Awaitable[None]]
OnCommand = Callable[[str, str], Awaitable[str]]


class Kernel(Protocol):
    """The interface of a kernel in a sandbox, as the front uses it."""

    on_message: OnMessage
    is_busy: Callable[[], bool]
    lost: int

    @property
    def end(self) -> End | None: ...
    def add_end_callback(self, callback: Callable[..., None]) -> None: ...
    async def send(self, channel: str, frames: list[bytes]) -> None: ...


@dataclass(frozen=True)
class WakeHandlers:
    """The functions that a front calls when clients send messages to a parked kernel.

    Parameters
    ----------
    on_wanted : callable
        Called when a message for the kernel arrives and has to be queued.
    on_shutdown : callable
        Called when a client asked the kernel to shut down.
    """

    on_wanted: Callable[[], None]
    on_shutdown: Callable[[], None]


def end_notice(end: End, spec: SandboxSpec | None = None) -> str:
    """Return a message that tells a person why a kernel ended and what to do about it.

    With the spec of its sandbox, the message has the lines of configuration to copy.
    """
    lines = raise_limit(end.cause, spec) if spec is not None and end.setting and "of the profile" in end.setting else ""
    remedy = f". Raise {end.setting} to allow more" if end.setting else ""
    return f"the kernel ended: {end.message}{remedy}{'. ' if lines else ''}{lines}"


class Front:
    """The endpoints of one kernel id. Create it with :meth:`open`.

    Parameters
    ----------
    key, signature_scheme
        For signing the front's own messages.
    slow_client_timeout : float
        Seconds without reading a byte after which a client loses messages instead of blocking the kernel.
    max_message : int
        Largest message of a client, in bytes.
    log : logger
        Receives a message for each client that is cut off or loses messages.

    Attributes
    ----------
    is_alive : bool
        Whether heartbeats are answered, because the kernel runs or is being started.
    is_end_expected : bool
        Whether the kernel's end was requested, so that it need not be reported. Reset with each kernel.
    has_output : bool
        Whether the current kernel has sent a message on iopub. From then on, no message that it sends there is lost.
    epoch : int
        Number of kernels attached so far.
    spec : SandboxSpec or None
        Spec of the current kernel's sandbox, if it is known.
    local_peers : dict of bytes to LocalPeer
        Clients in this process, by identity; see :meth:`join`.
    audience : Audience
        The clients that are expected to reconnect after the kernel was taken over. Kernel output waits for them.
    on_command : coroutine function or None
        Executes a cell that is a command for the host. It is called with name and argument, and returns the text to
        show or raises AgentboxError. Without it, such cells are sent to the kernel.
    explain : coroutine function or None
        Returns the sentences to show after a message of the kernel on iopub.
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
        self.has_output = False
        self.epoch = 0
        self.local_peers: dict[bytes, LocalPeer] = {}
        self.audience = Audience()
        self.on_command: OnCommand | None = None
        self.explain: Callable[[list[bytes]], Awaitable[list[str]]] | None = None
        #: Text to show with the first cell.
        self.first_notice = ""
        self._is_free = asyncio.Event()
        self.directory, self._lock = make_directory()
        self._channels = {name: Channel(self, name, port, kind) for name, port, kind in CHANNELS}
        self._kernel: Kernel | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._wake_handlers: WakeHandlers | None = None
        self._refusals: set[str] = set()
        self.spec: SandboxSpec | None = None
        self._refusals_of: bytes | None = None
        self._is_closed = False
        self._attached = 0.0
        #: Sources, ``control`` or ``shell`` (which stands for the other channels), on which the kernel has sent no new
        #: message since it was attached, so that its messages may repeat earlier ones.
        self._repeating: set[str] = set()

    @classmethod
    async def open(cls, **kwargs: Any) -> Front:
        """Create the directory and bind all five endpoints. On failure, nothing is left behind.

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
        """Transport, ip and ports in Jupyter's format. They stay the same for the front's whole life."""
        ports: dict[str, Any] = {f"{name}_port": port for name, port, _ in CHANNELS}
        return {"transport": "ipc", "ip": str(self.directory / "k"), **ports}

    def attach(self, kernel: Kernel) -> None:
        """Put a kernel behind the endpoints, replacing any current one."""
        self.detach()
        self.link()
        self._kernel = kernel
        self.is_alive = True
        self.is_end_expected = False
        self.has_output = False
        self._attached = time.time()
        self._repeating = {"control", "shell"} if self.epoch else set()
        self.epoch += 1
        for channel in self._channels.values():
            channel.track_again()
        kernel.on_message = lambda channel, frames: self._on_message(kernel, channel, frames)
        kernel.is_busy = lambda: kernel is not self._kernel or not self.has_output or self._is_working
        kernel.add_end_callback(lambda *_: self._on_end(kernel))
        if kernel.end is not None:
            self._on_end(kernel)
            return
        self._start_pumps(kernel)

    @property
    def _is_working(self) -> bool:
        return self.cell.is_working or any(channel.is_sending for channel in self._channels.values())

    def _start_pumps(self, kernel: Kernel) -> None:
        loop = asyncio.get_running_loop()
        self._pumps = [
            loop.create_task(channel.pump(kernel))
            for channel in self._channels.values()
            if channel.socket_type == b"ROUTER"
        ]
        self._tell_local_peers()

    def ask(self) -> None:
        """Ask the kernel for its state, because a kernel that was taken over or restored sends nothing on its own.

        The reply is not forwarded to clients.
        """
        self._channels["shell"].put(FRONT_IDENTITY, self.signer.message(b"", "kernel_info_request", {})[1:])

    def abort_pending(self) -> None:
        """Answer the cells that the current kernel has not answered, because it is being replaced and never will.

        Cells that have not been sent to the kernel stay queued for the next one.
        """
        waiting = {frame for frames in self._channels["shell"].waiting for frame in frames}
        for request in self.cell.pending:
            if request.header not in waiting:
                self.conclude(request, {"status": "aborted"})

    def conclude(self, request: Request, reply: dict[str, Any], *messages: tuple[str, dict[str, Any]]) -> None:
        """Answer a cell in place of the kernel, with outputs, a reply and the status ``idle``."""
        for kind, content in (*messages, ("status", {"execution_state": "idle"})):
            self._show(self.signer.message(kind.encode(), kind, content, request.header))
        peer = self._channels["shell"].by_identity.get(request.identity)
        if peer is not None:
            frames = self.signer.message(b"", "execute_reply", reply, request.header)
            peer.write(zmtp.encode(frames[1:]))

    @property
    def is_attached(self) -> bool:
        """Whether there is a kernel that accepts messages now."""
        return bool(self._pumps)

    @property
    def end(self) -> End | None:
        """How the kernel ended. None while there is one, and while the next one is starting."""
        if self._is_closed:
            return End(Cause.STOPPED, 0, "it was removed")
        return self._kernel.end if self._kernel is not None and not self.is_alive else None

    def join(self, peer: LocalPeer) -> None:
        """Add a client of this process."""
        self.local_peers[peer.identity] = peer

    def submit(self, peer: LocalPeer, channel: str, frames: list[bytes]) -> None:
        """Send a message of a client of this process, given as its frames from the delimiter on."""
        self._channels[channel]._enqueue(peer, frames)

    def _tell_local_peers(self) -> None:
        for peer in list(self.local_peers.values()):
            peer.on_kernel()

    def detach(self) -> None:
        """Detach the kernel. Messages that clients send from now on are queued for the next one."""
        self._kernel = self._wake_handlers = None
        self._stop_pumps()

    def hold(self) -> None:
        """Queue the messages of clients until :meth:`resume`, :meth:`park` or another kernel.

        Call it only while no message is being sent to the kernel; see ``Kernel.is_busy``.
        """
        for pump in self._pumps:
            pump.cancel()
        self._pumps = []

    def resume(self) -> None:
        """Deliver the messages that were queued since :meth:`hold`."""
        if self._kernel is not None and self._kernel.end is None:
            self._start_pumps(self._kernel)

    # A kernel that was saved to disk

    @property
    def is_parked(self) -> bool:
        """Whether the kernel is saved to disk. Clients still see it as alive."""
        return self._wake_handlers is not None

    def park(self, handlers: WakeHandlers) -> None:
        """Detach the kernel until a client needs it. Meanwhile heartbeats are answered, and clients see it as idle."""
        self.detach()
        self.is_alive = True
        self._wake_handlers = handlers
        for channel in self._channels.values():
            channel.track_again()
        if any(channel.waiting for channel in self._channels.values()):
            handlers.on_wanted()

    def answer_parked(self, channel: str, peer: Peer | LocalPeer, frames: list[bytes]) -> bool:
        """Handle a message that a client sends to a parked kernel.

        Shutdown and interrupt requests do not wake the kernel.

        Returns
        -------
        bool
            Whether the message was handled here. Otherwise it has to be queued for the kernel.
        """
        if self._wake_handlers is None or channel == "stdin":
            return False
        index = header_index(frames)
        kind = parse(frames[index]).get("msg_type") if index is not None else None
        if index is None or kind not in ("shutdown_request", "interrupt_request") or not isinstance(peer, Peer):
            self._wake_handlers.on_wanted()
            return False
        if self.signer.is_signed(frames, index):
            content: dict[str, Any] = {"status": "ok"}
            if kind == "shutdown_request":
                content |= {"restart": parse(frames[index + 3]).get("restart") is True}
            reply = self.signer.message(b"", str(kind).replace("request", "reply"), content, frames[index])
            peer.write(zmtp.encode([*frames[: index - 2], *reply[1:]]))
            if kind == "shutdown_request":
                self._wake_handlers.on_shutdown()
        return True

    def refuse_all(self, sentence: str) -> None:
        """Answer every cell with this message, until a kernel is attached or starting."""
        loop = asyncio.get_running_loop()

        def refuse() -> None:
            if self._wake_handlers is handlers:
                self.refuse_waiting(sentence)

        def on_wanted() -> None:
            loop.call_soon(refuse)  # the message is not queued yet

        handlers = WakeHandlers(on_wanted, lambda: None)
        self.notice(sentence)
        self.park(handlers)
        self.is_alive = False

    def refuse_waiting(self, sentence: str) -> None:
        """Answer the queued and pending cells with an error, because no kernel will run them."""
        content = {"ename": "AgentboxError", "evalue": sentence, "traceback": [f"agentbox: {sentence}"]}
        for request in self.cell.pending:
            self.conclude(request, {"status": "error", "execution_count": 0, **content}, ("error", content))
        self.cell.clear()
        for channel in self._channels.values():
            channel.drop_queue()

    def _stop_pumps(self) -> None:
        self.is_alive = False
        self.cell.clear()
        for pump in self._pumps:
            pump.cancel()
        self._pumps = []

    def restarting(self) -> None:
        """Prepare for a new kernel that is starting: answer heartbeats, and restore the addresses."""
        self.is_alive = True
        self._wake_handlers = None
        self.link()

    def link(self) -> None:
        """Restore the addresses that ``KernelManager.cleanup_ipc_files`` removed."""
        for channel in self._channels.values():
            channel.link()

    def _on_end(self, kernel: Kernel) -> None:
        if kernel is not self._kernel:
            return
        if kernel.end is not None and not self.is_end_expected:
            self._show(self.stream_message(end_notice(kernel.end, self.spec)))
        # The kernel stays attached, because its last output may still be on its way to the clients.
        self._stop_pumps()
        # Queued messages were meant for the kernel that has ended. Later ones are for its successor.
        for channel in self._channels.values():
            channel.drop_queue()
        self._tell_local_peers()

    async def _on_message(self, kernel: Kernel, channel: str, frames: list[bytes]) -> None:
        await self.audience.is_there.wait()
        # Jupyter clients fail on anything that is not a message.
        if kernel is not self._kernel or header_index(frames) is None:
            return
        if self._repeating:
            frames = self._renew("control" if channel == "control" else "shell", frames)
        if channel == "iopub":
            self.has_output = True
            self.cell.track_output(frames)
            if self.first_notice and self.cell.header is not None:
                text, self.first_notice = self.first_notice, ""
                self._show(self.stream_message(text))
            if kernel.lost and (index := header_index(frames)) is not None:
                text, kernel.lost = f"{kernel.lost} messages were dropped because no client was connected", 0
                self._show(self.stream_message(text, parent=frames[index + 1]))
            self._is_free.set()
            for peer in list(self.local_peers.values()):
                peer.on_message(channel, frames)
            await self._channels["iopub"].publish(frames)
            for text in await self.explain(frames) if self.explain is not None else ():
                self.notice(text)
        elif channel in ("shell", "control", "stdin") and frames[0] in self.local_peers:
            self.cell.track_reply(frames)
            self.local_peers[frames[0]].on_message(channel, frames[1:])
        elif frames[0] == FRONT_IDENTITY:
            self.cell.track_reply(frames)
            self.audience.has_answered.set()
        elif channel in ("shell", "control", "stdin"):
            is_failure = self.cell.track_reply(frames) and channel == "shell"
            await self._channels[channel].route(frames)
            if is_failure and self._is_host_cell_next:
                self._channels["shell"].abort_waiting()

    # Cells that are commands for the host

    def read_host_cell(self, identity: bytes, frames: list[bytes]) -> HostCell | None:
        """Return the host command in a message, if it was signed by a client outside this process.

        Otherwise return None.
        """
        if self.on_command is None or identity in self.local_peers:
            return None
        cell = read_host_cell(identity, frames)
        index = header_index(frames)
        return cell if cell is not None and index is not None and self.signer.is_signed(frames, index) else None

    @property
    def _is_host_cell_next(self) -> bool:
        waiting = self._channels["shell"].waiting
        return bool(waiting) and self.read_host_cell(waiting[0][0], waiting[0][1:]) is not None

    async def wait_idle(self) -> None:
        """Wait until the kernel has answered the cells that were sent to it."""
        waiting = {frame for frames in self._channels["shell"].waiting for frame in frames}
        sent = {request.header for request in self.cell.pending} - waiting
        is_idle = False
        while sent & {request.header for request in self.cell.pending} and not is_idle:
            self._is_free.clear()
            try:
                await asyncio.wait_for(self._is_free.wait(), QUIET_TIME)
            except asyncio.TimeoutError:
                is_idle = self.cell.header is None
        if sent:
            await asyncio.sleep(REPLY_GRACE)

    async def answer(self, cell: HostCell) -> None:
        """Execute a cell that is a command for the host, and answer it as a kernel would."""
        assert self.on_command is not None
        request, count = cell.request, self.cell.count
        self._show(self.signer.message(b"status", "status", {"execution_state": "busy"}, request.header))
        if not cell.is_silent:
            content = {"code": cell.code, "execution_count": count}
            self._show(self.signer.message(b"execute_input", "execute_input", content, request.header))
        try:
            text = await self.on_command(cell.name, cell.argument)
        except Exception as error:
            if not isinstance(error, AgentboxError):
                self.log.error("%%%s failed", cell.name, exc_info=error)
                error = AgentboxError("internal server error; see the server's log")
            failure = {
                "ename": type(error).__name__, "evalue": str(error), "traceback": [f"%{cell.name}: {error}"],
            }  # fmt: skip
            messages = () if cell.is_silent else (("error", failure),)
            self.conclude(request, {"status": "error", "execution_count": count, **failure}, *messages)
            if request.stops:
                self._channels["shell"].abort_waiting()
            return
        reply = {"status": "ok", "execution_count": count, "user_expressions": {}, "payload": []}
        shown = () if cell.is_silent else (("stream", {"name": "stdout", "text": text}),)
        self.conclude(request, reply, *shown)

    def _renew(self, source: str, frames: list[bytes]) -> list[bytes]:
        """Give a message a new id if a kernel restored from a snapshot may have sent it before.

        The first message that was made after the kernel was attached ends this for its source.
        """
        if source not in self._repeating:
            return frames
        renewed = self.signer.renew(frames, self._attached)
        if renewed is None:
            self._repeating.discard(source)
        return renewed or frames

    def has_listeners(self, identity: bytes, count: int) -> bool:
        """Return whether a client with this identity, if given, and at least `count` subscribers are connected."""
        is_known = not identity or all(identity in self._channels[name].by_identity for name in ("shell", "stdin"))
        return is_known and sum(bool(peer.topics) for peer in self._channels["iopub"].peers) >= count

    def stream_message(self, text: str, name: str = "stderr", parent: bytes = b"") -> list[bytes]:
        """Return the frames of a stream message. It is output of the running cell, unless another parent is given."""
        clean = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text[:MAX_NOTICE])
        lead = "" if clean.startswith(BLOCKED) else "agentbox: "
        content = {"name": name, "text": f"{lead}{clean}\n"}
        return self.signer.message(b"stream." + name.encode(), "stream", content, parent or self.cell.header or b"{}")

    def notice(self, text: str, name: str = "stderr") -> None:
        """Show a line to every client as output of the running cell. Works without a kernel and does not wait."""
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
        """Show a connection that the egress gate refused: each host and port once per cell, and only a few of them."""
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
        """Close the endpoints and remove their directory. Does nothing if already closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self.detach()
        self._tell_local_peers()
        for channel in self._channels.values():
            channel.close()
        # Hold the lock until the directory is removed, so that no other process treats it as abandoned meanwhile.
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)
