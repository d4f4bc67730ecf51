"""Create and read the key files in the state directory."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from jupyter_agentbox.errors import AgentboxError, InvalidConfig
from jupyter_agentbox.linux import write_atomically

KEY_SIZE = 32


def read_key(path: Path, name: str, remedy: str) -> bytes | None:
    """Return the key in a file, or None if there is no such file.

    Parameters
    ----------
    path : Path
    name : str
        Name of the key, such as ``token key``, for messages.
    remedy : str
        What to do about a file that is not usable, for messages.

    Raises
    ------
    InvalidConfig
        The file is not readable, is readable by other users, or has another size.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            facts, key = os.fstat(file.fileno()), file.read(KEY_SIZE + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidConfig(f"cannot read the {name}: {error}", setting="Policy.state_dir") from None
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077 or len(key) != KEY_SIZE:
        raise InvalidConfig(
            f"{path} must be a key of {KEY_SIZE} bytes that only this user can read. {remedy}",
            setting="Policy.state_dir",
        )
    return key


def make_key(path: Path, name: str, remedy: str) -> bytes:
    """Return the key in a file, creating it at first use. See :func:`read_key`.

    The file appears atomically: the first process creates it, and others find it complete.
    """
    key = read_key(path, name, remedy)
    if key is None:
        write_atomically(path, secrets.token_bytes(KEY_SIZE), is_durable=True, is_new=True)
        key = read_key(path, name, remedy)
    if key is None:
        raise AgentboxError(f"the {name} was removed while it was being created. Try again")
    return key
