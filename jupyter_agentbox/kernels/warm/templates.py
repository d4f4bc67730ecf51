"""Keep templates: snapshots of kernels right after their start, in which no user code has run.

Starting from a template takes a fraction of the time of a cold start. The kernel is given its own folder, environment,
limits, hosts, keys and random numbers before it reads its first request. Templates are kept in the snapshot store,
separately for each owner. ``kernels.warm.template_key`` defines what a template depends on, and ``kernels.warm.pool``
keeps kernels that already run.
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

from .template_key import can_be_warm, find_inputs, make_key, unclaimed_spec

log = logging.getLogger(__name__)

#: Maximum number of templates of one owner. The oldest ones are removed.
MAX_TEMPLATES = 8
#: Seconds that a kernel may take to start and import its preloaded modules.
READY_TIMEOUT = 120.0
#: Seconds that an unfinished template's sandbox outlives its creator.
LEASE = 30.0
_SANDBOX = "template"
#: Additional fields in a template's fingerprint: which installation created it, and for which command.
_INSTALLATION, _ARGV = "maker", "command"
_DESCRIPTIONS = {
    "code": "this package",
    "argv": "the interpreter",
    "env": "the environment",
    "limits": "the profile's limits",
    "machine": "the number of processors",
    "preload": "the profile's preload",
    "packages": "the installed packages",
    "release": "runsc",
    "processor": "the processor",
    "mounts": "the mounts",
    "root": "the image or the system",
}

# The class below has a method called `list`.
List = list[str]
#: Code that prepares a kernel for the snapshot. Packages may be installed for the user, in a folder that Python
#: searches only if it exists from the start. Unneeded memory is released, so that it need not be read at each start.
_PREPARATION = """exec('''
import ctypes, gc, os, site, sys
folder = site.getusersitepackages()
if site.ENABLE_USER_SITE and folder not in sys.path:
    os.makedirs(folder, exist_ok=True)
    sys.path.insert(next((i for i, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path)), folder)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
''', {})"""
#: A cell that changes nothing.
_NOOP_CELL = "None"


def context_env(spec: SandboxSpec) -> dict[str, str]:
    """Return the environment of a context's kernel. Programs read its output, so it has no colours by default."""
    return {"NO_COLOR": "1", **spec.env}


@dataclass(frozen=True)
class KernelRequest:
    """A request for a kernel, with the identity that it is to have.

    Parameters
    ----------
    spec : SandboxSpec
    argv : sequence of str
    key, signature_scheme : str
        For signing messages.
    on_refusal : callable, optional
    inherit : Sandbox, optional
        See ``SandboxManager.create``.
    context : str
        Name of the code context that the kernel serves; empty for a notebook's kernel.
    is_usual : bool
        Whether later requests are likely to be the same, so that prestarting kernels for them is worthwhile.
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
        """The spec of an unclaimed sandbox after it was claimed for this request."""
        return replace(self.spec, layout="claimed")

    @property
    def claim(self) -> Claim:
        """The claim that is sent to the kernel."""
        env = context_env(self.spec) if self.context else self.spec.env
        rlimits = make_rlimits(self.spec)
        return Claim(self.key, self.signature_scheme, env, rlimits, self.context, kernel_name=self.spec.kernel_name)


class Templates:
    """The templates of one user. Coroutines run on the link thread.

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
        """The store that keeps the templates, created at first use. Raises InvalidConfig."""
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
        """Return the inputs that a kernel depends on, or None if it can only start cold. Blocks."""
        if not can_be_warm(spec, argv):
            return None
        try:
            return find_inputs(spec, argv, self.manager.runtime.fingerprint(spec))
        except AgentboxError:
            return None  # this runtime cannot restore

    def list(self) -> list[Snapshot]:
        """Return all templates, oldest first. Blocks."""
        if not (self._policy.state_path / "snapshots").is_dir():
            return []
        return sorted(self.store.list(self._owner), key=lambda item: item.meta.created)

    def find(self, key: str) -> Snapshot | None:
        """Return the newest template with a key, or None. Blocks."""
        return next((item for item in reversed(self.list()) if item.meta.name == key), None)

    def find_changes(self, item: Snapshot) -> List | None:
        """Return what has changed since a template was made. After any change, no kernel starts from it. Blocks.

        Returns
        -------
        list of str or None
            Descriptions of the changes. None if another installation of this package, which still exists, made the
            template for itself.

        Raises
        ------
        AgentboxError
            The template's runtime cannot be queried.
        """
        then = dict(item.meta.fingerprint)
        installation, argv = then.pop(_INSTALLATION, ""), json.loads(then.pop(_ARGV, "[]"))
        if installation != str(PACKAGE):
            return None if installation and Path(installation).is_dir() else ["the environment that created it"]
        try:
            spec = Record.from_bytes(item.meta.record).spec
            spec = replace(spec, warm=self._policy.profile(spec.profile).warm)
        except InvalidRequest:
            return ["the profile, which no longer exists"]
        except ValueError:
            return ["the release of this package"]
        policy = self._policy
        runtime = SandboxManager.shared(policy.state_path, spec.runtime, config=policy.config).runtime
        now = find_inputs(spec, argv, runtime.fingerprint(spec))
        return [_DESCRIPTIONS.get(name, name) for name in {**now, **then} if now.get(name) != then.get(name)]

    def remove_unfit(self) -> Iterator[tuple[Snapshot, str]]:
        """Remove outdated templates, and yield each one with a description of what has changed. Blocks."""
        for item in self.list():
            with suppress(AgentboxError):  # its runtime cannot be queried now
                if changes := self.find_changes(item):
                    self.remove(item.id)
                    yield item, ", ".join(changes)

    def remove(self, snapshot_id: str) -> None:
        """Remove a template. Does nothing if it does not exist. Blocks."""
        try:
            self.store.delete(snapshot_id, self._owner)
        except NotFound:
            pass

    async def start(self, request: KernelRequest, key: str) -> Sandbox | None:
        """Start a kernel from the template with a key. Return None if there is no working template.

        A template that fails is removed. The kernel then starts cold, with the same isolation.

        Raises
        ------
        AgentboxError
            The error would also make a cold start fail.
        """
        found = await asyncio.to_thread(self.find, key)
        return None if found is None else await self._restore(found, request.claimed, request)

    async def start_unclaimed(self, found: Snapshot, spec: SandboxSpec) -> Sandbox | None:
        """Start an unclaimed sandbox from a template.

        Return None if that fails, in which case the template is removed.

        The sandbox's kernel runs a cell first, so that the memory pages needed for that are loaded when it is claimed.
        """
        sandbox = await self._restore(found, unclaimed_spec(spec, lease=LEASE))
        if sandbox is not None:
            try:
                kernel, known = next(iter(sandbox.kernels.values())), sandbox.record.kernels[0]
                signer = Signer(known.key.encode(), known.signature_scheme)
                await asyncio.wait_for(_run(kernel, signer, [_NOOP_CELL], is_silent=False), READY_TIMEOUT)
            except BaseException as error:
                await asyncio.shield(self.manager.stop(sandbox))
                if isinstance(error, asyncio.TimeoutError):
                    raise RuntimeFailed(f"the kernel did not answer within {READY_TIMEOUT:g} s") from None
                raise
        return sandbox

    async def _restore(
        self, found: Snapshot, spec: SandboxSpec, request: KernelRequest | None = None
    ) -> Sandbox | None:
        extra: dict[str, Any] = {}
        if request is not None:
            extra = {"on_refusal": request.on_refusal, "inherit": request.inherit, "claim": request.claim}
        try:
            record = Record.from_bytes(found.meta.record)
            async with self._checked_out(found) as files:
                return await self.manager.restore(spec, record, files, **extra)
        except (Damaged, RuntimeFailed, LinkClosed, NotFound, ValueError) as error:
            log.warning("removed a template that failed; the kernel starts without it: %s", error)
            await asyncio.to_thread(self.remove, found.id)
            return None

    @asynccontextmanager
    async def _checked_out(self, found: Snapshot) -> AsyncIterator[Path]:
        """Provide a template's files within the context. They are removed even if the caller is cancelled meanwhile."""
        context = self.store.checkout(found.id, self._owner, verify="once")
        entering = asyncio.ensure_future(asyncio.to_thread(context.__enter__))
        try:
            yield await finished(entering)
        finally:
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                await finished(asyncio.to_thread(context.__exit__, None, None, None))

    async def make(self, spec: SandboxSpec, argv: Sequence[str]) -> Snapshot:
        """Make a template for such kernels. It replaces outdated ones of the same profile and program.

        Raises
        ------
        AgentboxError
            Why a template can't be made here.
        """
        inputs = await asyncio.to_thread(self.inputs, spec, argv)
        if inputs is None:
            raise RuntimeFailed(f"profile {spec.profile!r} starts kernels cold: it is not for Python, or runs as root")
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
                fingerprint={**inputs, _INSTALLATION: str(PACKAGE), _ARGV: json.dumps(list(argv))},
                record=record,
            )
            made = await asyncio.to_thread(self.store.commit, staged, meta)
        except BaseException:
            await asyncio.to_thread(self.store.discard, staged)
            raise
        await asyncio.to_thread(self._remove_others, made)
        return made

    def _remove_others(self, made: Snapshot) -> None:
        """Remove the templates that the new one replaces, and the oldest ones beyond the maximum number."""
        own = made.meta.fingerprint
        others = [item for item in self.list() if item.id != made.id]
        same = [
            item
            for item in others
            if all(
                item.meta.fingerprint.get(name) == own[name] for name in ("argv", "env", "profile", "mounts", "machine")
            )
        ]
        rest = [item for item in others if item not in same]
        for item in [*same, *rest[: max(0, len(rest) + 1 - MAX_TEMPLATES)]]:
            self.remove(item.id)

    async def launch(self, spec: SandboxSpec, argv: Sequence[str]) -> Sandbox:
        """Start an unclaimed sandbox, and return it when its kernel is ready.

        Raises AgentboxError, and leaves nothing then.
        """
        waiting = unclaimed_spec(spec, lease=LEASE)
        sandbox = await self.manager.create(waiting)
        try:
            handle = sandbox.record.handle or {}
            if not handle.get("user"):
                raise RuntimeFailed(
                    "kernels start cold: user code is uid 0 in the sandbox, as this user has no subordinate ids"
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
    """Have the kernel import the preloaded modules, and run the code paths that every cell uses once."""
    assert spec.warm is not None
    modules = spec.warm.preload
    failed, reply = await _run(
        kernel, signer, [*(f"exec('import {module}', {{}})" for module in modules), _PREPARATION]
    )
    if failed is not None:
        raise InvalidConfig(
            f"cannot import the module {[*modules, ''][failed]!r}: {reply.get('ename')}: {reply.get('evalue')}"[:500],
            setting=f"Policy.profiles[{spec.profile!r}]['preload']",
        )


async def _run(
    kernel: Kernel, signer: Signer, cells: Sequence[str], *, is_silent: bool = True
) -> tuple[int | None, dict[str, Any]]:
    """Run cells that leave no trace, up to the first one that fails.

    Returns
    -------
    int or None, dict
        Index of the cell that failed, or None; and the content of the last reply.

    Raises
    ------
    RuntimeFailed
        The kernel ended.
    """
    replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def on_message(channel: str, frames: list[bytes]) -> None:
        index = header_index(frames)
        if channel == "shell" and index is not None and parse(frames[index]).get("msg_type") == "execute_reply":
            replies.put_nowait(parse(frames[index + 3]))

    kernel.on_message = on_message
    ended = asyncio.Event()
    kernel.add_end_callback(ended.set)
    reply: dict[str, Any] = {}
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
            reply = answer.result()
            if reply.get("status") != "ok":
                return number, reply
        finally:
            answer.cancel()
            end.cancel()
    return None, reply
