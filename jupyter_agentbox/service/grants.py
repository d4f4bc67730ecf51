"""Change which hosts a running sandbox may reach: update its grant, and let a person decide on requested hosts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from jupyter_agentbox.errors import AgentboxError, NotFound, PolicyRefused
from jupyter_agentbox.models import AskInfo, GrantInfo
from jupyter_agentbox.models.service import HostVerdict
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.renewal import intersect_grants
from jupyter_agentbox.sandbox.link.thread import on_link_thread
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import Grant

from .managed_sandbox import ManagedSandbox
from .registry import Caller, SandboxRegistry


class Grants:
    """Manager of the grants of sandboxes, within their profiles. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Defines the profiles.
    registry : SandboxRegistry
        Finds the sandboxes that a caller may see.
    """

    def __init__(self, policy: Policy, registry: SandboxRegistry) -> None:
        self.policy = policy
        self._registry = registry

    @on_link_thread
    async def set_hosts(self, managed: ManagedSandbox, hosts: Sequence[str], caller: Caller) -> None:
        """Replace the hosts that a running sandbox may reach. Raises InvalidRequest, PolicyRefused."""
        sandbox = managed.running()
        grant = await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, hosts)
        await self._registry.audit().arecord(
            "grant", sandbox.id, is_allowed=True, detail={"hosts": list(hosts)[:100], "by": caller.name}
        )
        sandbox = managed.running()  # a different one if it was restored in the meantime
        self._put_grant(sandbox, grant)
        managed.spec = sandbox.spec
        managed.touch()  # if it is being parked, the snapshot does not contain this change
        await asyncio.to_thread(sandbox.record.save, sandbox.directory)

    def _put_grant(self, sandbox: Sandbox, grant: Grant) -> None:
        sandbox.gate.grant = grant
        # A later owner reads the grant from the record.
        sandbox.record.spec = replace(sandbox.spec, grant=grant)

    def inherit_grant(self, sandbox: Sandbox, before: Sandbox) -> None:
        """Limit a sandbox's grant to the present grant of the sandbox that it replaces. On the link thread."""
        self._put_grant(sandbox, intersect_grants(sandbox.gate.grant, before.gate.grant))

    @on_link_thread
    async def get(self, sandbox_id: str, host: str | None = None, *, caller: Caller) -> GrantInfo:
        """Return a sandbox's grant, the hosts that it could be given, and whether the caller may allow `host`."""
        managed = await self._registry.peek(sandbox_id, caller=caller)
        sandbox = managed.running()
        grant = sandbox.gate.grant
        ceiling = self.policy.profile(sandbox.spec.profile).hosts
        verdict = None
        if host is not None:
            try:
                await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, [host])
                caller.check_unscoped("allow hosts")
                verdict = HostVerdict(host, host in grant.hosts, True, "", None)
            except AgentboxError as error:
                verdict = HostVerdict(host, host in grant.hosts, False, str(error), error.setting)
        return GrantInfo(list(grant.hosts), list(grant.private_hosts), list(ceiling), grant.setting, verdict)

    @on_link_thread
    async def ask(self, sandbox_id: str, host: str, why: str, *, caller: Caller) -> AskInfo:
        """Request a host. The request is pending until a person decides, or allowed if the host already is.

        Raises
        ------
        PolicyRefused
            The profile does not cover the host, so no one can allow it.
        """
        managed = await self._registry.peek(sandbox_id, "ask_host", caller=caller)
        sandbox = managed.running()
        try:
            await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, [host])
        except PolicyRefused as refused:
            self._registry.refusals.note("ask_host", caller.to_detail(), "policy_refused", sandbox=sandbox.id,
                               asked=host, setting=refused.setting)  # fmt: skip
            refused.is_logged = True
            raise
        managed.running()
        if host in sandbox.gate.grant.hosts:
            now = time.time()
            return AskInfo("", managed.id, host, why, "allowed", now, now, None, "it is already allowed")
        host_request = managed.ask(host, why)
        await self.save_asks(managed)
        await self._registry.audit().arecord("ask", sandbox.id, host=host, detail=caller.to_detail())
        return host_request

    @on_link_thread
    async def asks(self, sandbox_id: str | None = None, *, caller: Caller, state: str | None = None) -> list[AskInfo]:
        """List the host requests of one sandbox, or of all sandboxes that the caller may see."""
        if sandbox_id is not None:
            sandboxes = [self._registry.find(sandbox_id, caller)]
        else:
            sandboxes = [managed for managed in self._registry.visible(caller) if managed.state != "ended"]
        found = [item for managed in sandboxes for item in managed.asks.values() if state in (None, item.state)]
        return sorted(found, key=lambda item: item.asked)

    @on_link_thread
    async def get_ask(self, sandbox_id: str, ask_id: str, *, caller: Caller) -> AskInfo:
        """Return a host request with its state. Raises NotFound."""
        item = self._registry.find(sandbox_id, caller).asks.get(ask_id)
        if item is None:
            raise NotFound(f"host request {ask_id[:64]!r} does not exist")
        return item

    @on_link_thread
    async def decide(
        self, sandbox_id: str, ask_id: str, *, is_allowed: bool, note: str = "", caller: Caller
    ) -> AskInfo:
        """Allow or deny a requested host.

        Raises
        ------
        NotFound, Conflict, SandboxEnded
        PolicyRefused
            Policy has changed and no longer covers the host.
        """
        caller.check_unscoped("decide what a sandbox may reach")
        managed = await self._registry.peek(sandbox_id, caller=caller)
        sandbox = managed.running()
        item = managed.pending(ask_id)
        if is_allowed:
            await self.set_hosts(managed, (*sandbox.gate.grant.hosts, item.host), caller)
            managed.pending(ask_id)
        else:
            detail = {"denied": item.host, "by": caller.name}
            await self._registry.audit().arecord("grant", sandbox.id, is_allowed=False, detail=detail)
        decided = AskInfo(
            id=item.id,
            sandbox=item.sandbox,
            host=item.host,
            why=item.why,
            state="allowed" if is_allowed else "denied",
            asked=item.asked,
            decided=time.time(),
            decided_by=caller.name,
            note=note,
        )
        managed.asks[ask_id] = decided
        await self.save_asks(managed)
        return decided

    @on_link_thread
    async def save_asks(self, managed: ManagedSandbox) -> None:
        """Save the host requests for a later owner."""
        sandbox = managed.sandbox
        if sandbox is None:
            return
        if managed.kind == "session":
            await asyncio.to_thread(managed.save)
        else:
            sandbox.record.asks = msgspec.to_builtins(list(managed.asks.values()))
            await asyncio.to_thread(sandbox.record.save, sandbox.directory)
