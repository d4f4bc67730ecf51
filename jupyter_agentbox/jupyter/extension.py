"""Define the Jupyter server extension, which builds the service and registers the request handlers."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import zmq
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from jupyter_server.extension.application import ExtensionApp
from jupyter_server.serverapp import ServerApp
from jupyter_server.utils import ensure_async
from tornado import web
from tornado.ioloop import IOLoop
from traitlets import Bool, Enum

from jupyter_agentbox.api import ROOT, BrokenHandler, make_all
from jupyter_agentbox.api.base import RESOURCE, TokenMixin
from jupyter_agentbox.api.mcp.handler import close_endpoints
from jupyter_agentbox.api.redaction import redact_logs
from jupyter_agentbox.api.service import Service
from jupyter_agentbox.errors import AgentboxError, InvalidConfig
from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.kernels.warm.starts import WarmStarts
from jupyter_agentbox.models.service import ServerInfo
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.recipes import settings_file
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Lock
from jupyter_agentbox.service import startup_cleanup
from jupyter_agentbox.service.live.magics import CellCommandRunner
from jupyter_agentbox.service.live.parking import Parker
from jupyter_agentbox.service.service import SandboxService

from . import enforcement
from .activity import KernelActivity
from .adoption import adopt_kernels, keep_sessions, leave_kernels, start_again, start_restored, wait_for_restarts
from .observe import Observer
from .terminals import guard

#: Seconds that a server's shutdown waits for its sandboxes to end. The sweeper removes the remaining ones.
STOP_TIMEOUT = 10.0
#: Maximum number of open descriptors, where the system allows it: a kernel uses two dozen, a parked one a dozen.
MAX_DESCRIPTORS = 65536


class AgentboxExtension(ExtensionApp):
    """Server extension for sandboxes over REST, in addition to those of the server's kernels."""

    name = "jupyter_agentbox"
    load_other_extensions = True

    enforce = Bool(
        False,
        help="""Offer and start sandboxed kernels only, open terminals in sandboxes, prevent JupyterLab from installing
        extensions, and prevent the file browser from following links out of its root directory. If another setting
        conflicts with this, the server does not start, and logs the origin of that setting. ``jupyter agentbox setup
        --enforce`` writes this setting to the environment's ``jupyter_agentbox_config.json``. If one configuration file
        sets it to true, no other file can turn it off.""",
    ).tag(config=True)

    keep_sandboxes = Bool(
        False,
        help="""Keep sandboxes running when the server shuts down, including the kernels of notebooks. A server that
        starts with the same root directory within ``Policy.lease_timeout`` adopts them under their ids. By default,
        sandboxes end when the server shuts down, as Jupyter's own kernels do. Parked sandboxes and snapshots are on
        disk and are always kept. If the server crashes or is killed, its sandboxes are always kept for
        ``Policy.lease_timeout``.""",
    ).tag(config=True)

    terminals = Enum(
        ("auto", "sandboxed", "off"),
        default_value="auto",
        help="""Where Jupyter's own terminals run. ``auto``: each in its own sandbox if the server offers sandboxed
        kernels only, otherwise on the host, as without this package. ``sandboxed``: always in a sandbox. ``off``:
        terminals are disabled.""",
    ).tag(config=True)

    def _link_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """Set the server's classes, before the server creates instances of them."""
        self.serverapp = serverapp
        self._enforced_by = enforcement.find_sources(serverapp)
        try:
            super()._link_jupyter_server_extension(serverapp)
            self._enforced_by = enforcement.find_sources(serverapp)  # the extension's own files may set it too
            enforcement.link(serverapp, is_enforced=bool(self._enforced_by))
            settings = enforcement.read_settings(serverapp)
            serverapp.update_config(settings)
            self.update_config(settings)
        except InvalidConfig as error:  # each call reports the error, because policy cannot be read either
            serverapp.log.error("jupyter_agentbox: %s", error)
        except Exception as error:  # otherwise the server would run without the extension
            if not self._enforced_by:
                raise
            self._refuse_start(f"jupyter_agentbox failed to load: {error!r}")

    def initialize(self) -> None:  # type: ignore[override]
        """Initialize the extension, unless the server's configuration violates enforcement."""
        try:
            self._refuse_overrides()
            super().initialize()  # type: ignore[no-untyped-call]
        except Exception as error:  # otherwise the server would run without the extension
            if not self._enforced_by:
                raise
            self._refuse_start(f"jupyter_agentbox failed to load: {error!r}")

    async def _start_jupyter_server_extension(self, serverapp: ServerApp) -> None:
        """Check the server again when all extensions are loaded, and log what it uses."""
        guard(serverapp, self.terminals)
        try:
            info = enforcement.describe(serverapp, self._enforced_by)
            overrides = enforcement.find_overrides(serverapp) if self._enforced_by else []
        except Exception as error:
            if not self._enforced_by:
                raise
            overrides = [f"the server cannot be examined: {error!r}"]
        if overrides:
            await self.stop_extension()
            self._refuse_start("; ".join(overrides))
        self.log.info(
            "jupyter_agentbox: %s; kernelspecs by %s, files by %s, terminals: %s, default kernel: %s",
            f"sandboxed kernels only ({', '.join(info.enforced_by)})"
            if info.enforced_by
            else "sandboxed kernels are not enforced",
            info.kernel_spec_manager,
            info.contents_manager,
            info.terminals,
            info.default_kernel,
        )
        if info.enforced_by and info.host_kernels:
            self.log.warning(
                "jupyter_agentbox: kernels on the host (AgentboxKernelSpecManager.unsandboxed_kernelspecs): %s",
                ", ".join(info.host_kernels),
            )
        for problem in info.problems:
            self.log.warning("jupyter_agentbox: %s", problem)

    def _refuse_overrides(self) -> None:
        assert self.serverapp is not None
        guard(self.serverapp, self.terminals)
        if self._enforced_by and (overrides := enforcement.find_overrides(self.serverapp)):
            self._refuse_start("; ".join(overrides))

    def _refuse_start(self, reason: str) -> None:
        assert self.serverapp is not None
        self.log.critical(
            "jupyter_agentbox: the server does not start: %s. %s in %s allows sandboxed kernels only. Remove the"
            " conflicting setting, or AgentboxExtension.enforce",
            reason,
            enforcement.SETTING,
            ", ".join(self._enforced_by),
        )
        self.serverapp.exit(1)

    def initialize_settings(self) -> None:
        """Build the service for the handlers. If its configuration is invalid, each call reports the error.

        The server starts in either case.
        """
        assert self.serverapp is not None
        redact_logs(self.serverapp.log)
        self._service: Service | None = None
        self._failure: Exception | None = None
        self._list: Lock | None = None
        # Known to the page without a request, so that it sends no requests to a server without this extension.
        page = self.serverapp.web_app.settings.setdefault("page_config_data", {})
        page.update(agentbox="failed", agentboxNote="")
        self._observer: Observer | None = None
        enforcement.choose_default_kernel(self.serverapp)
        try:
            policy = Policy(parent=self.serverapp)
            sandboxes = SandboxService(policy)
            gateway_url = self._gateway_url()
            service = Service(sandboxes, gateway_url)
        except Exception as error:  # the server also works without this extension
            self.log.error(
                "jupyter_agentbox is not available: %s", error, exc_info=not isinstance(error, AgentboxError)
            )
            page["agentboxNote"], self._failure = str(error), error
            return
        WarmStarts.is_keeping = gateway_url is None
        if gateway_url is not None:
            self.log.warning(
                "jupyter_agentbox: kernels run on the gateway %s and are not available to the sandboxes of this server",
                gateway_url,
            )
        self._service = self.settings["agentbox"] = service
        # Not atexit, because no thread can be started at that point. Threading's own callbacks run earlier, last first.
        threading._register_atexit(self._release_at_exit)  # type: ignore[attr-defined]
        page.update(agentbox="here" if gateway_url is None else "gateway", agentboxNote=gateway_url or "")
        page.update(agentboxSettings="" if self._enforced_by else settings_file())
        if gateway_url is None:
            raise_limits(self.serverapp.kernel_manager.context)
            wait_for_restarts(self.serverapp.kernel_manager)
            self._service.snapshots.start_kernel = partial(start_restored, self.serverapp)
            self._service.parker.start()
            sandboxes.start_kernel = partial(start_again, self.serverapp)
            sandboxes.grants.find_notebook = partial(find_notebook, self.serverapp)
        if gateway_url is None:
            loop: Any = IOLoop.current()
            activity = KernelActivity(self.serverapp.kernel_manager, loop.asyncio_loop)
            parker = self._service.parker
            sandboxes.registry.on_use = activity.used
            parker.on_parked, parker.on_woken = activity.parked, activity.woken
            CellCommandRunner.share(policy, CellCommandRunner(self._service.snapshots, sandboxes, loop.asyncio_loop))
        self._observer = Observer(sandboxes, self.serverapp.event_logger)
        if gateway_url is None:
            self._list = keep_sessions(self.serverapp, policy)
            self._adopt_kernels(policy, self._service.parker)

    def _adopt_kernels(self, policy: Policy, parker: Parker) -> None:
        """Adopt an earlier server's kernels before the first request asks for them."""

        async def adopt_all() -> None:
            assert self.serverapp is not None
            if found := await adopt_kernels(self.serverapp, policy, parker):
                self.log.info("jupyter_agentbox: adopted %d kernels: %s", len(found), ", ".join(found))

        self._before_serving(adopt_all, "adopting the kernels of an earlier server")

    def _gateway_url(self) -> str | None:
        from jupyter_server.gateway.gateway_client import GatewayClient

        client = GatewayClient.instance(parent=self.serverapp)
        return str(client.url) if client.gateway_enabled else None

    def initialize_handlers(self) -> None:
        """Register the routes."""
        assert self.serverapp is not None
        about = {"describe": partial(enforcement.describe, self.serverapp, self._enforced_by)}
        self.handlers.append((f"/{ROOT}/server", ServerHandler, about))
        if self._service is None:
            self.handlers.append((rf"/{ROOT}(?:/.*)?", BrokenHandler, {"error": self._failure}))
            return
        self._service.root = self.serverapp.base_url.rstrip("/") + "/api/agentbox"
        self.handlers.extend(make_all("/"))
        self._before_serving(self._clear, "cleaning up after an earlier server")
        self._before_serving(self._recover, "adopting the sandboxes of an earlier server")

    def _before_serving(self, work: Callable[[], Awaitable[None]], what: str) -> None:
        """Run `work` before the first request, or soon if the server is already running. A failure is logged."""

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # the server starts without it
                is_known = isinstance(error, (AgentboxError, OSError))
                self.log.error("jupyter_agentbox: %s failed: %s", what, error, exc_info=not is_known)

        loop = IOLoop.current()
        if loop.asyncio_loop.is_running():  # type: ignore[attr-defined]
            loop.add_callback(guarded)
        else:
            loop.run_sync(guarded)

    async def _clear(self) -> None:
        assert self._service is not None
        await asyncio.to_thread(startup_cleanup.clear, self._service.sandboxes.policy.state_path)

    async def _recover(self) -> None:
        assert self._service is not None
        found = await self._service.sandboxes.recover()
        if found:
            self.log.info("jupyter_agentbox: adopted %d sandboxes: %s", len(found), ", ".join(found))

    def current_activity(self) -> dict[str, Any] | None:
        """Return the sandboxes with calls in progress, so that the server does not count as idle."""
        if self._service is None:
            return None
        busy = self._service.sandboxes.registry.busy()
        return {name: {"name": name} for name in busy} or None

    async def stop_extension(self) -> None:
        """End the sandboxes, or leave them to a later server. Parked sandboxes stay on disk."""
        if self._service is not None:
            # Before anything is awaited: if the shutdown is slow or interrupted, no later server may adopt them.
            self._end_leases(self._service)
            if self._observer is not None:
                self._observer.close()
            assert self.serverapp is not None
            await close_endpoints(self.serverapp.web_app.settings)
            await self._release(self._service)

    async def _release(self, service: Service) -> None:
        """End this server's sandboxes, except those to leave to a later server. May be awaited on any event loop."""
        self._service = None
        await leave_kernels(parked_only=not self.keep_sandboxes)
        await WarmStarts.aclose_all()
        await Runner.shared().aclose()
        service.parker.close()
        close = service.sandboxes.aclose(is_ended=not self.keep_sandboxes)
        try:
            await asyncio.wait_for(close, STOP_TIMEOUT)
        except asyncio.TimeoutError:
            self.log.warning("jupyter_agentbox: some sandboxes did not end in time; the sweeper removes them")
        if self._list is not None:
            self._list.release()

    def _release_at_exit(self) -> None:
        """Do the same if the server exits without calling :meth:`stop_extension`, as at SIGINT without a terminal."""
        if self._service is not None:
            self._end_leases(self._service)
            with suppress(Exception):
                asyncio.run(self._release(self._service))

    def _end_leases(self, service: Service) -> None:
        if not self.keep_sandboxes:
            for manager in SandboxManager.all_shared(service.sandboxes.policy.state_path):
                manager.end_leases()


class ServerHandler(TokenMixin, APIHandler):
    """Handler that reports what the running server uses, for ``jupyter agentbox doctor``.

    It also works if the service did not start.
    """

    auth_resource = RESOURCE
    _track_activity = False

    def initialize(self, describe: Callable[[], ServerInfo]) -> None:
        self._describe = describe

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Send a :class:`~jupyter_agentbox.models.service.ServerInfo`."""
        await self.finish(msgspec.json.encode(await asyncio.to_thread(self._describe)))


async def find_notebook(server: ServerApp, kernel_id: str) -> str:
    """Return the path on the host of the notebook that uses a kernel; empty if none does."""
    sessions: list[dict[str, Any]] = await ensure_async(server.session_manager.list_sessions())
    for session in sessions:
        if session["kernel"]["id"] == kernel_id:
            return os.path.join(server.root_dir, str(session["path"]).lstrip("/"))
    return ""


def raise_limits(context: zmq.Context[Any]) -> None:
    """Raise the limits on sockets and descriptors, because Jupyter holds some of each for every parked kernel.

    There may be thousands of them. ZeroMQ allows 1,023 sockets unless the limit is raised before the first one is
    created. Jupyter itself requests no more than 4,096 descriptors.
    """
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
