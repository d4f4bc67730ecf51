"""The values that modules exchange: frozen dataclasses without behavior of their own.

``policy.policy`` creates a :class:`SandboxSpec`, and a runtime turns it into a sandbox.
This module imports nothing from Jupyter and reads no environment variables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_agentbox.names import HIDDEN_FILES, READ_ONLY_FILES

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def format_size(size: int) -> str:
    """Format a number of bytes for a person: ``512 MiB``, ``1.5 GiB``."""
    for unit, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            number = size / unit
            return f"{number:{'.4g' if number < 1000 else '.0f'}} {name}"
    return f"{size} bytes"


#: Paths and ids inside every sandbox, the same for every runtime.
WORKSPACE = "/workspace"
HOME = "/home/user"
HOSTNAME = "agentbox"
USER_ID = 1000
#: Directory that only the guest can enter. It contains the link, the guest's program and connection files.
GUEST_DIR = "/run/agentbox"
#: Directory in which a pre-started sandbox receives its work folder when it is claimed.
CLAIM_DIR = f"{GUEST_DIR}/claim"


@dataclass(frozen=True)
class Limits:
    """Resource limits of one sandbox.

    Parameters
    ----------
    memory : int
        Bytes, for the kernel and all its children together.
    cpus : float
        Processor time, in processors.
    processes : int
        Number of processes and threads inside.
    disk : int
        Bytes in the writable layer, and separately bytes in a private workspace.
    """

    memory: int = 4 * GIB
    cpus: float = 4.0
    processes: int = 512
    disk: int = 20 * GIB


#: Names that ``Policy.accept_unenforced`` may contain.
LIMIT_NAMES = ("memory", "cpus", "processes", "disk")


@dataclass(frozen=True)
class Mount:
    """One host path that is visible inside the sandbox.

    Parameters
    ----------
    source : Path
        Absolute path on the host, of a directory or a regular file.
    target : str
        Absolute path inside.
    is_writable : bool
        Whether code inside may write to it. The default is read-only.
    is_policys : bool
        Whether the administrator configured this mount.
    is_added : bool
        Whether a person added this folder. Names that are hidden in work folders are hidden in it too. All mounts that
        neither the administrator nor a person named come with a kernel's program.
    """

    source: Path
    target: str
    is_writable: bool = False
    is_policys: bool = field(default=False, compare=False)
    is_added: bool = field(default=False, compare=False)


#: Value of ``Grant.setting`` for hosts from the sandbox's own request, or that a person allowed while it ran.
OWN_HOSTS = "allowed_hosts of the sandbox's own request"


@dataclass(frozen=True)
class Grant:
    """The hosts that one sandbox may reach, as patterns in the syntax of :mod:`jupyter_agentbox.egress.rules`.

    Parameters
    ----------
    hosts : tuple of str
        Patterns with presets already expanded, such as ``example.org`` or ``*.example.org:8443``.
    private_hosts : tuple of str
        Patterns of hosts that may resolve to private addresses.
    setting : str
        The setting that a refusal names.
    user_hosts : tuple of str
        Patterns of hosts that a person allowed in addition. Their names never resolve to private addresses.
    may_allow : tuple of str
        Patterns of the hosts that a person may allow. A port ``*`` stands for every port.
    consent : str
        How a person allows one of those, such as ``in the Sandboxes panel``.
    """

    hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    setting: str = "Policy.allowed_hosts"
    user_hosts: tuple[str, ...] = ()
    may_allow: tuple[str, ...] = ()
    consent: str = "in the Sandboxes panel"

    @property
    def all_hosts(self) -> tuple[str, ...]:
        """Patterns of all hosts that the sandbox may reach."""
        return tuple(dict.fromkeys((*self.hosts, *self.user_hosts)))


@dataclass(frozen=True)
class WarmStart:
    """The requirements for starting a sandbox from a pre-started kernel.

    Parameters
    ----------
    limits : Limits
        The profile's limits. A pre-started kernel starts with them, and they can be lowered afterward.
    preload : tuple of str
        Modules that the pre-started kernel has imported.
    pool_size : int
        Number of kernels of this kind to keep in the server's pool.
    """

    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    pool_size: int = 0


@dataclass(frozen=True)
class Service:
    """A program that runs beside the kernels and starts before the first of them.

    Parameters
    ----------
    name : str
    line : str
        Shell command that runs the program.
    ready : str
        Shell command that succeeds once the program is usable; empty for no check.
    timeout : float
        Seconds within which the program must become ready.
    """

    name: str
    line: str
    ready: str = ""
    timeout: float = 30.0


@dataclass(frozen=True)
class KernelCommand:
    """A kernel that can be started in a sandbox in addition to the Python kernel.

    Parameters
    ----------
    name : str
    argv : tuple of str
        Command line, in which ``{connection_file}`` is replaced.
    languages : tuple of str
        Languages that the kernel runs.
    interrupt_mode : str
        ``signal``, or ``message`` for a kernel that a signal would end.
    """

    name: str
    argv: tuple[str, ...]
    languages: tuple[str, ...]
    interrupt_mode: str = "signal"


@dataclass(frozen=True)
class SandboxSpec:
    """The complete description of a sandbox before it starts. Only ``Policy.resolve`` creates one.

    Parameters
    ----------
    profile : str
        Name of the profile that it was resolved from.
    limits : Limits
        Resource limits.
    grant : Grant
        Hosts that it may reach.
    root : Path or None
        Image directory to use as root, or None for a curated view of the host's file system.
    mounts : tuple of Mount
        Read-only parts of the host that the root needs in addition, such as a Python environment.
    workspace : Path or None
        Host folder mounted at ``/workspace``, or None for a private one.
    hidden : tuple of str
        Patterns of workspace entries that stay hidden; empty hides nothing. See :class:`~jupyter_agentbox.names.Names`.
    read_only : tuple of str
        Patterns of workspace entries that are visible, but cannot be changed.
    env : mapping of str to str
        The complete environment of programs inside.
    is_root : bool
        Whether user code is uid 0 inside, with the capabilities that package managers need.
    accept_unenforced : frozenset of str
        Names of limits that may stay unenforced on a machine that cannot enforce them.
    lease_timeout : float
        Seconds that the sandbox keeps running after its owner process ends.
    freeze_after : float
        Seconds of inactivity after which it is frozen; 0 for never.
    min_free_disk : int or None
        Bytes that must stay free on its disks. The sandbox is stopped if it is what fills them. 0 disables the check,
        None selects the default.
    driver : str
        ``auto``, or ``relay`` to reach every kernel through the relay.
    kernel_id, kernel_name, owner : str
        Labels.
    notebook : str
        Path of the notebook on the host, for the hosts that a person allowed for it; empty if unknown.
    consent_id : str
        Identifies a sandbox without a kernel id, over its restarts and restores, in the hosts that a person allowed
        for it. Its forks have others.
    origin : str
        Root directory of the server whose notebook uses this kernel. The next server with the same root directory
        reconnects to it. Empty for all other sandboxes.
    runtime : str
        Name of the runtime that must isolate it. No other runtime is used instead.
    layout : str
        ``plain``, ``waiting`` or ``claimed``. A ``waiting`` sandbox is started in advance, without a workspace. It is
        ``claimed`` once a request has taken it, and so are its copies.
    warm : WarmStart or None
        Requirements for a warm start, or None for a cold start.
    image : str
        Address of the image whose tree `root` is; empty for none.
    python : str
        The interpreter inside for kernels and packages; empty for the server's own, or ``python3`` of the root.
    kernels : tuple of KernelCommand
        Kernels of other languages.
    init : tuple of str
        Shell commands that run before anything else.
    services : tuple of Service
        Services to start after the init commands.
    workspace_notice : str
        Why a private workspace replaces the notebook's folder; empty if it does not.
    suggested_folder : str
        Name of a folder to create beside the notebook, in which a kernel gets the notebook's folder; empty for none.
    """

    profile: str = "default"
    limits: Limits = field(default_factory=Limits)
    grant: Grant = field(default_factory=Grant)
    root: Path | None = None
    mounts: tuple[Mount, ...] = ()
    workspace: Path | None = None
    hidden: tuple[str, ...] = HIDDEN_FILES
    read_only: tuple[str, ...] = READ_ONLY_FILES
    env: Mapping[str, str] = field(default_factory=dict)
    is_root: bool = False
    accept_unenforced: frozenset[str] = frozenset()
    lease_timeout: float = 60.0
    freeze_after: float = 60.0
    min_free_disk: int | None = None
    driver: str = "auto"
    kernel_id: str = ""
    kernel_name: str = ""
    owner: str = ""
    notebook: str = ""
    consent_id: str = ""
    origin: str = ""
    runtime: str = "runsc"
    layout: str = "plain"
    warm: WarmStart | None = None
    image: str = ""
    python: str = ""
    kernels: tuple[KernelCommand, ...] = ()
    init: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()
    workspace_notice: str = ""
    suggested_folder: str = ""


class Cause(str, enum.Enum):
    """The reason why a sandbox or its kernel ended."""

    EXITED = "exited"
    KILLED = "killed"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    LEASE_OVER = "lease_over"
    STOPPED = "stopped"
    IDLE = "idle"
    LIFE_OVER = "life_over"
    RUNTIME_FAILED = "runtime_failed"
    LOST = "lost"


#: Ends that a person requested or that policy announced. The sandbox's files are not kept after them.
INTENDED = frozenset({Cause.STOPPED, Cause.IDLE, Cause.LIFE_OVER, Cause.LEASE_OVER})


@dataclass(frozen=True)
class End:
    """How a sandbox or its kernel ended.

    Parameters
    ----------
    cause : Cause
        The reason.
    exit_code : int
        0 to 255; 128 + n after signal n, 137 after the memory limit.
    message : str
        A sentence for a person, such as ``out of memory (limit 512 MiB)``. It is one printable line, even if parts of
        it come from inside the sandbox.
    setting : str or None
        The setting that would have prevented this end.
    """

    cause: Cause
    exit_code: int
    message: str
    setting: str | None = None

    def __post_init__(self) -> None:
        clean = "".join(c if c.isprintable() else "?" for c in self.message)
        object.__setattr__(self, "message", clean)

    def to_detail(self, kernel_id: str) -> dict[str, str]:
        """Return the details that the audit log records."""
        return {
            "event": "ended", "cause": self.cause.value, "kernel_id": kernel_id,
            "message": self.message[:500], "setting": self.setting or "",
        }  # fmt: skip


def out_of_memory(limits: Limits) -> End:
    """Return the end of a sandbox that has used all its memory."""
    return End(
        Cause.OUT_OF_MEMORY,
        137,
        f"out of memory (limit {format_size(limits.memory)})",
        "memory of the profile, Policy.max_memory",
    )
