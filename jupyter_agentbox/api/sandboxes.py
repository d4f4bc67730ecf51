"""Operations on sandboxes themselves, and on what they may reach."""

from __future__ import annotations

import msgspec

from jupyter_agentbox.models import (
    AskDecision,
    AskInfo,
    AskList,
    AskRequest,
    AuditExport,
    AuditFilters,
    AuditItem,
    AuditRows,
    GrantInfo,
    HttpAnswer,
    HttpRequest,
    SandboxFilters,
    SandboxInfo,
    SandboxList,
    SandboxPatch,
    SandboxRequest,
)
from jupyter_agentbox.models.service import GrantQuery
from jupyter_agentbox.service.fetch import fetch
from jupyter_agentbox.spec import MIB

from .about import read_rows, row_bytes
from .call import Bytes, Call
from .routes import route


@route(
    "POST", "/sandboxes", "write", body=SandboxRequest, answer=SandboxInfo, status=201,
    errors=(200, 409, 429, 502, 503), max_body=64 * MIB,
)  # fmt: skip
async def create_sandbox(call: Call) -> SandboxInfo:
    """Make a sandbox, and answer when it is ready.

    With an `id` of the caller's own, asking again in the same words answers the sandbox that is there, with status
    200; asking for something else under that id is a conflict. A caller who goes away before the answer leaves
    nothing behind, unless it chose an id to ask again by.
    """
    info, is_new = await call.sandboxes.create(call.body, caller=call.caller, on_progress=call.tell)
    if not is_new:
        call.status = 200
    return info


@route("GET", "/sandboxes", "read", query=SandboxFilters, answer=SandboxList, is_poll=True)
async def list_sandboxes(call: Call) -> SandboxList:
    """List the caller's sandboxes, and those of this server's notebooks."""
    return SandboxList(await call.sandboxes.registry.list(call.query, caller=call.caller))


@route("GET", "/sandboxes/{id}", "read", answer=SandboxInfo, is_poll=True)
async def get_sandbox(call: Call) -> SandboxInfo:
    """Describe a sandbox: its state, and of an ended one the cause.

    Looking does not count as use.
    """
    return await call.sandboxes.registry.get(call.id, caller=call.caller)


@route("PATCH", "/sandboxes/{id}", "write", body=SandboxPatch, answer=SandboxInfo, errors=(409,), is_owners=True)
async def patch_sandbox(call: Call) -> SandboxInfo:
    """Change what a living sandbox may reach, how long it lives, or its labels.

    What is narrowed holds at once: connections that are no longer allowed are cut. Nothing can be made wider than the
    profile has it.
    """
    return await call.sandboxes.patch(call.id, call.body, caller=call.caller)


@route("DELETE", "/sandboxes/{id}", "write", status=204, errors=(409,))
async def delete_sandbox(call: Call) -> None:
    """End a sandbox and forget it."""
    await call.sandboxes.delete(call.id, caller=call.caller)


@route("POST", "/sandboxes/{id}/revive", "execute", answer=SandboxInfo, errors=(409, 429))
async def revive_sandbox(call: Call) -> SandboxInfo:
    """Start a sandbox again that ran out of memory or disk, or crashed, with the files of its workspace.

    It keeps its id, its tokens and its terms, as far as policy allows them now. What was in memory is lost, and so is
    everything outside of the workspace. Possible until `end.kept_until`; does nothing to a sandbox that runs.
    """
    return await call.sandboxes.revive(call.id, caller=call.caller)


# -- egress ----------------------------------------------------------------------------------------


@route("GET", "/sandboxes/{id}/egress", "read", query=GrantQuery, answer=GrantInfo, is_poll=True)
async def get_egress(call: Call) -> GrantInfo:
    """Tell what a sandbox may reach, and what it could be given."""
    host = call.query.host if call.query is not None else None  # MCP asks about none
    found = await call.sandboxes.grants.get(call.id, host, caller=call.caller)
    if found.verdict is not None and found.verdict.may_allow and not await call.is_allowed("write"):
        refused = msgspec.structs.replace(found.verdict, may_allow=False, message="you may not write here")
        return msgspec.structs.replace(found, verdict=refused)
    return found


@route("GET", "/sandboxes/{id}/egress/log", "read", query=AuditFilters, answer=AuditRows, is_poll=True)
async def get_egress_log(call: Call) -> AuditRows:
    """List the gate's decisions about a sandbox."""
    filters = call.query if call.query.kind else msgspec.structs.replace(call.query, kind="egress")
    return await _rows(call, filters)


@route(
    "POST",
    "/sandboxes/{id}/egress/asks",
    "write",
    body=AskRequest,
    answer=AskInfo,
    status=202,
    tool="ask_host",
    errors=(409,),
)
async def ask_host(call: Call) -> AskInfo:
    """Ask for a host: it is pending until a person decides.

    A host that no person may allow, since the profile does not cover it, is refused at once.
    """
    return await call.sandboxes.grants.ask(call.id, call.body.host, call.body.why, caller=call.caller)


@route("GET", "/sandboxes/{id}/egress/asks", "read", answer=AskList, is_poll=True)
async def list_asks(call: Call) -> AskList:
    """List the hosts that were asked for in a sandbox."""
    return AskList(await call.sandboxes.grants.asks(call.id, caller=call.caller))


@route("GET", "/sandboxes/{id}/egress/asks/{ask}", "read", answer=AskInfo, is_poll=True)
async def get_ask(call: Call) -> AskInfo:
    """Tell what became of a host that was asked for."""
    return await call.sandboxes.grants.get_ask(call.id, call.params["ask"], caller=call.caller)


@route(
    "POST", "/sandboxes/{id}/egress/asks/{ask}", "write", body=AskDecision, answer=AskInfo, errors=(409,),
    is_owners=True,
)  # fmt: skip
async def decide_ask(call: Call) -> AskInfo:
    """Allow or deny a host that was asked for."""
    return await call.sandboxes.grants.decide(
        call.id, call.params["ask"], is_allowed=call.body.decision == "allow", note=call.body.note, caller=call.caller
    )


@route("GET", "/egress/asks", "read", answer=AskList, is_poll=True)
async def list_pending_asks(call: Call) -> AskList:
    """List all hosts that wait for a person's decision, over all sandboxes that the caller sees."""
    return AskList(await call.sandboxes.grants.asks(caller=call.caller, state="pending"))


@route(
    "POST", "/sandboxes/{id}/http", "execute", body=HttpRequest, answer=HttpAnswer, tool="http_request",
    errors=(504,), max_body=32 * MIB,
)  # fmt: skip
async def http_request(call: Call) -> HttpAnswer:
    """Send one HTTP request through the sandbox's egress gate, as if it came from inside.

    The gate decides and logs as it does for any program inside; certificates are verified; redirects are not followed.
    """
    async with call.use() as managed:
        return await fetch(managed.running().gate, call.body)


# -- audit -----------------------------------------------------------------------------------------


@route("GET", "/sandboxes/{id}/audit", "read", query=AuditFilters, answer=AuditRows, is_poll=True)
async def get_sandbox_audit(call: Call) -> AuditRows:
    """List what the audit log has of a sandbox."""
    return await _rows(call, call.query)


@route("GET", "/sandboxes/{id}/audit/export", "read", query=AuditExport, kind="download")
async def export_sandbox_audit(call: Call) -> Bytes:
    """Export all that the audit log has of a sandbox, as JSON lines, oldest first."""
    sandbox = (await call.sandboxes.registry.get(call.id, caller=call.caller)).sandbox_id
    rows = row_bytes(call, sandbox) if sandbox is not None else iter(())
    return Bytes(rows, f"audit-{call.id}.jsonl", content_type="application/jsonl")


async def _rows(call: Call, filters: AuditFilters) -> AuditRows:
    info = await call.sandboxes.registry.get(call.id, caller=call.caller)
    rows: list[AuditItem] = []
    if info.sandbox_id is not None:
        rows = await read_rows(call, filters, info.sandbox_id)
    return AuditRows(rows)
