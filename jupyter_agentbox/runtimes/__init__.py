"""The contract that every sandbox runtime implements, and the values it exchanges.

A *runtime* starts sandboxes, reports on them and ends them. A *handle* is everything that another process needs to
report on or end a sandbox that it did not start. The contract's test suite is ``tests/contract``. Runtimes are found
through the entry points of the group ``jupyter_agentbox.runtimes``.

A runtime has no asyncio object. Its methods block, each has a hard timeout, and
:class:`~jupyter_agentbox.sandbox.sandbox.Sandbox` calls them in worker threads. Only :meth:`Runtime.is_alive`,
:meth:`Runtime.freeze` and :meth:`Runtime.thaw` may be called on an event loop.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from traitlets.config import LoggingConfigurable

from jupyter_agentbox.errors import RuntimeUnavailable
from jupyter_agentbox.linux import is_running, send_signal
from jupyter_agentbox.spec import End, Limits, SandboxSpec


@dataclass(frozen=True)
class Handle:
    """The identity of a running sandbox on this machine. Its values are plain, so that ``state.json`` can store them.

    Parameters
    ----------
    runtime : str
        Name of the runtime that started the sandbox.
    pid, start_time : int
        Pid and start time of the sandbox's main process; when it ends, the sandbox has ended. The start time is in
        clock ticks since boot (field 22 of ``/proc/<pid>/stat``), because another process can get the same pid later.
    helpers : tuple of (int, int)
        Pid and start time of the sandbox's other processes.
    cgroups : tuple of str
        Control group directories created for the sandbox.
    user : int
        Inner id of user code.
    engine, container : str
        Address of the engine that runs the sandbox, and the container's id there; empty for runtimes without an engine.
    """

    runtime: str
    pid: int
    start_time: int
    helpers: tuple[tuple[int, int], ...] = ()
    cgroups: tuple[str, ...] = ()
    user: int = 0
    engine: str = ""
    container: str = ""

    @property
    def processes(self) -> tuple[tuple[int, int], ...]:
        """Pid and start time of all processes of the sandbox."""
        return ((self.pid, self.start_time), *self.helpers)

    @property
    def is_running(self) -> bool:
        """Whether the main process runs. True if that cannot be determined, for example without a free descriptor."""
        try:
            return is_running(self.pid, self.start_time)
        except OSError:
            return True

    def resume(self) -> None:
        """Continue the main process if it is stopped."""
        if not send_signal(self.pid, self.start_time, signal.SIGCONT):
            # The signal may have failed for lack of a descriptor, and the process must not stay stopped. SIGCONT does
            # no harm to another process.
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)

    def to_dict(self) -> dict[str, Any]:
        """Return the handle as a value that JSON can represent."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Handle:
        """Read a value that :meth:`to_dict` returned. Raises ValueError, TypeError or KeyError on anything else."""
        return cls(
            runtime=str(data["runtime"]),
            pid=int(data["pid"]),
            start_time=int(data["start_time"]),
            helpers=tuple((int(pid), int(start)) for pid, start in data["helpers"]),
            cgroups=tuple(str(path) for path in data["cgroups"]),
            user=int(data["user"]),
            engine=str(data.get("engine", "")),
            container=str(data.get("container", "")),
        )


@dataclass(frozen=True)
class Usage:
    """The current resource usage of a sandbox.

    Parameters
    ----------
    memory, disk : int
        Bytes. The disk usage is what was written outside a host folder, including deleted files that gVisor keeps
        open.
    cpu : float
        Seconds of processor time since the sandbox started.
    held : int
        Bytes of deleted files of the work folder that gVisor keeps open, wherever that folder is.
    deleted : tuple of (str, int)
        Last path, relative to the work folder, and inode of each of these deleted files.
    """

    memory: int
    cpu: float
    disk: int
    held: int = 0
    deleted: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Check:
    """One result of ``jupyter agentbox doctor``. ``remedy`` is a command if one exists."""

    name: str
    is_ok: bool
    message: str
    remedy: str = ""


class _Meta(abc.ABCMeta, type(LoggingConfigurable)):  # type: ignore[misc]
    """A metaclass for classes that are both abstract and configurable."""


class Runtime(LoggingConfigurable, metaclass=_Meta):  # type: ignore[metaclass]
    """Base class of runtimes, which start and end sandboxes.

    Attributes
    ----------
    name : str
        The name of the runtime's entry point.
    isolation : str
        What isolates code inside from the host's kernel: ``gvisor``, or ``none`` if that kernel itself serves the code.
    waits_for_image : bool
        Whether :meth:`restore` can start before the image is complete. Such a runtime opens all files of an image
        before it loads any of them. It waits while one of them is a FIFO without a writer, and fails if the others are
        then empty.
    """

    name: ClassVar[str]
    isolation: ClassVar[Literal["gvisor", "none"]] = "gvisor"
    waits_for_image: ClassVar[bool] = False

    @abc.abstractmethod
    def start(self, sandbox_id: str, spec: SandboxSpec, directory: Path) -> Handle:
        """Start a sandbox whose guest dials the link in ``directory / "link"``.

        The caller creates the two FIFOs beforehand. After an error no process and no control group is left, and
        ``directory`` contains only the log.

        Raises
        ------
        InvalidRequest
            The folder cannot be used as a workspace; names the field.
        RuntimeUnavailable
            The runtime is not available on this machine, or a limit that must be enforced cannot be.
        RuntimeFailed
            The start failed or timed out.
        """

    @abc.abstractmethod
    def is_alive(self, handle: Handle) -> bool:
        """Return whether the sandbox runs. Cheap; never blocks."""

    def is_reachable(self) -> bool:
        """Return whether the service that runs the sandboxes answered the last request. Cheap; never blocks."""
        return True

    @abc.abstractmethod
    def usage(self, handle: Handle, directory: Path) -> Usage:
        """Measure the current resource usage. All values are 0 after the sandbox has ended."""

    @abc.abstractmethod
    def why_ended(self, handle: Handle, limits: Limits, directory: Path) -> End:
        """Return why the sandbox ended, as seen from outside. Called after its end and before :meth:`remove`."""

    def lower_limits(self, handle: Handle, limits: Limits) -> frozenset[str]:
        """Lower the limits of a running sandbox. The owner enforces ``disk`` itself.

        Returns
        -------
        frozenset of str
            Names of limits that can no longer be changed. If one of these must be lowered, the sandbox has to end.
        """
        return frozenset({"memory", "cpus", "processes"})

    @abc.abstractmethod
    def freeze(self, handle: Handle) -> bool:
        """Stop all processes in the sandbox, keeping their state; return whether that succeeded. Cheap; never blocks.

        A frozen sandbox is alive, and :meth:`kill` ends it like any other.
        """

    @abc.abstractmethod
    def thaw(self, handle: Handle) -> None:
        """Resume a frozen sandbox. Does nothing to a running one. Cheap; never blocks."""

    @abc.abstractmethod
    def kill(self, handle: Handle, timeout: float = 10.0) -> None:
        """End all processes of the sandbox and wait until they have ended. Does nothing if the sandbox has ended.

        Raises
        ------
        RuntimeFailed
            A process still runs after ``timeout`` seconds.
        """

    @abc.abstractmethod
    def remove(self, handle: Handle, directory: Path) -> None:
        """Remove what the runtime created, outside and inside ``directory``. Idempotent."""

    def fingerprint(self, spec: SandboxSpec) -> dict[str, str]:
        """Return what a checkpoint depends on. It can be restored only where all of these values are the same.

        Raises
        ------
        RuntimeUnavailable
            This runtime cannot restore checkpoints.
        """
        raise RuntimeUnavailable(f"the runtime {self.name!r} does not support snapshots of live kernels")

    def checkpoint(
        self, handle: Handle, sandbox_id: str, directory: Path, image: Path, copy: Callable[[], None] | None = None
    ) -> None:
        """Save all memory and the writable layer to the directory ``image``, then let the sandbox continue.

        The guest closes the link's files before the call. ``copy`` is called while the sandbox is paused, to copy its
        files on the host. Raises RuntimeFailed and whatever ``copy`` raises; the sandbox continues in that case as
        well.
        """
        raise RuntimeUnavailable(f"the runtime {self.name!r} does not support snapshots of live kernels")

    def recover(self, sandbox_id: str, directory: Path) -> None:
        """Resume a sandbox whose owner ended during :meth:`checkpoint`. Does nothing to any other sandbox."""

    def restore(self, sandbox_id: str, spec: SandboxSpec, directory: Path, image: Path) -> Handle:
        """Start a sandbox from an image that :meth:`checkpoint` saved; see :meth:`start`.

        Any number of sandboxes may start from one image.
        """
        raise RuntimeUnavailable(f"the runtime {self.name!r} does not support snapshots of live kernels")

    def wait_for_claim(self, handle: Handle, directory: Path) -> None:
        """Freeze a sandbox of the layout ``waiting`` until :meth:`claim`."""
        self.freeze(handle)

    def claim(self, handle: Handle, sandbox_id: str, spec: SandboxSpec, directory: Path) -> None:
        """Give a sandbox of the layout ``waiting`` the limits and the work folder of the request that claims it.

        Raises RuntimeUnavailable, RuntimeFailed or InvalidRequest. After an error the caller must end the sandbox.
        """
        raise RuntimeUnavailable(f"the runtime {self.name!r} does not support prestarted sandboxes")

    def read_covered(self, directory: Path) -> list[tuple[str, str]]:
        """Return the covered entries in the folder of a ``claimed`` sandbox, and how each is covered."""
        return []

    @abc.abstractmethod
    def check(self) -> list[Check]:
        """Test what the runtime requires of this machine."""


__all__ = ["Check", "Handle", "Runtime", "Usage"]
