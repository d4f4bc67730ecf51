"""One sandbox's life: start, what runs in it, its end and the reason.

All methods run on the link's thread (:class:`~jupyter_agentbox.sandbox.link.link.LinkThread`); attributes that are
documented may be read from any thread. The runtime's blocking calls go to worker threads.
``sandbox.manager`` keeps the registry, runtimes do the isolating.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_agentbox.egress.gate import Gate, OnRefusal
from jupyter_agentbox.errors import (
    AgentboxError,
    InvalidRequest,
    LinkClosed,
    PolicyRefused,
    RuntimeFailed,
    SandboxEnded,
)
from jupyter_agentbox.guest.framing import MAX_PAYLOAD, OPEN, MessageReader, ProtocolError, load_json, pack_json
from jupyter_agentbox.linux import remove_tree
from jupyter_agentbox.runtimes import Handle, Runtime, Usage
from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.spec import (
    GIB,
    INTENDED,
    LIMIT_NAMES,
    MIB,
    WORKSPACE,
    Cause,
    End,
    Limits,
    SandboxSpec,
    format_size,
    out_of_memory,
)
from jupyter_agentbox.storage.audit.log import AuditLog
from jupyter_agentbox.storage.snapshots import copy_tree

from .claims import begin, in_batches, put_in_place, record_start
from .drivers import Kernel
from .drivers.embedded import Claim
from .freezer import Freezer
from .limits import FreeSpace, MemoryWatch, find_breach
from .link.link import Link, LinkThread, Stream, finished
from .processes import Command, ExecResult, ProcessTable
from .record import KernelRecord, Lock, ProcessRecord, Record, read_log_tail, was_told_to_end
from .sweep import KEPT_MARK, SESSION_FILE

log = logging.getLogger(__name__)

#: Seconds: for the guest to dial after the runtime said it runs, and to suspend the link; between two looks at whether
#: it lives, and at what it uses.
CONNECT_TIMEOUT = 30.0
WATCH_INTERVAL = 0.5
SUSPEND_TIMEOUT = 10.0
MEASURE_INTERVAL = 2.0
#: Bytes that a sandbox which inherits more files than its disk limit allows may write until it has deleted enough of
#: them, and how many more than twice its limit it may inherit: it would end at once otherwise, and again.
INHERITED_ROOM, MAX_INHERITED = 32 * MIB, GIB
#: What is left in the directory of an ended sandbox whose files are kept.
_KEPT = frozenset({"work", "tokens", "state.json", "lock", SESSION_FILE, KEPT_MARK})
#: Seconds between two looks at a frozen one, which may keep deleted files; bytes of them for which it is woken.
FROZEN_INTERVAL, MIN_HELD = 60.0, 16 * MIB
#: Seconds that the guest may take to look paths up; meanwhile the sandbox is not measured.
LOOKUP_TIMEOUT = 5.0
#: Seconds that the guest may take to kill a program before the memory is used up.
RELIEF_TIMEOUT = 5.0


class Sandbox:
    """One isolated environment. Made by the manager.

    Attributes
    ----------
    record : Record
        What is known of it, as in its state file.
    directory, runtime : Path, Runtime
        Its own on the host, 0700; and what runs it.
    kernels : dict of str to Kernel
        Those started in it, by their names inside.
    processes : ProcessTable
        Commands and background processes.
    end : End or None
        How it ended; readable from any thread.
    measured : tuple of float and Usage, or None
        When it was measured last, in seconds since the epoch, and what it used; readable from any thread.
    """

    def __init__(
        self, record: Record, directory: Path, runtime: Runtime, audit: AuditLog, on_refusal: OnRefusal | None = None
    ) -> None:
        self.record = record
        self.directory = directory
        self.kernels: dict[str, Kernel] = {}
        self.processes = ProcessTable(self, self._processes_changed)
        self.end: End | None = None
        self.measured: tuple[float, Usage] | None = None
        self.gate = Gate(record.id, record.spec.grant, audit, on_refusal=on_refusal)
        self.runtime = runtime
        self._audit = audit
        self._thread = LinkThread.instance()
        self._handle = Handle.from_dict(record.handle) if record.handle is not None else None
        self._lock = Lock(directory)
        self._is_stopping: Cause | None = None
        self._freezer: Freezer | None = None
        self._has_inherited = False
        self._disk_room: int | None = None
        #: Paths of the work folder that were moved from outside, and whether anything was changed; from any thread.
        self._moved: list[str] = []
        self._is_changed = False
        self._looked_up: frozenset[tuple[str, int]] = frozenset()
        self.free_space = FreeSpace(self.workspace, directory, record.spec.min_free_disk)
        self._ended = asyncio.Event()
        self._checkpointing = asyncio.Lock()
        # One that keeps files and one that removes them would leave a directory that nobody owns.
        self._emptying = asyncio.Lock()
        self._link = Link(directory / "link", self.gate.handle, self._link_lost)

    @property
    def id(self) -> str:
        """Its id."""
        return self.record.id

    @property
    def spec(self) -> SandboxSpec:
        """What was decided about it."""
        return self.record.spec

    @property
    def link(self) -> Link:
        """The link to its guest."""
        return self._link

    @property
    def is_left(self) -> bool:
        """Whether this process owns it no longer, and it lives."""
        return self._is_stopping is not None and self.end is None

    @property
    def workspace(self) -> Path:
        """The host folder that is ``/workspace`` inside."""
        return self.spec.workspace or self.directory / "work"

    async def start(self, inherit: Sandbox | None, saved: Path | None = None, claim: Claim | None = None) -> None:
        """Start it and wait for its guest.

        Parameters
        ----------
        inherit : Sandbox or None
            An ended one whose private workspace becomes this one's.
        saved : Path, optional
            What :meth:`checkpoint` has written: it goes on from there, with the kernels and processes of its record.
        claim : Claim, optional
            Whose it becomes, where it was saved as it waited.

        Raises
        ------
        RuntimeFailed, RuntimeUnavailable, InvalidRequest
            Nothing is left behind.
        """
        began = time.monotonic()
        try:
            self._make_directory(inherit)
            if saved is None:
                self._link.listen()
                await asyncio.to_thread(import_cache.give, self.directory, self.spec)
                await finished(self._launch(self.runtime.start, self.id, self.spec, self.directory))
            else:
                work = saved / "work", self.directory / "work"
                await asyncio.to_thread(copy_tree, *work, max_bytes=2 * self.spec.limits.disk)
                self._link.listen(self.record.link)
                await finished(self._launch(self.runtime.restore, self.id, self.spec, self.directory, saved / "image"))
            self._save()
            await self._connected()
            await self._resume(claim)
            self._begin_watch()
            how = "cold" if saved is None else "saved" if claim is None else "template"
            await record_start(self._audit, self.record, time.monotonic() - began, how)
        except BaseException:
            self.end = self.end or End(Cause.RUNTIME_FAILED, 1, "it did not start")
            await asyncio.shield(self.give_up(inherit))
            raise

    async def _launch(self, start: Callable[..., Handle], *arguments: Any) -> None:
        # To its end, though nobody may want it any more: what is not known here nobody would end.
        self._handle = await asyncio.to_thread(start, *arguments)

    async def give_up(self, inherit: Sandbox | None) -> None:
        """End and remove it; the workspace that it inherited goes back."""
        await self.stop(is_kept=True)
        if inherit is not None and (self.directory / "work").is_dir() and not (inherit.directory / "work").exists():
            (self.directory / "work").rename(inherit.directory / "work")
        await self.discard()

    async def adopt(
        self, claim: Claim | None = None, inherit: Sandbox | None = None, *, before: Limits | None = None
    ) -> None:
        """Become the owner of one whose owner is gone, its kernels go on where they are; or of one that waits.

        Parameters
        ----------
        claim, inherit
            For one that waits.
        before : Limits, optional
            What it was held to so far; none of it is below what its spec says now.

        Raises
        ------
        PolicyRefused
            A limit is lower now, and can't be lowered in a sandbox that runs.
        RuntimeFailed
            It has another owner, has ended, or does not answer. Nothing has changed; one that waited is ended.
        """
        if not self._lock.acquire():
            raise RuntimeFailed(f"sandbox {self.id} belongs to another process")
        if was_told_to_end(self.directory):
            self._lock.release()
            raise RuntimeFailed(f"sandbox {self.id} was told to end")
        if claim is not None:
            begin(self.record, self.directory, self._lock)
        began = time.monotonic()
        try:
            if self._handle is None or not self.runtime.is_alive(self._handle):
                raise RuntimeFailed(f"sandbox {self.id} has ended")
            if before is not None:
                await asyncio.to_thread(self._lower_limits, self._handle, before)
            self._lock.renew()
            self._link.listen()
            # Its owner may have ended when it was frozen, or while it was saved.
            self.runtime.thaw(self._handle)
            if claim is None:
                await asyncio.to_thread(self.runtime.recover, self.id, self.directory)
            else:
                self._inherit(inherit)
                await finished(asyncio.to_thread(self.runtime.claim, self._handle, self.id, self.spec, self.directory))
            await self._connected()
            await self._resume(claim)
            try:
                self._save()
            except OSError as error:
                if claim is not None:
                    raise
                # What its earlier owner wrote is still true.
                log.error("the record of sandbox %s cannot be written: %s", self.id, error)
            self._begin_watch()
            how = "adopted" if claim is None else "pool"
            await record_start(self._audit, self.record, time.monotonic() - began, how)
        except BaseException:
            await (self.leave() if claim is None else asyncio.shield(self.give_up(inherit)))
            raise

    def _lower_limits(self, handle: Handle, before: Limits) -> None:
        limits = self.spec.limits
        if lowered := {name for name in LIMIT_NAMES if getattr(limits, name) < getattr(before, name)}:
            for name in sorted(lowered & self.runtime.lower_limits(handle, limits)):
                raise PolicyRefused(
                    f"the limit {name} of its profile {self.spec.profile!r} is lower now, and can't be lowered in a "
                    "sandbox that runs",
                    setting=f"Policy.max_{name}",
                )

    async def leave(self, *, is_waiting: bool = False) -> None:
        """Own it no longer, and let it live: for its lease it waits for another owner, or frozen, to be claimed."""
        if is_waiting and self._handle is not None:
            await asyncio.gather(*(kernel.hang_up() for kernel in self.kernels.values()))
            await asyncio.to_thread(self.runtime.wait_for_claim, self._handle, self.directory)
        elif self._freezer is not None:
            self._freezer.thaw()  # it watches over its own lease
        self._is_stopping = Cause.STOPPED
        self._link.close("its owner has left")
        await self.gate.aclose()
        self._lock.release()

    async def _resume(self, claim: Claim | None = None) -> None:
        """Go on with what runs in it already."""
        if claim is not None:
            await put_in_place(self._link, claim, self.runtime.read_covered(self.directory), self.spec.lease_timeout)
        for known in self.record.kernels:
            self.kernels[known.name] = kernel = Kernel(self, known.name)
            kernel.resume(known.driver, claim)
        self.processes.resume(self.record.processes)

    async def checkpoint(self, staged: Path) -> bytes:
        """Save it as it is, while it goes on: memory and writable layer, and a private workspace.

        Parameters
        ----------
        staged : Path
            A directory with empty ones named ``image`` and ``work``.

        Returns
        -------
        bytes
            Its record, for :meth:`start` of a copy.

        Raises
        ------
        RuntimeUnavailable
            Its runtime can't do that.
        RuntimeFailed, LinkClosed, SandboxEnded
        """
        if self.end is not None:
            raise SandboxEnded(self.end)
        assert self._handle is not None
        handle = self._handle
        private = self.directory / "work"
        copy: Any = None
        if self.spec.workspace is None and await asyncio.to_thread(lambda: any(private.iterdir())):
            copy = functools.partial(copy_tree, private, staged / "work", max_bytes=2 * self.spec.limits.disk)

        async with self._checkpointing:
            kernels = [kernel for kernel in self.kernels.values() if kernel.end is None]
            try:
                # All of them have to be done before they go on, also if one fails.
                hung_up = await asyncio.gather(*(kernel.hang_up() for kernel in kernels), return_exceptions=True)
                if failed := next((item for item in hung_up if item is not None), None):
                    raise failed
                await self._link.suspend(SUSPEND_TIMEOUT)
                arguments = (handle, self.id, self.directory, staged / "image", copy)
                # The link's files must stay closed as long as gVisor saves.
                await finished(asyncio.to_thread(self.runtime.checkpoint, *arguments))
                return replace(self.record, link=self._link.number, handle=None, cleanup=[]).to_bytes()
            finally:
                self._link.resume()
                for kernel in kernels:
                    kernel.redial()

    async def _connected(self) -> None:
        assert self._handle is not None
        wait = asyncio.ensure_future(self._link.wait_connected(CONNECT_TIMEOUT))
        try:
            while not wait.done():
                await asyncio.wait([wait], timeout=WATCH_INTERVAL)
                if not wait.done() and not self.runtime.is_alive(self._handle):
                    break
            if wait.done():
                wait.result()
                return
        except LinkClosed:
            pass
        finally:
            wait.cancel()
        words = read_log_tail(self.directory)
        raise RuntimeFailed(f"the sandbox started and ended before it was ready. Its log says: {words}")

    def clean_up_with(self, directory: Path) -> None:
        """Have the sweep remove ``directory``, one of a front's, when it removes this sandbox."""
        self.record.cleanup = [str(directory)]
        self._save()

    def open_stream(self, header: dict[str, Any]) -> Stream:
        """Open a stream to the guest. Raises SandboxEnded, LinkClosed, InvalidRequest."""
        if self.end is not None:
            raise SandboxEnded(self.end)
        try:
            return self._link.open(header)
        except ValueError:
            raise InvalidRequest(
                f"command and environment are larger than the {MAX_PAYLOAD[OPEN] // 1024} KiB that fit", field="env"
            ) from None

    async def start_kernel(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        key: str,
        signature_scheme: str,
        context: str = "",
        language: str = "python",
    ) -> Kernel:
        """Start a kernel process.

        Parameters
        ----------
        argv, env, cwd
            Of the process; ``{connection_file}`` in ``argv`` becomes its path inside.
        key, signature_scheme : str
            For the connection file; the guest adds address and ports.
        context, language : str
            Name of the context of code that it is for, and what it runs.
        """
        self.record.started_kernels += 1
        name = f"kernel-{self.record.started_kernels}"
        kernel = Kernel(self, name)
        kernel.start(argv, env, cwd, {"key": key, "signature_scheme": signature_scheme, "kernel_name": ""})
        self.kernels[name] = kernel
        self.record.kernels.append(KernelRecord(name, key, signature_scheme, context, kernel.driver, language))
        self._save()
        return kernel

    def forget_kernel(self, kernel: Kernel) -> None:
        """Drop one that has ended, or is to."""
        kernel.close()
        if self.kernels.get(kernel.name) is kernel:
            del self.kernels[kernel.name]
            self.record.kernels = [known for known in self.record.kernels if known.name != kernel.name]
            if self.end is None:
                self._save()

    async def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
        stdin: bytes = b"",
        timeout: float = 30.0,
    ) -> ExecResult:
        """Run a command to its end: :meth:`ProcessTable.run` in short."""
        command = Command(argv=argv, env=env or {}, workdir=cwd)
        return await self.processes.run(command, stdin=stdin, timeout=timeout)

    def _processes_changed(self, records: list[ProcessRecord]) -> None:
        self.record.processes = records
        if self.end is None:
            self._save()

    async def wait_ended(self) -> End:
        """Wait until it is over; why is returned."""
        await self._ended.wait()
        assert self.end is not None
        return self.end

    async def stop(self, cause: Cause | End = Cause.STOPPED, *, is_kept: bool = False) -> None:
        """End it and remove what it was made of. Safe to call again, and from several places at once.

        Parameters
        ----------
        cause : Cause or End
            Told to whoever asks why, if it still lives.
        is_kept : bool
            Keep its directory, for :meth:`start` of a successor to inherit; then :meth:`discard` it.
        """
        if not is_kept:
            self.end_lease()
        end = cause if isinstance(cause, End) else End(cause, 137, "it was stopped")
        self._is_stopping = self._is_stopping or end.cause
        if not is_kept:
            with suppress(OSError):  # from now on the sweep keeps none of its files
                (self.directory / SESSION_FILE).unlink()
        if self.end is None:
            self._note_end(end)
            await self._record_end(end)
        self._link.close("the sandbox was stopped")
        await self.gate.aclose()
        if self._handle is not None:
            await asyncio.to_thread(self.runtime.kill, self._handle)
            await asyncio.to_thread(self.runtime.remove, self._handle, self.directory)
        self._ended.set()
        if not is_kept:
            await self.discard()

    def end_lease(self) -> None:
        """Have no later process take it over, whatever becomes of this one: its end was asked for. From any thread."""
        self._lock.end_lease()

    async def keep(self) -> None:
        """Leave nothing of an ended sandbox but its private workspace and what names it, until :meth:`discard`."""
        await self.stop(is_kept=True)
        async with self._emptying:
            if self._lock.is_held:  # or it was discarded meanwhile
                await asyncio.to_thread(self._strip)

    def _strip(self) -> None:
        for path in self.directory.iterdir():
            if path.name not in _KEPT:
                with suppress(OSError):
                    remove_tree(path)
        if not (self.directory / KEPT_MARK).exists():
            (self.directory / KEPT_MARK).touch(0o600)

    async def take_ended(self) -> bool:
        """Become the owner of one that ended without an owner; whether it has files to keep."""
        if not self._lock.acquire():
            return False
        if self._handle is not None and self.runtime.is_alive(self._handle):
            self._lock.release()
            return False
        is_wanted = (self.directory / SESSION_FILE).exists() and not was_told_to_end(self.directory)
        if not is_wanted or not (self.directory / "work").is_dir():
            await self.stop()  # another has its files
            return False
        self.end = End(Cause.CRASHED, 137, "it ended while no server watched it")
        if self._handle is not None and not (self.directory / KEPT_MARK).exists():
            self.end = await asyncio.to_thread(self.runtime.why_ended, self._handle, self.spec.limits, self.directory)
        self._is_stopping = self.end.cause
        self._ended.set()
        await self.keep()
        return True

    @property
    def kept_since(self) -> float:
        """When its files began to be kept, in seconds since the epoch. Raises OSError if they are not."""
        return (self.directory / KEPT_MARK).stat().st_mtime

    async def discard(self) -> None:
        """Remove the directory of an ended sandbox. Does nothing the second time."""
        async with self._emptying:
            if self._lock.is_held:
                await asyncio.to_thread(shutil.rmtree, self.directory, True)
                self._lock.release()

    # -- registry ----------------------------------------------------------------------------

    def _make_directory(self, inherit: Sandbox | None) -> None:
        self.directory.mkdir(mode=0o700, parents=True)
        if not self._lock.acquire():
            raise RuntimeFailed(f"somebody else holds {self.directory}")
        (self.directory / "link").mkdir(mode=0o700)
        (self.directory / "work").mkdir(mode=0o700)
        self._inherit(inherit)
        self._save()

    def _inherit(self, other: Sandbox | None) -> None:
        if other is None or not (other.directory / "work").is_dir():
            return
        self._has_inherited = True
        # First, so that the sweep knows at every moment whose files they are.
        with suppress(FileNotFoundError):
            os.link(other.directory / SESSION_FILE, self.directory / SESSION_FILE)
        (other.directory / "work").rename(self.directory / "work")  # in place of an empty one

    def _save(self) -> None:
        self.record.owner_pid = os.getpid()
        self.record.handle = self._handle.to_dict() if self._handle is not None else None
        self.record.save(self.directory)

    # -- its end -----------------------------------------------------------------------------

    def _link_lost(self, reason: str) -> None:
        if self._is_stopping is None and self._handle is not None:
            self._thread.spawn(self._find_end(reason))

    @property
    def is_frozen(self) -> bool:
        """Whether it is stopped, as nothing runs in it; it goes on when somebody speaks to it."""
        return self._freezer is not None and self._freezer.is_frozen

    @property
    def is_busy(self) -> bool:
        """Whether a cell, a command, a background process or a connection to the world goes on."""
        return (
            self._checkpointing.locked()
            or self.processes.is_busy
            or self.gate.is_busy
            or any(kernel.is_busy() for kernel in list(self.kernels.values()) if kernel.end is None)
        )

    async def is_quiet_for(self, timeout: float) -> bool:
        """Whether nothing has run in it for so many seconds; see ``sandbox.freezer``."""
        return self.end is None and self._freezer is not None and await self._freezer.is_quiet_for(timeout)

    def _begin_watch(self) -> None:
        assert self._handle is not None
        self._freezer = Freezer(self.runtime, self._handle, self._link, lambda: self.is_busy, self.spec.freeze_after)
        watching = self._thread.spawn(self._watch(self._freezer))
        self._watch_memory(self._freezer, self._handle, watching)

    def _watch_memory(self, freezer: Freezer, handle: Handle, watching: asyncio.Task[Any]) -> None:
        watch = MemoryWatch(
            handle.cgroups,
            self.spec.limits.memory,
            lambda: self.is_busy,
            lambda: freezer.is_frozen,
            self._relieve_memory,
        )

        def written() -> None:
            freezer.thaw()
            watch.wake()

        self._link.on_write = written
        memory = self._thread.spawn(watch.run())
        watching.add_done_callback(lambda _: memory.cancel())

    async def _relieve_memory(self, used: int, excess: int) -> int:
        """Have the guest kill a program before the memory is used up; the bytes that it had, 0 where it killed none."""
        if self._checkpointing.locked():
            return 0
        end = out_of_memory(self.spec.limits)
        extent = f"at {format_size(used)} of {format_size(self.spec.limits.memory)}"
        header = {
            "kind": "memory",
            "used": used,
            "excess": excess,
            "limit": self.spec.limits.memory,
            "sentence": f"{extent} ({end.setting})",
        }
        stream: Stream | None = None
        try:
            stream = self._link.open(header)
            answer = load_json(await asyncio.wait_for(stream.read(), RELIEF_TIMEOUT))
        except (AgentboxError, ProtocolError, asyncio.TimeoutError):
            return 0  # it is ending, or nothing in it answers any more
        finally:
            if stream is not None:
                stream.reset()
        size = answer.get("size")
        if not isinstance(size, int) or not 0 < size < 1 << 50:
            return 0
        kernel = answer.get("kernel")
        # What comes from inside may hold anything, and goes to logs.
        name = f"kernel {ascii(kernel)[:50]}" if kernel else ascii(answer.get("name"))[:50]
        what = f"{name} (process {ascii(answer.get('pid'))[:20]}, {format_size(size)})"
        killed = replace(end, message=f"out of memory: killed {what} {extent}")
        log.error("sandbox %s: %s (%s)", self.id, killed.message, killed.setting)
        await self._record_end(killed, "killed")
        return size

    async def _watch(self, freezer: Freezer) -> None:
        """Look after it: renew the lease, see it die behind our back, hold it to limits nobody else enforces."""
        assert self._handle is not None
        renewed = measured = 0.0
        while self._is_stopping is None:
            now = time.monotonic()
            if now - renewed > self.spec.lease_timeout / 4:
                renewed = now
                self._lock.renew()
            if not self.runtime.is_alive(self._handle):
                await self._find_end("the sandbox's process is gone")
                return
            await freezer.look()
            interval = FROZEN_INTERVAL if freezer.is_frozen else MEASURE_INTERVAL
            breach = None
            if self._is_changed or now - measured > interval:
                self._is_changed = False
                measured = now
                with suppress(OSError, RuntimeError):  # no thread is to be had, or the like: it is measured again
                    await self._measure(freezer)
                if self.measured is not None:
                    usage = self.measured[1]
                    breach = find_breach(usage, self.spec, self._room(usage.disk))
            if breach is None and not freezer.is_frozen and self.measured is not None:
                with suppress(OSError, RuntimeError):
                    breach = await asyncio.to_thread(self.free_space.find_breach, self.measured[1])
            if breach is not None:
                await self._end(breach)
                return
            await asyncio.sleep(WATCH_INTERVAL)

    async def _measure(self, freezer: Freezer) -> None:
        """Measure what it uses, and have it let go of deleted files."""
        usage = await self._ask_usage()
        moved, self._moved = self._moved, []
        # An inode is used again once its file is let go of.
        self._looked_up &= set(usage.deleted)
        fresh = set(usage.deleted) - self._looked_up
        if moved or (fresh and (not freezer.is_frozen or usage.held >= MIN_HELD)):
            if await self._look_up([*moved, *(path for path, _ in fresh)]):
                self._looked_up |= fresh  # what is still there then code inside has open itself
            else:
                self._moved += moved
            usage = await self._ask_usage()
            self._looked_up &= set(usage.deleted)
        if self.spec.workspace is None:
            usage = replace(usage, disk=usage.disk + usage.held)
        self.measured = (time.time(), usage)

    async def _ask_usage(self) -> Usage:
        assert self._handle is not None
        return await asyncio.to_thread(self.runtime.usage, self._handle, self.directory)

    async def _look_up(self, paths: Sequence[str]) -> bool:
        """Have the guest look up paths of the work folder, as gVisor keeps a deleted file open until somebody does.

        Returns
        -------
        bool
            Whether it did.
        """
        stream: Stream | None = None
        try:
            stream = self._link.open({"kind": "lookup"})
            await asyncio.wait_for(_ask_in_batches(stream, paths), LOOKUP_TIMEOUT)
            return True
        except (LinkClosed, ProtocolError, ValueError, asyncio.TimeoutError) as error:
            log.warning("sandbox %s may keep deleted files open: %s", self.id, error)
            return False
        finally:
            if stream is not None:
                stream.reset()

    def note_change(self, *moved: str) -> None:
        """Have it soon measured and let go of deleted files, as its work folder was changed from outside.

        From any thread.

        Parameters
        ----------
        moved : str
            Paths in the work folder whose entries were moved elsewhere.
        """
        self._moved += moved
        self._is_changed = True

    def _room(self, used: int) -> int:
        """Return how many bytes it may have on the disk: more than the limit, where it began with more."""
        limit = self.spec.limits.disk
        if self._disk_room is None:
            is_over = self._has_inherited and limit < used <= 2 * limit + MAX_INHERITED
            self._disk_room = used + INHERITED_ROOM if is_over else limit
        self._disk_room = max(limit, min(self._disk_room, used + INHERITED_ROOM))
        return self._disk_room

    async def _find_end(self, reason: str) -> None:
        """The link or the process is gone: find out why, and clear up."""
        assert self._handle is not None
        for _ in range(100):
            if not self.runtime.is_alive(self._handle):
                break
            await asyncio.sleep(0.02)
        if self._is_stopping is not None:
            return
        if self.runtime.is_alive(self._handle):
            await self._end(End(Cause.CRASHED, 1, f"its guest failed: {reason}"))
        else:
            await self._end(
                await asyncio.to_thread(self.runtime.why_ended, self._handle, self.spec.limits, self.directory)
            )

    async def _end(self, end: End) -> None:
        if self._is_stopping is not None:
            return
        self._is_stopping = end.cause
        self._note_end(end)
        await self._record_end(end)
        await self.stop(end.cause, is_kept=True)

    async def _record_end(self, end: End, event: str = "ended") -> None:
        """Write to the audit log that it has ended, or that something in it was ``killed``."""
        try:
            kernel_id = self.spec.kernel_id if event == "ended" else ""
            await self._audit.arecord("lifecycle", self.id, detail={**end.to_detail(kernel_id), "event": event})
        except (AgentboxError, RuntimeError) as error:
            log.error("sandbox %s: its end could not be written to the audit log: %s", self.id, error)

    def _note_end(self, end: End) -> None:
        self.end = end
        log.log(logging.INFO if end.cause in INTENDED else logging.ERROR, "sandbox %s ended: %s", self.id, end.message)
        self._ended.set()


async def _ask_in_batches(stream: Stream, paths: Sequence[str]) -> None:
    """Have the guest look up paths."""
    for batch in in_batches(paths):
        await _ask(stream, {"paths": batch})


async def _ask(stream: Stream, request: dict[str, Any]) -> None:
    """Send a request, and wait for its answer."""
    await stream.write(pack_json(request))
    reader = MessageReader(MIB)
    while not reader.feed(data := await stream.read()):
        if not data:
            raise LinkClosed("the guest has ended the stream")
