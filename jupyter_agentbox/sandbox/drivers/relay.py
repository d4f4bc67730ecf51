"""The relay, for kernels of any language: the guest speaks ZMTP to the kernel's sockets, and carries their bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.guest import zmtp
from jupyter_agentbox.sandbox.link.link import LinkThread, Stream
from jupyter_agentbox.spec import MIB

from .messages import DELIMITER, header_index, parse

if TYPE_CHECKING:
    from . import Kernel

CHANNELS = ("shell", "iopub", "stdin", "control")
#: Largest message of a kernel, bytes.
MAX_MESSAGE = 128 * MIB
#: Credit of the channels beyond the initial one, bytes: a round trip's worth at full speed.
CHANNEL_CREDIT = 4 * MIB
#: Requests of which it is remembered who sent them.
MAX_REQUESTS = 256


class Senders:
    """Remembers who sent a request, for kernels that leave the client's identity out of their replies (Deno's does)."""

    def __init__(self) -> None:
        self._requests: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_REQUESTS)

    def note(self, frames: Sequence[bytes]) -> None:
        """Take note of a request that goes to the kernel."""
        index = header_index(frames)
        if index is not None and frames[0] != DELIMITER:
            self._requests.append((frames[0], frames[index]))

    def address(self, frames: list[bytes]) -> list[bytes]:
        """Return what a kernel answered with the identity of whoever asked in front, where that is known."""
        if not frames or frames[0] != DELIMITER:
            return frames
        index = header_index(frames)
        asked = parse(frames[index + 1]).get("msg_id") if index is not None else None
        for identity, header in reversed(self._requests):
            if asked and parse(header).get("msg_id") == asked:
                return [identity, *frames]
        return frames


class Relay:
    """A stream of the link for each channel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._connected: set[str] = set()
        self._streams: dict[str, Stream] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._senders = Senders()

    def open(self) -> None:
        """Begin to carry."""
        for channel in CHANNELS:
            header = {"kind": "channel", "kernel": self._kernel.name, "channel": channel, "window": CHANNEL_CREDIT}
            stream = self._kernel.sandbox.open_stream(header)
            stream.grant(CHANNEL_CREDIT)
            self._streams[channel] = stream
            self._locks[channel] = asyncio.Lock()
            LinkThread.instance().spawn(self._carry(channel, stream))

    def heard(self, event: dict[str, Any]) -> None:
        """Take note of what the guest says about the kernel."""
        if event.get("event") == "connected" and event.get("channel") in CHANNELS:
            self._connected.add(event["channel"])

    def ended(self) -> None:
        """The kernel is gone; what it said is still taken."""

    def left(self) -> None:
        """Another owner will take the kernel's messages."""

    def close(self) -> None:
        """Drop what nobody took."""
        for stream in self._streams.values():
            stream.reset("the kernel has ended")

    async def send(self, channel: str, frames: list[bytes]) -> None:
        """Hand the kernel a message. Raises LinkClosed."""
        self._senders.note(frames)
        async with self._locks[channel]:  # a message is written in pieces, as credit comes
            await self._streams[channel].write(zmtp.encode(frames))

    async def _carry(self, channel: str, stream: Stream) -> None:
        decoder = zmtp.Decoder(MAX_MESSAGE)
        await self._kernel.heard_by_somebody()
        try:
            while data := await stream.read():
                for frames in decoder.feed(data):
                    if len(self._connected) == len(CHANNELS):
                        self._kernel.is_ready = True
                    addressed = frames if channel == "iopub" else self._senders.address(frames)
                    await self._kernel.on_message(channel, addressed)
        except LinkClosed:
            pass
        except zmtp.ZmtpError as error:
            await self._kernel.cut_off(channel, error)
