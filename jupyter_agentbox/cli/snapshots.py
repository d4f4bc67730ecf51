"""Commands on saved sandboxes of a running server: snapshot and its like, restore, fork, park, wake."""

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

from .base import FLAGS, format_age, write_table
from .remote import RemoteCommand

_TAKE_ALIASES = {**RemoteCommand.aliases, "name": "SnapshotCommand.title", "note": "SnapshotCommand.note"}
_FORK_ALIASES = {**RemoteCommand.aliases, "snapshot": "ForkCommand.snapshot", "id": "ForkCommand.fork_id"}
_LIST_FLAGS = {**FLAGS, "json": ({"SnapshotsCommand": {"is_json": True}}, "Print a JSON list instead of a table.")}


class ExportSnapshotCommand(RemoteCommand):
    """Write a snapshot to a new file, to be kept elsewhere or imported again.

    It holds all that the sandbox had in memory, secrets too: keep it private.
    """

    name = "jupyter agentbox snapshot export"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshot export 0123456789abcdef0123 demo.snapshot"
    argument = "SNAPSHOT FILE"
    wanted = "name a snapshot and a new file; `jupyter agentbox snapshots` lists them"

    def do(self, client: Client) -> int:
        """Fetch it."""
        snapshot, name = self.extra_args
        target = Path(name)
        if target.exists():
            raise Conflict(f"{name} is there already")
        made = client.export_snapshot(snapshot, target)
        print(f"exported {snapshot}: {format_size(made.size)}")
        return 0


class ImportSnapshotCommand(RemoteCommand):
    """Import an exported snapshot, and print its id.

    One of another machine's is taken if both have the same Policy.snapshot_key_file.
    """

    name = "jupyter agentbox snapshot import"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshot import demo.snapshot"
    argument = "FILE"
    wanted = "name one file that was exported"

    def do(self, client: Client) -> int:
        """Send it."""
        try:
            with open(self.extra_args[0], "rb") as file:
                print(client.import_snapshot(file).id)
        except OSError as error:
            raise NotFound(f"{self.extra_args[0]} can't be read: {error.strerror}") from None
        return 0


class SnapshotCommand(RemoteCommand):
    """Save a sandbox as it is, while it goes on: variables, running programs and files. Prints the snapshot's id.

    ID is that of a sandbox, or of a notebook's kernel. `export` and `import` move snapshots as files.
    """

    subcommands = {  # noqa: RUF012  # as in traitlets' own class
        "export": (ExportSnapshotCommand, "Write a snapshot to a file."),
        "import": (ImportSnapshotCommand, "Import an exported snapshot."),
    }

    name = "jupyter agentbox snapshot"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshot demo --name=before"
    argument = "ID"
    wanted = "name one sandbox; `jupyter agentbox ps` lists them"
    aliases = _TAKE_ALIASES
    title = Unicode(help="What to call it.").tag(config=True)
    note = Unicode(help="What is worth knowing of it.").tag(config=True)

    def do(self, client: Client) -> int:
        """Take it."""
        print(self.sandbox(client, self.extra_args[0]).take_snapshot(self.title, self.note).id)
        return 0


class SnapshotsCommand(RemoteCommand):
    """List all snapshots, or those of one sandbox; the oldest first.

    SIZE is what is restored, COST what it takes on the disk beside those that it shares with.
    """

    name = "jupyter agentbox snapshots"
    description = __doc__ or ""
    examples = "jupyter agentbox snapshots demo"
    argument = "[ID]"
    wanted = "name one sandbox at most"
    flags = _LIST_FLAGS
    is_json = Bool(False, help="Print a JSON list.").tag(config=True)

    def do(self, client: Client) -> int:
        """Print the list."""
        found = self.sandbox(client, self.extra_args[0]).snapshots() if self.extra_args else client.snapshots()
        if self.is_json:
            print(json.dumps(msgspec.to_builtins(list(found)), indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("ID", "SANDBOX", "NAME", "AGE", "SIZE", "COST")]
        for item in found:
            age, sizes = format_age(time.time() - item.created), (format_size(item.size), format_size(item.cost))
            rows.append((item.id, item.sandbox, item.name or "-", age, *sizes))
        write_table(rows)
        return 0


class RestoreCommand(RemoteCommand):
    """Take a sandbox back to one of its snapshots: undo. What happened in it since is lost."""

    name = "jupyter agentbox restore"
    description = __doc__ or ""
    examples = "jupyter agentbox restore demo 0123456789abcdef0123"
    argument = "ID SNAPSHOT"
    wanted = "name a sandbox and one of its snapshots; `jupyter agentbox snapshots` lists them"

    def do(self, client: Client) -> int:
        """Go back."""
        name, snapshot = self.extra_args
        self.sandbox(client, name).restore(snapshot)
        print(f"restored {name}")
        return 0


class ForkCommand(RemoteCommand):
    """Start another sandbox that goes on where this one is, or where it was saved. Prints the new one's id."""

    name = "jupyter agentbox fork"
    description = __doc__ or ""
    examples = "jupyter agentbox fork demo --id=try-it\njupyter agentbox fork demo --snapshot=0123456789abcdef0123"
    argument = "ID"
    wanted = "name one sandbox; `jupyter agentbox ps` lists them"
    aliases = _FORK_ALIASES
    snapshot = Unicode(help="Where it begins; as the sandbox is now unless given.").tag(config=True)
    fork_id = Unicode(help="An id of your own for it.").tag(config=True)

    def do(self, client: Client) -> int:
        """Fork it."""
        box = self.sandbox(client, self.extra_args[0])
        print(box.fork(self.fork_id or None, snapshot=self.snapshot or None, keep=True).id)
        return 0


class ParkCommand(RemoteCommand):
    """Save sandboxes to the disk and free their memory. Their next use wakes them, and takes a little longer.

    ID is that of a sandbox, or of a notebook's kernel, whose notebook may stay open: any message wakes it.
    """

    name = "jupyter agentbox park"
    description = __doc__ or ""
    examples = "jupyter agentbox park demo"
    argument = "ID..."
    wanted = "name one or more sandboxes; `jupyter agentbox ps` lists them"

    def do(self, client: Client) -> int:
        """Park them."""
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
        """Wake them."""
        return self._each(client, "woke", lambda box: box.wake())


class ReviveCommand(ParkCommand):
    """Start sandboxes again that ran out of memory or disk, or crashed, with the files of their workspaces.

    Files are kept for Policy.keep_ended_for seconds. A sandbox keeps its id, its tokens and its terms.
    """

    name = "jupyter agentbox revive"
    description = __doc__ or ""
    examples = "jupyter agentbox revive demo"

    def do(self, client: Client) -> int:
        """Revive them."""
        return self._each(client, "revived", lambda box: box.revive())


class DeleteSnapshotCommand(RemoteCommand):
    """Remove snapshots. Sandboxes that were forked off them or taken back to them stay as they are."""

    name = "jupyter agentbox delete-snapshot"
    description = __doc__ or ""
    examples = "jupyter agentbox delete-snapshot 0123456789abcdef0123"
    argument = "SNAPSHOT..."
    wanted = "name the snapshots to remove; `jupyter agentbox snapshots` lists them"

    def do(self, client: Client) -> int:
        """Remove them."""
        for name in self.extra_args:
            client.delete_snapshot(name)
            print(f"deleted {name}")
        return 0
