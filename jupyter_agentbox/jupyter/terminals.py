"""Run Jupyter's own terminals in sandboxes: each runs ``jupyter agentbox shell`` on the folder that it is opened in.

On a server that starts only sandboxed kernels, a terminal on the host would be a way around the sandbox. :func:`guard`
prevents that when the server starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_server.serverapp import ServerApp
from jupyter_server_terminals.app import TerminalsExtensionApp
from jupyter_server_terminals.terminalmanager import TerminalManager
from tornado import web
from traitlets import Unicode

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, PolicyRefused
from jupyter_agentbox.linux import write_atomically
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.manager import load_runtime

from .kernelspecs import AgentboxKernelSpecManager

#: Fields allowed in a request for a terminal. Other fields would name a program of the host, or its environment.
_FIELDS = frozenset({"name", "cwd"})
_OFF = "terminals are turned off on this server (setting: AgentboxExtension.terminals)"
_LATE = (
    "terminals are turned off: this server allows sandboxed kernels only, but another terminal manager was created "
    "before this extension could replace it. Set TerminalsExtensionApp.terminal_manager_class to "
    "'jupyter_agentbox.jupyter.terminals.AgentboxTerminalManager'"
)


class AgentboxTerminalManager(TerminalManager):
    """Terminal manager that opens every terminal in a sandbox of its own, with the terminal's folder as work folder."""

    profile = Unicode(help="Profile of the sandboxes of terminals. If empty, ``Policy.default_profile``.").tag(
        config=True
    )

    def new_terminal(self, **kwargs: Any) -> Any:
        """Start a terminal. Whatever the request contains, only our own command is run.

        Raises
        ------
        tornado.web.HTTPError
            The request has unknown fields, its folder may not be mounted, or policy is malformed.
        """
        try:
            for field in kwargs.keys() - _FIELDS:
                raise InvalidRequest(
                    f"{str(field)[:100]!r} cannot be set for a sandboxed terminal; allowed: cwd, name", field=field
                )
            self._check_name(kwargs.get("name", "new"))
            folder = self._folder(kwargs.get("cwd"))
            policy = Policy(parent=self.parent)
            profile = policy.profile(self.profile or policy.default_profile)
            command = [sys.executable, "-m", "jupyter_agentbox.cli", "shell", "--from-server"]
            command += [f"--config={write_settings(policy, profile.runtime)}", f"--profile={profile.name}"]
        except AgentboxError as error:
            status = 400 if isinstance(error, InvalidRequest) else 403 if isinstance(error, PolicyRefused) else 503
            raise web.HTTPError(status, str(error)) from None
        # Python imports modules from its current directory, so never start it in one that sandboxes may write.
        return super().new_terminal(shell_command=[*command, str(folder)], cwd="/")

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"\w{1,100}", name) or name in self.terminals:
            raise InvalidRequest(
                f"terminal name {name!r:.100} is in use or invalid; use letters, digits and underscores", field="name"
            )

    def _folder(self, cwd: object) -> Path:
        """Return the folder to mount: the server's root directory, or one below it."""
        server: Any = self.parent
        root = Path(os.path.realpath(server.root_dir))
        if not cwd:
            return root
        folder, own = Path(os.path.realpath(str(cwd))), Path(os.path.realpath("."))
        if not folder.is_relative_to(root) and folder.is_relative_to(own):
            # Jupyter resolves a relative path in the server's current directory first, then in the root directory.
            folder = root / folder.relative_to(own)
        if not folder.is_relative_to(root) or not folder.is_dir():
            raise PolicyRefused(f"{folder} is not a folder in the server's root directory, {root}", field="cwd")
        return folder


def write_settings(policy: Policy, runtime_name: str) -> Path:
    """Write this process's effective settings to a file, for a process of the same user without our command line.

    Parameters
    ----------
    policy : Policy
    runtime_name : str
        The runtime whose settings are included.

    Returns
    -------
    Path
        A configuration file in the state directory, which only this user can enter. Equal settings have the same path.
    """
    runtime = load_runtime(runtime_name, config=policy.config)
    settings = {
        type(item).__name__: {name: getattr(item, name) for name in item.trait_names(config=True)}
        for item in (policy, runtime)
    }
    settings["Policy"]["state_dir"] = str(policy.state_path)
    settings[type(runtime).__name__].pop("state_dir", None)
    text = json.dumps(settings, sort_keys=True, default=list).encode()
    directory = policy.state_path / "servers"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    policy.state_path.chmod(0o700)
    path = directory / f"settings-{hashlib.sha256(text).hexdigest()[:16]}.json"
    write_atomically(path, text)
    return path


def _installs_by_default(app: Any) -> bool:
    """Return whether an app is JupyterLab's, with an extension manager that no configuration chose."""
    named = (app.config.get(kind.__name__, {}) for kind in type(app).__mro__) if app is not None else ()
    return hasattr(app, "extension_manager") and not any("extension_manager" in settings for settings in named)


def guard(server: ServerApp, choice: str) -> bool:
    """Make a server's terminals sandboxed, or turn them off. May be called again.

    On a server that starts only sandboxed kernels, JupyterLab cannot install extensions either, unless its
    configuration names an extension manager.

    Parameters
    ----------
    server : ServerApp
    choice : str
        ``auto``, ``sandboxed`` or ``off``; see the extension's setting.

    Returns
    -------
    bool
        Whether Jupyter's own terminals were replaced or turned off.
    """
    is_enforced = isinstance(server.kernel_spec_manager, AgentboxKernelSpecManager)
    if choice == "auto" and not is_enforced:
        return False
    made = server.web_app.settings.get("terminal_manager")
    if choice == "off":
        server.terminals_enabled = False
        if made is not None:
            _close(made, _OFF)
        return True
    for name, point in server.extension_manager.extension_points.items():
        if is_enforced and _installs_by_default(point.app):
            point.app.extension_manager = "readonly"  # JupyterLab's own installs packages on the host
        if isinstance(point.app, TerminalsExtensionApp):
            point.app.terminal_manager_class = AgentboxTerminalManager
            server.log.debug("jupyter_agentbox: terminals of %s are sandboxed", name)
    if made is not None and not isinstance(made, AgentboxTerminalManager):
        server.log.error("jupyter_agentbox: %s", _LATE)
        _close(made, _LATE)
    return True


def _close(manager: Any, sentence: str) -> None:
    """Stop a manager that is already in use from creating terminals."""

    def refuse(**kwargs: Any) -> Any:
        raise web.HTTPError(403, sentence)

    refused: Callable[..., Any] = refuse
    manager.new_terminal = refused
    manager.is_closed = True


def is_closed(manager: Any) -> bool:
    """Return whether :func:`guard` has stopped a manager from creating terminals."""
    return getattr(manager, "is_closed", False) is True
