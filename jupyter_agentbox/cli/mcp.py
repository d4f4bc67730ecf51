"""The command that serves MCP on standard input and output, for an AI client to start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from traitlets import Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import ALIASES, Command

TOKEN = "JUPYTER_AGENTBOX_TOKEN"


class MCPCommand(Command):
    """Serve MCP on standard input and output, for an AI client that starts this command.

    Sandboxes are this process's own and end with it. With --url all goes to a Jupyter server instead, whose sandboxes
    and notebooks' kernels are then there; its token, or one for a single sandbox, is taken from the environment
    variable JUPYTER_AGENTBOX_TOKEN.
    """

    name = "jupyter agentbox mcp"
    description = __doc__ or ""
    examples = "jupyter agentbox mcp\nJUPYTER_AGENTBOX_TOKEN=... jupyter agentbox mcp --url http://localhost:8888"
    aliases = {**ALIASES, "url": "MCPCommand.url"}  # noqa: RUF012
    url = Unicode(help="Address of a Jupyter server whose sandboxes to use.").tag(config=True)

    def run(self) -> int:
        """Serve until standard input ends, or a signal comes."""
        from jupyter_agentbox.api.mcp import MISSING, is_available

        if not is_available():
            raise AgentboxError(MISSING)
        token = os.environ.pop(TOKEN, "")
        if self.url:
            if not token:
                raise AgentboxError(f"set the environment variable {TOKEN} to a token of {self.url}")
            return asyncio.run(self._forward(token))
        return asyncio.run(self._serve())

    async def _forward(self, token: str) -> int:
        from jupyter_agentbox.api.mcp.forward import forward

        if self.url.startswith("http://") and not self.url.startswith(
            ("http://localhost", "http://127.", "http://[::1]")
        ):
            print(f"{self.name}: the token goes to {self.url} without encryption", file=sys.stderr)
        await forward(self.url, token)
        return 0

    async def _serve(self) -> int:
        from jupyter_agentbox.api.mcp.stdio import serve
        from jupyter_agentbox.api.service import Service
        from jupyter_agentbox.kernels.runner import Runner
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.service.service import SandboxService

        service = SandboxService(Policy(parent=self))
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        serving = asyncio.ensure_future(serve(Service(service)))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        await Runner.shared().aclose()
        await service.aclose()
        if not serving.done():
            # A thread of the SDK's waits for standard input, and can't be told to stop.
            sys.stderr.flush()
            os._exit(0)
        stopping.cancel()
        serving.result()
        return 0
