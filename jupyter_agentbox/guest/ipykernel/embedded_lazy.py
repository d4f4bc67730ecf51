# mypy: allow-untyped-calls
"""Import rarely needed modules of ipykernel only on first use. They are two fifths of a kernel's imports at start.

Placeholder modules stand for ``ipykernel.debugger``, which imports debugpy, and for the package ``jupyter_client``, of
whose modules ipykernel needs three. Each is replaced by the real module when an attribute is used. The placeholders
must be installed before ipykernel is imported.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from typing import Any

NAME, CLIENT = "ipykernel.debugger", "jupyter_client"
#: Debugger class of kernels that do not define their own.
DEBUGGER = f"{NAME}.Debugger"
#: Modules loaded with the debugger. They are hidden while the user steps, like all modules that a kernel loads at
#: start.
_PARTS = ("debugpy", "_pydev", "pydev")
_lock = threading.RLock()


class Placeholder(types.ModuleType):
    """Placeholder for the module, which can only tell whether a debugger is available."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self._is_debugpy_available = importlib.util.find_spec("debugpy") is not None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and sys.modules.get(NAME) is self:
            raise AttributeError(name)  # code that walks through all modules asks for these
        return getattr(load(), name)


def load() -> types.ModuleType:
    """Import ipykernel's own module in place of the placeholder."""
    with _lock:
        placeholder = sys.modules[NAME]
        if not isinstance(placeholder, Placeholder):
            return placeholder
        del sys.modules[NAME]
        try:
            return importlib.import_module(NAME)
        except BaseException:
            sys.modules[NAME] = placeholder
            raise


class Package(types.ModuleType):
    """``jupyter_client`` without the imports of its own ``__init__``. Its modules are found as usual."""

    def __init__(self, name: str, spec: ModuleSpec) -> None:
        super().__init__(name)
        self.__spec__, self.__loader__, self.__package__, self.__file__ = spec, spec.loader, name, spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        assert spec.loader is not None
        self._loader = spec.loader
        self._is_loading = False

    def __getattr__(self, name: str) -> Any:
        if name == "write_connection_file":  # the only name that ipykernel uses of the package itself
            return getattr(importlib.import_module(f"{self.__name__}.connect"), name)
        if not name.startswith("_") and importlib.util.find_spec(f"{self.__name__}.{name}"):
            # One module may ask for another while it is imported itself. Loading the package would import it once more.
            return importlib.import_module(f"{self.__name__}.{name}")
        is_asked_of_all = name.startswith("__") and name not in ("__all__", "__version__")
        with _lock:
            if self._is_loading or is_asked_of_all:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            if isinstance(self, Package):
                self._is_loading = True
                try:
                    self._loader.exec_module(self)
                finally:
                    self._is_loading = False
                self.__class__ = types.ModuleType  # type: ignore[assignment]
        return getattr(self, name)


class Debugger:
    """Placeholder that creates ipykernel's debugger on first use."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._arguments = args, kwargs
        self._real: Any = None
        self._is_loaded: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def _load(self) -> Any:
        with _lock:
            if self._real is None:
                args, kwargs = self._arguments
                self._real = load().Debugger(*args, **kwargs)
                loaded = [module for name, module in sys.modules.copy().items() if name.startswith(_PARTS)]
                self._real.kernel_modules += [file for module in loaded if (file := getattr(module, "__file__", None))]
                if self._loop is not None and self._is_loaded is not None:
                    self._loop.call_soon_threadsafe(self._is_loaded.set)
            return self._real

    async def handle_stopped_event(self) -> None:
        """Wait for the program to stop, repeatedly, but only after the debugger has been loaded."""
        if self._real is None:
            self._loop, self._is_loaded = asyncio.get_running_loop(), asyncio.Event()
            if self._real is None:  # it may have been loaded in the meantime
                await self._is_loaded.wait()
        await self._real.handle_stopped_event()


sys.modules.setdefault(NAME, Placeholder())
if found := importlib.util.find_spec(CLIENT):
    sys.modules.setdefault(CLIENT, Package(CLIENT, found))
