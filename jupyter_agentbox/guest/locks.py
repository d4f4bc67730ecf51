"""Pass the locks of programs inside to the host, which takes them on the files of the work folder.

:mod:`.shared_locks` runs in the programs and connects to a socket here. Each connection, which belongs to one process,
is one stream of the link (``sandbox/locks.py``). Requests and answers are lines. The guest remembers the locks of each
connection: it takes them again for a new owner, and releases those whose file the program has closed, which nothing
else would notice.
"""

from __future__ import annotations

import collections
import errno
import json
import os
import socket

from .loop import LinkDown, Loop
from .shared_locks import ADDRESS, WORKSPACE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .loop import Link, Stream

#: Maximum number of connections, of locks of one, and of bytes of one request.
MAX_CLIENTS, MAX_LOCKS, MAX_REQUEST = 256, 1024, 8192
#: Seconds between two checks for files that were closed: after a lock, and at most.
FIRST_INTERVAL, LAST_INTERVAL = 0.1, 1.0


class Locks:
    """The socket to which programs connect, and its connections.

    Parameters
    ----------
    loop : Loop
    link : Link
    """

    def __init__(self, loop: Loop, link: Link) -> None:
        self.loop = loop
        self.link = link
        self.clients: set[Client] = set()
        self._timer: list[Any] | None = None
        self._interval = FIRST_INTERVAL

    def start(self) -> None:
        """Listen for programs."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(ADDRESS)
        self._socket.listen(MAX_CLIENTS)
        self.loop.watch(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        if len(self.clients) >= MAX_CLIENTS:
            connection.close()
            return
        connection.setblocking(False)
        self.clients.add(Client(self, connection))

    def check_soon(self) -> None:
        """Check in a while whether locked files are still open."""
        self._interval = FIRST_INTERVAL
        if self._timer is None:
            self._timer = self.loop.later(self._interval, self._check)

    def _check(self) -> None:
        self._timer = None
        for client in list(self.clients):
            client.check()
        if any(client.held for client in self.clients):
            self._interval = min(1.5 * self._interval, LAST_INTERVAL)
            self._timer = self.loop.later(self._interval, self._check)


class Client:
    """Connection of one process."""

    def __init__(self, locks: Locks, connection: socket.socket) -> None:
        #: Locks by kind, descriptor, path, start and length, with ``s`` or ``x``.
        self.held: dict[tuple[Any, ...], str] = {}
        self._locks = locks
        self._socket = connection
        self._pid = 0
        self._incoming, self._answers = b"", b""
        self._stream: Stream | None = None
        #: Requests whose answers are to come. None for those of the guest itself.
        self._asked: collections.deque[list[Any] | None] = collections.deque()
        locks.loop.watch(connection.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(MAX_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._incoming += data
        if not data or len(self._incoming) > MAX_REQUEST:
            self.close()
            return
        *lines, self._incoming = self._incoming.split(b"\n")
        for line in lines:
            try:
                request = json.loads(line)
                kind, how, fd, path, start, length, self._pid = request
                [int(value) for value in (fd, start, length, self._pid)]
                str(kind), str(how), str(path)
            except (ValueError, TypeError):
                self.close()
                return
            self._ask(request[:6])

    def _ask(self, request: list[Any]) -> None:
        if not self._send(request):
            self._answer(errno.EAGAIN)
            return
        self._asked.append(request)

    def _send(self, request: list[Any]) -> bool:
        """Send a request to the host. Return False if there is no owner."""
        try:
            if self._stream is None:
                self._open()
            assert self._stream is not None
            self._stream.write(json.dumps(request).encode() + b"\n")
        except LinkDown:
            return False
        return True

    def _open(self) -> None:
        """Open the stream, and take on the host what the process already holds."""
        stream = self._locks.link.open({"kind": "locks"})
        stream.on_data = self._answered
        stream.on_reset = lambda _: self._lost(stream)
        stream.on_eof = lambda: self._lost(stream)
        self._stream = stream
        for (kind, fd, path, start, length), how in self.held.items():
            stream.write(json.dumps([kind, how, fd, path, start, length]).encode() + b"\n")
            self._asked.append(None)

    def _lost(self, stream: Stream) -> None:
        if stream is self._stream:
            self._stream = None
            asked, self._asked, self._answers = self._asked, collections.deque(), b""
            for request in asked:
                if request is not None:
                    self._answer(errno.EAGAIN)

    def _answered(self, data: bytes) -> None:
        assert self._stream is not None
        self._stream.consumed(len(data))
        *lines, self._answers = (self._answers + data).split(b"\n")
        for line in lines:
            request = self._asked.popleft()
            if request is not None:
                number = int(line)
                if number == 0:
                    self._note(*request)
                self._answer(number)

    def _answer(self, number: int) -> None:
        try:
            self._socket.send(b"%d\n" % number)
        except OSError:
            self.close()

    def _note(self, kind: str, how: str, fd: int, path: str, start: int, length: int) -> None:
        """Remember what is locked, or was unlocked."""
        if how in ("s", "x"):
            if len(self.held) < MAX_LOCKS:
                self.held[kind, fd, path, start, length] = how
            self._locks.check_soon()
        elif how == "u":
            end = start + length if length else 1 << 63
            for key in [key for key in self.held if key[0] == kind and key[2] == path]:
                if kind == "f" and key[1] != fd:
                    continue
                if start <= key[3] and (key[3] + key[4] if key[4] else 1 << 63) <= end:
                    del self.held[key]

    def check(self) -> None:
        """Release the locks of files that the program has closed, and find a new owner for the others."""
        for key in list(self.held):
            kind, fd, path, start, length = key
            try:
                is_open = os.readlink(f"/proc/{self._pid}/fd/{fd}").removesuffix(" (deleted)") == WORKSPACE + path
            except OSError:
                is_open = False
            if not is_open:
                del self.held[key]
                if self._stream is not None and self._send([kind, "u", fd, path, start, length]):
                    self._asked.append(None)
        if self.held and self._stream is None:
            try:
                self._open()
            except LinkDown:
                pass  # the next check tries again

    def close(self) -> None:
        """Forget the process. The end of the stream releases its locks on the host."""
        self._locks.clients.discard(self)
        self._locks.loop.watch(self._socket.fileno())
        self._socket.close()
        self.held.clear()
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.reset()
