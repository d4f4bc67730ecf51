"""Represent one call of an operation, with its caller and input, and help it to do blocking work and to send bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from jupyter_agentbox.service.guardrails import check_command
from jupyter_agentbox.service.live.live_snapshots import LiveSnapshots
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService

from .routes import Route

P = ParamSpec("P")
T = TypeVar("T")

#: Worker threads for file operations. There are enough that a few slow operations do not delay the rest.
_WORKERS = ThreadPoolExecutor(24, thread_name_prefix="agentbox-rest")
#: Approximate bytes of an upload in the queue. As many again are being written, and as many hashed.
UPLOAD_BUFFER = 2 * 1024 * 1024


async def blocking(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking work in a worker thread. A cancelled caller waits for the work to end, so that nothing is torn."""
    future = asyncio.get_running_loop().run_in_executor(_WORKERS, lambda: work(*args, **kwargs))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled() and future.exception() is None:
            result = future.result()
            for name in ("abort", "close"):
                if hasattr(result, name):
                    with contextlib.suppress(Exception):
                        getattr(result, name)()
        raise


class Chunks:
    """Queue of the bytes of an upload, from the socket to the operation."""

    def __init__(self) -> None:
        self._queue: list[bytes] = []
        self._size = 0
        self._is_complete = False
        self._changed = asyncio.Event()

    async def put(self, data: bytes, stop: asyncio.Future[Any]) -> None:
        """Add bytes. Wait while the queue is full and `stop` is not done."""
        self._queue.append(data)
        self._size += len(data)
        self._changed.set()
        while self._size >= UPLOAD_BUFFER and not stop.done():
            self._changed.clear()
            waiter = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([waiter, stop], return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()

    def end(self) -> None:
        """Mark the upload as complete."""
        self._is_complete = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for parts in self.parts():
            yield b"".join(parts)

    async def parts(self) -> AsyncIterator[list[bytes]]:
        """Yield the parts received so far, without copying them."""
        while True:
            if self._queue:
                parts, self._queue, self._size = self._queue, [], 0
                self._changed.set()
                yield parts
            elif self._is_complete:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


@dataclass
class Bytes:
    """The result of an operation of kind ``download``.

    Parameters
    ----------
    chunks : iterator of bytes
        Blocks. Closed at the end if it has a ``close`` method.
    name : str
        Suggested file name.
    size : int or None
        Number of bytes, if known.
    headers : dict of str to str
        Additional headers.
    status : int
    content_type : str
    """

    chunks: Iterator[bytes]
    name: str
    size: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    content_type: str = "application/octet-stream"
    close: Callable[[], object] = lambda: None


@dataclass
class Call:
    """One call of an operation.

    Parameters
    ----------
    route : Route
    params : dict of str to str
        Parameters of the path.
    query, body : Struct or None
        As declared by the route.
    caller : Caller
    sandboxes : SandboxService
    headers : mapping of str to str
        Headers of the request.
    chunks : Chunks
        Body of an upload.
    is_allowed : coroutine function
        Returns whether the caller may ``read``, ``write`` or ``execute``.
    on_progress : callable
        Called with text during the work, from any thread.
    """

    route: Route
    params: dict[str, str]
    query: Any
    body: Any
    caller: Caller
    sandboxes: SandboxService
    headers: Any
    chunks: Chunks
    service: Any
    is_allowed: Callable[..., Awaitable[bool]]
    status: int | None = None
    on_progress: Callable[[str], object] = lambda text: None

    @property
    def id(self) -> str:
        """The sandbox id in the path."""
        return self.params["id"]

    @property
    def snapshots(self) -> LiveSnapshots:
        """The snapshots of the server's sandboxes."""
        found: LiveSnapshots = self.service.snapshots
        return found

    def use(self, tool: str | None = None) -> AbstractAsyncContextManager[ManagedSandbox]:
        """Provide the sandbox in the path for use; see :meth:`SandboxRegistry.use`."""
        return self.sandboxes.registry.use(self.id, tool or self.route.tool, caller=self.caller)

    def check_command(self, managed: ManagedSandbox, line: str | None, argv: list[str] | None) -> None:
        """Refuse a command that the sandbox's blocklist or policy's blocks. Raises PolicyRefused."""
        if line is not None:
            check_command(line, managed.blocked_commands, "blocked_commands")
        if argv is not None:
            check_command(argv, managed.blocked_commands, "blocked_commands")
