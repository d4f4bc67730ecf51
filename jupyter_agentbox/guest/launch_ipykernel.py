"""Starts ipykernel inside; its text is passed to ``python -c``, since user code cannot read the guest's directory.

Since Python 3.11 frames lie in chunks of 16 KiB, and each call over the end of one maps memory which its return unmaps.
Both cost little outside and much in gVisor, and a cell runs about where the first chunk ends: some code took ten
times as long on the kernel's main thread. A frame that claims a large stack makes Python take a large chunk, of which
only what is used costs memory.
"""

import linecache
import os
import sys
import threading
import types

#: In the order of their descriptors, from 4 on.
EMBEDDED = ("fifos", "embedded_lazy", "embedded_claim", "embedded_streams", "embedded_shells", "embedded")


def load_embedded() -> None:
    """Make modules of the sources that PID 1 left open."""
    package = types.ModuleType("_agentbox")
    package.__path__ = []
    sys.modules[package.__name__] = package
    for fd, name in enumerate(EMBEDDED, 4):
        with open(fd, encoding="utf-8") as file:
            source = file.read()
        module = types.ModuleType(f"_agentbox.{name}")
        module.__package__ = package.__name__
        module.__file__ = f"<agentbox {name}>"
        sys.modules[module.__name__] = module
        linecache.cache[module.__file__] = (len(source), None, source.splitlines(True), module.__file__)
        exec(compile(source, module.__file__, "exec"), module.__dict__)


def main() -> None:
    del sys.path[0]  # the work folder must not hide modules that the kernel imports; it adds it again later
    if os.environ.pop("AGENTBOX_DRIVER", "") == "embedded":
        load_embedded()
        from _agentbox.embedded import launch_new_instance  # type: ignore[import-not-found]
    else:
        from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()


if sys.version_info >= (3, 11):
    main.__code__ = main.__code__.replace(co_stacksize=(1 << 17) + 1)
    run = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    run.__code__ = run.__code__.replace(co_stacksize=(1 << 14) + 1)
main()
