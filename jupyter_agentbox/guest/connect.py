"""Connections that the host opens to a program inside: to a loopback port, and nowhere else."""

from __future__ import annotations

import errno
import os
import socket

from .loop import Loop, Stream
from .pump import Pump


def open_connection(loop: Loop, stream: Stream) -> None:
    """Serve a stream ``{"kind": "connect", "port": n}``: the bytes of one TCP connection, both ways.

    It is reset, with the reason, where nobody accepts it.
    """
    port = stream.header.get("port")
    if not isinstance(port, int) or not 0 < port < 65536:
        stream.reset("no such port")
        return
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    early: list[bytes] = []
    # What the host sends before the connection is there is no more than the stream's first credit.
    stream.on_data = early.append

    def fail(reason: str) -> None:
        loop.watch(sock.fileno())
        sock.close()
        stream.reset(reason)

    def connected() -> None:
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            fail(os.strerror(error))
            return
        loop.watch(sock.fileno())
        Pump(loop, sock, stream)
        for data in early:
            stream.on_data(data)

    def ended(reason: str = "") -> None:
        loop.watch(sock.fileno())
        sock.close()

    stream.on_reset = ended
    stream.on_eof = lambda: fail("closed before it was connected")
    error = sock.connect_ex(("127.0.0.1", port))
    if error not in (0, errno.EINPROGRESS):
        fail(os.strerror(error))
        return
    loop.watch(sock.fileno(), None, connected)
