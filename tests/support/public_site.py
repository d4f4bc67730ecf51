"""A site of this machine under a name that a server finds at an address that counts as public."""

from __future__ import annotations

import socket
import threading

SITE, PRIVATE = "site.test", "private.test"
#: The server's resolver finds one name at an address that counts as public and that leads to this machine.
RESOLVE = f"""\
import asyncio, socket
PUBLIC = "192.0.2.10"
NAMES = {{"{SITE}": PUBLIC, "{PRIVATE}": "10.1.2.3"}}
find, connect = socket.getaddrinfo, asyncio.open_connection
socket.getaddrinfo = lambda host, *more, **named: find(NAMES.get(host, host), *more, **named)
asyncio.open_connection = lambda host=None, port=None, **named: connect(
    "127.0.0.1" if host == PUBLIC else host, port, **named)
"""


class Site:
    """A site that says hello, and keeps the connection open until the client closes it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client:
            if client.recv(9999):
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello")
                while client.recv(9999):
                    pass
