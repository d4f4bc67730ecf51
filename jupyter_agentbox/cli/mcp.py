"""``jupyter agentbox mcp``: serve MCP on standard input and output."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from traitlets import Unicode

from jupyter_agentbox.errors import AgentboxError

from .base import Command

TOKEN = "JUPYTER_AGENTBOX_TOKEN"


class MCPCommand(Command):
    """Serve MCP on standard input and output, for an AI client that starts this command.

    Sandboxes belong to this process and end with it. With --url, calls are forwarded to a Jupyter server, and act on
    its sandboxes and its notebooks' kernels. Set the environment variable JUPYTER_AGENTBOX_TOKEN to the server's token
    or to a token for one sandbox.
    """

    name = "jupyter agentbox mcp"
    description = __doc__ or ""
    examples = "jupyter agentbox mcp\nJUPYTER_AGENTBOX_TOKEN=... jupyter agentbox mcp --url http://localhost:8888"
    url = Unicode(help="Use the sandboxes of the Jupyter server at this URL.").tag(config=True)

    def run(self) -> int:
        """Serve until standard input ends or a signal arrives."""
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
            print(f"{self.name}: the token is sent to {self.url} unencrypted", file=sys.stderr)
        await forward(self.url, token)
        return 0

    async def _serve(self) -> int:
        from jupyter_agentbox.api.mcp.stdio import serve
        from jupyter_agentbox.api.service import Service
        from jupyter_agentbox.kernels.runner import Runner
        from jupyter_agentbox.policy.policy import Policy
        from jupyter_agentbox.service.service import SandboxService

        policy = Policy(parent=self)
        policy.is_attended = False  # its only caller is an agent
        service = SandboxService(policy)
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        serving = asyncio.ensure_future(serve(Service(service)))
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        await Runner.shared().aclose()
        await service.aclose()
        if not serving.done():
            # A thread of the SDK reads standard input and cannot be stopped.
            sys.stderr.flush()
            os._exit(0)
        stopping.cancel()
        serving.result()
        return 0
