"""Keep a pool of frozen, unclaimed sandboxes with running kernels.

A server *keeps* a pool: it creates sandboxes outside the critical path, and ends those that are too old or not needed.
They are in the registry like all others, but without an owner. Any process of this user may claim one by acquiring its
lock. Each is claimed only once, and gets the claimer's folder, limits, hosts, environment and secrets before any code
runs in it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, LinkClosed, NotFound, RuntimeFailed
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes import Handle, Runtime
from jupyter_agentbox.sandbox.claims import begin
from jupyter_agentbox.sandbox.record import Lock, Record, is_owned
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import MIB, SandboxSpec
from jupyter_agentbox.storage.snapshots import Snapshot

from .template_key import make_key
from .templates import KernelRequest, Templates

log = logging.getLogger(__name__)

#: File in an unclaimed sandbox's directory that contains its key.
MARK = "pooled"
#: Seconds between two rounds of a keeper, between two checks of what the kernels depend on, and after a failure.
CHECK_INTERVAL, INPUTS_INTERVAL, RETRY_INTERVAL = 2.0, 30.0, 60.0
#: Seconds for which a kernel that was just started has the machine to itself before the pool is refilled.
FILL_DELAY = 3.0
#: Longest time that a sandbox stays in the pool, and that a kind of kernel is kept without being started, in seconds.
MAX_AGE, MAX_UNUSED = 3600.0, 24 * 3600.0
#: Assumed memory usage of a sandbox before any was measured, in bytes.
ASSUMED_MEMORY = 100 * MIB


class Pool:
    """A source of unclaimed sandboxes, whichever process keeps them. Use on the link thread.

    Parameters
    ----------
    templates : Templates
    """

    def __init__(self, templates: Templates) -> None:
        self._manager = templates.manager
        self._base = templates.manager.state_dir / "sandboxes"

    def find(self, key: str) -> list[Path]:
        """Return the directories of unclaimed sandboxes with a key, oldest first."""
        found = []
        with suppress(OSError):
            for path in self._base.glob(f"[!.]*/{MARK}"):
                with suppress(OSError):
                    if path.read_text() == key and not is_owned(path.parent):
                        found.append((path.stat().st_mtime, path.parent))
        return [directory for _, directory in sorted(found)]

    def is_filled(self) -> bool:
        """Return whether the pool contains any sandbox, whatever its key."""
        return any(self._base.glob(f"[!.]*/{MARK}"))

    async def take(self, request: KernelRequest, key: str) -> Sandbox | None:
        """Claim a sandbox for a kernel. Return None if there is none.

        Raises
        ------
        InvalidRequest
            The requested workspace is not usable.
        """
        for directory in await asyncio.to_thread(self.find, key):
            try:
                record = Record.load(directory)
                if record.spec.layout == "waiting" and self._fits(record, request):
                    sandbox = await self._manager.claim(
                        record, request.claimed, request.claim, on_refusal=request.on_refusal, inherit=request.inherit
                    )
                    (directory / MARK).unlink(missing_ok=True)
                    return sandbox
            except InvalidRequest:
                raise
            except (NotFound, RuntimeFailed, LinkClosed) as error:
                log.info("cannot use a prestarted sandbox: %s", error)
        return None

    def _fits(self, record: Record, request: KernelRequest) -> bool:
        """Return whether a sandbox's limits can be lowered to those of a request.

        Substitutes for a missing control group are fixed at the start.
        """
        enforceable = getattr(self._manager.runtime, "enforceable", None)
        is_narrower = record.spec.limits != request.spec.limits
        return not (is_narrower and enforceable is not None and any(enforceable().values()))


@dataclass
class _Kind:
    """A kind of kernel for which the pool keeps sandboxes.

    Parameters
    ----------
    spec, argv
        Of the last kernel of this kind that was started.
    used : float
        When that was, by the monotonic clock.
    pause_until : float
        Time before which no sandbox of this kind is created, after a start or a failure.
    """

    spec: SandboxSpec
    argv: Sequence[str]
    used: float
    pause_until: float = 0.0


@dataclass
class _Unclaimed:
    """An unclaimed sandbox in the pool."""

    key: str
    made: float
    memory: int


class Keeper:
    """The task that keeps a pool filled for as long as its server lives. Use on the link thread.

    Parameters
    ----------
    templates : Templates
    policy : Policy
    """

    def __init__(self, templates: Templates, policy: Policy) -> None:
        self._templates = templates
        self._manager = templates.manager
        self._policy = policy
        self._kinds: dict[str, _Kind] = {}
        self._waiting: dict[str, _Unclaimed] = {}
        self._wake = asyncio.Event()
        self._is_closed = False
        self._last_check = 0.0
        self._task: asyncio.Task[None] | None = None

    def record_start(self, key: str, spec: SandboxSpec, argv: Sequence[str]) -> None:
        """Record that such a kernel was started, so that the pool keeps sandboxes for the next ones."""
        if self._is_closed or spec.warm is None or not spec.warm.pool_size:
            return
        kind = self._kinds.setdefault(key, _Kind(spec, argv, 0.0))
        kind.used = time.monotonic()
        kind.pause_until = max(kind.pause_until, kind.used + FILL_DELAY)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def waiting(self) -> int:
        """Number of sandboxes that this keeper has in the pool."""
        return len(self._waiting)

    async def _keep(self) -> None:
        while not self._is_closed:
            try:
                await self._check_pool()
            except (AgentboxError, OSError) as error:
                log.warning("cannot maintain the pool: %s", error)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), CHECK_INTERVAL)
            self._wake.clear()

    async def _check_pool(self) -> None:
        now = time.monotonic()
        for sandbox_id in list(self._waiting):
            if not self._still_waits(sandbox_id):
                del self._waiting[sandbox_id]
        if now - self._last_check > INPUTS_INTERVAL:
            self._last_check = now
            await self._drop_changed()
        for sandbox_id, waiting in list(self._waiting.items()):
            if waiting.key not in self._kinds or now - waiting.made > MAX_AGE:
                await self._end(sandbox_id)
        for key, kind in list(self._kinds.items()):
            if now - kind.used > MAX_UNUSED:
                del self._kinds[key]
            elif now >= kind.pause_until and self._has_room(key, kind):
                await self._add(key, kind)
                self._wake.set()  # create the next one immediately

    def _still_waits(self, sandbox_id: str) -> bool:
        """Renew a sandbox's lease, because it has no owner to do so. Return False if it was claimed or has ended."""
        directory = self._manager.state_dir / "sandboxes" / sandbox_id
        try:
            if is_owned(directory) or Record.load(directory).spec.layout != "waiting":
                return False
            os.utime(directory / "lock")
        except (OSError, NotFound):
            return False
        return True

    async def _drop_changed(self) -> None:
        """Drop or rename the kinds whose key has changed, because a package or a program has changed."""
        for key, kind in list(self._kinds.items()):
            inputs = await asyncio.to_thread(self._templates.inputs, kind.spec, kind.argv)
            new = make_key(inputs) if inputs is not None else ""
            if new != key:
                kind = self._kinds.pop(key)
                if new:
                    self._kinds.setdefault(new, kind)

    def _has_room(self, key: str, kind: _Kind) -> bool:
        assert kind.spec.warm is not None
        used = [waiting.memory for waiting in self._waiting.values()]
        own = sum(waiting.key == key for waiting in self._waiting.values())
        next_one = max(used, default=ASSUMED_MEMORY)
        return own < kind.spec.warm.pool_size and sum(used) + next_one <= self._policy.pool_max_memory

    async def _add(self, key: str, kind: _Kind) -> None:
        try:
            async with self._manager.starting:
                sandbox = await self._make(key, kind)
        except (AgentboxError, OSError) as error:
            kind.pause_until = time.monotonic() + RETRY_INTERVAL
            log.warning("cannot add a sandbox to the pool: %s", error)
            return
        directory, handle = sandbox.directory, Handle.from_dict(sandbox.record.handle or {})
        try:
            usage = await asyncio.to_thread(self._manager.runtime.usage, handle, directory)
            (directory / MARK).write_text(key)
            await sandbox.leave(is_waiting=True)
        except BaseException:
            kind.pause_until = time.monotonic() + RETRY_INTERVAL
            await asyncio.shield(self._manager.stop(sandbox))
            raise
        self._manager.sandboxes.pop(sandbox.id, None)
        self._waiting[sandbox.id] = _Unclaimed(key, time.monotonic(), usage.memory)
        if self._is_closed:
            await self._end(sandbox.id)

    async def _make(self, key: str, kind: _Kind) -> Sandbox:
        """Start an unclaimed sandbox, from a template if there is one."""
        found: Snapshot | None = None
        if self._policy.templates:
            found = await asyncio.to_thread(self._templates.find, key)
        sandbox = await self._templates.start_unclaimed(found, kind.spec) if found is not None else None
        if sandbox is None:
            sandbox = await self._templates.launch(kind.spec, kind.argv)
        for kernel in sandbox.kernels.values():
            kernel.on_message = _ignore
        return sandbox

    async def _end(self, sandbox_id: str) -> None:
        """End an unclaimed sandbox, unless it was just claimed."""
        self._waiting.pop(sandbox_id, None)
        directory = self._manager.state_dir / "sandboxes" / sandbox_id
        with suppress(AgentboxError, OSError):  # it was claimed or has ended
            await asyncio.to_thread(end_unclaimed, directory, self._manager.runtime)

    async def aclose(self) -> None:
        """End all unclaimed sandboxes."""
        self._is_closed = True
        if self._task is not None:
            self._wake.set()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(self._end(sandbox_id) for sandbox_id in list(self._waiting)))


def end_unclaimed(directory: Path, runtime: Runtime) -> None:
    """End an unclaimed sandbox, and remove all of it. Blocks.

    Raises
    ------
    RuntimeFailed
        It was claimed.
    NotFound
        It has ended.
    """
    record, lock = Record.load(directory), Lock(directory)
    if not lock.acquire():
        raise RuntimeFailed(f"sandbox {record.id} belongs to another process")
    begin(record, directory, lock)
    try:
        handle = Handle.from_dict(record.handle or {})
        runtime.kill(handle)
        runtime.remove(handle, directory)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        lock.release()


async def _ignore(channel: str, frames: list[bytes]) -> None:
    """Ignore a message, because the kernel has no receiver yet."""
