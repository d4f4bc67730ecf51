"""Find the kernels of other languages that are installed in a tree, by their kernelspecs, as Jupyter does."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from . import tree
from .values import KernelEntry, Recipe

#: Directories in which Jupyter looks on every system.
_PLACES = ("/usr/local/share/jupyter/kernels", "/usr/share/jupyter/kernels")
#: Directories of packages in a library directory of Python.
_SITES = ("site-packages", "dist-packages")
_PATH = "/usr/local/bin:/usr/bin:/bin"
_MAX_FILE, _MAX_KERNELS = 64 * 1024, 50
#: Additional languages that a kernel of the given language runs.
_ALSO = {"typescript": ("javascript",)}


def add_kernels(recipe: Recipe, root: Path) -> Recipe:
    """Return a recipe with a tree's kernels added for languages that the recipe has no kernel for.

    Python kernels are left out, because a sandbox starts ipykernel itself; see :func:`add_python`. So are invalid
    kernelspecs.
    """
    known = {"python", *(language.lower() for kernel in recipe.kernels for language in kernel.languages)}
    names = {kernel.name for kernel in recipe.kernels}
    found: list[KernelEntry] = []
    for kernel in _find(root):
        if kernel.name not in names and not known & {name.lower() for name in kernel.languages}:
            found.append(kernel)
            names.add(kernel.name)
    return msgspec.structs.replace(recipe, kernels=[*recipe.kernels, *found][:_MAX_KERNELS])


def add_python(recipe: Recipe, root: Path) -> Recipe:
    """Return a recipe with a Python kernel added, named after the image, if its ``python3`` has ipykernel.

    Recipes list their Python kernel themselves. Does nothing if this one does.
    """
    if any("python" in map(str.lower, kernel.languages) for kernel in recipe.kernels) or not _has_ipykernel(
        root, recipe.env.get("PATH", _PATH)
    ):
        return recipe
    taken = {kernel.name for kernel in recipe.kernels}
    kernel = KernelEntry(
        recipe.name if recipe.name not in taken else f"{recipe.name[:55]}-python",
        ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        f"Python ({recipe.name})",
        ["python"],
    )
    return msgspec.structs.replace(recipe, kernels=[kernel, *recipe.kernels][:_MAX_KERNELS])


def _has_ipykernel(root: Path, path: str) -> bool:
    """Return whether the first ``python3`` on a PATH has ipykernel, judged by the folders of its prefix."""
    for folder in path.split(":"):
        if folder.startswith("/") and tree.find_inside(root, f"{folder}/python3") is not None:
            prefix = os.path.dirname(folder.rstrip("/"))
            libraries = [f"{prefix}/lib"] if prefix != "/usr" else ["/usr/lib", "/usr/local/lib"]
            for library in libraries:
                found = tree.find_inside(root, library)
                names = sorted(os.listdir(found))[:1000] if found is not None and found.is_dir() else []
                for name in names:
                    places = [f"{library}/{name}/{kind}/ipykernel/__init__.py" for kind in _SITES]
                    if name.startswith("python3") and any(tree.find_inside(root, place) for place in places):
                        return True
            return False
    return False


def _find(root: Path) -> Sequence[KernelEntry]:
    found = []
    for place in _PLACES:
        folder = tree.find_inside(root, place)
        for name in sorted(os.listdir(folder))[:1000] if folder is not None and folder.is_dir() else ():
            file = tree.find_inside(root, f"{place}/{name}/kernel.json")
            if file is None or not file.is_file() or file.stat().st_size > _MAX_FILE:
                continue
            try:
                found.append(_read(json.loads(file.read_bytes()), name, f"{place}/{name}"))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # msgspec's error is a ValueError
                continue
    return found


def _read(spec: Any, name: str, place: str) -> KernelEntry:
    argv = [argument.replace("{resource_dir}", place) for argument in spec["argv"]]
    if not any("{connection_file}" in argument for argument in argv):
        raise ValueError("argv does not contain {connection_file}")
    if variables := [f"{key}={value}" for key, value in (spec.get("env") or {}).items()]:
        argv = ["/usr/bin/env", *variables, *argv]
    language = spec["language"]
    entry = {
        "name": name.lower(),
        "argv": argv,
        "display_name": spec.get("display_name", name),
        "languages": [language, *_ALSO.get(language.lower(), ())],
        "interrupt_mode": spec.get("interrupt_mode", "signal"),
    }
    return msgspec.convert(entry, KernelEntry)
