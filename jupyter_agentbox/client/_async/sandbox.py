"""Control one sandbox: its commands, code, packages, files, egress and log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

from jupyter_agentbox.client.errors import ApiError, CommandFailed, NotFound
from jupyter_agentbox.client.wire import (
    INSTALL_TIMEOUT,
    Output,
    Transferred,
    code_decoders,
    decode_answer,
    output_decoders,
    segment,
    unset,
)
from jupyter_agentbox.models import (
    AskDecision,
    AskInfo,
    AskList,
    AskRequest,
    AuditExport,
    AuditFilters,
    AuditItem,
    AuditRows,
    CodeRequest,
    ContextRequest,
    Encoding,
    ExecAnswer,
    ExecRequest,
    ExitEvent,
    ForkRequest,
    GrantInfo,
    HttpAnswer,
    HttpRequest,
    Installed,
    InstallRequest,
    ProcessAnswer,
    ProcessList,
    ProcessRequest,
    ProgressEvent,
    RestoreRequest,
    SandboxInfo,
    SandboxPatch,
    SnapshotInfo,
    SnapshotList,
    SnapshotRequest,
    TerminalRequest,
    TokenInfo,
    TokenList,
    TokenMade,
    TokenRequest,
)
from jupyter_agentbox.models.outputs import CodeResult, ContextInfo, ContextList, Event

from .connection import AsyncConnection, AsyncStream
from .files import AsyncFiles, save
from .process import AsyncProcess

#: Timeout of a code call without a timeout of its own, in seconds.
_NO_TIMEOUT = 86_400.0
_START, _LONG = 60.0, 300.0
User = Literal["user", "root"]


class AsyncSandbox:
    """A sandbox. At the end of a ``with`` statement it is deleted if it was created here and is not kept.

    Attributes
    ----------
    id : str
        Id of the sandbox.
    info : SandboxInfo or None
        Description at the last call.
    files : AsyncFiles
        Files of its workspace.
    is_kept : bool
        Whether it outlives a ``with`` statement.
    """

    def __init__(self, connection: AsyncConnection, id: str, info: SandboxInfo | None, *, is_kept: bool) -> None:
        self.id = id
        self.info = info
        self.is_kept = is_kept
        self._connection = connection
        self._path = f"/sandboxes/{segment(id)}"
        self.files = AsyncFiles(connection, self._path)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_kept:
            return
        try:
            await self.delete()
        except NotFound:
            pass
        except ApiError:
            if error is None:  # an earlier error is more informative
                raise

    async def refresh(self) -> SandboxInfo:
        """Fetch the current description, and return it. This does not count as use."""
        self.info = await self._connection.call("GET", self._path, SandboxInfo)
        return self.info

    async def patch(
        self,
        *,
        allowed_hosts: Sequence[str] | None = None,
        idle_timeout: float | None = None,
        max_life: float | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SandboxInfo:
        """Change the allowed hosts, the lifetime or the labels. Omitted values stay unchanged."""
        body = SandboxPatch(
            allowed_hosts=unset(None if allowed_hosts is None else list(allowed_hosts)),
            idle_timeout=unset(idle_timeout),
            max_life=unset(max_life),
            labels=unset(None if labels is None else dict(labels)),
        )
        self.info = await self._connection.call("PATCH", self._path, SandboxInfo, body=body)
        return self.info

    async def delete(self) -> None:
        """End the sandbox, and delete its record."""
        await self._connection.call("DELETE", self._path, type(None), timeout=_START)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = "",
        user: User = "user",
        timeout: float = 30.0,
        max_output: int = 10 * 1024 * 1024,
        encoding: Encoding = "utf-8",
        check: bool = False,
    ) -> ExecAnswer:
        """Run a command and wait until it ends.

        Parameters
        ----------
        command : str or sequence of str
            Command line for the shell, or a program and its arguments without a shell.
        timeout : float
            Seconds after which the command and everything that it started is killed.
        max_output : int
            Maximum number of bytes kept of each output.
        encoding : str
            ``base64`` for output that is not text.
        check : bool
            Raise CommandFailed unless the exit status is 0.
        """
        body = _request(command, workdir, env, stdin, user, timeout, max_output, encoding)
        result = await self._connection.call("POST", f"{self._path}/exec", ExecAnswer, body=body, timeout=timeout)
        if check and (result.exit_code != 0 or result.timed_out):
            raise CommandFailed(result)
        return result

    async def stream(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = "",
        user: User = "user",
        timeout: float = 30.0,
    ) -> AsyncStream[Output | ExitEvent]:
        """Run a command and open a stream of its output. The last event is its exit. A slow reader slows it down."""
        body = _request(command, workdir, env, stdin, user, timeout, 0, "base64")
        return await self._connection.events("POST", f"{self._path}/exec/stream", output_decoders(), "exit", body=body)

    async def start(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "user",
    ) -> AsyncProcess:
        """Start a command in the background. It keeps running when the client closes."""
        line, argv = _split(command)
        body = ProcessRequest(command=line, argv=argv, workdir=workdir, env=dict(env or {}), user=user)
        return self._process(await self._connection.call("POST", f"{self._path}/processes", ProcessAnswer, body=body))

    async def open_terminal(
        self,
        command: str | Sequence[str] | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = "user",
    ) -> AsyncProcess:
        """Open a terminal with a login shell or a command. Use the result to follow, write to and resize it."""
        line, argv = _split(command) if command is not None else (None, None)
        body = TerminalRequest(
            command=line, argv=argv, workdir=workdir, env=dict(env or {}), user=user, rows=rows, columns=columns
        )
        return self._process(await self._connection.call("POST", f"{self._path}/terminals", ProcessAnswer, body=body))

    async def processes(self) -> list[AsyncProcess]:
        """Return the background processes and terminals, oldest first."""
        found = await self._connection.call("GET", f"{self._path}/processes", ProcessList)
        return [self._process(info) for info in found.processes]

    async def process(self, id: str) -> AsyncProcess:
        """Return a background process or terminal. Raises NotFound."""
        return self._process(await self._connection.call("GET", f"{self._path}/processes/{segment(id)}", ProcessAnswer))

    def _process(self, info: ProcessAnswer) -> AsyncProcess:
        return AsyncProcess(self._connection, self._path, info)

    async def run_code(
        self,
        code: str,
        *,
        context: str = "default",
        language: str | None = None,
        timeout: float | None = 60.0,
        stream_bytes: int = 1024 * 1024,
        display_bytes: int = 10 * 1024 * 1024,
        displays: int = 1000,
        image_pixels: int | None = 2000,
        image_bytes: int | None = 1_000_000,
        keep_running: bool = False,
    ) -> CodeResult:
        """Run code in a persistent kernel. In a notebook's sandbox, ``default`` is the notebook's own kernel.

        Parameters
        ----------
        language : str, optional
            One of ``info.languages``. A language other than Python has its own context unless you name one.
        timeout : float or None
            Seconds after which the code is interrupted.
        stream_bytes, display_bytes, displays : int
            Maximum bytes of each output stream and of all displays, and maximum number of displays.
        image_pixels, image_bytes : int or None
            Maximum pixels of an image's side, and maximum bytes of an image. Larger images are reduced; see
            ``Display.full_image``. None for no limit.
        keep_running : bool
            Let the code run on when the client disconnects.
        """
        body = CodeRequest(
            code=code,
            context=context,
            language=language,
            timeout=timeout,
            stream_bytes=stream_bytes,
            display_bytes=display_bytes,
            displays=displays,
            image_pixels=image_pixels,
            image_bytes=image_bytes,
            keep_running=keep_running,
        )
        limit = _NO_TIMEOUT if timeout is None else timeout
        return await self._connection.call("POST", f"{self._path}/code", CodeResult, body=body, timeout=limit + _START)

    async def stream_code(
        self,
        code: str,
        *,
        context: str = "default",
        language: str | None = None,
        timeout: float | None = 60.0,
        stream_bytes: int = 1024 * 1024,
        display_bytes: int = 10 * 1024 * 1024,
        displays: int = 1000,
        image_pixels: int | None = 2000,
        image_bytes: int | None = 1_000_000,
        keep_running: bool = False,
    ) -> AsyncStream[Event]:
        """Run code and open a stream of its outputs. The last event is a DoneEvent with the result."""
        body = CodeRequest(
            code=code,
            context=context,
            language=language,
            timeout=timeout,
            stream_bytes=stream_bytes,
            display_bytes=display_bytes,
            displays=displays,
            image_pixels=image_pixels,
            image_bytes=image_bytes,
            keep_running=keep_running,
        )
        return await self._connection.events("POST", f"{self._path}/code/stream", code_decoders(), "done", body=body)

    async def contexts(self) -> list[ContextInfo]:
        """Return the sandbox's kernels."""
        return (await self._connection.call("GET", f"{self._path}/contexts", ContextList)).contexts

    async def create_context(self, name: str = "default", *, language: str | None = None) -> ContextInfo:
        """Start a kernel before it is needed."""
        body = ContextRequest(name=name, language=language)
        return await self._connection.call("POST", f"{self._path}/contexts", ContextInfo, body=body, timeout=_START)

    async def delete_context(self, name: str) -> None:
        """End a kernel. Its variables are lost."""
        path = f"{self._path}/contexts/{segment(name, 'context')}"
        await self._connection.call("DELETE", path, type(None), timeout=_START)

    async def restart_context(self, name: str = "default") -> ContextInfo:
        """Restart a kernel."""
        path = f"{self._path}/contexts/{segment(name, 'context')}/restart"
        return await self._connection.call("POST", path, ContextInfo, timeout=_START)

    async def interrupt_context(self, name: str = "default") -> None:
        """Interrupt the code that a kernel runs, regardless of who sent it."""
        path = f"{self._path}/contexts/{segment(name, 'context')}/interrupt"
        await self._connection.call("POST", path, type(None))

    async def install(
        self,
        *packages: str,
        requirements: str | None = None,
        manager: Literal["pip", "npm", "R"] = "pip",
        upgrade: bool = False,
        timeout: float = INSTALL_TIMEOUT,
    ) -> Installed:
        """Install packages. A failed installation is returned: ``is_ok`` is false, and ``message`` gives the reason."""
        body = InstallRequest(
            packages=list(packages), requirements=requirements, manager=manager, upgrade=upgrade, timeout=timeout
        )
        return await self._connection.call("POST", f"{self._path}/packages", Installed, body=body, timeout=timeout)

    async def stream_install(
        self,
        *packages: str,
        requirements: str | None = None,
        manager: Literal["pip", "npm", "R"] = "pip",
        upgrade: bool = False,
        timeout: float = INSTALL_TIMEOUT,
    ) -> AsyncStream[ProgressEvent | Installed]:
        """Install packages and open a stream of the progress. The last event is the result."""
        body = InstallRequest(
            packages=list(packages), requirements=requirements, manager=manager, upgrade=upgrade, timeout=timeout
        )
        decoders = {
            "progress": lambda data: decode_answer(data, ProgressEvent),
            "result": lambda data: decode_answer(data, Installed),
        }
        return await self._connection.events("POST", f"{self._path}/packages/stream", decoders, "result", body=body)

    async def egress(self) -> GrantInfo:
        """Return the hosts that the sandbox may reach, and those that it may be granted."""
        return await self._connection.call("GET", f"{self._path}/egress", GrantInfo)

    async def egress_log(self, **filters: Any) -> list[AuditItem]:
        """Return the gate's decisions on this sandbox; filters as for :meth:`audit`."""
        query = AuditFilters(**filters)
        return (await self._connection.call("GET", f"{self._path}/egress/log", AuditRows, query=query)).rows

    async def ask(self, host: str, why: str = "") -> AskInfo:
        """Request a host. The request is pending until a person decides."""
        body = AskRequest(host=host, why=why)
        return await self._connection.call("POST", f"{self._path}/egress/asks", AskInfo, body=body)

    async def asks(self) -> list[AskInfo]:
        """Return the requested hosts."""
        return (await self._connection.call("GET", f"{self._path}/egress/asks", AskList)).asks

    async def get_ask(self, id: str) -> AskInfo:
        """Return the state of a request for a host."""
        return await self._connection.call("GET", f"{self._path}/egress/asks/{segment(id)}", AskInfo)

    async def decide(self, id: str, decision: Literal["allow", "deny"], note: str = "") -> AskInfo:
        """Allow or deny a requested host."""
        body = AskDecision(decision=decision, note=note)
        return await self._connection.call("POST", f"{self._path}/egress/asks/{segment(id)}", AskInfo, body=body)

    async def http(
        self,
        url: str,
        *,
        method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] = "GET",
        headers: Mapping[str, str] | None = None,
        body: str | bytes = "",
        timeout: float = 30.0,
        max_bytes: int = 1024 * 1024,
    ) -> HttpAnswer:
        """Send one HTTP request through the egress gate. Redirects are not followed."""
        request = HttpRequest(
            url=url,
            method=method,
            headers=dict(headers or {}),
            body=body if isinstance(body, str) else "",
            body_base64=b"" if isinstance(body, str) else body,
            timeout=timeout,
            max_bytes=max_bytes,
        )
        return await self._connection.call("POST", f"{self._path}/http", HttpAnswer, body=request, timeout=timeout)

    async def create_token(
        self, *verbs: Literal["read", "write", "execute", "restore"], name: str = "agent", life: float | None = None
    ) -> TokenMade:
        """Create a token for this sandbox only. It expires with the sandbox. Its text is returned only once."""
        body = TokenRequest(verbs=list(verbs), name=name, life=life)
        return await self._connection.call("POST", f"{self._path}/tokens", TokenMade, body=body)

    async def tokens(self) -> list[TokenInfo]:
        """Return the valid tokens for this sandbox."""
        return (await self._connection.call("GET", f"{self._path}/tokens", TokenList)).tokens

    async def revoke_token(self, id: str) -> None:
        """Revoke a token immediately."""
        await self._connection.call("DELETE", f"{self._path}/tokens/{segment(id)}", type(None))

    async def take_snapshot(self, name: str = "", note: str = "") -> SnapshotInfo:
        """Save the sandbox's current state while it keeps running."""
        path, body = f"{self._path}/snapshots", SnapshotRequest(name=name, note=note)
        return await self._connection.call("POST", path, SnapshotInfo, body=body, timeout=_LONG)

    async def snapshots(self) -> list[SnapshotInfo]:
        """Return the sandbox's snapshots, oldest first."""
        return (await self._connection.call("GET", f"{self._path}/snapshots", SnapshotList)).snapshots

    async def restore(self, snapshot: str) -> SandboxInfo:
        """Restore the sandbox to one of its snapshots."""
        return await self._change("restore", RestoreRequest(snapshot=snapshot))

    async def fork(
        self,
        id: str | None = None,
        *,
        snapshot: str | None = None,
        keep_seeds: bool = False,
        as_kernel: bool = False,
        keep: bool = False,
    ) -> AsyncSandbox:
        """Start a copy from the current state or from a snapshot. A ``with`` statement ends it unless kept.

        `keep_seeds` leaves random generators unchanged. `as_kernel` creates a Jupyter kernel, ``info.kernels[0].id``.
        """
        body = ForkRequest(id=id, snapshot=snapshot, keep_seeds=keep_seeds, as_kernel=as_kernel)
        info = await self._connection.call("POST", f"{self._path}/fork", SandboxInfo, body=body, timeout=_LONG)
        return AsyncSandbox(self._connection, info.id, info, is_kept=keep or as_kernel)

    async def park(self) -> SandboxInfo:
        """Save the sandbox to disk and free its memory. Its next use, or any message to its kernel, wakes it."""
        return await self._change("park")

    async def wake(self) -> SandboxInfo:
        """Wake the sandbox before its next use, if it is parked."""
        return await self._change("wake")

    async def revive(self) -> SandboxInfo:
        """Restart the sandbox with its files after a crash or lack of memory or disk; see ``info.end.kept_until``."""
        return await self._change("revive")

    async def _change(self, what: str, body: RestoreRequest | None = None) -> SandboxInfo:
        self.info = await self._connection.call("POST", f"{self._path}/{what}", SandboxInfo, body=body, timeout=_LONG)
        return self.info

    async def audit(self, **wanted: Any) -> list[AuditItem]:
        """Return the newest matching rows; fields as in :class:`~jupyter_agentbox.models.AuditFilters`."""
        return (await self._connection.call("GET", f"{self._path}/audit", AuditRows, query=AuditFilters(**wanted))).rows

    async def export_audit(self, target: Path | BinaryIO, **filters: Any) -> Transferred:
        """Download the sandbox's rows of the audit log as JSON lines; filters are the fields of `AuditExport`."""
        chunks = self._connection.download(f"{self._path}/audit/export", query=AuditExport(**filters))
        return await save(chunks, target, None)


def _split(command: str | Sequence[str]) -> tuple[str | None, list[str] | None]:
    return (command, None) if isinstance(command, str) else (None, list(command))


def _request(
    command: str | Sequence[str],
    workdir: str | None,
    env: Mapping[str, str] | None,
    stdin: str | bytes,
    user: User,
    timeout: float,
    max_output: int,
    encoding: Encoding,
) -> ExecRequest:
    line, argv = _split(command)
    return ExecRequest(
        command=line,
        argv=argv,
        workdir=workdir,
        env=dict(env or {}),
        stdin=stdin if isinstance(stdin, str) else "",
        stdin_base64=b"" if isinstance(stdin, str) else bytes(stdin),
        user=user,
        timeout=timeout,
        max_output=max_output,
        encoding=encoding,
    )
