"""Templates: snapshots of kernels right after their start, in which no code of anybody's has run.

A start goes on from one, in a fraction of the time: with its own folder, environment, limits, hosts, keys and random
numbers, which it is given before it reads its first request. Templates lie in the snapshot store, an owner's apart from
another's. ``kernels.warm.template_key`` says what each depends on, ``kernels.warm.pool`` has kernels that
run already.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jupyter_agentbox.egress.gate import OnRefusal
from jupyter_agentbox.errors import (
    AgentboxError,
    Damaged,
    InvalidConfig,
    InvalidRequest,
    LinkClosed,
    NotFound,
    RuntimeFailed,
)
from jupyter_agentbox.linux import PACKAGE
from jupyter_agentbox.policy.environment import user_name
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes.oci import make_rlimits
from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.sandbox.drivers import Kernel
from jupyter_agentbox.sandbox.drivers.embedded import Claim
from jupyter_agentbox.sandbox.drivers.messages import Signer, header_index, parse
from jupyter_agentbox.sandbox.link.thread import finished
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import WORKSPACE, SandboxSpec
from jupyter_agentbox.storage.snapshots import Snapshot, SnapshotMeta, SnapshotStore

from .template_key import can_be_warm, find_inputs, make_key, waiting_spec

log = logging.getLogger(__name__)

#: Templates of one owner; the oldest make room.
MAX_TEMPLATES = 8
#: Seconds for a kernel to start and import what it is to.
READY_TIMEOUT = 120.0
#: Seconds that one in the making outlives its maker.
LEASE = 30.0
_SANDBOX = "template"
#: What a template's description has beside its inputs: who made it, and for which command.
_MAKER, _ARGV = "maker", "command"
_WORDS = {
    "code": "this package",
    "argv": "the interpreter",
    "env": "the environment",
    "limits": "the profile's limits",
    "preload": "the profile's preload",
    "packages": "the packages that are installed",
    "release": "runsc",
    "processor": "the processor",
    "mounts": "the mounts",
    "root": "the image or the system",
}

# A method below is called `list`.
List = list[str]
#: Packages may be installed for the user: in a folder where Python looks only if it is there from the start. What is
#: not needed besides need not be read at each start.
_SETTLE = """exec('''
import ctypes, gc, os, site, sys
folder = site.getusersitepackages()
if site.ENABLE_USER_SITE and folder not in sys.path:
    os.makedirs(folder, exist_ok=True)
    sys.path.insert(next((i for i, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path)), folder)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
''', {})"""
#: A cell that changes nothing.
_REHEARSAL = "None"


@dataclass(frozen=True)
class KernelRequest:
    """A kernel that somebody wants, and whom it is to be.

    Parameters
    ----------
    spec : SandboxSpec
    argv : sequence of str
    key, signature_scheme : str
        Of its session.
    on_refusal : callable, optional
    inherit : Sandbox, optional
        See ``SandboxManager.create``.
    context : str
        The context of code that it is to be; empty for a notebook's.
    is_usual : bool
        The next ones will want the same, so that it is worth while to start those ahead.
    """

    spec: SandboxSpec
    argv: Sequence[str]
    key: str
    signature_scheme: str
    on_refusal: OnRefusal | None = None
    inherit: Sandbox | None = None
    context: str = ""
    is_usual: bool = True

    @property
    def claimed(self) -> SandboxSpec:
        """The spec of a sandbox that waited and became this one."""
        return replace(self.spec, layout="claimed")

    @property
    def claim(self) -> Claim:
        """What its kernel is told."""
        return Claim(self.key, self.signature_scheme, self.spec.env, make_rlimits(self.spec.limits), self.context)


class Templates:
    """The templates of one user. Coroutines run on the link's thread.

    Parameters
    ----------
    manager : SandboxManager
    policy : Policy
    """

    def __init__(self, manager: SandboxManager, policy: Policy) -> None:
        self.manager = manager
        self._policy = policy
        self._store: SnapshotStore | None = None
        self._mutex = threading.Lock()
        self._owner = f"template/{user_name()}"

    @property
    def store(self) -> SnapshotStore:
        """Where they are kept; made at first use. Raises InvalidConfig."""
        with self._mutex:
            if self._store is None:
                policy = self._policy
                policy.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._store = SnapshotStore(
                    policy.state_path,
                    secret=policy.snapshot_secret(),
                    max_bytes=policy.max_snapshot_bytes,
                    max_count=MAX_TEMPLATES + 1,
                )
            return self._store

    def inputs(self, spec: SandboxSpec, argv: Sequence[str]) -> dict[str, str] | None:
        """Return what such a kernel depends on; None where it can only start cold. Blocks."""
        if not can_be_warm(spec, argv):
            return None
        try:
            return find_inputs(spec, argv, self.manager.runtime.fingerprint(spec))
        except AgentboxError:
            return None  # this runtime can't restore

    def list(self) -> list[Snapshot]:
        """Return all, oldest first. Blocks."""
        if not (self._policy.state_path / "snapshots").is_dir():
            return []
        return sorted(self.store.list(self._owner), key=lambda item: item.meta.created)

    def find(self, key: str) -> Snapshot | None:
        """Find the newest of that key. Blocks."""
        return next((item for item in reversed(self.list()) if item.meta.name == key), None)

    def find_changes(self, item: Snapshot) -> List | None:
        """Return what is not as it was when a template was made: if anything, no kernel starts off it. Blocks.

        Returns
        -------
        list of str or None
            In words. None where another installation of this package, which is there still, made it for itself.

        Raises
        ------
        AgentboxError
            Its runtime can't be asked.
        """
        then = dict(item.meta.fingerprint)
        maker, argv = then.pop(_MAKER, ""), json.loads(then.pop(_ARGV, "[]"))
        if maker != str(PACKAGE):
            return None if maker and Path(maker).is_dir() else ["the environment that made it"]
        try:
            spec = Record.from_bytes(item.meta.record).spec
            spec = replace(spec, warm=self._policy.profile(spec.profile).warm)
        except InvalidRequest:
            return ["the profile, which is gone"]
        except ValueError:
            return ["the release of this package"]
        policy = self._policy
        runtime = SandboxManager.shared(policy.state_path, spec.runtime, config=policy.config).runtime
        now = find_inputs(spec, argv, runtime.fingerprint(spec))
        return [_WORDS.get(name, name) for name in {**now, **then} if now.get(name) != then.get(name)]

    def remove_unfit(self) -> Iterator[tuple[Snapshot, str]]:
        """Remove those that no kernel starts off any more, and yield each with what is not as it was. Blocks."""
        for item in self.list():
            with suppress(AgentboxError):  # of a runtime that can't be asked now
                if changes := self.find_changes(item):
                    self.remove(item.id)
                    yield item, ", ".join(changes)

    def remove(self, snapshot_id: str) -> None:
        """Remove one; one that is gone is no error. Blocks."""
        try:
            self.store.delete(snapshot_id, self._owner)
        except NotFound:
            pass

    async def start(self, wish: KernelRequest, key: str) -> Sandbox | None:
        """Start a kernel off the template of that key; None where there is none that works.

        One that does not is removed: the start goes on cold, in no weaker isolation.

        Raises
        ------
        AgentboxError
            What would keep a cold start from succeeding too.
        """
        found = await asyncio.to_thread(self.find, key)
        return None if found is None else await self._restore(found, wish.claimed, wish)

    async def wait_off(self, found: Snapshot, spec: SandboxSpec) -> Sandbox | None:
        """Start a sandbox that waits off a template; None where that fails, and then it is removed.

        Its kernel has run a cell since, so that the pages which that takes are there when it is claimed.
        """
        sandbox = await self._restore(found, waiting_spec(spec, lease=LEASE))
        if sandbox is not None:
            try:
                kernel, known = next(iter(sandbox.kernels.values())), sandbox.record.kernels[0]
                signer = Signer(known.key.encode(), known.signature_scheme)
                await asyncio.wait_for(_run(kernel, signer, [_REHEARSAL], is_silent=False), READY_TIMEOUT)
            except BaseException as error:
                await asyncio.shield(self.manager.stop(sandbox))
                if isinstance(error, asyncio.TimeoutError):
                    raise RuntimeFailed(f"the kernel did not answer within {READY_TIMEOUT:g} s") from None
                raise
        return sandbox

    async def _restore(self, found: Snapshot, spec: SandboxSpec, wish: KernelRequest | None = None) -> Sandbox | None:
        extra: dict[str, Any] = {}
        if wish is not None:
            extra = {"on_refusal": wish.on_refusal, "inherit": wish.inherit, "claim": wish.claim}
        try:
            record = Record.from_bytes(found.meta.record)
            async with self._checked_out(found) as files:
                return await self.manager.restore(spec, record, files, **extra)
        except (Damaged, RuntimeFailed, LinkClosed, NotFound, ValueError) as error:
            log.warning("a template failed and is removed; the kernel starts without it: %s", error)
            await asyncio.to_thread(self.remove, found.id)
            return None

    @asynccontextmanager
    async def _checked_out(self, found: Snapshot) -> AsyncIterator[Path]:
        """Have its files at hand; nothing is left of them, also where whoever wanted them goes away meanwhile."""
        context = self.store.checkout(found.id, self._owner, verify="once")
        entering = asyncio.ensure_future(asyncio.to_thread(context.__enter__))
        try:
            yield await finished(entering)
        finally:
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                await finished(asyncio.to_thread(context.__exit__, None, None, None))

    async def make(self, spec: SandboxSpec, argv: Sequence[str]) -> Snapshot:
        """Make the template of such kernels, in place of those of the same profile and program that fit no more.

        Raises
        ------
        AgentboxError
            It can't be had here, and why.
        """
        inputs = await asyncio.to_thread(self.inputs, spec, argv)
        if inputs is None:
            raise RuntimeFailed(f"kernels of profile {spec.profile!r} start cold: only those of Python, not as root")
        await asyncio.to_thread(import_cache.make, self.manager.state_dir)
        staged = await asyncio.to_thread(self.store.stage)
        try:
            sandbox = await self.launch(spec, argv)
            try:
                record = await sandbox.checkpoint(staged)
            finally:
                await self.manager.stop(sandbox)
            meta = SnapshotMeta(
                sandbox=_SANDBOX,
                owner=self._owner,
                kind="template",
                created=time.time(),
                name=make_key(inputs),
                note=spec.profile,
                fingerprint={**inputs, _MAKER: str(PACKAGE), _ARGV: json.dumps(list(argv))},
                record=record,
            )
            made = await asyncio.to_thread(self.store.commit, staged, meta)
        except BaseException:
            await asyncio.to_thread(self.store.discard, staged)
            raise
        await asyncio.to_thread(self._remove_others, made)
        return made

    def _remove_others(self, made: Snapshot) -> None:
        """Remove what no start will ever fit again, and the oldest beyond the bound."""
        mine = made.meta.fingerprint
        others = [item for item in self.list() if item.id != made.id]
        same = [
            item
            for item in others
            if all(item.meta.fingerprint.get(name) == mine[name] for name in ("argv", "env", "profile", "mounts"))
        ]
        rest = [item for item in others if item not in same]
        for item in [*same, *rest[: max(0, len(rest) + 1 - MAX_TEMPLATES)]]:
            self.remove(item.id)

    async def launch(self, spec: SandboxSpec, argv: Sequence[str]) -> Sandbox:
        """Start a sandbox that waits, with its kernel ready. Raises AgentboxError; nothing is left then."""
        waiting = waiting_spec(spec, lease=LEASE)
        sandbox = await self.manager.create(waiting)
        try:
            handle = sandbox.record.handle or {}
            if not handle.get("user"):
                raise RuntimeFailed(
                    "user code is uid 0 in sandboxes here, as this user has no subordinate ids; kernels start cold"
                )
            key = secrets.token_hex(16)
            kernel = await sandbox.start_kernel(argv, waiting.env, WORKSPACE, key=key, signature_scheme="hmac-sha256")
            await asyncio.wait_for(_warm_up(kernel, Signer(key.encode()), spec), READY_TIMEOUT)
        except BaseException as error:
            await asyncio.shield(self.manager.stop(sandbox))
            if isinstance(error, asyncio.TimeoutError):
                raise RuntimeFailed(f"the kernel was not ready within {READY_TIMEOUT:g} s") from None
            raise
        return sandbox


async def _warm_up(kernel: Kernel, signer: Signer, spec: SandboxSpec) -> None:
    """Have it import what is to be imported, and go once through what every cell goes through."""
    assert spec.warm is not None
    modules = spec.warm.preload
    failed, said = await _run(kernel, signer, [*(f"exec('import {module}', {{}})" for module in modules), _SETTLE])
    if failed is not None:
        raise InvalidConfig(
            f"the module {[*modules, ''][failed]!r} can't be imported: {said.get('ename')}: {said.get('evalue')}"[:500],
            setting=f"Policy.profiles[{spec.profile!r}]['preload']",
        )


async def _run(
    kernel: Kernel, signer: Signer, cells: Sequence[str], *, is_silent: bool = True
) -> tuple[int | None, dict[str, Any]]:
    """Run cells that leave no trace, up to the first that fails; return its number, and what was said last.

    Raises
    ------
    RuntimeFailed
        The kernel ended.
    """
    replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def heard(channel: str, frames: list[bytes]) -> None:
        index = header_index(frames)
        if channel == "shell" and index is not None and parse(frames[index]).get("msg_type") == "execute_reply":
            replies.put_nowait(parse(frames[index + 3]))

    kernel.on_message = heard
    ended = asyncio.Event()
    kernel.add_end_callback(ended.set)
    said: dict[str, Any] = {}
    for number, code in enumerate(cells):
        content = {
            "code": code, "silent": is_silent, "store_history": False, "user_expressions": {}, "allow_stdin": False,
            "stop_on_error": False,
        }  # fmt: skip
        await kernel.send("shell", [b"warm", *signer.message(b"", "execute_request", content)[1:]])
        answer, end = asyncio.ensure_future(replies.get()), asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait((answer, end), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise RuntimeFailed(f"the kernel ended before it was ready: {kernel.end and kernel.end.message}")
            said = answer.result()
            if said.get("status") != "ok":
                return number, said
        finally:
            answer.cancel()
            end.cancel()
    return None, said
