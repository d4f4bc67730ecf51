"""Operations that run code in persistent kernels: a sandbox's own, or that of an open notebook."""

from __future__ import annotations

import msgspec

from jupyter_agentbox.kernels.runner import Runner, Target
from jupyter_agentbox.models import CodeRequest, ContextRequest
from jupyter_agentbox.models.outputs import (
    ClearEvent,
    CodeResult,
    ContextInfo,
    ContextList,
    DisplayEvent,
    DoneEvent,
    ErrorEvent,
    OutputLimits,
    ResultEvent,
    StreamEvent,
)
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.spec import MIB

from .call import Call
from .images import Images
from .routes import READY, EventStream, route

EVENTS = {
    "stream": StreamEvent,
    "display": DisplayEvent,
    "result": ResultEvent,
    "clear": ClearEvent,
    "error": ErrorEvent,
    "done": DoneEvent,
}
CONTEXT = "/sandboxes/{id}/contexts/{context}"


def _place(managed: ManagedSandbox) -> Target:
    """Return where code runs. A notebook's kernel can move to another sandbox."""
    sandbox = managed.running()
    return Runner.shared().notebook(sandbox.spec.kernel_id) if managed.kind == "notebook" else sandbox


def _limits(body: CodeRequest) -> OutputLimits:
    return OutputLimits(stream_bytes=body.stream_bytes, display_bytes=body.display_bytes, displays=body.displays)


@route(
    "POST",
    "/sandboxes/{id}/code",
    "execute",
    body=CodeRequest,
    answer=CodeResult,
    tool="run_code",
    max_body=8 * MIB,
    errors=(409,),
)
async def run_code(call: Call) -> CodeResult:
    """Run code in a persistent kernel, and return its output.

    Variables persist between calls. In a notebook's sandbox, the code runs in the notebook's own kernel, so that a
    person and an agent share variables. If the client disconnects, the code is interrupted unless `keep_running` is
    set. If the kernel ends during the call, the result says why.
    """
    body: CodeRequest = call.body
    async with call.use() as managed:
        result = await Runner.shared().run(
            _place(managed),
            body.code,
            context=body.context,
            language=body.language,
            timeout=body.timeout,
            limits=_limits(body),
            keep_running=body.keep_running,
        )
        return await Images(managed, body.image_pixels, body.image_bytes).fit_result(result)


@route(
    "POST", "/sandboxes/{id}/code/stream", "execute", body=CodeRequest, answer=EVENTS, kind="events", tool="run_code",
    max_body=8 * MIB, errors=(409,),
)  # fmt: skip
async def stream_code(call: Call) -> EventStream:
    """Run code, and stream its output as server-sent events. The last event is `done`."""
    return _stream(call)


async def _stream(call: Call) -> EventStream:
    body: CodeRequest = call.body
    async with call.use() as managed:
        images = Images(managed, body.image_pixels, body.image_bytes)
        yield READY
        async for event in Runner.shared().stream(
            _place(managed),
            body.code,
            context=body.context,
            language=body.language,
            timeout=body.timeout,
            limits=_limits(body),
            keep_running=body.keep_running,
        ):
            if isinstance(event, (DisplayEvent, ResultEvent)):
                event = msgspec.structs.replace(event, display=await images.fit_display(event.display))
            elif isinstance(event, DoneEvent):
                event = DoneEvent(await images.fit_result(event.result))
            yield str(event.__struct_config__.tag), event


@route("GET", "/sandboxes/{id}/contexts", "read", answer=ContextList, is_poll=True)
async def list_contexts(call: Call) -> ContextList:
    """List the kernels of a sandbox."""
    managed = await call.sandboxes.registry.peek(call.id, "run_code", caller=call.caller)
    return ContextList(await Runner.shared().contexts(_place(managed)))


@route(
    "POST",
    "/sandboxes/{id}/contexts",
    "execute",
    body=ContextRequest,
    answer=ContextInfo,
    status=201,
    tool="run_code",
    errors=(409,),
)
async def create_context(call: Call) -> ContextInfo:
    """Start a kernel before its first use. Has no effect on a kernel that is running."""
    async with call.use() as managed:
        return await Runner.shared().create_context(_place(managed), call.body.name, call.body.language)


@route("DELETE", CONTEXT, "execute", status=204, tool="run_code", errors=(409,))
async def delete_context(call: Call) -> None:
    """End a kernel. Its variables are lost."""
    async with call.use() as managed:
        await Runner.shared().delete_context(_place(managed), call.params["context"])


@route("POST", CONTEXT + "/restart", "execute", answer=ContextInfo, tool="run_code", errors=(409,))
async def restart_context(call: Call) -> ContextInfo:
    """Restart a kernel."""
    async with call.use() as managed:
        return await Runner.shared().restart_context(_place(managed), call.params["context"])


@route("POST", CONTEXT + "/interrupt", "execute", status=204, tool="run_code")
async def interrupt_context(call: Call) -> None:
    """Interrupt the code that a kernel runs, regardless of who sent it."""
    async with call.use() as managed:
        await Runner.shared().interrupt(_place(managed), call.params["context"])
