"""Explain errors of cells that name a hidden or read-only file. Inside, the file only seems missing or busy."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.names import HIDDEN, PARENT, Names
from jupyter_agentbox.policy.recipes import settings_file
from jupyter_agentbox.sandbox.drivers.messages import header_index, parse
from jupyter_agentbox.spec import WORKSPACE, SandboxSpec
from jupyter_agentbox.storage.files.paths import MAX_PATH, show
from jupyter_agentbox.storage.files.tree import Tree
from jupyter_agentbox.storage.trees import closing

#: Largest error message that is looked at, and the most characters of its text and names in it.
_MAX_MESSAGE, _MAX_TEXT, _MAX_NAMES = 1 << 20, 4096, 8
#: What languages say if a file is missing, may not be written, or is a mount.
_REFUSALS = re.compile(
    r"Errno \d|os error \d|E(NOENT|ACCES|PERM|ROFS|BUSY|ISDIR|NOTDIR|XDEV|NOTEMPTY)\b|[Nn]o such file"
    r"|[Pp]ermission denied|[Rr]ead-only file system|[Rr]esource busy|[Ii]s a directory|[Nn]ot a directory"
)
_QUOTED = re.compile(r"(['\"`])([^'\"`\n]+)\1")


class AccessNotes:
    """The sentences for one kernel. Each entry is explained once.

    Parameters
    ----------
    spec : SandboxSpec
    folder : Path
        The work folder on the host.
    """

    def __init__(self, spec: SandboxSpec, folder: Path) -> None:
        self._names = Names(spec.hidden, spec.read_only)
        self._folder = folder
        self._explained: set[str] = set()

    def explain(self, frames: Sequence[bytes]) -> list[str]:
        """Return the sentences for a message on iopub; none unless it is an error that names such an entry."""
        index = header_index(frames)
        if index is None or b'"error"' not in frames[index] or parse(frames[index]).get("msg_type") != "error":
            return []
        return [sentence for path in _find_paths(frames[index + 3]) for sentence in self._explain_path(path)]

    def _explain_path(self, path: str) -> list[str]:
        inside = path.removeprefix(f"{WORKSPACE}/")
        parts = tuple(part for part in inside.split("/") if part not in ("", "."))
        if inside.startswith("/") or ".." in parts:
            return []
        kind, where = self._names.classify(parts)
        name = show("/".join(where))
        if not kind or name in self._explained or not self._exists(where):
            return []
        self._explained.add(name)
        if kind == HIDDEN:
            return [
                f"`{name}` is hidden in sandboxes (Policy.hidden_files). To pass a value on, set it as a variable where"
                f' you start Jupyter, and add c.Policy.env_passthrough = ["NAME"] to {settings_file()}.'
            ]
        verb = "contains entries that are" if kind == PARENT else "is"
        return [
            f"`{name}` {verb} read-only in sandboxes (Policy.read_only_files), because programs outside run what it"
            " contains. Change it outside."
        ]

    def _exists(self, parts: tuple[str, ...]) -> bool:
        """Return whether the work folder has an entry. Nothing outside it is looked at, whatever code has linked."""
        with suppress(AgentboxError, OSError):
            tree = Tree(self._folder)
            try:
                with closing(tree.open(parts)):
                    return True
            finally:
                tree.close()
        return False


def _find_paths(content: bytes) -> list[str]:
    """Return the quoted names in the text of an error, if it is about files."""
    if len(content) > _MAX_MESSAGE:
        return []
    error: Any = None
    with suppress(ValueError, RecursionError):
        error = json.loads(content)
    text = error.get("evalue") if isinstance(error, dict) else None
    if not isinstance(text, str) or not _REFUSALS.search(text := text[:_MAX_TEXT]):
        return []
    return [found[2] for found in _QUOTED.finditer(text) if len(found[2]) <= MAX_PATH][:_MAX_NAMES]
