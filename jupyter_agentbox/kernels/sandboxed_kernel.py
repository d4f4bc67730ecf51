"""One kernel id: the front that clients know, and behind it one sandbox after another.

``jupyter.provisioner`` drives it by Jupyter's calls. A restart gives a new sandbox, so variables,
``/tmp`` and stray processes are gone; addresses stay, and so does a private workspace.

Coroutines run on the link's thread; :attr:`SandboxedKernel.end` may be read from anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jupyter_agentbox.errors import AgentboxError, Conflict, LinkClosed, RuntimeFailed
from jupyter_agentbox.sandbox.drivers import Kernel
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import KernelRecord, Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.sandbox.tokens import TokenStore
from jupyter_agentbox.spec import WORKSPACE, Cause, End, SandboxSpec

from .front.front import Front, OnCommand, WakeHandlers, end_notice
from .parked_kernel import ParkedKernel, Restoration
from .warm.starts import WarmStarts
from .warm.templates import KernelRequest

#: Seconds that a signal may wait for a guest that does not read.
SIGNAL_TIMEOUT = 5.0
#: Seconds that a kernel may take to be ready before the start of others goes on; between two looks at it.
READY_TIMEOUT, READY_INTERVAL = 20.0, 0.02
#: Seconds that a kernel which is to be parked has to come to an end with what it does: its last word comes after the
#: reply.
IDLE_GRACE = 1.0
#: Seconds that a process that ends waits for its sandboxes to be gone. What is left then, the sweeper takes.
EXIT_TIMEOUT = 8.0


@dataclass(frozen=True)
class KeptKernel:
    """The private workspace of a kernel that Jupyter has given up.

    Parameters
    ----------
    manager : SandboxManager
    sandbox : Sandbox
        Its last one, which has ended.
    until : float
        When its files are removed, in seconds since the epoch.
    """

    manager: SandboxManager
    sandbox: Sandbox
    until: float

    async def expire(self) -> None:
        """Remove the files when their time is over, unless the kernel was started again."""
        await asyncio.sleep(self.until - time.time())
        await self.forget()

    async def forget(self) -> None:
        """Remove the files, if they are still kept. On the link's thread."""
        kernel_id = self.sandbox.spec.kernel_id
        if SandboxedKernel.kept.get(kernel_id) is self:
            del SandboxedKernel.kept[kernel_id]
            await self.manager.stop(self.sandbox)


class SandboxedKernel:
    """Holds a kernel id's front and its present sandbox, or what the kernel was parked as.

    Parameters
    ----------
    manager : SandboxManager
        Makes and ends the sandboxes.
    key, signature_scheme
        The session's; the same over restarts.
    log : logger
        Where ends are told.
    warm : WarmStarts, optional
        What a start takes a kernel from that was started ahead.

    Attributes
    ----------
    end : End or None
        How the present kernel ended, or None while there is one. Nothing has ended before the first start.
    on_command : coroutine function or None
        See :class:`~jupyter_agentbox.kernels.front.front.Front`; to be set before the first start.
    """

    #: By ids of kernels that go on from a snapshot when Jupyter starts them, which is taken out then.
    restorations: ClassVar[dict[str, Restoration]] = {}
    #: By ids of kernels that an earlier server parked, until Jupyter starts them.
    waiting: ClassVar[dict[str, ParkedKernel]] = {}
    #: By ids of kernels that Jupyter has given up, until somebody starts them again, or their time is over.
    kept: ClassVar[dict[str, KeptKernel]] = {}
    _all: ClassVar[weakref.WeakSet[SandboxedKernel]] = weakref.WeakSet()
    _all_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        manager: SandboxManager,
        *,
        key: bytes,
        signature_scheme: str,
        log: Any = None,
        warm: WarmStarts | None = None,
    ) -> None:
        self.end: End | None = None
        self.on_command: OnCommand | None = None
        #: What the kernel runs.
        self.language = "python"
        self.manager = manager
        self._warm = warm
        self._key = key
        self._signature_scheme = signature_scheme
        self._log = log or logging.getLogger(__name__)
        self._front: Front | None = None
        #: What the first cell is to show, beside what it puts out.
        self.first_notice = ""
        self._sandbox: Sandbox | None = None
        self._kernel: Kernel | None = None
        self._parked: ParkedKernel | None = None
        self._waking: asyncio.Task[None] | None = None
        self._revived: KeptKernel | None = None
        self._meant = End(Cause.STOPPED, 137, "it was stopped")
        # One start, stop or release at a time: Jupyter's calls overlap when a user is impatient.
        self._lock = asyncio.Lock()
        with SandboxedKernel._all_lock:
            SandboxedKernel._all.add(self)

    @classmethod
    def find(cls, *, kernel_id: str | None = None, sandbox_id: str | None = None) -> SandboxedKernel | None:
        """Find the slot of a kernel id, or the one that a sandbox is in; None where this process has none."""
        for slot in cls.all():
            sandbox, parked = slot.sandbox, slot.parked
            if sandbox is not None and (sandbox.id == sandbox_id or sandbox.spec.kernel_id == (kernel_id or None)):
                return slot
            if parked is not None and (parked.sandbox_id == sandbox_id or parked.spec.kernel_id == (kernel_id or None)):
                return slot
        return None

    @classmethod
    def all(cls) -> list[SandboxedKernel]:
        """The slots of this process. From any thread."""
        with cls._all_lock:
            return list(cls._all)

    @classmethod
    async def leave_all(cls, *, parked_only: bool = False) -> None:
        """Let every kernel of this process live on without it, or only those that are parked."""
        slots = [slot for slot in cls.all() if slot.is_held]
        await LinkThread.instance().run(_gather(*(slot.leave(parked_only=parked_only) for slot in slots)))

    def release_later(self) -> None:
        """Release it from whatever thread found out that nobody holds it any more; waits for nothing."""
        LinkThread.instance().submit(self.release())

    def retire_later(self, seconds: float) -> None:
        """Have :meth:`retire` done, from whatever thread found out that Jupyter starts the kernel no more."""
        LinkThread.instance().submit(self.retire(seconds))

    @property
    def is_held(self) -> bool:
        """Whether there is anything to release."""
        return self._front is not None or self._sandbox is not None

    @property
    def sandbox(self) -> Sandbox | None:
        """The present sandbox, or the ended one whose workspace the next will have."""
        return self._sandbox

    @property
    def parked(self) -> ParkedKernel | None:
        """What the kernel was saved as, while it is parked. From any thread."""
        return self._parked if self.end is None else None

    @property
    def spec(self) -> SandboxSpec | None:
        """What was decided about the present sandbox, or of what the next will take the place of. From any thread."""
        before = self._sandbox or self._parked
        return before.spec if before is not None else None

    @property
    def front(self) -> Front | None:
        """The kernel id's endpoints, once it was started."""
        return self._front

    async def start(self, spec: SandboxSpec, argv: Sequence[str]) -> dict[str, Any]:
        """Start a kernel in a new sandbox, in place of any other.

        Returns
        -------
        dict
            Connection information for clients; the same each time.

        Raises
        ------
        AgentboxError
            It did not start. Nothing of the attempt is left, and nothing at all if it was the first.
        """
        async with self._lock:
            is_first = self._front is None
            await self._stop()
            await self._take_files_back()
            await self.manager.starting.acquire()
            try:
                front = self._front = self._front or await self._open_front(self._key, self._signature_scheme)
                front.restarting()
                kernel = await self._start_warm(spec, argv, front) or await self._start_cold(spec, argv, front)
                assert self._sandbox is not None
            except BaseException:
                self.manager.starting.release()
                revived, self._revived = self._revived, None
                if revived is not None and self._sandbox is revived.sandbox:
                    await asyncio.shield(self._keep(revived.sandbox, revived.until - time.time()))
                await asyncio.shield(self._release() if is_first else self._stop())
                raise
            self._revived = None
            LinkThread.instance().spawn(self._release_start_permit(kernel))
            self.end = None
            self._hold(kernel, front, self._sandbox)
            return self._connection_info(front)

    async def _start_cold(self, spec: SandboxSpec, argv: Sequence[str], front: Front) -> Kernel:
        self._sandbox = await self.manager.create(spec, inherit=self._sandbox, on_refusal=front.refusal)
        return await self._sandbox.start_kernel(
            argv,
            spec.env,
            WORKSPACE,
            key=self._key.decode(),
            signature_scheme=self._signature_scheme,
            language=self.language,
        )

    async def _start_warm(self, spec: SandboxSpec, argv: Sequence[str], front: Front) -> Kernel | None:
        """Go on with a kernel that was started ahead; None where there is none for this one."""
        if self._warm is None:
            return None
        wish = KernelRequest(spec, argv, self._key.decode(), self._signature_scheme, front.refusal, self._sandbox)
        sandbox = await self._warm.start(wish)
        if sandbox is None:
            return None
        self._sandbox = sandbox
        return next(iter(sandbox.kernels.values()))

    async def _open_front(self, key: bytes, signature_scheme: str) -> Front:
        front = await Front.open(key=key, signature_scheme=signature_scheme, log=self._log)
        front.on_command = self.on_command
        front.audience.on_client = self._keep_client
        return front

    def _keep_client(self, client: str) -> None:
        known = self._sandbox.record.main_kernel if self._sandbox is not None else None
        if self._sandbox is not None and known is not None:
            known.client = client
            self._sandbox.record.save(self._sandbox.directory)

    @property
    def client(self) -> str:
        """The session of the client that ran the last cell; empty if that is not known."""
        known = self._sandbox.record.main_kernel if self._sandbox is not None else None
        return known.client if known is not None else ""

    async def _release_start_permit(self, kernel: Kernel) -> None:
        """Let the next one start once this kernel is ready, or takes unusually long."""
        try:
            for _ in range(int(READY_TIMEOUT / READY_INTERVAL)):
                if kernel.is_ready or kernel.end is not None:
                    break
                await asyncio.sleep(READY_INTERVAL)
        finally:
            self.manager.starting.release()

    async def adopt(self, record: Record, spec: SandboxSpec) -> dict[str, Any]:
        """Put a kernel that an earlier process started behind new endpoints, and go on with it.

        Parameters
        ----------
        record : Record
            From ``SandboxManager.orphans``.
        spec : SandboxSpec
            Its own, as policy has it now.

        Returns
        -------
        dict
            Connection information for clients, with the key that the kernel has.

        Raises
        ------
        PolicyRefused
            It can't be held to what policy has now, and is to be ended.
        AgentboxError
            Somebody else has it, or it has ended. Nothing has changed.
        """
        async with self._lock:
            known = _main_kernel(record)
            front = await self._open_front(known.key.encode(), known.signature_scheme)
            try:
                sandbox = await self.manager.adopt(record.id, spec, on_refusal=front.refusal)
            except BaseException:
                front.close()
                raise
            self._key, self._signature_scheme = known.key.encode(), known.signature_scheme
            self._front, self._sandbox, self.end = front, sandbox, None
            self.language = known.language
            front.audience.expect()
            self._hold(sandbox.kernels[known.name], front, sandbox)
            front.ask()
            return self._connection_info(front)

    async def restore(self, found: Restoration, moved: Callable[[Sandbox], object]) -> dict[str, Any]:
        """Put the kernel of a snapshot behind the endpoints, in place of any other, which ends.

        Parameters
        ----------
        found : Restoration
            What was saved.
        moved : callable
            Told the new sandbox, before its kernel says a word to anybody.

        Returns
        -------
        dict
            Connection information for clients; the key is the kernel's, so the same where it was this slot's before.

        Raises
        ------
        AgentboxError
            It did not start. What was there goes on.
        """
        async with self._lock:
            return await self._restore(found, moved)

    async def _restore(self, found: Restoration, moved: Callable[[Sandbox], object]) -> dict[str, Any]:
        known = _main_kernel(found.record)
        front = self._front
        if front is None or self._key.decode() != known.key:
            front = await self._open_front(known.key.encode(), known.signature_scheme)
        try:
            async with self.manager.starting:
                sandbox = await self.manager.restore(found.spec, found.record, found.saved, on_refusal=front.refusal)
        except BaseException:
            if front is not self._front:
                front.close()
            raise
        old_sandbox, old_front = self._sandbox, self._front
        if old_front is front:
            front.abort_pending()
        self._key, self._signature_scheme = known.key.encode(), known.signature_scheme
        self._front, self._sandbox, self.end = front, sandbox, None
        self.language = known.language
        moved(sandbox)
        self._hold(sandbox.kernels[known.name], front, sandbox)
        front.ask()
        if old_sandbox is not None:
            await asyncio.to_thread(TokenStore(self.manager.state_dir).carry, old_sandbox.id, sandbox.id)
            await self.manager.stop(old_sandbox)
        if old_front is not None and old_front is not front:
            old_front.close()
        return self._connection_info(front)

    async def leave(self, *, parked_only: bool = False) -> None:
        """Let go of the kernel, which lives on and waits for a successor of this process; or only if it is parked."""
        async with self._lock:
            if parked_only and self.parked is None:
                return
            sandbox, self._sandbox, self._kernel = self._sandbox, None, None
            front, self._front, self._parked = self._front, None, None
            if front is not None:
                front.is_end_expected = True
                front.detach()
                front.close()
            if sandbox is not None:
                await self.manager.leave(sandbox)
            self.end = self.end or End(Cause.STOPPED, 0, "it was left to the next server")

    async def park(self, save: Callable[[Sandbox], Awaitable[ParkedKernel]]) -> None:
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
            front.park(self._wake_handlers)
            await self.manager.stop(sandbox, End(Cause.STOPPED, 0, "it was parked"))

    async def take_over(self, parked: ParkedKernel) -> dict[str, Any]:
        """Put a kernel that an earlier process parked behind new endpoints; see :meth:`adopt`."""
        async with self._lock:
            known = parked.kernel
            self._key, self._signature_scheme = known.key.encode(), known.signature_scheme
            front = await self._open_front(self._key, self._signature_scheme)
            self._front, self._parked, self.end = front, parked, None
            front.park(self._wake_handlers)
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

    def _moved(self, parked: ParkedKernel, sandbox: Sandbox) -> None:
        self._parked = None
        parked.moved(sandbox)

    @property
    def _wake_handlers(self) -> WakeHandlers:
        return WakeHandlers(self._wanted, self._shut_down)

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

    def _hold(self, kernel: Kernel, front: Front, sandbox: Sandbox) -> None:
        sandbox.clean_up_with(front.directory)
        self._kernel = kernel
        front.attach(kernel)
        front.first_notice, self.first_notice = self.first_notice, ""
        kernel.add_end_callback(lambda: self._ended(kernel))
        if kernel.end is not None:
            self._ended(kernel)

    def _connection_info(self, front: Front) -> dict[str, Any]:
        return {**front.connection_info, "key": self._key, "signature_scheme": self._signature_scheme}

    def expect_end(self, why: End | None = None) -> None:
        """Somebody asked the kernel to end: no cell needs to be told. The log is told why, if that is known."""
        self._meant = why or self._meant
        if self._front is not None:
            self._front.is_end_expected = True

    def end_lease(self) -> None:
        """Have no later process take the kernel over: its end was asked for. From any thread."""
        sandbox = self._sandbox
        if sandbox is not None:
            sandbox.end_lease()

    async def signal(self, number: int) -> None:
        """Send a signal to the kernel and its children.

        An interrupt that comes before the kernel can handle it would kill it, and there is nothing to
        interrupt yet: it is dropped. So is any signal for a kernel that is gone.
        """
        kernel = self._kernel
        if kernel is None or kernel.end is not None or (number == signal.SIGINT and not kernel.is_ready):
            return
        try:
            await asyncio.wait_for(kernel.signal(number), SIGNAL_TIMEOUT)
        except LinkClosed:
            pass
        except asyncio.TimeoutError:
            self._log.warning("the sandbox does not take signal %d", number)

    async def stop(self) -> None:
        """End the kernel with its sandbox, whatever it does; what a restart needs is kept."""
        self.expect_end()
        async with self._lock:
            await self._stop()

    async def prepare_restart(self) -> None:
        """The present kernel is over and a next one will come: keep what it needs."""
        await self.stop()
        if self._front is not None:
            self._front.restarting()

    async def refuse(self, sentence: str) -> None:
        """Tell whoever sends something, until a kernel is started, why there is none. Heartbeats are not answered."""
        async with self._lock:
            await self._stop()
            if self._front is not None:
                self._front.refuse_all(sentence)

    async def release(self) -> None:
        """End and remove everything. Safe at any time, and again."""
        self.expect_end()
        async with self._lock:
            await self._release()

    async def _stop(self) -> None:
        if self.parked is not None:
            self.end = self._meant
            if self._front is not None:
                self._front.detach()
        if self._sandbox is None:
            return
        if self._kernel is not None and self._kernel.end is None:
            self.expect_end()
        end = self._meant
        if self._front is not None and not self._front.is_end_expected and self._kernel is not None:
            # A kernel's end that nobody asked for is why its sandbox ends.
            is_own = self._kernel in self._sandbox.kernels.values()
            end = (self._kernel.end if is_own else None) or end
        await self.manager.stop(self._sandbox, end, is_kept=True)
        if self._kernel is not None and self._kernel.end is None:
            # The kernel's own watcher notices a moment later; poll() must not have to wait for it.
            self._kernel.ended(self._sandbox.end or end)

    async def _release(self) -> None:
        await self._stop()
        sandbox, self._sandbox, self._kernel = self._sandbox, None, None
        if sandbox is not None:
            await self.manager.stop(sandbox)
        parked, self._parked = self._parked, None
        if parked is not None:
            await parked.forget()
            detail = self._meant.to_detail(parked.spec.kernel_id)
            try:
                await self.manager.audit.arecord("lifecycle", parked.sandbox_id, detail=detail)
            except AgentboxError as error:
                self._log.error("a parked kernel's end could not be written to the audit log: %s", error)
        front, self._front = self._front, None
        if front is not None:
            front.close()
        self.end = self.end or End(Cause.STOPPED, 0, "it was removed")

    async def retire(self, seconds: float) -> None:
        """Release it, as Jupyter does not start the kernel again; keep a private workspace for :meth:`take_kept`.

        Parameters
        ----------
        seconds : float
            For how long; 0 for not at all.
        """
        if self.end is None:
            self.expect_end()
        async with self._lock:
            sandbox = self._sandbox
            if sandbox is not None and sandbox.spec.workspace is None and sandbox.spec.kernel_id and seconds:
                await self._stop()
                await self._keep(sandbox, seconds)
            await self._release()

    async def _keep(self, sandbox: Sandbox, seconds: float) -> None:
        await self.manager.keep(sandbox)
        kept = KeptKernel(self.manager, sandbox, time.time() + seconds)
        self.kept[sandbox.spec.kernel_id] = kept
        self._sandbox = self._kernel = None
        LinkThread.instance().spawn(kept.expire())

    def take_kept(self, kernel_id: str) -> Sandbox | None:
        """Have the next start inherit the files of an ended kernel of that id; return its sandbox if there is one."""
        kept = self.kept.pop(kernel_id, None)
        if kept is None:
            return None
        self._revived, self._sandbox = kept, kept.sandbox
        return kept.sandbox

    def _ended(self, kernel: Kernel) -> None:
        if kernel is not self._kernel or kernel.end is None or self.end is not None:
            return
        self.end = kernel.end
        if self._front is not None and not self._front.is_end_expected:
            self._log.error("%s", end_notice(self.end))
        # A sandbox without its kernel is no use to anybody, and Jupyter may never ask for it again.
        LinkThread.instance().spawn(self._clear_up(kernel))

    async def _clear_up(self, kernel: Kernel) -> None:
        async with self._lock:
            if kernel is self._kernel:
                try:
                    await self._stop()
                except AgentboxError as error:
                    self._log.error("a sandbox was not removed: %s", error)


def _main_kernel(record: Record) -> KernelRecord:
    known = record.main_kernel
    if known is None:
        raise RuntimeFailed(f"no notebook's kernel runs in sandbox {record.id}")
    return known


async def _gather(*work: Awaitable[None]) -> None:
    await asyncio.gather(*work)


def _release_all() -> None:
    """Take along what is left: a console, for one, just ends, without a word to its kernel manager."""

    async def release() -> None:
        released = [slot.release() for slot in slots] + [kept.forget() for kept in list(SandboxedKernel.kept.values())]
        await asyncio.gather(*released, return_exceptions=True)

    slots = [slot for slot in SandboxedKernel._all if slot.is_held]
    if slots or SandboxedKernel.kept:
        with contextlib.suppress(Exception):
            LinkThread.instance().submit(release()).result(EXIT_TIMEOUT)


# Not atexit: by then no worker thread can be started any more, and runtimes need them.
threading._register_atexit(_release_all)  # type: ignore[attr-defined]
