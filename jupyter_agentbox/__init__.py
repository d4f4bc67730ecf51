"""Jupyter kernels in gVisor sandboxes, with egress allowed by host name.

Programs use :mod:`jupyter_agentbox.client`; a runtime of your own derives from :mod:`jupyter_agentbox.runtimes`, and is
tried by :mod:`jupyter_agentbox.testing`. ``docs/architecture.md`` says what each of the other modules is for.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"


def _jupyter_server_extension_points() -> list[dict[str, object]]:
    """Tell Jupyter's server what to load. Nothing is imported before it asks, as kernels' starts import the package."""
    module = "jupyter_agentbox.extension"
    return [{"module": module, "app": import_module(module).AgentboxExtension}]
