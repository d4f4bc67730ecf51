"""Drivers: how a front reaches a kernel in a sandbox, messages in and out.

There is one so far, the *relay*, for kernels of any language: the guest speaks ZMTP to the kernel's
sockets on loopback and carries their bytes. Only on the link's thread, but for what says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import LinkClosed
from .guest import zmtp
from .guest.framing import MessageReader, ProtocolError, load_json, pack_json
from .link import LinkThread, Stream
from .spec import MIB, Cause, End

if TYPE_CHECKING:
    from .sandbox import Sandbox

log = logging.getLogger(__name__)

_LAUNCH_IPYKERNEL = Path(__file__).parent / "guest" / "launch_ipykernel.py"

#: Directory inside, writable by all, where connection files are.
CONNECTION_DIR = "/run/kernels"
CHANNELS = ("shell", "iopub", "stdin", "control")
#: Largest message of a kernel, bytes.
MAX_MESSAGE = 128 * MIB
#: Credit of the channels beyond the initial one, bytes: a round trip's worth at full speed.
CHANNEL_CREDIT = 4 * MIB

OnMessage = Callable[[str, list[bytes]], Awaitable[None]]


async def _nobody(channel: str, frames: list[bytes]) -> None:
    raise AssertionError("nothing is read before somebody listens")


class Kernel:
    """A kernel process in a sandbox, reached by messages: the relay driver.

    Attributes
    ----------
    on_message : coroutine function
        Called with channel and frames of each message; what it awaits is the backpressure. Nothing is taken from the
        kernel before it is set.
    end : End or None
        How it ended; readable from any thread.
    is_busy : callable
        Whether it works on something, or may; set by whoever takes its messages.
    is_ready : bool
        It is connected and has said something, so it handles signals by now.
    name : str
        The guest's name for it.
    """

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self._on_message: OnMessage = _nobody
        self._is_heard = asyncio.Event()
        self.end: End | None = None
        self.is_busy: Callable[[], bool] = lambda: True
        self.is_ready = False
        self._sandbox = sandbox
        self.name = name
        self._connected: set[str] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._streams: dict[str, Stream] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._control: Stream | None = None

    @property
    def on_message(self) -> OnMessage:
        """Who takes the kernel's messages."""
        return self._on_message

    @on_message.setter
    def on_message(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._is_heard.set()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, connection: Mapping[str, Any]) -> None:
        """Start the process and open its channels.

        Inside, ipykernel listens on UNIX sockets, which cost gVisor less; other kernels on loopback TCP, since not
        all of them know ``ipc``.
        """
        connection_file = f"{CONNECTION_DIR}/{self.name}.json"
        is_ipykernel = "ipykernel_launcher" in argv
        self._open(
            {
                "argv": [part.replace("{connection_file}", connection_file) for part in prepare_argv(argv)],
                "env": dict(env),
                "cwd": cwd,
                "connection": {
                    **connection,
                    "transport": "ipc" if is_ipykernel else "tcp",
                },
                "connection_file": connection_file,
                "is_root": self._sandbox.spec.is_root,
            }
        )

    def resume(self) -> None:
        """Go on with one that an earlier owner started: what it said meanwhile comes first."""
        self.is_ready = True
        self._open({})

    def _open(self, header: dict[str, Any]) -> None:
        thread = LinkThread.instance()
        self._control = self._sandbox.open_stream({"kind": "kernel", "kernel": self.name, **header})
        for channel in CHANNELS:
            header = {"kind": "channel", "kernel": self.name, "channel": channel, "window": CHANNEL_CREDIT}
            stream = self._sandbox.open_stream(header)
            stream.grant(CHANNEL_CREDIT)
            self._streams[channel] = stream
            self._locks[channel] = asyncio.Lock()
            thread.spawn(self._carry(channel, stream))
        thread.spawn(self._watch(self._control))

    def close(self) -> None:
        """Let go of one that has ended; what it said and nobody took is dropped."""
        for stream in self._streams.values():
            stream.reset("the kernel has ended")

    def add_end_callback(self, callback: Callable[[], None]) -> None:
        """Call back on the link's thread when the kernel has ended."""
        self._callbacks.append(callback)

    async def send(self, channel: str, frames: list[bytes]) -> None:
        """Hand the kernel a message, waiting until it takes it. Raises LinkClosed."""
        async with self._locks[channel]:  # a message is written in pieces, as credit comes
            await self._streams[channel].write(zmtp.encode(frames))

    async def signal(self, number: int) -> None:
        """Send a signal to the kernel's process group. Raises LinkClosed."""
        if self._control is None or self.end is not None:
            raise LinkClosed("the kernel has ended")
        await self._control.write(pack_json({"signal": int(number)}))

    async def _carry(self, channel: str, stream: Stream) -> None:
        decoder = zmtp.Decoder(MAX_MESSAGE)
        await self._is_heard.wait()
        try:
            while data := await stream.read():
                for frames in decoder.feed(data):
                    if not self.is_ready and len(self._connected) == len(CHANNELS):
                        self.is_ready = True
                    await self._on_message(channel, frames)
        except LinkClosed:
            pass
        except zmtp.ZmtpError as error:
            log.warning("sandbox %s: the kernel's %s was cut off: %s", self._sandbox.id, channel, error)
            self.ended(End(Cause.CRASHED, 1, f"its {channel} channel broke a bound: {error}"))
            await self._sandbox.stop(Cause.CRASHED)

    async def _watch(self, stream: Stream) -> None:
        reader = MessageReader(MIB)
        try:
            while data := await stream.read():
                for parts in reader.feed(data):
                    self._heard(load_json(parts[0]))
        except (LinkClosed, ProtocolError, IndexError):
            pass
        # The process is gone, or the sandbox is: in that case it knows why.
        if self.end is None:
            self.ended(await self._sandbox.wait_ended())

    def _heard(self, event: dict[str, Any]) -> None:
        if event.get("event") == "connected" and event.get("channel") in CHANNELS:
            self._connected.add(event["channel"])
        elif event.get("event") == "exited":
            self.ended(_kernel_end(event.get("code"), event.get("signal")))
        elif event.get("event") == "dropped":
            log.warning(
                "sandbox %s: nobody listened for long, and %r messages on %r are lost",
                self._sandbox.id,
                event.get("count"),
                event.get("channel"),
            )
        elif event.get("event") == "failed":
            self.ended(End(Cause.CRASHED, 127, f"the kernel's program did not start: {event.get('message')!s:.500}"))

    def ended(self, end: End) -> None:
        """Note the end, the first one only, and tell who asked."""
        if self.end is None:
            self.end = end
            for callback in self._callbacks:
                callback()


def prepare_argv(argv: Sequence[str]) -> list[str]:
    """Start ipykernel in our own way, which says why; other kernels as their kernelspecs say."""
    for index in range(len(argv) - 1):
        if argv[index] == "-m" and argv[index + 1] == "ipykernel_launcher":
            return [*argv[:index], "-c", _LAUNCH_IPYKERNEL.read_text(), *argv[index + 2 :]]
    return list(argv)


def _kernel_end(code: Any, number: Any) -> End:
    code = code & 0xFF if isinstance(code, int) else 1
    if number == signal.SIGKILL:
        return End(Cause.KILLED, code, "the kernel was killed (SIGKILL) by a program inside")
    if isinstance(number, int) and number in set(signal.Signals):
        return End(Cause.CRASHED, code, f"the kernel crashed ({signal.Signals(number).name})")
    return End(Cause.EXITED, code, f"the kernel exited by itself (status {code})")
