"""Have the sandbox's Python import :mod:`.shared_locks`, by two files in the layer of the sandbox.

A ``.pth`` file is read at the start of every Python of the environment, also with ``python -I``, but not with
``python -S``, and not in environments that code creates or in the work folder.
"""

from __future__ import annotations

import os

from .own_pip import find_sites
from .shared_locks import NAME


def provide(python: str, path: str) -> None:
    """Write the files for an interpreter, unless they are there. Never fails.

    Parameters
    ----------
    python : str
        The interpreter: an absolute path, or a name to look up in `path`.
    path : str
        PATH of the programs inside.
    """
    with open(os.path.join(os.path.dirname(__file__), "shared_locks.py"), encoding="utf-8") as file:
        text = file.read()
    for site in find_sites(python, path)[:1]:
        try:
            for name, content in ((f"{NAME}.py", text), (f"{NAME}.pth", f"import {NAME}\n")):
                with open(f"{site}/{name}", "x", encoding="utf-8") as target:
                    target.write(content)
                os.chmod(f"{site}/{name}", 0o644)
        except OSError:  # for example a read-only root
            pass
