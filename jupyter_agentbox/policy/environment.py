"""Decide what a sandbox sees of the host's environment: the variables, and the mounts of the Python environment.

The functions have no side effects; ``policy.policy`` calls them. Variables follow an allow-list, because a server's
environment contains tokens and cloud keys: a variable is passed on only if it is named here or by the administrator.
Mounts are read-only and as narrow as an environment's prefix: never a home directory, a system directory or the
package's own state.
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

#: Directories that may contain certificate bundles. The curated root mounts them as well.
CERTIFICATE_DIRS = (
    "/etc/ssl/certs",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates/extracted",
    *SYSTEM_DIRS,
)

_LOCALE = re.compile(r"LANG|LANGUAGE|LC_[A-Z]+")
#: Harmless facts about the host that programs inside need to share with it.
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
#: Variables that every launch request may set: the notebook's path, which ipykernel uses.
_REQUEST_NAMES = frozenset({"JPY_SESSION_NAME"})
#: Variables that are never passed on. With this one, a kernel watches a process that does not exist inside, and exits.
_NEVER = frozenset({"JPY_PARENT_PID"})
_NAME = re.compile(r"[^=\0]+")
#: Files that, like folders whose name begins with a dot, exist in an environment only if it is in a project or a home.
_PRIVATE_FILE = re.compile(r"\.(git|env.*|netrc|pypirc|npmrc|git-credentials|pgpass|.*_history)")
#: gVisor does not report changes from outside, such as those of JupyterLab's editor, so programs that watch files must
#: look for changes: uvicorn and others by watchfiles, Streamlit, Vite and others by chokidar, webpack, TypeScript.
_POLLING = {
    "WATCHFILES_FORCE_POLLING": "true",
    "STREAMLIT_SERVER_FILE_WATCHER_TYPE": "poll",
    "CHOKIDAR_USEPOLLING": "true",
    "WATCHPACK_POLLING": "true",
    "TSC_WATCHFILE": "DynamicPriorityPolling",
    "TSC_WATCHDIRECTORY": "RecursiveDirectoryUsingDynamicPriorityPolling",
}


def kernel_environment(
    host: Mapping[str, str],
    *,
    limits: Limits,
    bin_dirs: Sequence[str] = (),
    is_visible: Callable[[str], bool] = lambda path: False,
    has_locale: Callable[[str], bool] = lambda name: True,
    passthrough: Iterable[str] = (),
    request: Mapping[str, str] | None = None,
    templates: Mapping[str, str] | None = None,
    profile: Mapping[str, str] | None = None,
    egress: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the complete environment of the processes inside.

    Later parts take precedence: fixed values, allow-listed host variables, the launch request's, the kernelspec's, the
    profile's, and last the proxy variables of the egress gate, so that no other proxy setting replaces them.

    Parameters
    ----------
    host : mapping
        The server's environment. Only locale, time zone, terminal, certificate bundles and `passthrough` are used.
    limits : Limits
        ``cpus`` limits the threads of numeric libraries, which otherwise count the host's processors.
    bin_dirs : sequence of str
        Directories inside that come first on PATH.
    is_visible : callable
        Whether a host path can be read inside. A certificate variable with another path is left out.
    has_locale : callable
        Whether a locale exists inside. Others become ``C.UTF-8``, because programs warn of them or fall back to ASCII.
    passthrough : iterable of str
        Names that the administrator passes on from the host or the launch request.
    request : mapping, optional
        The environment given to the launch call. Jupyter passes a copy of the server's own, so it is used only for
        ``JPY_SESSION_NAME``, `passthrough`, and ``KERNEL_*`` variables that differ from the host's.
    templates : mapping, optional
        The kernelspec's ``env``. ``${NAME}`` is replaced from the environment inside only: the kernelspec's author may
        set any variable there, but cannot read any of the host's.
    profile : mapping, optional
        The administrator's variables for this profile.
    egress : mapping, optional
        Proxy variables and the package clients' settings.

    Raises
    ------
    InvalidRequest
        A name or value of `templates` is not valid in an environment.
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
        **_POLLING,
        "OMP_NUM_THREADS": str(max(1, min(os.cpu_count() or 1, math.ceil(limits.cpus)))),
    }
    env.update((name, value) for name, value in host.items() if name in _HOST_NAMES or name == "LANGUAGE")
    for name, value in host.items():
        if name != "LANGUAGE" and _LOCALE.fullmatch(name):
            env[name] = value if not value or has_locale(value) else "C.UTF-8"
    if not any(env.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG")):
        env["LANG"] = "C.UTF-8"
    env.update((name, host[name]) for name in _CERTIFICATE_NAMES if host.get(name) and is_visible(host[name]))
    env.update((name, host[name]) for name in passthrough if name in host)
    for name, value in (request or {}).items():
        is_the_callers = name.startswith("KERNEL_") and host.get(name) != value
        if name in _REQUEST_NAMES or name in passthrough or is_the_callers:
            env[name] = value
    if notebook := env.get("JPY_SESSION_NAME"):
        env["JPY_SESSION_NAME"] = f"{WORKSPACE}/{os.path.basename(notebook)}"  # the path inside
    for name, template in (templates or {}).items():
        if not isinstance(template, str) or not _NAME.fullmatch(name) or "\0" in template:
            raise InvalidRequest(f"{name!r} in the kernelspec's env has an invalid name or value", field="env")
        env[name] = string.Template(template).safe_substitute(env)
    env.update(profile or {})
    env.update(egress or {})
    return {name: value for name, value in env.items() if name not in _NEVER}


def user_name() -> str:
    """Return the name of this user, or its number if it has no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def environment_mounts(
    executable: str | None, *, private: Sequence[Path] = (), resource_dir: Path | None = None
) -> tuple[Mount, ...]:
    """Return the read-only mounts that `executable` needs inside, at the same paths as on the host.

    A program in the ``bin`` of a Python environment (venv, conda, or an installation of Python) needs that whole
    environment, and the one from which it was created. Any other program is mounted alone, without its neighbors.
    Links and ``#!`` lines are followed, but only to executable files. The server's own base interpreter is always among
    the mounts, because the guest runs on it.

    Parameters
    ----------
    executable : str, optional
        Absolute path on the host, or a name to look up on PATH; None for the server's own interpreter.
    private : sequence of Path
        Directories that no mount may contain or be inside of, such as the package's state.
    resource_dir : Path, optional
        The kernelspec's own directory, because its argv may name files there.

    Returns
    -------
    tuple of Mount
        Sorted, and none inside another.

    Raises
    ------
    InvalidRequest
        The program does not exist.
    PolicyRefused
        A needed directory is too broad to mount, contains the package's own state, or is an environment that also
        contains unrelated files, such as a Git repository.
    """
    found = shutil.which(executable or sys.executable)
    if found is None:
        raise InvalidRequest(f"the kernel's program {executable!r} is not installed on this machine", field="argv")
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
    """Return whether a certificate bundle of the host can be read inside at the same path."""
    if root is not None:
        return (root / path.lstrip("/")).exists()
    shown = (*CERTIFICATE_DIRS, *(mount.target for mount in mounts if str(mount.source) == mount.target))
    return (
        os.path.exists(path) and is_beneath(os.path.abspath(path), shown) and is_beneath(os.path.realpath(path), shown)
    )


def user_packages(executable: str | None) -> str | None:
    """Return the directory of ``pip install --user`` for `executable` if that is the server's own interpreter, or None.

    It must be in PYTHONPATH inside, because the home directory is a different one there.
    """
    is_own = executable is None or os.path.realpath(shutil.which(executable) or "") == os.path.realpath(sys.executable)
    folder = site.getusersitepackages()
    return folder if is_own and site.ENABLE_USER_SITE and os.path.isdir(folder) else None


def bin_dirs(executable: str | None) -> tuple[str, ...]:
    """Return the directory of the kernel's program to add to PATH, or nothing if the system's PATH contains it."""
    directory = os.path.dirname(os.path.abspath(shutil.which(executable or sys.executable) or "/usr/bin/none"))
    return () if directory in ("/usr/local/bin", "/usr/bin", "/bin") else (directory,)


def _needs(path: str) -> Iterator[str]:
    """Yield the paths that a program needs to run: Python environments, and other programs on their own."""
    todo, seen = [path], set[str]()
    while todo and len(seen) < 32:  # bounds circular chains of links
        path = todo.pop()
        # A #! line may name any file, and the file that it names is mounted. Only executable files are followed.
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
    """Return whether a prefix is a Python environment, which is mounted whole, or refused if it must not be."""
    if any(os.path.exists(os.path.join(prefix, mark)) for mark in ("pyvenv.cfg", "conda-meta")):
        return True
    # Python finds its prefix by the same rule. A home may match too, after an installation with --prefix.
    real = os.path.realpath(prefix)
    is_shared = is_too_broad(real) or any(real == os.path.join(home, ".local") for home in homes())
    return not is_shared and any(
        glob(f"{glob_safe(prefix)}/{library}/os.py") for library in ("lib/python3*", "lib64/python3*", "lib/pypy3*")
    )


def _check_environment(prefix: str) -> None:
    """Refuse an environment that was created among other files: mounting it would expose a project and its secrets."""
    with os.scandir(prefix) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if (entry.name.startswith(".") and entry.is_dir()) or _PRIVATE_FILE.fullmatch(entry.name)
        )
    if names:
        raise PolicyRefused(
            f"Cannot mount the Python environment {prefix} in the sandbox: it also contains {names[0]}, which may be "
            f"private. Create the environment in a folder of its own, such as {prefix}/venv.",
            field="argv",
        )


def _base_interpreter(prefix: str, name: str) -> list[str]:
    """Return the interpreter from which a virtual environment was created; empty for a plain prefix."""
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
    """Return the interpreter of a script; empty for a binary."""
    try:
        with open(path, "rb") as file:
            line = file.readline(4096)
    except OSError:
        return []
    words = line[2:].split() if line.startswith(b"#!") else []
    return [os.fsdecode(words[0])] if words and words[0].startswith(b"/") else []
