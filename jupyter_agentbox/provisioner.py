"""Jupyter's calls for a kernel process, turned into one sandbox after another.

Every Jupyter program comes in here: JupyterLab, nbclient, papermill, Kernel Gateway, the console. They call from
several event loops and from loops that stand still between two calls, so nothing here belongs to a loop of theirs:
all work is done on the link's thread by a :class:`~jupyter_agentbox.slot.KernelSlot`.

A kernelspec is not to be trusted with policy, as its author may be anybody and a user's own shadows an
administrator's. What its stanza says is a request, which :class:`~jupyter_agentbox.policy.Policy` lets narrow things
only; the provisioner has no settings of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import secrets
import signal
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.multikernelmanager import MultiKernelManager
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase

from .errors import AgentboxError, InvalidRequest
from .kernelspecs import check_folder, real_argv
from .link import LinkThread
from .magics import install as install_magics
from .manager import SandboxManager
from .policy import Policy
from .renewal import keep_hosts
from .slot import KernelSlot
from .spec import WORKSPACE, Cause, End, SandboxSpec
from .warm import WarmStarts

#: Seconds between two looks of :meth:`AgentboxProvisioner.wait`.
WAIT_INTERVAL = 0.02
_TEMPLATE = re.compile(r"\{([A-Za-z0-9_]+)\}")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")


class AgentboxProvisioner(KernelProvisionerBase):
    """Runs one kernel id in gVisor.

    Parameters
    ----------
    kernel_id, kernel_spec, parent
        From Jupyter's factory; ``parent`` is the KernelManager.
    **request
        The ``config`` of the kernelspec's stanza: a profile's name and whatever narrows it.

    Raises
    ------
    InvalidRequest
        The stanza has a key that would set something of the object itself.
    """

    def __init__(self, *, kernel_id: Any = None, kernel_spec: Any = None, parent: Any = None, **request: Any) -> None:
        # What the factory passes on could set any trait and any inherited attribute; so none of it gets through.
        super().__init__(kernel_id=kernel_id, kernel_spec=kernel_spec, parent=parent)
        self._request = request
        self._policy: Policy | None = None
        self._spec: SandboxSpec | None = None
        self._slot: KernelSlot | None = None
        self._is_running = self._is_watched = False
        self._releaser: weakref.finalize[..., Any] | None = None

    # Start

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Decide all about the sandbox, before anything is started. Called by ``KernelManager.pre_start_kernel``.

        Raises
        ------
        InvalidRequest, PolicyRefused
            The kernelspec asks for what it may not have.
        """
        self._refuse_encryption(kwargs)
        spec = self.kernel_spec
        argv = [*real_argv(spec.argv), *kwargs.pop("extra_arguments", [])]
        if not argv:
            raise InvalidRequest(f"kernelspec {spec.display_name!r} has no argv", field="argv")
        executable = resolve_program(argv[0])
        # Presets ask package clients for their configuration, which takes them a while the first time.
        policy = self._policy = await asyncio.to_thread(Policy, parent=self.parent)

        def resolve(folder: Path | None) -> SandboxSpec:
            return policy.resolve(
                self._request,
                workspace=folder,
                executable=executable,
                resource_dir=spec.resource_dir or None,
                kernelspec_env=spec.env,
                launch_env=kwargs.get("env"),
                kernel_id=self.kernel_id or "",
            )

        if kwargs.get("cwd") is None and not isinstance(getattr(self.parent, "parent", None), MultiKernelManager):
            self._spec = await asyncio.to_thread(self._resolve_own_folder, resolve)
        else:
            folder = _work_folder(kwargs.get("cwd"))
            if folder is not None and not policy.allowed_workspaces:
                check_folder(self.parent, folder)
            self._spec = await asyncio.to_thread(resolve, folder)
        self._spec = dataclasses.replace(
            self._spec,
            kernel_name=getattr(self.parent, "kernel_name", ""),
            origin=str(getattr(getattr(self.parent, "parent", None), "root_dir", "")),
        )
        if self._slot is not None and (before := self._slot.spec) is not None:
            # A restart, which code inside can force too, gives no host back that somebody took away.
            self._spec = await asyncio.to_thread(keep_hosts, policy, self._spec, before)
        if self._spec.root is None:
            argv[0] = self._spec.python if executable == sys.executable else executable
        self._make_slot(policy, self._spec)
        kwargs["env"] = dict(self._spec.env)
        kwargs["cmd"] = _expand(argv, {**kwargs, "resource_dir": spec.resource_dir, "prefix": sys.prefix})
        return kwargs

    def _resolve_own_folder(self, resolve: Callable[[Path | None], SandboxSpec]) -> SandboxSpec:
        """Show the folder that the program runs in, as papermill and the console mean it, who name none.

        It was not asked for by name, so where policy does not let it be shown, a private one takes its place. A
        server's kernels without a folder have a private one always: the server's own is nobody's work.
        """
        try:
            return resolve(Path.cwd())
        except (AgentboxError, FileNotFoundError) as error:
            if isinstance(error, AgentboxError) and error.field != "workspace":
                raise
            self.log.warning("The kernel has a private work folder, gone with it: %s", error)
            return resolve(None)

    def _refuse_encryption(self, kwargs: dict[str, Any]) -> None:
        wanted = kwargs.pop("transport_encryption", None) or getattr(self.parent, "transport_encryption", "disabled")
        if str(wanted).lower() == "required":
            raise InvalidRequest(
                "transport_encryption is 'required', and sandboxed kernels do not encrypt: their endpoints are "
                "UNIX sockets that only this user can open. Set KernelManager.transport_encryption to 'auto'",
                field="transport_encryption",
            )

    def _make_slot(self, policy: Policy, spec: SandboxSpec) -> None:
        if self._slot is not None:
            return
        session = getattr(self.parent, "session", None)
        manager = SandboxManager.shared(policy.state_path, spec.runtime, config=policy.config)
        slot = self._slot = KernelSlot(
            manager,
            key=session.key if session is not None else secrets.token_hex(16).encode(),
            signature_scheme=session.signature_scheme if session is not None else "hmac-sha256",
            log=self.log,
            warm=WarmStarts.shared(manager, policy),
        )
        slot.language = (self.kernel_spec.language or "python").lower()
        install_magics(slot, policy)
        # After a failed autorestart Jupyter just drops us, with no last call.
        self._releaser = weakref.finalize(self, slot.release_later)
        self._releaser.atexit = False

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start the sandbox and the kernel in it. Called by ``KernelManager.launch_kernel``.

        Raises
        ------
        AgentboxError
            It did not start; nothing is left of it.
        """
        if self._slot is None or self._spec is None:
            raise InvalidRequest("pre_launch comes before launch_kernel")
        info: Any = None
        if self._slot.sandbox is None and self._slot.parked is None:
            info = (
                await self._restore(self._slot) or await self._adopt(self._slot) or await self._take_parked(self._slot)
            )
        if info is None:
            info = await LinkThread.instance().run(self._slot.start(self._spec, cmd))
        self._is_running = True
        self.connection_info = info
        return self.connection_info

    async def post_launch(self, **kwargs: Any) -> None:
        """Have what is left removed once no autorestart follows any more: Jupyter then makes no call to say so."""
        if self._slot is not None and not self._is_watched and self.parent is not None:
            self._is_watched = True
            self.parent.add_restart_callback(self._slot.release_later, "dead")

    async def _restore(self, slot: KernelSlot) -> dict[str, Any] | None:
        """Go on from a snapshot, if this kernel is to be a fork."""
        assert self._spec is not None
        found = KernelSlot.restorations.pop(self._spec.kernel_id, None)
        if found is None:
            return None
        own = self._spec
        spec = dataclasses.replace(found.spec, kernel_id=own.kernel_id, kernel_name=own.kernel_name, origin=own.origin)
        found = dataclasses.replace(found, spec=spec)
        return await LinkThread.instance().run(slot.restore(found, lambda sandbox: None))

    async def _adopt(self, slot: KernelSlot) -> dict[str, Any] | None:
        """Go on with the kernel of this id that an earlier server of the same root directory left, if there is one."""
        assert self._spec is not None
        assert self._policy is not None
        if not self._spec.origin:
            return None
        label = (self._spec.kernel_id, self._spec.origin)
        for record in await asyncio.to_thread(slot.manager.orphans):
            if (record.spec.kernel_id, record.spec.origin) == label and record.main_kernel is not None:
                try:
                    return await LinkThread.instance().run(slot.adopt(record))
                except AgentboxError as error:
                    self.log.warning("kernel %s could not be taken back and starts anew: %s", self.kernel_id, error)
                    self._spec = await asyncio.to_thread(keep_hosts, self._policy, self._spec, record.spec)
        return None

    async def _take_parked(self, slot: KernelSlot) -> dict[str, Any] | None:
        """Go on with the kernel of this id that an earlier server of the same root directory parked, if one is."""
        assert self._spec is not None
        parked = KernelSlot.waiting.pop(self._spec.kernel_id, None)
        return await LinkThread.instance().run(slot.take_over(parked)) if parked is not None else None

    # Life

    @property
    def has_process(self) -> bool:
        """Whether a kernel was started that nobody has waited for yet."""
        return self._is_running

    async def poll(self) -> int | None:
        """Return the exit code, or None while the kernel lives. Never blocks."""
        if self._slot is None or not self._is_running:
            return 0
        end = self._slot.end
        return end.exit_code if end is not None else None

    async def wait(self) -> int | None:
        """Wait for the end and return the exit code. Called after every kind of shutdown."""
        while (code := await self.poll()) is None:  # noqa: ASYNC110 - an Event belongs to one loop, callers do not
            await asyncio.sleep(WAIT_INTERVAL)
        self._is_running = False
        return code

    async def send_signal(self, signum: int) -> None:
        """Signal the kernel and its children. Jupyter sends SIGINT at the start of every shutdown too."""
        if self._slot is None or signum == 0:
            return
        if signum == signal.SIGKILL:
            await self.kill()
            return
        if signum == signal.SIGTERM:
            self._slot.expect_end()
        await LinkThread.instance().run(self._slot.signal(signum))

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end. `restart` is never told the truth, so nothing depends on it."""
        await self.send_signal(signal.SIGTERM)

    async def kill(self, restart: bool = False) -> None:
        """End the kernel and its sandbox. `restart` is never told the truth: what a restart needs is kept."""
        if self._slot is not None:
            await LinkThread.instance().run(self._slot.stop())

    async def shutdown_requested(self, restart: bool = False) -> None:
        """The kernel was asked to leave; that it does needs no explanation."""
        if self._slot is not None:
            self._slot.expect_end(None if restart else self._end_as_idle())

    def _end_as_idle(self) -> End | None:
        """Return the end by Jupyter's limit on idle kernels, if it is that: Jupyter ends them without a word why."""
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
        said = f"the kernel was not used (idle for {idle:.0f} s, limit {limit:.0f} s)"
        setting = "MappingKernelManager.cull_idle_timeout" if own is None else "cull_idle_timeout of the kernelspec"
        return End(Cause.IDLE, 0, said, setting=setting)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove what is left; for a restart all but addresses and work files.

        The one place that decides so, as only here `restart` is true. Jupyter calls it before a start, twice, or
        never; any of it is fine.
        """
        if self._slot is None:
            return
        if restart:
            await LinkThread.instance().run(self._slot.prepare_restart())
            return
        slot, self._slot = self._slot, None
        self._is_running = False
        if self._releaser is not None:
            self._releaser.detach()
        await LinkThread.instance().run(slot.release())

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Return how long a graceful end may take, in seconds; gVisor needs no more than others."""
        return recommended

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        """Return how long a start may take to count as one, in seconds."""
        return recommended

    # What clients ask

    def resolve_path(self, path: str) -> str | None:
        """Find the host path of a file that code inside names, beneath the work folder only.

        Links are followed on the host and may lead nowhere else, as code inside makes them.
        """
        sandbox = self._slot.sandbox if self._slot is not None else None
        if sandbox is None or "\0" in path:
            return None
        folder = sandbox.workspace.resolve()
        inside = PurePosixPath(WORKSPACE, path)
        if not inside.is_relative_to(WORKSPACE):
            return None
        found = (folder / inside.relative_to(WORKSPACE)).resolve()
        return str(found) if found.is_relative_to(folder) and found.exists() else None

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return what identifies the sandbox, for whoever persists kernels."""
        info = await super().get_provisioner_info()
        sandbox = self._slot.sandbox if self._slot is not None else None
        info["sandbox_id"] = sandbox.id if sandbox is not None else None
        return info


def resolve_program(name: str) -> str:
    """Return argv[0] as it is on this machine; a plain ``python`` is the server's own, as Jupyter has it."""
    path = sys.executable if _PYTHON.fullmatch(name) and _is_own_version(name) else name
    # Inside only what is mounted exists, so no path may lead there by ways that are not, as in "work/../venv/bin".
    plain = os.path.normpath(path)
    if path != plain and os.path.isabs(path):
        is_same = os.path.exists(plain) and os.path.samefile(plain, path)
        return plain if is_same else os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return path


def _is_own_version(name: str) -> bool:
    return name in ("python", f"python{sys.version_info[0]}", f"python{sys.version_info[0]}.{sys.version_info[1]}")


def _work_folder(cwd: Any) -> Path | None:
    """Return the notebook's folder, absolute; None, for a private one, where there is none."""
    if not cwd:
        return None
    path = Path(os.path.abspath(os.path.expanduser(cwd)))
    return path if path.is_dir() else None


def _expand(argv: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Fill in a kernelspec's templates, with the connection file's path inside."""
    known = {name: value for name, value in values.items() if isinstance(value, str)}
    known["connection_file"] = "{connection_file}"  # left to the driver, which knows where it is inside
    return [_TEMPLATE.sub(lambda match: known.get(match[1], match[0]), argument) for argument in argv]
