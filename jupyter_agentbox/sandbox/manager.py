"""Keep the registry of sandboxes: one directory for each sandbox, beneath one state directory, without a daemon.

The process that holds the lock on a sandbox's directory owns that sandbox. ``sandbox.sandbox`` implements a single
sandbox, and ``sandbox.sweep`` removes sandboxes without an owner.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from jupyter_agentbox.egress.gate import OnRefusal
from jupyter_agentbox.errors import (
    AgentboxError,
    Conflict,
    DiskFull,
    InvalidRequest,
    NotFound,
    RuntimeFailed,
    RuntimeUnavailable,
)
from jupyter_agentbox.runtimes import Check, Handle, Runtime
from jupyter_agentbox.spec import MIB, Cause, End, SandboxSpec, format_size
from jupyter_agentbox.storage.audit.log import AuditLog

from .drivers.embedded import Claim
from .link.thread import on_link_thread
from .preparation import prepare
from .record import KernelRecord, Lock, Record, is_owned, was_told_to_end
from .sandbox import Sandbox
from .sweep import LOST, SESSION_FILE, STATE_FILE, ensure_sweeper, remove_lost
from .tokens import TokenStore

log = logging.getLogger(__name__)

RUNTIME_GROUP = "jupyter_agentbox.runtimes"
#: Sandboxes that may start at the same time. More than this makes each start slower, in gVisor disproportionately so.
MAX_STARTING = max(2, os.cpu_count() or 1)
#: Free bytes that the state directory needs for a sandbox to start: for its record, its log and its package cache.
MIN_FREE = 4 * MIB

# The class below has a method called `list`.
Checks = list[Check]


def load_runtime(name: str, **options: Any) -> Runtime:
    """Create the runtime registered under a name in the entry point group ``jupyter_agentbox.runtimes``.

    Raises
    ------
    RuntimeUnavailable
        No runtime is registered under that name.
    """
    for point in entry_points(group=RUNTIME_GROUP):
        if point.name == name:
            runtime: Runtime = point.load()(**options)
            return runtime
    known = ", ".join(sorted(point.name for point in entry_points(group=RUNTIME_GROUP))) or "none"
    raise RuntimeUnavailable(f"unknown runtime {name!r}. Available: {known}", setting="Policy.runtime")


@dataclass(frozen=True)
class Listed:
    """A sandbox as described by its directory, whether or not this process owns it.

    Parameters
    ----------
    id, profile, kernel_id, owner, runtime, workspace : str
    created : float
        Seconds since the epoch.
    state : str
        ``running``; ``parked``; ``pooled`` (unclaimed, ready for the next kernel start); ``orphaned`` (alive without an
        owner); ``ended``; ``unknown`` if its runtime does not respond; ``lost`` if its record is damaged.
    memory : int
        Bytes, or 0 if unknown.
    reason : str
        What is wrong with the record.
    """

    id: str
    profile: str
    kernel_id: str
    owner: str
    runtime: str
    workspace: str
    created: float
    state: str
    memory: int
    reason: str = ""


class SandboxManager:
    """All sandboxes of one state directory, and those that this process owns.

    The coroutines may be awaited on any event loop.

    Parameters
    ----------
    state_dir : Path
        Parent of the sandboxes' directories. Created with mode 0700 at first use.
    runtime : Runtime
        Runtime that starts new sandboxes.

    Attributes
    ----------
    starting : asyncio.Semaphore
        Held during each start, until the sandbox is ready for its purpose. Used on the link thread only.
    """

    _shared: ClassVar[dict[tuple[int, Path, str], SandboxManager]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, state_dir: Path, runtime: Runtime) -> None:
        self.state_dir = state_dir
        self.runtime = runtime
        self._others: dict[str, Runtime] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.starting = asyncio.Semaphore(MAX_STARTING)
        self._is_ending = False
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(state_dir, 0o700)
        self.audit = AuditLog(state_dir / "audit.sqlite")

    @classmethod
    def shared(cls, state_dir: Path, runtime_name: str, **runtime_options: Any) -> SandboxManager:
        """Return this process's manager for a state directory and runtime."""
        with cls._shared_lock:
            key = (os.getpid(), state_dir, f"{runtime_name} {sorted(runtime_options.items())}")
            if key not in cls._shared:
                cls._shared[key] = cls(
                    state_dir, load_runtime(runtime_name, state_dir=str(state_dir), **runtime_options)
                )
            return cls._shared[key]

    @classmethod
    def all_shared(cls, state_dir: Path) -> list[SandboxManager]:
        """Return all managers of this process for a state directory, whatever their runtime."""
        with cls._shared_lock:
            own = (os.getpid(), state_dir)
            return [manager for key, manager in cls._shared.items() if key[:2] == own]

    def end_leases(self) -> None:
        """Prevent later processes from adopting this manager's sandboxes, which are about to be ended.

        May be called from any thread.
        """
        self._is_ending = True
        for sandbox in list(self.sandboxes.values()):
            if sandbox.end is None:  # the files of a sandbox that ended on its own may be kept
                sandbox.end_lease()

    def _add(self, sandbox: Sandbox) -> None:
        self.sandboxes[sandbox.id] = sandbox
        if self._is_ending:
            sandbox.end_lease()

    @on_link_thread
    async def create(
        self,
        spec: SandboxSpec,
        *,
        inherit: Sandbox | None = None,
        on_refusal: OnRefusal | None = None,
    ) -> Sandbox:
        """Start a sandbox.

        Parameters
        ----------
        spec : SandboxSpec
            Specification from ``Policy.resolve``.
        inherit : Sandbox, optional
            An ended sandbox that was kept. Its private workspace is moved into the new one, and it is discarded.
        on_refusal : callable, optional
            Called with host, port and message for each refused connection, on the link thread.

        Raises
        ------
        RuntimeUnavailable, RuntimeFailed, InvalidRequest
        """
        sandbox = await self._start(self._make_record(spec), inherit, on_refusal)
        try:
            await prepare(sandbox)
        except BaseException:
            self.sandboxes.pop(sandbox.id, None)
            await asyncio.shield(sandbox.give_up(inherit))
            raise
        if inherit is not None:
            if (sandbox.directory / SESSION_FILE).exists():  # the new sandbox continues the same managed sandbox
                await asyncio.to_thread(TokenStore(self.state_dir).carry, inherit.id, sandbox.id)
            await inherit.discard()
        return sandbox

    def _make_record(self, spec: SandboxSpec) -> Record:
        sandbox_id = uuid.uuid4().hex[:16]
        return Record(sandbox_id, self.runtime.name, spec, time.time(), spec.lease_timeout, os.getpid())

    async def _start(
        self,
        record: Record,
        inherit: Sandbox | None,
        on_refusal: OnRefusal | None,
        saved: Path | None = None,
        claim: Claim | None = None,
    ) -> Sandbox:
        await asyncio.to_thread(self.check_space)
        await asyncio.to_thread(ensure_sweeper, self.state_dir)
        if inherit is not None:
            record.asks = inherit.record.asks
        sandbox = Sandbox(record, self._directory(record.id), self.runtime, self.audit, on_refusal)
        self._add(sandbox)
        try:
            await sandbox.start(inherit, saved, claim)
        except BaseException as error:
            del self.sandboxes[record.id]
            if isinstance(error, RuntimeFailed):
                await asyncio.to_thread(self.check_space)  # the runtime does not report a full disk as the reason
            raise
        await asyncio.to_thread(ensure_sweeper, self.state_dir)  # the previous sweeper may have exited just then
        return sandbox

    @on_link_thread
    async def restore(
        self,
        spec: SandboxSpec,
        record: Record,
        saved: Path,
        *,
        on_refusal: OnRefusal | None = None,
        inherit: Sandbox | None = None,
        claim: Claim | None = None,
    ) -> Sandbox:
        """Start a sandbox from a checkpoint of another one.

        Parameters
        ----------
        spec : SandboxSpec
            Specification under the current policy. Everything visible inside, such as mounts, must be the same as at
            the checkpoint.
        record : Record
            Record of the other sandbox, from :meth:`Sandbox.checkpoint`.
        saved : Path
            Directory that the checkpoint was written to.
        on_refusal, inherit
            See :meth:`create`.
        claim : Claim, optional
            New owner of the sandbox's kernel, if the checkpoint was made of an unclaimed sandbox.

        Raises
        ------
        RuntimeUnavailable, RuntimeFailed, InvalidRequest
        """
        then, record = record, self._make_record(spec)
        record.kernels, record.processes, record.link = list(then.kernels), list(then.processes), then.link
        record.started_kernels = then.started_kernels
        if spec.kernel_id and spec.kernel_id == then.spec.kernel_id:
            record.asks = then.asks
        if claim is not None:
            record.kernels = _claimed(record.kernels, claim)
        sandbox = await self._start(record, inherit, on_refusal, saved, claim)
        if inherit is not None:
            await inherit.discard()
        return sandbox

    async def claim(
        self,
        record: Record,
        spec: SandboxSpec,
        claim: Claim,
        *,
        on_refusal: OnRefusal | None = None,
        inherit: Sandbox | None = None,
    ) -> Sandbox:
        """Become the owner of an unclaimed sandbox, and apply the spec to it. Call on the link thread.

        Parameters
        ----------
        record : Record
            Record of the unclaimed sandbox.
        spec, claim
            The sandbox's new specification, and the new owner of its kernel.
        on_refusal, inherit
            See :meth:`create`.

        Raises
        ------
        RuntimeFailed
            Another process owns the sandbox, it has ended, or it could not be claimed and was ended.
        """
        kernels = _claimed(record.kernels, claim)
        record = replace(
            record,
            spec=spec,
            kernels=kernels,
            lease_timeout=spec.lease_timeout,
            created=time.time(),
            asks=inherit.record.asks if inherit is not None else [],
        )
        sandbox = Sandbox(record, self._directory(record.id), self.runtime, self.audit, on_refusal)
        self._add(sandbox)
        try:
            await sandbox.adopt(claim, inherit)
        except BaseException:
            del self.sandboxes[record.id]
            raise
        await asyncio.to_thread(ensure_sweeper, self.state_dir)  # the previous sweeper may have exited just then
        if inherit is not None:
            await inherit.discard()
        return sandbox

    @on_link_thread
    async def adopt(
        self, sandbox_id: str, spec: SandboxSpec | None = None, *, on_refusal: OnRefusal | None = None
    ) -> Sandbox:
        """Take over an orphaned sandbox with its kernels running.

        Parameters
        ----------
        sandbox_id : str
        spec : SandboxSpec, optional
            Specification under the current policy, from ``policy.renewal.reapply_policy``. Default: the one in its
            record.
        on_refusal
            See :meth:`create`.

        Raises
        ------
        PolicyRefused
            The current policy can't be applied to a running sandbox. The caller has to end it.
        NotFound
            The sandbox does not exist.
        RuntimeFailed
            The sandbox has an owner, has ended, or does not answer.
        """
        record = Record.load(self._directory(sandbox_id))
        before = record.spec.limits
        if spec is not None:
            record.spec, record.lease_timeout = spec, spec.lease_timeout
        sandbox = Sandbox(record, self._directory(sandbox_id), self._runtime_of(record), self.audit, on_refusal)
        await sandbox.adopt(before=before)
        await asyncio.to_thread(ensure_sweeper, self.state_dir)
        self._add(sandbox)
        return sandbox

    @on_link_thread
    async def leave(self, sandbox: Sandbox) -> None:
        """Give up ownership of a sandbox and let it live, so that another process can adopt it within its lease."""
        self.sandboxes.pop(sandbox.id, None)
        await sandbox.leave()

    def orphans(self) -> list[Record]:
        """Return the records of running sandboxes that have no owner and were not told to end."""
        found = []
        for directory in _folders(self.state_dir / "sandboxes"):
            try:
                record, handle = _load(directory)
            except NotFound:
                continue
            is_alive = handle is not None and self.runtime.is_alive(handle)
            if is_alive and not is_owned(directory) and not was_told_to_end(directory):
                found.append(record)
        return found

    def end_duplicate(self, record: Record, successor: str | None) -> None:
        """End an orphan because what it ran continues elsewhere, and move its tokens there. Blocks.

        Parameters
        ----------
        record : Record
            From :meth:`orphans`.
        successor : str or None
            Id of the sandbox that continues, or the id under which it is parked.
        """
        self._end_orphan(record, successor)

    async def refuse(self, record: Record, error: AgentboxError) -> End:
        """End an orphan that policy no longer allows, and record the reason. May be awaited on any event loop.

        Parameters
        ----------
        record : Record
            From :meth:`orphans`.
        error : AgentboxError
            Why policy refuses it.
        """
        end = End(Cause.STOPPED, 137, f"it could not be taken over from an earlier server: {error}", error.setting)
        log.warning("sandbox %s ended: %s", record.id, end.message)
        await asyncio.to_thread(self._end_orphan, record)
        try:
            await self.audit.arecord("lifecycle", record.id, detail=end.to_detail(record.spec.kernel_id))
        except AgentboxError as failure:
            log.error("sandbox %s: its end could not be written to the audit log: %s", record.id, failure)
        return end

    def _end_orphan(self, record: Record, successor: str | None = None) -> None:
        lock = Lock(self._directory(record.id))
        try:
            if record.handle is not None and lock.acquire():
                if successor is not None:
                    TokenStore(self.state_dir).carry(record.id, successor)
                lock.end_lease()
                (self._directory(record.id) / SESSION_FILE).unlink(missing_ok=True)  # its files are not kept
                self._runtime_of(record).kill(Handle.from_dict(record.handle))
        except (AgentboxError, OSError) as error:  # it has already ended, or the sweeper ends it
            log.warning("cannot kill sandbox %s: %s", record.id, error)
        finally:
            lock.release()  # the sweeper removes what remains of it

    def _directory(self, sandbox_id: str) -> Path:
        return self.state_dir / "sandboxes" / sandbox_id

    @on_link_thread
    async def stop(self, sandbox: Sandbox, cause: Cause | End = Cause.STOPPED, *, is_kept: bool = False) -> None:
        """End a sandbox of this process; see :meth:`Sandbox.stop`."""
        await sandbox.stop(cause, is_kept=is_kept)
        if not is_kept:
            self.sandboxes.pop(sandbox.id, None)

    @on_link_thread
    async def keep(self, sandbox: Sandbox) -> None:
        """Keep the files of an ended sandbox of this process until it is stopped; see :meth:`Sandbox.keep`."""
        self.sandboxes.pop(sandbox.id, None)
        await sandbox.keep()

    @on_link_thread
    async def take_ended(self, sandbox_id: str) -> Sandbox | None:
        """Become the owner of a sandbox that ended without one. Return None if it has no files to keep.

        Raises NotFound, RuntimeFailed.
        """
        record = Record.load(self._directory(sandbox_id))
        sandbox = Sandbox(record, self._directory(sandbox_id), self._runtime_of(record), self.audit)
        return sandbox if await sandbox.take_ended() else None

    def list(self) -> list[Listed]:
        """Return every sandbox of the state directory, oldest first."""
        found = []
        for directory in _folders(self.state_dir / "sandboxes"):
            try:
                record, handle = _load(directory)
                self._runtime_of(record)
            except AgentboxError as error:
                if os.path.lexists(directory / STATE_FILE):  # otherwise it is being created or removed
                    found.append(_listed_lost(directory, str(error)))
                continue
            is_alive = handle is not None and self.runtime.is_alive(handle)
            found.append(
                Listed(
                    id=record.id,
                    profile=record.spec.profile,
                    kernel_id=record.spec.kernel_id,
                    owner=record.spec.owner,
                    runtime=record.runtime,
                    workspace=str(record.spec.workspace or directory / "work"),
                    created=record.created,
                    state=self._state(record, directory) if is_alive else "ended",
                    memory=self.runtime.usage(handle, directory).memory if handle is not None and is_alive else 0,
                )
            )
        for directory in _folders(self.state_dir / LOST):
            try:
                Record.load(directory)
                reason = "its record was damaged"
            except NotFound as error:
                reason = str(error)
            found.append(_listed_lost(directory, reason))
        return sorted(found, key=lambda item: item.created)

    def place_of(self, sandbox_id: str) -> Path:
        """Return the directory of a listed sandbox."""
        directory = self._directory(sandbox_id)
        return directory if directory.exists() else self.state_dir / LOST / sandbox_id

    def remove_lost(self, sandbox_id: str) -> None:
        """End what runs in a sandbox whose record is damaged, and remove its files. Blocks.

        Raises
        ------
        Conflict
            Another process owns it.
        """
        for directory in (self._directory(sandbox_id), self.state_dir / LOST / sandbox_id):
            if not remove_lost(directory):
                raise Conflict(f"sandbox {sandbox_id} is in use by another process; stop that process first")

    def check_storage(self) -> Checks:
        """Check that there is space for another sandbox and that the audit log is writable. Blocks."""
        found: Checks = []
        try:
            self.check_space()
            found.append(Check("disk", True, f"enough free space in {self.state_dir}"))
        except (AgentboxError, OSError) as error:
            found.append(Check("disk", False, str(error)))
        try:
            self.audit.check()
            found.append(Check("audit log", True, str(self.audit.path)))
        except AgentboxError as error:
            found.append(Check("audit log", False, str(error)))
        return found

    def check_space(self) -> None:
        """Raise DiskFull if the state directory has no space for a new sandbox, or OSError if it is not writable."""
        facts = os.statvfs(self.state_dir)
        free = facts.f_bavail * facts.f_frsize
        if free < MIN_FREE or (facts.f_files and not facts.f_favail):
            raise DiskFull(
                f"Cannot create a sandbox: the disk of {self.state_dir} is full ({format_size(free)} left). Free some "
                "space, or set Policy.state_dir to a directory on another disk",
                setting="Policy.state_dir",
            )
        if facts.f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, f"Cannot create a sandbox: the disk of {self.state_dir} is read-only")

    def _state(self, record: Record, directory: Path) -> str:
        # For a living sandbox. One without an owner can be adopted whether or not its runtime responds.
        if record.spec.layout == "waiting":
            return "pooled"
        if not is_owned(directory):
            return "ended" if was_told_to_end(directory) else "orphaned"
        return "running" if self._runtime_of(record).is_reachable() else "unknown"

    def _runtime_of(self, record: Record) -> Runtime:
        # Profiles can select different runtimes.
        if record.runtime == self.runtime.name:
            return self.runtime
        if record.runtime not in self._others:
            options = {"state_dir": str(self.state_dir), "config": self.runtime.config}
            self._others[record.runtime] = load_runtime(record.runtime, **options)
        return self._others[record.runtime]

    def get(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox of this process. Raises InvalidRequest."""
        try:
            return self.sandboxes[sandbox_id]
        except KeyError:
            raise InvalidRequest(f"sandbox {sandbox_id!r} does not exist in this process", field="id") from None


def _folders(base: Path) -> list[Path]:
    return [path for path in base.glob("*") if not path.name.startswith(".")]


def _load(directory: Path) -> tuple[Record, Handle | None]:
    """Read a sandbox's record. Raises NotFound."""
    record = Record.load(directory)
    try:
        return record, Handle.from_dict(record.handle) if record.handle else None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise NotFound(f"the record of sandbox {directory.name} contains an invalid handle: {error!r}") from None


def _listed_lost(directory: Path, reason: str) -> Listed:
    created = 0.0
    with suppress(OSError):
        created = directory.stat().st_mtime
    state = "unknown" if is_owned(directory) else "lost"
    return Listed(directory.name, "", "", "", "", str(directory / "work"), created, state, 0, reason)


def _claimed(kernels: list[KernelRecord], claim: Claim) -> list[KernelRecord]:
    """Return the kernels' records with the claim's key, signature scheme and context."""
    return [
        replace(kernel, key=claim.key, signature_scheme=claim.signature_scheme, context=claim.context)
        for kernel in kernels
    ]
