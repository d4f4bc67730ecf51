"""Control background processes and terminals of a sandbox."""

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

from .connection import AsyncConnection, AsyncStream

#: Maximum wait of one call, in seconds. Longer waits use several calls.
_WAIT = 60.0


class AsyncProcess:
    """Background process or terminal. It keeps running when the client closes.

    Attributes
    ----------
    info : ProcessAnswer
        Description at the last call.
    """

    def __init__(self, connection: AsyncConnection, sandbox: str, info: ProcessAnswer) -> None:
        self.info = info
        self._connection = connection
        self._path = f"{sandbox}/processes/{segment(info.id)}"

    @property
    def id(self) -> str:
        """Id in the sandbox."""
        return self.info.id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.info.state}>"

    async def refresh(self) -> ProcessAnswer:
        """Fetch the current description, and return it."""
        self.info = await self._connection.call("GET", self._path, ProcessAnswer)
        return self.info

    async def read(
        self,
        offset: int = 0,
        *,
        stream: str = "stdout",
        limit: int = 256 * 1024,
        wait: float = 0.0,
        encoding: Encoding = "utf-8",
    ) -> OutputChunk:
        """Read output from an offset on. Waits up to `wait` seconds, at most 60, for new output."""
        query = OutputQuery(
            stream="stderr" if stream == "stderr" else "stdout",
            offset=offset,
            limit=limit,
            wait=wait,
            encoding=encoding,
        )
        return await self._connection.call("GET", f"{self._path}/output", OutputChunk, query=query, timeout=wait)

    async def follow(
        self, *, stdout_offset: int | None = None, stderr_offset: int | None = None
    ) -> AsyncStream[Output | ExitEvent]:
        """Open a stream of the output until the process ends, by default from the oldest output that is kept."""
        query = FollowQuery(stdout_offset=stdout_offset, stderr_offset=stderr_offset, encoding="base64")
        return await self._connection.events("GET", f"{self._path}/follow", output_decoders(), "exit", query=query)

    async def write(self, data: str | bytes, *, is_last: bool = False) -> None:
        """Write to the process's input, or type on a terminal. `is_last` closes the input."""
        body = InputRequest(is_last=is_last, **content(data))
        self.info = await self._connection.call("POST", f"{self._path}/stdin", ProcessAnswer, body=body, timeout=30.0)

    async def close_stdin(self) -> None:
        """Close the process's input."""
        await self.write("", is_last=True)

    async def signal(self, signal: str | int = "TERM") -> None:
        """Send a signal to the process group."""
        body = SignalRequest(signal=signal)
        self.info = await self._connection.call("POST", f"{self._path}/signal", ProcessAnswer, body=body)

    async def resize(self, rows: int, columns: int) -> None:
        """Set the size of a terminal."""
        body = SizeRequest(rows=rows, columns=columns)
        self.info = await self._connection.call("POST", f"{self._path}/size", ProcessAnswer, body=body)

    async def wait(self, timeout: float | None = None) -> ProcessAnswer:
        """Wait for the process to end, by default without limit. After `timeout` seconds, return its current state."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _WAIT if deadline is None else min(_WAIT, max(0.01, deadline - time.monotonic()))
            self.info = await self._connection.call(
                "GET", f"{self._path}/wait", ProcessAnswer, query=WaitQuery(timeout=left), timeout=left
            )
            if self.info.state != "running" or (deadline is not None and time.monotonic() >= deadline):
                return self.info

    async def kill(self) -> ProcessAnswer:
        """Kill the process and everything that it started."""
        self.info = await self._connection.call("POST", f"{self._path}/kill", ProcessAnswer, timeout=30.0)
        return self.info

    async def remove(self) -> None:
        """Kill the process, and delete its record and output."""
        await self._connection.call("DELETE", self._path, type(None), timeout=30.0)
