"""What makes sandboxes: the contract that every runtime keeps, and the values it speaks in.

Words: a *runtime* starts, judges and ends sandboxes; a *handle* is all that another process needs to do the same to a
sandbox that it did not start. The contract's test suite is ``tests/contract``. Runtimes are found by
the entry points of the group ``jupyter_agentbox.runtimes``.

A runtime holds no asyncio object. Its methods block, each has a hard timeout, and
:class:`~jupyter_agentbox.sandbox.sandbox.Sandbox` calls them in worker threads; only :meth:`Runtime.is_alive`,
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
    """Where a sandbox is on this machine. Plain values: it travels through ``state.json``.

    Parameters
    ----------
    runtime : str
        Name of the runtime that started it.
    pid, start_time : int
        The process whose end is the sandbox's end, and when it started in clock ticks since boot (field 22 of
        ``/proc/<pid>/stat``): a pid alone may be somebody else's by now.
    helpers : tuple of (int, int)
        Pid and start time of its other processes.
    cgroups : tuple of str
        Control group directories made for it.
    user : int
        Inner id of user code.
    engine, container : str
        Address of the engine that runs it, and its id there; empty where there is none.
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
        """Pid and start time of all its processes."""
        return ((self.pid, self.start_time), *self.helpers)

    @property
    def is_running(self) -> bool:
        """Whether its process runs. Where nobody can tell, as without a free descriptor, it does."""
        try:
            return is_running(self.pid, self.start_time)
        except OSError:
            return True

    def resume(self) -> None:
        """Let its process go on, if it is stopped."""
        if not send_signal(self.pid, self.start_time, signal.SIGCONT):
            # Perhaps for want of a descriptor: then it must not be left standing. Nobody else takes harm from it.
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)

    def to_dict(self) -> dict[str, Any]:
        """Return a value that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Handle:
        """Read what :meth:`to_dict` made. Raises ValueError, TypeError or KeyError on anything else."""
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
    """What a sandbox uses now.

    Parameters
    ----------
    memory, disk : int
        Bytes. The disk is that of what is written outside of a host folder, deleted files included that gVisor keeps
        open.
    cpu : float
        Seconds of processor time since its start.
    held : int
        Bytes of deleted files of the work folder that gVisor keeps open, wherever that folder is.
    deleted : tuple of (str, int)
        Their last paths, relative to the work folder, and their inodes.
    """

    memory: int
    cpu: float
    disk: int
    held: int = 0
    deleted: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Check:
    """One finding of ``jupyter agentbox doctor``; ``remedy`` is a command where one exists."""

    name: str
    is_ok: bool
    message: str
    remedy: str = ""


class _Meta(abc.ABCMeta, type(LoggingConfigurable)):  # type: ignore[misc]
    """Abstract and configurable at once."""


class Runtime(LoggingConfigurable, metaclass=_Meta):  # type: ignore[metaclass]
    """Makes and ends sandboxes.

    Attributes
    ----------
    name : str
        Its entry point's name.
    isolation : str
        What stands between code inside and the host's kernel: ``gvisor``, or ``none`` for the kernel itself.
    waits_for_image : bool
        :meth:`restore` opens all files of an image before it loads any of them, waits if one of them is a FIFO that
        nobody writes yet, and fails if the others are empty then.
    """

    name: ClassVar[str]
    isolation: ClassVar[Literal["gvisor", "none"]] = "gvisor"
    waits_for_image: ClassVar[bool] = False

    @abc.abstractmethod
    def start(self, sandbox_id: str, spec: SandboxSpec, directory: Path) -> Handle:
        """Start a sandbox whose guest dials the link in ``directory / "link"``.

        The two FIFOs are made before by the caller. After an error nothing is left: no process, no control group, and
        in ``directory`` nothing but the log.

        Raises
        ------
        InvalidRequest
            The workspace cannot be one; names the field.
        RuntimeUnavailable
            The runtime, or a limit that must be enforced, cannot be had on this machine.
        RuntimeFailed
            It failed, or did not answer in time.
        """

    @abc.abstractmethod
    def is_alive(self, handle: Handle) -> bool:
        """Tell whether the sandbox runs. Cheap, never blocks."""

    def is_reachable(self) -> bool:
        """Tell whether what runs the sandboxes answered when it was last asked. Cheap, never blocks."""
        return True

    @abc.abstractmethod
    def usage(self, handle: Handle, directory: Path) -> Usage:
        """Measure. Zeros once it has ended."""

    @abc.abstractmethod
    def why_ended(self, handle: Handle, limits: Limits, directory: Path) -> End:
        """Tell why it ended, as seen from outside. Called after its death and before :meth:`remove`."""

    def lower_limits(self, handle: Handle, limits: Limits) -> frozenset[str]:
        """Hold one that runs to limits that are not above those it has; ``disk`` is its owner's to watch.

        Returns
        -------
        frozenset of str
            Names of those that can't be changed any more; if one of these was to be, the sandbox has to end.
        """
        return frozenset({"memory", "cpus", "processes"})

    @abc.abstractmethod
    def freeze(self, handle: Handle) -> bool:
        """Stop all that runs in it, as it is; whether that was done. Cheap, never blocks.

        A frozen sandbox is alive, and :meth:`kill` ends it as any other.
        """

    @abc.abstractmethod
    def thaw(self, handle: Handle) -> None:
        """Let a frozen one go on; does nothing to another. Cheap, never blocks."""

    @abc.abstractmethod
    def kill(self, handle: Handle, timeout: float = 10.0) -> None:
        """End all its processes and wait until they are gone. Does nothing to one that has ended.

        Raises
        ------
        RuntimeFailed
            A process outlived ``timeout`` seconds.
        """

    @abc.abstractmethod
    def remove(self, handle: Handle, directory: Path) -> None:
        """Remove what the runtime made outside and inside ``directory``. Idempotent."""

    def fingerprint(self, spec: SandboxSpec) -> dict[str, str]:
        """Tell what a checkpoint depends on: it can be restored only where all of it is the same.

        Raises
        ------
        RuntimeUnavailable
            This runtime can't restore.
        """
        raise RuntimeUnavailable(f"the runtime {self.name!r} keeps no snapshots of live kernels")

    def checkpoint(
        self, handle: Handle, sandbox_id: str, directory: Path, image: Path, copy: Callable[[], None] | None = None
    ) -> None:
        """Save all that is in memory and in the writable layer to the directory ``image``, and let it go on.

        The guest has closed the link's files before. ``copy`` is called while everything stands still, to copy what
        lies on the host. Raises RuntimeFailed and what ``copy`` raises; the sandbox goes on then too.
        """
        raise RuntimeUnavailable(f"the runtime {self.name!r} keeps no snapshots of live kernels")

    def recover(self, sandbox_id: str, directory: Path) -> None:
        """Let one go on whose owner ended in the midst of :meth:`checkpoint`; does nothing to another."""

    def restore(self, sandbox_id: str, spec: SandboxSpec, directory: Path, image: Path) -> Handle:
        """Start a sandbox from what :meth:`checkpoint` has saved; see :meth:`start`. Any number may have one image."""
        raise RuntimeUnavailable(f"the runtime {self.name!r} keeps no snapshots of live kernels")

    def wait_for_claim(self, handle: Handle, directory: Path) -> None:
        """Freeze one of the layout ``waiting`` until :meth:`claim`."""
        self.freeze(handle)

    def claim(self, handle: Handle, sandbox_id: str, spec: SandboxSpec, directory: Path) -> None:
        """Give one of the layout ``waiting`` the limits and the folder of whoever claims it.

        Raises RuntimeUnavailable, RuntimeFailed, InvalidRequest; it is to be ended then.
        """
        raise RuntimeUnavailable(f"the runtime {self.name!r} has no sandboxes that wait")

    def read_covered(self, directory: Path) -> list[tuple[str, bool]]:
        """Return the hidden entries of the folder of one of the layout ``claimed``, and whether each is a folder."""
        return []

    @abc.abstractmethod
    def check(self) -> list[Check]:
        """Try out what the runtime needs of this machine."""


__all__ = ["Check", "Handle", "Runtime", "Usage"]
