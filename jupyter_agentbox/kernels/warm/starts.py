"""Start kernels warm: take one from the pool, start from a template, or report that a cold start is needed.

Any process may use the pool and the templates. Only a long-lived process, a server, makes more of them in the
background; see ``is_keeping``.
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
#: Seconds for which a new kernel has the machine to itself before a template of its kind is made.
TEMPLATE_DELAY = 10.0
#: The code context that an agent's or program's sandbox has from its start.
DEFAULT_CONTEXT = "default"
#: With less memory, in bytes, or fewer processes, the context is not created before code is run, because its kernel
#: would use much of them.
MIN_MEMORY, MIN_PROCESSES = 256 * MIB, 64


class WarmStarts:
    """The warm starts of one manager's sandboxes. Coroutines run on the link thread.

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
        """Return the warm starts of a manager from :meth:`SandboxManager.shared`."""
        with cls._shared_lock:
            found = cls._shared.get(id(manager))
            if found is None:
                found = cls._shared[id(manager)] = cls(manager, policy)
            return found

    async def start(self, request: KernelRequest, *, is_from_pool: bool = False) -> Sandbox | None:
        """Start a kernel from the pool or from a template, or from the pool only.

        Return None if it has to start cold.

        Raises
        ------
        AgentboxError
            The error would also make a cold start fail.
        """
        self._schedule_import_cache()
        inputs = await asyncio.to_thread(self.templates.inputs, request.spec, request.argv)
        if inputs is None:
            return None
        key = make_key(inputs)
        sandbox = await self.pool.take(request, key)
        if sandbox is None and self._policy.templates and not is_from_pool:
            sandbox = await self.templates.start(request, key)
            if sandbox is None:
                self._schedule_template(key, request)
        if self.is_keeping and request.is_usual:
            self.keeper.record_start(key, request.spec, request.argv)
        return sandbox

    async def create(self, spec: SandboxSpec, *, has_code: bool = True, is_usual: bool = True) -> Sandbox:
        """Start a sandbox for an agent or a program, with its context ``default`` prestarted if that is worthwhile.

        Parameters
        ----------
        spec : SandboxSpec
        has_code : bool
            Whether code will be run in that context. If not, a cold start is faster than a start from a template.
        is_usual : bool
            Whether later requests are likely to be the same.

        Raises
        ------
        AgentboxError
            The sandbox did not start.
        """
        limits = spec.limits
        is_large = limits.memory >= MIN_MEMORY and limits.processes >= MIN_PROCESSES
        if is_large and (has_code or await asyncio.to_thread(self.pool.is_filled)):
            key, argv = secrets.token_hex(16), context_argv(spec)
            request = KernelRequest(
                spec, argv, key, "hmac-sha256", context=DEFAULT_CONTEXT, is_usual=is_usual and has_code
            )
            if (sandbox := await self.start(request, is_from_pool=not has_code)) is not None:
                return sandbox
        return await self.manager.create(spec)

    def _schedule_import_cache(self) -> None:
        """Schedule the creation of the import cache for later cold starts, once in this process's life."""

        async def gather() -> None:
            await asyncio.sleep(TEMPLATE_DELAY)
            await asyncio.to_thread(import_cache.make, self.manager.state_dir)

        if self.is_keeping and self._gathering is None:
            self._gathering = LinkThread.instance().loop.create_task(gather())

    def _schedule_template(self, key: str, request: KernelRequest) -> None:
        if not self.is_keeping or not request.is_usual or key in self._making:
            return
        spec, argv = request.spec, request.argv

        async def make() -> None:
            try:
                await asyncio.sleep(TEMPLATE_DELAY)
                async with self.manager.starting:
                    made = await self.templates.make(spec, argv)
                log.info("created a template for profile %s: %s", spec.profile, made.id)
            except (AgentboxError, OSError) as error:
                log.warning("cannot create a template for profile %s: %s", spec.profile, error)
                return  # this process does not try again
            self._making.pop(key, None)

        self._making[key] = LinkThread.instance().loop.create_task(make())

    @classmethod
    async def aclose_all(cls) -> None:
        """End the unclaimed sandboxes of this process's pools for good. May be awaited on any event loop."""
        cls.is_keeping = False
        with cls._shared_lock:
            found, cls._shared = list(cls._shared.values()), {}
        await LinkThread.instance().run(_gather(found))

    async def aclose(self) -> None:
        """End the unclaimed sandboxes, and stop creating them."""
        tasks = [*self._making.values(), *([self._gathering] if self._gathering is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, self.keeper.aclose(), return_exceptions=True)


def context_argv(spec: SandboxSpec) -> list[str]:
    """Return the command of a context's Python kernel: the server's Python, another environment's, or an image's."""
    return [spec.python or (sys.executable if spec.root is None else "python3"), *_IPYKERNEL]


async def _gather(found: list[WarmStarts]) -> None:
    await asyncio.gather(*(starts.aclose() for starts in found))
