"""What a session may reach, changed while it runs: its grant, and hosts that are asked for and decided by a person."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from jupyter_agentbox.errors import AgentboxError, NotFound, PolicyRefused
from jupyter_agentbox.models import AskInfo, GrantInfo
from jupyter_agentbox.models.service import HostVerdict
from jupyter_agentbox.policy.renewal import intersect_grants
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import Grant

from .managed_sandbox import ManagedSandbox
from .registry import Caller, SandboxRegistry

# A method of the registry is called `list`.
Asks = list[AskInfo]


class Grants(SandboxRegistry):
    """Adds to the registry what concerns grants."""

    async def _set_hosts(self, session: ManagedSandbox, hosts: Sequence[str], caller: Caller) -> None:
        sandbox = session.running()
        grant = await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, hosts)
        await self.audit().arecord(
            "grant", sandbox.id, is_allowed=True, detail={"hosts": list(hosts)[:100], "by": caller.name}
        )
        sandbox = session.running()  # another, if it was restored meanwhile
        self._put_grant(sandbox, grant)
        session.spec = sandbox.spec
        session.touch()  # if it is being parked, this was not saved
        await asyncio.to_thread(sandbox.record.save, sandbox.directory)

    def _put_grant(self, sandbox: Sandbox, grant: Grant) -> None:
        sandbox.gate.grant = grant
        # An owner to come goes by the record.
        sandbox.record.spec = replace(sandbox.spec, grant=grant)

    def inherit_grant(self, sandbox: Sandbox, before: Sandbox) -> None:
        """Let a sandbox reach no more than the one whose place it takes may, by now. On the link's thread."""
        self._put_grant(sandbox, intersect_grants(sandbox.gate.grant, before.gate.grant))

    async def grant(self, session_id: str, host: str | None = None, *, caller: Caller) -> GrantInfo:
        """Tell what a sandbox may reach, what it may be given, and of one host whether the caller may give it."""
        return await self._thread.run(self._grant(session_id, host, caller))

    async def _grant(self, session_id: str, host: str | None, caller: Caller) -> GrantInfo:
        session = await self._started(self._find(session_id, caller))
        sandbox = session.running()
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

    async def ask(self, session_id: str, host: str, why: str, *, caller: Caller) -> AskInfo:
        """Ask for a host: it is pending until a person decides, or allowed already.

        Raises
        ------
        PolicyRefused
            No person may allow it: the profile does not cover it.
        """
        return await self._thread.run(self._ask(session_id, host, why, caller))

    async def _ask(self, session_id: str, host: str, why: str, caller: Caller) -> AskInfo:
        session = await self._started(self._find(session_id, caller))
        sandbox = session.running()
        session.check_tool("ask_host")
        try:
            await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, [host])
        except PolicyRefused as refused:
            self.refusals.note("ask_host", caller.to_detail(), "policy_refused", sandbox=sandbox.id,
                               asked=host, setting=refused.setting)  # fmt: skip
            refused.is_logged = True
            raise
        session.running()
        if host in sandbox.gate.grant.hosts:
            now = time.time()
            return AskInfo("", session.id, host, why, "allowed", now, now, None, "it is allowed already")
        asked = session.ask(host, why)
        await self._keep(session)
        await self.audit().arecord("ask", sandbox.id, host=host, detail=caller.to_detail())
        return asked

    async def asks(self, session_id: str | None = None, *, caller: Caller, state: str | None = None) -> Asks:
        """List what was asked for, of one sandbox or of all that the caller may see."""
        return await self._thread.run(self._asks(session_id, caller, state))

    async def _asks(self, session_id: str | None, caller: Caller, state: str | None) -> Asks:
        caller.check_verb()
        sessions = [s for s in self._all() if self._is_visible(s, caller) and s.state != "ended"]
        if session_id is not None:
            sessions = [self._find(session_id, caller)]
        found = [item for session in sessions for item in session.asks.values() if state in (None, item.state)]
        return sorted(found, key=lambda item: item.asked)

    async def get_ask(self, session_id: str, ask_id: str, *, caller: Caller) -> AskInfo:
        """Tell what became of a question. Raises NotFound."""
        return await self._thread.run(self._get_ask(session_id, ask_id, caller))

    async def _get_ask(self, session_id: str, ask_id: str, caller: Caller) -> AskInfo:
        item = self._find(session_id, caller).asks.get(ask_id)
        if item is None:
            raise NotFound(f"nothing was asked under {ask_id[:64]!r}")
        return item

    async def decide(
        self, session_id: str, ask_id: str, *, is_allowed: bool, note: str = "", caller: Caller
    ) -> AskInfo:
        """Allow or deny a host that was asked for.

        Raises
        ------
        NotFound, Conflict, SandboxEnded
        PolicyRefused
            Policy has changed, and does not cover it any more.
        """
        return await self._thread.run(self._decide(session_id, ask_id, is_allowed, note, caller))

    async def _decide(self, session_id: str, ask_id: str, is_allowed: bool, note: str, caller: Caller) -> AskInfo:
        caller.check_unscoped("decide what a sandbox may reach")
        session = await self._started(self._find(session_id, caller))
        sandbox = session.running()
        item = session.pending(ask_id)
        if is_allowed:
            await self._set_hosts(session, (*sandbox.gate.grant.hosts, item.host), caller)
            session.pending(ask_id)
        else:
            detail = {"denied": item.host, "by": caller.name}
            await self.audit().arecord("grant", sandbox.id, is_allowed=False, detail=detail)
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
        session.asks[ask_id] = decided
        await self._keep(session)
        return decided

    def moved(self, old_id: str, sandbox: Sandbox) -> None:
        """A notebook's kernel goes on in another sandbox, and what was asked for with it. On the link's thread."""
        super().moved(old_id, sandbox)
        session = self._notebooks.get(sandbox.id)
        if session is not None:
            self._thread.spawn(self._keep(session))

    async def _keep(self, session: ManagedSandbox) -> None:
        """Write down what was asked for, for an owner to come."""
        sandbox = session.sandbox
        if sandbox is None:
            return
        if session.kind == "session":
            await asyncio.to_thread(session.save)
        else:
            sandbox.record.asks = msgspec.to_builtins(list(session.asks.values()))
            await asyncio.to_thread(sandbox.record.save, sandbox.directory)
