"""Provision Jupyter kernels in sandboxes, one sandbox after another for each kernel id.

All Jupyter programs call the provisioner: JupyterLab, nbclient, papermill, Kernel Gateway, the console. They use
several event loops, including loops that do not run between two calls. No object here may therefore belong to one of
their loops: a :class:`~jupyter_agentbox.kernels.sandboxed_kernel.SandboxedKernel` does all work on the link thread.

A kernelspec is not trusted with policy, because anyone may be its author and a user's own shadows an administrator's.
Its stanza is a request, which :class:`~jupyter_agentbox.policy.policy.Policy` allows to narrow a profile only. The
provisioner has no settings of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import secrets
import signal
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from jupyter_core.utils import ensure_async
from jupyter_server.utils import to_os_path
from tornado.web import HTTPError

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, PolicyRefused
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.kernels.warm.starts import WarmStarts
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.project import find_relative
from jupyter_agentbox.policy.renewal import keep_hosts, reapply_policy
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.service.consent import ConsentWatch
from jupyter_agentbox.service.live.magics import install as install_magics
from jupyter_agentbox.spec import WORKSPACE, Cause, End, SandboxSpec

from .kernelspecs import check_folder, real_argv
from .log_errors import shorten

#: Seconds between two polls of :meth:`AgentboxProvisioner.wait`.
WAIT_INTERVAL = 0.02
#: Name of the folder that a user whose notebook lies in a home directory is offered for it.
SUGGESTED_FOLDER = "notebooks"
_TEMPLATE = re.compile(r"\{([A-Za-z0-9_]+)\}")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")

#: Returns the spec of a sandbox with this work folder, or with a private one.
Resolve = Callable[[Path | None], SandboxSpec]


class AgentboxProvisioner(KernelProvisionerBase):
    """Kernel provisioner that runs one kernel id in gVisor.

    Parameters
    ----------
    kernel_id, kernel_spec, parent
        From Jupyter's factory; ``parent`` is the KernelManager.
    **request
        The ``config`` of the kernelspec's stanza: the name of a profile, and keys that narrow it.

    Raises
    ------
    InvalidRequest
        The stanza has a key that would set an attribute of this object.
    """

    def __init__(self, *, kernel_id: Any = None, kernel_spec: Any = None, parent: Any = None, **request: Any) -> None:
        # The factory's keyword arguments could set any trait and any inherited attribute, so none is passed on.
        super().__init__(kernel_id=kernel_id, kernel_spec=kernel_spec, parent=parent)
        self._request = request
        self._policy: Policy | None = None
        self._spec: SandboxSpec | None = None
        self._sandboxed: SandboxedKernel | None = None
        self._is_running = self._is_watched = False
        #: Arguments of Jupyter's last start, which it repeats at a restart.
        self._launch: Mapping[str, Any] = {}
        #: Sandbox that an earlier server left running under this kernel id.
        self._orphan: Record | None = None
        #: Notice for the kernel's first client.
        self._notice = ""
        self._releaser: weakref.finalize[..., Any] | None = None

    # Start

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Resolve the sandbox's spec before anything is started. Called by ``KernelManager.pre_start_kernel``.

        Raises
        ------
        InvalidRequest, PolicyRefused
            Policy does not allow the kernelspec's request.
        """
        shorten(self.log)
        self._refuse_encryption(kwargs)
        spec = self.kernel_spec
        argv = [*real_argv(spec.argv), *kwargs.pop("extra_arguments", [])]
        if not argv:
            raise InvalidRequest(f"kernelspec {spec.display_name!r} has no argv", field="argv")
        executable = resolve_program(argv[0])
        # Presets query package clients for their configuration, which is slow the first time.
        policy = self._policy = await asyncio.to_thread(Policy, parent=self.parent)
        before = self._sandboxed.spec if self._sandboxed is not None else None
        is_same = kwargs.get("cwd") == self._launch.get("cwd")
        self._launch = dict(kwargs)
        if before is not None:
            place = await self._follow_notebook(before) if is_same else None
            try:
                self._spec = await asyncio.to_thread(self._resolve, policy, place, before)
            except AgentboxError as error:
                assert self._sandboxed is not None
                await LinkThread.instance().run(self._sandboxed.refuse(f"the kernel was not restarted: {error}"))
                raise
        elif (existing := await self._find_existing_state(policy)) is not None:
            self._spec = existing
        else:
            self._spec = await asyncio.to_thread(self._resolve, policy, None, None)
        if self._spec.root is None:
            folder = self._spec.workspace
            is_own = executable == sys.executable or (folder is not None and find_relative(folder, executable))
            argv[0] = self._spec.python if is_own else executable
        self._make_sandboxed(policy, self._spec)
        kwargs["env"] = dict(self._spec.env)
        kwargs["cmd"] = _expand(argv, {**kwargs, "resource_dir": spec.resource_dir, "prefix": sys.prefix})
        return kwargs

    def _resolve(self, policy: Policy, place: SandboxSpec | None, before: SandboxSpec | None) -> SandboxSpec:
        """Return the spec of a new sandbox. Blocks.

        Parameters
        ----------
        policy : Policy
        place : SandboxSpec, optional
            Spec whose folder and profile are kept, and its environment if Jupyter gives none: a server that took the
            kernel over does not know them.
        before : SandboxSpec, optional
            Spec of the sandbox that is replaced. Code inside can force a restart too, so a restart does not grant a
            host again that was revoked.
        """
        spec, env = self.kernel_spec, self._launch.get("env")
        request = self._request
        # The notebook may have been renamed since Jupyter named it.
        notebook = (before.notebook if before is not None else "") or str((env or {}).get("JPY_SESSION_NAME", ""))
        if place is not None:
            request = {**request, "profile": place.profile}
            if env is None:
                host = [name for name in policy.env_passthrough if name in os.environ]
                env = {name: value for name, value in place.env.items() if name not in host}

        def resolve(folder: Path | None) -> SandboxSpec:
            found = policy.resolve(
                request,
                workspace=folder,
                executable=resolve_program(spec.argv[0]),
                resource_dir=spec.resource_dir or None,
                kernelspec_env=spec.env,
                launch_env=env,
                kernel_id=self.kernel_id or "",
                notebook=notebook,
            )
            return dataclasses.replace(
                policy.with_folders(found),
                kernel_name=getattr(self.parent, "kernel_name", ""),
                origin=self._root_directory,
            )

        if place is not None:
            found = self._resolve_same_folder(policy, resolve, place.workspace)
        elif self._launch.get("cwd") is None and not isinstance(self._kernels, MultiKernelManager):
            found = self._resolve_own_folder(resolve)
        else:
            found = self._resolve_given_folder(policy, resolve, self._launch.get("cwd"), is_restart=before is not None)
        if place is not None and found.workspace is None:
            found = dataclasses.replace(
                found, workspace_notice=place.workspace_notice, suggested_folder=place.suggested_folder
            )
        return found if before is None else keep_hosts(policy, found, before)

    @property
    def _kernels(self) -> Any:
        return getattr(self.parent, "parent", None)

    @property
    def _root_directory(self) -> str:
        return str(getattr(self._kernels, "root_dir", ""))

    async def _follow_notebook(self, before: SandboxSpec) -> SandboxSpec:
        """Return the previous spec, with the notebook's current folder if the previous one no longer exists.

        JupyterLab tells the server when it renames or moves an open notebook or a folder that contains one. Policy is
        asked about the folder as at a first start.
        """
        sessions = getattr(getattr(self._kernels, "parent", None), "session_manager", None)
        if before.workspace is None or before.workspace.is_dir() or sessions is None or not self._root_directory:
            return before
        with contextlib.suppress(HTTPError):  # the kernel has no session
            session = await ensure_async(sessions.get_session(kernel_id=self.kernel_id))
            folder = Path(to_os_path(session["path"], self._root_directory)).parent
            if folder.is_dir():
                self.log.info("kernel %s: %s no longer exists, so it uses %s", self.kernel_id, before.workspace, folder)
                return dataclasses.replace(before, workspace=folder)
        return before

    def _resolve_same_folder(self, policy: Policy, resolve: Resolve, folder: Path | None) -> SandboxSpec:
        """Resolve with the previous sandbox's work folder. A different folder would look empty, and files be lost."""
        if folder is None:
            return resolve(None)
        if not folder.is_dir():
            raise InvalidRequest(
                f"the work folder {folder} was renamed, moved or deleted. Restore it and restart the kernel, or shut "
                "down the kernel and start a new one from the notebook's current folder",
                field="cwd",
            )
        if not policy.allowed_workspaces:
            check_folder(self.parent, folder)
        found = resolve(folder)
        if found.workspace is None:
            raise PolicyRefused(
                f"profile {found.profile!r} no longer mounts the notebook's folder, {folder}. Shut down the kernel and "
                "start a new one, which gets a private folder",
                field="cwd",
                setting=f"Policy.profiles[{found.profile!r}]['workspace']",
            )
        return found

    def _resolve_given_folder(self, policy: Policy, resolve: Resolve, cwd: Any, *, is_restart: bool) -> SandboxSpec:
        """Resolve with the folder that Jupyter names.

        At a first start, a private folder replaces one that does not exist. On a server, where the user sees the
        notice, it also replaces one that may not be a work folder, such as a home directory.
        """
        if not cwd:
            return resolve(None)
        folder = Path(os.path.abspath(os.path.expanduser(cwd)))
        if not folder.is_dir():
            sentence = f"the work folder {folder} does not exist"
            if is_restart:
                raise InvalidRequest(f"{sentence}. Create it, or choose another folder", field="cwd")
            self._notice = (
                f"{sentence}, so the kernel uses a private folder, which is deleted with the kernel. To keep files, "
                "create the work folder and start a new kernel"
            )
            self.log.warning("kernel %s: %s", self.kernel_id, self._notice)
            return resolve(None)
        if not policy.allowed_workspaces:
            check_folder(self.parent, folder)
        try:
            return resolve(folder)
        except PolicyRefused as error:
            if is_restart or error.field != "workspace" or not isinstance(self._kernels, MultiKernelManager):
                raise
            refusal = str(error)
        self._notice = f"{refusal}. The kernel uses a private folder, which is deleted with the kernel"
        self.log.warning("kernel %s: %s", self.kernel_id, self._notice)
        return dataclasses.replace(
            resolve(None),
            workspace_notice=refusal,
            suggested_folder=SUGGESTED_FOLDER if policy.may_use(folder / SUGGESTED_FOLDER) else "",
        )

    def _resolve_own_folder(self, resolve: Resolve) -> SandboxSpec:
        """Resolve with the current directory, for programs such as papermill and the console, which name no folder.

        The folder was not chosen explicitly, so a private one replaces it where policy does not allow it. A server's
        kernels without a folder always get a private one, because no user works in the server's current directory.
        """
        try:
            return resolve(Path.cwd())
        except (AgentboxError, FileNotFoundError) as error:
            if isinstance(error, AgentboxError) and error.field != "workspace":
                raise
            self.log.warning("The kernel uses a private work folder, which is deleted with it: %s", error)
            return resolve(None)

    async def _find_existing_state(self, policy: Policy) -> SandboxSpec | None:
        """Return the spec of an existing state of this kernel id: a snapshot to restore, or an earlier server's kernel.

        The earlier server may have left the kernel running or parked. Return None if no such state exists.

        Raises
        ------
        AgentboxError
            Policy no longer allows the running sandbox. It was ended.
        """
        kernel_id = self.kernel_id or ""
        if (restoration := SandboxedKernel.restorations.get(kernel_id)) is not None:
            return dataclasses.replace(
                restoration.spec,
                kernel_id=kernel_id,
                kernel_name=getattr(self.parent, "kernel_name", ""),
                origin=self._root_directory,
            )
        if self._root_directory:
            manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
            for record in await asyncio.to_thread(manager.orphans):
                label = record.spec.kernel_id, record.spec.origin
                if label == (kernel_id, self._root_directory) and record.main_kernel is not None:
                    self._orphan = record
                    try:
                        return await asyncio.to_thread(
                            reapply_policy, policy, record.spec, owner=record.spec.owner, is_running=True
                        )
                    except AgentboxError as error:
                        await manager.refuse(record, error)
                        raise
        parked = SandboxedKernel.waiting.get(kernel_id)
        return parked.spec if parked is not None else None

    def _refuse_encryption(self, kwargs: dict[str, Any]) -> None:
        wanted = kwargs.pop("transport_encryption", None) or getattr(self.parent, "transport_encryption", "disabled")
        if str(wanted).lower() == "required":
            raise InvalidRequest(
                "transport_encryption is 'required', but sandboxed kernels do not support it: their endpoints are "
                "UNIX sockets that only this user can open. Set KernelManager.transport_encryption to 'auto'",
                field="transport_encryption",
            )

    def _make_sandboxed(self, policy: Policy, spec: SandboxSpec) -> None:
        if self._sandboxed is not None:
            return
        session = getattr(self.parent, "session", None)
        manager = SandboxManager.shared(policy.state_path, spec.runtime, config=policy.config)
        sandboxed = self._sandboxed = SandboxedKernel(
            manager,
            key=session.key if session is not None else secrets.token_hex(16).encode(),
            signature_scheme=session.signature_scheme if session is not None else "hmac-sha256",
            log=self.log,
            warm=WarmStarts.shared(manager, policy),
        )
        sandboxed.language = (self.kernel_spec.language or "python").lower()
        install_magics(sandboxed, policy)
        ConsentWatch.start(policy)
        # After a failed automatic restart, Jupyter drops the provisioner without a final call.
        self._releaser = weakref.finalize(self, sandboxed.release_later)
        self._releaser.atexit = False

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the sandbox and its kernel. Called by ``KernelManager.launch_kernel``.

        Raises
        ------
        AgentboxError
            The kernel did not start. Nothing of it remains.
        """
        if self._sandboxed is None or self._spec is None:
            raise InvalidRequest("launch_kernel was called before pre_launch")
        info: Any = None
        if self._sandboxed.sandbox is None and self._sandboxed.parked is None:
            info = (
                await self._restore(self._sandboxed)
                or await self._adopt(self._sandboxed)
                or await self._take_parked(self._sandboxed)
            )
            if info is None and (retained := self._sandboxed.take_retained(self._spec.kernel_id)) is not None:
                assert self._policy is not None
                self._spec = await asyncio.to_thread(keep_hosts, self._policy, self._spec, retained.spec)
        self._sandboxed.first_notice, self._notice = self._notice, ""
        if info is None:
            info = await LinkThread.instance().run(self._sandboxed.start(self._spec, cmd))
        self._is_running = True
        self.connection_info = info
        return self.connection_info

    async def post_launch(self, **kwargs: Any) -> None:
        """Register removal of the sandbox for when no automatic restart follows: Jupyter makes no call in that case.

        A private workspace is kept for a time, so that a user can restart the kernel with it.
        """
        if self._sandboxed is not None and not self._is_watched and self.parent is not None:
            self._is_watched = True
            assert self._policy is not None
            self.parent.add_restart_callback(partial(self._sandboxed.retire_later, self._policy.keep_ended_for), "dead")

    async def _restore(self, sandboxed: SandboxedKernel) -> dict[str, Any] | None:
        """Restore a snapshot, if this kernel is to be a fork."""
        assert self._spec is not None
        found = SandboxedKernel.restorations.pop(self._spec.kernel_id, None)
        if found is None:
            return None
        found = dataclasses.replace(found, spec=self._spec)
        return await LinkThread.instance().run(sandboxed.restore(found, lambda sandbox: None))

    async def _adopt(self, sandboxed: SandboxedKernel) -> dict[str, Any] | None:
        """Adopt the kernel with this id that an earlier server with the same root directory left running, if any."""
        assert self._spec is not None
        assert self._policy is not None
        record, self._orphan = self._orphan, None
        if record is None:
            return None
        try:
            return await LinkThread.instance().run(sandboxed.adopt(record, self._spec))
        except PolicyRefused as error:
            await sandboxed.manager.refuse(record, error)
            raise
        except AgentboxError as error:
            self.log.warning("kernel %s could not be adopted, and a new one starts: %s", self.kernel_id, error)
            place = await self._follow_notebook(record.spec)
            self._spec = await asyncio.to_thread(self._resolve, self._policy, place, record.spec)
        return None

    async def _take_parked(self, sandboxed: SandboxedKernel) -> dict[str, Any] | None:
        """Take over the kernel with this id that an earlier server with the same root directory parked, if any."""
        assert self._spec is not None
        parked = SandboxedKernel.waiting.pop(self._spec.kernel_id, None)
        return await LinkThread.instance().run(sandboxed.take_over(parked)) if parked is not None else None

    # Life cycle

    @property
    def has_process(self) -> bool:
        """Whether a kernel was started and has not been waited for yet."""
        return self._is_running

    async def poll(self) -> int | None:
        """Return the exit code, or None while the kernel runs. Never blocks."""
        if self._sandboxed is None or not self._is_running:
            return 0
        end = self._sandboxed.end
        return end.exit_code if end is not None else None

    async def wait(self) -> int | None:
        """Wait for the kernel to end, and return the exit code. Called after every kind of shutdown."""
        while (code := await self.poll()) is None:  # noqa: ASYNC110 - an Event belongs to one loop, callers do not
            await asyncio.sleep(WAIT_INTERVAL)
        self._is_running = False
        return code

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel and its children. Jupyter also sends SIGINT at the start of every shutdown."""
        if self._sandboxed is None or signum == 0:
            return
        if signum == signal.SIGKILL:
            await self.kill()
            return
        if signum == signal.SIGTERM:
            self._sandboxed.expect_end()
        await LinkThread.instance().run(self._sandboxed.signal(signum))

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end. Jupyter passes no reliable value of `restart`, so it is ignored."""
        await self.send_signal(signal.SIGTERM)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and its sandbox. `restart` is not reliable, so what a restart needs is always kept."""
        if self._sandboxed is not None:
            await LinkThread.instance().run(self._sandboxed.stop())

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Record that the kernel was asked to shut down, so that its end is expected."""
        if self._sandboxed is not None:
            if not restart:
                self._sandboxed.end_lease()
            self._sandboxed.expect_end(None if restart else self._end_as_idle())

    def _end_as_idle(self) -> End | None:
        """Return an end with the cause IDLE if Jupyter's culler is responsible, because Jupyter gives no reason."""
        kernels, own = getattr(self.parent, "parent", None), self.kernel_spec.metadata.get("cull_idle_timeout")
        limit = getattr(kernels, "cull_idle_timeout", 0) if own is None else own
        last = getattr(self.parent, "last_activity", None)
        if kernels is None or last is None or not isinstance(limit, (int, float)) or limit <= 0:
            return None
        idle = (datetime.now(timezone.utc) - last).total_seconds()
        is_asleep = kernels.cull_busy or getattr(self.parent, "execution_state", None) != "busy"
        is_alone = kernels.cull_connected or not kernels.kernel_model(self.kernel_id)["connections"]
        if idle <= limit or not is_asleep or not is_alone:
            return None
        message = f"the kernel was idle for too long (idle for {idle:.0f} s, limit {limit:.0f} s)"
        setting = "MappingKernelManager.cull_idle_timeout" if own is None else "cull_idle_timeout of the kernelspec"
        return End(Cause.IDLE, 0, message, setting=setting)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove the sandbox. For a restart, keep its addresses and work files.

        Jupyter passes a reliable value of `restart` only here, so only this method decides by it. Jupyter may call it
        before a start, twice, or never.
        """
        if self._sandboxed is None:
            return
        if restart:
            await LinkThread.instance().run(self._sandboxed.prepare_restart())
            return
        sandboxed, self._sandboxed = self._sandboxed, None
        self._is_running = False
        if self._releaser is not None:
            self._releaser.detach()
        await LinkThread.instance().run(sandboxed.release())

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Return the time allowed for a graceful end, in seconds. gVisor does not need more than the default."""
        return recommended

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        """Return the time after which a start counts as stable, in seconds."""
        return recommended

    # Client requests

    def resolve_path(self, path: str) -> str | None:
        """Return the host path of a file that code inside names, or None if it is not in the work folder.

        Links are resolved on the host, and may not lead out of the folder, because code inside creates them.
        """
        sandbox = self._sandboxed.sandbox if self._sandboxed is not None else None
        if sandbox is None or "\0" in path:
            return None
        folder = sandbox.workspace.resolve()
        inside = PurePosixPath(WORKSPACE, path)
        if not inside.is_relative_to(WORKSPACE):
            return None
        found = (folder / inside.relative_to(WORKSPACE)).resolve()
        return str(found) if found.is_relative_to(folder) and found.exists() else None

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what identifies the sandbox, for programs that persist kernels."""
        info = await super().get_provisioner_info()
        sandbox = self._sandboxed.sandbox if self._sandboxed is not None else None
        info["sandbox_id"] = sandbox.id if sandbox is not None else None
        return info


def resolve_program(name: str) -> str:
    """Return the program argv[0] on this machine. As in Jupyter, plain ``python`` is the server's own interpreter."""
    path = sys.executable if _PYTHON.fullmatch(name) and _is_own_version(name) else name
    # Only mounted directories exist inside, so no path may pass through others, as "work/../venv/bin" does.
    plain = os.path.normpath(path)
    if path != plain and os.path.isabs(path):
        is_same = os.path.exists(plain) and os.path.samefile(plain, path)
        return plain if is_same else os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return path


def _is_own_version(name: str) -> bool:
    return name in ("python", f"python{sys.version_info[0]}", f"python{sys.version_info[0]}.{sys.version_info[1]}")


def _expand(argv: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Fill in a kernelspec's templates, except for the connection file."""
    known = {name: value for name, value in values.items() if isinstance(value, str)}
    known["connection_file"] = "{connection_file}"  # the driver fills it in, because it knows the path inside
    return [_TEMPLATE.sub(lambda match: known.get(match[1], match[0]), argument) for argument in argv]
