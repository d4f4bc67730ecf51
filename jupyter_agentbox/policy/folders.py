"""Decide which host folders a sandbox may read, and which it may write.

There are two dangers. A *readable* folder may contain secrets: a home, the package's own state, Jupyter's connection
files. A *writable* folder may contain code that later runs outside: a start-up file in a home, a module of the server's
own Python. The decisions depend on paths; ``policy.policy`` and ``policy.environment`` use them.
"""

from __future__ import annotations

import glob
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from jupyter_core.paths import jupyter_config_dir, jupyter_data_dir, jupyter_runtime_dir

from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.names import Names
from jupyter_agentbox.spec import HOME, WORKSPACE

#: Host directories in every curated root. Nothing below them needs a mount.
SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")

#: Never mounted whole, because they contain other people's files, sockets or devices. Folders below them may be.
_TOO_BROAD = frozenset(
    {"/", "/boot", "/etc", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/snap", "/srv", "/tmp"}
    | {"/var", "/var/lib", "/var/tmp", "/var/run"}
)
#: Directories inside where a folder that a person added is never mounted for the sake of its relative path.
_RESERVED = ("/etc", "/run", "/tmp", "/var", "/root", HOME, WORKSPACE)
#: Directories that never contain anyone's work or environment.
_NOT_FILES = ("/dev", "/proc", "/sys", "/boot", "/run/agentbox")


def private_directories() -> tuple[Path, ...]:
    """Return what no sandbox may see: our state and sockets, Jupyter's connection files, tokens and passwords."""
    user_dir = os.environ.get("XDG_RUNTIME_DIR", "")
    return (
        Path(jupyter_data_dir(), "agentbox"),
        Path(user_dir, "agentbox") if user_dir else Path("/tmp", f"agentbox-{os.geteuid()}"),
        Path(f"/tmp/agentbox-{os.geteuid()}"),
        Path(jupyter_runtime_dir()),
        Path(jupyter_config_dir()),
    )


def program_directories() -> tuple[Path, ...]:
    """Return the directories from which the server runs code. Write access to them allows code to run outside."""
    return tuple({Path(path) for path in (sys.prefix, sys.exec_prefix, sys.base_prefix, os.path.dirname(__file__))})


def is_beneath(path: str, directories: Iterable[str]) -> bool:
    """Return whether `path` is one of `directories` or is below one. Compares names only."""
    return any(path == directory or path.startswith(directory.rstrip("/") + "/") for directory in directories)


def is_too_broad(path: str) -> bool:
    """Return whether `path`, which must be free of links, is a directory that must never be mounted whole."""
    return path in _TOO_BROAD or path in homes() or is_beneath(path, _NOT_FILES) or os.path.dirname(path) == "/home"


def homes() -> frozenset[str]:
    """Return the homes of the server's user, according to HOME and to the user database."""
    found = {os.path.expanduser("~")}
    with suppress(KeyError):
        found.add(pwd.getpwuid(os.geteuid()).pw_dir)
    return frozenset(os.path.realpath(home) for home in found if home)


def check_mount(source: Path, private: Sequence[Path] = ()) -> None:
    """Check that `source` may be mounted read-only: it must not be too broad, and must not expose private directories.

    Raises
    ------
    PolicyRefused
        The message names the path and the remedy.
    """
    real = os.path.realpath(source)
    if is_too_broad(real):
        raise PolicyRefused(
            f"Cannot mount {source} in a sandbox: it is a system or home directory. Use a more specific folder",
            setting="Policy.mounts",
        )
    for directory in private:
        own = os.path.realpath(directory)
        if is_beneath(own, [real]) or is_beneath(real, [own]):
            raise PolicyRefused(
                f"Cannot mount {source} in a sandbox: {directory} contains private state. Move one of them",
                setting="Policy.state_dir",
            )


def check_added(source: Path, workspace: Path | None, private: Sequence[Path]) -> Path:
    """Check that a person may add a folder to a sandbox, read-only. Return its path without links.

    Raises
    ------
    InvalidRequest
        It is not an absolute path of a folder, or it is part of the work folder.
    PolicyRefused
        It is too broad, contains private state, or contains the work folder, whose hidden files it would show.
    """
    if not source.is_absolute():
        raise InvalidRequest(f"the folder {source} must be an absolute path on the server", field="source")
    real = os.path.realpath(source)
    if not os.path.isdir(real):
        raise InvalidRequest(f"the folder {source} does not exist", field="source")
    if is_beneath(real, (*SYSTEM_DIRS, "/etc")):
        raise PolicyRefused(f"Cannot add {source}: it is a system directory", field="source")
    try:
        check_mount(Path(real), private)
    except PolicyRefused as error:
        raise PolicyRefused(str(error), field="source") from None
    if workspace is not None:
        if is_beneath(real, [str(workspace)]):
            raise InvalidRequest(f"{source} is in the notebook's folder, which the kernel sees", field="source")
        if is_beneath(str(workspace), [real]):
            raise PolicyRefused(
                f"Cannot add {source}: it contains the notebook's folder. Add a more specific folder", field="source"
            )
    return Path(real)


def added_targets(source: Path, workspace: Path | None) -> tuple[str, ...]:
    """Return where a folder that a person added is mounted.

    That is its own path, and the place to which its path relative to the work folder leads inside, so that ``../data``
    works in a notebook as it does outside.
    """
    targets = [str(source)]
    if workspace is not None:
        relative = os.path.relpath(source, workspace)
        inside = os.path.normpath(os.path.join(WORKSPACE, relative))
        reserved = (*SYSTEM_DIRS, *_NOT_FILES, *_RESERVED)
        if not is_beneath(inside, reserved) and not any(is_beneath(path, [inside]) for path in reserved):
            targets.append(inside)
    return tuple(dict.fromkeys(targets))


def check_workspace(
    folder: Path,
    hidden: Sequence[str],
    *,
    allowed: Sequence[str] = (),
    private: Sequence[Path] = (),
    must_exist: bool = True,
) -> tuple[Path, tuple[str, ...]]:
    """Check that code inside may write to a folder.

    Parameters
    ----------
    folder : Path
        The notebook's folder.
    hidden : sequence of str
        Patterns of entries that the runtime hides.
    allowed : sequence of str
        The administrator's list. The folder must be one of these or below one. If the list is empty, any folder is
        allowed except system directories, folders that other users can write to, and homes themselves. The latter two
        are allowed only if they are listed exactly.
    private : sequence of Path
        Directories that no sandbox may see.
    must_exist : bool
        Whether the folder must exist. If not, it is checked as one that the server's user creates.

    Returns
    -------
    Path, tuple of str
        The folder with links resolved, and the patterns to hide: `hidden`, and the names of what the server itself
        uses.

    Raises
    ------
    InvalidRequest
        The folder does not exist.
    PolicyRefused
        Code inside may not write to the folder.
    """
    setting = "Policy.allowed_workspaces"
    real = os.path.realpath(folder)
    roots = [os.path.realpath(os.path.expanduser(root)) for root in allowed]
    if roots and not is_beneath(real, roots):
        raise PolicyRefused(
            f"Cannot use the work folder {folder}: it is not in {setting} ({', '.join(allowed)})",
            field="workspace",
            setting=setting,
        )
    if must_exist and not folder.is_dir():
        raise InvalidRequest(f"the work folder {folder} does not exist", field="workspace")
    if real == "/" or is_beneath(real, (*SYSTEM_DIRS, *_NOT_FILES, "/etc")):
        raise PolicyRefused(
            f"Cannot use the work folder {folder}: it is a system directory. Keep notebooks elsewhere",
            field="workspace",
        )
    is_home = real in homes() or os.path.dirname(real) == "/home"
    is_shared = os.path.exists(real) and os.stat(real).st_mode & stat.S_IWOTH
    if real in _TOO_BROAD or (real not in roots and (is_home or is_shared)):
        kind = "a home directory" if is_home else "a shared directory"
        listed = "" if real in _TOO_BROAD else f", or add {real} to {setting}"
        raise PolicyRefused(
            f"Cannot use the work folder {folder}: it is {kind}, where code in a sandbox could write files that run "
            f"outside, such as .bash_profile. Move the notebook to a folder of its own{listed}",
            field="workspace",
            setting=setting,
        )
    names = list(hidden)
    for directory in (*private, *program_directories()):
        own = os.path.realpath(directory)
        if directory in private and is_beneath(real, [own]):
            raise PolicyRefused(
                f"Cannot use the work folder {folder}: it is in {directory}, which is private", field="workspace"
            )
        if not is_beneath(own, [real]):
            continue
        first, *deeper = parts = os.path.relpath(own, real).split("/")
        if first != "." and Names(names).is_hidden(parts):
            continue
        # A folder with a leading dot is hidden whole. Another one cannot be, and code inside could replace it.
        if first == "." or (deeper and not first.startswith(".")):
            raise PolicyRefused(
                f"Cannot use the work folder {folder}: it contains {directory}, which the Jupyter server uses, so code "
                "in a sandbox could escape. Move the notebook to a folder of its own",
                field="workspace",
            )
        names.append(glob.escape(first))
    return Path(real), tuple(names)
