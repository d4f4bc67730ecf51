"""Freeze idle sandboxes, so that they use no CPU until the next message for them.

gVisor uses some hundredths of a CPU for each sandbox, even if it is idle; fifty idle sandboxes would use two CPUs. A
frozen sandbox keeps its memory and continues at the first byte that is sent to it. Code that waits for a time keeps the
sandbox awake: a timer or thread of a Python kernel (``guest.ipykernel.embedded_waits``), and any process that is not a
kernel, such as one started by ``!command &``. Timers of kernels of other languages do not, and stop while it is frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.guest.framing import ProtocolError, load_json
from jupyter_agentbox.runtimes import Handle, Runtime

from .link.link import Link, Stream

#: Seconds that the guest may take to report its load; and to wait for output that may still be on its way.
PROBE_TIMEOUT = 10.0
SETTLE_TIME = 0.2
#: Hundredths of a second of CPU time that an idle kernel may use during the second in which it is observed.
MAX_TICKS = 1


class Freezer:
    """Freezes one sandbox when it is idle, and thaws it. Use on the link thread only.

    Parameters
    ----------
    runtime, handle
        Runtime that freezes the sandbox, and the sandbox's handle.
    link : Link
        Link to the guest. Anything sent on it thaws the sandbox.
    is_busy : callable
        Returns whether a cell, command or connection of the owner is in progress.
    timeout : float
        Seconds of inactivity before the sandbox is frozen; 0 for never.
    """

    def __init__(
        self, runtime: Runtime, handle: Handle, link: Link, is_busy: Callable[[], bool], timeout: float
    ) -> None:
        self.is_frozen = False
        self._runtime = runtime
        self._handle = handle
        self._link = link
        self._is_busy = is_busy
        self._timeout = timeout
        self._quiet_since = self._used = time.monotonic()
        link.on_write = self.thaw

    def thaw(self) -> None:
        """Thaw the sandbox. Does nothing if it is not frozen."""
        if self.is_frozen:
            self.is_frozen = False
            self._quiet_since = time.monotonic()
            self._runtime.thaw(self._handle)

    async def look(self) -> None:
        """Freeze the sandbox if it has been idle for long enough and nothing runs in it. Call periodically."""
        if self.is_frozen or not self._timeout:
            return
        used = max(self._link.last_active, self._quiet_since)
        if await self.is_quiet_for(self._timeout):
            self.is_frozen = self._runtime.freeze(self._handle)
            self._used = used

    async def is_quiet_for(self, timeout: float) -> bool:
        """Return whether nothing has run in the sandbox for `timeout` seconds. Call periodically."""
        if self.is_frozen:
            return time.monotonic() - self._used >= timeout
        quiet = time.monotonic() - max(self._link.last_active, self._quiet_since)
        if self._is_busy() or quiet < timeout:
            return False
        self._quiet_since = time.monotonic()  # asking has a cost, so it is not repeated immediately
        if not await self._is_still():
            return False
        await asyncio.sleep(SETTLE_TIME)
        return not self._is_busy()

    async def _is_still(self) -> bool:
        """Ask the guest whether only kernels run that wait for nothing, and used no CPU for a second."""
        stream: Stream | None = None
        with contextlib.suppress(AgentboxError, ProtocolError, asyncio.TimeoutError):
            try:
                stream = self._link.open({"kind": "load"})
                answer = load_json(await asyncio.wait_for(stream.read(), PROBE_TIMEOUT))
                ticks = answer.get("ticks")
                is_alone = answer.get("others") == 0 and answer.get("waits") == 0
                return is_alone and isinstance(ticks, int) and 0 <= ticks <= MAX_TICKS
            finally:
                if stream is not None:
                    stream.reset()
        return False
