"""Run the one thread, with its own event loop, that serves all links of this process.

Jupyter calls from several event loops, and some of them stop between two calls. Therefore none of our objects belongs
to a caller's loop. Callers reach this one with :meth:`LinkThread.run` or with a coroutine function decorated with
:func:`on_link_thread`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, ParamSpec, TypeVar

from jupyter_agentbox.errors import AgentboxError

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


class LinkThread:
    """The thread and event loop that serve all sandboxes of this process."""

    _instance: ClassVar[LinkThread | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="agentbox-link", daemon=True)
        self._thread.start()

    @classmethod
    def instance(cls) -> LinkThread:
        """Return the link thread of this process. A forked child gets its own."""
        with cls._lock:
            if cls._instance is None or cls._instance._pid != os.getpid():
                cls._instance = cls()
            return cls._instance

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the link thread and return a future for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the link thread and await it from the caller's event loop."""
        if threading.current_thread() is self._thread:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def spawn(self, work: Coroutine[Any, Any, Any], *, is_awaited: bool = False) -> asyncio.Task[Any]:
        """Run ``work`` as a background task. Call on the link thread only.

        Its errors are logged, unless the caller awaits it (`is_awaited`) and so gets them.
        """
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if not is_awaited:
            task.add_done_callback(log_failure)
        return task

    async def repeat(self, interval: float, work: Callable[[], Awaitable[None]]) -> None:
        """Call `work` repeatedly, every `interval` seconds. Errors are logged, and the next call is made as usual."""
        while True:
            await asyncio.sleep(interval)
            try:
                await work()
            except Exception:
                log.exception("a periodic task failed; it runs again at the next interval")


def log_failure(task: asyncio.Task[Any]) -> None:
    """Log the error of a background task that has ended."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        is_known = isinstance(error, AgentboxError)
        log.error("a background task failed: %s", error, exc_info=None if is_known else error)


def on_link_thread(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a coroutine function run on the link thread, whichever event loop awaits it."""

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await LinkThread.instance().run(function(*args, **kwargs))

    return run


async def finished(work: Awaitable[T]) -> T:
    """Await work to completion, even if the caller is cancelled meanwhile, because it must not stop halfway."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, as nothing else awaits it
        raise
