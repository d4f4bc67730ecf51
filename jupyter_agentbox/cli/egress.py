"""``jupyter agentbox egress``: list, allow and revoke the hosts that a person allowed, in their own settings."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import msgspec
from traitlets import Bool, Unicode

from jupyter_agentbox.errors import AgentboxError, PolicyRefused

from .base import Command, CommandGroup, UsageError, format_age, printable, write_table

if TYPE_CHECKING:
    from jupyter_agentbox.policy.consent import Rule, Scope
    from jupyter_agentbox.policy.policy import Policy


class _Scoped(Command):
    """Base of the commands that name what a host is allowed for."""

    notebook = Unicode(help="Path of a notebook.").tag(config=True)
    kernel = Unicode(help="Id of a notebook's kernel, as in `jupyter agentbox list`.").tag(config=True)
    profile = Unicode(help="Name of a profile.").tag(config=True)

    def _choice(self) -> tuple[Scope, str] | None:
        """Return the scope and target that the options name, or None. Raises UsageError."""
        from jupyter_agentbox.policy.consent import notebook_path

        options: dict[Scope, str] = {
            "notebook": notebook_path(self.notebook), "kernel": self.kernel, "always": self.profile,
        }  # fmt: skip
        found = [(scope, target) for scope, target in options.items() if target]
        if len(found) > 1:
            raise UsageError("give only one of --notebook, --kernel and --profile")
        return found[0] if found else None


class EgressListCommand(Command):
    """List the hosts that you allowed for kernels, notebooks and profiles, in addition to policy's."""

    name = "jupyter agentbox egress list"
    description = __doc__ or ""
    json = Bool(False, help="Print a JSON list instead of a table.").tag(config=True)

    def run(self) -> int:
        """Print the list."""
        from jupyter_agentbox.policy.policy import Policy

        found = Policy(parent=self).host_rules.list()
        if self.json:
            print(json.dumps([msgspec.to_builtins(rule) for rule in found], indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("HOST", "ALLOWED FOR", "BY", "AGE")]
        rows += [(rule.host, _tell(rule), rule.by, format_age(time.time() - rule.added)) for rule in found]
        write_table(rows)
        return 0


class EgressAllowCommand(_Scoped):
    """Allow hosts: always for a profile, or for one notebook or kernel. Effective immediately.

    HOST is a name, with a port unless that is 80 or 443. Policy.user_may_allow limits which hosts you can allow. A name
    that resolves to a private address is refused.
    """

    name = "jupyter agentbox egress allow"
    description = __doc__ or ""
    examples = (
        "jupyter agentbox egress allow example.org\n"
        "jupyter agentbox egress allow db.example.org:5432 --notebook=work/report.ipynb"
    )
    argument = "HOST..."
    wanted = "name at least one host"

    def run(self) -> int:
        """Allow the hosts."""
        from jupyter_agentbox.policy.consent import Rule
        from jupyter_agentbox.policy.environment import user_name
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.storage.audit.log import AuditLog

        policy = Policy(parent=self)
        scope, target = self._choice() or ("always", policy.default_profile)
        profile = target if scope == "always" else policy.default_profile
        hosts = [item for host in self.extra_args for item in _check(policy, host, profile)]
        policy.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        audit = AuditLog(policy.state_path / "audit.sqlite")
        try:
            for host in dict.fromkeys(hosts):
                rule = Rule(host, scope, target, user_name())
                audit.record("grant", "-", is_allowed=True, detail=_detail(rule, "allowed", rule.by))
                policy.host_rules.add(rule)
                print(f"allowed {host} {_tell(rule)}")
        finally:
            audit.close()
        return 0


class EgressRevokeCommand(_Scoped):
    """Revoke hosts that you allowed, everywhere or as the options say. Open connections to them are closed."""

    name = "jupyter agentbox egress revoke"
    description = __doc__ or ""
    examples = "jupyter agentbox egress revoke example.org"
    argument = "HOST..."
    wanted = "name at least one host; `jupyter agentbox egress list` lists them"

    def run(self) -> int:
        """Revoke the hosts."""
        from jupyter_agentbox.policy.environment import user_name
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.storage.audit.log import AuditLog

        policy, choice = Policy(parent=self), self._choice()
        hosts = set(self.extra_args)
        removed = policy.host_rules.remove(
            lambda rule: rule.host in hosts and choice in (None, (rule.scope, rule.target))
        )
        if removed:
            audit = AuditLog(policy.state_path / "audit.sqlite")
            try:
                for rule in removed:
                    audit.record("grant", "-", is_allowed=False, detail=_detail(rule, "revoked", user_name()))
                    print(f"revoked {rule.host} {_tell(rule)}")
            finally:
                audit.close()
        if unknown := sorted(hosts - {rule.host for rule in removed}):
            raise AgentboxError(
                f"{printable(unknown[0])!r} is not among the hosts that you allowed; `jupyter agentbox egress list` "
                "lists them"
            )
        return 0


class EgressCommand(CommandGroup):
    """Manage the hosts that you allowed for your sandboxes, in addition to Policy.allowed_hosts."""

    name = "jupyter agentbox egress"
    description = __doc__ or ""
    subcommands = {  # noqa: RUF012  # as in traitlets' own class
        "list": (EgressListCommand, "List the hosts that you allowed."),
        "allow": (EgressAllowCommand, "Allow hosts."),
        "revoke": (EgressRevokeCommand, "Revoke hosts that you allowed."),
    }


def _check(policy: Policy, host: str, profile: str) -> tuple[str, ...]:
    """Return the patterns to allow for a host or preset. Raises InvalidRequest, PolicyRefused."""
    from jupyter_agentbox.egress.dial import Resolver, check_public
    from jupyter_agentbox.egress.presets import PRESETS
    from jupyter_agentbox.egress.rules import parse_pattern
    from jupyter_agentbox.policy.profiles import expand, find_uncovered

    if host not in PRESETS:
        parse_pattern(host)
    found = expand([host])
    if find_uncovered(found, policy.profile(profile).user_may_allow) is not None:
        raise PolicyRefused(
            f"policy does not let you allow {printable(host)}. Ask your administrator to add it to "
            "Policy.allowed_hosts or Policy.user_may_allow",
            setting="Policy.user_may_allow",
        )
    for item in found:
        asyncio.run(check_public(item, Resolver()))
    return found


def _tell(rule: Rule) -> str:
    what = {"kernel": "for kernel", "notebook": "for notebook", "always": "always, for profile"}[rule.scope]
    return f"{what} {rule.target}"


def _detail(rule: Rule, event: str, by: str) -> dict[str, object]:
    return {"event": event, "hosts": [rule.host], "scope": rule.scope, "for": rule.target, "by": by}
