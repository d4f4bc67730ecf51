"""``jupyter agentbox token``: create, list and revoke tokens for one sandbox, from its state directory."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from traitlets import Bool, Float, Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import Command, CommandGroup, UsageError, format_age, printable, write_table

if TYPE_CHECKING:
    from jupyter_agentbox.sandbox.manager import SandboxManager


@dataclass(frozen=True)
class _Place:
    sandbox: str
    owner: str


class TokenCreateCommand(Command):
    """Create a token for one sandbox, to give to an agent instead of the server's token.

    Only the token is printed to standard output; it is not stored. SANDBOX is an id as printed by
    ``jupyter agentbox list``, the id of a notebook's kernel, or the id that a program gave its sandbox.
    """

    name = "jupyter agentbox token create"
    description = __doc__ or ""
    examples = "TOKEN=$(jupyter agentbox token create demo --verbs=read,execute --life=600)"
    argument = "SANDBOX"
    wanted = "name one sandbox; `jupyter agentbox list` lists them"
    verbs = Unicode("read", help="Any of read, write, execute, restore, separated by commas. Default: read.").tag(
        config=True
    )
    life = Float(0.0, min=0.0, help="Seconds until the token expires. Default: 3600.").tag(config=True)
    token_name = Unicode("agent", help="Name of the token. Default: agent.").tag(config=True, option="name")

    def run(self) -> int:
        """Create the token."""
        from jupyter_agentbox.models import TokenRequest
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.sandbox.manager import SandboxManager
        from jupyter_agentbox.sandbox.tokens import VERBS, TokenStore, choose_life

        policy = Policy(parent=self)
        options = {"verbs": self.verbs.replace(" ", "").split(","), "name": self.token_name}
        for verb in options["verbs"]:
            if verb not in VERBS:
                raise UsageError(f"unknown verb {printable(verb)!r}; verbs are {', '.join(VERBS)}")
        try:
            body = msgspec.convert(options | ({"life": self.life} if self.life else {}), TokenRequest)
        except ValueError as error:  # msgspec's errors are ValueErrors too
            raise AgentboxError(f"invalid token: {error}") from None
        life = choose_life(body.life, policy.max_token_life)
        if not (policy.state_path / "sandboxes").is_dir():
            raise AgentboxError("no sandbox is running; start one first")
        manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
        place = _find(manager, self.extra_args[0])
        made_by = _user()
        text, record = TokenStore(policy.state_path).create(
            place.sandbox, owner=place.owner, verbs=body.verbs, life=life, name=body.name, made_by=made_by
        )
        detail = {
            "event": "created", "token": record.id, "token_name": record.name, "verbs": record.verbs,
            "expires": record.expires, "by": made_by,
        }  # fmt: skip
        try:
            manager.audit.record("token", place.sandbox, is_allowed=True, detail=detail)
        except AgentboxError:
            TokenStore(policy.state_path).revoke(place.sandbox, record.id)
            raise
        print(text)
        print(
            f"token {record.id} for sandbox {place.sandbox}: {', '.join(record.verbs)}, for {format_age(life)}",
            file=sys.stderr,
        )
        return 0


class TokenListCommand(Command):
    """List the valid tokens of all sandboxes, or of one sandbox of `jupyter agentbox list`."""

    name = "jupyter agentbox token list"
    description = __doc__ or ""
    argument = "[SANDBOX]"
    json = Bool(False, help="Print a JSON list instead of a table.").tag(config=True)

    def run(self) -> int:
        """Print the list."""
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.sandbox.tokens import TokenStore

        found = TokenStore(Policy(parent=self).state_path).list(self.extra_args[0] if self.extra_args else None)
        if self.json:
            print(json.dumps([msgspec.to_builtins(record) for record in found], indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("ID", "NAME", "SANDBOX", "OWNER", "VERBS", "EXPIRES IN")]
        for record in found:
            left = format_age(record.expires - time.time())
            verbs = ",".join(record.verbs)
            rows.append((record.id, record.name, record.sandbox, record.owner, verbs, left))
        write_table(rows)
        return 0


class TokenRevokeCommand(Command):
    """Revoke tokens by id, effective immediately."""

    name = "jupyter agentbox token revoke"
    description = __doc__ or ""
    examples = "jupyter agentbox token revoke 1f0c9e5d2b7a4836"
    argument = "ID..."
    wanted = "name at least one token; `jupyter agentbox token list` lists them"

    def run(self) -> int:
        """Revoke the tokens."""
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.sandbox.tokens import TokenStore
        from jupyter_agentbox.storage.audit.log import AuditLog

        state_path = Policy(parent=self).state_path
        store, audit = TokenStore(state_path), AuditLog(state_path / "audit.sqlite")
        places = {record.id: record.sandbox for record in store.list()}
        unknown = [name for name in self.extra_args if name not in places]
        for name in dict.fromkeys(self.extra_args):
            if name in places:
                store.revoke(places[name], name)
                audit.record("token", places[name], detail={"event": "revoked", "token": name, "by": _user()})
                print(f"revoked {name}")
        audit.close()
        if unknown:
            raise AgentboxError(
                f"no token has the id {printable(unknown[0])!r}; `jupyter agentbox token list` lists them"
            )
        return 0


class TokenCommand(CommandGroup):
    """Manage tokens for one sandbox, to give to agents instead of the server's token."""

    name = "jupyter agentbox token"
    description = __doc__ or ""
    subcommands = {  # noqa: RUF012  # as in traitlets' own class
        "create": (TokenCreateCommand, "Create a token for one sandbox."),
        "list": (TokenListCommand, "List valid tokens."),
        "revoke": (TokenRevokeCommand, "Revoke tokens by id."),
    }


def _find(manager: SandboxManager, name: str) -> _Place:
    """Return the sandbox with this name. Raises AgentboxError."""
    from jupyter_agentbox.service.managed_sandbox import SESSION_FILE, ManagedSandbox

    found = []
    for listed in manager.list():
        directory = manager.state_dir / "sandboxes" / listed.id
        try:
            managed = ManagedSandbox.load(directory) if (directory / SESSION_FILE).exists() else None
        except AgentboxError:
            continue
        names = {listed.id, listed.kernel_id} | ({managed.id} if managed is not None else set())
        if name and name in names and listed.state != "ended":
            found.append(_Place(listed.id, managed.owner if managed is not None else _user()))
    if not found:
        raise AgentboxError(f"no sandbox is named {printable(name)!r}; `jupyter agentbox list` lists them")
    if len(found) > 1:
        ids = ", ".join(place.sandbox for place in found)
        raise AgentboxError(f"several sandboxes are named {printable(name)!r}; use an id: {ids}")
    return found[0]


def _user() -> str:
    from jupyter_agentbox.policy.environment import user_name

    return user_name()
