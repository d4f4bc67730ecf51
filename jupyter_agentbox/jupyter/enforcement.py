"""Enforce sandboxed kernels: configure a Jupyter server before it builds its managers, and check what it then uses.

From ``jupyter_server_config.d`` Jupyter Server reads only ``jpserver_extensions``, so settings for every server are
made here. :func:`link` sets the classes when the extension is linked, before the server creates instances of them.
:func:`find_overrides` then examines the running server, because a command line, a configuration file or another
extension may have set other classes. :func:`describe` reports the result to ``jupyter agentbox doctor`` and the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.contents.filemanager import FileContentsManager
from traitlets.config import Config

from jupyter_agentbox.models.service import ServerInfo
from jupyter_agentbox.policy import configfiles

from .contents import AgentboxContentsManager, guard_state, name_class
from .kernelspecs import OWN_NAME, PROVISIONER_NAME, AgentboxKernelSpecManager, is_sandboxed
from .terminals import AgentboxTerminalManager, is_closed

SETTING = "AgentboxExtension.enforce"
#: Server classes with settings in ``jupyter_agentbox_config``, in addition to those that Policy reads itself.
_SECTIONS = ("AgentboxExtension", "AgentboxKernelSpecManager", "AgentboxTerminalManager", "AgentboxContentsManager")
_PROVISIONER = "jupyter_agentbox.jupyter.provisioner:AgentboxProvisioner"


def read_settings(server: ServerApp) -> Config:
    """Return the settings for our own classes from ``jupyter_agentbox_config``. The server's own take precedence.

    Raises
    ------
    InvalidConfig
        A file cannot be read.
    """
    found = configfiles.file_config()
    settings = Config({name: found[name] for name in _SECTIONS if name in found})
    settings.merge(Config({name: server.config[name] for name in _SECTIONS if name in server.config}))
    return settings


def find_sources(server: ServerApp) -> list[str]:
    """Return the files and server settings that enforce sandboxed kernels on a server. Any one of them is enough."""
    found = configfiles.find_enforcing_files()
    own = server.config.AgentboxExtension.get("enforce", False) if "AgentboxExtension" in server.config else False
    if own is not False and not found:
        found.append(find_origin(server, "enforce"))
    return found


def link(server: ServerApp, *, is_enforced: bool) -> None:
    """Set the classes of a server that has not instantiated them yet. Sets only traits, so configuration overrides it.

    Parameters
    ----------
    server : ServerApp
    is_enforced : bool
        Whether to set the kernelspec manager too. The contents manager is set unless another one was chosen.
    """
    default = type(server).contents_manager_class.default_value
    if "contents_manager_class" not in server.config.ServerApp and server.contents_manager_class is default:
        server.contents_manager_class = AgentboxContentsManager
    if is_enforced and "kernel_spec_manager_class" not in server.config.ServerApp:
        server.kernel_spec_manager_class = AgentboxKernelSpecManager


def choose_default_kernel(server: ServerApp) -> None:
    """Set a sandboxed default kernel on a server that offers only sandboxed kernels."""
    kernels: Any = server.kernel_manager
    if isinstance(server.kernel_spec_manager, AgentboxKernelSpecManager):
        offered = server.kernel_spec_manager.find_kernel_specs()
        if kernels.default_kernel_name not in offered:
            kernels.default_kernel_name = OWN_NAME


def find_overrides(server: ServerApp) -> list[str]:
    """Return a sentence for each part of a server that violates enforcement, with the origin of its setting."""
    found = []

    def complain(what: str, thing: object, trait: str, wanted: type) -> None:
        found.append(
            f"{what} is {name_class(thing)}, set by {find_origin(server, trait)}, and must be {name_class(wanted)}"
        )

    if server.gateway_config.gateway_enabled:
        found.append(
            f"kernels run on the gateway {server.gateway_config.url}, where this server cannot enforce sandboxes"
        )
    for manager in {
        id(item): item
        for item in (server.kernel_spec_manager, getattr(server.kernel_manager, "kernel_spec_manager", None))
    }.values():
        if not isinstance(manager, AgentboxKernelSpecManager):
            complain("the kernelspec manager", manager, "kernel_spec_manager_class", AgentboxKernelSpecManager)
    if not isinstance(server.contents_manager, AgentboxContentsManager):
        complain("the contents manager", server.contents_manager, "contents_manager_class", AgentboxContentsManager)
    terminals = server.web_app.settings.get("terminal_manager")
    if _describe_terminals(server, terminals) == "host" and terminals is not None:
        complain("the terminal manager", terminals, "terminal_manager_class", AgentboxTerminalManager)
    provisioner = (
        KernelProvisionerFactory.instance(parent=server).get_provisioner_entries().get(PROVISIONER_NAME, "none")
    )
    if provisioner != _PROVISIONER:
        found.append(f"the kernel provisioner {PROVISIONER_NAME} is {provisioner}, set by another package")
    for name, app in _lab_apps(server):
        if app.extension_manager != "readonly":
            origin = find_origin(server, "extension_manager")
            found.append(
                f"the extension manager of {name} is {app.extension_manager!r}, set by {origin}, and must be 'readonly'"
            )
    return found


def describe(server: ServerApp, sources: list[str]) -> ServerInfo:
    """Return a description of what a running server uses, with any problems."""
    manager: Any = server.kernel_spec_manager
    problems = find_overrides(server) if sources else []
    host: list[str] = []
    if not server.gateway_config.gateway_enabled:
        specs = manager.get_all_specs()
        host = sorted(name for name in specs if not _runs_inside(manager, name))
        if OWN_NAME in host:
            problems.append(
                f"{name_class(manager)} drops the kernel provisioner of {OWN_NAME!r}, so these kernels do not start; "
                f"it is set by {find_origin(server, 'kernel_spec_manager_class')}"
            )
            host.remove(OWN_NAME)  # its command refuses to run there
        if isinstance(manager, AgentboxKernelSpecManager) and not specs:
            problems.append(
                "no kernel is offered; `jupyter agentbox setup` installs one, and if "
                f"KernelSpecManager.allowed_kernelspecs is set, it must contain {OWN_NAME!r}"
            )
    unguarded = guard_state(server.contents_manager)
    is_guarded = unguarded is None or not isinstance(server.contents_manager, FileContentsManager)
    if not is_guarded:
        problems.append(f"{unguarded}; it is set by {find_origin(server, 'contents_manager_class')}")
    if sources and (lenient := configfiles.find_lenient_files()):
        problems.append(f"{SETTING} is false in {', '.join(lenient)}, without effect: {', '.join(sources)} enforces it")
    return ServerInfo(
        enforced_by=sources,
        kernel_spec_manager=name_class(manager),
        kernel_manager=name_class(server.kernel_manager),
        contents_manager=name_class(server.contents_manager),
        is_guarded=is_guarded,
        terminals=_describe_terminals(server, server.web_app.settings.get("terminal_manager")),
        default_kernel=str(getattr(server.kernel_manager, "default_kernel_name", "")),
        host_kernels=host,
        extension_manager=next((str(app.extension_manager) for _, app in _lab_apps(server)), ""),
        problems=problems,
    )


def find_origin(server: ServerApp, trait: str) -> str:
    """Return the origin of a trait's value: the command line, a configuration file, or else another extension."""
    apps = [server, *(point.app for point in server.extension_manager.extension_points.values() if point.app)]
    if any(trait in section for app in apps for section in app.cli_config.values()):
        return "the command line"
    files = dict.fromkeys(path for app in apps for path in app.loaded_config_files)
    for path in reversed(files):
        try:
            if trait in Path(path).read_text(errors="replace"):
                return str(path)
        except OSError:
            continue
    return "another extension or package"


def _runs_inside(manager: Any, name: str) -> bool:
    try:
        return is_sandboxed(manager.get_kernel_spec(name), manager.parent)
    except NoSuchKernel:
        return True  # it was just removed, so it cannot start


def _describe_terminals(server: ServerApp, manager: Any) -> str:
    if manager is None or is_closed(manager) or not server.terminals_enabled:
        return "off"
    return "sandboxed" if isinstance(manager, AgentboxTerminalManager) else "host"


def _lab_apps(server: ServerApp) -> list[tuple[str, Any]]:
    points = server.extension_manager.extension_points.items()
    return [(name, point.app) for name, point in points if hasattr(point.app, "extension_manager")]
