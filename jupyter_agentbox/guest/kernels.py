"""Kernels inside: the process, and its sockets' bytes carried between it and the link."""

from __future__ import annotations

import errno
import json
import os
import socket

from . import zmtp
from .framing import pack_json
from .loop import LinkDown, Loop, Pump, Stream
from .processes import Processes, StartError, read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Socket type that the guest plays towards each of the kernel's sockets.
CHANNELS = {"shell": b"DEALER", "iopub": b"SUB", "stdin": b"DEALER", "control": b"DEALER"}
#: One identity on all, so that a kernel's stdin request finds the client of the shell request.
IDENTITY = b"agentbox"
#: Below the ephemeral range, so that no program is handed one of them by chance.
FIRST_PORT = 9000
#: Output taken from the kernel ahead of the host, bytes: a kernel drops what its socket cannot queue.
IOPUB_QUEUE = 64 * 1024 * 1024
_DIAL_INTERVAL = 0.01


class Kernel:
    """One kernel process, started for the stream ``{"kind": "kernel"}``.

    To the host: JSON messages ``{"event": "connected", "channel": ...}`` and
    ``{"event": "exited", "code", "signal"}`` or ``{"event": "failed", "message"}``. From the host:
    ``{"signal": n}``. The kernel ends with that stream.
    """

    def __init__(self, loop: Loop, processes: Processes, stream: Stream) -> None:
        self._loop = loop
        self._stream = stream
        header = stream.header
        self._is_ipc = header["connection"]["transport"] == "ipc"
        self._ip = header["connection_file"].removesuffix(".json") if self._is_ipc else "127.0.0.1"
        ports = list(range(1, 6)) if self._is_ipc else _free_ports()
        self._ports = dict(zip(("shell", "iopub", "stdin", "control", "hb"), ports, strict=True))
        connection = {
            **header["connection"],
            "ip": self._ip,
            **{f"{name}_port": port for name, port in self._ports.items()},
        }
        try:
            self._process = processes.spawn(
                header["argv"],
                header["env"],
                header["cwd"],
                self._exited,
                is_root=header.get("is_root", False),
                files={header["connection_file"]: json.dumps(connection).encode()},
            )
        except (StartError, OSError) as error:
            self.is_running = False
            self._tell(event="failed", message=str(error))
            stream.write_eof()
            return
        self.is_running = True
        read_requests(stream, lambda request: self._process.signal(int(request["signal"])))
        stream.on_reset = lambda reason: self._process.signal(9)
        stream.on_eof = lambda: self._process.signal(9)

    def connect(self, stream: Stream) -> None:
        """Join a channel's stream to the kernel's socket as soon as that listens."""
        channel = stream.header["channel"]
        is_wanted = [True]

        def forget(*_: object) -> None:
            is_wanted[0] = False

        stream.on_reset = forget
        stream.on_eof = forget

        def dial() -> None:
            if not is_wanted[0]:
                return
            if not self.is_running:
                stream.reset("the kernel has ended")
                return
            sock, failure = self._dial(channel)
            if failure not in (0, errno.EINPROGRESS):
                sock.close()
                self._loop.later(_DIAL_INTERVAL, dial)
                return

            def connected() -> None:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self._loop.watch(sock.fileno())
                    sock.close()
                    self._loop.later(_DIAL_INTERVAL, dial)
                    return
                sock.send(zmtp.greeting() + zmtp.ready(CHANNELS[channel], b"" if channel == "iopub" else IDENTITY))
                handshake = zmtp.Handshake()
                self._loop.watch(sock.fileno(), greeted(handshake))

            def greeted(handshake: zmtp.Handshake) -> Any:
                def read() -> None:
                    try:
                        data = sock.recv(65536)
                        handshake.feed(data)
                    except BlockingIOError:
                        return
                    except (OSError, zmtp.ZmtpError) as error:
                        data = b""
                        stream.reset(str(error))
                    if not data or not is_wanted[0]:
                        self._loop.watch(sock.fileno())
                        sock.close()
                        self._loop.later(_DIAL_INTERVAL, dial)
                    elif handshake.is_done:
                        if channel == "iopub":  # not before: libzmq hangs up on what it reads along with READY
                            sock.send(zmtp.SUBSCRIBE_ALL)
                        queue = IOPUB_QUEUE if channel == "iopub" else 65536
                        Pump(self._loop, sock, stream, handshake.rest, queue_size=queue)
                        self._tell(event="connected", channel=channel)

                return read

            self._loop.watch(sock.fileno(), None, connected)

        dial()

    def _dial(self, channel: str) -> tuple[socket.socket, int]:
        kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
        if self._is_ipc:
            sock = socket.socket(socket.AF_UNIX, kind)
            failure = sock.connect_ex(f"{self._ip}-{self._ports[channel]}")
        else:
            sock = socket.socket(socket.AF_INET, kind)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failure = sock.connect_ex((self._ip, self._ports[channel]))
        return sock, failure

    def _exited(self, code: int, number: int) -> None:
        self.is_running = False
        self._tell(event="exited", code=code, signal=number)
        self._stream.write_eof()

    def _tell(self, **event: Any) -> None:
        try:
            self._stream.write(pack_json(event))
        except LinkDown:
            pass  # the owner is gone, and with it whoever would want to know


def _free_ports() -> list[int]:
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


def make_shared_directory(path: str) -> None:
    """Make the directory of connection files; like ``/tmp``, since each is written as its kernel's user."""
    os.makedirs(path, mode=0o1777, exist_ok=True)
    os.chmod(path, 0o1777)
