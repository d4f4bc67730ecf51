"""Explain a full disk in the output of cells: which disk is full, and how to allow more.

Programs that fail this way often delete what they wrote, before the sandbox is measured again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jupyter_agentbox.policy.recipes import raise_limit
from jupyter_agentbox.sandbox.drivers.messages import header_index, parse
from jupyter_agentbox.spec import MIB, Cause, SandboxSpec, format_size

from .look import look

#: What programs print: on a full disk, and in a private folder that is too large (``guest.disk``).
_FULL, _FOLDER_FULL = b"No space left on device", b"File too large"
_KINDS = frozenset({"error", "stream"})
#: A disk of the host with less free space than this, in bytes, counts as full.
_LITTLE = 16 * MIB


class DiskNotes:
    """The sentence for one notebook's kernel. It is shown once.

    Parameters
    ----------
    spec : SandboxSpec
    folder : Path
        The work folder on the host.
    """

    def __init__(self, spec: SandboxSpec, folder: Path) -> None:
        self._spec = spec
        self._folder = folder
        self._is_told = False
        self._words = (_FULL,) if spec.workspace is not None else (_FULL, _FOLDER_FULL)

    async def explain(self, frames: Sequence[bytes]) -> list[str]:
        """Return the sentence for a message on iopub; none unless it says for the first time that a disk is full."""
        index = header_index(frames)
        if self._is_told or index is None or not any(words in frames[index + 3] for words in self._words):
            return []
        if parse(frames[index]).get("msg_type") not in _KINDS:
            return []
        self._is_told = True
        found = await look(os.statvfs, self._folder)
        if found is None:
            return []
        if found.f_bavail * found.f_frsize < _LITTLE:
            return ["The disk that contains the notebook's folder is full. Delete files outside the sandbox."]
        limit = format_size(self._spec.limits.disk)
        where = "" if self._spec.workspace is None else " outside the notebook's folder, such as in /tmp"
        return [
            f"The disk of this sandbox is full (limit {limit}). Delete files{where}. "
            f"{raise_limit(Cause.DISK_FULL, self._spec)}"
        ]
