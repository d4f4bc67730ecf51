"""Operations on snapshots of running sandboxes."""

from __future__ import annotations

from jupyter_agentbox.errors import NotAuthorized
from jupyter_agentbox.models import (
    ForkRequest,
    RestoreRequest,
    SandboxInfo,
    SnapshotInfo,
    SnapshotList,
    SnapshotRequest,
)
from jupyter_agentbox.service.live.export import SnapshotTransfer

from .call import Bytes, Call
from .routes import route


@route(
    "POST", "/sandboxes/{id}/snapshots", "execute", body=SnapshotRequest, answer=SnapshotInfo, status=201,
    errors=(409, 429), tool="snapshot",
)  # fmt: skip
async def take_snapshot(call: Call) -> SnapshotInfo:
    """Save the state of a sandbox while it keeps running: memory, kernels and written files.

    A mounted folder of the user is not included, and open connections are not saved.
    """
    return await call.snapshots.take(call.id, call.body, caller=call.caller)


@route("GET", "/sandboxes/{id}/snapshots", "read", answer=SnapshotList, is_poll=True)
async def list_snapshots(call: Call) -> SnapshotList:
    """List the snapshots of a sandbox, oldest first."""
    return SnapshotList(await call.snapshots.list(call.id, caller=call.caller))


@route(
    "POST", "/sandboxes/{id}/restore", "execute", body=RestoreRequest, answer=SandboxInfo, errors=(409,),
    tool="restore", token_verb="restore",
)  # fmt: skip
async def restore_sandbox(call: Call) -> SandboxInfo:
    """Restore a sandbox to one of its snapshots.

    The ids and endpoints of the sandbox and its kernels stay the same; a notebook continues with the saved variables.
    Tokens are not reverted. Rights that policy no longer allows are not restored.
    """
    return await call.snapshots.restore(call.id, call.body.snapshot, caller=call.caller)


@route(
    "POST", "/sandboxes/{id}/fork", "execute", body=ForkRequest, answer=SandboxInfo, status=201, errors=(409, 429),
    tool="fork", is_owners=True,
)  # fmt: skip
async def fork_sandbox(call: Call) -> SandboxInfo:
    """Start a new sandbox from a snapshot, or from the current state of a sandbox.

    The fork has its own id, grant and audit trail, and belongs to the caller. Running programs continue in both. With
    `as_kernel`, it becomes a new Jupyter kernel; its id is that of the response's first kernel.
    """
    if call.body.as_kernel and not await call.is_allowed("write", "kernels"):
        raise NotAuthorized("you have no permission to start kernels on this server")
    return await call.snapshots.fork(call.id, call.body, caller=call.caller)


@route("GET", "/snapshots", "read", answer=SnapshotList, is_poll=True)
async def list_all_snapshots(call: Call) -> SnapshotList:
    """List all snapshots that the caller can see, oldest first."""
    return SnapshotList(await call.snapshots.list(caller=call.caller))


@route("POST", "/snapshots/import", "execute", answer=SnapshotInfo, kind="upload", status=201, errors=(409, 429))
async def import_snapshot(call: Call) -> SnapshotInfo:
    """Import an exported snapshot. The request body is the file.

    The caller becomes its owner. A file from another machine is accepted if both machines have the same key file.
    """
    transfer: SnapshotTransfer = call.service.transfer
    return await transfer.import_(call.chunks, caller=call.caller)


@route("GET", "/snapshots/{snapshot}/export", "execute", kind="download", errors=(404, 409, 429))
async def export_snapshot(call: Call) -> Bytes:
    """Export a snapshot as one file.

    The file contains everything that the sandbox had in memory, including secrets. Keep it private.
    """
    transfer: SnapshotTransfer = call.service.transfer
    chunks = await transfer.export(call.params["snapshot"], caller=call.caller)
    return Bytes(chunks, f"{call.params['snapshot']}.snapshot", close=getattr(chunks, "close", lambda: None))


@route("GET", "/snapshots/{snapshot}", "read", answer=SnapshotInfo, errors=(404,), is_poll=True)
async def get_snapshot(call: Call) -> SnapshotInfo:
    """Get a snapshot's description."""
    return await call.snapshots.get(call.params["snapshot"], caller=call.caller)


@route("DELETE", "/snapshots/{snapshot}", "write", status=204, errors=(404,))
async def delete_snapshot(call: Call) -> None:
    """Delete a snapshot. Data that other snapshots share with it is kept."""
    await call.snapshots.delete(call.params["snapshot"], caller=call.caller)


@route("POST", "/sandboxes/{id}/park", "execute", answer=SandboxInfo, errors=(409,))
async def park_sandbox(call: Call) -> SandboxInfo:
    """Save a sandbox to disk and free its memory. Its next use wakes it, which takes a moment."""
    return await call.sandboxes.park(call.id, caller=call.caller)


@route("POST", "/sandboxes/{id}/wake", "execute", answer=SandboxInfo, errors=(409,))
async def wake_sandbox(call: Call) -> SandboxInfo:
    """Wake a parked sandbox before its next use. Has no effect on a running one."""
    return await call.sandboxes.wake(call.id, caller=call.caller)
