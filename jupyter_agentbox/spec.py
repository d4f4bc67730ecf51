"""The values that travel between modules: frozen dataclasses without behaviour of their own.

``policy.policy`` makes a :class:`SandboxSpec`, a runtime turns it into a sandbox.
Nothing here imports Jupyter, and nothing here reads the environment.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def format_size(size: int) -> str:
    """Write a number of bytes for a person: ``512 MiB``, ``1.5 GiB``."""
    for unit, name in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            number = size / unit
            return f"{number:{'.4g' if number < 1000 else '.0f'}} {name}"
    return f"{size} bytes"


#: Where things are inside every sandbox, whatever the runtime.
WORKSPACE = "/workspace"
HOME = "/home/user"
USER_ID = 1000
#: Directory that only the guest can enter: the link, its own program, connection files.
GUEST_DIR = "/run/agentbox"
#: Beneath which a sandbox that waited is given its work folder.
CLAIM_DIR = f"{GUEST_DIR}/claim"


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use.

    Parameters
    ----------
    memory : int
        Bytes, kernel and all its children together.
    cpus : float
        Processors' worth of time.
    processes : int
        Processes and threads inside.
    disk : int
        Bytes in the writable layer, and bytes in a private workspace.
    """

    memory: int = 4 * GIB
    cpus: float = 4.0
    processes: int = 512
    disk: int = 2 * GIB


#: Names that ``Policy.accept_unenforced`` may hold.
LIMIT_NAMES = ("memory", "cpus", "processes", "disk")


@dataclass(frozen=True)
class Mount:
    """One host path shown inside.

    Parameters
    ----------
    source : Path
        Absolute path on the host; a directory or a regular file.
    target : str
        Absolute path inside.
    is_writable : bool
        Read-only unless true.
    is_policys : bool
        The administrator named it; others come with a kernel's program.
    """

    source: Path
    target: str
    is_writable: bool = False
    is_policys: bool = field(default=False, compare=False)


#: The setting of a grant that is a sandbox's own: its request's, or what a person has decided while it ran.
OWN_HOSTS = "allowed_hosts of the sandbox's own request"


@dataclass(frozen=True)
class Grant:
    """What one sandbox may reach: patterns as :mod:`jupyter_agentbox.egress.rules` reads them.

    Parameters
    ----------
    hosts : tuple of str
        Patterns with presets already expanded, such as ``example.org``, ``*.example.org:8443``.
    private_hosts : tuple of str
        Patterns of the hosts that may resolve to private addresses.
    setting : str
        The setting a refusal names.
    """

    hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    setting: str = "Policy.allowed_hosts"


@dataclass(frozen=True)
class WarmStart:
    """What a kernel that was started ahead has to have for a sandbox to go on from it.

    Parameters
    ----------
    limits : Limits
        The profile's: those that it is started with, and can be narrowed from.
    preload : tuple of str
        Modules that it has imported.
    pool_size : int
        How many of its kind are to wait in a server's pool.
    """

    limits: Limits = field(default_factory=Limits)
    preload: tuple[str, ...] = ()
    pool_size: int = 0


@dataclass(frozen=True)
class Service:
    """A program that runs beside the kernels, started before the first of them.

    Parameters
    ----------
    name : str
    line : str
        For the shell.
    ready : str
        A line for the shell that succeeds once it can be used; empty for none.
    timeout : float
        Seconds that it has to be ready.
    """

    name: str
    line: str
    ready: str = ""
    timeout: float = 30.0


@dataclass(frozen=True)
class KernelCommand:
    """A kernel that can be started in a sandbox, beside Python's.

    Parameters
    ----------
    name : str
    argv : tuple of str
        ``{connection_file}`` is replaced.
    languages : tuple of str
        What it runs.
    interrupt_mode : str
        ``signal``, or ``message`` where a signal would end it.
    """

    name: str
    argv: tuple[str, ...]
    languages: tuple[str, ...]
    interrupt_mode: str = "signal"


@dataclass(frozen=True)
class SandboxSpec:
    """All that is decided about a sandbox before it starts. Made by ``Policy.resolve`` only.

    Parameters
    ----------
    profile : str
        Name of the profile it came from.
    limits : Limits
        Its limits.
    grant : Grant
        What it may reach.
    root : Path or None
        Image directory to use as root, or None for a curated view of the host's own.
    mounts : tuple of Mount
        Read-only parts of the host that the root needs on top, such as a Python environment.
    workspace : Path or None
        Host folder mounted at ``/workspace``; None makes a private one.
    hidden : tuple of str
        Shell patterns of the entries of the workspace that stay hidden; none hides nothing.
    env : mapping of str to str
        The whole environment of what runs inside.
    is_root : bool
        User code is uid 0 inside, with the capabilities that package managers need.
    accept_unenforced : frozenset of str
        Names of the limits that may go unenforced where the machine cannot enforce them.
    lease_timeout : float
        Seconds that the sandbox outlives its owner.
    freeze_after : float
        Seconds without anything to do after which it is frozen; 0 for never.
    min_free_disk : int or None
        Bytes that stay free on its disks, or else it is stopped if it is what fills them; 0 for none, None for the
        default.
    driver : str
        ``auto``, or ``relay`` for kernels that are to be reached by the relay, whatever they are.
    kernel_id, kernel_name, owner : str
        Labels.
    origin : str
        Root directory of the server whose notebook's kernel it is: its successor takes it back. Empty for others.
    runtime : str
        Name of the runtime that must isolate it; no other will do.
    layout : str
        ``plain``; ``waiting`` for one that is made before anybody asked for it, without a workspace; ``claimed`` for
        what it is once somebody has, and for its copies.
    warm : WarmStart or None
        What it needs to start warm; None where it must start cold.
    image : str
        Address of the image whose tree `root` is; empty for none.
    python : str
        The interpreter inside of kernels and packages; empty for the server's own, or the root's ``python3``.
    kernels : tuple of KernelCommand
        Those of other languages.
    init : tuple of str
        Lines for the shell that run before anything else.
    services : tuple of Service
        Started when those have run.
    """

    profile: str = "default"
    limits: Limits = field(default_factory=Limits)
    grant: Grant = field(default_factory=Grant)
    root: Path | None = None
    mounts: tuple[Mount, ...] = ()
    workspace: Path | None = None
    hidden: tuple[str, ...] = (".*",)
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
    origin: str = ""
    runtime: str = "runsc"
    layout: str = "plain"
    warm: WarmStart | None = None
    image: str = ""
    python: str = ""
    kernels: tuple[KernelCommand, ...] = ()
    init: tuple[str, ...] = ()
    services: tuple[Service, ...] = ()


class Cause(str, enum.Enum):
    """Why a sandbox or its kernel is no more."""

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


#: Ends that somebody asked for or that policy announced: the files of the sandbox are not kept after them.
INTENDED = frozenset({Cause.STOPPED, Cause.IDLE, Cause.LIFE_OVER, Cause.LEASE_OVER})


@dataclass(frozen=True)
class End:
    """How it ended.

    Parameters
    ----------
    cause : Cause
        The kind of end.
    exit_code : int
        0 to 255; 128 + n after signal n, 137 for an end by memory.
    message : str
        The sentence for a person, such as ``out of memory (limit 512 MiB)``: one printable line, whatever of it
        comes from inside.
    setting : str or None
        The setting that would have changed it.
    """

    cause: Cause
    exit_code: int
    message: str
    setting: str | None = None

    def __post_init__(self) -> None:
        clean = "".join(c if c.isprintable() else "?" for c in self.message)
        object.__setattr__(self, "message", clean)

    def to_detail(self, kernel_id: str) -> dict[str, str]:
        """Return what the audit log tells of it."""
        return {
            "event": "ended", "cause": self.cause.value, "kernel_id": kernel_id,
            "message": self.message[:500], "setting": self.setting or "",
        }  # fmt: skip


def out_of_memory(limits: Limits) -> End:
    """Return how what has used all its memory ends."""
    return End(
        Cause.OUT_OF_MEMORY,
        137,
        f"out of memory (limit {format_size(limits.memory)})",
        "limits.memory of the profile, Policy.max_memory",
    )
