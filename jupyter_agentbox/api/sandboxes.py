"""Operations on sandboxes themselves, and on the hosts that they may reach."""

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
from jupyter_agentbox.models.folders import FolderList, FolderRemoval, FolderRequest
from jupyter_agentbox.models.service import (
    GrantQuery,
    HostConsent,
    HostRevocation,
    HostRules,
    HostVerdict,
    SavedRevocation,
)
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
    """Create a sandbox, and wait until it is ready.

    If you give an `id`, repeating an identical request returns the existing sandbox with status 200. A different
    request with the same id is a conflict. If the client disconnects early, the sandbox is removed, unless its id was
    given.
    """
    info, is_new = await call.sandboxes.create(call.body, caller=call.caller, on_progress=call.on_progress)
    if not is_new:
        call.status = 200
    return info


@route("GET", "/sandboxes", "read", query=SandboxFilters, answer=SandboxList, is_poll=True)
async def list_sandboxes(call: Call) -> SandboxList:
    """List the caller's sandboxes, and those of this server's notebooks."""
    return SandboxList(await call.sandboxes.registry.list(call.query, caller=call.caller))


@route("GET", "/sandboxes/{id}", "read", answer=SandboxInfo, is_poll=True)
async def get_sandbox(call: Call) -> SandboxInfo:
    """Get a sandbox, with its state and, if it has ended, the cause.

    Does not count as use.
    """
    return await call.sandboxes.registry.get(call.id, caller=call.caller)


@route("PATCH", "/sandboxes/{id}", "write", body=SandboxPatch, answer=SandboxInfo, errors=(409,), is_owners=True)
async def patch_sandbox(call: Call) -> SandboxInfo:
    """Change the allowed hosts, timeouts or labels of a running sandbox.

    Restrictions take effect immediately: connections that are no longer allowed are closed. No value can exceed what
    the profile allows.
    """
    return await call.sandboxes.patch(call.id, call.body, caller=call.caller)


@route("DELETE", "/sandboxes/{id}", "write", status=204, errors=(409,))
async def delete_sandbox(call: Call) -> None:
    """End a sandbox, and delete its record."""
    await call.sandboxes.delete(call.id, caller=call.caller)


@route("POST", "/sandboxes/{id}/revive", "execute", answer=SandboxInfo, errors=(409, 429))
async def revive_sandbox(call: Call) -> SandboxInfo:
    """Restart a sandbox that crashed or ran out of memory or disk, with the files of its workspace.

    It keeps its id, tokens and settings, as far as policy still allows them. Memory and everything outside the
    workspace are lost. Possible until `end.kept_until`. Has no effect on a running sandbox.
    """
    return await call.sandboxes.revive(call.id, caller=call.caller)


# -- egress ----------------------------------------------------------------------------------------


@route("GET", "/sandboxes/{id}/egress", "read", query=GrantQuery, answer=GrantInfo, is_poll=True)
async def get_egress(call: Call) -> GrantInfo:
    """Get the hosts that a sandbox may reach, and whether and for what the caller may allow each refused host."""
    host = call.query.host if call.query is not None else None  # MCP passes no query
    found = await call.sandboxes.grants.get(call.id, host, caller=call.caller)
    if await call.is_allowed("write"):
        return found

    def refuse(verdict: HostVerdict) -> HostVerdict:
        message = verdict.message or "you have no write permission"
        return msgspec.structs.replace(verdict, may_allow=False, message=message, scopes=[])

    return msgspec.structs.replace(
        found,
        refused=[refuse(verdict) for verdict in found.refused],
        verdict=refuse(found.verdict) if found.verdict is not None else None,
    )


@route(
    "POST", "/sandboxes/{id}/egress/rules", "write", body=HostConsent, answer=GrantInfo, errors=(409,), is_owners=True
)
async def allow_host(call: Call) -> GrantInfo:
    """Allow a host for a sandbox's kernel, for its notebook, or always for its profile. Only a person may do this.

    `Policy.user_may_allow` limits which hosts. A name that resolves to a private address is refused. Takes effect
    immediately, and again when the kernel restarts.
    """
    await call.sandboxes.grants.allow(call.id, call.body.host, call.body.scope, caller=call.caller)
    return await call.sandboxes.grants.get(call.id, caller=call.caller)


@route(
    "DELETE", "/sandboxes/{id}/egress/rules", "write", query=HostRevocation, answer=GrantInfo, errors=(409,),
    is_owners=True,
)  # fmt: skip
async def revoke_host(call: Call) -> GrantInfo:
    """Revoke a host that a person allowed for a sandbox. Open connections to it are closed."""
    await call.sandboxes.grants.revoke(call.id, call.query.host, call.query.scope, caller=call.caller)
    return await call.sandboxes.grants.get(call.id, caller=call.caller)


@route("GET", "/egress/rules", "read", answer=HostRules, is_poll=True, is_owners=True)
async def list_allowed_hosts(call: Call) -> HostRules:
    """List all hosts that a person allowed, for any kernel, notebook or profile."""
    return HostRules(await call.sandboxes.grants.saved_rules(caller=call.caller))


@route("DELETE", "/egress/rules", "write", query=SavedRevocation, status=204, errors=(404, 409), is_owners=True)
async def revoke_allowed_host(call: Call) -> None:
    """Revoke a host that a person allowed. Open connections to it are closed."""
    query = call.query
    await call.sandboxes.grants.revoke_saved(query.host, query.scope, query.target, caller=call.caller)


@route("GET", "/sandboxes/{id}/folders", "read", answer=FolderList, is_poll=True)
async def list_folders(call: Call) -> FolderList:
    """List the folders of the host that a person added to a notebook's sandbox."""
    found = await call.sandboxes.folders.list(call.id, caller=call.caller)
    if found.may_add and not await call.is_allowed("write"):
        return msgspec.structs.replace(found, may_add=False, message="you have no write permission")
    return found


@route("POST", "/sandboxes/{id}/folders", "write", body=FolderRequest, answer=FolderList, errors=(409,), is_owners=True)
async def add_folder(call: Call) -> FolderList:
    """Add a folder of the host to a notebook's sandbox, read-only. Only a person may do this.

    The kernel sees it after its next start, under its own path, and under its path relative to the notebook's folder.
    `Policy.user_may_add_folders` limits which folders. Files that `Policy.hidden_files` names are hidden in it.
    """
    await call.sandboxes.folders.add(call.id, call.body.source, call.body.scope, caller=call.caller)
    return await call.sandboxes.folders.list(call.id, caller=call.caller)


@route(
    "DELETE", "/sandboxes/{id}/folders", "write", query=FolderRemoval, answer=FolderList, errors=(409,), is_owners=True
)
async def remove_folder(call: Call) -> FolderList:
    """Remove a folder that a person added. The kernel sees it until its next start."""
    await call.sandboxes.folders.remove(call.id, call.query.source, call.query.scope, caller=call.caller)
    return await call.sandboxes.folders.list(call.id, caller=call.caller)


@route("GET", "/sandboxes/{id}/egress/log", "read", query=AuditFilters, answer=AuditRows, is_poll=True)
async def get_egress_log(call: Call) -> AuditRows:
    """List the gate's decisions on a sandbox's connections."""
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
    """Request access to a host. The request is pending until a person decides.

    A host that neither the profile covers nor a person may allow (`Policy.user_may_allow`) is refused immediately.
    """
    return await call.sandboxes.grants.ask(call.id, call.body.host, call.body.why, caller=call.caller)


@route("GET", "/sandboxes/{id}/egress/asks", "read", answer=AskList, is_poll=True)
async def list_asks(call: Call) -> AskList:
    """List the host requests of a sandbox."""
    return AskList(await call.sandboxes.grants.asks(call.id, caller=call.caller))


@route("GET", "/sandboxes/{id}/egress/asks/{ask}", "read", answer=AskInfo, is_poll=True)
async def get_ask(call: Call) -> AskInfo:
    """Get the state of a host request."""
    return await call.sandboxes.grants.get_ask(call.id, call.params["ask"], caller=call.caller)


@route(
    "POST", "/sandboxes/{id}/egress/asks/{ask}", "write", body=AskDecision, answer=AskInfo, errors=(409,),
    is_owners=True,
)  # fmt: skip
async def decide_ask(call: Call) -> AskInfo:
    """Allow or deny a host request."""
    return await call.sandboxes.grants.decide(
        call.id, call.params["ask"], is_allowed=call.body.decision == "allow", note=call.body.note, caller=call.caller
    )


@route("GET", "/egress/asks", "read", answer=AskList, is_poll=True)
async def list_pending_asks(call: Call) -> AskList:
    """List pending host requests of all sandboxes that the caller can see."""
    return AskList(await call.sandboxes.grants.asks(caller=call.caller, state="pending"))


@route(
    "POST", "/sandboxes/{id}/http", "execute", body=HttpRequest, answer=HttpAnswer, tool="http_request",
    errors=(504,), max_body=32 * MIB,
)  # fmt: skip
async def http_request(call: Call) -> HttpAnswer:
    """Send one HTTP request through the sandbox's egress gate, on behalf of the sandbox.

    The gate decides and logs as for any program inside. Certificates are verified. Redirects are not followed.
    """
    async with call.use() as managed:
        return await fetch(managed.running().gate, call.body)


# -- audit -----------------------------------------------------------------------------------------


@route("GET", "/sandboxes/{id}/audit", "read", query=AuditFilters, answer=AuditRows, is_poll=True)
async def get_sandbox_audit(call: Call) -> AuditRows:
    """List audit log rows of a sandbox."""
    return await _rows(call, call.query)


@route("GET", "/sandboxes/{id}/audit/export", "read", query=AuditExport, kind="download")
async def export_sandbox_audit(call: Call) -> Bytes:
    """Export all audit log rows of a sandbox as JSON lines, oldest first."""
    sandbox = (await call.sandboxes.registry.get(call.id, caller=call.caller)).sandbox_id
    rows = row_bytes(call, sandbox) if sandbox is not None else iter(())
    return Bytes(rows, f"audit-{call.id}.jsonl", content_type="application/jsonl")


async def _rows(call: Call, filters: AuditFilters) -> AuditRows:
    info = await call.sandboxes.registry.get(call.id, caller=call.caller)
    rows: list[AuditItem] = []
    if info.sandbox_id is not None:
        rows = await read_rows(call, filters, info.sandbox_id)
    return AuditRows(rows)
