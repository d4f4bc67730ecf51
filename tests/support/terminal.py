"""Use a terminal of a Jupyter server over its websocket."""

from __future__ import annotations

import json
import re

import websocket

from support.harness import Server


class Terminal:
    """Terminal as used by the page. A new one unless it is named."""

    def __init__(self, server: Server, made: str = "", **body: str) -> None:
        self.server = server
        self.name = made or server.call("POST", "api/terminals", body)["name"]
        self.socket = websocket.create_connection(
            server.url(f"terminals/websocket/{self.name}").replace("http", "ws", 1),
            header=[f"Authorization: token {server.token}"],
            http_no_proxy=["127.0.0.1"],
            timeout=100,
        )
        server.sockets.append(self.socket)
        self.shown = ""

    def send(self, *message: object) -> None:
        self.socket.send(json.dumps(message))

    def expect(self, pattern: str) -> str:
        """Read until the pattern is shown. Return the text before it, and discard everything up to its end."""
        while not (match := re.search(pattern, self.shown)):
            kind, *rest = json.loads(self.socket.recv())
            if kind == "stdout":
                self.shown += rest[0]
            assert kind != "disconnect", f"{pattern} before the end of {self.shown!r}"
        before, self.shown = self.shown[: match.start()], self.shown[match.end() :]
        return before

    def run(self, line: str) -> str:
        """Run a shell line, and return what it prints."""
        self.send("stdin", f"echo be'gin'; {line}; echo en'd'\r")
        self.expect("begin\r\n")
        return self.expect("end\r\n")

    def wait_ended(self) -> None:
        while json.loads(self.socket.recv())[0] != "disconnect":
            pass
