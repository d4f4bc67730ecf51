"""Open connections from the host to programs inside, on loopback ports only."""

from __future__ import annotations

import errno
import os
import socket

from .loop import Loop, Stream
from .pump import Pump


def open_connection(loop: Loop, stream: Stream) -> None:
    """Serve a stream ``{"kind": "connect", "port": n}``: the bytes of one TCP connection, in both directions.

    If nothing accepts the connection, the stream is reset with the reason.
    """
    port = stream.header.get("port")
    if not isinstance(port, int) or not 0 < port < 65536:
        stream.reset("no such port")
        return
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    early: list[bytes] = []
    # Data that the host sends before the connection is open is limited by the stream's initial credit.
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
    stream.on_eof = lambda: fail("closed before the connection was made")
    error = sock.connect_ex(("127.0.0.1", port))
    if error not in (0, errno.EINPROGRESS):
        fail(os.strerror(error))
        return
    loop.watch(sock.fileno(), None, connected)
