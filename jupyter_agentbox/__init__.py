"""Jupyter kernels in gVisor sandboxes, with egress allowed by host name.

The names below are the public ones, for programs and for settings; each is imported when it is first used.
``docs/architecture.md`` is a tour of the rest by folder.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .errors import AgentboxError
    from .jupyter.contents import AgentboxContentsManager
    from .jupyter.extension import AgentboxExtension
    from .jupyter.kernelspecs import AgentboxKernelSpecManager
    from .jupyter.provisioner import AgentboxProvisioner
    from .jupyter.terminals import AgentboxTerminalManager
    from .policy.policy import Policy
    from .runtimes import Runtime
    from .runtimes.docker.runtime import DockerRuncRuntime, DockerRuntime
    from .runtimes.runsc.runtime import RunscRuntime
    from .spec import SandboxSpec

__version__ = "0.1.0"

__all__ = [
    "AgentboxContentsManager",
    "AgentboxError",
    "AgentboxExtension",
    "AgentboxKernelSpecManager",
    "AgentboxProvisioner",
    "AgentboxTerminalManager",
    "AsyncClient",
    "Client",
    "DockerRuncRuntime",
    "DockerRuntime",
    "Policy",
    "RunscRuntime",
    "Runtime",
    "SandboxSpec",
]

_MODULES = {
    "AgentboxContentsManager": "jupyter.contents",
    "AgentboxError": "errors",
    "AgentboxExtension": "jupyter.extension",
    "AgentboxKernelSpecManager": "jupyter.kernelspecs",
    "AgentboxProvisioner": "jupyter.provisioner",
    "AgentboxTerminalManager": "jupyter.terminals",
    "AsyncClient": "client",
    "Client": "client",
    "DockerRuncRuntime": "runtimes.docker.runtime",
    "DockerRuntime": "runtimes.docker.runtime",
    "Policy": "policy.policy",
    "RunscRuntime": "runtimes.runsc.runtime",
    "Runtime": "runtimes",
    "SandboxSpec": "spec",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _jupyter_server_extension_points() -> list[dict[str, object]]:
    """Return the server extension for Jupyter Server. It is imported here, because kernels also import this module.

    Raises
    ------
    SystemExit
        The extension cannot be imported, although sandboxed kernels are enforced. The server would run without both.
    """
    module = "jupyter_agentbox.jupyter.extension"
    try:
        return [{"module": module, "app": import_module(module).AgentboxExtension}]
    except Exception as error:
        from .policy.configfiles import find_enforcing_files

        if files := find_enforcing_files():
            raise SystemExit(
                f"jupyter_agentbox: the server does not start: its extension cannot be imported ({error!r}), and "
                f"AgentboxExtension.enforce in {', '.join(files)} allows only sandboxed kernels. Reinstall the "
                "package, or remove that setting"
            ) from error
        raise
