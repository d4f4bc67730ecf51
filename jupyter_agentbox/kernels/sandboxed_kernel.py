"""Manage one kernel id: the front that clients connect to, and the sandboxes that run the kernel one after another.

``jupyter.provisioner`` drives it with Jupyter's calls. A restart creates a new sandbox, so variables, ``/tmp`` and
stray processes are lost. The addresses and a private workspace stay.

Coroutines run on the link thread. :attr:`SandboxedKernel.end` may be read from any thread.
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

from .access_notes import AccessNotes
from .disk_notes import DiskNotes
from .frame_notes import FrameNotes
from .front.front import Front, OnCommand, WakeHandlers, end_notice
from .parked_kernel import ParkedKernel, Restoration
from .warm.starts import WarmStarts
from .warm.templates import KernelRequest

#: Seconds that a signal may wait for a guest that does not read.
SIGNAL_TIMEOUT = 5.0
#: Seconds that a starting kernel may delay the next start until it is ready; and between two checks of it.
READY_TIMEOUT, READY_INTERVAL = 20.0, 0.02
#: Seconds that a kernel to be parked has to become idle, because its ``idle`` status comes after the reply.
IDLE_GRACE = 1.0
#: Seconds that an exiting process waits for its sandboxes to end. The sweeper removes the rest.
EXIT_TIMEOUT = 8.0


@dataclass(frozen=True)
class RetainedWorkspace:
    """The private workspace of a kernel that Jupyter has given up.

    Parameters
    ----------
    manager : SandboxManager
    sandbox : Sandbox
        The last sandbox of the kernel. It has ended.
    until : float
        When the files are removed, in seconds since the epoch.
    """

    manager: SandboxManager
    sandbox: Sandbox
    until: float

    async def expire(self) -> None:
        """Remove the files when they expire, unless the kernel was started again."""
        await asyncio.sleep(self.until - time.time())
        await self.forget()

    async def forget(self) -> None:
        """Remove the files, if they are still kept. Call on the link thread."""
        kernel_id = self.sandbox.spec.kernel_id
        if SandboxedKernel.retained.get(kernel_id) is self:
            del SandboxedKernel.retained[kernel_id]
            await self.manager.stop(self.sandbox)


class SandboxedKernel:
    """The front and the current sandbox of one kernel id, or its parked kernel.

    Parameters
    ----------
    manager : SandboxManager
        Creates and ends the sandboxes.
    key, signature_scheme
        For signing messages. They stay the same over restarts.
    log : logger
        Receives the reasons for which kernels ended.
    warm : WarmStarts, optional
        Provides prestarted kernels.

    Attributes
    ----------
    end : End or None
        How the current kernel ended, or None while it runs. Also None before the first start.
    on_command : coroutine function or None
        See :class:`~jupyter_agentbox.kernels.front.front.Front`. Set it before the first start.
    """

    #: Snapshots to continue from when Jupyter starts these kernels, by kernel id. A start removes its entry.
    restorations: ClassVar[dict[str, Restoration]] = {}
    #: Kernels that an earlier server parked, by kernel id, until Jupyter starts them.
    waiting: ClassVar[dict[str, ParkedKernel]] = {}
    #: Files of kernels that Jupyter has given up, by kernel id, until the kernel is started again or they expire.
    retained: ClassVar[dict[str, RetainedWorkspace]] = {}
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
        #: Language of the kernel.
        self.language = "python"
        self.manager = manager
        self._warm = warm
        self._key = key
        self._signature_scheme = signature_scheme
        self._log = log or logging.getLogger(__name__)
        self._front: Front | None = None
        #: Text to show with the first cell, in addition to its output.
        self.first_notice = ""
        self._sandbox: Sandbox | None = None
        self._kernel: Kernel | None = None
        self._parked: ParkedKernel | None = None
        self._waking: asyncio.Task[None] | None = None
        self._inherited: RetainedWorkspace | None = None
        self._expected_end = End(Cause.STOPPED, 137, "it was stopped")
        # One start, stop or release at a time: Jupyter's calls overlap when a user is impatient.
        self._lock = asyncio.Lock()
        with SandboxedKernel._all_lock:
            SandboxedKernel._all.add(self)

    @classmethod
    def find(cls, *, kernel_id: str | None = None, sandbox_id: str | None = None) -> SandboxedKernel | None:
        """Return the sandboxed kernel with a kernel id, or in a sandbox, or None if this process has none."""
        for kernel in cls.all():
            sandbox, parked = kernel.sandbox, kernel.parked
            if sandbox is not None and (sandbox.id == sandbox_id or sandbox.spec.kernel_id == (kernel_id or None)):
                return kernel
            if parked is not None and (parked.sandbox_id == sandbox_id or parked.spec.kernel_id == (kernel_id or None)):
                return kernel
        return None

    @classmethod
    def all(cls) -> list[SandboxedKernel]:
        """Return the sandboxed kernels of this process. May be called from any thread."""
        with cls._all_lock:
            return list(cls._all)

    @classmethod
    async def leave_all(cls, *, parked_only: bool = False) -> None:
        """Give up ownership of every kernel of this process, or only of the parked ones, and let them live."""
        kernels = [kernel for kernel in cls.all() if kernel.is_held]
        await LinkThread.instance().run(_gather(*(kernel.leave(parked_only=parked_only) for kernel in kernels)))

    def release_later(self) -> None:
        """Schedule :meth:`release` without waiting for it. May be called from any thread."""
        LinkThread.instance().submit(self.release())

    def retire_later(self, seconds: float) -> None:
        """Schedule :meth:`retire` without waiting for it, because Jupyter will not start the kernel again.

        May be called from any thread.
        """
        LinkThread.instance().submit(self.retire(seconds))

    @property
    def is_held(self) -> bool:
        """Whether there is anything to release."""
        return self._front is not None or self._sandbox is not None

    @property
    def sandbox(self) -> Sandbox | None:
        """The current sandbox, or the ended one whose workspace the next sandbox inherits."""
        return self._sandbox

    @property
    def parked(self) -> ParkedKernel | None:
        """The parked kernel, while the kernel is parked. May be read from any thread."""
        return self._parked if self.end is None else None

    @property
    def spec(self) -> SandboxSpec | None:
        """The spec of the current sandbox, or of the one that the next sandbox replaces.

        May be read from any thread.
        """
        before = self._sandbox or self._parked
        return before.spec if before is not None else None

    @property
    def front(self) -> Front | None:
        """The kernel id's endpoints, once it was started."""
        return self._front

    async def start(self, spec: SandboxSpec, argv: Sequence[str]) -> dict[str, Any]:
        """Start a kernel in a new sandbox, replacing any current one.

        Returns
        -------
        dict
            Connection information for clients. It is the same each time.

        Raises
        ------
        AgentboxError
            The kernel did not start. Nothing of the attempt is left; if it was the first start, the endpoints are
            removed too.
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
                inherited, self._inherited = self._inherited, None
                if inherited is not None and self._sandbox is inherited.sandbox:
                    await asyncio.shield(self._keep(inherited.sandbox, inherited.until - time.time()))
                await asyncio.shield(self._release() if is_first else self._stop())
                raise
            self._inherited = None
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
        """Start from a prestarted kernel. Return None if there is none that fits."""
        if self._warm is None:
            return None
        request = KernelRequest(spec, argv, self._key.decode(), self._signature_scheme, front.refusal, self._sandbox)
        sandbox = await self._warm.start(request)
        if sandbox is None:
            return None
        self._sandbox = sandbox
        return next(iter(sandbox.kernels.values()))

    async def _open_front(self, key: bytes, signature_scheme: str) -> Front:
        front = await Front.open(key=key, signature_scheme=signature_scheme, log=self._log)
        front.on_command = self.on_command
        front.audience.on_client = self._record_client
        return front

    def _record_client(self, client: str) -> None:
        known = self._sandbox.record.main_kernel if self._sandbox is not None else None
        if self._sandbox is not None and known is not None:
            known.client = client
            self._sandbox.record.save(self._sandbox.directory)

    @property
    def client(self) -> str:
        """Jupyter session id of the client that ran the last cell; empty if unknown."""
        known = self._sandbox.record.main_kernel if self._sandbox is not None else None
        return known.client if known is not None else ""

    async def _release_start_permit(self, kernel: Kernel) -> None:
        """Let the next kernel start once this one is ready or takes unusually long."""
        try:
            for _ in range(int(READY_TIMEOUT / READY_INTERVAL)):
                if kernel.is_ready or kernel.end is not None:
                    break
                await asyncio.sleep(READY_INTERVAL)
        finally:
            self.manager.starting.release()

    async def adopt(self, record: Record, spec: SandboxSpec) -> dict[str, Any]:
        """Take over a kernel that an earlier process started, and create new endpoints for it.

        Parameters
        ----------
        record : Record
            From ``SandboxManager.orphans``.
        spec : SandboxSpec
            The sandbox's specification under the current policy.

        Returns
        -------
        dict
            Connection information for clients, with the kernel's existing key.

        Raises
        ------
        PolicyRefused
            The current policy can't be applied to the running sandbox. The caller has to end it.
        AgentboxError
            Another process owns the sandbox, or it has ended. Nothing has changed.
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
        """Start the kernel of a snapshot behind the endpoints, replacing and ending any current one.

        Parameters
        ----------
        found : Restoration
            The saved state.
        moved : callable
            Called with the new sandbox before its kernel sends any message.

        Returns
        -------
        dict
            Connection information for clients. The key is that of the restored kernel, so it stays the same if the
            snapshot was made of this kernel id.

        Raises
        ------
        AgentboxError
            The kernel did not start. The current one, if any, keeps running.
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
        """Give up ownership of the kernel and let it live for a successor of this process.

        With `parked_only`, do so only if it is parked.
        """
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
            self.end = self.end or End(Cause.STOPPED, 0, "it was handed over to the next server")

    async def park(self, save: Callable[[Sandbox], Awaitable[ParkedKernel]]) -> None:
        """Save the kernel, and end it with its sandbox. The endpoints stay, and messages sent to them wake it.

        Raises
        ------
        Conflict
            Code is running, or there is no kernel.
        AgentboxError
            The kernel could not be saved. It keeps running.
        """
        async with self._lock:
            kernel, front, sandbox = self._kernel, self._front, self._sandbox
            if kernel is None or front is None or sandbox is None or kernel.end is not None:
                raise Conflict("the kernel does not run, so it cannot be parked")
            deadline = time.monotonic() + IDLE_GRACE
            while any(other.is_busy() for other in sandbox.kernels.values() if other.end is None):
                if time.monotonic() > deadline:
                    raise Conflict("code is running in the sandbox; wait until it ends, or interrupt it")
                await asyncio.sleep(IDLE_GRACE / 20)
            front.hold()
            try:
                parked = await save(sandbox)
            except BaseException:
                front.resume()
                raise
            if self._kernel is None or self._kernel.end is not None:
                await parked.forget()
                raise Conflict("the kernel ended while it was being saved")
            self._parked, self._kernel, self._sandbox = parked, None, None
            front.park(self._wake_handlers)
            await self.manager.stop(sandbox, End(Cause.STOPPED, 0, "it was parked"))

    async def take_over(self, parked: ParkedKernel) -> dict[str, Any]:
        """Take over a kernel that an earlier process parked, and create new endpoints for it; see :meth:`adopt`."""
        async with self._lock:
            known = parked.kernel
            self._key, self._signature_scheme = known.key.encode(), known.signature_scheme
            front = await self._open_front(self._key, self._signature_scheme)
            self._front, self._parked, self.end = front, parked, None
            front.park(self._wake_handlers)
            return self._connection_info(front)

    async def wake(self) -> None:
        """Restore a parked kernel and deliver its queued messages. Does nothing if the kernel is not parked.

        Raises
        ------
        LimitReached
            The maximum number of sandboxes is reached.
        AgentboxError
            The kernel could not be restored. It stays parked.
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
        return WakeHandlers(self._on_wanted, self._shut_down)

    def _on_wanted(self) -> None:
        if self._waking is None and self.parked is not None:
            self._waking = LinkThread.instance().spawn(self._wake_for_clients())

    async def _wake_for_clients(self) -> None:
        try:
            await self.wake()
        except Exception as error:
            self._log.error("cannot wake a parked kernel: %s", error, exc_info=not isinstance(error, AgentboxError))
            if self._front is not None and self.parked is not None:
                self._front.refuse_waiting(f"cannot wake the parked kernel: {error}")
        finally:
            self._waking = None

    def _shut_down(self) -> None:
        if self.parked is not None:
            self.end = End(Cause.EXITED, 0, "the kernel was shut down")
            if self._front is not None:
                self._front.detach()

    async def _take_files_back(self) -> None:
        """Prepare a restart of a parked kernel: recover a private workspace and discard the rest of the saved state.

        The private workspace of a parked kernel is stored with the saved state.
        """
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
        front.spec = sandbox.spec
        front.attach(kernel)
        notes = [FrameNotes().explain, DiskNotes(sandbox.spec, sandbox.workspace).explain]
        if sandbox.spec.workspace is not None:
            notes.append(AccessNotes(sandbox.spec, sandbox.workspace).explain)

        async def explain(frames: list[bytes]) -> list[str]:
            return [sentence for note in notes for sentence in await note(frames)]

        front.explain = explain
        front.first_notice, self.first_notice = self.first_notice, ""
        kernel.add_end_callback(lambda: self._ended(kernel))
        if kernel.end is not None:
            self._ended(kernel)

    def _connection_info(self, front: Front) -> dict[str, Any]:
        return {**front.connection_info, "key": self._key, "signature_scheme": self._signature_scheme}

    def expect_end(self, why: End | None = None) -> None:
        """Record that the kernel's end was requested, so that no cell reports it. The reason, if known, is logged."""
        self._expected_end = why or self._expected_end
        if self._front is not None:
            self._front.is_end_expected = True

    def end_lease(self) -> None:
        """Prevent any later process from adopting the kernel, because its end was requested.

        May be called from any thread.
        """
        sandbox = self._sandbox
        if sandbox is not None:
            sandbox.end_lease()

    async def signal(self, number: int) -> None:
        """Send a signal to the kernel and its children.

        An interrupt before the kernel can handle it would kill the kernel, and there is nothing to interrupt yet, so it
        is dropped. Any signal for a kernel that has ended is dropped too.
        """
        kernel = self._kernel
        if kernel is None or kernel.end is not None or (number == signal.SIGINT and not kernel.is_ready):
            return
        try:
            await asyncio.wait_for(kernel.signal(number), SIGNAL_TIMEOUT)
        except LinkClosed:
            pass
        except asyncio.TimeoutError:
            self._log.warning("signal %d may not have arrived: the sandbox does not respond, or is being saved", number)

    async def stop(self) -> None:
        """End the kernel with its sandbox, whatever it does. Everything that a restart needs is kept."""
        self.expect_end()
        async with self._lock:
            await self._stop()

    async def prepare_restart(self) -> None:
        """End the current kernel, and keep everything that the next one needs."""
        await self.stop()
        if self._front is not None:
            self._front.restarting()

    async def refuse(self, sentence: str) -> None:
        """Answer every request with an explanation, until a kernel is started. Heartbeats are not answered."""
        async with self._lock:
            await self._stop()
            if self._front is not None:
                self._front.refuse_all(sentence)

    async def release(self) -> None:
        """End and remove everything. Safe to call at any time and more than once."""
        self.expect_end()
        async with self._lock:
            await self._release()

    async def _stop(self) -> None:
        if self.parked is not None:
            self.end = self._expected_end
            if self._front is not None:
                self._front.detach()
        if self._sandbox is None:
            return
        if self._kernel is not None and self._kernel.end is None:
            self.expect_end()
        end = self._expected_end
        if self._front is not None and not self._front.is_end_expected and self._kernel is not None:
            # If the kernel ended unexpectedly, its end is the reason for the sandbox's end.
            is_own = self._kernel in self._sandbox.kernels.values()
            end = (self._kernel.end if is_own else None) or end
        await self.manager.stop(self._sandbox, end, is_kept=True)
        if self._kernel is not None and self._kernel.end is None:
            # The kernel's own watcher notices a moment later, but poll() must not have to wait for it.
            self._kernel.ended(self._sandbox.end or end)

    async def _release(self) -> None:
        await self._stop()
        sandbox, self._sandbox, self._kernel = self._sandbox, None, None
        if sandbox is not None:
            await self.manager.stop(sandbox)
        parked, self._parked = self._parked, None
        if parked is not None:
            await parked.forget()
            detail = self._expected_end.to_detail(parked.spec.kernel_id)
            try:
                await self.manager.audit.arecord("lifecycle", parked.sandbox_id, detail=detail)
            except AgentboxError as error:
                self._log.error("cannot write the end of a parked kernel to the audit log: %s", error)
        front, self._front = self._front, None
        if front is not None:
            front.close()
        self.end = self.end or End(Cause.STOPPED, 0, "it was removed")

    async def retire(self, seconds: float) -> None:
        """Release a kernel that Jupyter will not start again, but keep a private workspace for :meth:`take_retained`.

        Parameters
        ----------
        seconds : float
            How long to keep the files; 0 for not at all.
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
        retained = RetainedWorkspace(self.manager, sandbox, time.time() + seconds)
        self.retained[sandbox.spec.kernel_id] = retained
        self._sandbox = self._kernel = None
        LinkThread.instance().spawn(retained.expire())

    def take_retained(self, kernel_id: str) -> Sandbox | None:
        """Have the next start inherit the kept files of a kernel id. Return their sandbox, or None if there is none."""
        retained = self.retained.pop(kernel_id, None)
        if retained is None:
            return None
        self._inherited, self._sandbox = retained, retained.sandbox
        return retained.sandbox

    def _ended(self, kernel: Kernel) -> None:
        if kernel is not self._kernel or kernel.end is None or self.end is not None:
            return
        self.end = kernel.end
        if self._front is not None and not self._front.is_end_expected:
            self._log.error("%s", end_notice(self.end))
        # A sandbox without its kernel is of no use, and Jupyter may never ask for it again.
        LinkThread.instance().spawn(self._clean_up(kernel))

    async def _clean_up(self, kernel: Kernel) -> None:
        async with self._lock:
            if kernel is self._kernel:
                try:
                    await self._stop()
                except AgentboxError as error:
                    self._log.error("cannot remove a sandbox: %s", error)


def _main_kernel(record: Record) -> KernelRecord:
    known = record.main_kernel
    if known is None:
        raise RuntimeFailed(f"sandbox {record.id} has no notebook kernel")
    return known


async def _gather(*work: Awaitable[None]) -> None:
    await asyncio.gather(*work)


def _release_all() -> None:
    """End the kernels that remain at exit. A console, for example, exits without notifying its kernel manager."""

    async def release() -> None:
        released = [kernel.release() for kernel in kernels] + [
            retained.forget() for retained in list(SandboxedKernel.retained.values())
        ]
        await asyncio.gather(*released, return_exceptions=True)

    kernels = [kernel for kernel in SandboxedKernel._all if kernel.is_held]
    if kernels or SandboxedKernel.retained:
        with contextlib.suppress(Exception):
            LinkThread.instance().submit(release()).result(EXIT_TIMEOUT)


# atexit is too late: no worker threads can be started by then, and the runtimes need them.
threading._register_atexit(_release_all)  # type: ignore[attr-defined]
