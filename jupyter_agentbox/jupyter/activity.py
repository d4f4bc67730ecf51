"""Report the use of notebooks' sandboxes to Jupyter.

Jupyter's culler knows only about cells, so use over REST is reported as activity of the kernel. Parking and waking are
reported as well, because Jupyter holds connections for clients that have disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from datetime import datetime, timezone
from typing import Any

from jupyter_agentbox.kernels.front.reconnect import is_missed
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox

from .adoption import listen

log = logging.getLogger(__name__)

#: Seconds between two reports to Jupyter while a call is in progress.
INTERVAL = 1.0


class KernelActivity:
    """Reporter of calls on a kernel's sandbox as activity of the kernel, from the beginning of a call to its end.

    Parameters
    ----------
    kernels : MappingKernelManager
        The server's kernel manager.
    loop : AbstractEventLoop
        The server's event loop.
    """

    def __init__(self, kernels: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._kernels = kernels
        self._loop = loop
        self._waiting: set[ManagedSandbox] = set()
        #: For parked kernels, the session ids of disconnected clients whose buffering connections were closed.
        self._away: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._listening: set[asyncio.Task[None]] = set()

    def used(self, managed: ManagedSandbox) -> None:
        """Report the use of a notebook's sandbox. May be called from any thread."""
        with contextlib.suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._note, managed)

    def _note(self, managed: ManagedSandbox) -> None:
        kernel_id = managed.spec.kernel_id if managed.spec is not None else ""
        if kernel_id in self._kernels:
            now = datetime.now(timezone.utc)
            self._kernels.last_kernel_activity = self._kernels.get_kernel(kernel_id).last_activity = now
        if managed.uses and managed not in self._waiting:
            self._waiting.add(managed)
            self._loop.call_later(INTERVAL, self._look, managed)

    def parked(self, kernel_id: str) -> None:
        """Close unneeded connections of a kernel that was parked. May be called from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.call_later, INTERVAL, self._close_buffering, kernel_id)

    def _close_buffering(self, kernel_id: str) -> None:
        """Close the connections that buffer output for a disconnected client: half of a parked kernel's descriptors.

        They stay open if they have received something that the client has not seen. A client that reconnects opens new
        ones.
        """
        kept, sandboxed = self._kernels._kernel_buffers.get(kernel_id), SandboxedKernel.find(kernel_id=kernel_id)
        if kept is None or sandboxed is None or sandboxed.parked is None or kernel_id not in self._kernels:
            return
        client = kept["session_key"].removeprefix(f"{kernel_id}:")
        if not any(is_missed(channel, frames, client) for channel, frames in kept["buffer"]):
            self._kernels.stop_buffering(kernel_id)
            self._away[self._kernels.get_kernel(kernel_id)] = client

    def woken(self, kernel_id: str) -> None:
        """Prepare for the output of a kernel that was woken and has not sent anything yet. On the link thread."""
        sandboxed = SandboxedKernel.find(kernel_id=kernel_id)
        if sandboxed is not None and sandboxed.front is not None:
            sandboxed.front.audience.expect()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._listen, kernel_id, sandboxed)

    def _listen(self, kernel_id: str, sandboxed: SandboxedKernel) -> None:
        """Buffer the kernel's output for the disconnected client, unless a client is connected."""
        if kernel_id not in self._kernels:
            return
        client = self._away.pop(self._kernels.get_kernel(kernel_id), "") or sandboxed.client
        if self._kernels._kernel_connections.get(kernel_id) or kernel_id in self._kernels._kernel_buffers:
            client = ""
        task = self._loop.create_task(self._buffer_output(kernel_id, client))
        self._listening.add(task)
        task.add_done_callback(self._listening.discard)

    async def _buffer_output(self, kernel_id: str, client: str) -> None:
        try:
            await listen(self._kernels, kernel_id, client)
        except Exception as error:  # the kernel was shut down at the same moment, or no descriptors are left
            log.warning("output of kernel %s is not buffered for its disconnected client: %s", kernel_id, error)

    def _look(self, managed: ManagedSandbox) -> None:
        self._waiting.discard(managed)
        if managed.uses:
            self._note(managed)
