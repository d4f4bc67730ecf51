"""Run kernels, and carry messages between their sockets and the link.

A kernel survives the loss of its owner. Until the next owner connects, its messages wait in the outboxes of its
channels. An *embedded* kernel has no sockets: it receives the FIFOs of each owner, and keeps its own messages
(``guest.ipykernel.embedded``).
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket

from . import child_kernels, zmtp
from .framing import pack_json
from .loop import Loop, Stream
from .outbox import Outbox
from .processes import Processes, StartError, read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Socket type that the guest uses for each of the kernel's sockets.
CHANNELS = {"shell": b"DEALER", "iopub": b"SUB", "stdin": b"DEALER", "control": b"DEALER"}
#: The same identity on all sockets, so that a kernel's stdin request finds the client of the shell request.
IDENTITY = b"agentbox"
#: Below the ephemeral range, so that no program is assigned one of these ports by chance.
FIRST_PORT = 9000
#: Limits on the bytes that wait for the host. The limit for iopub is high because a kernel drops messages that its
#: socket cannot queue.
OUTBOX_LIMIT = 4 * 1024 * 1024
IOPUB_LIMIT = 64 * 1024 * 1024
#: Largest message from the kernel and to it, in bytes. The latter allows 512 MiB of a client's data and the envelope.
MAX_MESSAGE = 128 * 1024 * 1024
MAX_REQUEST = 513 * 1024 * 1024
#: FIFOs of an embedded kernel: those that it reads, then those that it writes. The kernel's program defines them too,
#: and cannot be imported here.
READ_FIFOS = ("shell", "stdin", "control", "said-read", "answers-read")
WRITTEN_FIFOS = ("said", "answers")
#: Modules that an embedded kernel's launcher loads, in this order. AGENTBOX_EMBEDDED passes it the names.
EMBEDDED_MODULES = (
    "embedded_protocol",
    "embedded_lazy",
    "embedded_claim",
    "embedded_streams",
    "embedded_shells",
    "embedded_waits",
    "embedded",
)
LINK_DIR = "/run/agentbox/link"
IMPORT_CACHE = f"{LINK_DIR}/imports"
_DIAL_INTERVAL = 0.01
_READ_SIZE = 256 * 1024
#: Maximum number of reads from iopub before a message on another channel is carried.
_MAX_DRAIN = 64


class Kernel:
    """Kernel process, started for a stream ``{"kind": "kernel", "name": ...}``.

    To the host: JSON messages ``{"event": "connected", "channel": ...}``, ``{"event": "exited", "code", "signal",
    "is_out_of_memory"}``, ``{"event": "failed", "message"}``, ``{"event": "dropped", "channel", "count"}``,
    ``{"event": "signalled", "id"}`` and ``{"event": "hung up"}``. From the host: ``{"signal": n, "id"}``. For an
    embedded kernel also ``{"fifos": name, "taken", "room"}`` and ``{"hang_up": true}``; the first of them has a
    ``claim`` if the kernel waited to be claimed (``guest.ipykernel.embedded_claim``). An EOF from the host ends the
    kernel; the loss of the owner does not. When a kernel ends, all its descendants are killed.
    """

    def __init__(self, loop: Loop, processes: Processes, stream: Stream) -> None:
        self.is_running = True
        self.is_out_of_memory = False
        self._events = Outbox(OUTBOX_LIMIT, lambda: None)
        self._loop = loop
        self._orders: socket.socket | None = None
        self._on_waits: Callable[[int], object] = lambda count: None
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
        self._plain_argv = header.get("plain_argv", header["argv"])
        child_kernels.offer(header.get("kernel_name", ""), self._plain_argv)
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
            self._report(event="failed", message=str(error))
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
        """Process id; 0 if the kernel is not running."""
        return self._process.pid if self.is_running else 0

    def attach(self, stream: Stream) -> None:
        """Take requests from this owner, and send it all events that no owner has received."""
        read_requests(stream, self._on_request)
        stream.on_eof = self.end
        stream.on_reset = lambda reason: self._events.detach()
        self._events.attach(stream)

    def _on_request(self, request: dict[str, Any]) -> None:
        if "signal" in request:
            if request["signal"] == signal.SIGKILL:
                self.end()
            else:
                self._process.signal(int(request["signal"]))
            self._report(event="signalled", id=request.get("id"))
        elif self._orders is not None and "fifos" in request:
            self._hand_over(request)
        elif self._orders is not None and "hang_up" in request:
            self._order({"taken": request.get("taken")}, [])

    def end(self) -> None:
        """Kill the kernel and all its descendants."""
        if self.is_running:
            self._processes.kill_marked(self._mark, self._process)

    def connected(self, channel: Channel) -> None:
        """Tell the host that a channel is connected."""
        self._report(event="connected", channel=channel.name)
        if channel.name == "iopub":
            for other in self.channels.values():
                other.send_waiting()

    @property
    def is_listened_to(self) -> bool:
        """Whether the kernel's iopub is connected. A request sent before would be answered but never seen to end."""
        return "iopub" in self.channels and self.channels["iopub"].is_connected

    def dropped(self, channel: Channel, count: int) -> None:
        """Tell the host that messages were dropped."""
        self._report(event="dropped", channel=channel.name, count=count)

    def _open_embedded(self, *, has_cache: bool) -> tuple[int, ...]:
        """Return the descriptors for an embedded kernel: a socket for orders, its program and the import cache.

        Only the first program gets the cache, because an earlier program may have changed the modules to import.
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
            if claim:
                child_kernels.offer(request["claim"].get("kernel_name", ""), self._plain_argv)
            self._order({"taken": request["taken"], "room": request["room"], **claim}, fds)
        except OSError:
            pass  # that owner has disconnected, and the next one will ask again
        finally:
            for fd in fds:
                os.close(fd)

    def _order(self, order: dict[str, Any], fds: list[int]) -> None:
        assert self._orders is not None
        try:
            socket.send_fds(self._orders, [json.dumps(order).encode()], fds)
        except OSError:
            pass  # the kernel is exiting or does not read its orders

    def count_waits(self, on_answer: Callable[[int], object]) -> None:
        """Ask an embedded kernel what it waits for while it is idle. There may be no answer; other kernels wait for 0.

        Parameters
        ----------
        on_answer : callable
            Called with the number of its pending timers and of threads that wake up by themselves.
        """
        if self._orders is None:
            on_answer(0)
        else:
            self._on_waits = on_answer
            self._order({"count_waits": True}, [])

    def _order_done(self) -> None:
        assert self._orders is not None
        try:
            data = self._orders.recv(64)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data.startswith(b'{"waits": '):
            count = data[10:-1]
            self._on_waits(int(count) if count.isdigit() else 1)
        elif data:
            self._report(event="hung up")
        else:
            self._loop.watch(self._orders.fileno())

    def _exited(self, code: int, number: int) -> None:
        self.is_running = False
        self._processes.kill_marked(self._mark, self._process)  # a program that it started may still be running
        if self._orders is not None:
            self._loop.watch(self._orders.fileno())
            self._orders.close()
            self._orders = None
        if not self._processes.is_ending:  # otherwise the host reports why the sandbox has ended
            self._report(event="exited", code=code, signal=number, is_out_of_memory=self.is_out_of_memory)
        self._events.close()

    def _report(self, **event: Any) -> None:
        self._events.put(pack_json(event))


class Channel:
    """Guest's connection to one of the kernel's sockets, and the stream to the host."""

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
        """Carry messages to and from this owner."""
        self._stream = stream
        self._from_host = zmtp.Splitter(MAX_REQUEST)  # discard the incomplete message of the previous owner
        self._uncredited = 0
        stream.on_data = self._on_host_data
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
        self._sent = 0  # a message of which the kernel has received a part is sent again in full
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
            if self.name == "iopub":  # not earlier: libzmq closes the connection if it reads this along with READY
                sock.send(zmtp.SUBSCRIBE_ALL)
            self._sock = sock
            self._from_kernel = zmtp.Splitter(MAX_MESSAGE)
            self._kernel.connected(self)
            self._on_kernel_data(rest)
            self.send_waiting()

    def _watch(self) -> None:
        if self._sock is not None:
            self._loop.watch(
                self._sock.fileno(),
                self._read if self._outbox.has_room else None,
                self.send_waiting if self._unsent and self._kernel.is_listened_to else None,
            )

    def _drain(self) -> None:
        """Carry everything in the socket's buffer, up to a maximum number of reads."""
        for _ in range(_MAX_DRAIN):
            if self._sock is None or not self._outbox.has_room or not self._read():
                return

    def _read(self) -> bool:
        """Read once from the socket and queue the messages. Return whether there was data."""
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
            # Output that the kernel sent before its reply has arrived already. Carry it first, so that the reply does
            # not overtake it.
            self._kernel.channels["iopub"]._drain()
        self._on_kernel_data(data)
        if not self._outbox.has_room:
            self._watch()
        return True

    def _on_kernel_data(self, data: bytes) -> None:
        try:
            for message in self._from_kernel.feed(data):
                self._outbox.put(message)
        except zmtp.ZmtpError:
            if self._sock is not None:
                self._redial(self._sock)

    def _on_host_data(self, data: bytes) -> None:
        # Pass on only complete messages: an owner may be lost in the middle of one.
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
        """Whether the kernel has accepted the connection."""
        return self._sock is not None

    def send_waiting(self) -> None:
        """Send the kernel as many of the waiting messages as its socket accepts."""
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
    """Return five port numbers. For UNIX sockets any numbers work, since each kernel has its own sockets."""
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
    raise OSError("cannot find five free ports on loopback")


def _take_file(path: str) -> int:
    """Open a file and remove it, so that no snapshot refers to it. Return an empty file if it does not exist."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return os.open("/dev/null", os.O_RDONLY)
    os.unlink(path)
    return fd


def make_shared_directory(path: str) -> None:
    """Create the directory of connection files, with the mode of ``/tmp``: each is written as its kernel's user."""
    os.makedirs(path, mode=0o1777, exist_ok=True)
    os.chmod(path, 0o1777)


def open_kernel(loop: Loop, processes: Processes, kernels: dict[str, Kernel], stream: Stream) -> None:
    """Serve a stream of kind ``kernel`` (start or resume a kernel) or ``channel``."""
    name = stream.header["kernel"]
    known = kernels.get(name)
    action: Callable[[Stream], object]
    if stream.header["kind"] == "channel":
        if known is None or stream.header["channel"] not in known.channels:
            stream.reset(f"kernel {name!r} does not exist")
            return
        action = known.channels[stream.header["channel"]].attach
    elif known is None:
        kernels[name] = Kernel(loop, processes, stream)
        return
    else:
        action = known.attach
    action(stream)
