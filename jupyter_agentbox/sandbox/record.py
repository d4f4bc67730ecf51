"""What a sandbox's directory tells of it: the state file, and the lock that says who owns it.

There is no daemon: this is the registry. ``sandbox.sandbox`` writes it, any process of the user's may read
it, and ``sandbox.sweep`` judges by it (with the standard library alone, so the names it reads are kept).
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from jupyter_agentbox.errors import AgentboxError, NotFound
from jupyter_agentbox.linux import acquire_lock, open_locked, write_atomically
from jupyter_agentbox.spec import SandboxSpec

from .sweep import STATE_FILE

#: Seconds to wait for the lock of a sandbox: a sweep holds it for a moment, to look.
LOCK_TIMEOUT = 0.1
_saving = threading.Lock()


@dataclass
class KernelRecord:
    """A kernel in a sandbox, as much of it as another owner needs.

    Parameters
    ----------
    name : str
        The guest's name for it.
    key, signature_scheme : str
        Of its messages.
    context : str
        The name of the context of code whose kernel it is; empty for a notebook's.
    driver : str
        ``relay`` or ``embedded``.
    language : str
        Of the context of code.
    client : str
        The session of the client that ran the last cell.
    """

    name: str
    key: str
    signature_scheme: str
    context: str = ""
    driver: str = "relay"
    language: str = "python"
    client: str = ""


@dataclass
class ProcessRecord:
    """A background process in a sandbox, as much of it as another owner needs.

    Parameters
    ----------
    name, command : str
        The guest's name for it; one line for people.
    started : float
        Seconds since the epoch.
    is_terminal : bool
        It runs on a terminal.
    """

    name: str
    command: str
    started: float
    is_terminal: bool


@dataclass
class Record:
    """The state file.

    Parameters
    ----------
    id, runtime : str
    spec : SandboxSpec
    created : float
        Seconds since the epoch.
    lease_timeout : float
        Seconds; the spec's, where the sweep looks for it.
    owner_pid : int
        For people to read; ownership is the lock's.
    handle : dict or None
        The runtime's; None before it runs.
    kernels : list of KernelRecord
    processes : list of ProcessRecord
        Those that run in it.
    link : int
        Number of the link's pair of FIFOs, in a snapshot's record.
    started_kernels : int
        How many kernels were ever started in it: no name is given twice.
    asks : list of dict
        Hosts that were asked for, of a notebook's sandbox; see
        :meth:`~jupyter_agentbox.service.managed_sandbox.Session.recall`.
    """

    id: str
    runtime: str
    spec: SandboxSpec
    created: float
    lease_timeout: float
    owner_pid: int
    handle: dict[str, Any] | None = None
    kernels: list[KernelRecord] = field(default_factory=list)
    cleanup: list[str] = field(default_factory=list)
    processes: list[ProcessRecord] = field(default_factory=list)
    link: int = 0
    started_kernels: int = 0
    asks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def main_kernel(self) -> KernelRecord | None:
        """The notebook's kernel."""
        return next((kernel for kernel in self.kernels if not kernel.context), None)

    def to_bytes(self) -> bytes:
        """Write it as JSON."""
        return msgspec.json.encode(self, enc_hook=_encode)

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Read what :meth:`to_bytes` wrote. Raises ValueError."""
        return msgspec.json.decode(data, type=cls, dec_hook=_decode)

    def save(self, directory: Path) -> None:
        """Write it, whole or not at all. From any thread."""
        with _saving:  # of two at once, the one that is written last is the newer
            write_atomically(directory / STATE_FILE, self.to_bytes())

    @classmethod
    def load(cls, directory: Path) -> Record:
        """Read it. Raises NotFound when there is none that can be read."""
        try:
            record = cls.from_bytes((directory / STATE_FILE).read_bytes())
            if record.id != directory.name:
                raise ValueError("it is that of another sandbox")
        except (OSError, ValueError, RecursionError, AgentboxError) as error:
            raise NotFound(f"the record {STATE_FILE} of sandbox {directory.name} cannot be read: {error}") from None
        return record


class Lock:
    """Ownership of a sandbox: a lock on the directory's file ``lock``, which its process holds as long as it lives.

    The file's time is the heartbeat of the lease. A time of 0 means that the sandbox was told to end: no later process
    takes it over, and the sweep removes it as soon as nobody owns it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "lock"
        self._fd = -1
        self._is_over = False

    @property
    def is_held(self) -> bool:
        """Whether this process owns the sandbox."""
        return self._fd >= 0

    def acquire(self) -> bool:
        """Become the owner; false when there is another."""
        fd = open_locked(self._path, LOCK_TIMEOUT)
        if fd is None:
            return False
        self._fd = fd
        if self._is_over:
            self.end_lease()
        return True

    def renew(self) -> None:
        """Begin the lease anew; on a disk that takes no more, it just runs out when this process has ended."""
        if not self._is_over:
            with suppress(OSError):
                os.utime(self._fd)

    def end_lease(self) -> None:
        """Have nobody take the sandbox over after this process. From any thread; needs no space on the disk."""
        self._is_over = True
        if self._fd >= 0:
            with suppress(OSError):
                os.utime(self._fd, (0, 0))

    def release(self) -> None:
        """Own it no longer. Does nothing the second time."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def read_log_tail(directory: Path) -> str:
    """Return the last of what was said outside of a sandbox, for a person."""
    try:
        with open(directory / "log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
            return file.read().decode("utf-8", "replace").strip() or "nothing"
    except OSError:
        return "nothing"


def is_owned(directory: Path) -> bool:
    """Whether some process owns the sandbox of this directory."""
    try:
        with open(directory / "lock", "rb") as lock:
            return not acquire_lock(lock.fileno(), LOCK_TIMEOUT, is_shared=True)
    except OSError:
        return False


def was_told_to_end(directory: Path) -> bool:
    """Whether the owner of the sandbox of this directory had begun to end it; see :meth:`Lock.end_lease`."""
    try:
        return (directory / "lock").stat().st_mtime == 0
    except OSError:
        return False


def _encode(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError


def _decode(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError
