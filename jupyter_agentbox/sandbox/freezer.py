"""Freezing: a sandbox in which nothing runs is stopped as it is, and costs no processor until somebody speaks to it.

gVisor takes some hundredths of a processor for each sandbox, asleep or not; fifty that idle would fill two. A
frozen one keeps its memory and goes on at the first byte it is sent. What that means for code: a thread or timer in
the background of a kernel stands still meanwhile, if it neither computed, printed nor had a connection open for as
long as the profile's ``freeze_after``. Any other process of the sandbox, as one of ``!command &``, keeps it awake.
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

#: Seconds that the guest may take to say what runs; and that what it said last may be on its way.
PROBE_TIMEOUT = 10.0
SETTLE_TIME = 0.2
#: Hundredths of a second of processor time that a kernel with nothing to do may use in the second it is looked at.
MAX_TICKS = 1


class Freezer:
    """Freezes one sandbox when it is quiet, and thaws it. Only on the link's thread.

    Parameters
    ----------
    runtime, handle
        What stops it.
    link : Link
        What is sent there thaws it.
    is_busy : callable
        Whether something of the owner's goes on: a cell, a command, a connection.
    timeout : float
        Seconds of quiet before it is frozen; 0 for never.
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
        """Let it go on. Does nothing to one that is not frozen."""
        if self.is_frozen:
            self.is_frozen = False
            self._quiet_since = time.monotonic()
            self._runtime.thaw(self._handle)

    async def look(self) -> None:
        """Freeze it, if it has been quiet for long enough and nothing runs in it. To be called now and then."""
        if self.is_frozen or not self._timeout:
            return
        used = max(self._link.last_active, self._quiet_since)
        if await self.is_quiet_for(self._timeout):
            self.is_frozen = self._runtime.freeze(self._handle)
            self._used = used

    async def is_quiet_for(self, timeout: float) -> bool:
        """Whether nothing has run in it for so many seconds, to be asked now and then."""
        if self.is_frozen:
            return time.monotonic() - self._used >= timeout
        quiet = time.monotonic() - max(self._link.last_active, self._quiet_since)
        if self._is_busy() or quiet < timeout:
            return False
        self._quiet_since = time.monotonic()  # asking is no use, and is not repeated at once
        if not await self._is_still():
            return False
        await asyncio.sleep(SETTLE_TIME)
        return not self._is_busy()

    async def _is_still(self) -> bool:
        """Ask the guest whether nothing but kernels is there, and whether they used no processor for a second."""
        stream: Stream | None = None
        with contextlib.suppress(AgentboxError, ProtocolError, asyncio.TimeoutError):
            try:
                stream = self._link.open({"kind": "load"})
                answer = load_json(await asyncio.wait_for(stream.read(), PROBE_TIMEOUT))
                ticks = answer.get("ticks")
                return answer.get("others") == 0 and isinstance(ticks, int) and 0 <= ticks <= MAX_TICKS
            finally:
                if stream is not None:
                    stream.reset()
        return False
