"""Background processes and terminals of a sandbox."""

from __future__ import annotations

import time

from jupyter_agentbox.client.wire import Output, content, output_decoders, segment
from jupyter_agentbox.models import (
    Encoding,
    ExitEvent,
    FollowQuery,
    InputRequest,
    OutputChunk,
    OutputQuery,
    ProcessAnswer,
    SignalRequest,
    SizeRequest,
    WaitQuery,
)

from .connection import Connection, Stream

#: Seconds that one call waits for an end; longer waits are made of several.
_WAIT = 60.0


class Process:
    """A background process or a terminal. It goes on when the client has gone.

    Attributes
    ----------
    info : ProcessAnswer
        As it was when it was last looked at.
    """

    def __init__(self, connection: Connection, sandbox: str, info: ProcessAnswer) -> None:
        self.info = info
        self._connection = connection
        self._path = f"{sandbox}/processes/{segment(info.id)}"

    @property
    def id(self) -> str:
        """Its id in the sandbox."""
        return self.info.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.info.state}>"

    def refresh(self) -> ProcessAnswer:
        """Look at it anew."""
        self.info = self._connection.call("GET", self._path, ProcessAnswer)
        return self.info

    def read(
        self,
        offset: int = 0,
        *,
        stream: str = "stdout",
        limit: int = 256 * 1024,
        wait: float = 0.0,
        encoding: Encoding = "utf-8",
    ) -> OutputChunk:
        """Read what it printed from an offset on; `wait` up to 60 s for something to come."""
        query = OutputQuery(
            stream="stderr" if stream == "stderr" else "stdout",
            offset=offset,
            limit=limit,
            wait=wait,
            encoding=encoding,
        )
        return self._connection.call("GET", f"{self._path}/output", OutputChunk, query=query, timeout=wait)

    def follow(
        self, *, stdout_offset: int | None = None, stderr_offset: int | None = None
    ) -> Stream[Output | ExitEvent]:
        """Open a stream of what it prints, from the oldest that is kept unless told otherwise, to its end."""
        query = FollowQuery(stdout_offset=stdout_offset, stderr_offset=stderr_offset, encoding="base64")
        return self._connection.events("GET", f"{self._path}/follow", output_decoders(), "exit", query=query)

    def write(self, data: str | bytes, *, is_last: bool = False) -> None:
        """Write to its input, or type on a terminal; `is_last` closes the input."""
        body = InputRequest(is_last=is_last, **content(data))
        self.info = self._connection.call("POST", f"{self._path}/stdin", ProcessAnswer, body=body, timeout=30.0)

    def close_stdin(self) -> None:
        """Close its input."""
        self.write("", is_last=True)

    def signal(self, signal: str | int = "TERM") -> None:
        """Send a signal to its process group."""
        body = SignalRequest(signal=signal)
        self.info = self._connection.call("POST", f"{self._path}/signal", ProcessAnswer, body=body)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of a terminal."""
        body = SizeRequest(rows=rows, columns=columns)
        self.info = self._connection.call("POST", f"{self._path}/size", ProcessAnswer, body=body)

    def wait(self, timeout: float | None = None) -> ProcessAnswer:
        """Wait for its end, for ever unless told otherwise; after `timeout` seconds it is answered as it is."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT if deadline is None else min(_WAIT, max(0.01, deadline - time.monotonic()))
            self.info = self._connection.call(
                "GET", f"{self._path}/wait", ProcessAnswer, query=WaitQuery(timeout=left), timeout=left
            )
            if self.info.state != "running" or (deadline is not None and time.monotonic() >= deadline):
                return self.info

    def kill(self) -> ProcessAnswer:
        """Kill it with all that it started."""
        self.info = self._connection.call("POST", f"{self._path}/kill", ProcessAnswer, timeout=30.0)
        return self.info

    def remove(self) -> None:
        """Kill it, and forget it and what it printed."""
        self._connection.call("DELETE", self._path, type(None), timeout=30.0)
