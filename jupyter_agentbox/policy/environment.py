"""What a sandbox sees of the host's environment: variables, and the Python (or other) environment as mounts.

Pure functions over what they are given; ``policy.policy`` calls them. Variables follow an
allow-list: nothing of the server's environment goes inside unless it is named here or by the administrator,
since a server's environment holds tokens and cloud keys. Mounts are read-only and as narrow as a prefix: never
a home directory, never a system directory, never the package's own state.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
import site
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from glob import glob
from pathlib import Path

from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.spec import HOME, WORKSPACE, Limits, Mount

from .folders import SYSTEM_DIRS, check_mount, homes, is_beneath, is_too_broad
from .languages import glob_safe

#: What certificate bundles may lie in; the curated root shows these as well.
CERTIFICATE_DIRS = (
    "/etc/ssl/certs",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates/extracted",
    *SYSTEM_DIRS,
)

_LOCALE = re.compile(r"LANG|LANGUAGE|LC_[A-Z]+")
#: Harmless facts about the host that programs inside want to share with it.
_HOST_NAMES = frozenset({"TZ", "TERM", "COLORTERM", "NO_COLOR", "OPENBLAS_CORETYPE"})
_CERTIFICATE_NAMES = (
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "PIP_CERT",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
)
#: What a launch request may add by itself: the notebook's path, which ipykernel uses.
_REQUEST_NAMES = frozenset({"JPY_SESSION_NAME"})
#: A kernel with this variable watches a process that does not exist inside, and exits.
_NEVER = frozenset({"JPY_PARENT_PID"})
_NAME = re.compile(r"[^=\0]+")
#: Files that lie beside an environment only where it was made in a project or a home, as folders with a dot do.
_PRIVATE_FILE = re.compile(r"\.(git|env.*|netrc|pypirc|npmrc|git-credentials|pgpass|.*_history)")


def kernel_environment(
    host: Mapping[str, str],
    *,
    limits: Limits,
    bin_dirs: Sequence[str] = (),
    is_visible: Callable[[str], bool] = lambda path: False,
    passthrough: Iterable[str] = (),
    request: Mapping[str, str] | None = None,
    templates: Mapping[str, str] | None = None,
    profile: Mapping[str, str] | None = None,
    egress: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Build the whole environment of what runs inside.

    Later parts win: fixed values, allow-listed host variables, the launch request's, the kernelspec's, the
    profile's, and last those that lead to the egress gate, so that nobody's proxy setting replaces ours.

    Parameters
    ----------
    host : mapping
        The server's environment. Of it only locale, time zone, terminal, certificate bundles and `passthrough`.
    limits : Limits
        Its ``cpus`` bound the threads of numeric libraries, which otherwise count the host's processors.
    bin_dirs : sequence of str
        Directories inside to put first on PATH.
    is_visible : callable
        Whether a host path can be read inside; a certificate variable that points elsewhere is left out.
    passthrough : iterable of str
        Names that the administrator lets in from the host or the launch request.
    request : mapping, optional
        The environment given to the launch call. Jupyter passes a copy of the server's own there, so it counts
        for nothing but ``JPY_SESSION_NAME``, `passthrough`, and ``KERNEL_*`` variables that differ from the host's.
    templates : mapping, optional
        The kernelspec's ``env``. ``${NAME}`` is replaced from the environment inside only: its author may set
        any variable there, and learn none of the host's.
    profile : mapping, optional
        The administrator's variables for this profile.
    egress : mapping, optional
        Proxy variables and the package clients' settings.

    Raises
    ------
    InvalidRequest
        A name or value of `templates` is no text that an environment can hold.
    """
    passthrough = frozenset(passthrough)
    env = {
        "PATH": ":".join((*bin_dirs, f"{HOME}/.local/bin", "/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")),
        "HOME": HOME,
        "USER": "user",
        "LOGNAME": "user",
        "SHELL": "/bin/bash",
        "TERM": "xterm-256color",
        "TMPDIR": "/tmp",
        "IPYTHONDIR": f"{HOME}/.ipython",
        "MPLCONFIGDIR": f"{HOME}/.config/matplotlib",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "XDG_CONFIG_HOME": f"{HOME}/.config",
        "XDG_DATA_HOME": f"{HOME}/.local/share",
        "JUPYTER_RUNTIME_DIR": f"{HOME}/.local/share/jupyter/runtime",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": str(max(1, min(os.cpu_count() or 1, math.ceil(limits.cpus)))),
    }
    env.update((name, value) for name, value in host.items() if name in _HOST_NAMES or _LOCALE.fullmatch(name))
    if not any(env.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        env["LANG"] = "C.UTF-8"
    env.update((name, host[name]) for name in _CERTIFICATE_NAMES if host.get(name) and is_visible(host[name]))
    env.update((name, host[name]) for name in passthrough if name in host)
    for name, value in (request or {}).items():
        is_the_callers = name.startswith("KERNEL_") and host.get(name) != value
        if name in _REQUEST_NAMES or name in passthrough or is_the_callers:
            env[name] = value
    if notebook := env.get("JPY_SESSION_NAME"):
        env["JPY_SESSION_NAME"] = f"{WORKSPACE}/{os.path.basename(notebook)}"  # as it is inside
    for name, template in (templates or {}).items():
        if not isinstance(template, str) or not _NAME.fullmatch(name) or "\0" in template:
            raise InvalidRequest(f"the kernelspec's env has {name!r}, and that or its value is no text", field="env")
        env[name] = string.Template(template).safe_substitute(env)
    env.update(profile or {})
    env.update(egress or {})
    return {name: value for name, value in env.items() if name not in _NEVER}


def user_name() -> str:
    """Return the name of this user, or its number where that has no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def environment_mounts(
    executable: str | None, *, private: Sequence[Path] = (), resource_dir: Path | None = None
) -> tuple[Mount, ...]:
    """Find the read-only mounts with which `executable` works inside, at the same path.

    A program in the ``bin`` of a Python environment (venv, conda, or an installation of Python) brings that
    environment whole, and the one that it was made from. Any other program is shown alone, whatever lies beside it.
    Links and ``#!`` lines are followed, to executable files only. The server's own base interpreter is always among
    the mounts, since the guest runs on it.

    Parameters
    ----------
    executable : str, optional
        Absolute path on the host, or a name to look up on PATH; None for the server's own interpreter.
    private : sequence of Path
        Directories that no mount may hold or lie in, such as the package's state.
    resource_dir : Path, optional
        The kernelspec's own directory, where its argv may name files.

    Returns
    -------
    tuple of Mount
        Sorted, none inside another.

    Raises
    ------
    InvalidRequest
        There is no such program.
    PolicyRefused
        What it needs is too broad to be shown, holds the package's own state, or is an environment that also holds
        other people's files, such as a Git repository.
    """
    found = shutil.which(executable or sys.executable)
    if found is None:
        raise InvalidRequest(f"the kernel's program {executable!r} is not on this machine; install it", field="argv")
    base = str(getattr(sys, "_base_executable", None) or sys.executable)
    needed = set(_needs(os.path.abspath(found)))
    paths = {*needed, *_needs(base), sys.base_prefix}
    packages = user_packages(executable)
    paths.update(os.path.abspath(path) for path in (resource_dir, packages) if path is not None and os.path.isdir(path))
    outside = sorted(path for path in paths if not is_beneath(path, SYSTEM_DIRS))
    for path in outside:
        check_mount(Path(path), private)
        if path in needed and os.path.isdir(path):
            _check_environment(path)
    return tuple(
        Mount(Path(path), path)
        for path in outside
        if not is_beneath(path, [other for other in outside if other != path])
    )


def is_visible(path: str, root: Path | None, mounts: Sequence[Mount]) -> bool:
    """Whether a certificate bundle of the host can be read inside at the same path."""
    if root is not None:
        return (root / path.lstrip("/")).exists()
    shown = (*CERTIFICATE_DIRS, *(mount.target for mount in mounts if str(mount.source) == mount.target))
    return (
        os.path.exists(path) and is_beneath(os.path.abspath(path), shown) and is_beneath(os.path.realpath(path), shown)
    )


def user_packages(executable: str | None) -> str | None:
    """Return where ``pip install --user`` puts packages for `executable`, if that is the server's own interpreter.

    It has to be named in PYTHONPATH inside, as the home is another one there.
    """
    is_own = executable is None or os.path.realpath(shutil.which(executable) or "") == os.path.realpath(sys.executable)
    folder = site.getusersitepackages()
    return folder if is_own and site.ENABLE_USER_SITE and os.path.isdir(folder) else None


def bin_dirs(executable: str | None) -> tuple[str, ...]:
    """Return what to put on PATH: where the kernel's program lies, unless the system's PATH has it."""
    directory = os.path.dirname(os.path.abspath(shutil.which(executable or sys.executable) or "/usr/bin/none"))
    return () if directory in ("/usr/local/bin", "/usr/bin", "/bin") else (directory,)


def _needs(path: str) -> Iterator[str]:
    """Walk from a program to all that it takes to run: Python environments, and other programs by themselves."""
    todo, seen = [path], set[str]()
    while todo and len(seen) < 32:  # a bound on chains of links made in a circle
        path = todo.pop()
        # A #! line may name anything, and what it names is shown.
        if path in seen or not os.path.isfile(path) or not os.access(path, os.X_OK):
            continue
        seen.add(path)
        prefix = os.path.dirname(os.path.dirname(path))
        is_whole = os.path.basename(os.path.dirname(path)) == "bin" and _is_environment(prefix)
        yield prefix if is_whole else path
        if os.path.islink(path):
            folder = os.path.realpath(os.path.dirname(path))
            todo.append(os.path.normpath(os.path.join(folder, os.readlink(path))))
        todo += _base_interpreter(prefix, os.path.basename(path)) if is_whole else []
        todo += _shebang(path)


def _is_environment(prefix: str) -> bool:
    """Whether a prefix is a Python environment, which is shown whole or, where it must not be, refused."""
    if any(os.path.exists(os.path.join(prefix, mark)) for mark in ("pyvenv.cfg", "conda-meta")):
        return True
    # As Python itself finds its prefix. A home may have that too, from an installation with --prefix.
    real = os.path.realpath(prefix)
    is_shared = is_too_broad(real) or any(real == os.path.join(home, ".local") for home in homes())
    return not is_shared and any(
        glob(f"{glob_safe(prefix)}/{library}/os.py") for library in ("lib/python3*", "lib64/python3*", "lib/pypy3*")
    )


def _check_environment(prefix: str) -> None:
    """Refuse an environment that was made in the midst of other files: it would show a project with its secrets."""
    with os.scandir(prefix) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if (entry.name.startswith(".") and entry.is_dir()) or _PRIVATE_FILE.fullmatch(entry.name)
        )
    if names:
        raise PolicyRefused(
            f"Cannot show the Python environment {prefix} in the sandbox: it also contains {names[0]}, so it is not "
            f"only an environment. Create the environment in a folder of its own, such as {prefix}/venv.",
            field="argv",
        )


def _base_interpreter(prefix: str, name: str) -> list[str]:
    """Read where a virtual environment's interpreter comes from; nothing for a plain prefix."""
    try:
        text = Path(prefix, "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    match = re.search(r"^\s*home\s*=\s*(\S.*?)\s*$", text, re.MULTILINE)
    if not match:
        return []
    names = (name, "python3", "python")
    return [path for name in names if os.path.exists(path := os.path.join(match[1], name))][:1]


def _shebang(path: str) -> list[str]:
    """Read the interpreter of a script; nothing for a binary."""
    try:
        with open(path, "rb") as file:
            line = file.readline(4096)
    except OSError:
        return []
    words = line[2:].split() if line.startswith(b"#!") else []
    return [os.fsdecode(words[0])] if words and words[0].startswith(b"/") else []
