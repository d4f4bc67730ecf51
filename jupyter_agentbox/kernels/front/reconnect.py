"""Hold back a kernel's output after it was taken over or woken, until its clients have reconnected.

A page that lost its server reconnects to the new one as the same *client*: with its previous session id, which is also
the identity of its sockets. Therefore the client that ran the last cell is recorded beside the sandbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jupyter_agentbox.sandbox.drivers.messages import header_index, parse
from jupyter_agentbox.spec import MIB

if TYPE_CHECKING:
    from .front import Front

#: The identity of requests that a front makes itself.
FRONT_IDENTITY = b"\0agentbox"
#: Seconds that kernel output waits for listeners; and that an idle kernel may take to answer.
TIMEOUT, ANSWER_TIMEOUT = 10.0, 1.0
MAX_CLIENT = 128
#: Bytes of output that are buffered for a page that has not reconnected yet.
MAX_KEPT = 16 * MIB
#: Bytes charged for each message in addition to its frames, so that many small messages are bounded as well.
_OVERHEAD = 1024


class Audience:
    """The clients that listen to one front. Use on the link thread only.

    Attributes
    ----------
    is_there : Event
        Cleared while the kernel's output has to wait for clients.
    has_answered : Event
        Set once the kernel has answered the front's own request, which means that it is not running a cell.
    on_client : callable or None
        Called when another client runs a cell than before.
    """

    def __init__(self) -> None:
        self.is_there = asyncio.Event()
        self.is_there.set()
        self.has_answered = asyncio.Event()
        self.on_client: Callable[[str], None] | None = None
        self._client = ""

    def expect(self) -> None:
        """Make the kernel's output wait for clients, for a bounded time."""
        self.is_there.clear()
        asyncio.get_running_loop().call_later(TIMEOUT, self.is_there.set)

    def note_client(self, identity: bytes) -> None:
        """Record which client sent a cell."""
        client = identity.decode("latin-1")
        if client != self._client and len(client) <= MAX_CLIENT and client.isprintable() and client.isascii():
            self._client = client
            if self.on_client is not None:
                self.on_client(client)

    async def gather(self, front: Front, client: str, listeners: int, is_left: Callable[[], bool]) -> bool:
        """Wait for a client's sockets and the given number of subscribers, then release the kernel's output.

        It stops waiting when `is_left` returns True, because the sockets were closed.

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
    """A bounded list of the messages that Jupyter buffers for a disconnected page.

    It replaces Jupyter's unbounded list. Output beyond the limit is dropped, and a notice takes its place.

    Parameters
    ----------
    front : Front
        Creates the notice.
    """

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front
        self._size = 0
        self._is_cut = False

    def append(self, item: tuple[str, list[Any]]) -> None:
        """Append a message, unless it exceeds the limit."""
        channel, frames = item
        size = _OVERHEAD + sum(map(len, frames))
        is_output = channel == "iopub" and not is_status(frames)
        if self._size + size > (MAX_KEPT if is_output else 2 * MAX_KEPT):
            if not self._is_cut and (index := header_index(frames)) is not None:
                self._is_cut = True
                text = f"output beyond the {MAX_KEPT >> 20} MiB kept for a disconnected page was dropped"
                super().append(("iopub", self._front.stream_message(text, parent=frames[index + 1])))
            return
        self._size += size
        super().append(item)


def is_status(frames: list[bytes]) -> bool:
    """Return whether an iopub message reports a kernel's state."""
    index = header_index(frames)
    return index is not None and parse(frames[index]).get("msg_type") == "status"


def is_missed(channel: str, frames: list[bytes], client: str) -> bool:
    """Return whether a reconnected client needs a message.

    It does not need ``status`` and ``iopub_welcome`` messages that other clients' requests caused.
    """
    index = header_index(frames)
    if channel != "iopub" or index is None or parse(frames[index]).get("msg_type") not in ("status", "iopub_welcome"):
        return True
    return parse(frames[index + 1]).get("session") == client
