"""Connect to programs inside, on loopback addresses only: for the host, and for the sandbox's own proxies."""

from __future__ import annotations

import errno
import os
import socket

from .loop import Loop, Stream
from .pump import Pump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

#: Addresses of "localhost". Some programs listen only on the second one.
LOCALHOST = ("127.0.0.1", "::1")
_MAPPED = bytes(10) + b"\xff\xff"


def own_addresses(host: str) -> tuple[str, ...]:
    """Return the loopback addresses to try for a host that is this sandbox itself; empty if it is another host.

    The sandbox itself is ``localhost`` and every name below it, the host name, 127.0.0.0/8, ``::1``, and the addresses
    0.0.0.0 and ``::``, in every notation that :c:func:`connect` accepts.
    """
    name = host.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    if name == "localhost" or name.endswith(".localhost") or name == socket.gethostname().lower():
        return LOCALHOST
    try:
        packed = socket.inet_pton(socket.AF_INET6, name) if ":" in name else _MAPPED + socket.inet_aton(name)
    except (OSError, ValueError):
        return ()
    if packed in (bytes(16), _MAPPED + bytes(4)):
        return LOCALHOST
    if packed == bytes(15) + b"\1":
        return ("::1",)
    if packed.startswith(_MAPPED) and packed[12] == 127:
        return (socket.inet_ntoa(packed[12:]),)
    return ()


class Dial:
    """Attempt to connect to the first of several addresses that accepts.

    Parameters
    ----------
    loop : Loop
    addresses : sequence of str
        Loopback addresses, in the order in which to try them.
    port : int
    on_connected : callable
        Called with the connected socket, which it then owns.
    on_failed : callable
        Called with the reason why the first address failed. May be called before the constructor returns.
    """

    def __init__(
        self,
        loop: Loop,
        addresses: Sequence[str],
        port: int,
        on_connected: Callable[[socket.socket], object],
        on_failed: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._addresses = list(addresses)
        self._port = port
        self._on_connected = on_connected
        self._on_failed = on_failed
        self._sock: socket.socket | None = None
        self._reason = ""
        self._timer: list[Any] = [0.0, 0, None]
        self._try_next()

    def close(self) -> None:
        """Give up. No callback is called afterwards."""
        self._addresses.clear()
        self._loop.cancel(self._timer)
        if self._sock is not None:
            self._loop.watch(self._sock.fileno())
            self._sock.close()
            self._sock = None

    def _try_next(self) -> None:
        while self._addresses:
            address = self._addresses.pop(0)
            try:
                self._sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
                self._sock.setblocking(False)
                error = self._sock.connect_ex((address, self._port))
            except OSError as failure:  # such as a sandbox without IPv6
                error = failure.errno or errno.EIO
            if error in (0, errno.EINPROGRESS):
                assert self._sock is not None
                self._loop.watch(self._sock.fileno(), None, self._decided)
                return
            self._failed(error)
        self._on_failed(self._reason)

    def _failed(self, error: int) -> None:
        self._reason = self._reason or os.strerror(error)
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _decided(self) -> None:
        sock = self._sock
        assert sock is not None
        self._loop.watch(sock.fileno())
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._failed(error)
            # The next socket may get the same descriptor, for which the loop may have another event at hand.
            self._timer = self._loop.later(0, self._try_next)
            return
        self._sock = None
        self._on_connected(sock)


def open_connection(loop: Loop, stream: Stream) -> None:
    """Serve a stream ``{"kind": "connect", "port": n}``: the bytes of one TCP connection, in both directions.

    If nothing accepts the connection, on either address of "localhost", the stream is reset with the reason.
    """
    port = stream.header.get("port")
    if not isinstance(port, int) or not 0 < port < 65536:
        stream.reset("no such port")
        return
    early: list[bytes] = []
    # Data that the host sends before the connection is open is limited by the stream's initial credit.
    stream.on_data = early.append

    def connected(sock: socket.socket) -> None:
        Pump(loop, sock, stream)
        for data in early:
            stream.on_data(data)

    def ended() -> None:
        dial.close()
        stream.reset("closed before the connection was made")

    dial = Dial(loop, LOCALHOST, port, connected, stream.reset)
    stream.on_reset = lambda reason: dial.close()
    stream.on_eof = ended
