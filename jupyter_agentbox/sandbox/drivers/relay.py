"""Relay messages to and from kernels of any language: the guest speaks ZMTP with the kernel and copies bytes."""

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
#: Largest message of a kernel, in bytes.
MAX_MESSAGE = 128 * MIB
#: Credit of a channel beyond the initial one, in bytes: one round trip's worth at full speed.
CHANNEL_CREDIT = 4 * MIB
#: Requests whose senders are remembered.
MAX_REQUESTS = 256


class Senders:
    """A record of who sent which request.

    It serves kernels such as Deno's, which omit the client's identity in their replies.
    """

    def __init__(self) -> None:
        self._requests: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_REQUESTS)

    def note(self, frames: Sequence[bytes]) -> None:
        """Remember a request that is sent to the kernel."""
        index = header_index(frames)
        if index is not None and frames[0] != DELIMITER:
            self._requests.append((frames[0], frames[index]))

    def address(self, frames: list[bytes]) -> list[bytes]:
        """Prepend the requester's identity to a kernel's reply, if it is missing and known."""
        if not frames or frames[0] != DELIMITER:
            return frames
        index = header_index(frames)
        asked = parse(frames[index + 1]).get("msg_id") if index is not None else None
        for identity, header in reversed(self._requests):
            if asked and parse(header).get("msg_id") == asked:
                return [identity, *frames]
        return frames


class Relay:
    """The relay driver of one kernel, with one stream of the link for each channel."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._connected: set[str] = set()
        self._streams: dict[str, Stream] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._senders = Senders()

    def open(self) -> None:
        """Open the channels' streams and start carrying messages."""
        for channel in CHANNELS:
            header = {"kind": "channel", "kernel": self._kernel.name, "channel": channel, "window": CHANNEL_CREDIT}
            stream = self._kernel.sandbox.open_stream(header)
            stream.grant(CHANNEL_CREDIT)
            self._streams[channel] = stream
            self._locks[channel] = asyncio.Lock()
            LinkThread.instance().spawn(self._carry(channel, stream))

    def on_event(self, event: dict[str, Any]) -> None:
        """Handle an event that the guest reports about the kernel."""
        if event.get("event") == "connected" and event.get("channel") in CHANNELS:
            self._connected.add(event["channel"])

    def ended(self) -> None:
        """Handle the kernel's end. Its remaining messages are still delivered."""

    def on_owner_lost(self) -> None:
        """Handle the loss of ownership. Another owner will receive the kernel's messages."""

    def close(self) -> None:
        """Drop undelivered messages."""
        for stream in self._streams.values():
            stream.reset("the kernel has ended")

    async def send(self, channel: str, frames: list[bytes]) -> None:
        """Send the kernel a message. Raises LinkClosed."""
        self._senders.note(frames)
        async with self._locks[channel]:  # a message is written in pieces as credit arrives
            await self._streams[channel].write(zmtp.encode(frames))

    async def _carry(self, channel: str, stream: Stream) -> None:
        decoder = zmtp.Decoder(MAX_MESSAGE)
        await self._kernel.wait_for_receiver()
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
            await self._kernel.fail(channel, error)
