"""Change which hosts a running sandbox may reach: update its grant, and let a person allow hosts.

Policy allows hosts, and names the hosts that a person may allow. Callers with a token for one sandbox, which
agents have, can ask for a host but never allow one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from jupyter_agentbox.egress.rules import DEFAULT_PORTS, explain_refusal
from jupyter_agentbox.errors import AgentboxError, InvalidRequest, NotAuthorized, NotFound, PolicyRefused
from jupyter_agentbox.models import AskInfo, GrantInfo
from jupyter_agentbox.models.service import HostRule, HostVerdict, Scope
from jupyter_agentbox.policy.consent import Rule, notebook_path
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.profiles import REQUEST_KEYS, Profile, expand, find_uncovered, read
from jupyter_agentbox.policy.renewal import intersect_grants
from jupyter_agentbox.sandbox.link.thread import on_link_thread
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import OWN_HOSTS, SandboxSpec

from .consent import apply_rules, put_grant
from .managed_sandbox import ManagedSandbox
from .registry import Caller, SandboxRegistry

#: Maximum number of the last refused connections that :meth:`Grants.get` reads, and of the verdicts that it returns.
MAX_REFUSALS, MAX_VERDICTS = 1000, 100


class Grants:
    """Manager of the grants of sandboxes. Its coroutines may be awaited on any event loop.

    Parameters
    ----------
    policy : Policy
        Defines the profiles.
    registry : SandboxRegistry
        Finds the sandboxes that a caller may see.

    Attributes
    ----------
    find_notebook : coroutine function or None
        Returns the path on the host of the notebook that uses a kernel, or an empty string. Called on the caller's
        event loop.
    """

    def __init__(self, policy: Policy, registry: SandboxRegistry) -> None:
        self.policy = policy
        self.find_notebook: Callable[[str], Awaitable[str]] | None = None
        self._registry = registry

    @on_link_thread
    async def set_hosts(self, managed: ManagedSandbox, hosts: Sequence[str], caller: Caller) -> None:
        """Replace the hosts that a running sandbox may reach, including those that a person allowed for it.

        Of the latter, any can be kept, and none added.

        Raises
        ------
        InvalidRequest, PolicyRefused
        """
        sandbox = managed.running()
        users = [host for host in hosts if host in sandbox.gate.grant.user_hosts]
        others = [host for host in hosts if host not in users]
        grant = await asyncio.to_thread(self.policy.narrow_grant, sandbox.spec.profile, others)
        await self._registry.audit().arecord(
            "grant", sandbox.id, is_allowed=True, detail={"hosts": list(hosts)[:100], "by": caller.name}
        )
        spec = replace(managed.running().spec, grant=grant)
        grant = (await asyncio.to_thread(self._keep_rules, spec, users, caller.name)).grant
        sandbox = managed.running()  # a different one if it was restored in the meantime
        put_grant(sandbox, grant)
        managed.spec = sandbox.spec
        managed.touch()  # if it is being parked, the snapshot does not contain this change
        await asyncio.to_thread(sandbox.record.save, sandbox.directory)

    def _keep_rules(self, spec: SandboxSpec, hosts: Sequence[str], by: str) -> SandboxSpec:
        """Keep only these of the hosts that a person allowed for a sandbox, and return its spec with them. Blocks."""
        target, rules = _target(spec), self.policy.host_rules
        if any(rule.target == target and rule.host not in hosts for rule in rules.list()):
            rules.remove(lambda rule: (rule.scope, rule.target) == ("kernel", target) and rule.host not in hosts)
        for host in hosts:
            rules.add(Rule(host, "kernel", target, by))
        return self.policy.with_consent(spec)

    def inherit_grant(self, sandbox: Sandbox, before: Sandbox) -> None:
        """Limit a sandbox's grant to the present grant of the sandbox that it replaces. On the link thread."""
        put_grant(sandbox, intersect_grants(sandbox.gate.grant, before.gate.grant))

    async def get(self, sandbox_id: str, host: str | None = None, *, caller: Caller) -> GrantInfo:
        """Return a sandbox's grant, the hosts that a person allowed, and which refused hosts the caller may allow.

        Looks up no name, because a program inside chose the names.
        """
        notebook = await self.find_notebook_of(sandbox_id, caller)
        return await self._get(sandbox_id, host, notebook, caller)

    @on_link_thread
    async def _get(self, sandbox_id: str, host: str | None, notebook: str, caller: Caller) -> GrantInfo:
        managed = await self._registry.peek(sandbox_id, caller=caller)
        sandbox = managed.running()
        rows = await self._registry.audit().aquery(
            kind="egress", sandbox=sandbox.id, is_allowed=False, limit=MAX_REFUSALS
        )
        targets = list(dict.fromkeys(_name_target(row.host, row.port) for row in rows if row.host))[-MAX_VERDICTS:]
        spec = replace(sandbox.spec, grant=sandbox.gate.grant, notebook=notebook or sandbox.spec.notebook)
        return await asyncio.to_thread(self._describe, spec, targets, host, caller)

    def _describe(self, spec: SandboxSpec, targets: Sequence[str], host: str | None, caller: Caller) -> GrantInfo:
        """Describe a sandbox's grant; see :meth:`get`. Blocks."""
        grant, profile = spec.grant, self._read_profile(spec)
        refused = [self._judge(spec, profile, target, caller) for target in targets]
        return GrantInfo(
            hosts=list(grant.all_hosts),
            private_hosts=list(grant.private_hosts),
            ceiling=list(self.policy.profile(spec.profile).hosts),
            setting=grant.setting,
            may_allow=list(grant.may_allow),
            rules=[_to_info(rule) for rule in self._rules_of(spec) if rule.host in grant.user_hosts],
            refused=[verdict for verdict in refused if not verdict.is_allowed],
            verdict=self._judge(spec, profile, host, caller) if host is not None else None,
        )

    def _rules_of(self, spec: SandboxSpec) -> list[Rule]:
        wanted = {("kernel", _target(spec)), ("notebook", spec.notebook), ("always", spec.profile)}
        return [rule for rule in self.policy.host_rules.list() if (rule.scope, rule.target) in wanted]

    # -- consent -------------------------------------------------------------------------------

    def _may_decide(self, caller: Caller) -> bool:
        return self.policy.is_attended and caller.scope is None

    def _read_profile(self, spec: SandboxSpec) -> Profile:
        """Return a sandbox's profile with presets expanded. Blocks."""
        profile = self.policy.profile(spec.profile)
        return replace(profile, hosts=expand(profile.hosts))

    def _judge(self, spec: SandboxSpec, profile: Profile, host: str, caller: Caller) -> HostVerdict:
        """Return whether a sandbox may reach a host, and for what the caller may allow it. Blocks."""
        grant = spec.grant
        is_allowed = host in grant.all_hosts
        try:
            read({"allowed_hosts": [host]}, REQUEST_KEYS, "the request", InvalidRequest)
            is_allowed = is_allowed or find_uncovered([host], grant.all_hosts) is None
            caller.check_unscoped("allow hosts")
            return HostVerdict(host, is_allowed, True, "", None, self._scopes(spec, profile, host, caller))
        except AgentboxError as error:
            return HostVerdict(host, is_allowed, False, str(error), error.setting, [])

    def _scopes(self, spec: SandboxSpec, profile: Profile, host: str, caller: Caller) -> list[Scope]:
        """Return for what the caller may allow a host. Raises PolicyRefused if for nothing."""
        if find_uncovered([host], profile.hosts) is None:
            return ["kernel"]
        is_possible = find_uncovered([host], profile.user_may_allow) is None
        scopes: list[Scope] = []
        if is_possible and self._may_decide(caller):
            scopes = ["kernel"]
            if spec.grant.setting != OWN_HOSTS and caller.has_kernels:
                scopes += ["notebook", "always"] if spec.notebook else ["always"]
        if scopes:
            return scopes
        if is_possible:
            sentence = f"Only a person can allow {host}, with `jupyter agentbox egress allow {host}`"
        else:
            name, _, port = host.partition(":")
            grant = replace(spec.grant, may_allow=(), setting=profile.hosts_setting)
            sentence = explain_refusal(name, int(port or 0), grant)
        raise PolicyRefused(sentence, field="host", setting=profile.hosts_setting)

    async def find_notebook_of(self, sandbox_id: str, caller: Caller) -> str:
        """Return the present path of the notebook that uses a sandbox; empty if it is unknown."""
        if self.find_notebook is None:
            return ""
        info = await self._registry.get(sandbox_id, caller=caller)
        if info.kind != "notebook" or not info.kernels:
            return ""
        return notebook_path(await self.find_notebook(info.kernels[0].id))

    async def allow(self, sandbox_id: str, host: str, scope: Scope, *, caller: Caller) -> None:
        """Allow a host: for a sandbox's kernel, for its notebook, or always for its profile.

        Raises
        ------
        NotAuthorized
            The caller has a token for one sandbox.
        PolicyRefused
            Policy does not let a person allow the host for this, or its name resolves to a private address.
        NotFound, SandboxEnded, Conflict
        """
        caller.check_unscoped("allow hosts")
        notebook = await self.find_notebook_of(sandbox_id, caller)
        await self._allow(sandbox_id, host, scope, notebook, caller)

    @on_link_thread
    async def _allow(self, sandbox_id: str, host: str, scope: Scope, notebook: str, caller: Caller) -> None:
        managed = await self._registry.peek(sandbox_id, caller=caller)
        sandbox = managed.running()
        spec = replace(sandbox.spec, grant=sandbox.gate.grant, notebook=notebook or sandbox.spec.notebook)
        profile = await asyncio.to_thread(self._read_profile, spec)
        verdict = await asyncio.to_thread(self._judge, spec, profile, host, caller)
        if not verdict.may_allow:
            raise PolicyRefused(verdict.message, field="host", setting=verdict.setting)
        if scope not in verdict.scopes:
            raise PolicyRefused(f"{host} can be allowed for: {', '.join(verdict.scopes)}", field="scope")
        if await asyncio.to_thread(find_uncovered, [host], profile.hosts) is None:
            await self.set_hosts(managed, (*sandbox.gate.grant.all_hosts, host), caller)
            return
        hosts = await asyncio.to_thread(expand, [host])
        for item in hosts:
            await sandbox.gate.check_public(item)
        target = _target(spec, scope)
        await self._record(sandbox.id, "allowed", hosts, scope, target, caller)
        sandbox = managed.running()
        sandbox.record.spec = replace(sandbox.spec, notebook=spec.notebook)
        for item in hosts:
            await asyncio.to_thread(self.policy.host_rules.add, Rule(item, scope, target, caller.name))
        await apply_rules(self.policy)
        managed.spec = managed.running().spec
        managed.touch()

    @on_link_thread
    async def revoke(self, sandbox_id: str, host: str, scope: Scope | None = None, *, caller: Caller) -> None:
        """Revoke a host that a person allowed for a sandbox, and close its connections.

        Raises
        ------
        NotAuthorized
            The caller has a token for one sandbox.
        NotFound
            No person allowed the host, or the caller may not use kernels, and it was not for this sandbox alone.
        """
        caller.check_unscoped("revoke hosts")
        managed = await self._registry.peek(sandbox_id, caller=caller)
        sandbox = managed.running()
        known = await asyncio.to_thread(self._rules_of, sandbox.spec)
        meant = [rule for rule in known if rule.host == host and scope in (None, rule.scope)]
        await self._remove([r for r in meant if caller.has_kernels or r.scope == "kernel"], host, sandbox.id, caller)
        managed.spec = managed.running().spec

    @on_link_thread
    async def revoke_saved(self, host: str, scope: Scope | None, target: str | None, *, caller: Caller) -> None:
        """Revoke a host for everything, or for one scope and target. Raises NotAuthorized, NotFound."""
        known = await self._owned_rules(caller)
        meant = [r for r in known if r.host == host and scope in (None, r.scope) and target in (None, r.target)]
        await self._remove(meant, host, "-", caller)

    @on_link_thread
    async def saved_rules(self, *, caller: Caller) -> list[HostRule]:
        """List all hosts that a person allowed; none for a caller who may not use kernels. Raises NotAuthorized."""
        return [_to_info(rule) for rule in (await self._owned_rules(caller) if caller.has_kernels else ())]

    async def _owned_rules(self, caller: Caller) -> Sequence[Rule]:
        caller.check_unscoped("manage the hosts that a person allowed")
        if not caller.has_kernels:
            raise NotAuthorized("you have no permission to use kernels on this server")
        return await asyncio.to_thread(self.policy.host_rules.list)

    async def _remove(self, meant: Sequence[Rule], host: str, sandbox_id: str, caller: Caller) -> None:
        if not meant:
            raise NotFound(f"{host[:300]!r} was not allowed by a person; `jupyter agentbox egress list` lists what was")
        keys = {rule.key for rule in meant}
        await asyncio.to_thread(self.policy.host_rules.remove, lambda rule: rule.key in keys)
        await apply_rules(self.policy)
        for rule in meant:
            await self._record(sandbox_id, "revoked", [rule.host], rule.scope, rule.target, caller)

    async def _record(
        self, sandbox_id: str, event: str, hosts: Sequence[str], scope: Scope, target: str, caller: Caller
    ) -> None:
        detail = {"event": event, "hosts": list(hosts), "scope": scope, "for": target, **caller.to_detail()}
        await self._registry.audit().arecord("grant", sandbox_id, is_allowed=event == "allowed", detail=detail)

    @on_link_thread
    async def ask(self, sandbox_id: str, host: str, why: str, *, caller: Caller) -> AskInfo:
        """Request a host. The request is pending until a person decides, or allowed if the host already is.

        Raises
        ------
        PolicyRefused
            Neither the profile covers the host, nor can a person allow it.
        """
        managed = await self._registry.peek(sandbox_id, "ask_host", caller=caller)
        sandbox = managed.running()
        try:
            await asyncio.to_thread(self._check_possible, sandbox.spec, host)
        except PolicyRefused as refused:
            self._registry.refusals.note("ask_host", caller.to_detail(), "policy_refused", sandbox=sandbox.id,
                               asked=host, setting=refused.setting)  # fmt: skip
            refused.is_logged = True
            raise
        managed.running()
        if host in sandbox.gate.grant.all_hosts:
            now = time.time()
            return AskInfo("", managed.id, host, why, "allowed", now, now, None, "it is already allowed")
        host_request = managed.ask(host, why)
        await self.save_asks(managed)
        await self._registry.audit().arecord("ask", sandbox.id, host=host, detail=caller.to_detail())
        return host_request

    def _check_possible(self, spec: SandboxSpec, host: str) -> None:
        """Check that someone may allow a host. Blocks. Raises InvalidRequest, PolicyRefused."""
        try:
            self.policy.narrow_grant(spec.profile, [host])
        except PolicyRefused:
            may_allow = self.policy.profile(spec.profile).user_may_allow if self.policy.is_attended else ()
            if find_uncovered([host], may_allow) is not None:
                raise

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
            await self._allow(sandbox_id, item.host, "kernel", "", caller)
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


def _target(spec: SandboxSpec, scope: Scope = "kernel") -> str:
    """Return what a rule of this scope names for a sandbox; empty if the scope does not apply."""
    return {"kernel": spec.kernel_id or spec.consent_id, "notebook": spec.notebook, "always": spec.profile}[scope]


def _name_target(host: str, port: int | None) -> str:
    """Return the host pattern with which a person would allow a refused connection."""
    return host if not port or port in DEFAULT_PORTS else f"{host}:{port}"


def _to_info(rule: Rule) -> HostRule:
    return HostRule(rule.host, rule.scope, rule.target, rule.by, rule.added)
