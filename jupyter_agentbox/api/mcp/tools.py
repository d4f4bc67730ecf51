"""Define the tools. Each calls an operation of the REST API, whose rights, rules and audit rows therefore apply.

A tool's docstring is its description for models. To add a tool, write it here above its operation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from jupyter_agentbox.api import code, commands, files, packages, sandboxes, snapshots
from jupyter_agentbox.api.call import Call, Chunks
from jupyter_agentbox.api.images import Images, bitmap_type
from jupyter_agentbox.api.routes import READY, TABLE, Route
from jupyter_agentbox.api.service import Service
from jupyter_agentbox.errors import InvalidRequest, NotAuthorized, NotFound
from jupyter_agentbox.models import (
    AppendRequest,
    AskRequest,
    CodeRequest,
    EditRequest,
    ExecRequest,
    ForkRequest,
    GlobQuery,
    GrepQuery,
    HttpRequest,
    InstallRequest,
    ListQuery,
    OutputQuery,
    ProcessRequest,
    ReadQuery,
    RestoreRequest,
    SandboxFilters,
    SandboxInfo,
    SandboxList,
    SandboxRequest,
    SnapshotRequest,
    WriteRequest,
)
from jupyter_agentbox.models.long_output import OutputText
from jupyter_agentbox.sandbox.tokens import Verb
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.spec import MIB

from . import arguments as schemas
from . import results
from .results import Result

Work = TypeVar("Work", bound=Callable[..., Awaitable[Result]])

#: Bytes of displays that are received, before images are reduced and text is shortened.
MAX_DISPLAYS = 32 * MIB
#: Bytes of the log of a failed installation that are returned.
MAX_INSTALL_LOG = 4000
_ROUTES = {route.operation: route for route in TABLE}


@dataclass(frozen=True)
class Access:
    """Who calls, and with which rights. Created for each request.

    Parameters
    ----------
    service : Service
    caller : coroutine function
        Returns the caller, given the verb of the call.
    is_allowed : coroutine function
        Returns whether the caller may ``read``, ``write``, ``execute`` or ``restore``.
    gone : Event
        Set when the client has disconnected.
    """

    service: Service
    caller: Callable[[Verb], Awaitable[Caller]]
    is_allowed: Callable[[str], Awaitable[bool]]
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class ToolContext:
    """Context of one call of a tool.

    Parameters
    ----------
    access : Access
    on_progress : callable
        Called with output during the work.
    """

    access: Access
    on_progress: Callable[[str], None]

    async def make(self, operation: Callable[..., Any], args: schemas.Target, **values: Any) -> Call:
        """Return a call of an operation on the requested sandbox. Raises NotAuthorized, NotFound, InvalidRequest."""
        call = await self.make_unbound(operation, **values)
        call.params["id"] = args.sandbox or await self._default_sandbox(call.caller)
        return call

    async def make_unbound(
        self, operation: Callable[..., Any], *, body: Any = None, query: Any = None, **params: str
    ) -> Call:
        """Return a call of an operation that is not on one sandbox."""
        route = _ROUTES[operation]
        if not await self.access.is_allowed(route.right):
            raise NotAuthorized(f"you have no {route.right} permission on this server's sandboxes")
        caller, loop = await self.access.caller(route.right), asyncio.get_running_loop()
        if route.is_owners:
            caller.check_unscoped("fork or change a sandbox")
        return Call(
            route=route,
            params=dict(params),
            query=query,
            body=body,
            caller=caller,
            sandboxes=self.access.service.sandboxes,
            headers={},
            chunks=Chunks(),
            service=self.access.service,
            is_allowed=self.access.is_allowed,
            on_progress=lambda text: loop.call_soon_threadsafe(self.on_progress, text),
        )

    async def do(self, operation: Callable[..., Any], args: schemas.Target, **values: Any) -> Any:
        """Call an operation on a sandbox."""
        call = await self.make(operation, args, **values)
        return await call.route.operation(call)

    async def events(
        self, operation: Callable[..., Any], args: schemas.Target, **values: Any
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Call an operation that streams events."""
        call = await self.make(operation, args, **values)
        async with contextlib.aclosing(await call.route.operation(call)) as events:
            async for event in events:
                if event is not READY:
                    yield event

    async def _default_sandbox(self, caller: Caller) -> str:
        if caller.scope is not None:
            return caller.scope.sandbox
        found = await self.access.service.sandboxes.registry.list(SandboxFilters(owner=caller.name), caller=caller)
        own = [info.id for info in found if info.kind == "session" and _is_usable(info)]
        if len(own) == 1:
            return own[0]
        if not own:
            raise NotFound("you have no sandbox; create one with create_sandbox", field="sandbox")
        raise InvalidRequest(f"several sandboxes; set sandbox to one of: {', '.join(own[:20])}", field="sandbox")


@dataclass(frozen=True)
class Tool:
    """A tool.

    Parameters
    ----------
    name, title : str
    route : Route
        The operation behind it, which defines the required right.
    arguments : type
        Struct of its arguments.
    work : coroutine function
        The function. Takes a :class:`ToolContext` and the arguments.
    is_destructive, is_open_world : bool
        Hints for clients: whether it may destroy data, and whether it may reach the outside world.
    is_long : bool
        Whether it may take long, so that the client is notified when it starts.
    """

    name: str
    title: str
    route: Route
    arguments: type[msgspec.Struct]
    work: Callable[[ToolContext, Any], Awaitable[Result]]
    is_destructive: bool = False
    is_open_world: bool = False
    is_long: bool = False

    @property
    def is_read_only(self) -> bool:
        """Whether it changes nothing."""
        return self.route.action == "read"

    @property
    def description(self) -> str:
        """The description for models."""
        return " ".join((self.work.__doc__ or "").split())

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of its arguments, with an object at the top level."""
        generated = msgspec.json.schema(self.arguments)
        others = generated["$defs"]
        schema: dict[str, Any] = others.pop(self.arguments.__name__)
        schema = {key: value for key, value in schema.items() if key not in ("title", "description")}
        return {**schema, "$defs": others} if others else schema


TOOLS: dict[str, Tool] = {}


def tool(
    name: str, title: str, operation: Callable[..., Any], arguments: type[msgspec.Struct], **hints: bool
) -> Callable[[Work], Work]:
    """Add a tool to the table; see :class:`Tool`."""

    def add(work: Work) -> Work:
        TOOLS[name] = Tool(name, title, _ROUTES[operation], arguments, work, **hints)
        return work

    return add


def _is_usable(info: SandboxInfo) -> bool:
    """Return whether a sandbox is running or can be revived."""
    return info.state != "ended" or (info.end is not None and info.end.kept_until is not None)


# -- sandboxes -------------------------------------------------------------------------------------


@tool("create_sandbox", "Create a sandbox", sandboxes.create_sandbox, schemas.CreateSandbox, is_long=True)
async def create_sandbox(context: ToolContext, args: schemas.CreateSandbox) -> Result:
    """Create an isolated sandbox with Python, a shell, its own workspace at `/workspace`, and network access to allowed
    hosts only. It ends after some time without use, so save important files with `download`."""
    values = {name: value for name, value in msgspec.structs.asdict(args).items() if value is not None}
    call = await context.make_unbound(sandboxes.create_sandbox, body=SandboxRequest(**values))
    return results.data(await call.route.operation(call))


@tool("list_sandboxes", "List sandboxes", sandboxes.list_sandboxes, schemas.ListSandboxes)
async def list_sandboxes(context: ToolContext, args: schemas.ListSandboxes) -> Result:
    """List your sandboxes, and those of open notebooks that you may use (kind `notebook`). Code sent to a notebook's
    sandbox runs in the notebook's own kernel and shares its variables."""
    call = await context.make_unbound(sandboxes.list_sandboxes, query=SandboxFilters(state=args.state))
    found: SandboxList = await call.route.operation(call)
    return results.data(SandboxList([info for info in found.sandboxes if _is_usable(info) or args.state == "ended"]))


@tool("revive_sandbox", "Revive a sandbox", sandboxes.revive_sandbox, schemas.Target, is_long=True)
async def revive_sandbox(context: ToolContext, args: schemas.Target) -> Result:
    """Restart a sandbox that crashed or ran out of memory or disk, with the files of its workspace. Variables, running
    programs and installed packages are lost. If its disk was full, delete files immediately."""
    return results.data(await context.do(sandboxes.revive_sandbox, args))


@tool("stop_sandbox", "End a sandbox", sandboxes.delete_sandbox, schemas.Target, is_destructive=True)
async def stop_sandbox(context: ToolContext, args: schemas.Target) -> Result:
    """End a sandbox and everything that runs in it. Its files are deleted, unless it has a tenant."""
    await context.do(sandboxes.delete_sandbox, args)
    return results.answer("the sandbox has ended")


# -- snapshots -------------------------------------------------------------------------------------


@tool("snapshot", "Take a snapshot", snapshots.take_snapshot, schemas.Snapshot, is_long=True)
async def snapshot(context: ToolContext, args: schemas.Snapshot) -> Result:
    """Save the sandbox's state, including variables, running programs and files, so that `restore` can return to it.
    Take a snapshot before anything risky. A mounted folder of the user is not included."""
    body = SnapshotRequest(name=args.name, note=args.note)
    return results.data(await context.do(snapshots.take_snapshot, args, body=body))


@tool("list_snapshots", "List snapshots", snapshots.list_snapshots, schemas.Target)
async def list_snapshots(context: ToolContext, args: schemas.Target) -> Result:
    """List the snapshots of the sandbox, oldest first."""
    return results.data(await context.do(snapshots.list_snapshots, args))


@tool("restore", "Restore a snapshot", snapshots.restore_sandbox, schemas.Restore, is_destructive=True, is_long=True)
async def restore(context: ToolContext, args: schemas.Restore) -> Result:
    """Restore the sandbox to one of its snapshots. All later changes are lost."""
    body = RestoreRequest(snapshot=args.snapshot)
    return results.data(await context.do(snapshots.restore_sandbox, args, body=body))


@tool("fork", "Fork the sandbox", snapshots.fork_sandbox, schemas.Fork, is_long=True)
async def fork(context: ToolContext, args: schemas.Fork) -> Result:
    """Start a copy of the sandbox from its current state or from a snapshot, to try something without changing it."""
    body = ForkRequest(id=args.id, snapshot=args.snapshot)
    return results.data(await context.do(snapshots.fork_sandbox, args, body=body))


# -- code and commands -----------------------------------------------------------------------------


@tool("run_code", "Run code", code.stream_code, schemas.RunCode, is_destructive=True, is_open_world=True)
async def run_code(context: ToolContext, args: schemas.RunCode) -> Result:
    """Run code in a persistent Jupyter kernel. Returns its output, the value of the last expression, errors, and plots
    as images. Variables and imports persist between calls."""
    body = CodeRequest(
        code=args.code,
        context=args.context,
        language=args.language,
        timeout=args.timeout,
        stream_bytes=args.max_output,
        display_bytes=MAX_DISPLAYS,
        image_pixels=args.image_pixels,
        image_bytes=args.image_bytes,
    )
    async with contextlib.aclosing(context.events(code.stream_code, args, body=body)) as events:
        async for name, event in events:
            if name == "stream":
                context.on_progress(event.text)
            elif name == "done":
                return results.code(event.result, args.max_output)
    raise AssertionError("a run ends with its result")


@tool("bash", "Run a command", commands.stream_command, schemas.Bash, is_destructive=True, is_open_world=True)
async def bash(context: ToolContext, args: schemas.Bash) -> Result:
    """Run a shell command in the sandbox. Returns its output and exit code. Each call starts a new shell: working
    directory and variables do not persist. With `background`, the command keeps running after the call."""
    if args.background:
        request = ProcessRequest(command=args.command, workdir=args.workdir)
        return results.data(await context.do(commands.start_process, args, body=request))
    buffers = {name: OutputText(args.max_output) for name in ("stdout", "stderr")}
    body = ExecRequest(command=args.command, workdir=args.workdir, timeout=args.timeout)
    async with contextlib.aclosing(context.events(commands.stream_command, args, body=body)) as events:
        async for name, event in events:
            if name != "exit":
                buffers[name].add(event.text)
                context.on_progress(event.text)
                continue
            stdout, stderr = (results.strip_control(buffer.value()) for buffer in buffers.values())
            end = f"[exit code {event.exit_code}]" if event.exit_code else ""
            if event.timed_out:
                end = f"[killed after {args.timeout:g} s; set a longer timeout, or run it in the background]"
            texts = (stdout, f"[stderr]\n{stderr}" if stderr else "", end)
            text = "\n".join(part.rstrip("\n") for part in (*texts, results.refusals(event.refused)) if part)
            return results.answer(text, is_error=event.timed_out)
    raise AssertionError("a command's events end with its exit")


@tool("bash_output", "Read background output", commands.read_output, schemas.BashOutput)
async def bash_output(context: ToolContext, args: schemas.BashOutput) -> Result:
    """Read the output of a background command, starting at an offset, and its current state."""
    query = OutputQuery(stream=args.stream, offset=args.offset, limit=args.limit, wait=args.wait)
    chunk = await context.do(commands.read_output, args, query=query, process=args.process)
    info = await context.do(commands.get_process, args, process=args.process)
    state = info.state if info.exit_code is None else f"{info.state} with code {info.exit_code}"
    dropped = f"[{chunk.dropped:,} earlier bytes are no longer available]" if chunk.dropped else ""
    note = (
        f"[{state}; next offset {chunk.next_offset}{', end of output' if chunk.is_end else ''}; printed so far: "
        f"{info.stdout_bytes:,} bytes to stdout, {info.stderr_bytes:,} to stderr]"
    )
    return results.answer(dropped, results.strip_control(chunk.data), note)


@tool("bash_kill", "Kill a background command", commands.kill_process, schemas.Process, is_destructive=True)
async def bash_kill(context: ToolContext, args: schemas.Process) -> Result:
    """Kill a background command with all of its child processes."""
    return results.data(await context.do(commands.kill_process, args, process=args.process))


@tool("install", "Install packages", packages.stream_installation, schemas.Install, is_open_world=True)
async def install(context: ToolContext, args: schemas.Install) -> Result:
    """Install Python (pip), Node.js (npm) or R packages into the sandbox. They are lost when the sandbox ends."""
    values = {name: value for name, value in msgspec.structs.asdict(args).items() if name != "sandbox"}
    async with contextlib.aclosing(
        context.events(packages.stream_installation, args, body=InstallRequest(**values))
    ) as events:
        async for name, event in events:
            if name == "progress":
                context.on_progress(event.text + "\n")
                continue
            log = "" if event.is_ok else results.shorten(event.log, MAX_INSTALL_LOG)
            return results.answer(
                results.strip_control(event.message), log, results.refusals(event.refused), is_error=not event.is_ok
            )
    raise AssertionError("an installation ends with its result")


# -- files -----------------------------------------------------------------------------------------


@tool("read", "Read a file", files.read_file, schemas.Read)
async def read(context: ToolContext, args: schemas.Read) -> Result:
    """Read a text file or a part of it. An image file is returned as an image."""
    content, found = await _part(context, args, args.path, args.offset, args.length)
    mime = bitmap_type(content) if found.offset == 0 else None
    if mime is not None and found.truncated and found.size <= schemas.MAX_PART:
        content, found = await _part(context, args, args.path, 0, schemas.MAX_PART)
    if mime is not None and not found.truncated:
        return results.answer(*await _image(context, args, content, mime, found.path))
    text = results.whole_text(content, not found.truncated)
    if text is None:
        return results.answer(f"{found.path} is not text ({found.size:,} bytes); use download", is_error=True)
    if not found.truncated and not found.offset:
        return results.answer(text or "[empty file]")
    end = found.offset + len(text.encode())
    more = f"; continue at offset {end}" if end < found.size else ""
    return results.answer(text, f"[bytes {found.offset} to {end} of {found.size}{more}]")


async def _image(
    context: ToolContext, args: schemas.Target, content: bytes, mime: str, path: str | None = None
) -> tuple[str | results.Block, ...]:
    """Return the parts of a result for an image, which is reduced if it is large."""
    call = await context.make(files.read_file, args)
    managed = await call.sandboxes.registry.peek(call.id, caller=call.caller)
    limits = CodeRequest("")
    reduced, full = await Images(managed, limits.image_pixels, limits.image_bytes).fit(content, mime, path)
    shown = [results.image(reduced, bitmap_type(reduced) or mime)] if reduced is not None else []
    return (*shown, results.full_image(full, reduced is not None)) if full is not None else tuple(shown)


async def _part(context: ToolContext, args: schemas.Target, path: str, offset: int, length: int) -> tuple[bytes, Any]:
    query = ReadQuery(path=path, offset=offset, length=length, encoding="base64")
    found = await context.do(files.read_file, args, query=query)
    return msgspec.convert(found.data, bytes), found


@tool("write", "Write a file", files.write_file, schemas.Write, is_destructive=True)
async def write(context: ToolContext, args: schemas.Write) -> Result:
    """Write a whole text file. Missing directories are created."""
    body = WriteRequest(path=args.path, text=args.text, overwrite=args.overwrite)
    return results.data(await context.do(files.write_file, args, body=body))


@tool("edit", "Edit a file", files.edit_file, schemas.Edit, is_destructive=True)
async def edit(context: ToolContext, args: schemas.Edit) -> Result:
    """Replace a text in a file. It must occur exactly once, unless `all` is set."""
    body = EditRequest(path=args.path, old=args.old, new=args.new, all=args.all)
    return results.data(await context.do(files.edit_file, args, body=body))


@tool("list", "List a directory", files.list_files, schemas.ListFiles)
async def list_files(context: ToolContext, args: schemas.ListFiles) -> Result:
    """List a directory of the workspace. Names of directories end with a slash."""
    query = ListQuery(path=args.path, recursive=args.recursive, limit=args.limit)
    return _entries(await context.do(files.list_files, args, query=query))


@tool("glob", "Find files by path", files.glob_files, schemas.Glob)
async def glob(context: ToolContext, args: schemas.Glob) -> Result:
    """Find files and directories in the workspace by a path pattern."""
    query = GlobQuery(pattern=args.pattern, path=args.path, limit=args.limit)
    return _entries(await context.do(files.glob_files, args, query=query))


def _entries(found: Any) -> Result:
    lines = [f"{item.path}{'/' if item.kind == 'directory' else ''}" for item in found.entries]
    return results.data(found, results.listing(lines, found.note, found.truncated))


@tool("grep", "Search file contents", files.grep_files, schemas.Grep)
async def grep(context: ToolContext, args: schemas.Grep) -> Result:
    """Search files in the workspace for lines that match a regular expression. Returns `path:line:text`."""
    query = GrepQuery(
        pattern=args.pattern,
        path=args.path,
        glob=args.glob,
        is_literal=args.is_literal,
        ignore_case=args.ignore_case,
        before=args.context,
        after=args.context,
        limit=args.limit,
    )
    found = await context.do(files.grep_files, args, query=query)
    lines = []
    for match in found.matches:
        first = match.line - len(match.before)
        for number, text in enumerate((*match.before, match.text, *match.after), first):
            lines.append(f"{match.path}{':' if number == match.line else '-'}{number}:{text}"[:2000])
    text = results.shorten(results.listing(lines, found.note, found.truncated), schemas.MOST_TEXT)
    return results.answer(text)


@tool("upload", "Upload bytes", files.write_file, schemas.Upload, is_destructive=True)
async def upload(context: ToolContext, args: schemas.Upload) -> Result:
    """Write base64-encoded bytes to a file in the workspace. For text, use `write`."""
    if args.append:
        entry = await context.do(files.append_file, args, body=AppendRequest(path=args.path, base64=args.base64))
    else:
        body = WriteRequest(path=args.path, base64=args.base64, overwrite=args.overwrite)
        entry = await context.do(files.write_file, args, body=body)
    context.on_progress(f"[{entry.path}: {entry.size:,} bytes so far]\n")
    return results.data(entry)


@tool("download", "Download bytes", files.read_file, schemas.Download)
async def download(context: ToolContext, args: schemas.Download) -> Result:
    """Read bytes of a file in the workspace, returned as a base64 resource. For text, use `read`."""
    content, found = await _part(context, args, args.path, args.offset, args.length)
    end = found.offset + len(content)
    more = f"; continue at offset {end}" if found.truncated else ""
    return results.answer(
        f"[bytes {found.offset} to {end} of {found.size}{more}]", results.resource(found.path, content)
    )


# -- the network -----------------------------------------------------------------------------------


@tool("hosts", "List allowed hosts", sandboxes.get_egress, schemas.Target)
async def hosts(context: ToolContext, args: schemas.Target) -> Result:
    """List the hosts that the sandbox may reach, and your host requests with their decisions."""
    grant = await context.do(sandboxes.get_egress, args)
    asks = await context.do(sandboxes.list_asks, args)
    return results.data(_Hosts(hosts=grant.hosts, could_be_allowed=[*grant.ceiling, *grant.may_allow], asks=asks.asks))


class _Hosts(msgspec.Struct):
    hosts: list[str]
    could_be_allowed: list[str]
    asks: list[Any]


@tool("ask_host", "Request a host", sandboxes.ask_host, schemas.AskHost)
async def ask_host(context: ToolContext, args: schemas.AskHost) -> Result:
    """Request access to a host. A person decides; use `hosts` to see the decision."""
    return results.data(await context.do(sandboxes.ask_host, args, body=AskRequest(host=args.host, why=args.why)))


@tool("http_request", "Send an HTTP request", sandboxes.http_request, schemas.HttpCall, is_destructive=True,
      is_open_world=True)  # fmt: skip
async def http_request(context: ToolContext, args: schemas.HttpCall) -> Result:
    """Send one HTTP request through the sandbox's egress gate. The host must be allowed. Redirects are not followed."""
    body = HttpRequest(
        url=args.url, method=args.method, headers=args.headers, body=args.body, timeout=args.timeout,
        max_bytes=schemas.MAX_PART,
    )  # fmt: skip
    found = await context.do(sandboxes.http_request, args, body=body)
    head = "\n".join(f"{name}: {value}" for name, value in found.headers)
    head = results.shorten(f"HTTP {found.status} {found.reason}\n{head}", 8000)
    note = f"[truncated: only the first {schemas.MAX_PART:,} bytes were read]" if found.truncated else ""
    if found.encoding == "utf-8":
        return results.answer(head, results.shorten(found.body, args.max_output), note)
    content = msgspec.convert(found.body, bytes)
    mime = bitmap_type(content)
    parts = await _image(context, args, content, mime) if mime and not note else [results.resource("body", content)]
    return results.answer(head, *parts, note)
