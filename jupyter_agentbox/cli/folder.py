"""``jupyter agentbox folder``: list, add and remove the host folders that notebooks see beside their own."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from traitlets import Bool, Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import Command, CommandGroup, UsageError, format_age, printable, write_table

if TYPE_CHECKING:
    from jupyter_agentbox.policy.consent import FolderRule, FolderScope


class _Scoped(Command):
    """Base of the commands that name what a folder is added for."""

    notebook = Unicode(help="Path of a notebook.").tag(config=True)
    profile = Unicode(help="Name of a profile.").tag(config=True)

    def _choice(self) -> tuple[FolderScope, str] | None:
        """Return the scope and target that the options name, or None. Raises UsageError."""
        from jupyter_agentbox.policy.consent import notebook_path

        if self.notebook and self.profile:
            raise UsageError("give only one of --notebook and --profile")
        if self.notebook:
            return "notebook", notebook_path(self.notebook)
        return ("always", self.profile) if self.profile else None


class FolderListCommand(Command):
    """List the folders that you added to the sandboxes of notebooks."""

    name = "jupyter agentbox folder list"
    description = __doc__ or ""
    json = Bool(False, help="Print a JSON list instead of a table.").tag(config=True)

    def run(self) -> int:
        """Print the list."""
        from jupyter_agentbox.policy.policy import Policy

        found = Policy(parent=self).folder_rules.list()
        if self.json:
            print(json.dumps([msgspec.to_builtins(rule) for rule in found], indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("FOLDER", "ADDED FOR", "BY", "AGE")]
        rows += [(rule.source, _tell(rule), rule.by, format_age(time.time() - rule.added)) for rule in found]
        write_table(rows)
        return 0


class FolderAddCommand(_Scoped):
    """Show folders of this machine in notebooks, read-only: in all of a profile, or in one. Restart their kernels.

    A folder is visible under its own path, and under its path relative to the notebook's folder. Files that
    Policy.hidden_files names are hidden. Policy.user_may_add_folders limits which folders you can add.
    """

    name = "jupyter agentbox folder add"
    description = __doc__ or ""
    examples = "jupyter agentbox folder add ~/data\njupyter agentbox folder add ~/data --notebook=work/report.ipynb"
    argument = "FOLDER..."
    wanted = "name at least one folder"

    def run(self) -> int:
        """Add the folders."""
        from jupyter_agentbox.policy.consent import FolderRule
        from jupyter_agentbox.policy.environment import user_name
        from jupyter_agentbox.policy.policy import Policy

        policy = Policy(parent=self)
        scope, target = self._choice() or ("always", policy.default_profile)
        if scope == "always":
            policy.profile(target)
        workspace = Path(target).parent if scope == "notebook" else None
        real = [policy.check_added(Path(os.path.abspath(os.path.expanduser(f))), workspace) for f in self.extra_args]
        for folder in real:
            rule = FolderRule(str(folder), scope, target, user_name())
            _record(policy.state_path, "added", rule, rule.by)
            policy.folder_rules.add(rule)
            print(f"added {folder} {_tell(rule)}")
        return 0


class FolderRemoveCommand(_Scoped):
    """Remove folders that you added, everywhere or as the options say. Running kernels see them until their restart."""

    name = "jupyter agentbox folder remove"
    description = __doc__ or ""
    examples = "jupyter agentbox folder remove ~/data"
    argument = "FOLDER..."
    wanted = "name at least one folder; `jupyter agentbox folder list` lists them"

    def run(self) -> int:
        """Remove the folders."""
        from jupyter_agentbox.policy.environment import user_name
        from jupyter_agentbox.policy.policy import Policy

        policy, choice = Policy(parent=self), self._choice()
        meant = {os.path.realpath(os.path.expanduser(folder)) for folder in self.extra_args} | set(self.extra_args)
        removed = policy.folder_rules.remove(
            lambda rule: rule.source in meant and choice in (None, (rule.scope, rule.target))
        )
        for rule in removed:
            _record(policy.state_path, "removed", rule, user_name())
            print(f"removed {rule.source} {_tell(rule)}")
        if not removed:
            raise AgentboxError(
                f"{printable(self.extra_args[0])!r} is not among the folders that you added; "
                "`jupyter agentbox folder list` lists them"
            )
        return 0


class FolderCommand(CommandGroup):
    """Manage the folders that you added to the sandboxes of notebooks, in addition to Policy.mounts."""

    name = "jupyter agentbox folder"
    description = __doc__ or ""
    subcommands = {  # noqa: RUF012  # as in traitlets' own class
        "list": (FolderListCommand, "List the folders that you added."),
        "add": (FolderAddCommand, "Add folders."),
        "remove": (FolderRemoveCommand, "Remove folders that you added."),
    }


def _tell(rule: FolderRule) -> str:
    return f"for notebook {rule.target}" if rule.scope == "notebook" else f"always, for profile {rule.target}"


def _record(state_path: Path, event: str, rule: FolderRule, by: str) -> None:
    from jupyter_agentbox.storage.audit.log import AuditLog

    state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    audit = AuditLog(state_path / "audit.sqlite")
    try:
        detail = {"event": event, "folder": rule.source, "scope": rule.scope, "for": rule.target, "by": by}
        audit.record("grant", "-", is_allowed=event == "added", detail=detail)
    finally:
        audit.close()
