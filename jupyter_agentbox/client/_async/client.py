"""Create, find and list a server's sandboxes and snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from jupyter_agentbox.client.blocking import AsyncChunks
from jupyter_agentbox.client.wire import INSTALL_TIMEOUT, Transferred, segment
from jupyter_agentbox.models import (
    AskInfo,
    AskList,
    AuditExport,
    AuditFilters,
    AuditItem,
    AuditRows,
    AuditVerification,
    FileBytes,
    Health,
    LimitsRequest,
    SandboxFilters,
    SandboxInfo,
    SandboxList,
    SandboxRequest,
    SnapshotInfo,
    SnapshotList,
    State,
    ToolInfo,
    ToolList,
    VerifyQuery,
)
from jupyter_agentbox.spec import WORKSPACE

from .connection import AsyncConnection
from .files import open_source, save
from .sandbox import AsyncSandbox

#: Timeout for importing a snapshot, whose file the server checks, in seconds.
_LONG = 600.0
#: Timeout for starting a sandbox, including the starts queued before it, in seconds.
_START = 120.0


class AsyncClient:
    """Client of one server's sandboxes. Use it in a ``with`` statement, or close it.

    Parameters
    ----------
    url : str, optional
        Base URL of the server. Default: ``JUPYTER_AGENTBOX_URL``, or else the newest server of this user that runs
        on this machine and serves sandboxes.
    token : str, optional
        Token for the server. Default: ``JUPYTER_AGENTBOX_TOKEN``, only for the environment's address if there is one,
        or else the token of the server that was found.

    Raises
    ------
    NotFound
        Raised by the first call: no server was given and none was found.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._connection = AsyncConnection(url, token)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection. Sandboxes are not affected."""
        await self._connection.aclose()

    async def url(self) -> str:
        """Return the base URL of the server."""
        return (await self._connection.server()).url

    async def create(
        self,
        *,
        id: str | None = None,
        profile: str | None = None,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        packages: Sequence[str] = (),
        files: Mapping[str, str | bytes] | None = None,
        allowed_hosts: Sequence[str] | None = None,
        memory: int | str | None = None,
        cpus: float | None = None,
        processes: int | None = None,
        disk: int | str | None = None,
        idle_timeout: float | None = None,
        max_life: float | None = None,
        tenant: str | None = None,
        tools: Sequence[str] | None = None,
        blocked_commands: Sequence[str] = (),
        workdir: str = WORKSPACE,
        ports: Sequence[int] = (),
        labels: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> AsyncSandbox:
        """Create a sandbox, and return it when it is ready.

        The parameters are those of :class:`~jupyter_agentbox.models.SandboxRequest`. Its limits are parameters of their
        own, in bytes or as text such as ``"512 MiB"``.

        Parameters
        ----------
        id : str, optional
            Your own id. A repeated identical request returns the existing sandbox.
        keep : bool
            Keep the sandbox at the end of a ``with`` statement. A sandbox that existed before is always kept.
        """
        body = SandboxRequest(
            id=id,
            profile=profile,
            image=image,
            env=dict(env or {}),
            packages=list(packages),
            files={
                name: data if isinstance(data, str) else FileBytes(base64=bytes(data))
                for name, data in (files or {}).items()
            },
            allowed_hosts=None if allowed_hosts is None else list(allowed_hosts),
            limits=LimitsRequest(memory=memory, cpus=cpus, processes=processes, disk=disk),
            idle_timeout=idle_timeout,
            max_life=max_life,
            tenant=tenant,
            tools=None if tools is None else list(tools),
            blocked_commands=list(blocked_commands),
            workdir=workdir,
            ports=list(ports),
            labels=dict(labels or {}),
        )
        managers = {name.partition(":")[0] if ":" in name else "" for name in packages}
        timeout = _START + INSTALL_TIMEOUT * len(managers)
        response = await self._connection.send("POST", "/sandboxes", body=body, timeout=timeout)
        is_new = response.status_code == 201
        info = await self._connection.read(response, SandboxInfo)
        return AsyncSandbox(self._connection, info.id, info, is_kept=keep or not is_new)

    async def get(self, id: str) -> AsyncSandbox:
        """Return an existing sandbox, which is kept at the end of a ``with`` statement. Raises NotFound."""
        info = await self._connection.call("GET", f"/sandboxes/{segment(id)}", SandboxInfo)
        return AsyncSandbox(self._connection, info.id, info, is_kept=True)

    def sandbox(self, id: str) -> AsyncSandbox:
        """Return a sandbox without checking whether it exists."""
        return AsyncSandbox(self._connection, id, None, is_kept=True)

    async def list(
        self,
        *,
        state: State | None = None,
        profile: str | None = None,
        tenant: str | None = None,
        kernel_id: str | None = None,
        label: Sequence[str] = (),
        owner: str | None = None,
    ) -> Sequence[SandboxInfo]:
        """Return the sandboxes that match all filters, including those of notebooks, oldest first."""
        query = SandboxFilters(
            state=state, profile=profile, tenant=tenant, kernel_id=kernel_id, label=[*label], owner=owner
        )
        return (await self._connection.call("GET", "/sandboxes", SandboxList, query=query)).sandboxes

    async def health(self) -> Health:
        """Return whether the server can start sandboxes."""
        return await self._connection.call("GET", "/health", Health)

    async def tools(self) -> Sequence[ToolInfo]:
        """Return the tools that can be named in a sandbox's `tools`."""
        return (await self._connection.call("GET", "/tools", ToolList)).tools

    async def openapi(self) -> dict[str, Any]:
        """Return the API's OpenAPI 3.1 document."""
        document: dict[str, Any] = await self._connection.call("GET", "/openapi.json", dict)
        return document

    async def asks(self) -> Sequence[AskInfo]:
        """Return the hosts that wait for a person's decision, for all sandboxes."""
        return (await self._connection.call("GET", "/egress/asks", AskList)).asks

    async def audit(self, **filters: Any) -> Sequence[AuditItem]:
        """Return the newest rows of the audit log of all sandboxes, for administrators; filters as for a sandbox."""
        return (await self._connection.call("GET", "/audit", AuditRows, query=AuditFilters(**filters))).rows

    async def export_audit(self, target: Path | BinaryIO, **filters: Any) -> Transferred:
        """Download all matching rows of the audit log as JSON lines, oldest first; filters as for a sandbox."""
        chunks = self._connection.download("/audit/export", query=AuditExport(**filters))
        return await save(chunks, target, None)

    async def verify_audit(self, head: str | None = None) -> AuditVerification:
        """Verify the audit log's hash chain. `head` is the head of an earlier verification."""
        query = VerifyQuery(head=head)
        return await self._connection.call("GET", "/audit/verify", AuditVerification, query=query, timeout=_START)

    async def snapshots(self) -> Sequence[SnapshotInfo]:
        """Return all snapshots, oldest first."""
        return (await self._connection.call("GET", "/snapshots", SnapshotList)).snapshots

    async def get_snapshot(self, id: str) -> SnapshotInfo:
        """Return a snapshot's description."""
        return await self._connection.call("GET", f"/snapshots/{segment(id)}", SnapshotInfo)

    async def delete_snapshot(self, id: str) -> None:
        """Delete a snapshot."""
        await self._connection.call("DELETE", f"/snapshots/{segment(id)}", type(None))

    async def export_snapshot(self, id: str, target: Path | BinaryIO) -> Transferred:
        """Download a snapshot as one file, readable only by this user.

        The file contains everything that the sandbox had in memory, including secrets. Keep it private.
        """
        return await save(self._connection.download(f"/snapshots/{segment(id)}/export"), target, None, mode=0o600)

    async def import_snapshot(self, source: bytes | Path | BinaryIO | AsyncChunks) -> SnapshotInfo:
        """Upload the file of an exported snapshot, and become its owner.

        A snapshot of another machine is accepted if both machines have the same key file.

        Raises
        ------
        Damaged
            The file was changed, or was exported by another store.
        """
        measured, chunks = await open_source(source, None, None)
        headers = {"Content-Length": str(measured.size)} if measured is not None else None
        return await self._connection.call(
            "POST", "/snapshots/import", SnapshotInfo, content=chunks, headers=headers, timeout=_LONG
        )
