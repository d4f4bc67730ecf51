"""The guest's listeners with a stand-in for the link."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Any

from jupyter_agentbox.guest import egress
from jupyter_agentbox.guest.loop import LinkDown, Loop


class FakeStream:
    """Keeps what the guest wrote."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self.written = b""
        self.is_reset = False
        self.credit = 65536
        self.on_data: Callable[[bytes], object] = lambda data: None
        self.on_eof = self.on_credit = lambda: None
        self.on_reset: Callable[[str], object] = lambda reason: None

    def write(self, data: bytes) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.written += b"<eof>"

    def reset(self, reason: str = "") -> None:
        self.is_reset = True

    def consumed(self, count: int) -> None:
        pass


class FakeLink:
    def __init__(self) -> None:
        self.is_down = False
        self.streams: list[FakeStream] = []

    def open(self, header: dict[str, Any]) -> FakeStream:
        if self.is_down:
            raise LinkDown("no owner")
        self.streams.append(FakeStream(header))
        return self.streams[-1]


class Inside:
    def __init__(self) -> None:
        self.loop = Loop()
        self.link = FakeLink()
        free = ("127.0.0.1", 0)
        self.egress = egress.Egress(self.loop, self.link, http=free, socks=free, dns=free)  # type: ignore[arg-type]
        self.egress.start()
        self.sockets: list[socket.socket] = []

    def run(self, until: Callable[[], object] = lambda: False, timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        timer: list[Any] = []

        def check() -> None:
            nonlocal timer
            self.loop.is_running = not until() and time.monotonic() < end
            timer = self.loop.later(0.005, check)

        self.loop.is_running = True
        check()
        self.loop.run()
        self.loop.cancel(timer)

    def connect(self, via: str) -> socket.socket:
        sock = socket.create_connection(self.egress.addresses[via], 60)
        self.sockets.append(sock)
        return sock

    def udp(self, data: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.settimeout(60)
        sock.sendto(data, self.egress.addresses["dns"])
        self.sockets.append(sock)
        return sock


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])
