"""``jupyter agentbox audit``: check the audit log, and write it out."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from traitlets import Bool, Float, Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import ALIASES, FLAGS, Command, CommandGroup

_VERIFY_ALIASES = {**ALIASES, "head": "AuditVerifyCommand.head"}
_VERIFY_FLAGS = {**FLAGS, "json": ({"AuditVerifyCommand": {"is_json": True}}, "Print JSON instead of a sentence.")}
_EXPORT_ALIASES = {
    **ALIASES,
    "sandbox": "AuditExportCommand.sandbox",
    "kind": "AuditExportCommand.kind",
    "days": "AuditExportCommand.days",
}


class AuditVerifyCommand(Command):
    """Check by its hashes that the audit log holds what was written. Says the first row that is broken or missing.

    The exit status is 0 if all is well, 2 if the log is broken, 1 if it can't be read. What it says after ``head`` can
    be kept where nobody who writes the log can write, and be given to a later check as ``--head``: only so a log that
    was cut at its end, or written anew as a whole, is told from the true one.
    """

    name = "jupyter agentbox audit verify"
    description = __doc__ or ""
    examples = "jupyter agentbox audit verify --head=$(cat /mnt/elsewhere/head)"
    aliases = _VERIFY_ALIASES
    flags = _VERIFY_FLAGS
    head = Unicode(help="NUMBER:HASH of an earlier check.").tag(config=True)
    is_json = Bool(False, help="Print JSON.").tag(config=True)

    def run(self) -> int:
        """Check it."""
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.storage.audit.log import AuditLog

        log = AuditLog(Policy(parent=self).state_path / "audit.sqlite")
        found = log.verify(self.head or None)
        log.close()
        if self.is_json:
            print(json.dumps(asdict(found), indent=2))
        elif found.is_ok:
            dropped = f", {found.dropped} older ones were dropped" if found.dropped else ""
            print(f"ok: {found.rows} rows{dropped}\nhead {found.head}")
        else:
            print(f"BROKEN at row {found.row}: {found.problem}\n{found.rows} rows before it are well")
        return 0 if found.is_ok else 2


class AuditExportCommand(Command):
    """Write the audit log to the standard output as JSON lines, oldest first, with each row's hash."""

    name = "jupyter agentbox audit export"
    description = __doc__ or ""
    examples = "jupyter agentbox audit export --kind=egress --days=7 > egress.jsonl"
    aliases = _EXPORT_ALIASES
    sandbox = Unicode(help="Only of the sandbox of this id.").tag(config=True)
    kind = Unicode(help="Only of this kind: egress, lifecycle, call, grant, token, ...").tag(config=True)
    days = Float(0.0, help="Only of the last so many days; of all unless given.").tag(config=True)

    def run(self) -> int:
        """Write it."""
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.storage.audit.log import AuditLog

        if self.days < 0:
            raise AgentboxError("days is a number of days, and not below 0")
        log = AuditLog(Policy(parent=self).state_path / "audit.sqlite")
        since = time.time() - self.days * 86400 if self.days else None
        for row in log.read(sandbox=self.sandbox or None, kind=self.kind or None, since=since):
            sys.stdout.write(json.dumps(row.to_dict()) + "\n")
        log.close()
        return 0


class AuditCommand(CommandGroup):
    """The audit log: every action and every decision of the egress gate."""

    name = "jupyter agentbox audit"
    description = __doc__ or ""
    subcommands = {  # noqa: RUF012  # as in traitlets' own class
        "verify": (AuditVerifyCommand, "Check that the log holds what was written."),
        "export": (AuditExportCommand, "Write the log out as JSON lines."),
    }
