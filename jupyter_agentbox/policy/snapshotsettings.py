"""The settings of snapshots, part of :class:`~jupyter_agentbox.policy.policy.Policy`."""

from __future__ import annotations

from pathlib import Path

from traitlets import Float, Int, Unicode
from traitlets.config import LoggingConfigurable

from jupyter_agentbox.errors import InvalidConfig
from jupyter_agentbox.spec import GIB

from .traits import ByteSize


class SnapshotSettings(LoggingConfigurable):
    """How many snapshots are kept, how long, and under which key."""

    max_snapshots = Int(100, help="Snapshots that one owner may keep.").tag(config=True)
    max_snapshot_bytes = ByteSize(20 * GIB, help="Most disk space of one owner's snapshots.").tag(config=True)
    snapshot_max_age = Float(
        0.0,
        min=0,
        help="""Seconds after which a server removes a snapshot; 0 keeps all until they are deleted. What is parked, and
        templates, are none of those.""",
    ).tag(config=True)
    snapshot_key_file = Unicode(
        help="""File that holds a key, 32 bytes or more, for snapshots to be encrypted with; only this user may read it.
        Without it they are authenticated, and readable by this user."""
    ).tag(config=True)

    def snapshot_secret(self) -> bytes | None:
        """Return the key of ``snapshot_key_file``; None where there is none. Raises InvalidConfig."""
        if not self.snapshot_key_file:
            return None
        try:
            found = Path(self.snapshot_key_file).expanduser()
            if found.stat().st_mode & 0o077:
                raise ValueError("others than this user may read it")
            secret = found.read_bytes().strip()
            if len(secret) < 32:
                raise ValueError("it has less than 32 bytes")
        except (OSError, ValueError) as error:
            raise InvalidConfig(f"Policy.snapshot_key_file: {error}", setting="Policy.snapshot_key_file") from None
        return secret
