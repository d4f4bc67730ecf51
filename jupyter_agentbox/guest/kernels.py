"""Kernels inside: the process, and its messages carried between its sockets and the link.

A kernel outlives its owner: what it says meanwhile waits in the outboxes of its channels. One that is *embedded* has no
sockets: it is handed the FIFOs of each owner, and keeps what it says itself (``guest.ipykernel.embedded``).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket

from . import zmtp
from .framing import pack_json
from .loop import Loop, Stream
from .outbox import Outbox
from .processes import Processes, StartError, read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Socket type that the guest plays towards each of the kernel's sockets.
CHANNELS = {"shell": b"DEALER", "iopub": b"SUB", "stdin": b"DEALER", "control": b"DEALER"}
#: One identity on all, so that a kernel's stdin request finds the client of the shell request.
IDENTITY = b"agentbox"
#: Below the ephemeral range, so that no program is handed one of them by chance.
FIRST_PORT = 9000
#: What waits for the host, bytes. Much for iopub: a kernel drops what its socket cannot queue.
OUTBOX_LIMIT = 4 * 1024 * 1024
IOPUB_LIMIT = 64 * 1024 * 1024
#: Largest message of the kernel's, and for it, bytes: 512 MiB of a client's, and what goes with them.
MAX_MESSAGE = 128 * 1024 * 1024
MAX_REQUEST = 513 * 1024 * 1024
#: FIFOs of an embedded kernel, those that it reads first; as in its own program, which cannot be imported here.
READ_FIFOS = ("shell", "stdin", "control", "said-read", "answers-read")
WRITTEN_FIFOS = ("said", "answers")
#: What such a kernel's launcher loads, in that order: it is told their names in AGENTBOX_EMBEDDED.
EMBEDDED_MODULES = (
    "embedded_protocol",
    "embedded_lazy",
    "embedded_claim",
    "embedded_streams",
    "embedded_shells",
    "embedded",
)
LINK_DIR = "/run/agentbox/link"
IMPORT_CACHE = f"{LINK_DIR}/imports"
_DIAL_INTERVAL = 0.01
_READ_SIZE = 256 * 1024
#: Reads of iopub that one word on another channel lets go first, at most.
_MAX_DRAIN = 64


class Kernel:
    """One kernel process, started for a stream ``{"kind": "kernel", "name": ...}``.

    To the host: JSON messages ``{"event": "connected", "channel": ...}``, ``{"event": "exited", "code", "signal",
    "is_out_of_memory"}``, ``{"event": "failed", "message"}``, ``{"event": "dropped", "channel", "count"}`` and
    ``{"event": "hung up"}``. From the host: ``{"signal": n}``; for an embedded kernel ``{"fifos": name, "taken",
    "room"}`` and ``{"hang_up": true}`` too, the first of which has a ``claim`` for one that waited
    (``guest.ipykernel.embedded_claim``). An EOF from the host ends the kernel; the loss of the owner does not. All
    processes that descend from a kernel end with it.
    """

    def __init__(self, loop: Loop, processes: Processes, stream: Stream) -> None:
        self.is_running = True
        self.is_out_of_memory = False
        self._events = Outbox(OUTBOX_LIMIT, lambda: None)
        self._loop = loop
        self._orders: socket.socket | None = None
        self._processes = processes
        self._mark = processes.new_mark()
        header = stream.header
        name = header["connection_file"]
        transport = header["connection"]["transport"]
        is_ipc = transport == "ipc"
        is_embedded = transport == "fifo"
        ip = name.removesuffix(".json") if is_ipc else "127.0.0.1"
        numbers = [0] * 5 if is_embedded else _find_ports(is_ipc)
        ports = dict(zip(("shell", "iopub", "stdin", "control", "hb"), numbers, strict=True))
        connection = {**header["connection"], "ip": ip, **{f"{channel}_port": port for channel, port in ports.items()}}
        env = header["env"]
        stdio = None
        if is_embedded:
            env = {**env, "AGENTBOX_EMBEDDED": ",".join(EMBEDDED_MODULES)}
            stdio = self._open_embedded(has_cache=not processes.has_started)
        self.channels: dict[str, Channel] = {}
        self.attach(stream)
        try:
            self._process = processes.spawn(
                header["argv"],
                env,
                header["cwd"],
                self._exited,
                stdio,
                is_root=header.get("is_root", False),
                files={name: json.dumps(connection).encode()},
                mark=self._mark,
            )
        except (StartError, OSError) as error:
            self.is_running = False
            self._tell(event="failed", message=str(error))
            self._events.close()
            return
        finally:
            for fd in stdio or ():
                if fd > 2:
                    os.close(fd)
        if not is_embedded:
            self.channels = {
                channel: Channel(loop, self, channel, f"{ip}-{ports[channel]}" if is_ipc else (ip, ports[channel]))
                for channel in CHANNELS
            }

    @property
    def pid(self) -> int:
        """Its process; 0 where it never ran or runs no more."""
        return self._process.pid if self.is_running else 0

    def attach(self, stream: Stream) -> None:
        """Take orders from this owner, and tell it all that nobody has heard yet."""
        read_requests(stream, self._asked)
        stream.on_eof = self.end
        stream.on_reset = lambda reason: self._events.detach()
        self._events.attach(stream)

    def _asked(self, request: dict[str, Any]) -> None:
        if request.get("signal") == signal.SIGKILL:
            self.end()
        elif "signal" in request:
            self._process.signal(int(request["signal"]))
        elif self._orders is not None and "fifos" in request:
            self._hand_over(request)
        elif self._orders is not None and "hang_up" in request:
            self._order({"taken": request.get("taken")}, [])

    def end(self) -> None:
        """Kill it, with all that it has started."""
        if self.is_running:
            self._processes.kill_marked(self._mark, self._process)

    def connected(self, channel: Channel) -> None:
        """Tell the host that it listens there."""
        self._tell(event="connected", channel=channel.name)
        if channel.name == "iopub":
            for other in self.channels.values():
                other.send_waiting()

    @property
    def is_listened_to(self) -> bool:
        """Whether what it puts out is heard: a request that came before would be answered, and never known to end."""
        return "iopub" in self.channels and self.channels["iopub"].is_connected

    def dropped(self, channel: Channel, count: int) -> None:
        """Tell the host that it has missed messages."""
        self._tell(event="dropped", channel=channel.name, count=count)

    def _open_embedded(self, *, has_cache: bool) -> tuple[int, ...]:
        """Make what an embedded kernel starts with: the socket of its orders, its program and the import cache.

        A program that ran before may have changed what is imported, so the cache is the first one's alone.
        """
        self._orders, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.setblocking(False)
        self._loop.watch(self._orders.fileno(), self._order_done)
        folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ipykernel")
        return (
            os.open("/dev/null", os.O_RDONLY),
            1,
            2,
            inner.detach(),
            *(os.open(f"{folder}/{module}.py", os.O_RDONLY) for module in EMBEDDED_MODULES),
            _take_file(IMPORT_CACHE) if has_cache else os.open("/dev/null", os.O_RDONLY),
        )

    def _hand_over(self, request: dict[str, Any]) -> None:
        fds: list[int] = []
        try:
            for name in (*READ_FIFOS, *WRITTEN_FIFOS):
                flags = os.O_WRONLY if name in WRITTEN_FIFOS else os.O_RDONLY
                fds.append(os.open(f"{LINK_DIR}/{request['fifos']}-{name}", flags | os.O_NONBLOCK))
            claim = {"claim": request["claim"]} if request.get("claim") else {}
            self._order({"taken": request["taken"], "room": request["room"], **claim}, fds)
        except OSError:
            pass  # that owner is gone, and another one will ask
        finally:
            for fd in fds:
                os.close(fd)

    def _order(self, order: dict[str, Any], fds: list[int]) -> None:
        assert self._orders is not None
        try:
            socket.send_fds(self._orders, [json.dumps(order).encode()], fds)
        except OSError:
            pass  # it is ending, or does not look

    def _order_done(self) -> None:
        assert self._orders is not None
        try:
            data = self._orders.recv(16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._tell(event="hung up")
        else:
            self._loop.watch(self._orders.fileno())

    def _exited(self, code: int, number: int) -> None:
        self.is_running = False
        self._processes.kill_marked(self._mark, self._process)  # a program that it started may have outlived it
        if self._orders is not None:
            self._loop.watch(self._orders.fileno())
            self._orders.close()
            self._orders = None
        self._tell(event="exited", code=code, signal=number, is_out_of_memory=self.is_out_of_memory)
        self._events.close()

    def _tell(self, **event: Any) -> None:
        self._events.put(pack_json(event))


class Channel:
    """The guest's connection to one of the kernel's sockets, and the stream to the host."""

    def __init__(self, loop: Loop, kernel: Kernel, name: str, address: str | tuple[str, int]) -> None:
        self.name = name
        self._loop = loop
        self._kernel = kernel
        self._address = address
        self._sock: socket.socket | None = None
        self._from_kernel = zmtp.Splitter(MAX_MESSAGE)
        self._from_host = zmtp.Splitter(MAX_REQUEST)
        self._outbox = Outbox(IOPUB_LIMIT if name == "iopub" else OUTBOX_LIMIT, self._watch)
        self._stream: Stream | None = None
        self._unsent: list[bytes] = []
        self._sent = 0  # bytes of the first of them
        self._uncredited = 0
        self._handshake: zmtp.Handshake | None = None
        self._dial()

    def attach(self, stream: Stream) -> None:
        """Carry to and from this owner."""
        self._stream = stream
        self._from_host = zmtp.Splitter(MAX_REQUEST)  # half a message of the last owner's is nobody's
        self._uncredited = 0
        stream.on_data = self._host_said
        stream.on_reset = lambda reason: self._detach(stream)
        if self._outbox.dropped:
            self._kernel.dropped(self, self._outbox.dropped)
            self._outbox.dropped = 0
        self._outbox.attach(stream)

    def _detach(self, stream: Stream) -> None:
        if stream is self._stream:
            self._stream = None
            self._outbox.detach()

    # -- towards the kernel ------------------------------------------------------------------

    def _dial(self) -> None:
        if not self._kernel.is_running:
            return
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        sock = socket.socket(socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET, kind)
        if sock.connect_ex(self._address) not in (0, errno.EINPROGRESS):
            self._redial(sock)
            return

        def connected() -> None:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._redial(sock)
                return
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.send(zmtp.greeting() + zmtp.ready(CHANNELS[self.name], b"" if self.name == "iopub" else IDENTITY))
            self._handshake = zmtp.Handshake()
            self._loop.watch(sock.fileno(), lambda: self._greet(sock))

        self._loop.watch(sock.fileno(), None, connected)

    def _redial(self, sock: socket.socket) -> None:
        self._loop.watch(sock.fileno())
        sock.close()
        self._sock = None
        self._sent = 0  # what the kernel has a part of, it is sent whole
        self._loop.later(_DIAL_INTERVAL, self._dial)

    def _greet(self, sock: socket.socket) -> None:
        assert self._handshake is not None
        try:
            data = sock.recv(65536)
            rest = self._handshake.feed(data)
        except BlockingIOError:
            return
        except (OSError, zmtp.ZmtpError):
            data, rest = b"", None
        if not data:
            self._redial(sock)
        elif rest is not None:
            if self.name == "iopub":  # not before: libzmq hangs up on what it reads along with READY
                sock.send(zmtp.SUBSCRIBE_ALL)
            self._sock = sock
            self._from_kernel = zmtp.Splitter(MAX_MESSAGE)
            self._kernel.connected(self)
            self._kernel_said(rest)
            self.send_waiting()

    def _watch(self) -> None:
        if self._sock is not None:
            self._loop.watch(
                self._sock.fileno(),
                self._read if self._outbox.has_room else None,
                self.send_waiting if self._unsent and self._kernel.is_listened_to else None,
            )

    def _drain(self) -> None:
        """Carry all that lies in its socket."""
        for _ in range(_MAX_DRAIN):
            if self._sock is None or not self._outbox.has_room or not self._read():
                return

    def _read(self) -> bool:
        """Carry what is read at once; whether there was something."""
        assert self._sock is not None
        try:
            data = self._sock.recv(_READ_SIZE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._redial(self._sock)
            return False
        if self.name != "iopub":
            # What the kernel put out before its reply has arrived before it, and is not overtaken by it.
            self._kernel.channels["iopub"]._drain()
        self._kernel_said(data)
        if not self._outbox.has_room:
            self._watch()
        return True

    def _kernel_said(self, data: bytes) -> None:
        try:
            for message in self._from_kernel.feed(data):
                self._outbox.put(message)
        except zmtp.ZmtpError:
            if self._sock is not None:
                self._redial(self._sock)

    def _host_said(self, data: bytes) -> None:
        # Only whole messages go on: an owner may be lost in the middle of one.
        try:
            self._unsent += self._from_host.feed(data)
        except zmtp.ZmtpError as error:
            if self._stream is not None:
                self._stream.reset(str(error))
            return
        self._uncredited += len(data)
        self.send_waiting()

    @property
    def is_connected(self) -> bool:
        """Whether the kernel has accepted it."""
        return self._sock is not None

    def send_waiting(self) -> None:
        """Hand the kernel what it takes of what waits for it."""
        if self._sock is None or not self._kernel.is_listened_to:
            return
        try:
            while self._unsent:
                self._sent += self._sock.send(memoryview(self._unsent[0])[self._sent :])
                if self._sent == len(self._unsent[0]):
                    del self._unsent[0]
                    self._sent = 0
        except BlockingIOError:
            pass
        except OSError:
            self._redial(self._sock)
            return
        if not self._unsent and self._stream is not None and self._uncredited:
            self._stream.consumed(self._uncredited)
            self._uncredited = 0
        self._watch()


def _find_ports(is_ipc: bool) -> list[int]:
    """Five numbers: any will do for UNIX sockets of the kernel's own."""
    if is_ipc:
        return list(range(1, 6))
    ports: list[int] = []
    for port in range(FIRST_PORT, 32768):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == 5:
            return ports
    raise OSError("no five free ports on loopback")


def _take_file(path: str) -> int:
    """Open a file and remove it, as no snapshot is to name it; an empty one where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return os.open("/dev/null", os.O_RDONLY)
    os.unlink(path)
    return fd


def make_shared_directory(path: str) -> None:
    """Make the directory of connection files; like ``/tmp``, since each is written as its kernel's user."""
    os.makedirs(path, mode=0o1777, exist_ok=True)
    os.chmod(path, 0o1777)


def open_kernel(loop: Loop, processes: Processes, kernels: dict[str, Kernel], stream: Stream) -> None:
    """Serve a stream of kind ``kernel`` (start one, or go on with one) or ``channel``."""
    name = stream.header["kernel"]
    known = kernels.get(name)
    action: Callable[[Stream], object]
    if stream.header["kind"] == "channel":
        if known is None or stream.header["channel"] not in known.channels:
            stream.reset(f"no kernel {name!r} runs here")
            return
        action = known.channels[stream.header["channel"]].attach
    elif known is None:
        kernels[name] = Kernel(loop, processes, stream)
        return
    else:
        action = known.attach
    action(stream)
