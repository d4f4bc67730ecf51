"""Create the directories of the fronts' sockets: short paths that only this user can enter.

Each front's directory contains a lock that its process holds. This distinguishes directories in use from those that a
killed process left behind. The latter are removed when the next front is created or a server starts.
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

#: Longest path of a front. Addresses of UNIX sockets are short, and Jupyter and libzmq need room to extend them.
MAX_PATH = 100


def runtime_directory() -> Path:
    """Return the private directory of this user that contains the fronts. Creates it if necessary.

    Raises
    ------
    AgentboxError
        The directory belongs to another user or is accessible to others. Another local user may have created it first.
    """
    user_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(user_dir, "agentbox")
    # Leave room for "/xxxxxxxx/k-1".
    if not user_dir or not os.path.isdir(user_dir) or len(os.fsencode(path)) + 14 > MAX_PATH:
        path = Path(f"/tmp/agentbox-{os.geteuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise AgentboxError(
            f"{path} must be a directory that only this user can enter (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}). Remove it, or set XDG_RUNTIME_DIR to a private directory"
        )
    return path


def make_directory() -> tuple[Path, int]:
    """Create the directory of one front, and remove directories without an owner.

    Returns
    -------
    Path, int
        The directory, and the descriptor of its lock. Close the descriptor after the directory is removed.

    Raises
    ------
    AgentboxError
        See :func:`runtime_directory`.
    """
    base = runtime_directory()
    with try_lock(base / "lock", timeout=math.inf):
        remove_unowned(base)
        directory = Path(tempfile.mkdtemp(prefix="", dir=base))
        lock = open_locked(directory / "lock", math.inf)
        assert lock is not None
    return directory, lock


def clear() -> None:
    """Remove the directories of fronts without an owner. Raises AgentboxError, like :func:`runtime_directory`."""
    base = runtime_directory()
    with try_lock(base / "lock", timeout=math.inf):
        remove_unowned(base)
