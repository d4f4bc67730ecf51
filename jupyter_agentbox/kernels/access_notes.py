"""Explain errors of cells that name a hidden or read-only file, or one outside the work folder.

Inside, such a file only seems missing or busy.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.names import HIDDEN, PARENT, Names
from jupyter_agentbox.policy.folders import SYSTEM_DIRS, is_beneath
from jupyter_agentbox.policy.recipes import settings_file
from jupyter_agentbox.sandbox.drivers.messages import header_index, parse
from jupyter_agentbox.spec import HOME, WORKSPACE, SandboxSpec
from jupyter_agentbox.storage.files.paths import MAX_PATH, show
from jupyter_agentbox.storage.files.tree import Tree
from jupyter_agentbox.storage.trees import closing

from .look import look

#: Largest error message that is looked at, and the most characters of its text and names in it.
_MAX_MESSAGE, _MAX_TEXT, _MAX_NAMES = 1 << 20, 4096, 8
#: What languages say if a file is missing, may not be written, or is a mount.
_REFUSALS = re.compile(
    r"Errno \d|os error \d|E(NOENT|ACCES|PERM|ROFS|BUSY|ISDIR|NOTDIR|XDEV|NOTEMPTY)\b|[Nn]o such file"
    r"|[Pp]ermission denied|[Rr]ead-only file system|[Rr]esource busy|[Ii]s a directory|[Nn]ot a directory"
)
_MISSING = re.compile(r"Errno 2\b|os error 2\b|ENOENT\b|[Nn]o such file")
#: Directories of every sandbox, and the maximum number of sentences about others.
_INSIDE = (WORKSPACE, HOME, *SYSTEM_DIRS, "/dev", "/etc", "/proc", "/run", "/sys", "/tmp", "/var")
_MAX_EXPLAINED = 100
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
        #: Directories inside. A file that is missing there is not on the host.
        self._shown = [*_INSIDE, *(mount.target for mount in spec.mounts)]

    async def explain(self, frames: Sequence[bytes]) -> list[str]:
        """Return the sentences for a message on iopub; none unless it is an error that names such an entry."""
        index = header_index(frames)
        if index is None or b'"error"' not in frames[index] or parse(frames[index]).get("msg_type") != "error":
            return []
        paths, is_missing = _find_paths(frames[index + 3])
        return (await look(self._explain_paths, paths, is_missing) or []) if paths else []

    def _explain_paths(self, paths: Sequence[str], is_missing: bool) -> list[str]:
        return [sentence for path in paths for sentence in self._explain_path(path, is_missing)]

    def _explain_path(self, path: str, is_missing: bool) -> list[str]:
        inside = os.path.relpath(os.path.join(WORKSPACE, path), WORKSPACE)
        parts = tuple(inside.split("/"))
        if ".." in parts:
            return self._explain_outside(path, os.path.normpath(os.path.join(WORKSPACE, path))) if is_missing else []
        if ".." in path.split("/"):
            return []  # its meaning depends on links
        kind, where = self._names.classify(parts)
        name = show("/".join(where))
        if not kind:
            return self._explain_link(path, parts) if is_missing else []
        if name in self._explained or not self._exists(where):
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

    def _explain_outside(self, path: str, target: str) -> list[str]:
        """Explain a path whose target, an absolute path inside, is not visible. The host's files are not looked at."""
        top = "/".join(target.split("/")[:3])
        if top in self._explained or len(self._explained) >= _MAX_EXPLAINED or is_beneath(target, self._shown):
            return []
        self._explained.add(top)
        return [
            f"`{show(path)}` is outside the notebook's folder. To read it, add its folder on the tab Files of the"
            " sandbox view, with `jupyter agentbox folder add`, or in Policy.mounts, and restart the kernel."
        ]

    def _explain_link(self, path: str, parts: tuple[str, ...]) -> list[str]:
        """Explain a path through a link that leads out of the work folder."""
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        here = WORKSPACE
        handle = -1
        try:
            handle = os.open(self._folder, flags)
            for part in parts:
                with suppress(OSError):
                    target = os.path.normpath(os.path.join(here, os.readlink(part, dir_fd=handle)))
                    return [] if is_beneath(target, [WORKSPACE]) else self._explain_outside(path, target)
                parent, handle = handle, os.open(part, flags, dir_fd=handle)
                os.close(parent)
                here += f"/{part}"
        except OSError:
            pass  # the entry does not exist, or is no folder
        finally:
            if handle >= 0:
                os.close(handle)
        return []

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


def _find_paths(content: bytes) -> tuple[list[str], bool]:
    """Return the quoted names in the text of an error if it is about files, and whether one is missing."""
    if len(content) > _MAX_MESSAGE:
        return [], False
    error: Any = None
    with suppress(ValueError, RecursionError):
        error = json.loads(content)
    text = error.get("evalue") if isinstance(error, dict) else None
    if not isinstance(text, str) or not _REFUSALS.search(text := text[:_MAX_TEXT]):
        return [], False
    names = [found[2] for found in _QUOTED.finditer(text) if len(found[2]) <= MAX_PATH][:_MAX_NAMES]
    return names, bool(_MISSING.search(text))
