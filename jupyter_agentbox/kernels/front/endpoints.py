"""Where fronts keep their sockets: a short path in a directory that only this user can enter.

Each front's directory has a lock that its process holds, so that what a killed process left behind
is told from what is in use, and goes when the next front is made, or a server starts.
"""

from __future__ import annotations

import math
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.linux import open_locked, remove_unowned, try_lock

#: Addresses of UNIX sockets are short; this leaves room for what Jupyter and libzmq add.
MAX_PATH = 100


def runtime_directory() -> Path:
    """Find or make the directory, private to this user, that the fronts live in.

    Raises
    ------
    AgentboxError
        Somebody else's, or open to others: another local user may have made it first.
    """
    user_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(user_dir, "agentbox")
    # Room for "/xxxxxxxx/k-1".
    if not user_dir or not os.path.isdir(user_dir) or len(os.fsencode(path)) + 14 > MAX_PATH:
        path = Path(f"/tmp/agentbox-{os.geteuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise AgentboxError(
            f"{path} is not a directory that only this user can enter (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}); remove it, or set XDG_RUNTIME_DIR to a private directory"
        )
    return path


def make_directory() -> tuple[Path, int]:
    """Make one front's directory, and remove those whose owner is gone.

    Returns
    -------
    Path, int
        The directory, and the descriptor of its lock: close it after the directory is removed.

    Raises
    ------
    AgentboxError
        As :func:`runtime_directory`.
    """
    base = runtime_directory()
    with try_lock(base / "lock", timeout=math.inf):
        remove_unowned(base)
        directory = Path(tempfile.mkdtemp(prefix="", dir=base))
        lock = open_locked(directory / "lock", math.inf)
        assert lock is not None
    return directory, lock


def clear() -> None:
    """Remove the directories of fronts whose owner is gone. Raises AgentboxError, as :func:`runtime_directory`."""
    base = runtime_directory()
    with try_lock(base / "lock", timeout=math.inf):
        remove_unowned(base)
