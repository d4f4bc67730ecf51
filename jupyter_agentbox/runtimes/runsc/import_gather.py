"""Collect the modules that ipykernel imports at startup in one file: ``python -I -B import_gather.py GUEST OUTPUT``.

:mod:`.import_cache` runs this program on the host, in the server's own environment, so that it imports what a bare
kernel imports there. The file contains an eight-byte length, a header and the modules' code, both as :mod:`marshal`.
"""

from __future__ import annotations

import contextlib
import importlib
import marshal
import os
import sys
import types
from importlib.machinery import ExtensionFileLoader, SourceFileLoader

#: Modules imported before the first cell completes, but not by an import statement at the top of a module.
LAZY_IMPORTS = (
    "tornado.platform.asyncio",
    "IPython.core.oinspect",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "sqlite3",
)


def make_stamp(path: str) -> str:
    """Return a stamp that differs after a file changes, or after an entry is added to or removed from a folder."""
    try:
        found = os.stat(path)
    except OSError:
        return "none"
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def gather(guest: str) -> bytes:
    """Import all modules, and return the content of the file."""
    path = sys.path[:]
    package = types.ModuleType("_agentbox")
    package.__path__ = [guest]
    sys.modules[package.__name__] = package
    importlib.import_module("_agentbox.embedded")
    embedded = sorted(name.partition(".")[2] for name in sys.modules if name.startswith("_agentbox."))
    for name in LAZY_IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    modules: dict[str, tuple[str, int, int]] = {}
    files, roots = {*path, os.path.abspath(__file__)}, set()
    body = bytearray()

    def add(name: str, location: str, code: types.CodeType | None) -> None:
        start = len(body)
        if code is not None:
            body.extend(marshal.dumps(code))
        modules[name] = (location, start, len(body))
        folder = os.path.dirname(location)
        files.update((location, folder))
        roots.add(os.path.dirname(folder) if os.path.basename(location).startswith("__init__.") else folder)

    for name, module in sorted(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.startswith("_agentbox") or spec is None or spec.name != name or not spec.origin:
            continue
        if type(spec.loader) is SourceFileLoader:
            add(name, spec.origin, spec.loader.get_code(name))
        elif type(spec.loader) is ExtensionFileLoader:
            add(name, spec.origin, None)
    for name in embedded:
        location = f"{guest}/{name}.py"
        with open(location, encoding="utf-8") as file:
            add(f"_agentbox.{name}", location, compile(file.read(), f"<agentbox {name}>", "exec"))
    maker = {"python": (sys.version, sys.prefix, sys.flags.optimize), "path": path, "roots": roots.intersection(path)}
    stamps = {name: make_stamp(name) for name in files}
    header = marshal.dumps({**maker, "stamps": stamps, "modules": modules})
    return len(header).to_bytes(8, "little") + header + bytes(body)


def main() -> None:
    """Write the file."""
    guest, output = sys.argv[1:]
    content = gather(guest)
    with open(output, "xb") as file:
        file.write(content)


if __name__ == "__main__":
    main()
