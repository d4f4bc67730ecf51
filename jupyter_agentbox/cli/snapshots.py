"""Commands that save and restore sandboxes of a running server: snapshots, fork, park and revive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from traitlets import Bool, Unicode

from jupyter_agentbox.client import Client, Sandbox
from jupyter_agentbox.errors import Conflict, NotFound
from jupyter_agentbox.spec import format_size

from .base import format_age, write_table
from .remote import RemoteCommand


class ExportSnapshotCommand(RemoteCommand):
    """Export a snapshot to a new file, for `snapshot import`.

    The file contains the sandbox's memory, including secrets: keep it private.
    """

    name = "jupyter agentbox snapshot export"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshot export 0123456789abcdef0123 demo.snapshot"
    argument = "SNAPSHOT FILE"
    wanted = "name a snapshot and a new file; `jupyter agentbox snapshots` lists them"

    def do(self, client: Client) -> int:
        """Export the snapshot."""
        snapshot, name = self.extra_args
        target = Path(name)
        if target.exists():
            raise Conflict(f"{name} already exists")
        made = client.export_snapshot(snapshot, target)
        print(f"exported {snapshot}: {format_size(made.size)}")
        return 0


class ImportSnapshotCommand(RemoteCommand):
    """Import an exported snapshot, and print its id.

    A snapshot of another machine is accepted if both machines have the same Policy.snapshot_key_file.
    """

    name = "jupyter agentbox snapshot import"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshot import demo.snapshot"
    argument = "FILE"
    wanted = "name one exported file"

    def do(self, client: Client) -> int:
        """Import the file."""
        try:
            with open(self.extra_args[0], "rb") as file:
                print(client.import_snapshot(file).id)
        except OSError as error:
            raise NotFound(f"{self.extra_args[0]} cannot be read: {error.strerror}") from None
        return 0


class SnapshotCommand(RemoteCommand):
    """Take a snapshot of a running sandbox: variables, processes and files. Print the snapshot's id.

    ID is the id of a sandbox or of a notebook's kernel. `export` and `import` move snapshots as files.
    """

    subcommands = {  # noqa: RUF012  # as in traitlets' own class
        "export": (ExportSnapshotCommand, "Export a snapshot to a file."),
        "import": (ImportSnapshotCommand, "Import an exported snapshot."),
    }

    name = "jupyter agentbox snapshot"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshot demo --name=before"
    argument = "ID"
    wanted = "name one sandbox; `jupyter agentbox ps` lists them"
    title = Unicode(help="Name of the snapshot.").tag(config=True, option="name")
    note = Unicode(help="Description of the snapshot.").tag(config=True)

    def do(self, client: Client) -> int:
        """Take the snapshot."""
        print(self.sandbox(client, self.extra_args[0]).take_snapshot(self.title, self.note).id)
        return 0


class SnapshotsCommand(RemoteCommand):
    """List all snapshots, or those of one sandbox, oldest first.

    SIZE is the size of the saved state. COST is the disk space that only this snapshot uses.
    """

    name = "jupyter agentbox snapshots"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshots demo"
    argument = "[ID]"
    wanted = "name at most one sandbox"
    json = Bool(False, help="Print a JSON list instead of a table.").tag(config=True)

    def do(self, client: Client) -> int:
        """Print the list."""
        found = self.sandbox(client, self.extra_args[0]).snapshots() if self.extra_args else client.snapshots()
        if self.json:
            print(json.dumps(msgspec.to_builtins(list(found)), indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("ID", "SANDBOX", "NAME", "AGE", "SIZE", "COST")]
        for item in found:
            age, sizes = format_age(time.time() - item.created), (format_size(item.size), format_size(item.cost))
            rows.append((item.id, item.sandbox, item.name or "-", age, *sizes))
        write_table(rows)
        return 0


class RestoreCommand(RemoteCommand):
    """Restore a sandbox to one of its snapshots. Later changes are lost."""

    name = "jupyter agentbox restore"
    description = __doc__ or ""
    examples = "jupyter agentbox restore demo 0123456789abcdef0123"
    argument = "ID SNAPSHOT"
    wanted = "name a sandbox and one of its snapshots; `jupyter agentbox snapshots` lists them"

    def do(self, client: Client) -> int:
        """Restore the sandbox."""
        name, snapshot = self.extra_args
        self.sandbox(client, name).restore(snapshot)
        print(f"restored {name}")
        return 0


class ForkCommand(RemoteCommand):
    """Start a copy of a sandbox, from its current state or from a snapshot. Print the copy's id."""

    name = "jupyter agentbox fork"
    description = __doc__ or ""
    examples = "jupyter agentbox fork demo --id=try-it\njupyter agentbox fork demo --snapshot=0123456789abcdef0123"
    argument = "ID"
    wanted = "name one sandbox; `jupyter agentbox ps` lists them"
    snapshot = Unicode(help="Start from this snapshot. Default: the current state.").tag(config=True)
    fork_id = Unicode(help="Id of the copy. Default: a generated one.").tag(config=True, option="id")

    def do(self, client: Client) -> int:
        """Fork the sandbox."""
        box = self.sandbox(client, self.extra_args[0])
        print(box.fork(self.fork_id or None, snapshot=self.snapshot or None, keep=True).id)
        return 0


class ParkCommand(RemoteCommand):
    """Park sandboxes: save them to disk and free their memory. Their next use wakes them.

    ID is the id of a sandbox or of a notebook's kernel. The notebook can stay open: any message wakes its kernel.
    """

    name = "jupyter agentbox park"
    description = __doc__ or ""
    examples = "jupyter agentbox park demo"
    argument = "ID..."
    wanted = "name one or more sandboxes; `jupyter agentbox ps` lists them"

    def do(self, client: Client) -> int:
        """Park the sandboxes."""
        return self._each(client, "parked", lambda box: box.park())

    def _each(self, client: Client, done: str, work: Callable[[Sandbox], object]) -> int:
        for name in self.extra_args:
            work(self.sandbox(client, name))
            print(f"{done} {name}")
        return 0


class WakeCommand(ParkCommand):
    """Wake parked sandboxes before their next use."""

    name = "jupyter agentbox wake"
    description = __doc__ or ""
    examples = "jupyter agentbox wake demo"

    def do(self, client: Client) -> int:
        """Wake the sandboxes."""
        return self._each(client, "woke", lambda box: box.wake())


class ReviveCommand(ParkCommand):
    """Restart sandboxes that crashed, or ran out of memory or disk, with the files of their workspaces.

    Files are kept for Policy.keep_ended_for seconds. A sandbox keeps its id, tokens, limits and permissions.
    """

    name = "jupyter agentbox revive"
    description = __doc__ or ""
    examples = "jupyter agentbox revive demo"

    def do(self, client: Client) -> int:
        """Revive the sandboxes."""
        return self._each(client, "revived", lambda box: box.revive())


class DeleteSnapshotCommand(RemoteCommand):
    """Delete snapshots. Sandboxes that were forked from them or restored to them are not affected."""

    name = "jupyter agentbox delete-snapshot"
    description = __doc__ or ""
    examples = "jupyter agentbox delete-snapshot 0123456789abcdef0123"
    argument = "SNAPSHOT..."
    wanted = "name the snapshots to delete; `jupyter agentbox snapshots` lists them"

    def do(self, client: Client) -> int:
        """Delete the snapshots."""
        for name in self.extra_args:
            client.delete_snapshot(name)
            print(f"deleted {name}")
        return 0
