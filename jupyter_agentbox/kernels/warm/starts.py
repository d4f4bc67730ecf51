"""Warm starts: a kernel is taken out of the pool, or goes on from a template, or starts cold.

Any process takes what is there. Only a process that lives long, a server, makes more in the background: it *keeps*.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import threading
from typing import ClassVar

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import MIB, SandboxSpec

from .pool import Keeper, Pool
from .template_key import make_key
from .templates import KernelRequest, Templates

log = logging.getLogger(__name__)

_IPYKERNEL = ("-m", "ipykernel_launcher", "-f", "{connection_file}")
#: Seconds that a new kernel has the machine to itself before a template of its kind is made.
MAKING_DELAY = 10.0
#: The context of code that a sandbox of an agent or a program has from its start on.
DEFAULT_CONTEXT = "default"
#: With less memory, bytes, or fewer processes it has none before code is run: the kernel would take much of them.
MIN_MEMORY, MIN_PROCESSES = 256 * MIB, 64


class WarmStarts:
    """The warm starts of one manager's sandboxes. Coroutines run on the link's thread.

    Parameters
    ----------
    manager : SandboxManager
    policy : Policy
    """

    #: Whether this process makes templates and keeps a pool.
    is_keeping: ClassVar[bool] = False
    _shared: ClassVar[dict[int, WarmStarts]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, manager: SandboxManager, policy: Policy) -> None:
        self.manager = manager
        self.templates = Templates(manager, policy)
        self.pool = Pool(self.templates)
        self.keeper = Keeper(self.templates, policy)
        self._policy = policy
        self._making: dict[str, asyncio.Task[None]] = {}
        self._gathering: asyncio.Task[None] | None = None

    @classmethod
    def shared(cls, manager: SandboxManager, policy: Policy) -> WarmStarts:
        """Those of a manager that :meth:`SandboxManager.shared` returned."""
        with cls._shared_lock:
            found = cls._shared.get(id(manager))
            if found is None:
                found = cls._shared[id(manager)] = cls(manager, policy)
            return found

    async def start(self, wish: KernelRequest, *, is_from_pool: bool = False) -> Sandbox | None:
        """Start a kernel off what was started ahead, or only off what waits; None where it has to start cold.

        Raises
        ------
        AgentboxError
            What would keep a cold start from succeeding too.
        """
        self._gather_later()
        inputs = await asyncio.to_thread(self.templates.inputs, wish.spec, wish.argv)
        if inputs is None:
            return None
        key = make_key(inputs)
        sandbox = await self.pool.take(wish, key)
        if sandbox is None and self._policy.templates and not is_from_pool:
            sandbox = await self.templates.start(wish, key)
            if sandbox is None:
                self._make_later(key, wish)
        if self.is_keeping and wish.is_usual:
            self.keeper.want(key, wish.spec, wish.argv)
        return sandbox

    async def create(self, spec: SandboxSpec, *, has_code: bool = True, is_usual: bool = True) -> Sandbox:
        """Start a sandbox for an agent or a program: one in which its context ``default`` waits, or one without.

        Parameters
        ----------
        spec : SandboxSpec
        has_code : bool
            Code will be run in that context. Where not, a cold start takes less time than a template.
        is_usual : bool
            The next ones will want the same.

        Raises
        ------
        AgentboxError
            It did not start.
        """
        limits = spec.limits
        is_large = limits.memory >= MIN_MEMORY and limits.processes >= MIN_PROCESSES
        if is_large and (has_code or await asyncio.to_thread(self.pool.is_filled)):
            key, argv = secrets.token_hex(16), context_argv(spec)
            wish = KernelRequest(
                spec, argv, key, "hmac-sha256", context=DEFAULT_CONTEXT, is_usual=is_usual and has_code
            )
            if (sandbox := await self.start(wish, is_from_pool=not has_code)) is not None:
                return sandbox
        return await self.manager.create(spec)

    def _gather_later(self) -> None:
        """Make the import cache for the cold starts to come, once in this process's life."""

        async def gather() -> None:
            await asyncio.sleep(MAKING_DELAY)
            await asyncio.to_thread(import_cache.make, self.manager.state_dir)

        if self.is_keeping and self._gathering is None:
            self._gathering = LinkThread.instance().loop.create_task(gather())

    def _make_later(self, key: str, wish: KernelRequest) -> None:
        if not self.is_keeping or not wish.is_usual or key in self._making:
            return
        spec, argv = wish.spec, wish.argv

        async def make() -> None:
            try:
                await asyncio.sleep(MAKING_DELAY)
                async with self.manager.starting:
                    made = await self.templates.make(spec, argv)
                log.info("made a template of profile %s: %s", spec.profile, made.id)
            except (AgentboxError, OSError) as error:
                log.warning("no template was made of profile %s: %s", spec.profile, error)
                return  # and not tried again by this process
            self._making.pop(key, None)

        self._making[key] = LinkThread.instance().loop.create_task(make())

    @classmethod
    async def aclose_all(cls) -> None:
        """End what waits in this process's pools, and make no more. From any event loop."""
        cls.is_keeping = False
        with cls._shared_lock:
            found, cls._shared = list(cls._shared.values()), {}
        await LinkThread.instance().run(_gather(found))

    async def aclose(self) -> None:
        """End what waits, and make no more."""
        tasks = [*self._making.values(), *([self._gathering] if self._gathering is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self.keeper.aclose(), return_exceptions=True)


def context_argv(spec: SandboxSpec) -> list[str]:
    """Return the command of a context's Python: the server's own, another environment's, or an image's."""
    return [spec.python or (sys.executable if spec.root is None else "python3"), *_IPYKERNEL]


async def _gather(found: list[WarmStarts]) -> None:
    await asyncio.gather(*(starts.aclose() for starts in found))
