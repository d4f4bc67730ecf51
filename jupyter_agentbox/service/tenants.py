"""Workspaces that outlive their sandboxes: one for each tenant of each owner, under a quota.

A tenant's files are ``/workspace`` and ``/mnt/user-data/outputs`` of every sandbox that its owner makes for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.linux import measure_tree
from jupyter_agentbox.spec import Mount

#: Where results to be handed over are kept, inside.
OUTPUTS = "/mnt/user-data/outputs"
#: Entries and seconds in which a tenant's files are measured.
MAX_ENTRIES, MAX_TIME = 10_000_000, 5.0


@dataclass(frozen=True)
class Tenant:
    """Where one tenant's files are.

    Parameters
    ----------
    directory : Path
        On the host.
    """

    directory: Path

    @classmethod
    def open(cls, state_dir: Path, owner: str, name: str) -> Tenant:
        """Make its folders, if they are not there yet. Blocks for a moment."""
        # An owner's name is anybody's choice; as a digest it is a file name, and no other's.
        digest = hashlib.sha256(owner.encode()).hexdigest()[:32]
        # Beside the state directory, of which no sandbox ever sees anything.
        top = state_dir.with_name(f"{state_dir.name}-tenants")
        top.mkdir(mode=0o700, parents=True, exist_ok=True)  # whatever the umask lets others do beneath
        tenant = cls(top / digest / name)
        for path in (tenant.workspace, tenant.outputs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return tenant

    @property
    def workspace(self) -> Path:
        """What ``/workspace`` is."""
        return self.directory / "workspace"

    @property
    def outputs(self) -> Path:
        """What ``/mnt/user-data/outputs`` is."""
        return self.directory / "outputs"

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """What a sandbox needs beside its workspace."""
        return (Mount(self.outputs, OUTPUTS, is_writable=True),)

    def used(self) -> int:
        """Return the bytes on disk of all its files, or of as many as can be seen in a few seconds. Blocks."""
        return measure_tree(self.directory, MAX_ENTRIES, MAX_TIME)[0]
