"""``jupyter agentbox serve``: serve the REST API alone, for agents and programs.

This is a Jupyter server with this package's extension and no other: no JupyterLab, no notebook pages, no terminals, no
host files. All kernels are sandboxed. Configuration files cannot override these restrictions.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from jupyter_server.serverapp import ServerApp
from tornado.httpclient import AsyncHTTPClient, HTTPError
from traitlets import Bool, Int, Unicode
from traitlets.config import Config

from jupyter_agentbox.errors import AgentboxError, InvalidRequest
from jupyter_agentbox.jupyter.kernelspecs import AgentboxKernelSpecManager
from jupyter_agentbox.policy.policy import Policy

from .base import Command, printable

EXTENSION = "jupyter_agentbox"
#: Timeout in seconds for the test call at start.
ANSWER_TIMEOUT = 120.0
#: Jupyter's own services that are loaded. None of them opens files of the host.
_SERVICES = ("api", "events", "kernels", "kernelspecs", "shutdown")


class ServeCommand(Command):
    """Serve sandboxes over REST, without JupyterLab or a browser, until Ctrl-C or SIGTERM.

    A new token is printed once, to standard output. Logs go to standard error and never contain the token.
    """

    name = "jupyter agentbox serve"
    description = __doc__ or ""
    examples = "jupyter agentbox serve\njupyter agentbox serve --port=8899 --token-file=token --keep-sandboxes"
    takes_all_settings = True
    ip = Unicode("127.0.0.1", help="Numeric address to listen on. Default: 127.0.0.1.").tag(config=True)
    port = Int(0, min=0, max=65535, help="Port to listen on. Default: a free one.").tag(config=True)
    token_file = Unicode(help="Write the token to this new file instead of printing it.").tag(config=True)
    remote = Bool(False, help="Permit an --ip that other machines can reach.").tag(config=True)
    keep_sandboxes = Bool(False, help="Keep sandboxes for Policy.lease_timeout when the server stops.").tag(config=True)
    json = Bool(False, help="Print the URL and token as one line of JSON.").tag(config=True)

    def run(self) -> int:
        """Serve until a signal arrives."""
        self._failure: AgentboxError | None = None
        self._check_address()
        # Its token is for programs, which never count as a person. Kernels read policy anew, in this process.
        Policy.is_attended = False
        policy = Policy(parent=self)
        root = policy.state_path / "served"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        token = secrets.token_urlsafe(32)
        if self.token_file:
            _write_token(Path(self.token_file), token)
        try:
            server = _Server(ours=self._settings(root, token), config=Config(self.config))
            try:
                server.initialize(argv=[])
            except Exception as error:
                self.log.debug("creating the server failed", exc_info=True)
                raise AgentboxError(f"the API cannot be served: {error}") from error
            self._check_loaded(server, token)
            server.on_listening = lambda: self._begin(server, token)
            server.start()
            if self._failure is not None:
                raise self._failure
        finally:
            if self.token_file:
                Path(self.token_file).unlink(missing_ok=True)
        if self.keep_sandboxes:
            message = (
                f"stopped; the sandboxes run for another {policy.lease_timeout:g} s (Policy.lease_timeout); "
                "if this command starts again within that time, it adopts them"
            )
        else:
            message = "stopped; the sandboxes have ended, except parked ones, which are on disk"
        print(message, file=sys.stderr)
        return 0

    def _check_loaded(self, server: _Server, token: str) -> None:
        """Raise AgentboxError if another setting keeps the server from serving the API, or weakens its restrictions."""
        if "agentbox" not in server.web_app.settings:
            note = server.web_app.settings.get("page_config_data", {}).get("agentboxNote")
            reason = note or f"the extension {EXTENSION} did not load; the log above says why"
            raise AgentboxError(f"the API cannot be served: {reason}")
        if server.identity_provider.token != token:
            raise AgentboxError("the API cannot be served: another setting replaces the server's token")
        if not isinstance(server.kernel_spec_manager, AgentboxKernelSpecManager):
            raise AgentboxError(
                "the API cannot be served: ServerApp.kernel_spec_manager_class is set to another class "
                f"({type(server.kernel_spec_manager).__name__}). Remove that setting"
            )

    async def _begin(self, server: _Server, token: str) -> None:
        """Call the API as a client would. Print URL and token if it responds; otherwise stop the server."""
        try:
            await self._ask(server, token, "sandboxes")
        except (AgentboxError, OSError, ValueError, HTTPError) as error:
            self._failure = AgentboxError(f"the API failed its startup check: {error}")
            server.stop()
            return
        self._print_address(self._url(server), token)
        with contextlib.suppress(AgentboxError, OSError, ValueError, HTTPError):
            for check in (await self._ask(server, token, "health"))["checks"]:
                if not check["is_ok"]:
                    print(f"{self.name}: degraded: {printable(check['message'])}", file=sys.stderr)

    async def _ask(self, server: _Server, token: str, path: str) -> dict[str, Any]:
        is_any = ipaddress.ip_address("127.0.0.1" if self.ip == "localhost" else self.ip).is_unspecified
        loopback = "[::1]" if ":" in self.ip else "127.0.0.1"
        url = f"http://{loopback}:{server.port}{server.base_url}" if is_any else self._url(server)
        answer = await AsyncHTTPClient(force_instance=True).fetch(
            f"{url}api/agentbox/{path}",
            headers={"Authorization": f"token {token}"},
            request_timeout=ANSWER_TIMEOUT,
            raise_error=False,
        )
        content = json.loads(answer.body or b"{}")
        if answer.code != 200:
            raise AgentboxError(f"status {answer.code}, {content.get('message', answer.reason)!s:.500}")
        return dict(content)

    def _check_address(self) -> None:
        # Only numeric addresses and localhost: names are not resolved.
        flags = 0 if self.ip == "localhost" else socket.AI_NUMERICHOST
        try:
            found = socket.getaddrinfo(self.ip, None, type=socket.SOCK_STREAM, flags=flags)
        except OSError:
            raise InvalidRequest(f"{self.ip!r:.100} is not an IP address such as 127.0.0.1", field="ip") from None
        is_local = all(ipaddress.ip_address(str(item[4][0]).partition("%")[0]).is_loopback for item in found)
        if not (is_local or self.remote):
            raise InvalidRequest(
                f"other machines can reach {self.ip}, and anyone with the token can run code here. Add --remote to "
                "permit this, and use a TLS proxy",
                field="ip",
            )

    def _settings(self, root: Path, token: str) -> Config:
        """Return the settings that override all configuration files."""
        identity = {"token": token, "hashed_password": ""}
        return Config(
            {
                "ServerApp": {
                    "ip": self.ip,
                    "port": self.port,
                    "port_retries": 0,
                    "sock": "",
                    "root_dir": str(root),
                    "open_browser": False,
                    "allow_root": True,  # no kernel runs with root's privileges
                    "allow_unauthenticated_access": False,
                    "answer_yes": True,
                    "default_url": "/agentbox/docs",
                    "extra_services": [],
                    "jpserver_extensions": {EXTENSION: True},
                    "reraise_server_extension_failures": True,
                    "kernel_spec_manager_class": "jupyter_agentbox.AgentboxKernelSpecManager",
                    "contents_manager_class": "jupyter_agentbox.AgentboxContentsManager",
                    "identity_provider_class": "jupyter_server.auth.identity.PasswordIdentityProvider",
                },
                "AgentboxKernelSpecManager": {"unsandboxed_kernelspecs": set()},
                "MultiKernelManager": {"default_kernel_name": "agentbox"},
                "IdentityProvider": identity,
                "PasswordIdentityProvider": identity,
                "AgentboxExtension": {"terminals": "off", "keep_sandboxes": self.keep_sandboxes},
            }
        )

    def _url(self, server: _Server) -> str:
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"http://{host}:{server.port}{server.base_url}"

    def _print_address(self, url: str, token: str) -> None:
        if self.json:
            print(json.dumps({"url": url, **({} if self.token_file else {"token": token})}))
        else:
            print(f"serving {url}api/agentbox")
            print(f"token in {self.token_file}" if self.token_file else f"token {token}")
        sys.stdout.flush()


class _Server(ServerApp):
    """Jupyter server restricted to this package's extension."""

    no_browser_open_file = True  # it would contain the token
    default_services = _SERVICES  # type: ignore[assignment]  # fewer than the base class has

    def __init__(self, *, ours: Config, **options: Any) -> None:
        self._ours = ours
        super().__init__(**options)
        self.on_listening: Callable[[], Awaitable[None]] | None = None

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Load the configuration files of Jupyter's server, and override them with this command's settings."""
        super().load_config_file(suppress_errors=suppress_errors)
        self.update_config(self._ours)

    def find_server_extensions(self) -> None:
        """Load only this package's extension, even if others are installed and enabled."""
        self.config.ServerApp.jpserver_extensions = {EXTENSION: True}
        self.jpserver_extensions = {EXTENSION: True}

    def init_signal(self) -> None:
        """Stop at the first signal, without asking for confirmation."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._signal_stop)

    def start_app(self) -> None:
        """Start listening, and call ``on_listening`` once the event loop runs."""
        super().start_app()
        if self.on_listening is not None:
            self.io_loop.add_callback(self.on_listening)


def _write_token(path: Path, token: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise InvalidRequest(f"the token cannot be written to {path}: {error.strerror}", field="token_file") from None
