"""Use a Python environment in the notebook's own folder, such as ``.venv``, as a sandbox's Python.

Code inside can change everything in that folder, so nothing of it is run on the host, and nothing in it decides what is
mounted: the interpreter from which the environment was created is mounted only if it is one that sandboxes may see.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jupyter_agentbox.errors import AgentboxError, InvalidRequest
from jupyter_agentbox.guest.own_pip import APART
from jupyter_agentbox.spec import WORKSPACE, Mount
from jupyter_agentbox.storage.files.tree import Tree
from jupyter_agentbox.storage.trees import closing

from .folders import SYSTEM_DIRS, check_mount, is_beneath

_MAX_SETTINGS = 64 * 1024


@dataclass(frozen=True)
class ProjectPython:
    """A project's environment, as a sandbox uses it.

    Parameters
    ----------
    python : str
        Path of its interpreter inside.
    mounts : tuple of Mount
        What it needs from the host.
    packages : str
        Directory of the server's packages, from which ipykernel is taken; empty if the environment has its own.
    has_pip : bool
        Whether the environment has its own pip. Otherwise the guest provides one; see ``guest.own_pip``.
    """

    python: str
    mounts: tuple[Mount, ...]
    packages: str
    has_pip: bool

    @property
    def env(self) -> dict[str, str]:
        """Variables for code inside."""
        own = {"VIRTUAL_ENV": os.path.dirname(os.path.dirname(self.python))}
        return {**own, **({"AGENTBOX_PACKAGES": self.packages} if self.packages else {})}

    @property
    def bin_dirs(self) -> tuple[str, ...]:
        """Directories that come first on PATH."""
        return (os.path.dirname(self.python), *(() if self.has_pip else (f"{APART}/bin",)))

    @property
    def import_dirs(self) -> tuple[str, ...]:
        """Directories of modules beside the environment."""
        return () if self.has_pip else (APART,)


def find_relative(folder: str | Path, program: str) -> str | None:
    """Return the environment in a folder to which a program belongs, relative to the folder; None for any other one.

    The server's own interpreter is another one: its environment is hidden, and mounted read-only.
    """
    real = os.path.realpath(folder)
    if not os.path.isabs(program) or program == sys.executable:
        return None
    for path in (os.path.normpath(program), os.path.realpath(os.path.dirname(program)) + "/python"):
        for top in (os.path.abspath(folder), real):
            if is_beneath(path, [top]) and os.path.basename(os.path.dirname(path)) == "bin":
                return os.path.relpath(os.path.dirname(os.path.dirname(path)), top)
    return None


def find_project_python(
    folder: Path, environment: str, *, mounts: Sequence[Mount] = (), private: Sequence[Path] = ()
) -> ProjectPython:
    """Return how to use the environment at a path relative to the work folder. Runs nothing of it.

    Parameters
    ----------
    folder : Path
        The work folder, without links.
    environment : str
        Relative path of the environment's folder, such as ``.venv``.
    mounts : sequence of Mount
        The profile's mounts. They may contain the interpreter from which the environment was created.
    private : sequence of Path
        Directories that no sandbox may see.

    Raises
    ------
    InvalidRequest
        There is no environment, or it cannot be used. The error says what to do.
    """
    parts = tuple(part for part in environment.split("/") if part not in ("", "."))

    def refuse(why: str) -> InvalidRequest:
        return InvalidRequest(f"Cannot use {environment} as the sandbox's Python: {why}", field="python")

    with _open(folder) as tree:
        try:
            with closing(tree.open_file((*parts, "pyvenv.cfg"), follow=False)) as fd:
                settings = os.read(fd, _MAX_SETTINGS).decode(errors="replace")
            with (
                closing(tree.open((*parts, "lib"))) as found,
                closing(os.open(f"/proc/self/fd/{found}", os.O_RDONLY)) as fd,
            ):
                libraries = sorted(name for name in os.listdir(fd) if re.fullmatch(r"python3\.\d+", name))
        except (AgentboxError, OSError) as error:
            raise refuse(
                f"it is not a virtual environment in {folder} ({error}). Create one with `uv venv` or `python -m venv"
                f" {environment}`"
            ) from None
        if len(libraries) != 1:
            raise refuse("its folder lib must contain the packages of one Python. Create the environment again")
        uses_base = bool(re.search(r"^include-system-site-packages\s*=\s*true", settings, re.MULTILINE | re.IGNORECASE))
        site = (*parts, "lib", libraries[0], "site-packages")
        has_kernel, has_pip = (uses_base or _exists(tree, (*site, name)) for name in ("ipykernel", "pip"))
    match = re.search(r"^\s*home\s*=\s*(/\S.*?)\s*$", settings, re.MULTILINE)
    if match is None:
        raise refuse("its pyvenv.cfg names no Python. Create the environment again")
    needed = _base_mounts(os.path.normpath(match[1]), mounts, private)
    if needed is None:
        raise refuse(
            f"it was created from the Python in {match[1]}, which sandboxes cannot see. Add that Python's folder to"
            " Policy.mounts at the same path, or create the environment with a Python of the system or of uv"
        )
    packages = ""
    if not has_kernel:
        own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        if libraries[0] != own:
            raise refuse(
                f"it has no ipykernel, and the Jupyter server's own is for {own}, not {libraries[0]}. Install it there"
                " (`uv add --dev ipykernel`)"
            )
        packages = sysconfig.get_path("purelib")
    return ProjectPython(
        "/".join((WORKSPACE, *parts, "bin", "python")), tuple(dict.fromkeys(needed)), packages, has_pip
    )


def _exists(tree: Tree, parts: tuple[str, ...]) -> bool:
    try:
        os.close(tree.open(parts))
    except AgentboxError:
        return False
    return True


@contextmanager
def _open(folder: Path) -> Iterator[Tree]:
    tree = Tree(folder)
    try:
        yield tree
    finally:
        tree.close()


def _base_mounts(home: str, mounts: Sequence[Mount], private: Sequence[Path]) -> tuple[Mount, ...] | None:
    """Return the mounts for the Python whose programs are in `home`, or None if sandboxes may not see it."""
    shown = [str(mount.source) for mount in mounts if str(mount.source) == mount.target]
    real = os.path.realpath(home)
    if all(is_beneath(path, (*SYSTEM_DIRS, *shown)) for path in (home, real)):
        return ()
    base = os.path.realpath(sys.base_prefix)
    if is_beneath(real, [base]):
        return tuple(Mount(Path(path), path) for path in {sys.base_prefix, base} if not is_beneath(path, SYSTEM_DIRS))
    for store in _find_stores():
        # One installation of the store, under the given name and the real one.
        found = {_find_installation(store, home), _find_installation(os.path.realpath(store), real)}
        if None not in found:
            paths = sorted(path for path in found if path is not None)
            for path in paths:
                check_mount(Path(path), private)
            return tuple(Mount(Path(path), path) for path in paths)
    return None


def _find_installation(store: str, home: str) -> str | None:
    """Return the folder of a store to which `home` belongs, or None if it is not in one."""
    name, _, rest = home[len(store) + 1 :].partition("/") if home.startswith(store + "/") else ("", "", "")
    return os.path.join(store, name) if name and rest else None


def _find_stores() -> tuple[str, ...]:
    """Return the directories in which uv and pyenv keep interpreters, which contain nothing private."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    return os.environ.get("UV_PYTHON_INSTALL_DIR") or os.path.join(data, "uv", "python"), os.path.join(
        pyenv, "versions"
    )
