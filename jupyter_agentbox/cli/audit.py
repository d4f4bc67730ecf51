"""``jupyter agentbox audit``: verify and export the audit log."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from traitlets import Bool, Float, Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import Command, CommandGroup


class AuditVerifyCommand(Command):
    """Verify the hash chain of the audit log, and print the first row that is changed or missing.

    The exit status is 0 if the log is intact, 2 if it is broken, 1 if it cannot be read. Store the printed ``head``
    where processes that write the log cannot change it, and pass it to a later check as ``--head``. Only this detects
    a log that was truncated at its end or rewritten as a whole.
    """

    name = "jupyter agentbox audit verify"
    description = __doc__ or ""
    examples = "jupyter agentbox audit verify --head=$(cat /mnt/elsewhere/head)"
    head = Unicode(help="NUMBER:HASH printed by an earlier check.").tag(config=True)
    json = Bool(False, help="Print JSON.").tag(config=True)

    def run(self) -> int:
        """Verify the log."""
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.storage.audit.log import AuditLog

        log = AuditLog(Policy(parent=self).state_path / "audit.sqlite")
        found = log.verify(self.head or None)
        log.close()
        if self.json:
            print(json.dumps(asdict(found), indent=2))
        elif found.is_ok:
            dropped = f", {found.dropped} older ones were dropped by retention" if found.dropped else ""
            print(f"ok: {found.rows} rows{dropped}\nhead {found.head}")
        else:
            print(f"BROKEN at row {found.row}: {found.problem}\n{found.rows} rows before it are intact")
        return 0 if found.is_ok else 2


class AuditExportCommand(Command):
    """Write the audit log to standard output as JSON lines, oldest first, with each row's hash."""

    name = "jupyter agentbox audit export"
    description = __doc__ or ""
    examples = "jupyter agentbox audit export --kind=egress --days=7 > egress.jsonl"
    sandbox = Unicode(help="Export only the rows of the sandbox with this id.").tag(config=True)
    kind = Unicode(help="Export only rows of this kind: egress, lifecycle, call, grant, token, ...").tag(config=True)
    days = Float(0.0, help="Export only the last DAYS days. Default: all.").tag(config=True)

    def run(self) -> int:
        """Write the rows."""
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.storage.audit.log import AuditLog

        if self.days < 0:
            raise AgentboxError("days must not be negative")
        log = AuditLog(Policy(parent=self).state_path / "audit.sqlite")
        since = time.time() - self.days * 86400 if self.days else None
        for row in log.read(sandbox=self.sandbox or None, kind=self.kind or None, since=since):
            sys.stdout.write(json.dumps(row.to_dict()) + "\n")
        log.close()
        return 0


class AuditCommand(CommandGroup):
    """Verify or export the audit log of all actions and egress decisions."""

    name = "jupyter agentbox audit"
    description = __doc__ or ""
    subcommands = {  # noqa: RUF012  # as in traitlets' own class
        "verify": (AuditVerifyCommand, "Verify the hash chain of the log."),
        "export": (AuditExportCommand, "Write the log out as JSON lines."),
    }
