"""Keep the workspaces of tenants: one for each tenant of each owner, under a quota, beyond the life of a sandbox.

A tenant's files are mounted at ``/workspace`` and ``/mnt/user-data/outputs`` in every sandbox that its owner creates
for it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.linux import measure_tree
from jupyter_agentbox.spec import Mount

#: Path inside the sandbox for results to be handed over.
OUTPUTS = "/mnt/user-data/outputs"
#: Maximum number of entries and of seconds for one measurement of a tenant's files.
MAX_ENTRIES, MAX_TIME = 10_000_000, 5.0


@dataclass(frozen=True)
class Tenant:
    """The directories of one tenant.

    Parameters
    ----------
    directory : Path
        Directory on the host.
    """

    directory: Path

    @classmethod
    def open(cls, state_dir: Path, owner: str, name: str) -> Tenant:
        """Return a tenant, and create its directories if they do not exist. Blocks briefly."""
        # An owner's name is arbitrary text. Its digest is a valid file name and differs for every owner.
        digest = hashlib.sha256(owner.encode()).hexdigest()[:32]
        # Beside the state directory, no part of which is ever mounted in a sandbox.
        top = state_dir.with_name(f"{state_dir.name}-tenants")
        top.mkdir(mode=0o700, parents=True, exist_ok=True)  # protects the directories below it regardless of the umask
        tenant = cls(top / digest / name)
        for path in (tenant.workspace, tenant.outputs):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return tenant

    @property
    def workspace(self) -> Path:
        """Directory that is mounted at ``/workspace``."""
        return self.directory / "workspace"

    @property
    def outputs(self) -> Path:
        """Directory that is mounted at ``/mnt/user-data/outputs``."""
        return self.directory / "outputs"

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Mounts that a sandbox needs in addition to its workspace."""
        return (Mount(self.outputs, OUTPUTS, is_writable=True),)

    def used(self) -> int:
        """Return the disk use of all its files in bytes, or of those that could be measured in time. Blocks."""
        return measure_tree(self.directory, MAX_ENTRIES, MAX_TIME)[0]
