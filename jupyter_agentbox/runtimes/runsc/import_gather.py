"""Gathers what ipykernel imports as it starts into one file: ``python -I -B importgather.py GUEST OUTPUT``.

A program of its own, run by :mod:`.import_cache` on the host, in the server's own environment: it imports what a bare
kernel there does. The file has eight bytes of length, a header and the code of the modules, both by :mod:`marshal`.
"""

from __future__ import annotations

import contextlib
import importlib
import marshal
import os
import sys
import types
from importlib.machinery import ExtensionFileLoader, SourceFileLoader

#: What is imported on the way to the first cell, and by no import statement at the top of a module.
LATE = (
    "tornado.platform.asyncio",
    "IPython.core.oinspect",
    "IPython.core.completerlib",
    "IPython.core.debugger",
    "sqlite3",
)


def make_stamp(path: str) -> str:
    """Return what differs when a file was changed, or something was put into a folder or taken out of it."""
    try:
        found = os.stat(path)
    except OSError:
        return "none"
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def gather(guest: str) -> bytes:
    """Import all, and return the file's content."""
    path = sys.path[:]
    package = types.ModuleType("_agentbox")
    package.__path__ = [guest]
    sys.modules[package.__name__] = package
    importlib.import_module("_agentbox.embedded")
    embedded = sorted(name.partition(".")[2] for name in sys.modules if name.startswith("_agentbox."))
    for name in LATE:
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
