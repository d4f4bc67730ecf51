"""Operations on snapshots of live sandboxes."""

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
from jupyter_agentbox.service.live.export import Exchange

from .call import Bytes, Call
from .routes import route


@route(
    "POST", "/sandboxes/{id}/snapshots", "execute", body=SnapshotRequest, answer=SnapshotInfo, status=201,
    errors=(409, 429), tool="snapshot",
)  # fmt: skip
async def take_snapshot(call: Call) -> SnapshotInfo:
    """Save a sandbox as it is, while it goes on: memory, kernels and all, and what was written.

    A folder of the user's that is shown at the workspace is not part of it. Open connections are not kept.
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
    """Take a sandbox back to one of its snapshots: undo.

    Its id, its kernels' ids and endpoints stay; a notebook goes on with the variables of then. Tokens for it stay as
    they are now. What policy does not allow any more is not restored.
    """
    return await call.snapshots.restore(call.id, call.body.snapshot, caller=call.caller)


@route(
    "POST", "/sandboxes/{id}/fork", "execute", body=ForkRequest, answer=SandboxInfo, status=201, errors=(409, 429),
    tool="fork", is_owners=True,
)  # fmt: skip
async def fork_sandbox(call: Call) -> SandboxInfo:
    """Start another sandbox off a snapshot, or off a sandbox as it is now.

    It has its own id, grant and audit, and whoever forked it owns it. What ran goes on in both. With `as_kernel` it is
    that of a new Jupyter kernel, whose id is that of the answer's first kernel.
    """
    if call.body.as_kernel and not await call.is_allowed("write", "kernels"):
        raise NotAuthorized("you may not start kernels here")
    return await call.snapshots.fork(call.id, call.body, caller=call.caller)


@route("GET", "/snapshots", "read", answer=SnapshotList, is_poll=True)
async def list_all_snapshots(call: Call) -> SnapshotList:
    """List all snapshots of the caller's, oldest first."""
    return SnapshotList(await call.snapshots.list(caller=call.caller))


@route("POST", "/snapshots/import", "execute", answer=SnapshotInfo, kind="upload", status=201, errors=(409, 429))
async def import_snapshot(call: Call) -> SnapshotInfo:
    """Import an exported snapshot: the body is the file.

    It becomes the caller's. Of another machine's it takes one that has the same key file.
    """
    exchange: Exchange = call.service.exchange
    return await exchange.import_(call.chunks, caller=call.caller)


@route("GET", "/snapshots/{snapshot}/export", "execute", kind="download", errors=(404, 409, 429))
async def export_snapshot(call: Call) -> Bytes:
    """Export a snapshot as one file.

    It holds all that the sandbox had in memory, secrets too: keep it as private.
    """
    exchange: Exchange = call.service.exchange
    chunks = await exchange.export(call.params["snapshot"], caller=call.caller)
    return Bytes(chunks, f"{call.params['snapshot']}.snapshot", close=getattr(chunks, "close", lambda: None))


@route("GET", "/snapshots/{snapshot}", "read", answer=SnapshotInfo, errors=(404,), is_poll=True)
async def get_snapshot(call: Call) -> SnapshotInfo:
    """Describe a snapshot."""
    return await call.snapshots.get(call.params["snapshot"], caller=call.caller)


@route("DELETE", "/snapshots/{snapshot}", "write", status=204, errors=(404,))
async def delete_snapshot(call: Call) -> None:
    """Remove a snapshot. Others that share pages with it stay whole."""
    await call.snapshots.delete(call.params["snapshot"], caller=call.caller)


@route("POST", "/sandboxes/{id}/park", "execute", answer=SandboxInfo, errors=(409,))
async def park_sandbox(call: Call) -> SandboxInfo:
    """Save a sandbox to the disk, and free its memory. Its next use wakes it, and takes a little longer."""
    return await call.sandboxes.park(call.id, caller=call.caller)


@route("POST", "/sandboxes/{id}/wake", "execute", answer=SandboxInfo, errors=(409,))
async def wake_sandbox(call: Call) -> SandboxInfo:
    """Wake a parked sandbox before its next use; does nothing to another."""
    return await call.sandboxes.wake(call.id, caller=call.caller)
