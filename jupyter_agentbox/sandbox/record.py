"""Read and write a sandbox's state file, and the lock that defines its owner.

The state file and the lock are the registry; there is no daemon. ``sandbox.sandbox`` writes them, and any process of
the same user may read them. ``sandbox.sweep`` reads the state file with the standard library alone, so the field names
that it reads must not change.
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

#: Seconds to wait for a sandbox's lock. A sweep holds it for a moment to inspect the sandbox.
LOCK_TIMEOUT = 0.1
_saving = threading.Lock()


@dataclass
class KernelRecord:
    """Facts about a kernel in a sandbox that a new owner needs.

    Parameters
    ----------
    name : str
        The guest's name for the kernel.
    key, signature_scheme : str
        For signing its messages.
    context : str
        Name of the code context that the kernel serves; empty for a notebook's kernel.
    driver : str
        ``relay`` or ``embedded``.
    language : str
        Language of the code context.
    client : str
        Jupyter session id of the client that ran the last cell.
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
    """Facts about a background process in a sandbox that a new owner needs.

    Parameters
    ----------
    name, command : str
        The guest's name for the process, and its command as one readable line.
    started : float
        Seconds since the epoch.
    is_terminal : bool
        Whether it runs on a terminal.
    """

    name: str
    command: str
    started: float
    is_terminal: bool


@dataclass
class Record:
    """The contents of the state file.

    Parameters
    ----------
    id, runtime : str
    spec : SandboxSpec
    created : float
        Seconds since the epoch.
    lease_timeout : float
        Seconds. A copy of the spec's value, in the place where the sweeper reads it.
    owner_pid : int
        For people to read. The lock defines the owner.
    handle : dict or None
        The runtime's handle, or None before the sandbox runs.
    kernels : list of KernelRecord
        Kernels in the sandbox.
    cleanup : list of str
        Directories of fronts that the sweeper removes together with the sandbox.
    processes : list of ProcessRecord
        Background processes in the sandbox.
    link : int
        Number of the link's FIFO pair, in the record of a snapshot.
    started_kernels : int
        Number of kernels ever started in the sandbox, so that no kernel name is used twice.
    asks : list of dict
        Requests for hosts, in the record of a notebook's sandbox; see
        :meth:`~jupyter_agentbox.service.managed_sandbox.ManagedSandbox.recall`.
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
        """Return the record as JSON."""
        return msgspec.json.encode(self, enc_hook=_encode)

    @classmethod
    def from_bytes(cls, data: bytes) -> Record:
        """Return the record that :meth:`to_bytes` encoded. Raises ValueError."""
        return msgspec.json.decode(data, type=cls, dec_hook=_decode)

    def save(self, directory: Path) -> None:
        """Write the record atomically. May be called from any thread."""
        with _saving:  # of two concurrent calls, the later one must write the newer state
            write_atomically(directory / STATE_FILE, self.to_bytes())

    @classmethod
    def load(cls, directory: Path) -> Record:
        """Return the record in a directory. Raises NotFound if there is none that can be read."""
        try:
            record = cls.from_bytes((directory / STATE_FILE).read_bytes())
            if record.id != directory.name:
                raise ValueError("it belongs to another sandbox")
        except (OSError, ValueError, RecursionError, AgentboxError) as error:
            raise NotFound(f"the record {STATE_FILE} of sandbox {directory.name} cannot be read: {error}") from None
        return record


class Lock:
    """The ownership of a sandbox: a lock on the file ``lock`` in its directory.

    The owning process holds it for as long as it lives. The file's modification time is the heartbeat of the lease. A
    time of 0 means that the sandbox is to end: no later process adopts it, and the sweeper removes it as soon as
    it has no owner.
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
        """Become the owner. Return False if there is another one."""
        fd = open_locked(self._path, LOCK_TIMEOUT)
        if fd is None:
            return False
        self._fd = fd
        if self._is_over:
            self.end_lease()
        return True

    def renew(self) -> None:
        """Restart the lease. If the disk accepts no writes, the lease simply expires after this process has ended."""
        if not self._is_over:
            with suppress(OSError):
                os.utime(self._fd)

    def end_lease(self) -> None:
        """Prevent any process from adopting the sandbox after this one.

        May be called from any thread. Needs no disk space.
        """
        self._is_over = True
        if self._fd >= 0:
            with suppress(OSError):
                os.utime(self._fd, (0, 0))

    def release(self) -> None:
        """Give up ownership. Does nothing if it was already given up."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def read_log_tail(directory: Path) -> str:
    """Return the end of the sandbox's log, which is written outside it, as text for people."""
    try:
        with open(directory / "log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
            return file.read().decode("utf-8", "replace").strip() or "nothing"
    except OSError:
        return "nothing"


def is_owned(directory: Path) -> bool:
    """Return whether some process owns the sandbox in this directory."""
    try:
        with open(directory / "lock", "rb") as lock:
            return not acquire_lock(lock.fileno(), LOCK_TIMEOUT, is_shared=True)
    except OSError:
        return False


def was_told_to_end(directory: Path) -> bool:
    """Return whether the owner had begun to end the sandbox in this directory; see :meth:`Lock.end_lease`."""
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
