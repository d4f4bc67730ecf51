"""The pool: sandboxes with a kernel that runs, frozen, until somebody who starts one takes it.

A server *keeps* a pool: it makes sandboxes off the hot path, and ends those that are too old or that nobody needs.
They lie in the registry like all others, without an owner, so any process of this user may take one: whoever gets its
lock. Each is taken once, and gets the folder, limits, hosts, environment and secrets of whoever took it before any
code runs in it.
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

#: File of a waiting sandbox's directory that holds its key.
MARK = "pooled"
#: Seconds between two looks of a keeper, between two at what the kernels depend on, and after a failure.
LOOK_INTERVAL, INPUTS_INTERVAL, RETRY_INTERVAL = 2.0, 30.0, 60.0
#: Seconds that a kernel which was just started has the machine to itself before the pool is filled again.
FILL_DELAY = 3.0
#: Seconds that one waits at most, and for which a kind that nobody has started is kept.
MAX_AGE, MAX_UNUSED = 3600.0, 24 * 3600.0
#: Memory that one is taken to need before any was measured, bytes.
FIRST_GUESS = 100 * MIB


class Pool:
    """Takes sandboxes that wait, whoever keeps them. On the link's thread.

    Parameters
    ----------
    templates : Templates
    """

    def __init__(self, templates: Templates) -> None:
        self._manager = templates.manager
        self._base = templates.manager.state_dir / "sandboxes"

    def find(self, key: str) -> list[Path]:
        """Return the directories of those of a key that nobody has taken, oldest first."""
        found = []
        with suppress(OSError):
            for path in self._base.glob(f"[!.]*/{MARK}"):
                with suppress(OSError):
                    if path.read_text() == key and not is_owned(path.parent):
                        found.append((path.stat().st_mtime, path.parent))
        return [directory for _, directory in sorted(found)]

    def is_filled(self) -> bool:
        """Whether anything waits, of whatever key."""
        return any(self._base.glob(f"[!.]*/{MARK}"))

    async def take(self, wish: KernelRequest, key: str) -> Sandbox | None:
        """Take one for a kernel; None where there is none.

        Raises
        ------
        InvalidRequest
            The work folder cannot be one.
        """
        for directory in await asyncio.to_thread(self.find, key):
            try:
                record = Record.load(directory)
                if record.spec.layout == "waiting" and self._fits(record, wish):
                    sandbox = await self._manager.claim(
                        record, wish.claimed, wish.claim, on_refusal=wish.on_refusal, inherit=wish.inherit
                    )
                    (directory / MARK).unlink(missing_ok=True)
                    return sandbox
            except InvalidRequest:
                raise
            except (NotFound, RuntimeFailed, LinkClosed) as error:
                log.info("a sandbox that waited was not taken: %s", error)
        return None

    def _fits(self, record: Record, wish: KernelRequest) -> bool:
        """Whether its limits can be narrowed: what stands in for a missing control group is fixed at the start."""
        enforceable = getattr(self._manager.runtime, "enforceable", None)
        is_narrower = record.spec.limits != wish.spec.limits
        return not (is_narrower and enforceable is not None and any(enforceable().values()))


@dataclass
class _Kind:
    """A kind of kernel that is to wait.

    Parameters
    ----------
    spec, argv
        Of the last one that was started.
    used : float
        When, by the monotonic clock.
    pause_until : float
        When the next may be made, after a failure.
    """

    spec: SandboxSpec
    argv: Sequence[str]
    used: float
    pause_until: float = 0.0


@dataclass
class _Waiting:
    """One that waits."""

    key: str
    made: float
    memory: int


class Keeper:
    """Keeps a pool filled, for as long as its server lives. On the link's thread.

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
        self._waiting: dict[str, _Waiting] = {}
        self._wake = asyncio.Event()
        self._is_closed = False
        self._looked = 0.0
        self._task: asyncio.Task[None] | None = None

    def want(self, key: str, spec: SandboxSpec, argv: Sequence[str]) -> None:
        """Take note that such a kernel was started: the next ones are to wait."""
        if self._is_closed or spec.warm is None or not spec.warm.pool_size:
            return
        kind = self._kinds.setdefault(key, _Kind(spec, argv, 0.0))
        kind.used = time.monotonic()
        kind.pause_until = max(kind.pause_until, kind.used + FILL_DELAY)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def _keep(self) -> None:
        while not self._is_closed:
            try:
                await self._look()
            except (AgentboxError, OSError) as error:
                log.warning("the pool could not be looked after: %s", error)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_INTERVAL)
            self._wake.clear()

    async def _look(self) -> None:
        now = time.monotonic()
        for sandbox_id in list(self._waiting):
            if not self._still_waits(sandbox_id):
                del self._waiting[sandbox_id]
        if now - self._looked > INPUTS_INTERVAL:
            self._looked = now
            await self._drop_changed()
        for sandbox_id, waiting in list(self._waiting.items()):
            if waiting.key not in self._kinds or now - waiting.made > MAX_AGE:
                await self._end(sandbox_id)
        for key, kind in list(self._kinds.items()):
            if now - kind.used > MAX_UNUSED:
                del self._kinds[key]
            elif now >= kind.pause_until and self._has_room(key, kind):
                await self._add(key, kind)
                self._wake.set()  # for the next one at once

    def _still_waits(self, sandbox_id: str) -> bool:
        """Begin its lease anew, as nobody else does; false once somebody has taken it, or it has ended."""
        directory = self._manager.state_dir / "sandboxes" / sandbox_id
        try:
            if is_owned(directory) or Record.load(directory).spec.layout != "waiting":
                return False
            os.utime(directory / "lock")
        except (OSError, NotFound):
            return False
        return True

    async def _drop_changed(self) -> None:
        """Forget the kinds that no start will ask for again, since a package or a program has changed."""
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
        next_one = max(used, default=FIRST_GUESS)
        return own < kind.spec.warm.pool_size and sum(used) + next_one <= self._policy.pool_max_memory

    async def _add(self, key: str, kind: _Kind) -> None:
        try:
            async with self._manager.starting:
                sandbox = await self._make(key, kind)
        except (AgentboxError, OSError) as error:
            kind.pause_until = time.monotonic() + RETRY_INTERVAL
            log.warning("no sandbox was added to the pool: %s", error)
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
        self._waiting[sandbox.id] = _Waiting(key, time.monotonic(), usage.memory)
        if self._is_closed:
            await self._end(sandbox.id)

    async def _make(self, key: str, kind: _Kind) -> Sandbox:
        """Start one, off a template where there is one."""
        found: Snapshot | None = None
        if self._policy.templates:
            found = await asyncio.to_thread(self._templates.find, key)
        sandbox = await self._templates.wait_off(found, kind.spec) if found is not None else None
        if sandbox is None:
            sandbox = await self._templates.launch(kind.spec, kind.argv)
        for kernel in sandbox.kernels.values():
            kernel.on_message = _ignore
        return sandbox

    async def _end(self, sandbox_id: str) -> None:
        """End one that waits, unless somebody has just taken it."""
        self._waiting.pop(sandbox_id, None)
        directory = self._manager.state_dir / "sandboxes" / sandbox_id
        with suppress(AgentboxError, OSError):  # it is somebody's, or is gone
            await asyncio.to_thread(end_waiting, directory, self._manager.runtime)

    async def aclose(self) -> None:
        """End all that wait."""
        self._is_closed = True
        if self._task is not None:
            self._wake.set()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(self._end(sandbox_id) for sandbox_id in list(self._waiting)))


def end_waiting(directory: Path, runtime: Runtime) -> None:
    """End a sandbox that waits, and remove all of it. Blocks.

    Raises
    ------
    RuntimeFailed
        Somebody has taken it.
    NotFound
        It is gone.
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
    """Nobody listens yet."""
