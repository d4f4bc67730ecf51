"""Hold the objects that all handlers of one server share, and report the server's health."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Literal

from jupyter_agentbox import __version__
from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.models import CheckInfo, Health
from jupyter_agentbox.runtimes import Check
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.tokens import TokenStore
from jupyter_agentbox.service.live.export import SnapshotTransfer
from jupyter_agentbox.service.live.live_snapshots import LiveSnapshots
from jupyter_agentbox.service.live.parking import Parker
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService

from .call import blocking
from .failures import describe

#: Seconds for which the result of the runtime's own checks is cached.
CHECK_INTERVAL = 30.0
_ANONYMOUS = re.compile(r"[0-9a-f]{32}")


class Service:
    """The objects that all handlers of one server share.

    Parameters
    ----------
    sandboxes : SandboxService
    gateway_url : str or None
        URL of the gateway on which kernels run, if they do not run here.
    """

    def __init__(self, sandboxes: SandboxService, gateway_url: str | None = None) -> None:
        self.sandboxes = sandboxes
        self.snapshots = LiveSnapshots(sandboxes)
        self.parker = Parker(sandboxes, self.snapshots)
        self.transfer = SnapshotTransfer(sandboxes, self.snapshots)
        self.gateway_url = gateway_url
        self.root = "/api/agentbox"
        self.tokens = TokenStore(sandboxes.policy.state_path, sandboxes.policy.max_token_life)
        self._checks: list[CheckInfo] = []
        self._checked = 0.0
        self._checking = asyncio.Lock()

    def caller_of(self, user: Any, *, has_kernels: bool = False) -> Caller:
        """Return the caller for a Jupyter user.

        With only a token or a password, Jupyter makes up a new user name for every browser and for every call of a
        program. All of them count as one caller, the server's own user.
        """
        name = str(user.username)
        if _ANONYMOUS.fullmatch(name) and str(user.name).startswith("Anonymous "):
            name = self.sandboxes.registry.server_owner
        return Caller(name, has_kernels=has_kernels, is_admin=name in self.sandboxes.policy.admins)

    def manager(self) -> SandboxManager:
        """Return the manager for new sandboxes."""
        policy = self.sandboxes.policy
        return SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)

    async def health(self) -> Health:
        """Check whether this server can start sandboxes."""
        try:
            manager = self.manager()
        except (AgentboxError, OSError) as error:
            return self._health([CheckInfo("runtime", False, describe(error)[1].message)], "gvisor", 0)
        async with self._checking:
            if time.monotonic() - self._checked > CHECK_INTERVAL or not self._checked:
                self._checks = _described(await blocking(manager.runtime.check))
                self._checked = time.monotonic()
        checks = self._checks + _described(await blocking(manager.check_storage))
        if self.gateway_url is not None:
            checks.append(
                CheckInfo(
                    "gateway",
                    False,
                    f"kernels run on the gateway {self.gateway_url}, so sandboxes of this server cannot share them. "
                    "Install jupyter_agentbox on the gateway instead",
                )
            )
        return self._health(checks, manager.runtime.isolation, await self.sandboxes.registry.count())

    def _health(self, checks: list[CheckInfo], isolation: Literal["gvisor", "none"], sandboxes: int) -> Health:
        status: Literal["ok", "degraded"] = "ok" if all(check.is_ok for check in checks) else "degraded"
        return Health(status, __version__, self.sandboxes.policy.runtime, isolation, sandboxes, checks)


def _described(checks: list[Check]) -> list[CheckInfo]:
    return [CheckInfo(item.name, item.is_ok, item.message) for item in checks]
