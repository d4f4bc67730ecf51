"""Let programs inside start kernels by the names that notebooks are saved with: papermill, nbclient and nbconvert.

A notebook names the kernelspec of its sandboxed kernel. Inside, that kernel is an ordinary process of the same sandbox.
The kernelspecs are written to the sandbox's own layer; the host's are not changed.
"""

from __future__ import annotations

import json
import os

from .own_pip import is_in_workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

#: Directories of kernelspecs, beside the one of the interpreter's own prefix. New ones are written to the first.
FOLDERS = ("/usr/local/share/jupyter/kernels", "/usr/share/jupyter/kernels")
#: Kernelspec of the sandboxed Python; name of its provisioner; argument before the command that starts the kernel.
OWN_NAME, PROVISIONER, MARK = "agentbox", "agentbox-provisioner", "agentbox-command"


def provide(python: str) -> None:
    """Make all visible kernelspecs of sandboxed kernels start their kernels directly. Never fails.

    Parameters
    ----------
    python : str
        The interpreter of user code: an absolute path, or a name to look up in PATH.
    """
    own = f"{os.path.dirname(os.path.dirname(python))}/share/jupyter/kernels"
    for folder in [own, *FOLDERS] if "/" in python else FOLDERS:
        if is_in_workspace(folder):
            continue  # an environment in the work folder, whose files are the host's
        for name in _list(folder):
            path = f"{folder}/{name}/kernel.json"
            try:
                with open(path, encoding="utf-8") as file:
                    spec = json.load(file)
                if _unwrap(spec):
                    os.unlink(path)
                    _write(path, spec)
            except (OSError, ValueError, TypeError, AttributeError):
                pass  # unreadable or malformed, or a read-only root
    offer(OWN_NAME, [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


def offer(name: str, argv: Sequence[str]) -> None:
    """Write a kernelspec, unless there is one of this name. Never fails."""
    folder = f"{FOLDERS[0]}/{name.lower()}"
    if not name or "/" in name or name.startswith("."):
        return
    try:
        os.makedirs(folder)
        _write(f"{folder}/kernel.json", {"argv": list(argv), "display_name": name, "language": ""})
    except OSError:
        pass


def _unwrap(spec: dict[str, Any]) -> bool:
    """Remove what makes a kernelspec start a sandbox. Return whether there was anything."""
    stanza = spec.get("metadata", {}).get("kernel_provisioner") or {}
    if stanza.get("provisioner_name") != PROVISIONER:
        return False
    del spec["metadata"]["kernel_provisioner"]
    argv = spec["argv"]
    spec["argv"] = argv[argv.index(MARK) + 1 :] if MARK in argv else argv
    return True


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _write(path: str, spec: dict[str, Any]) -> None:
    with open(path, "x", encoding="utf-8") as file:
        json.dump(spec, file)
