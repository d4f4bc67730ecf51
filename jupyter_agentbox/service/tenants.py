"""Workspaces that outlive their sandboxes: one for each tenant of each owner, under a quota.

A tenant's files are ``/workspace`` and ``/mnt/user-data/outputs`` of every sandbox that its owner makes for it.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.spec import Mount

#: Where results to be handed over are kept, inside.
OUTPUTS = "/mnt/user-data/outputs"


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
        total, deadline = 0, time.monotonic() + 5.0
        pending = [str(self.directory)]
        while pending:
            try:
                with os.scandir(pending.pop()) as entries:
                    for entry in entries:
                        if time.monotonic() > deadline:
                            return total
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
            except OSError:
                continue
        return total
