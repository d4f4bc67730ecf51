"""Jupyter kernels in gVisor sandboxes, with egress allowed by host name.

Programs use :mod:`jupyter_agentbox.client`; a runtime of your own derives from :mod:`jupyter_agentbox.runtimes`, and is
tried by :mod:`jupyter_agentbox.testing`. ``docs/architecture.md`` says what each of the other modules is for.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"


def _jupyter_server_extension_points() -> list[dict[str, object]]:
    """Tell Jupyter's server what to load. Nothing is imported before it asks, as kernels' starts import the package.

    Raises
    ------
    SystemExit
        The extension cannot be imported, and sandboxed kernels are enforced: the server would go on without either.
    """
    module = "jupyter_agentbox.jupyter.extension"
    try:
        return [{"module": module, "app": import_module(module).AgentboxExtension}]
    except Exception as error:
        from .policy.configfiles import find_enforcing_files

        if files := find_enforcing_files():
            raise SystemExit(
                f"jupyter_agentbox: the server does not start: its extension cannot be imported ({error!r}), and "
                f"AgentboxExtension.enforce in {', '.join(files)} allows sandboxed kernels only. Install the package "
                "again, or remove that setting"
            ) from error
        raise
