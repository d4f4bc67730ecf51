"""The one thread, with an event loop of its own, that serves all links of this process.

Jupyter calls from several event loops, some of which stop between two calls; so nothing of ours belongs to a loop of a
caller's, and callers reach this one by :meth:`LinkThread.run`
or by a coroutine function that is decorated with :func:`on_link_thread`.
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
    """The one thread and event loop of this process that serve all its sandboxes."""

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
        """The thread of this process; a forked child gets its own."""
        with cls._lock:
            if cls._instance is None or cls._instance._pid != os.getpid():
                cls._instance = cls()
            return cls._instance

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run ``work`` on the thread; its result comes by the future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the thread and await it from whatever loop the caller is on."""
        if threading.current_thread() is self._thread:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` beside everything else; only on the thread itself. Errors are logged."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def repeat(self, interval: float, work: Callable[[], Awaitable[None]]) -> None:
        """Do work again and again, after so many seconds each time. What fails is logged, and done again."""
        while True:
            await asyncio.sleep(interval)
            try:
                await work()
            except Exception:
                log.exception("what is done again and again failed; it is tried again")

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            is_known = isinstance(error, AgentboxError)
            log.error("a task of the link failed: %s", error, exc_info=None if is_known else error)


def on_link_thread(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Run a coroutine function on the link's thread, whichever event loop awaits it."""

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await LinkThread.instance().run(function(*args, **kwargs))

    return run


async def finished(work: Awaitable[T]) -> T:
    """Await work to its end, also where the caller is cancelled meanwhile: what it does must not be torn."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at: nobody else will
        raise
