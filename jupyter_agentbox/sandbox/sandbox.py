"""The life cycle of one sandbox: start, adoption, checkpoint and end.

All methods run on the link thread (:class:`~jupyter_agentbox.sandbox.link.link.LinkThread`). Any thread may read the
documented attributes. The runtime's blocking calls run in worker threads. ``sandbox.manager`` keeps the registry of
sandboxes, and the runtimes isolate them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
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
from jupyter_agentbox.names import Names
from jupyter_agentbox.runtimes import Handle, Runtime, Usage
from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.spec import (
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

from .claims import apply_claim, begin, in_batches, record_start
from .drivers import Kernel
from .drivers.embedded import Claim
from .freezer import Freezer
from .limits import (
    DISK_SETTING,
    STOPPED_ROOM,
    WRITE_RATE,
    DiskQuota,
    FreeSpace,
    MemoryWatch,
    end_full_disk,
    find_breach,
)
from .link.link import Link, LinkThread, Stream, finished
from .locks import FolderLocks
from .processes import Command, ExecResult, ProcessTable
from .record import KernelRecord, Lock, ProcessRecord, Record, read_log_tail, was_told_to_end
from .sweep import KEPT_MARK, SESSION_FILE, remove_directory

log = logging.getLogger(__name__)

#: Seconds that the guest may take to connect after the runtime reports that the sandbox runs; between two checks that
#: the sandbox is alive; that the guest may take to suspend the link; between two measurements of resource usage.
CONNECT_TIMEOUT = 30.0
WATCH_INTERVAL = 0.5
SUSPEND_TIMEOUT = 10.0
MEASURE_INTERVAL = 2.0
#: Fractions of the disk limit at which the user is told that the disk is full, and below which he is told again.
FULL, NOT_FULL = 0.99, 0.9
#: Entries that stay in the directory of an ended sandbox whose files are kept.
_KEPT = frozenset({"work", "tokens", "state.json", "lock", SESSION_FILE, KEPT_MARK})
#: Seconds between two measurements of a frozen sandbox, which may still hold deleted files; and bytes of deleted files
#: that make it worth waking.
FROZEN_INTERVAL, MIN_HELD = 60.0, 16 * MIB
#: Seconds that the guest may take to look up paths. The sandbox is not measured meanwhile.
LOOKUP_TIMEOUT = 5.0
#: Seconds that the guest may take to kill a program before the memory limit is reached.
RELIEF_TIMEOUT = 5.0


class Sandbox:
    """One isolated environment, created by :class:`~jupyter_agentbox.sandbox.manager.SandboxManager`.

    Attributes
    ----------
    record : Record
        The sandbox's record, as in its state file.
    directory, runtime : Path, Runtime
        The sandbox's directory on the host, with mode 0700, and the runtime that runs it.
    kernels : dict of str to Kernel
        Kernels started in the sandbox, by the guest's name for them.
    processes : ProcessTable
        Commands and background processes.
    end : End or None
        How the sandbox ended. May be read from any thread.
    measured : tuple of float and Usage, or None
        Time of the last measurement, in seconds since the epoch, and the usage found. May be read from any thread.
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
        is_private = record.spec.workspace is None
        # The layer has the limit itself. Without a folder of its own, a sandbox gets near only what else it writes to.
        self._disk = DiskQuota(record.spec.limits.disk + (0 if is_private else STOPPED_ROOM))
        #: Whether the guest was told to stop writing, or None if that is unknown; and whether the user was told why.
        self._is_stop_sent: bool | None = None
        self._is_full_told = False
        #: Why nothing may be written to a folder that is shared with other sandboxes. May be set from any thread.
        self.shared_folder_full = ""
        #: Workspace paths that were moved from outside the sandbox, and whether anything was changed there. May be set
        #: from any thread.
        self._moved: list[str] = []
        self._is_changed = False
        self._looked_up: frozenset[tuple[str, int]] = frozenset()
        self.free_space = FreeSpace(self.workspace, directory, record.spec.min_free_disk)
        self._ended = asyncio.Event()
        self._checkpointing = asyncio.Lock()
        # Serializes keep() and discard(): if they ran at the same time, a directory without an owner could remain.
        self._removal_lock = asyncio.Lock()
        self._link = Link(directory / "link", self._serve, self._link_lost)
        self._locks = FolderLocks(record.spec.workspace, Names(record.spec.hidden, record.spec.read_only))

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self.record.id

    @property
    def spec(self) -> SandboxSpec:
        """The specification that policy resolved for the sandbox."""
        return self.record.spec

    @property
    def link(self) -> Link:
        """The link to the guest."""
        return self._link

    @property
    def is_left(self) -> bool:
        """Whether this process has given up ownership while the sandbox is still alive."""
        return self._is_stopping is not None and self.end is None

    @property
    def workspace(self) -> Path:
        """The host folder that is mounted at ``/workspace`` inside."""
        return self.spec.workspace or self.directory / "work"

    async def start(self, inherit: Sandbox | None, saved: Path | None = None, claim: Claim | None = None) -> None:
        """Start the sandbox and wait for its guest to connect.

        Parameters
        ----------
        inherit : Sandbox or None
            An ended sandbox. Its private workspace is moved into this one.
        saved : Path, optional
            Output of :meth:`checkpoint`. The sandbox continues from there, with the kernels and processes in its
            record.
        claim : Claim, optional
            New owner of the sandbox's kernel, if the checkpoint was made of an unclaimed sandbox.

        Raises
        ------
        RuntimeFailed, RuntimeUnavailable, InvalidRequest
            Everything that was created has been removed.
        """
        began = time.monotonic()
        try:
            self._make_directory(inherit)
            if saved is None:
                self._is_stop_sent = False
                self._link.listen()
                await asyncio.to_thread(import_cache.install, self.directory, self.spec)
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
        # Runs to completion even if the caller is cancelled. Without its handle, a started sandbox could not be ended.
        self._handle = await asyncio.to_thread(start, *arguments)

    async def give_up(self, inherit: Sandbox | None) -> None:
        """End and remove the sandbox, and move an inherited workspace back."""
        await self.stop(is_kept=True)
        if inherit is not None and (self.directory / "work").is_dir() and not (inherit.directory / "work").exists():
            (self.directory / "work").rename(inherit.directory / "work")
        await self.discard()

    async def adopt(
        self, claim: Claim | None = None, inherit: Sandbox | None = None, *, before: Limits | None = None
    ) -> None:
        """Become the owner of an orphaned sandbox whose kernels still run, or of an unclaimed one.

        Parameters
        ----------
        claim, inherit
            For an unclaimed sandbox.
        before : Limits, optional
            Limits in force so far. None of them is lower than the limit in the spec.

        Raises
        ------
        PolicyRefused
            A limit is lower than before, and the runtime can't lower it in a running sandbox.
        RuntimeFailed
            The sandbox has another owner, has ended, or does not answer. Nothing has changed, except that an unclaimed
            sandbox is ended.
        """
        if not self._lock.acquire():
            raise RuntimeFailed(f"sandbox {self.id} belongs to another process")
        if was_told_to_end(self.directory):
            self._lock.release()
            raise RuntimeFailed(f"sandbox {self.id} is about to end")
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
            # The previous owner may have ended while the sandbox was frozen or while it was being saved.
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
                # The previous owner's record is still correct.
                log.error("cannot write the record of sandbox %s: %s", self.id, error)
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
                    f"the limit {name} of profile {self.spec.profile!r} is lower now, and can't be lowered in a "
                    "running sandbox",
                    setting=f"Policy.max_{name}",
                )

    async def leave(self, *, is_waiting: bool = False) -> None:
        """Give up ownership and let the sandbox live.

        It waits for another owner for the length of its lease. With `is_waiting`, it waits, frozen, for a claim.
        """
        if is_waiting and self._handle is not None:
            await asyncio.gather(*(kernel.hang_up() for kernel in self.kernels.values()))
            await asyncio.to_thread(self.runtime.wait_for_claim, self._handle, self.directory)
        elif self._freezer is not None:
            self._freezer.thaw()  # the guest enforces its own lease, so it must run
        self._is_stopping = Cause.STOPPED
        self._link.close("this process gave up ownership")
        await self.gate.aclose()
        self._lock.release()

    async def _resume(self, claim: Claim | None = None) -> None:
        """Reconnect to the kernels and processes that already run in the sandbox."""
        if claim is not None:
            await apply_claim(self._link, claim, self.runtime.read_covered(self.directory), self.spec.lease_timeout)
        for known in self.record.kernels:
            self.kernels[known.name] = kernel = Kernel(self, known.name)
            kernel.resume(known.driver, claim)
        self.processes.resume(self.record.processes)

    async def checkpoint(self, staged: Path) -> bytes:
        """Save the memory, the writable layer and a private workspace while the sandbox keeps running.

        Parameters
        ----------
        staged : Path
            Directory that contains the empty directories ``image`` and ``work``.

        Returns
        -------
        bytes
            The sandbox's record, for :meth:`start` of a copy.

        Raises
        ------
        RuntimeUnavailable
            The runtime does not support checkpoints.
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
                # Wait for all kernels to hang up before they are resumed, even if one of them fails.
                hung_up = await asyncio.gather(*(kernel.hang_up() for kernel in kernels), return_exceptions=True)
                if failed := next((item for item in hung_up if item is not None), None):
                    raise failed
                await self._link.suspend(SUSPEND_TIMEOUT)
                arguments = (handle, self.id, self.directory, staged / "image", copy)
                # The link's files must stay closed until gVisor has finished saving.
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
        raise RuntimeFailed(f"the sandbox ended before it was ready. Log: {words}")

    def clean_up_with(self, directory: Path) -> None:
        """Register ``directory``, which belongs to a front, for removal by the sweeper together with this sandbox."""
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
                f"command and environment must not exceed {MAX_PAYLOAD[OPEN] // 1024} KiB", field="env"
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
            Command, environment and working directory of the process. ``{connection_file}`` in ``argv`` is replaced
            with the path of the connection file inside.
        key, signature_scheme : str
            Written to the connection file. The guest adds address and ports.
        context, language : str
            Name of the code context that the kernel serves, and its language.
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
        """Forget a kernel that has ended or is about to end."""
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
        """Run a command to completion. Shorthand for :meth:`ProcessTable.run`."""
        command = Command(argv=argv, env=env or {}, workdir=cwd)
        return await self.processes.run(command, stdin=stdin, timeout=timeout)

    def _processes_changed(self, records: list[ProcessRecord]) -> None:
        self.record.processes = records
        if self.end is None:
            self._save()

    async def wait_ended(self) -> End:
        """Wait until the sandbox has ended, and return how it ended."""
        await self._ended.wait()
        assert self.end is not None
        return self.end

    async def stop(self, cause: Cause | End = Cause.STOPPED, *, is_kept: bool = False) -> None:
        """End the sandbox and remove its resources. Safe to call more than once, and concurrently.

        Parameters
        ----------
        cause : Cause or End
            The recorded reason, if the sandbox is still alive.
        is_kept : bool
            Keep the directory, so that :meth:`start` of a successor can inherit it. Call :meth:`discard` afterwards.
        """
        if not is_kept:
            self.end_lease()
        end = cause if isinstance(cause, End) else End(cause, 137, "it was stopped")
        self._is_stopping = self._is_stopping or end.cause
        if not is_kept:
            with suppress(OSError):  # from here on, the sweeper does not keep its files
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
        """Prevent any later process from adopting the sandbox, because its end was requested.

        May be called from any thread, and takes effect whatever happens to this process.
        """
        self._lock.end_lease()

    async def keep(self) -> None:
        """Remove everything of an ended sandbox except its private workspace and the files that identify it.

        These stay until :meth:`discard`.
        """
        await self.stop(is_kept=True)
        async with self._removal_lock:
            if self._lock.is_held:  # false if it was discarded meanwhile
                await asyncio.to_thread(self._remove_all_but_kept)

    def _remove_all_but_kept(self) -> None:
        for path in self.directory.iterdir():
            if path.name not in _KEPT:
                with suppress(OSError):
                    remove_tree(path)
        if not (self.directory / KEPT_MARK).exists():
            (self.directory / KEPT_MARK).touch(0o600)

    async def take_ended(self) -> bool:
        """Become the owner of a sandbox that ended without an owner. Return whether it has files to keep."""
        if not self._lock.acquire():
            return False
        if self._handle is not None and self.runtime.is_alive(self._handle):
            self._lock.release()
            return False
        is_wanted = (self.directory / SESSION_FILE).exists() and not was_told_to_end(self.directory)
        if not is_wanted or not (self.directory / "work").is_dir():
            await self.stop()  # another sandbox has its files
            return False
        self.end = End(Cause.CRASHED, 137, "it ended while it had no owner")
        if self._handle is not None and not (self.directory / KEPT_MARK).exists():
            self.end = await asyncio.to_thread(self.runtime.why_ended, self._handle, self.spec.limits, self.directory)
        self._is_stopping = self.end.cause
        self._ended.set()
        await self.keep()
        return True

    @property
    def kept_since(self) -> float:
        """When its files began to be kept, in seconds since the epoch. Raises OSError if they are not kept."""
        return (self.directory / KEPT_MARK).stat().st_mtime

    async def discard(self) -> None:
        """Remove the directory of an ended sandbox. Does nothing if it was already removed."""
        async with self._removal_lock:
            if self._lock.is_held:
                with suppress(OSError):  # what resists is left for the sweeper
                    await asyncio.to_thread(remove_directory, self.directory)
                self._lock.release()

    # -- registry ----------------------------------------------------------------------------

    def _make_directory(self, inherit: Sandbox | None) -> None:
        self.directory.mkdir(mode=0o700, parents=True)
        if not self._lock.acquire():
            raise RuntimeFailed(f"another process owns {self.directory}")
        (self.directory / "link").mkdir(mode=0o700)
        (self.directory / "work").mkdir(mode=0o700)
        self._inherit(inherit)
        self._save()

    def _inherit(self, other: Sandbox | None) -> None:
        if other is None or not (other.directory / "work").is_dir():
            return
        # Link the file before moving the workspace, so that the sweeper can tell at every moment whose files they are.
        with suppress(FileNotFoundError):
            os.link(other.directory / SESSION_FILE, self.directory / SESSION_FILE)
        (other.directory / "work").rename(self.directory / "work")  # replaces an empty directory

    def _save(self) -> None:
        self.record.owner_pid = os.getpid()
        self.record.handle = self._handle.to_dict() if self._handle is not None else None
        self.record.save(self.directory)

    async def _serve(self, stream: Stream) -> None:
        """Serve a stream that the guest opened."""
        if stream.header.get("kind") == "locks":
            await self._locks.handle(stream)
        else:
            await self.gate.handle(stream)

    # -- its end -----------------------------------------------------------------------------

    def _link_lost(self, reason: str) -> None:
        if self._is_stopping is None and self._handle is not None:
            self._thread.spawn(self._find_end(reason))

    @property
    def is_frozen(self) -> bool:
        """Whether the sandbox is frozen because nothing runs in it. The next byte sent to it thaws it."""
        return self._freezer is not None and self._freezer.is_frozen

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint, cell, command, background process or outgoing connection is in progress."""
        return (
            self._checkpointing.locked()
            or self.processes.is_busy
            or self.gate.is_busy
            or any(kernel.is_busy() for kernel in list(self.kernels.values()) if kernel.end is None)
        )

    async def is_quiet_for(self, timeout: float) -> bool:
        """Return whether nothing has run in the sandbox for `timeout` seconds; see ``sandbox.freezer``."""
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
        """Have the guest kill a program before the memory limit is reached.

        Returns
        -------
        int
            Bytes that the program used, or 0 if none was killed.
        """
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
            return 0  # the sandbox is ending, or nothing in it answers
        finally:
            if stream is not None:
                stream.reset()
        size = answer.get("size")
        if not isinstance(size, int) or not 0 < size < 1 << 50:
            return 0
        kernel = answer.get("kernel")
        # Text from inside is untrusted and goes to logs, so it is escaped and cut.
        name = f"kernel {ascii(kernel)[:50]}" if kernel else ascii(answer.get("name"))[:50]
        what = f"{name} (process {ascii(answer.get('pid'))[:20]}, {format_size(size)})"
        killed = replace(end, message=f"out of memory: killed {what} {extent}")
        log.error("sandbox %s: %s (%s)", self.id, killed.message, killed.setting)
        await self._record_end(killed, "killed")
        return size

    async def _watch(self, freezer: Freezer) -> None:
        """Renew the lease, detect the sandbox's death, and enforce the limits that nothing else enforces."""
        assert self._handle is not None
        renewed = measured = 0.0
        while self._is_stopping is None:
            now = time.monotonic()
            if now - renewed > self.spec.lease_timeout / 4:
                renewed = now
                self._lock.renew()
            if not self.runtime.is_alive(self._handle):
                await self._find_end("the sandbox's process has ended")
                return
            await freezer.look()
            interval = FROZEN_INTERVAL if freezer.is_frozen else self._measure_interval()
            breach = None
            if self._is_changed or now - measured > interval:
                self._is_changed = False
                measured = now
                # For example, no thread is available; the next round measures again.
                with suppress(OSError, RuntimeError):
                    await self._measure(freezer)
                if self.measured is not None:
                    breach = find_breach(self.measured[1], self.spec)
                    if breach is None and not freezer.is_frozen:
                        breach = await self._check_disk(freezer)
            if breach is None and not freezer.is_frozen and self.measured is not None:
                with suppress(OSError, RuntimeError):
                    breach = await asyncio.to_thread(self.free_space.find_breach, self.measured[1])
            if breach is not None:
                await self._end(breach)
                return
            await asyncio.sleep(WATCH_INTERVAL)

    def _measure_interval(self) -> float:
        """Return the seconds until the next measurement: fewer if a private folder is nearly full."""
        if self.measured is None or self.spec.workspace is not None:
            return MEASURE_INTERVAL
        return min(MEASURE_INTERVAL, max(0.0, self.spec.limits.disk - self.measured[1].disk) / WRITE_RATE)

    async def _check_disk(self, freezer: Freezer) -> End | None:
        """Stop writing if the disk limit is exceeded, and tell the user. Return why the sandbox has to end, or None."""
        assert self.measured is not None
        used, limit = self.measured[1].disk, self.spec.limits.disk
        if self._disk.is_escaped(used):
            return end_full_disk(self.spec.limits, used)
        is_over = self._disk.is_over(used)
        sentence = self.shared_folder_full
        if is_over or used >= FULL * limit:
            sentence = f"disk full: {format_size(used)} of {format_size(limit)} used. Delete files to continue"
        if (is_stopped := is_over or bool(self.shared_folder_full)) != self._is_stop_sent:
            if await self._ask_guest_to_stop(is_stopped, sentence if is_stopped else ""):
                self._is_stop_sent = is_stopped
            if is_over and not self._disk.is_stopped:
                await self._measure(freezer)
                self._disk.mark(self.measured[1].disk)
        if not is_over:
            self._disk.is_stopped = False
        if sentence and not self._is_full_told:
            setting = "Policy.max_tenant_disk" if sentence == self.shared_folder_full else DISK_SETTING
            log.warning("sandbox %s: %s (%s)", self.id, sentence, setting)
            await self._record_end(End(Cause.DISK_FULL, 0, sentence, setting), "notice")
        self._is_full_told = bool(sentence) or (self._is_full_told and used > NOT_FULL * limit)
        return None

    async def _ask_guest_to_stop(self, is_full: bool, sentence: str) -> bool:
        """Have the guest stop programs from writing, or let them write again. Return whether it did."""
        stream: Stream | None = None
        try:
            stream = self._link.open({"kind": "disk"})
            await asyncio.wait_for(_ask(stream, {"is_full": is_full, "sentence": sentence}), LOOKUP_TIMEOUT)
            return True
        except (LinkClosed, ProtocolError, ValueError, asyncio.TimeoutError) as error:
            log.warning("sandbox %s may continue to write: %s", self.id, error)
            return False
        finally:
            if stream is not None:
                stream.reset()

    async def _measure(self, freezer: Freezer) -> None:
        """Measure resource usage, and have the guest release deleted files."""
        usage = await self._ask_usage()
        moved, self._moved = self._moved, []
        # Once a file is released, its inode number may be reused.
        self._looked_up &= set(usage.deleted)
        fresh = set(usage.deleted) - self._looked_up
        if moved or (fresh and (not freezer.is_frozen or usage.held >= MIN_HELD)):
            if await self._look_up([*moved, *(path for path, _ in fresh)]):
                self._looked_up |= fresh  # code inside keeps the rest open
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
        """Have the guest look up paths of the workspace, so that gVisor closes deleted files.

        gVisor keeps a deleted file open until its path is looked up.

        Returns
        -------
        bool
            Whether the guest did so.
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
        """Schedule a measurement and the release of deleted files, because the workspace was changed from outside.

        May be called from any thread.

        Parameters
        ----------
        moved : str
            Workspace paths whose entries were moved elsewhere.
        """
        self._moved += moved
        self._is_changed = True

    async def notice_end(self) -> None:
        """End the sandbox if its runtime has lost it, without waiting for the next check. On the link thread.

        When memory runs out, the host may kill the part of gVisor that runs one program. The program then exits with
        status 1, just before the sandbox ends.
        """
        if self.end is None and self._handle is not None and not self.runtime.is_alive(self._handle):
            await self._find_end("the sandbox's process has ended")

    async def _find_end(self, reason: str) -> None:
        """Find out why the link or the process was lost, and clean up."""
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
        """Write to the audit log that the sandbox has ended, or that something in it was ``killed``."""
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
    """Have the guest look up paths, one batch at a time."""
    for batch in in_batches(paths):
        await _ask(stream, {"paths": batch})


async def _ask(stream: Stream, request: dict[str, Any]) -> None:
    """Send a request and wait for the answer."""
    await stream.write(pack_json(request))
    reader = MessageReader(MIB)
    while not reader.feed(data := await stream.read()):
        if not data:
            raise LinkClosed("the guest closed the stream")
