"""Who listens to a front whose kernel was taken back or woken: what it says waits until they are there.

A page that lost its server comes back to the new one as the same *client*: with the session id that it had, which is
also its sockets' identity. So which client ran the last cell is kept beside the sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jupyter_agentbox.sandbox.drivers.messages import header_index, parse
from jupyter_agentbox.spec import MIB

if TYPE_CHECKING:
    from .front import Front

#: The identity of what a front asks on its own account.
ASKER = b"\0agentbox"
#: Seconds that what the kernel says waits for listeners; that it may take to answer while it is idle.
TIMEOUT, ANSWER_TIMEOUT = 10.0, 1.0
MAX_CLIENT = 128
#: Bytes of output that are kept for a page that is not back yet.
MAX_KEPT = 16 * MIB
#: Bytes that a message takes beside its frames, so that many small ones are bounded as well.
_OVERHEAD = 1024


class Audience:
    """Those who listen to one front. Only on the link's thread.

    Attributes
    ----------
    is_there : Event
        Not set while what the kernel says is to wait.
    has_answered : Event
        The kernel answered the front's own request, so it does not work on a cell.
    on_client : callable or None
        Told of each change of the client that runs cells.
    """

    def __init__(self) -> None:
        self.is_there = asyncio.Event()
        self.is_there.set()
        self.has_answered = asyncio.Event()
        self.on_client: Callable[[str], None] | None = None
        self._client = ""

    def expect(self) -> None:
        """Have what the kernel says wait for them, but not for ever."""
        self.is_there.clear()
        asyncio.get_running_loop().call_later(TIMEOUT, self.is_there.set)

    def saw_client(self, identity: bytes) -> None:
        """Take note of who sent a cell."""
        client = identity.decode("latin-1")
        if client != self._client and len(client) <= MAX_CLIENT and client.isprintable() and client.isascii():
            self._client = client
            if self.on_client is not None:
                self.on_client(client)

    async def gather(self, front: Front, client: str, listeners: int, is_left: Callable[[], bool]) -> bool:
        """Wait until the client's sockets and so many subscribers are there, or were closed, and have the kernel speak.

        Returns
        -------
        bool
            Whether the kernel is idle.
        """
        for _ in range(int(TIMEOUT / 0.01)):
            if self.is_there.is_set() or front.has_listeners(client.encode(), listeners) or is_left():
                break
            await asyncio.sleep(0.01)
        self.is_there.set()
        try:
            await asyncio.wait_for(self.has_answered.wait(), ANSWER_TIMEOUT)
        except asyncio.TimeoutError:
            return False
        return True


class BoundedBuffer(list[tuple[str, list[Any]]]):
    """The messages that Jupyter keeps for a page that is away, in place of a list without bounds.

    Of output that is too much the rest is left out, and this is said in its place.

    Parameters
    ----------
    front : Front
        It words the notice.
    """

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front
        self._size = 0
        self._is_cut = False

    def append(self, item: tuple[str, list[Any]]) -> None:
        """Keep a message, unless it is too much."""
        channel, frames = item
        size = _OVERHEAD + sum(map(len, frames))
        is_output = channel == "iopub" and not is_status(frames)
        if self._size + size > (MAX_KEPT if is_output else 2 * MAX_KEPT):
            if not self._is_cut and (index := header_index(frames)) is not None:
                self._is_cut = True
                text = f"while this page was away more was put out than the {MAX_KEPT >> 20} MiB that are kept for it"
                super().append(("iopub", self._front.stream_message(text, parent=frames[index + 1])))
            return
        self._size += size
        super().append(item)


def is_status(frames: list[bytes]) -> bool:
    """Whether a message of iopub tells a kernel's state."""
    index = header_index(frames)
    return index is not None and parse(frames[index]).get("msg_type") == "status"


def is_missed(channel: str, frames: list[bytes], client: str) -> bool:
    """Whether a client that was away needs a message: news of a kernel's state while others asked, it does not."""
    index = header_index(frames)
    if channel != "iopub" or index is None or parse(frames[index]).get("msg_type") not in ("status", "iopub_welcome"):
        return True
    return parse(frames[index + 1]).get("session") == client
