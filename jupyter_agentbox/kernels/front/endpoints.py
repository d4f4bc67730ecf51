"""Where fronts keep their sockets: a short path in a directory that only this user can enter.

Each front's directory has a lock that its process holds, so that what a killed process left behind
is told from what is in use, and goes when the next front is made, or a server starts.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jupyter_agentbox.errors import AgentboxError

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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


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
    with _locked(base / "lock"):
        _clear(base)
        directory = Path(tempfile.mkdtemp(prefix="", dir=base))
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock


def clear() -> None:
    """Remove the directories of fronts whose owner is gone. Raises AgentboxError, as :func:`runtime_directory`."""
    base = runtime_directory()
    with _locked(base / "lock"):
        _clear(base)


def _clear(base: Path) -> None:
    for old in base.iterdir():
        if not old.is_dir() or old.is_symlink():
            continue
        try:
            descriptor = os.open(old / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(descriptor)
        except BlockingIOError:
            continue
        except OSError:
            pass
        shutil.rmtree(old, ignore_errors=True)
