"""Prepare a new sandbox: run its init scripts in order, then start its services.

They come from the image and the profile. They run with the same user, environment and egress as the user's code. If one
fails, the sandbox does not start, and the error names it and quotes its output.
"""

from __future__ import annotations

import asyncio
import time

from jupyter_agentbox.errors import InvalidRequest, RuntimeFailed
from jupyter_agentbox.spec import Service

from .processes import Command, ExecResult
from .sandbox import Sandbox

#: Seconds that one init script may take.
INIT_TIMEOUT = 300.0
#: Seconds between two readiness checks of a service, and that one check may take.
READY_INTERVAL, READY_TIMEOUT = 0.1, 10.0
#: Bytes of a failed script's output that an error quotes.
_MAX_QUOTED = 600


async def prepare(sandbox: Sandbox) -> None:
    """Run the init scripts and start the services of a sandbox that has just started. Call on the link thread.

    Raises
    ------
    RuntimeFailed
        An init script or a service failed.
    SandboxEnded, LinkClosed
    """
    spec = sandbox.spec
    for number, line in enumerate(spec.init, 1):
        result = await sandbox.processes.run(Command(line=line), timeout=INIT_TIMEOUT)
        if result.exit_code != 0:
            how = f"timed out after {INIT_TIMEOUT:g} s" if result.timed_out else f"exited with {result.exit_code}"
            raise RuntimeFailed(
                f"init script {number} of {len(spec.init)} ({line!r:.200}) {how}. Output: {_describe_output(result)}",
                setting="init of the profile or image",
            )
    for service in spec.services:
        await _serve(sandbox, service)


async def _serve(sandbox: Sandbox, service: Service) -> None:
    processes = sandbox.processes
    deadline = time.monotonic() + service.timeout
    setting = "services of the profile or image"
    try:
        name = (await processes.start(Command(line=service.line))).id
    except InvalidRequest as error:
        raise RuntimeFailed(f"service {service.name!r} did not start: {error}", setting=setting) from None
    while service.ready:
        try:
            result = await processes.run(Command(line=service.ready), timeout=READY_TIMEOUT)
        except InvalidRequest as error:
            raise RuntimeFailed(f"service {service.name!r}: {error}", setting=setting) from None
        info = processes.get(name)
        if info.exit_code is not None:
            chunks = [await processes.read(name, stream=stream) for stream in ("stderr", "stdout")]
            output = (
                b" ".join(chunk.data for chunk in chunks).decode("utf-8", "replace").strip()[-_MAX_QUOTED:] or "nothing"
            )
            raise RuntimeFailed(
                f"service {service.name!r} exited with status {info.exit_code} before it was ready. Output: {output}",
                setting=setting,
            )
        if result.exit_code == 0:
            return
        if time.monotonic() > deadline:
            raise RuntimeFailed(
                f"service {service.name!r} was not ready within {service.timeout:g} s: {service.ready!r:.200} exited "
                f"with status {result.exit_code}. Output: {_describe_output(result)}",
                setting=setting,
            )
        await asyncio.sleep(READY_INTERVAL)


def _describe_output(result: ExecResult) -> str:
    text = (result.stderr or result.stdout).decode("utf-8", "replace").strip()
    return text[-_MAX_QUOTED:] or "nothing"


__all__ = ["INIT_TIMEOUT", "prepare"]
