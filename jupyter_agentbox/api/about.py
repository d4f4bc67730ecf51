"""Operations on the service as a whole: health, tools, the audit log, and the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from jupyter_agentbox.errors import PolicyRefused
from jupyter_agentbox.models import (
    TOOLS,
    AuditExport,
    AuditFilters,
    AuditItem,
    AuditRows,
    AuditVerification,
    Health,
    ToolInfo,
    ToolList,
    VerifyQuery,
)
from jupyter_agentbox.storage.audit.log import AuditRow

from .call import Bytes, Call, blocking
from .openapi import make_document
from .routes import TABLE, route


@route("GET", "/health", "read", is_open=True, answer=Health, is_poll=True, errors=(503,))
async def get_health(call: Call) -> Health:
    """Check whether this server can start sandboxes."""
    health: Health = await call.service.health()
    return health


@route("GET", "/tools", "read", is_open=True, answer=ToolList, is_poll=True)
async def list_tools(call: Call) -> ToolList:
    """List the tools that can be named in a sandbox's `tools`."""
    return ToolList([ToolInfo(name, text) for name, text in TOOLS.items()])


@route("GET", "/openapi.json", "read", is_open=True, answer=dict[str, Any], is_poll=True)
async def get_openapi(call: Call) -> dict[str, Any]:
    """Get the OpenAPI 3.1 document of this API."""
    document = make_document(TABLE)
    return {**document, "servers": [{"url": call.service.root}]}


@route("GET", "/audit", "read", query=AuditFilters, answer=AuditRows, is_poll=True, errors=(503,))
async def get_audit(call: Call) -> AuditRows:
    """List audit log rows of all sandboxes. Requires an administrator (`Policy.admins`) or the server's own user."""
    _check_admin(call)
    return AuditRows(await read_rows(call, call.query, None))


@route("GET", "/audit/export", "read", query=AuditExport, kind="download", errors=(503,))
async def export_audit(call: Call) -> Bytes:
    """Export all matching audit log rows of all sandboxes as JSON lines, oldest first. For administrators."""
    _check_admin(call)
    return Bytes(row_bytes(call, None), "audit.jsonl", content_type="application/jsonl")


@route("GET", "/audit/verify", "read", query=VerifyQuery, answer=AuditVerification, is_poll=True, errors=(503,))
async def verify_audit(call: Call) -> AuditVerification:
    """Verify the hash chain of the audit log. For administrators.

    Store the returned `head` where processes that can write the log cannot change it, and pass it to the next
    verification. Without it, a log that was rewritten completely cannot be detected.
    """
    _check_admin(call)
    found = await blocking(call.sandboxes.registry.audit().verify, call.query.head)
    return AuditVerification(**asdict(found))


def _check_admin(call: Call) -> None:
    call.caller.check_unscoped("read the whole audit log")
    if not (call.caller.is_admin or call.caller.name == call.sandboxes.registry.server_owner):
        raise PolicyRefused("only administrators may read the whole audit log", setting="Policy.admins")


async def read_rows(call: Call, filters: AuditFilters, sandbox_id: str | None) -> list[AuditItem]:
    """Read rows of the audit log."""
    rows: list[AuditRow] = await call.sandboxes.registry.audit().aquery(**_wanted(filters, sandbox_id))
    return [AuditItem(**row.to_dict()) for row in rows]


def row_bytes(call: Call, sandbox_id: str | None) -> Iterator[bytes]:
    """Yield all rows that match the call's query as JSON lines. Blocks."""
    for rows in call.sandboxes.registry.audit().pages(**_wanted(call.query, sandbox_id)):
        yield b"".join(json.dumps(row.to_dict(), ensure_ascii=False).encode() + b"\n" for row in rows)


def _wanted(filters: AuditExport, sandbox_id: str | None) -> dict[str, Any]:
    wanted = {name: value for name, value in msgspec.structs.asdict(filters).items() if value is not None}
    return wanted if sandbox_id is None else {**wanted, "sandbox": sandbox_id}
