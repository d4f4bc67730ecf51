"""Operations that install packages."""

from __future__ import annotations

from jupyter_agentbox.models import Installed, InstallRequest, ProgressEvent
from jupyter_agentbox.service.packages import Done, install, install_all, make_command

from .call import Call
from .routes import READY, EventStream, route


@route("POST", "/sandboxes/{id}/packages", "execute", body=InstallRequest, answer=Installed, tool="install")
async def install_packages(call: Call) -> Installed:
    """Install packages, and wait until the installation ends.

    A failed installation is also a 200 response: `is_ok` is false, and `message` says why. Package indexes are those of
    the package managers' own configuration, reached through the gate. Hosts that the gate refused are in `refused`.
    """
    async with call.use() as managed:
        return await install_all(managed, call.body)


@route(
    "POST", "/sandboxes/{id}/packages/stream", "execute", body=InstallRequest,
    answer={"progress": ProgressEvent, "result": Installed}, kind="events", tool="install",
)  # fmt: skip
async def stream_installation(call: Call) -> EventStream:
    """Install packages, and stream the progress as server-sent events. The last event is `result`."""
    return _install(call)


async def _install(call: Call) -> EventStream:
    async with call.use() as managed:
        make_command(call.body)
        yield READY
        async for event in install(managed, call.body):
            if isinstance(event, Done):
                yield "result", event.result
            else:
                yield "progress", event
