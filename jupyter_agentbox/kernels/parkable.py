"""How a kernel id's kernel is parked and woken behind its endpoints: a part of ``kernels.sandboxed_kernel``."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from jupyter_agentbox.errors import AgentboxError, Conflict
from jupyter_agentbox.sandbox.drivers import Kernel
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import Cause, End

from .front.front import Front, Parking
from .saved import Parked, Restoration

#: Seconds that a kernel which is to be parked has to come to an end with what it does: its last word comes after the
#: reply.
IDLE_GRACE = 1.0


class Parkable(ABC):
    """What a slot does with a kernel that is saved to the disk. On the link's thread, but for :attr:`parked`."""

    end: End | None
    manager: SandboxManager
    _log: Any
    _key: bytes
    _signature_scheme: str
    _front: Front | None
    _sandbox: Sandbox | None
    _kernel: Kernel | None
    _lock: asyncio.Lock
    _parked: Parked | None
    _waking: asyncio.Task[None] | None

    @abstractmethod
    async def _restore(self, found: Restoration, moved: Callable[[Sandbox], object]) -> dict[str, Any]: ...
    @abstractmethod
    async def _open_front(self, key: bytes, signature_scheme: str) -> Front: ...
    @abstractmethod
    def _connection_info(self, front: Front) -> dict[str, Any]: ...

    @property
    def parked(self) -> Parked | None:
        """What the kernel was saved as, while it is parked."""
        return self._parked if self.end is None else None

    async def park(self, save: Callable[[Sandbox], Awaitable[Parked]]) -> None:
        """Have the kernel saved, and end it with its sandbox. The endpoints stay, and what is sent there wakes it.

        Raises
        ------
        Conflict
            Something runs, or there is no kernel.
        AgentboxError
            It was not saved, and goes on.
        """
        async with self._lock:
            kernel, front, sandbox = self._kernel, self._front, self._sandbox
            if kernel is None or front is None or sandbox is None or kernel.end is not None:
                raise Conflict("there is no kernel that could be parked")
            deadline = time.monotonic() + IDLE_GRACE
            while any(other.is_busy() for other in sandbox.kernels.values() if other.end is None):
                if time.monotonic() > deadline:
                    raise Conflict("code runs in the sandbox: wait for its end, or interrupt it")
                await asyncio.sleep(IDLE_GRACE / 20)
            front.hold()
            try:
                parked = await save(sandbox)
            except BaseException:
                front.resume()
                raise
            if self._kernel is None or self._kernel.end is not None:
                await parked.forget()
                raise Conflict("the kernel ended while it was saved")
            self._parked, self._kernel, self._sandbox = parked, None, None
            front.park(self._parking)
            await self.manager.stop(sandbox, End(Cause.STOPPED, 0, "it was parked"))

    async def take_over(self, parked: Parked) -> dict[str, Any]:
        """Put a kernel that an earlier process parked behind new endpoints; see :meth:`adopt`."""
        async with self._lock:
            known = parked.kernel
            self._key, self._signature_scheme = known.key.encode(), known.signature_scheme
            front = await self._open_front(self._key, self._signature_scheme)
            self._front, self._parked, self.end = front, parked, None
            front.park(self._parking)
            return self._connection_info(front)

    async def wake(self) -> None:
        """Let a parked kernel go on, and hand it what waits for it. Does nothing to one that is not parked.

        Raises
        ------
        LimitReached
            There are as many sandboxes as there may be.
        AgentboxError
            It did not start. It is parked still.
        """
        async with self._lock:
            parked = self.parked
            if parked is None:
                return
            with parked.waking():
                async with parked.opened() as found:
                    await self._restore(found, lambda sandbox: self._moved(parked, sandbox))
            assert self._sandbox is not None
            await parked.woken(self._sandbox)

    def _moved(self, parked: Parked, sandbox: Sandbox) -> None:
        self._parked = None
        parked.moved(sandbox)

    @property
    def _parking(self) -> Parking:
        return Parking(self._wanted, self._shut_down)

    def _wanted(self) -> None:
        if self._waking is None and self.parked is not None:
            self._waking = LinkThread.instance().spawn(self._wake_for_clients())

    async def _wake_for_clients(self) -> None:
        try:
            await self.wake()
        except Exception as error:
            self._log.error("a parked kernel was not woken: %s", error, exc_info=not isinstance(error, AgentboxError))
            if self._front is not None and self.parked is not None:
                self._front.refuse_waiting(f"the kernel is parked, and could not be woken: {error}")
        finally:
            self._waking = None

    def _shut_down(self) -> None:
        if self.parked is not None:
            self.end = End(Cause.EXITED, 0, "the kernel was shut down")
            if self._front is not None:
                self._front.detach()

    async def _take_files_back(self) -> None:
        """A restart keeps a private workspace: of a parked kernel it is with what was saved. Otherwise forget that."""
        parked = self._parked
        if parked is None:
            return
        if parked.spec.workspace is None:
            async with parked.opened() as found, self.manager.starting:
                self._sandbox = await self.manager.restore(found.spec, found.record, found.saved)
            await self.manager.stop(self._sandbox, is_kept=True)
        self._parked = None
        await parked.forget()
