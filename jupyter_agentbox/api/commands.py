"""Operations that run commands in the foreground, with or without streaming, and in the background."""

from __future__ import annotations

import base64
import codecs
from collections.abc import Callable

from jupyter_agentbox.errors import InvalidRequest, NotFound
from jupyter_agentbox.models import (
    Encoding,
    ExecAnswer,
    ExecRequest,
    ExitEvent,
    FollowQuery,
    InputRequest,
    OutputChunk,
    OutputEvent,
    OutputQuery,
    ProcessAnswer,
    ProcessList,
    ProcessRequest,
    RefusedHost,
    SignalRequest,
    SizeRequest,
    TerminalRequest,
    WaitQuery,
)
from jupyter_agentbox.sandbox.processes import Command, Exit, Output, ProcessInfo
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.spec import MIB

from .call import Call
from .routes import READY, EventStream, route

EVENTS = {"stdout": OutputEvent, "stderr": OutputEvent, "exit": ExitEvent}
PROCESS = "/sandboxes/{id}/processes/{process}"


@route("POST", "/sandboxes/{id}/exec", "execute", body=ExecRequest, answer=ExecAnswer, tool="bash", max_body=64 * MIB)
async def run_command(call: Call) -> ExecAnswer:
    """Run a command, and wait until it ends.

    At its timeout, the command is killed with all of its child processes, and its output so far is returned. It is
    also killed if the client disconnects.
    """
    body: ExecRequest = call.body
    async with call.use() as managed:
        command = _command(call, managed, body)
        before = managed.refusal_count
        result = await managed.running().processes.run(
            command, stdin=_stdin(body), timeout=body.timeout, max_output=body.max_output
        )
        return ExecAnswer(
            stdout=_text(result.stdout, body.encoding),
            stderr=_text(result.stderr, body.encoding),
            exit_code=result.exit_code,
            timed_out=result.timed_out,
            truncated=result.truncated,
            stdout_bytes=result.stdout_bytes,
            stderr_bytes=result.stderr_bytes,
            duration=result.duration,
            encoding=body.encoding,
            refused=_refused(managed, before),
        )


@route(
    "POST", "/sandboxes/{id}/exec/stream", "execute", body=ExecRequest, answer=EVENTS, kind="events", tool="bash",
    max_body=64 * MIB,
)  # fmt: skip
async def stream_command(call: Call) -> EventStream:
    """Run a command, and stream its output as server-sent events.

    Events are `stdout` and `stderr`, and finally `exit`, or `failure` on an error. A slow client slows it down.
    """
    return _stream(call)


async def _stream(call: Call) -> EventStream:
    body: ExecRequest = call.body
    async with call.use() as managed:
        command = _command(call, managed, body)
        before = managed.refusal_count
        processes = managed.running().processes
        async with await processes.stream(command, stdin=_stdin(body), timeout=body.timeout) as events:
            writer = _Writer(body.encoding)
            yield READY
            async for event in events:
                yield writer.write(event, lambda: _refused(managed, before))


@route(
    "POST", "/sandboxes/{id}/processes", "execute", body=ProcessRequest, answer=ProcessAnswer, status=201, tool="bash"
)
async def start_process(call: Call) -> ProcessAnswer:
    """Start a command in the background.

    It keeps running when the client disconnects. A running background command does not prevent the idle timeout.
    """
    async with call.use() as managed:
        return _answer(await managed.running().processes.start(_command(call, managed, call.body)))


@route("GET", "/sandboxes/{id}/processes", "read", answer=ProcessList, is_poll=True)
async def list_processes(call: Call) -> ProcessList:
    """List background processes and terminals."""
    managed = await call.sandboxes.registry.peek(call.id, "bash", caller=call.caller)
    return ProcessList([_answer(item) for item in managed.running().processes.list()])


@route("GET", PROCESS, "read", answer=ProcessAnswer, is_poll=True)
async def get_process(call: Call) -> ProcessAnswer:
    """Get the state of a background process."""
    managed = await call.sandboxes.registry.peek(call.id, "bash", caller=call.caller)
    return _answer(managed.running().processes.get(call.params["process"]))


@route("GET", PROCESS + "/output", "read", query=OutputQuery, answer=OutputChunk, tool="bash")
async def read_output(call: Call) -> OutputChunk:
    """Read the output of a background process, starting at an offset."""
    query: OutputQuery = call.query
    async with call.use() as managed:
        chunk = await managed.running().processes.read(
            call.params["process"], stream=query.stream, offset=query.offset, count=query.limit, wait=query.wait
        )
    data, after = chunk.data, chunk.next_offset
    if query.encoding == "utf-8" and not chunk.is_end:
        # An incomplete character is returned with the next part.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data)
        rest = len(decoder.getstate()[0])
        if rest < len(data):
            data, after = data[: len(data) - rest], after - rest
    return OutputChunk(_text(data, query.encoding), chunk.offset, after, chunk.dropped, chunk.is_end, query.encoding)


@route("GET", PROCESS + "/follow", "read", query=FollowQuery, answer=EVENTS, kind="events", tool="bash")
async def follow_process(call: Call) -> EventStream:
    """Stream the output of a background process as server-sent events."""
    return _follow(call)


async def _follow(call: Call) -> EventStream:
    query: FollowQuery = call.query
    async with call.use() as managed:
        processes = managed.running().processes
        async with await processes.follow(
            call.params["process"], stdout_offset=query.stdout_offset, stderr_offset=query.stderr_offset
        ) as events:
            writer = _Writer(query.encoding)
            yield READY
            async for event in events:
                yield writer.write(event, list)


@route(
    "POST",
    PROCESS + "/stdin",
    "execute",
    body=InputRequest,
    answer=ProcessAnswer,
    tool="bash",
    errors=(504,),
    max_body=16 * MIB,
)
async def write_stdin(call: Call) -> ProcessAnswer:
    """Write to the standard input of a background process, or close it."""
    body: InputRequest = call.body
    if body.text and body.base64:
        raise InvalidRequest("give either text or base64, not both", field="base64")
    name = call.params["process"]
    async with call.use() as managed:
        processes = managed.running().processes
        data = body.base64 or body.text.encode()
        if data:
            await processes.write(name, data)
        if body.is_last:
            await processes.close_stdin(name)
        return _answer(processes.get(name))


@route("POST", PROCESS + "/signal", "execute", body=SignalRequest, answer=ProcessAnswer, tool="bash")
async def signal_process(call: Call) -> ProcessAnswer:
    """Send a signal to the process group of a background process."""
    name = call.params["process"]
    async with call.use() as managed:
        processes = managed.running().processes
        processes.get(name)
        await processes.signal(name, call.body.signal)
        return _answer(processes.get(name))


@route("POST", PROCESS + "/kill", "execute", answer=ProcessAnswer, tool="bash")
async def kill_process(call: Call) -> ProcessAnswer:
    """Kill a background process with all of its child processes."""
    async with call.use() as managed:
        return _answer(await managed.running().processes.kill(call.params["process"]))


@route("POST", PROCESS + "/size", "execute", body=SizeRequest, answer=ProcessAnswer, tool="terminal")
async def resize_terminal(call: Call) -> ProcessAnswer:
    """Set the size of a terminal."""
    name = call.params["process"]
    async with call.use() as managed:
        processes = managed.running().processes
        if not processes.get(name).is_terminal:
            raise NotFound(f"process {name!r} is not a terminal")
        await processes.resize(name, call.body.rows, call.body.columns)
        return _answer(processes.get(name))


@route("GET", PROCESS + "/wait", "read", query=WaitQuery, answer=ProcessAnswer, tool="bash")
async def wait_process(call: Call) -> ProcessAnswer:
    """Wait until a background process ends. At the timeout, its current state is returned."""
    async with call.use() as managed:
        return _answer(await managed.running().processes.wait(call.params["process"], call.query.timeout))


@route("DELETE", PROCESS, "execute", status=204, tool="bash")
async def remove_process(call: Call) -> None:
    """Kill a background process, and delete its record and output."""
    async with call.use() as managed:
        await managed.running().processes.remove(call.params["process"])


@route(
    "POST",
    "/sandboxes/{id}/terminals",
    "execute",
    body=TerminalRequest,
    answer=ProcessAnswer,
    status=201,
    tool="terminal",
)
async def open_terminal(call: Call) -> ProcessAnswer:
    """Open a terminal. It is also a background process, and is used over its websocket.

    The websocket is `/sandboxes/{id}/terminals/{process}/socket`. Binary frames are the terminal's input and output.
    Text frames are JSON: `{"rows": 24, "columns": 80}` sets the size, and `{"exit_code": 0}` reports the end. A client
    may disconnect and reconnect.
    """
    body: TerminalRequest = call.body
    async with call.use() as managed:
        command = _command(call, managed, body)
        return _answer(await managed.running().processes.open_terminal(command, rows=body.rows, columns=body.columns))


class _Writer:
    """Converter of a process's events into those of the API's stream."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}

    def write(
        self, event: Output | Exit, refused: Callable[[], list[RefusedHost]]
    ) -> tuple[str, OutputEvent | ExitEvent]:
        if isinstance(event, Exit):
            return "exit", ExitEvent(event.exit_code, event.timed_out, refused())
        if self._encoding == "base64":
            return event.stream, OutputEvent(base64.b64encode(event.data).decode(), event.offset)
        decoder = self._decoders[event.stream]
        incomplete = len(decoder.getstate()[0])  # bytes of an incomplete character from the previous part
        return event.stream, OutputEvent(decoder.decode(event.data), event.offset - incomplete)


def _command(call: Call, managed: ManagedSandbox, body: ExecRequest | ProcessRequest | TerminalRequest) -> Command:
    if not isinstance(body, TerminalRequest) and body.command is None and body.argv is None:
        raise InvalidRequest("a command is missing; give command or argv", field="command")
    if body.command is not None and body.argv is not None:
        raise InvalidRequest("give either command or argv, not both", field="argv")
    call.check_command(managed, body.command, body.argv)
    return Command(
        line=body.command,
        argv=body.argv,
        workdir=body.workdir or managed.request.workdir,
        env=body.env,
        user=body.user,
    )


def _stdin(body: ExecRequest) -> bytes:
    if body.stdin and body.stdin_base64:
        raise InvalidRequest("give either stdin or stdin_base64, not both", field="stdin_base64")
    return body.stdin_base64 or body.stdin.encode()


def _text(data: bytes, encoding: Encoding) -> str:
    return base64.b64encode(data).decode() if encoding == "base64" else data.decode("utf-8", "replace")


def _refused(managed: ManagedSandbox, before: int) -> list[RefusedHost]:
    return [RefusedHost(item.host, item.port, item.sentence) for item in managed.refusals(before)]


def _answer(info: ProcessInfo) -> ProcessAnswer:
    return ProcessAnswer(
        id=info.id,
        command=info.command,
        started=info.started,
        state=info.state,
        exit_code=info.exit_code,
        is_terminal=info.is_terminal,
        stdout_bytes=info.stdout_bytes,
        stderr_bytes=info.stderr_bytes,
    )
