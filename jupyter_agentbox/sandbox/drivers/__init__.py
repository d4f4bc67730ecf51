"""Carry messages between a front and a kernel in a sandbox.

There are two drivers: :mod:`.relay`, for kernels of any language, and :mod:`.embedded`, for ipykernel, which is faster.
Both share the management of the process: PID 1 inside starts it, forwards signals to it and reports how it ended. Use
on the link thread only, except where stated otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.guest.framing import MessageReader, ProtocolError, load_json, pack_json
from jupyter_agentbox.linux import GUEST
from jupyter_agentbox.sandbox.link.link import LinkThread, Stream
from jupyter_agentbox.spec import MIB, Cause, End, out_of_memory

from .embedded import Claim, Embedded
from .relay import Relay

if TYPE_CHECKING:
    from jupyter_agentbox.sandbox.sandbox import Sandbox

log = logging.getLogger(__name__)

_LAUNCH_IPYKERNEL = GUEST / "ipykernel" / "launch_ipykernel.py"

#: World-writable directory inside for connection files.
CONNECTION_DIR = "/run/kernels"

OnMessage = Callable[[str, list[bytes]], Awaitable[None]]


async def _no_receiver(channel: str, frames: list[bytes]) -> None:
    raise AssertionError("the kernel has no receiver for messages yet")


class Kernel:
    """A kernel process in a sandbox, reached by messages.

    Attributes
    ----------
    on_message : coroutine function
        Called with the channel and the frames of each message. Awaiting it provides backpressure. Nothing is read from
        the kernel before it is set.
    end : End or None
        How the kernel ended. May be read from any thread.
    is_busy : callable
        Returns whether the kernel works on something, or may do so. Set by the receiver of its messages.
    is_ready : bool
        Whether the kernel is connected and has sent a message, which means that it handles signals by now.
    lost : int
        Lost messages that have not been reported to clients yet.
    name : str
        The guest's name for the kernel.
    """

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self._on_message: OnMessage = _no_receiver
        self._has_receiver = asyncio.Event()
        self.end: End | None = None
        self.is_busy: Callable[[], bool] = lambda: True
        self.is_ready = False
        self.lost = 0
        self.sandbox = sandbox
        self.name = name
        self._callbacks: list[Callable[[], None]] = []
        self._driver: Relay | Embedded | None = None
        self._control: Stream | None = None
        self._signals = itertools.count()
        self._sent_signals: dict[int, asyncio.Future[None]] = {}

    @property
    def on_message(self) -> OnMessage:
        """The receiver of the kernel's messages."""
        return self._on_message

    @on_message.setter
    def on_message(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._has_receiver.set()

    @property
    def driver(self) -> str:
        """Name of the kernel's driver."""
        return "embedded" if isinstance(self._driver, Embedded) else "relay"

    @property
    def has_receiver(self) -> bool:
        """Whether the kernel's messages have a receiver."""
        return self._has_receiver.is_set()

    async def wait_for_receiver(self) -> None:
        """Wait until the kernel's messages have a receiver. For drivers."""
        await self._has_receiver.wait()

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, connection: Mapping[str, Any]) -> None:
        """Start the process and open its channels.

        ipykernel uses the embedded driver, unless the sandbox's ``driver`` is ``relay``. In that case it listens on
        UNIX sockets, which are cheaper in gVisor. Other kernels listen on loopback TCP, because not all of them support
        ``ipc``.
        """
        connection_file = f"{CONNECTION_DIR}/{self.name}.json"
        prepared = prepare_argv(argv)
        is_embedded = self.sandbox.spec.driver == "auto" and prepared != list(argv)
        transport = "fifo" if is_embedded else "ipc" if "ipykernel_launcher" in argv else "tcp"
        self._driver = Embedded(self) if is_embedded else Relay(self)
        self._open(
            {
                "argv": [part.replace("{connection_file}", connection_file) for part in prepared],
                "plain_argv": list(argv),
                "kernel_name": self.sandbox.spec.kernel_name,
                "env": dict(env),
                "cwd": cwd,
                "connection": {**connection, "transport": transport},
                "connection_file": connection_file,
                "is_root": self.sandbox.spec.is_root,
            }
        )

    def resume(self, driver: str, claim: Claim | None = None) -> None:
        """Reconnect to a kernel that an earlier owner started. Its undelivered messages come first.

        With a `claim`, the kernel is unclaimed, and the claim is applied before it reads any message.
        """
        self.is_ready = True
        if claim is not None:
            self.is_busy = lambda: False  # it has not been given any work yet
        self._driver = Embedded(self, claim) if driver == "embedded" else Relay(self)
        self._open({})

    def _open(self, header: dict[str, Any]) -> None:
        assert self._driver is not None
        self._control = self.sandbox.open_stream({"kind": "kernel", "kernel": self.name, **header})
        self._driver.open()
        LinkThread.instance().spawn(self._watch(self._control))

    async def hang_up(self) -> None:
        """Have the kernel close everything that is open to the host, for a checkpoint of the sandbox.

        Raises LinkClosed.
        """
        if isinstance(self._driver, Embedded):
            await self._driver.hang_up()

    def redial(self) -> None:
        """Reconnect after :meth:`hang_up`. Does nothing if the kernel has ended."""
        if isinstance(self._driver, Embedded) and self.end is None and self.sandbox.end is None:
            try:
                self._driver.reopen()
            except OSError as error:  # user code that runs as uid 0 may interfere
                LinkThread.instance().spawn(self.fail("link", error))

    def close(self) -> None:
        """Release a kernel that has ended. Its undelivered messages are dropped."""
        if self._driver is not None:
            self._driver.close()

    def add_end_callback(self, callback: Callable[[], None]) -> None:
        """Register a callback for the kernel's end, to be called on the link thread."""
        self._callbacks.append(callback)

    async def send(self, channel: str, frames: list[bytes]) -> None:
        """Send the kernel a message, and wait until the kernel accepts it. Raises LinkClosed."""
        if self._driver is None:
            raise LinkClosed("the kernel was not started")
        await self._driver.send(channel, frames)

    def request(self, request: dict[str, Any]) -> None:
        """Send the guest a request about this kernel. For drivers."""
        if self._control is not None:
            LinkThread.instance().spawn(_write(self._control, request))

    async def signal(self, number: int) -> None:
        """Send a signal to the kernel's process group, and wait until it was sent. Raises LinkClosed.

        Messages take another way. Without the wait, an interrupt could therefore hit a cell that is sent after it.
        """
        if self._control is None or self.end is not None:
            raise LinkClosed("the kernel has ended")
        index = next(self._signals)
        self._sent_signals[index] = asyncio.get_running_loop().create_future()
        try:
            await self._control.write(pack_json({"signal": int(number), "id": index}))
            await self._sent_signals[index]
        finally:
            del self._sent_signals[index]

    async def fail(self, channel: str, error: Exception) -> None:
        """End the kernel and its sandbox, because the kernel exceeded a bound. For drivers."""
        log.warning("sandbox %s: the kernel's %s channel was closed: %s", self.sandbox.id, channel, error)
        self.ended(End(Cause.CRASHED, 1, f"its {channel} channel exceeded a limit: {error}"))
        await self.sandbox.stop(Cause.CRASHED)

    def dropped(self, channel: str, count: object) -> None:
        """Record lost messages. For drivers."""
        if isinstance(count, int) and count > 0:
            self.lost += min(count, 1_000_000)  # bounded, because the number comes from inside
            log.warning(
                "sandbox %s: %r messages on %r were dropped because no client was connected",
                self.sandbox.id,
                count,
                channel,
            )

    async def _watch(self, stream: Stream) -> None:
        reader = MessageReader(MIB)
        try:
            while data := await stream.read():
                for parts in reader.feed(data):
                    self._on_event(load_json(parts[0]))
        except (LinkClosed, ProtocolError, IndexError):
            pass
        # Either the process has ended, or the sandbox has, which then knows the reason.
        if self.end is None:
            if self.sandbox.is_left and self._driver is not None:
                self._driver.on_owner_lost()
            self.ended(await self.sandbox.wait_ended())

    def _on_event(self, event: dict[str, Any]) -> None:
        if self._driver is not None:
            self._driver.on_event(event)
        if event.get("event") == "exited":
            if event.get("is_out_of_memory") is True and event.get("signal") == signal.SIGKILL:
                self.ended(out_of_memory(self.sandbox.spec.limits))
            else:
                self.ended(_kernel_end(event.get("code"), event.get("signal")))
        elif event.get("event") == "signalled":
            self._answer_signal(event.get("id"))
        elif event.get("event") == "dropped":
            self.dropped(str(event.get("channel")), event.get("count"))
        elif event.get("event") == "failed":
            self.ended(End(Cause.CRASHED, 127, f"cannot start the kernel's program: {event.get('message')!s:.500}"))

    def ended(self, end: End) -> None:
        """Record the kernel's end and call the registered callbacks. Only the first end counts."""
        if self.end is None:
            self.end = end
            if self._driver is not None:
                self._driver.ended()
            for index in self._sent_signals:
                self._answer_signal(index)
            for callback in self._callbacks:
                callback()

    def _answer_signal(self, index: object) -> None:
        sent = self._sent_signals.get(index) if isinstance(index, int) else None
        if sent is not None and not sent.done():
            sent.set_result(None)


async def _write(stream: Stream, request: dict[str, Any]) -> None:
    with suppress(LinkClosed):
        await stream.write(pack_json(request))


def prepare_argv(argv: Sequence[str]) -> list[str]:
    """Make ipykernel start through our own launcher, whose source gives the reasons.

    The arguments of other kernels are returned unchanged.
    """
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
    return End(Cause.EXITED, code, f"the kernel exited (status {code})")
