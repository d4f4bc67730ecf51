"""One call of an operation: who calls, what came in, and the ways to do blocking work and to send bytes."""

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

#: Worker threads for operations on files: enough that a few slow ones do not hold up the rest.
_WORKERS = ThreadPoolExecutor(24, thread_name_prefix="agentbox-rest")
#: Bytes of an upload that wait to be written, about; as many are being written, and as many hashed.
UPLOAD_BUFFER = 2 * 1024 * 1024


async def blocking(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Do blocking work in a worker thread. Whoever is cancelled meanwhile leaves after it, so that nothing is torn."""
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
    """The bytes of an upload on their way from the socket to the operation."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._size = 0
        self._is_whole = False
        self._changed = asyncio.Event()

    async def put(self, data: bytes, stop: asyncio.Future[Any]) -> None:
        """Hand bytes over, waiting while too many lie there and `stop` is not done."""
        self._waiting.append(data)
        self._size += len(data)
        self._changed.set()
        while self._size >= UPLOAD_BUFFER and not stop.done():
            self._changed.clear()
            waiter = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([waiter, stop], return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()

    def end(self) -> None:
        """No more will come."""
        self._is_whole = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for parts in self.parts():
            yield b"".join(parts)

    async def parts(self) -> AsyncIterator[list[bytes]]:
        """Give what has come meanwhile, uncopied."""
        while True:
            if self._waiting:
                parts, self._waiting, self._size = self._waiting, [], 0
                self._changed.set()
                yield parts
            elif self._is_whole:
                return
            else:
                self._changed.clear()
                await self._changed.wait()


@dataclass
class Bytes:
    """What an operation of kind ``download`` returns.

    Parameters
    ----------
    chunks : iterator of bytes
        Blocks; closed at the end, if it can be.
    name : str
        File name that is proposed.
    size : int or None
        Bytes, where it is known.
    headers : dict of str to str
        More headers.
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
    """One call.

    Parameters
    ----------
    route : Route
    params : dict of str to str
        Those in the path.
    query, body : Struct or None
        As the route declares them.
    caller : Caller
    sandboxes : SandboxService
    headers : mapping of str to str
        Of the request.
    chunks : Chunks
        Of an upload.
    is_allowed : coroutine function
        Asks the authorizer whether the caller may ``read``, ``write`` or ``execute``.
    tell : callable
        Takes text that comes while the work goes on; from any thread.
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
    tell: Callable[[str], object] = lambda text: None

    @property
    def id(self) -> str:
        """The sandbox's id in the path."""
        return self.params["id"]

    @property
    def snapshots(self) -> LiveSnapshots:
        """The snapshots of the server's sandboxes."""
        found: LiveSnapshots = self.service.snapshots
        return found

    def use(self, tool: str | None = None) -> AbstractAsyncContextManager[ManagedSandbox]:
        """Have the sandbox of the path at hand; see :meth:`SandboxService.use`."""
        return self.sandboxes.registry.use(self.id, tool or self.route.tool, caller=self.caller)

    def check_command(self, managed: ManagedSandbox, line: str | None, argv: list[str] | None) -> None:
        """Refuse a command that the sandbox's rules or policy's name. Raises PolicyRefused."""
        if line is not None:
            check_command(line, managed.blocked_commands, "blocked_commands")
        if argv is not None:
            check_command(argv, managed.blocked_commands, "blocked_commands")
