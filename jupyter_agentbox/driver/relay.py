"""The relay, for kernels of any language: the guest speaks ZMTP to the kernel's sockets, and carries their bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.guest import zmtp
from jupyter_agentbox.link import LinkThread, Stream
from jupyter_agentbox.spec import MIB

if TYPE_CHECKING:
    from . import Kernel

CHANNELS = ("shell", "iopub", "stdin", "control")
#: Largest message of a kernel, bytes.
MAX_MESSAGE = 128 * MIB
#: Credit of the channels beyond the initial one, bytes: a round trip's worth at full speed.
CHANNEL_CREDIT = 4 * MIB


class Relay:
    """A stream of the link for each channel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._connected: set[str] = set()
        self._streams: dict[str, Stream] = {}
        self._locks: dict[str, asyncio.Lock] = {}

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
                    await self._kernel.on_message(channel, frames)
        except LinkClosed:
            pass
        except zmtp.ZmtpError as error:
            await self._kernel.cut_off(channel, error)
