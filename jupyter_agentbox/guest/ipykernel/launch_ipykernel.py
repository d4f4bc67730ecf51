"""Start ipykernel inside. The text is passed to ``python -c``, because user code cannot read the guest's directory.

Since Python 3.11, frames are stored in chunks of 16 KiB. Each call that crosses the end of a chunk maps memory, and its
return unmaps it. Both are cheap outside and expensive in gVisor, and a cell runs near the end of the first chunk: some
code took ten times as long on the kernel's main thread. A frame that declares a large stack makes Python allocate a
large chunk, of which only the used part costs memory.
"""

import linecache
import marshal
import os
import sys
import threading
import types
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


#: What ipykernel needs.
KERNEL_PACKAGES = (
    "ipykernel", "ipykernel_launcher", "IPython", "traitlets", "tornado", "zmq", "jupyter_client", "jupyter_core",
    "comm", "debugpy", "matplotlib_inline", "nest_asyncio", "packaging", "psutil", "dateutil", "six", "decorator",
    "jedi", "parso", "prompt_toolkit", "wcwidth", "pygments", "stack_data", "executing", "asttokens", "pure_eval",
    "pexpect", "ptyprocess", "platformdirs", "typing_extensions", "exceptiongroup", "ipython_pygments_lexers",
)  # fmt: skip


class ImportCache:
    """Finder for modules whose code the host has collected in one file, because opening many files is slow in gVisor.

    The modules otherwise look as if their files had been opened. Once the work folder is on the search path, the finder
    finds no more modules.
    """

    def __init__(self, content: bytes) -> None:
        self._modules: dict[str, tuple[str, int, int]] = {}
        self._path = sys.path[:]
        self._body = memoryview(content)
        if content:
            length = 8 + int.from_bytes(content[:8], "little")
            header = marshal.loads(self._body[8:length])
            self._body = self._body[length:]
            shown = [entry for entry in header["path"] if entry in self._path]
            is_own = header["python"] == (sys.version, sys.prefix, sys.flags.optimize)
            if is_own and shown == self._path and header["roots"].issubset(shown):
                self._modules = header["modules"]

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return the spec of a module without accessing its file, or None."""
        if name not in self._modules or sys.path != self._path:
            return None
        location, start, end = self._modules[name]
        loader: SourceFileLoader | ExtensionFileLoader = ExtensionFileLoader(name, location)
        if end > start:
            loader = CachedLoader(name, location)
            loader.cache = self
        return spec_from_file_location(name, location, loader=loader)

    def get_code(self, name: str) -> "Any":
        """Return the code of a module, or None if the cache has none."""
        _, start, end = self._modules.get(name, ("", 0, 0))
        return marshal.loads(self._body[start:end]) if end > start else None

    def close(self) -> None:
        """Stop finding modules, and free the cache."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._modules, self._body = {}, memoryview(b"")


class KernelPackages:
    """Finder for ipykernel and what it needs, in another environment of the same Python, after all other packages.

    Nothing else of that environment can be imported.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return the spec of a top-level module, or None."""
        return PathFinder.find_spec(name, [self._folder]) if name in KERNEL_PACKAGES else None


class CachedLoader(SourceFileLoader):
    """Loader that reverts to its base class once it has returned the code."""

    cache: ImportCache

    def get_code(self, fullname: str) -> "Any":
        cache = self.__dict__.pop("cache")
        self.__class__ = SourceFileLoader  # type: ignore[assignment]
        return cache.get_code(fullname) or self.get_code(fullname)


def load_embedded(names: "list[str]") -> ImportCache:
    """Create modules from the sources open from descriptor 4 on. Return the finder for other modules."""
    with open(4 + len(names), "rb", buffering=0) as file:
        cache = ImportCache(file.read())
    sys.meta_path.insert(0, cache)
    package = types.ModuleType("_agentbox")
    package.__path__ = []
    sys.modules[package.__name__] = package
    for fd, name in enumerate(names, 4):
        with open(fd, encoding="utf-8") as file:
            source = file.read()
        module = types.ModuleType(f"_agentbox.{name}")
        module.__package__ = package.__name__
        module.__file__ = f"<agentbox {name}>"
        sys.modules[module.__name__] = module
        linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
        exec(cache.get_code(module.__name__) or compile(source, module.__file__, "exec"), module.__dict__)
    return cache


def main() -> None:
    del sys.path[0]  # the work folder must not hide modules that the kernel imports; it adds it again later
    if packages := os.environ.pop("AGENTBOX_PACKAGES", ""):
        sys.meta_path.append(KernelPackages(packages))
    if names := os.environ.pop("AGENTBOX_EMBEDDED", ""):
        cache = load_embedded(names.split(","))
        from _agentbox.embedded import EmbeddedApp  # type: ignore[import-not-found]

        app = EmbeddedApp.instance()
        app.initialize()
        cache.close()
        app.start()
    else:
        from ipykernel.kernelapp import launch_new_instance

        launch_new_instance()


if sys.version_info >= (3, 11):
    main.__code__ = main.__code__.replace(co_stacksize=(1 << 17) + 1)
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    run.__code__ = run.__code__.replace(co_stacksize=(1 << 14) + 1)
main()
