"""Give the sandbox's Python a pip if its environment has none, as in environments of uv.

Two files are written to the sandbox's own layer, before its first program starts: a module ``pip`` in the environment's
packages and a script ``pip`` beside its interpreter, so that no other Python's pip is found on PATH. At its first run,
the module replaces itself by the pip that comes with Python, which is a wheel: nothing is downloaded.

An environment in the work folder consists of the host's files. For it, both are in a directory of their own, which the
host has put on PATH and PYTHONPATH (``policy.project``).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

WORKSPACE = "/workspace"
#: Directory of the module for an environment in the work folder. That of the scripts is beneath it.
APART = "/usr/local/lib/agentbox-pip"
#: Directory of the wheels that come with Debian's Python.
_DEBIAN_WHEELS = "/usr/share/python-wheels"

#: The module. A package takes precedence over a module of the same name, so it is not run again.
_MODULE = '''\
"""Stand in for pip until its first run, which unpacks the pip that comes with Python."""

import contextlib, os, runpy, shutil, sys, tempfile, zipfile

WHEEL = {wheel!r}


def unpack():
    folder = os.path.dirname(os.path.abspath(__file__))
    staging = tempfile.mkdtemp(prefix=".pip-", dir=folder)
    try:
        with zipfile.ZipFile(WHEEL) as wheel:
            wheel.extractall(staging)
        for name in sorted(os.listdir(staging), reverse=True):  # the package itself last
            try:
                os.rename(os.path.join(staging, name), os.path.join(folder, name))
            except OSError:
                if not os.path.isdir(os.path.join(folder, name)):  # another run may have been faster
                    raise
        with contextlib.suppress(OSError):
            os.unlink(__file__)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


if __name__ == "__main__":
    if not WHEEL:
        sys.exit(
            "pip: not available: this environment contains no pip, and the sandbox no copy of it. Install pip into the "
            "environment outside of the sandbox"
        )
    unpack()
    sys.modules.pop("pip", None)
    sys.path_importer_cache.clear()
    runpy.run_module("pip", run_name="__main__", alter_sys=True)
'''


def provide(python: str, path: str) -> None:
    """Write the module and the scripts for an interpreter, unless its environment has them. Never fails.

    Parameters
    ----------
    python : str
        The interpreter: an absolute path, or a name to look up in `path`.
    path : str
        PATH of the programs inside.
    """
    try:
        _provide(python, path)
    except OSError:  # for example a read-only root: there, nothing can be installed anyway
        pass


def is_in_workspace(path: str) -> bool:
    """Return whether a path leads to the work folder, where the guest writes nothing."""
    return (os.path.realpath(path) + "/").startswith(f"{WORKSPACE}/")


def find_sites(python: str, path: str) -> list[str]:
    """Return the directories of an interpreter's packages, first the one to install to."""
    found = next((file for file in _candidates(python, path) if os.access(file, os.X_OK)), None)
    if found is None:
        return []
    prefix = os.path.dirname(os.path.dirname(found))
    version = _version_of(found, prefix)
    return list(_find_sites(prefix, version)) if version else []


def _provide(python: str, path: str) -> None:
    found = next((file for file in _candidates(python, path) if os.access(file, os.X_OK)), None)
    if found is None:
        return
    folder = os.path.dirname(found)
    prefix = os.path.dirname(folder)
    version = _version_of(found, prefix)
    if version is None:
        return
    if is_in_workspace(folder):
        if f"{APART}/bin" in path.split(":"):
            os.makedirs(f"{APART}/bin")
            os.chmod(APART, 0o777)  # where the user unpacks pip
            _write_module(APART, found, version)
            _write_scripts(f"{APART}/bin", found, version)
        return
    sites = list(_find_sites(prefix, version))
    if not sites:
        return
    if not any(os.path.exists(f"{site}/pip") for site in [*sites, *_find_shared_sites(prefix, version)]):
        _write_module(sites[0], found, version)
    _write_scripts(folder, found, version)


def _write_module(site: str, python: str, version: str) -> None:
    wheel = find_wheel(os.path.dirname(os.path.realpath(python)), version)
    _write(f"{site}/pip.py", _MODULE.format(wheel=wheel))


def _write_scripts(folder: str, python: str, version: str) -> None:
    quoted = python.replace("'", "'\\''")
    for name in ("pip", "pip3", f"pip{version}"):
        if not os.path.lexists(f"{folder}/{name}"):
            _write(f"{folder}/{name}", f"#!/bin/sh\nexec '{quoted}' -m pip \"$@\"\n", 0o777)


def _candidates(python: str, path: str) -> list[str]:
    return [python] if "/" in python else [f"{folder}/{python}" for folder in path.split(":") if folder[:1] == "/"]


def _version_of(python: str, prefix: str) -> str | None:
    """Return an interpreter's version, such as ``3.11``, from the name of its program or of its library folder."""
    name = os.path.basename(os.path.realpath(python)).removeprefix("python")
    if name.startswith("3.") and name[2:].isdigit():
        return name
    names = [name for name in _list(f"{prefix}/lib") if name.startswith("python3.") and name[8:].isdigit()]
    return names[0].removeprefix("python") if len(names) == 1 else None


def _find_sites(prefix: str, version: str) -> Iterator[str]:
    """Yield the directories of an environment's packages that exist, first the one to install to."""
    libraries = [f"{prefix}/lib/python{version}"]
    if prefix == "/usr":
        libraries = [f"/usr/local/lib/python{version}", *libraries, "/usr/lib/python3"]
    for library in libraries:
        for kind in ("dist-packages", "site-packages"):
            if os.path.isdir(f"{library}/{kind}") and not is_in_workspace(f"{library}/{kind}"):
                yield f"{library}/{kind}"


def _find_shared_sites(prefix: str, version: str) -> Iterator[str]:
    """Yield the package directories of the base Python that a virtual environment also uses."""
    try:
        with open(f"{prefix}/pyvenv.cfg", encoding="utf-8", errors="replace") as file:
            pairs = [line.partition("=")[::2] for line in file]
    except OSError:
        return
    values = {name.strip().lower(): value.strip() for name, value in pairs}
    if values.get("include-system-site-packages", "").lower() == "true" and values.get("home"):
        yield from _find_sites(os.path.dirname(values["home"]), version)


def find_wheel(folder: str, version: str) -> str:
    """Return the path of a wheel of pip; empty if there is none.

    Parameters
    ----------
    folder : str
        Directory of the interpreter, whose own wheel is preferred.
    version : str
        Version of the interpreter, such as ``3.11``.
    """
    own = os.path.dirname(os.__file__)
    for place in (
        f"{os.path.dirname(folder)}/lib/python{version}/ensurepip/_bundled",
        _DEBIAN_WHEELS,
        f"{own}/ensurepip/_bundled",
    ):
        for name in reversed(_list(place)):
            if name.startswith("pip-") and name.endswith(".whl"):
                return f"{place}/{name}"
    return ""


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _write(path: str, text: str, mode: int = 0o666) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)  # so that pip, which runs as the user, can replace it
