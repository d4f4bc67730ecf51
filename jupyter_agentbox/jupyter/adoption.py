"""Adopt the kernels of an earlier Jupyter server under their old ids.

A server with the same root directory finds the earlier server's sandboxes if it starts within their lease
(:meth:`~jupyter_agentbox.sandbox.manager.SandboxManager.orphans`). It starts a kernel under the sandbox's kernel id,
and the provisioner then adopts the sandbox. The server's list of sessions, which maps notebooks to kernels, is kept in
the state directory for the same purpose.

The kernel's output from the time without a server, and until the client reconnects, is buffered for the client, as
Jupyter does for a client whose connection is lost. Parked kernels are taken over and stay parked.

A kernel that is a fork of another one is started in the same way, under a new id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
import uuid
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_core.utils import ensure_async
from jupyter_server.serverapp import ServerApp

from jupyter_agentbox.errors import AgentboxError, Conflict
from jupyter_agentbox.kernels.front.reconnect import BoundedBuffer
from jupyter_agentbox.kernels.parked_kernel import Restoration
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Lock
from jupyter_agentbox.service.live.parking import Parker

#: Seconds that a server's start waits for adopted kernels, and that a shutdown waits for a restart.
TIMEOUT = 60.0
#: Maximum number of concurrent servers of one root directory with a list of sessions each; file name of the list.
MAX_SERVERS, LIST = 100, "list.db"
# The columns of Jupyter's own table.
_COLUMNS = "(session_id, path, name, type, kernel_id)"


def keep_sessions(server: ServerApp, policy: Policy) -> Lock | None:
    """Make the server store its list of sessions in a file, unless it is configured to store it already.

    Each server has its own file, because it removes sessions of kernels that are not its own. It imports the sessions
    of ended servers with the same root directory. If nothing can be written, the server keeps the list in memory and
    logs an error. A damaged file is renamed.

    Returns
    -------
    Lock or None
        Lock to release when the server ends.
    """
    manager = server.session_manager
    if manager.database_filepath != ":memory:":
        return None
    name = hashlib.sha256(server.root_dir.encode()).hexdigest()[:16]
    base = policy.state_path / "servers"
    try:
        for number in range(MAX_SERVERS):
            place = base / f"sessions-{name}-{number}"
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = Lock(place)
            if lock.acquire():
                break
        else:
            raise OSError(f"{MAX_SERVERS} servers already store a list in {base}")
    except OSError as error:
        server.log.error("the list of notebook sessions cannot be stored for a later server: %s", error)
        return None
    try:
        _prepare(place / LIST, server.log)
        manager.database_filepath = str(place / LIST)
    except (OSError, sqlite3.Error) as error:
        server.log.error("the list of notebook sessions cannot be stored for a later server: %s", error)
        return lock
    for other in base.glob(f"sessions-{name}-*"):
        try:
            _take_in(other, place / LIST, server.log)
        except (OSError, sqlite3.Error) as error:
            server.log.error("the list of notebook sessions in %s cannot be read: %s", other, error)
    return lock


def _prepare(path: Path, log: Any) -> None:
    if not _is_sound(path):
        log.error("%s is damaged and was renamed; notebooks may lose the connection to their kernels", path)
        path.replace(path.with_suffix(".broken"))
    with contextlib.closing(sqlite3.connect(path, timeout=TIMEOUT)) as database, database:
        database.execute(f"CREATE TABLE IF NOT EXISTS session {_COLUMNS}")


def _take_in(other: Path, path: Path, log: Any) -> None:
    """Import the sessions of a server that has ended. A running server's list is locked, and is left alone."""
    lock = Lock(other)
    if not lock.acquire():
        return
    try:
        _prepare(other / LIST, log)
        with contextlib.closing(sqlite3.connect(path, timeout=TIMEOUT)) as database:
            database.execute("ATTACH ? AS other", (str(other / LIST),))
            with database:
                database.execute(f"INSERT INTO main.session {_COLUMNS} SELECT * FROM other.session")
                database.execute("DELETE FROM other.session")
    finally:
        lock.release()


def _is_sound(path: Path) -> bool:
    with contextlib.closing(sqlite3.connect(path, timeout=TIMEOUT)) as database:
        try:
            return bool(database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        except sqlite3.OperationalError as error:
            raise OSError(f"{path}: {error}") from error
        except sqlite3.DatabaseError:
            return False


async def adopt_kernels(server: ServerApp, policy: Policy, parker: Parker) -> list[str]:
    """Adopt all kernels that an earlier server of this root directory left running or parked.

    Returns
    -------
    list of str
        Ids of the adopted kernels.
    """
    manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
    kernels: Any = server.kernel_manager
    records = [
        record
        for record in await asyncio.to_thread(manager.orphans)
        if record.spec.origin == str(kernels.root_dir) and record.spec.kernel_id not in kernels
    ]

    async def start(kernel_id: str, name: str) -> str | None:
        try:
            await asyncio.wait_for(ensure_async(kernels.start_kernel(kernel_id=kernel_id, kernel_name=name)), TIMEOUT)
            sandboxed = SandboxedKernel.find(kernel_id=kernel_id)
            await listen(kernels, kernel_id, sandboxed.client if sandboxed is not None else "")
        except Exception as error:  # no error of a single kernel may prevent the server's start
            server.log.warning("kernel %s was not adopted: %s", kernel_id, error)
            return None
        return kernel_id

    try:
        found_parked = await parker.recover_kernels(str(kernels.root_dir))
    except (AgentboxError, OSError) as error:
        server.log.error("parked kernels were not adopted: %s", error)
        found_parked = []
    parked = {item.spec.kernel_id: item for item in found_parked}
    SandboxedKernel.waiting.update(parked)
    names = {record.spec.kernel_id: record.spec.kernel_name for record in records}
    names.update({kernel_id: item.spec.kernel_name for kernel_id, item in parked.items()})
    found = await asyncio.gather(*(start(kernel_id, name) for kernel_id, name in names.items()))
    for kernel_id, item in parked.items():
        sandboxed = SandboxedKernel.find(kernel_id=kernel_id)
        if (
            SandboxedKernel.waiting.pop(kernel_id, None) is not None
            and sandboxed is not None
            and sandboxed.sandbox is not None
        ):
            # The earlier server ended between two steps, and the kernel is running.
            await LinkThread.instance().run(item.woken(sandboxed.sandbox))
    # An interrupted restore leaves two sandboxes for one id. One is adopted; the other must never be.
    await asyncio.to_thread(_end_duplicates, manager, {kernel_id for kernel_id in found if kernel_id is not None})
    return [kernel_id for kernel_id in found if kernel_id is not None]


async def listen(kernels: Any, kernel_id: str, client: str) -> None:
    """Release the output of an adopted or woken kernel, and buffer it for `client`, if one is named."""
    sandboxed = SandboxedKernel.find(kernel_id=kernel_id)
    front = sandboxed.front if sandboxed is not None else None
    if sandboxed is None or front is None or sandboxed.parked is not None:
        return
    kernel = kernels.get_kernel(kernel_id)
    streams: dict[str, Any] = {}
    if client and kernels.buffer_offline_messages:
        for name in ("iopub", "shell", "control", "stdin"):
            streams[name] = getattr(kernel, f"connect_{name}")(identity=client.encode())
            streams[name].channel = name  # Jupyter sets this attribute on its own streams
        kernels.start_buffering(kernel_id, f"{kernel_id}:{client}", streams)
        kernels._kernel_buffers[kernel_id]["buffer"] = BoundedBuffer(front)
    else:
        client = ""
    listeners = 2 if client else 1  # one subscriber watches for activity

    def is_left() -> bool:
        return any(stream.closed() for stream in streams.values())

    is_idle = await LinkThread.instance().run(front.audience.gather(front, client, listeners, is_left))
    if not is_idle and kernel.execution_state == "starting":
        # Jupyter would treat the kernel as starting, and make clients that open it wait for a reply.
        kernel.execution_state = "busy"
        answered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        answered.set_result({})
        kernel._kernel_info_future = answered


def _end_duplicates(manager: SandboxManager, kernel_ids: set[str]) -> None:
    for record in manager.orphans():
        if record.spec.kernel_id in kernel_ids:
            sandboxed = SandboxedKernel.find(kernel_id=record.spec.kernel_id)
            sandbox, parked = (sandboxed.sandbox, sandboxed.parked) if sandboxed is not None else (None, None)
            heir = sandbox.id if sandbox is not None else parked.snapshot_id if parked is not None else None
            manager.end_duplicate(record, heir)


async def start_restored(server: ServerApp, restoration: Restoration) -> str:
    """Start a new kernel from a snapshot, in the same way as Jupyter starts others. On the server's event loop.

    Returns
    -------
    str
        Id of the new kernel.

    Raises
    ------
    Conflict
        Its kernelspec no longer exists, or is not sandboxed.
    AgentboxError
        The kernel did not start.
    """
    kernels: Any = server.kernel_manager
    spec = restoration.spec
    kernel_id = str(uuid.uuid4())
    SandboxedKernel.restorations[kernel_id] = restoration
    try:
        await ensure_async(kernels.start_kernel(kernel_id=kernel_id, kernel_name=spec.kernel_name))
        await asyncio.wrap_future(kernels.get_kernel(kernel_id).ready)
    except NoSuchKernel:
        raise Conflict(
            f"the kernelspec {spec.kernel_name!r} of the snapshot no longer exists", field="snapshot"
        ) from None
    finally:
        is_started = SandboxedKernel.restorations.pop(kernel_id, None) is None
        if not is_started and kernel_id in kernels:
            await ensure_async(kernels.shutdown_kernel(kernel_id, now=True))
    if not is_started:
        raise Conflict(f"the kernelspec {spec.kernel_name!r} is no longer a sandboxed kernelspec", field="snapshot")
    return kernel_id


async def start_again(server: ServerApp, kernel_id: str, name: str) -> None:
    """Start a kernel that Jupyter has given up, under its old id. On the server's event loop.

    Raises
    ------
    Conflict
        Its kernelspec no longer exists, or the kernel is already running.
    AgentboxError
        The kernel did not start.
    """
    kernels: Any = server.kernel_manager
    if kernel_id in kernels:
        raise Conflict(f"kernel {kernel_id} is already running")
    try:
        await ensure_async(kernels.start_kernel(kernel_id=kernel_id, kernel_name=name))
        await asyncio.wrap_future(kernels.get_kernel(kernel_id).ready)
    except NoSuchKernel:
        raise Conflict(f"the kernelspec {name!r} of the kernel no longer exists") from None


async def leave_kernels(*, parked_only: bool) -> None:
    """Leave all kernels, or only parked ones, to a later server. This server's shutdown then does not affect them."""
    await SandboxedKernel.leave_all(parked_only=parked_only)


def wait_for_restarts(kernels: Any) -> None:
    """Delay the shutdown of a restarting kernel until the restart is done.

    Jupyter fails to shut down a kernel during its restart, and then never culls it. From the moment that the shutdown
    is requested, no later server takes the kernel over.
    """
    shut_down = kernels._async_shutdown_kernel

    async def shutdown_kernel(kernel_id: str, now: bool = False, restart: bool = False) -> None:
        sandboxed = SandboxedKernel.find(kernel_id=kernel_id)
        if sandboxed is not None and not restart:
            sandboxed.end_lease()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TIMEOUT
        while kernel_id in kernels and (kernel := kernels.get_kernel(kernel_id)).owns_kernel:
            if kernel.ready.done() or loop.time() > deadline:
                break
            await asyncio.sleep(0.05)
        if kernel_id not in kernels and (start := kernels._pending_kernels.get(kernel_id)) is not None:
            # Jupyter keeps a kernel whose start was refused as pending. Its shutdown fails, and so does the server's.
            await asyncio.wait([start], timeout=TIMEOUT)
            if kernel_id not in kernels:
                kernels._pending_kernels.pop(kernel_id, None)
                return
        await shut_down(kernel_id, now=now, restart=restart)

    kernels.shutdown_kernel = kernels._async_shutdown_kernel = shutdown_kernel
