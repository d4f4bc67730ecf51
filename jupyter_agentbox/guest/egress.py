"""Listen on loopback for outgoing connections of the sandbox, and pass each one, unchanged, to the host.

There is an HTTP proxy and a SOCKS5 proxy at fixed ports. There is also a name server, whose answers are loopback
addresses, and a listener on each of those addresses that the host names. The host's gate makes all decisions
(``egress/gate.py``; ``egress/wire.py`` describes the format of the "dns" stream). Only connections to the sandbox
itself do not leave it (:mod:`.proxy`).
"""

from __future__ import annotations

import collections
import errno
import socket
import sys

from .loop import LinkDown, Loop
from .proxy import ProxyClient
from .pump import Pump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Link, Stream

HTTP_PROXY_ADDRESS = ("127.0.0.1", 3128)
SOCKS_ADDRESS = ("127.0.0.1", 1080)
DNS_ADDRESS = ("127.0.0.1", 53)

#: Maximum number of connections, and the length of each accept queue, in which further ones wait. The gate allows fewer
#: connections to servers (``GateLimits``), so that it is the gate that refuses those that wait for too long.
MAX_CONNECTIONS = 448
BACKLOG = 1024
#: Maximum number of transparent listeners. A new one replaces the least recently used.
MAX_LISTENERS = 512
#: Maximum number of pending queries. Further queries are answered with a failure.
MAX_QUERIES = 512
#: Maximum size of a query, in bytes. Longer queries get no answer.
MAX_QUERY = 4096
#: Maximum number of TCP clients of the name server, and seconds that each may take.
MAX_DNS_CLIENTS = 32
DNS_CLIENT_TIMEOUT = 10.0
#: Seconds until accepting is retried when descriptors run out, and seconds for a refused client to read the reason.
RETRY_INTERVAL = 0.1
LINGER_TIMEOUT = 2.0
#: Timeout for the host's answer, in seconds.
QUERY_TIMEOUT = 15.0

NO_OWNER = (
    b"HTTP/1.1 503 agentbox: no owner is connected to this sandbox at the moment\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)
_SOCKS_FAILED = b"\x05\x01\x00\x01" + bytes(6)
_SERVFAIL = 2
Address = tuple[str, int]


def servfail(query: bytes) -> bytes:
    """Return the answer "server failure" to a query of 12 bytes or more."""
    return query[:2] + bytes((0x80 | query[2] & 0x79, 0x80 | _SERVFAIL)) + bytes(8)


def listener(address: Address, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Return a non-blocking socket bound to ``address``. A stream socket also listens."""
    sock = socket.socket(socket.AF_INET, kind)
    try:
        sock.setblocking(False)
        if kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if kind == socket.SOCK_STREAM:
            sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class Egress:
    """All listeners of the sandbox.

    Parameters
    ----------
    loop : Loop
    link : Link
    http, socks, dns : tuple of (str, int)
        Addresses to listen on; port 0 selects any free port.
    """

    def __init__(
        self,
        loop: Loop,
        link: Link,
        http: Address = HTTP_PROXY_ADDRESS,
        socks: Address = SOCKS_ADDRESS,
        dns: Address = DNS_ADDRESS,
    ) -> None:
        self._loop = loop
        self._link = link
        self._wanted = {"http": http, "socks": socks}
        self._dns_address = dns
        self._connections = 0
        self._listeners: collections.OrderedDict[Address, socket.socket] = collections.OrderedDict()
        self._fixed: list[socket.socket] = []
        # Functions that accept again on listeners where connections wait for others to end.
        self._paused: list[Callable[[], None]] = []
        self._clients: set[ProxyClient] = set()
        self._lingering: set[Callable[[], None]] = set()
        self.names = NameServer(loop, link, self.listen)
        #: Actual addresses: "http", "socks" and "dns".
        self.addresses: dict[str, Address] = {}

    def start(self) -> None:
        """Open the fixed listeners. If one fails, print the error on stderr and start the others."""
        for via, address in self._wanted.items():
            try:
                sock = listener(address)
            except OSError as error:
                print(f"agentbox: cannot listen on {address} for {via}: {error}", file=sys.stderr)
                continue
            self._fixed.append(sock)
            self.addresses[via] = sock.getsockname()
            self._serve(sock, via)
        try:
            self.addresses["dns"] = self.names.start(self._dns_address)
        except OSError as error:
            print(f"agentbox: cannot serve DNS on {self._dns_address}: {error}", file=sys.stderr)

    def close(self) -> None:
        """Close every listener."""
        for client in list(self._clients):
            client.close()
        for close in list(self._lingering):
            close()
        for sock in [*self._fixed, *self._listeners.values()]:
            self._loop.watch(sock.fileno())
            sock.close()
        self._fixed.clear()
        self._listeners.clear()
        self.names.close()

    def listen(self, address: Address) -> None:
        """Listen on the address of a name, as instructed by the host."""
        if address in self._listeners:
            self._listeners.move_to_end(address)
            return
        if len(self._listeners) >= MAX_LISTENERS:
            self._close_oldest()
        try:
            sock = listener(address)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._listeners:
                # A listener on another port of the same name may still work.
                print(f"agentbox: cannot listen on {address}: {error}", file=sys.stderr)
                return
            self._close_oldest()
            self.listen(address)
            return
        self._listeners[address] = sock
        self._serve(sock, "direct")

    def _close_oldest(self) -> None:
        _, sock = self._listeners.popitem(last=False)
        self._loop.watch(sock.fileno())
        sock.close()

    def _serve(self, sock: socket.socket, via: str) -> None:
        def accept() -> None:
            if self._connections >= MAX_CONNECTIONS:
                self._loop.watch(sock.fileno())
                self._paused.append(watch)
                return
            try:
                connection, _ = sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    # The listener stays ready, so polling it would spin. Accept again after a pause.
                    self._loop.watch(sock.fileno())
                    self._loop.later(RETRY_INTERVAL, watch)
                return
            connection.setblocking(False)
            self._accepted(connection, via)

        def watch() -> None:
            if sock.fileno() >= 0:
                self._loop.watch(sock.fileno(), accept)

        watch()

    def _accepted(self, connection: socket.socket, via: str) -> None:
        self._connections += 1
        address, port = connection.getsockname()
        header = {"kind": "tcp", "via": via, "address": address, "port": port}
        if via == "direct":
            self._pass_on(connection, header)
            return

        def done() -> None:
            self._clients.discard(client)
            self._connection_done()

        def pass_on(sock: socket.socket, data: bytes, answered: int) -> None:
            self._clients.discard(client)
            self._pass_on(sock, header, data, answered)

        def reject(sock: socket.socket, answer: bytes) -> None:
            self._clients.discard(client)
            self._reject(sock, answer)

        client = ProxyClient(self._loop, connection, via, pass_on, reject, done)
        self._clients.add(client)

    def _pass_on(self, connection: socket.socket, header: dict[str, Any], data: bytes = b"", answered: int = 0) -> None:
        """Pass a connection on to the host, with bytes already read.

        The client may have been sent the first bytes of the host's answer already.
        """
        try:
            stream = self._link.open(header)
        except LinkDown:
            self._reject(connection, NO_OWNER if header["via"] == "http" else _SOCKS_FAILED if answered else b"")
            return
        Pump(self._loop, connection, stream, data, self._connection_done, is_abrupt=True)
        if answered:
            _skip(stream, answered)

    def _reject(self, connection: socket.socket, words: bytes) -> None:
        def close() -> None:
            if connection.fileno() >= 0:
                self._loop.cancel(timer)
                self._loop.watch(connection.fileno())
                connection.close()
                self._lingering.discard(close)
                self._connection_done()

        def drain() -> None:
            # Closing with unread bytes would reset the connection, and the client might never see the message.
            try:
                if connection.recv(65536):
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            close()

        timer = self._loop.later(LINGER_TIMEOUT, close)
        self._lingering.add(close)
        try:
            connection.send(words)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            close()
            return
        self._loop.watch(connection.fileno(), drain)

    def _connection_done(self) -> None:
        self._connections -= 1
        paused, self._paused = self._paused, []
        for watch in paused:
            watch()


def _skip(stream: Stream, count: int) -> None:
    """Drop the first bytes that arrive on a stream."""
    on_data = stream.on_data

    def first_data(data: bytes) -> None:
        nonlocal count
        dropped = min(count, len(data))
        count -= dropped
        stream.consumed(dropped)
        if not count:
            stream.on_data = on_data
        if data[dropped:]:
            on_data(data[dropped:])

    stream.on_data = first_data


class NameServer:
    """Name server that passes DNS queries to the host, and listens on the answer's addresses before it answers.

    Parameters
    ----------
    loop : Loop
    link : Link
    listen : callable
        Opens the listener on one address.
    """

    def __init__(self, loop: Loop, link: Link, listen: Callable[[Address], None]) -> None:
        self._loop = loop
        self._link = link
        self._listen = listen
        self._stream: Stream | None = None
        self._received = bytearray()
        self._number = 0
        # Number of a query -> the query, the function that sends the answer, and the timer of the timeout.
        self._pending: dict[int, tuple[bytes, Callable[[bytes], object], list[object]]] = {}
        self._clients: set[Callable[[], None]] = set()
        self._sockets: list[socket.socket] = []

    def start(self, address: Address) -> Address:
        """Serve UDP and TCP. Return the address."""
        tcp = listener(address)
        try:
            udp = listener(tcp.getsockname(), socket.SOCK_DGRAM)
        except OSError:
            tcp.close()
            raise
        self._sockets = [tcp, udp]
        self._loop.watch(udp.fileno(), lambda: self._datagram(udp))
        self._loop.watch(tcp.fileno(), lambda: self._client(tcp))
        bound: Address = tcp.getsockname()
        return bound

    def close(self) -> None:
        """Close the sockets."""
        for close in list(self._clients):
            close()
        for sock in self._sockets:
            self._loop.watch(sock.fileno())
            sock.close()
        self._sockets.clear()

    # -- clients -------------------------------------------------------------------------------

    def _datagram(self, udp: socket.socket) -> None:
        try:
            query, sender = udp.recvfrom(MAX_QUERY + 1)
        except OSError:
            return

        def reply(answer: bytes) -> None:
            try:
                udp.sendto(answer, sender)
            except OSError:
                pass

        self._ask(query, reply)

    def _client(self, tcp: socket.socket) -> None:
        try:
            connection, _ = tcp.accept()
        except OSError:
            return
        if len(self._clients) >= MAX_DNS_CLIENTS:
            connection.close()
            return
        connection.setblocking(False)
        received = bytearray()
        timer: list[object] = []

        def close() -> None:
            if connection.fileno() >= 0:
                self._clients.discard(close)
                self._loop.cancel(timer)
                self._loop.watch(connection.fileno())
                connection.close()

        def reply(answer: bytes) -> None:
            if connection.fileno() < 0:
                return
            data = len(answer).to_bytes(2, "big") + answer
            try:
                # Answers are small. If the client's buffer has no room for one, the client is not reading.
                if connection.send(data) < len(data):
                    close()
            except OSError:
                close()

        def readable() -> None:
            try:
                data = connection.recv(MAX_QUERY)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            received.extend(data)
            if not data or len(received) > 2 * (2 + MAX_QUERY):
                close()
                return
            while len(received) >= 2:
                size = int.from_bytes(received[:2], "big")
                if size > MAX_QUERY:
                    close()
                    return
                if len(received) < 2 + size:
                    break
                query = bytes(received[2 : 2 + size])
                del received[: 2 + size]
                self._ask(query, reply)

        timer = self._loop.later(DNS_CLIENT_TIMEOUT, close)
        self._clients.add(close)
        self._loop.watch(connection.fileno(), readable)

    # -- the host ------------------------------------------------------------------------------

    def _ask(self, query: bytes, reply: Callable[[bytes], object]) -> None:
        if not 12 <= len(query) <= MAX_QUERY or query[2] & 0x80:
            return  # not a query: answering it could start a loop of answers
        self._number = (self._number + 1) & 0xFFFFFFFF
        number = self._number
        body = number.to_bytes(4, "big") + query
        frame = len(body).to_bytes(2, "big") + body
        try:
            if len(self._pending) >= MAX_QUERIES:
                raise LinkDown("too many queries")
            if self._stream is None:
                self._open()
            assert self._stream is not None
            if self._stream.credit < len(frame):
                raise LinkDown("the host does not accept more data")
            self._stream.write(frame)
        except LinkDown:
            reply(servfail(query))
            return
        timer = self._loop.later(QUERY_TIMEOUT, lambda: self._fail(number))
        self._pending[number] = (query, reply, timer)

    def _open(self) -> None:
        stream = self._link.open({"kind": "dns"})

        def ended() -> None:
            stream.reset()
            self._lost(stream)

        self._received.clear()
        stream.on_data = self._data
        stream.on_eof = ended
        stream.on_reset = lambda reason: self._lost(stream)
        self._stream = stream

    def _lost(self, stream: Stream) -> None:
        if stream is self._stream:
            self._stream = None
            for number in list(self._pending):
                self._fail(number)

    def _fail(self, number: int) -> None:
        query, reply, timer = self._pending.pop(number)
        self._loop.cancel(timer)
        reply(servfail(query))

    def _data(self, data: bytes) -> None:
        assert self._stream is not None
        self._received += data
        self._stream.consumed(len(data))
        while len(self._received) >= 2:
            size = 2 + int.from_bytes(self._received[:2], "big")
            if len(self._received) < size:
                return
            body = bytes(self._received[2:size])
            del self._received[:size]
            self._answered(body)

    def _answered(self, body: bytes) -> None:
        count = body[4]
        end = 5 + 6 * count
        for start in range(5, end, 6):
            self._listen(
                (socket.inet_ntoa(body[start : start + 4]), int.from_bytes(body[start + 4 : start + 6], "big"))
            )
        found = self._pending.pop(int.from_bytes(body[:4], "big"), None)
        if found is not None:
            self._loop.cancel(found[2])
            if body[end:]:
                found[1](body[end:])
