# mypy: allow-untyped-calls
"""Run ipykernel on the link without ZeroMQ: the kernel's own process reads and writes the FIFOs to the host.

This is ipykernel's own application and kernel with different sockets and streams. In gVisor, a cell's round trip
mostly costs wake-ups of threads and processes. The main thread therefore reads requests and writes replies and output
itself: there is no IO thread, no heartbeat, no pause after a cell, and the messages at a cell's end need one write. One
thread, for the control channel, sleeps until a message arrives. Another flushes the output of a cell that prints
nothing for a while.

``guest.kernels``, as PID 1, passes the FIFOs of each owner over a socket, in the order of :data:`FIFOS`.
:mod:`.embedded_protocol` keeps messages until an owner has read them. :mod:`.launch_ipykernel` loads these modules.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import logging
import os
import queue
import select
import selectors
import signal
import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import zmq
from ipykernel import zmqshell
from ipykernel.control import ControlThread
from ipykernel.kernelapp import IPKernelApp
from IPython.core.magics import packaging
from jupyter_client.session import Session
from tornado.ioloop import IOLoop
from traitlets import default
from zmq.eventloop.zmqstream import ZMQStream

from .embedded_claim import claim
from .embedded_lazy import DEBUGGER, Debugger
from .embedded_protocol import Sender
from .embedded_shells import Shells
from .embedded_streams import Frame, Output, Publisher, Receiver, Stream
from .embedded_waits import count_waits

#: The host writes to the first five. ``said`` carries shell, iopub and stdin, ``answers`` carries control.
FIFOS = ("shell", "stdin", "control", "said-read", "answers-read", "said", "answers")
#: Maximum number of bytes kept while no owner is connected.
OUTPUT_LIMIT, ANSWERS_LIMIT = 64 * 1024 * 1024, 4 * 1024 * 1024
#: Cells that IPython's history holds in memory before it writes them to disk. Reads of the history include them.
HISTORY_CACHE = 20
#: Advice after an installation.
PACKAGES_NOTE = (
    "Note: a restart of the kernel discards installed packages, so keep this cell before those that import them. To use"
    " another version of a package that was imported already, restart the kernel and run this cell first."
)
#: Maximum size of an order from PID 1, in bytes. The order of a claim contains the whole environment.
ORDER_SIZE = 128 * 1024


class DebuggerShell:
    """Debugger's client of the main shell, which it asks to load debugpy."""

    identity = b"debugger"

    def __init__(self, shell: Stream, deliver: Callable[[list[Frame]], object]) -> None:
        self._deliver = deliver
        self._answers = shell.local[self.identity] = queue.SimpleQueue()

    def send_multipart(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        self._deliver([Frame(part) for part in (self.identity, *msg)])

    def recv_multipart(self, *args: Any, **kwargs: Any) -> list[bytes]:
        return self._answers.get()

    def getsockopt(self, option: int) -> bytes:
        return b""


class DebugpyStream(ZMQStream):
    """Connection to debugpy over ZeroMQ, opened only when debugging starts."""

    def __init__(self, io_loop: IOLoop) -> None:
        self.io_loop = io_loop
        self._on_recv: Any = None
        self._real: Any = None

    def on_recv(self, callback: Any, copy: bool = True) -> None:
        if self._real is None:
            self._on_recv = callback
        else:
            super().on_recv(callback, copy=copy)

    @property
    def socket(self) -> Any:
        if self._real is None:
            sock: Any = zmq.Context.instance().socket(zmq.STREAM)
            sock.linger = 0
            self._real = sock
            super().__init__(sock, self.io_loop)
            super().on_recv(self._on_recv, copy=False)
        return self._real

    @socket.setter
    def socket(self, sock: Any) -> None:
        self._real = sock


class Owners:
    """Receiver of the FIFOs of one owner after another, which PID 1 hands over and orders to be closed."""

    def __init__(self, app: Any, receivers: list[Receiver], senders: list[Sender]) -> None:
        self._app = app
        self._receivers = receivers
        self._senders = senders
        self._sock = socket.socket(fileno=3)
        self._sock.set_inheritable(False)
        os.register_at_fork(after_in_child=self._forked)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take orders on this event loop from here on."""
        loop.call_soon_threadsafe(loop.add_reader, self._sock, self.take_order, loop)

    def take_order(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Wait for an order from PID 1 and execute it."""
        # socket.recv_fds() cannot close them in programs that the kernel starts, which would keep the FIFOs open.
        size = socket.CMSG_SPACE(4 * len(FIFOS))
        data, ancillary, _, _ = self._sock.recvmsg(ORDER_SIZE, size, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for _, _, body in ancillary for fd in array("i", body)]
        order = json.loads(data) if data else {}
        if not data and loop is not None:
            loop.remove_reader(self._sock)
        if "count_waits" in order:
            waits = count_waits(self._app.shell_socket.io_loop.asyncio_loop)
            self._sock.send(json.dumps({"waits": waits}).encode())
            return
        for receiver in self._receivers:
            receiver.drain()
            receiver.detach()
        for index, sender in enumerate(self._senders):
            sender.detach()
            if order.get("taken"):
                sender.forget(order["taken"][index])
        if "claim" in order:
            claim(self._app, order["claim"])
        if len(fds) == len(FIFOS):
            for receiver, fd in zip(self._receivers, fds[:3], strict=True):
                receiver.attach(fd)
            for index, sender in enumerate(self._senders):
                sender.attach(fds[5 + index], fds[3 + index], order["room"][index])
        elif order:
            self._sock.send(b"{}")

    def _forked(self) -> None:
        for sender in self._senders:
            sender.abandon()
        for receiver in self._receivers:
            if receiver.fd >= 0:
                os.close(receiver.fd)
                receiver.fd = -1
        self._sock.close()


def embed(kernel_class: type) -> type:
    """Return a kernel class for the embedded driver.

    It writes a cell's messages in two batches: before it runs, and after. Cells remain interruptible whatever code does
    with signal handlers, and with requests that arrive while a cell runs.
    """

    trait = kernel_class.class_traits().get("debugger_class")  # type: ignore[attr-defined]

    class Embedded(kernel_class):  # type: ignore[misc]
        if trait is not None and trait.default_value == DEBUGGER:
            debugger_class = Debugger

        #: Future of the running cell, if the cell awaits something.
        _awaited: asyncio.Future[Any] | None = None

        @functools.wraps(kernel_class.dispatch_shell)  # type: ignore[attr-defined]
        async def dispatch_shell(self, *args: Any, **kwargs: Any) -> None:
            is_main = threading.current_thread() is threading.main_thread()
            # A request may be handled within a cell, and must not replace what the cell's end restores.
            handler = getattr(self, "saved_sigint_handler", None)
            self._sender.hold()
            try:
                await super().dispatch_shell(*args, **kwargs)
            except KeyboardInterrupt:  # where ipykernel does not expect it: beside a hook of another request
                if kwargs.get("concurrent"):
                    raise
                self._publish_status("idle", "shell")
            finally:
                self._sender.release()
                if is_main:
                    self.saved_sigint_handler = handler

        @functools.wraps(kernel_class.should_handle)  # type: ignore[attr-defined]
        def should_handle(self, stream: Any, msg: Any, idents: Any) -> Any:
            if msg["header"]["msg_type"].startswith("comm_"):
                self._sender.release()  # comm handlers are user code
            return super().should_handle(stream, msg, idents)

        def pre_handler_hook(self) -> None:
            """Ignore interrupts while ipykernel's own code handles a cell, whose reply would be lost.

            ``do_execute`` makes the user's code interruptible.
            """
            if self.get_parent("shell")["header"]["msg_type"] == "execute_request":
                self.saved_sigint_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
            else:
                super().pre_handler_hook()

        @functools.wraps(kernel_class.do_execute)  # type: ignore[attr-defined]
        async def do_execute(self, *args: Any, **kwargs: Any) -> Any:
            is_held = self._sender.release()
            is_main = threading.current_thread() is threading.main_thread()
            before = signal.getsignal(signal.SIGINT)
            before = signal.SIG_IGN if before is None else before
            try:
                if is_main:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                try:
                    result = super().do_execute(*args, **kwargs)
                    return await result if inspect.isawaitable(result) else result
                finally:
                    if is_main:
                        signal.signal(signal.SIGINT, before)
            except KeyboardInterrupt:  # between the user's code and ipykernel's
                if is_main:
                    signal.signal(signal.SIGINT, before)
                error = {"ename": "KeyboardInterrupt", "evalue": "", "traceback": ["KeyboardInterrupt"]}
                self.send_response(self.iopub_socket, "error", error)
                return {"status": "error", **error, "execution_count": self.execution_count, "user_expressions": {}}
            finally:
                if is_held:
                    self._sender.hold()

        @contextlib.contextmanager
        def _cancel_on_sigint(self, future: asyncio.Future[Any]) -> Iterator[None]:
            """Cancel a cell that awaits something at SIGINT.

            ipykernel's handler only queues the cancellation, and the event loop sleeps on. Python's own way to wake it,
            ``signal.set_wakeup_fd``, does not last: asyncio resets it with the last handler that a program removes.
            """
            loop = asyncio.get_running_loop()
            with super()._cancel_on_sigint(future):
                queue_cancellation: Any = signal.getsignal(signal.SIGINT)

                def cancel(*args: Any) -> None:
                    queue_cancellation(*args)
                    loop.call_soon_threadsafe(lambda: None)

                signal.signal(signal.SIGINT, cancel)
                self._awaited = future
                try:
                    yield
                finally:
                    self._awaited = None

        def cancel_awaited(self) -> None:
            """Cancel the running cell, if it awaits something."""
            if self._awaited is not None:
                self._awaited.cancel()

    if "shell_channel_thread" in kernel_class.class_trait_names():  # type: ignore[attr-defined]

        class WithSubshells(Embedded):
            @property
            def _main_asyncio_lock(self) -> Any:
                return self._shell_lock

            @_main_asyncio_lock.setter
            def _main_asyncio_lock(self, lock: Any) -> None:
                # jupyter-ui-poll replaces the lock, to handle events within a cell. That needs no replacement here.
                if isinstance(lock, asyncio.Lock):
                    self._shell_lock = lock

            async def do_one_iteration(self) -> None:
                """Handle the comm messages that have arrived, although a cell runs. Cells run after it."""
                await self.shell_channel_thread.handle_comms()

        Embedded = WithSubshells  # type: ignore[misc]
    Embedded.__name__, Embedded.__qualname__ = kernel_class.__name__, kernel_class.__qualname__
    Embedded.__module__ = kernel_class.__module__
    return Embedded


def run_command(system: Callable[[str], Any], command: str) -> Any:
    """Run IPython's ``system``, for ``!command``, without losing output.

    pexpect waits 0.05 s for output, and then treats a command that has exited as one without further output. A command
    that ran for about that long lost its last output once in 150 times.
    """
    import pexpect  # type: ignore[import-untyped]

    spawn: Any = pexpect.spawn
    if not hasattr(spawn, "_agentbox_read"):
        spawn._agentbox_read = spawn.read_nonblocking

        def read_nonblocking(self: Any, size: int = 1, timeout: Any = -1) -> Any:
            try:
                return self._agentbox_read(size, timeout)
            except pexpect.EOF:
                if self.closed or not select.select([self.child_fd], [], [], 0)[0]:
                    raise
                return super(spawn, self).read_nonblocking(size)

        spawn.read_nonblocking = read_nonblocking
    return system(command)


def print_note(*args: Any, **kwargs: Any) -> None:
    """Print for the magics ``%pip`` and ``%uv``, whose advice to restart the kernel is wrong in a sandbox."""
    if args and str(args[0]).startswith("Note: you may need to restart the kernel"):
        args = (PACKAGES_NOTE,)
    print(*args, **kwargs)


class ForklessSession(Session):
    """Jupyter session without a system call for each message.

    It needs no check of the process id: in a forked child the senders are abandoned, so the child sends nothing.
    """

    check_pid = False

    @property
    def msg_id(self) -> str:
        number = self.message_count
        self.message_count += 1
        return f"{self.session}_{self.pid}_{number}"


def drop_unheard(log: Any) -> None:
    """Make a logger skip records that all its handlers drop: ipykernel's logger is at DEBUG, its handlers are not."""

    def is_enabled(level: int) -> bool:
        is_heard = log.propagate or any(level >= handler.level for handler in log.handlers)
        return is_heard and logging.Logger.isEnabledFor(log, level)

    log.isEnabledFor = is_enabled


class EmbeddedApp(IPKernelApp):
    """ipykernel's application with different sockets and streams."""

    @default("session")
    def _default_session(self) -> Session:
        return ForklessSession(parent=self)

    #: A trait in the base class, which would import all of jupyter_client.
    blocking_class: Any = property(lambda self: importlib.import_module("jupyter_client").BlockingKernelClient)

    def init_sockets(self) -> None:
        self.control_thread = ControlThread(daemon=True)
        self.control_thread.daemon = True
        # gVisor's epoll may hold a closed FIFO, and then cannot be checkpointed. Poll holds no files.
        self.control_thread.io_loop.close()
        loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        self.control_thread.io_loop = IOLoop(make_current=False, asyncio_loop=loop)
        main, control = IOLoop.current(), self.control_thread.io_loop
        output, answers = Sender(OUTPUT_LIMIT), Sender(ANSWERS_LIMIT)
        self.shell_socket = Stream("shell", output, main)
        self.stdin_socket = Stream("stdin", output, main)
        self.stdin_socket.receiver.on_message = self.stdin_socket._ready.append
        self.control_socket = Stream("control", answers, control)
        receivers = [stream.receiver for stream in (self.shell_socket, self.stdin_socket, self.control_socket)]
        self._owners = Owners(self, receivers, [output, answers])
        self._owners.take_order()
        self.configure_tornado_logger()
        self.iopub_thread = Publisher(Stream("iopub", output, main), self.session)
        self.iopub_socket = self.iopub_thread.background_socket
        deliver = self._deliver_to_main
        kernel_class: Any = self.kernel_class
        if "shell_channel_thread" in kernel_class.class_trait_names():
            self.shell_channel_thread = Shells(self.shell_socket, main, self.control_thread)
        self.debug_shell_socket = DebuggerShell(self.shell_socket, deliver)
        if self.outstream_class == "ipykernel.iostream.OutStream":
            self.outstream_class = f"{Output.__module__}.Output"

    def _deliver_to_main(self, frames: list[Frame]) -> None:
        loop: Any = self.shell_socket.io_loop.asyncio_loop
        loop.call_soon_threadsafe(self.shell_socket.receiver.on_message, frames)

    def init_heartbeat(self) -> None:
        """Do nothing: the front on the host answers heartbeats."""

    def load_connection_info(self, info: Any) -> None:
        """Load key and signature scheme. ZeroMQ refuses the file's transport, so clients inside fail early."""
        info["transport"] = "tcp"
        super().load_connection_info(info)

    def write_connection_file(self, **kwargs: Any) -> None:
        """Do nothing: the guest has written it."""

    def log_connection_info(self) -> None: ...

    def init_kernel(self) -> None:
        self.control_thread.start()
        self._owners.watch(self.control_thread.io_loop.asyncio_loop)
        kernel_class: Any = self.kernel_class
        names = kernel_class.class_trait_names()
        parts = {
            "session": self.session,
            "control_stream": self.control_socket,
            "debugpy_stream": DebugpyStream(self.control_thread.io_loop),
            "debug_shell_socket": self.debug_shell_socket,
            "shell_stream": self.shell_socket,
            "control_thread": self.control_thread,
            "shell_channel_thread": self.shell_channel_thread if "shell_channel_thread" in names else None,
            "iopub_thread": self.iopub_thread,
            "iopub_socket": self.iopub_socket,
            "stdin_socket": self.stdin_socket,
            "log": self.log,
            "profile_dir": self.profile_dir,
            "user_ns": self.user_ns,
        }
        drop_unheard(self.log)
        if "db_cache_size" not in self.config.HistoryManager:
            self.config.HistoryManager.db_cache_size = HISTORY_CACHE
        shells: Any = zmqshell
        shells.system = functools.partial(run_command, shells.system)
        packaging.print = print_note  # type: ignore[attr-defined]
        embedded: Any = embed(kernel_class)
        embedded._sender = self.shell_socket._sender
        kernel = embedded.instance(parent=self, **{name: part for name, part in parts.items() if name in names})
        kernel._execute_sleep = 0  # not needed: one FIFO carries all messages in order
        self.kernel = kernel
        if isinstance(kernel.shell_channel_thread if "shell_channel_thread" in names else None, Shells):
            kernel.shell_channel_thread.kernel = kernel
        self.displayhook.get_execution_count = lambda: kernel.execution_count

    def start(self) -> None:
        """Run the kernel until it is shut down.

        Code may make SIGINT raise KeyboardInterrupt in the event loop, for example by removing its own handler.
        ipykernel exits then, and all variables are lost.
        """
        if self.subapp is not None or self.trio_loop:
            super().start()
            return
        if self.poller is not None:
            self.poller.start()
        self.kernel.start()
        self.io_loop = IOLoop.current()
        is_interrupted = True
        while is_interrupted:
            is_interrupted = False
            try:
                self.io_loop.start()
            except KeyboardInterrupt:
                is_interrupted = True
                self.kernel.cancel_awaited()

    def close(self) -> None:
        self.reset_io()
        if self.control_thread is not None and self.control_thread.is_alive():
            self.control_thread.stop()
            self.control_thread.join()
