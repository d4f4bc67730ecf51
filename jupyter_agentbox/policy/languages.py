"""Find the kernels of other languages on the host, for sandboxes whose root is a view of the host.

An image lists its own kernels. Python's kernel, ipykernel, is always available.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.spec import KernelCommand

PYTHON = "python"
#: Language of a file's code, by its suffix.
SUFFIXES = {
    ".py": PYTHON, ".sh": "bash", ".r": "r", ".ts": "typescript", ".mts": "typescript", ".js": "javascript",
    ".mjs": "javascript", ".cjs": "javascript",
}  # fmt: skip
#: Commands of each language other than Python: to run a file or standard input (`-`), code, and a prompt.
_COMMANDS = {
    "bash": (("/bin/sh",), ("/bin/sh", "-c"), ("/bin/bash",)),
    "r": (("Rscript",), ("Rscript", "-e"), ("R", "--quiet", "--no-save")),
    "typescript": (("deno", "run", "--allow-all"), ("deno", "eval", "--ext=ts"), ("deno", "repl", "--allow-all")),
    "javascript": (("node",), ("node", "-e"), ("node",)),
}
#: Recipe of the package whose image has a language or package manager that is not Python's.
IMAGES = {"r": "r", "typescript": "javascript", "javascript": "javascript", "npm": "javascript", "bash": "base"}
#: Directories of programs, and of R packages, in every curated root.
_PROGRAMS = ("/usr/local/bin", "/usr/bin")
_R_LIBRARIES = ("/usr/local/lib/R/site-library", "/usr/lib/R/site-library", "/usr/lib/R/library")


def find_kernels(python: str, root: Path = Path("/")) -> tuple[KernelCommand, ...]:
    """Return the kernels that the host has.

    Parameters
    ----------
    python : str
        Absolute path of the sandbox's Python. Its environment may contain ``bash_kernel``.
    root : Path
        Root of the host; a different directory in tests only.
    """
    found = []
    argv: tuple[str, ...]
    if has_module(python, "bash_kernel"):
        argv = (python, "-m", "bash_kernel", "-f", "{connection_file}")
        found.append(KernelCommand("bash", argv, ("bash",)))
    if (deno := _find_program("deno", root)) is not None:
        argv = (deno, "jupyter", "--kernel", "--conn", "{connection_file}")
        found.append(KernelCommand("deno", argv, ("typescript", "javascript"), "message"))
    r = _find_program("R", root)
    if r is not None and any((root / path.lstrip("/") / "IRkernel").is_dir() for path in _R_LIBRARIES):
        argv = (r, "--slave", "-e", "IRkernel::main()", "--args", "{connection_file}")
        found.append(KernelCommand("r", argv, ("R",)))
    return tuple(found)


def has_module(python: str, module: str) -> bool:
    """Return whether an interpreter's environment has, or may have, a package. Only looks at folders, runs nothing."""
    prefix = os.path.dirname(os.path.dirname(python))
    with contextlib.suppress(OSError):
        settings = Path(prefix, "pyvenv.cfg").read_text(encoding="utf-8", errors="replace")
        if re.search(r"^include-system-site-packages\s*=\s*true", settings, re.MULTILINE | re.IGNORECASE):
            return True  # or it may have it
    return bool(find_module(prefix, module))


def is_kernels_python(executable: str) -> bool:
    """Return whether a program is the interpreter of an environment that has, or may have, ipykernel."""
    is_python = re.fullmatch(r"(python|pypy)[0-9.]*", os.path.basename(executable)) and os.path.isabs(executable)
    return bool(is_python) and has_module(executable, "ipykernel")


def find_module(prefix: str, module: str) -> list[str]:
    """Return the paths of a package's ``__init__.py`` files in an environment."""
    places = (f"{glob_safe(prefix)}/lib/python3*/site-packages", f"{glob_safe(prefix)}/lib/python3/dist-packages",
              f"{glob_safe(prefix)}/local/lib/python3*/dist-packages")  # fmt: skip
    return [path for place in places for path in glob(f"{place}/{module}/__init__.py")]


def glob_safe(path: str) -> str:
    """Return a path with all glob characters escaped."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def find_language(kernels: Sequence[KernelCommand], language: str) -> KernelCommand | None:
    """Return the first kernel that runs a language. The name is not case-sensitive."""
    wanted = language.lower()
    return next((kernel for kernel in kernels if wanted in (name.lower() for name in kernel.languages)), None)


def list_languages(kernels: Sequence[KernelCommand]) -> tuple[str, ...]:
    """Return the names of all languages, Python first."""
    return tuple(dict.fromkeys((PYTHON, *(name.lower() for kernel in kernels for name in kernel.languages))))


@dataclass(frozen=True)
class LanguageCommands:
    """The commands of a language's interpreter inside: for a file, for code in an argument, and for a prompt."""

    file: tuple[str, ...]
    code: tuple[str, ...]
    prompt: tuple[str, ...]


def find_commands(language: str, python: str) -> LanguageCommands:
    """Return the commands of a language, whose name is not case-sensitive. Raises InvalidRequest.

    Parameters
    ----------
    language : str
    python : str
        Interpreter of the sandbox's Python.
    """
    name = language.lower()
    if name == PYTHON:
        return LanguageCommands((python,), (python, "-c"), (python,))
    if name not in _COMMANDS:
        known = ", ".join((PYTHON, *_COMMANDS))
        raise InvalidRequest(f"language {language!r:.60} is not supported here; use one of {known}", field="language")
    return LanguageCommands(*_COMMANDS[name])


def suggest_image(name: str) -> str:
    """Return a sentence that names an image with a language or package manager; empty if no recipe has it."""
    image = IMAGES.get(name.lower())
    return f'Create the sandbox with image="{image}"; `jupyter agentbox image build {image}` builds it' if image else ""


def _find_program(name: str, root: Path) -> str | None:
    for folder in _PROGRAMS:
        if os.access(root / folder.lstrip("/") / name, os.X_OK):
            return f"{folder}/{name}"
    return None
