# mypy: allow-untyped-calls, disable-error-code="override"
"""Replace ipykernel's ZeroMQ sockets and standard streams with ones on FIFOs; for :mod:`.embedded`."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import inspect
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, ClassVar

import zmq
from ipykernel.iostream import BackgroundSocket, IOPubThread, OutStream
from tornado.ioloop import IOLoop
from zmq.eventloop.zmqstream import ZMQStream

from .embedded_protocol import FIRST_READ_SIZE, READ_SIZE, FormatError, Sender, Unpacker, is_readable

#: Largest message from the host, in bytes: 512 MiB of a client's data, plus its envelope.
MAX_MESSAGE = 513 * 1024 * 1024
#: Seconds for which output may stay buffered, and size in characters at which the buffer is flushed.
FLUSH_INTERVAL, FLUSH_SIZE = 0.2, 256 * 1024
#: Seconds to wait for another thread that is taking output from the buffer.
TURN_TIMEOUT = 5.0


class Frame(bytes):
    """Part of a message, with the attributes of a ``zmq.Frame`` that ipykernel reads."""

    @property
    def bytes(self) -> Frame:
        return self

    @property
    def buffer(self) -> memoryview:
        return memoryview(self)


class Receiver:
    """Reader of messages from an owner's FIFO, on the event loop that it should wake."""

    def __init__(self, on_message: Callable[[list[Frame]], object]) -> None:
        self.fd = -1
        self._is_empty = False
        self.on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.RLock()
        self._unpacker = Unpacker(MAX_MESSAGE, Frame)

    def attach(self, fd: int) -> None:
        """Read from this owner from here on."""
        self.detach()
        with self._lock:
            self.fd = fd
        self._watch(self._loop)

    def detach(self) -> None:
        """Close the FIFO."""
        with self._lock:
            if self.fd >= 0:
                fd, self.fd = self.fd, -1
                if self._loop is not None:
                    self._on_loop(self._loop, lambda loop: loop.remove_reader(fd))
                os.close(fd)
                # An incomplete message is sent again in full over the next FIFO, if at all.
                self._unpacker = Unpacker(MAX_MESSAGE, Frame)

    def read_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read on this event loop, and no longer on any other."""
        before, self._loop = self._loop, loop
        if before is not None and before is not loop and self.fd >= 0:
            self._on_loop(before, lambda loop: loop.remove_reader(self.fd))
        self._watch(loop)

    def _watch(self, loop: asyncio.AbstractEventLoop | None) -> None:
        def watch(loop: asyncio.AbstractEventLoop) -> None:
            if self.fd >= 0 and loop is self._loop:
                loop.add_reader(self.fd, self.read)

        if loop is not None:
            self._on_loop(loop, watch)

    def _on_loop(self, loop: asyncio.AbstractEventLoop, action: Callable[[asyncio.AbstractEventLoop], object]) -> None:
        if loop is asyncio._get_running_loop():
            action(loop)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(action, loop)

    def read(self) -> int:
        """Handle the available messages. Return their number."""
        with self._lock:
            messages = self.take()
            for frames in messages:
                self.on_message(frames)
        return len(messages)

    def drain(self) -> None:
        """Handle everything that has arrived, before the FIFO is closed."""
        with self._lock:
            self._is_empty = False
            while self.fd >= 0 and not self._is_empty:
                self.read()

    def take(self) -> list[list[Frame]]:
        """Return the available messages, without waiting."""
        with self._lock:
            if self.fd < 0:
                return []
            if not is_readable(self.fd):
                self._is_empty = True
                return []
            try:
                data = os.read(self.fd, FIRST_READ_SIZE if self._unpacker.is_at_boundary else READ_SIZE)
                if data:
                    return self._unpacker.feed(data)  # type: ignore[return-value]
            except (OSError, FormatError):
                pass
            self.detach()
            return []


class Stream(ZMQStream):
    """Replacement for the stream of a ZeroMQ socket, with one FIFO in each direction."""

    def __init__(self, name: str, sender: Sender, io_loop: IOLoop) -> None:
        self.io_loop = io_loop
        self.socket: Any = self
        self.receiver = Receiver(self.deliver)
        self._name = name.encode()
        self._sender = sender
        self._callback: Callable[[list[Frame]], Any] | None = None
        self._context = copy_context()
        self._fallback = -1
        self._ready: deque[list[Frame]] = deque()
        #: Queues for answers to clients inside this process, by the clients' identities.
        self.local: dict[bytes, queue.SimpleQueue[list[bytes]]] = {}

    def deliver(self, frames: list[Frame]) -> None:
        """Pass a message to ipykernel, on the stream's own event loop."""
        if self._callback is not None:
            result = self._callback(frames)
            if inspect.isawaitable(result):
                start_task(self.io_loop.asyncio_loop, result, self._context)  # type: ignore[attr-defined]

    def on_recv(self, callback: Callable[[list[Frame]], Any] | None, copy: bool = True) -> None:
        self._callback = callback
        self.receiver.read_on(self.io_loop.asyncio_loop)  # type: ignore[attr-defined]

    def send_multipart(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        if self.local and bytes(msg[0]) in self.local:
            self.local[bytes(msg[0])].put([bytes(part) for part in msg[1:]])
            return
        self._sender.send([self._name, *msg])

    def send(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        self.send_multipart([msg])

    def recv_multipart(self, flags: int = 0, copy: bool = True, track: bool = False) -> list[Frame]:
        """Return the next message, for code that reads without an event loop, such as ``input()``."""
        while not self._ready:
            self._ready.extend(self.receiver.take())
            if not self._ready:
                if flags & zmq.NOBLOCK:
                    raise zmq.Again
                zmq.select([self], [], [], 0.2)
        return self._ready.popleft()

    def flush(self, flag: int = zmq.POLLIN | zmq.POLLOUT, limit: int | None = None) -> int:
        """Handle the messages that have arrived, for the event loops of GUI toolkits. Sending needs no flush."""
        return self.receiver.read() if flag & zmq.POLLIN else 0

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a message arrives."""
        if self.receiver.fd < 0 and self._fallback < 0:
            self._fallback = os.pipe()[0]  # never readable, unlike the descriptor of a lost owner
        return self.receiver.fd if self.receiver.fd >= 0 else self._fallback

    def getsockopt(self, option: int) -> Any:
        return self.fileno() if option == zmq.FD else b""

    def setsockopt(self, option: int, value: Any) -> None: ...

    def closed(self) -> bool:
        return False

    def close(self, linger: int | None = None) -> None: ...


def start_task(loop: asyncio.AbstractEventLoop, work: Any, context: Any) -> None:
    """Run ``work`` on its event loop, in a context shared by all messages if this Python version supports it."""
    if sys.version_info >= (3, 11):
        task = loop.create_task(work, context=context)
    else:
        task = loop.create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[Any]] = set()


class Publisher(IOPubThread):
    """Replacement for ipykernel's IO thread. There is no thread: the caller that publishes a message writes it."""

    def __init__(self, stream: Stream, session: Any) -> None:
        self.socket = stream
        self.session = session
        self.io_loop = stream.io_loop
        self.thread = threading.Thread(name="IOPub")  # never started
        self.background_socket = BackgroundSocket(self)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...

    def schedule(self, f: Callable[[], object]) -> None:
        f()

    def send_multipart(self, msg: Any, *args: Any, **kwargs: Any) -> None:
        self.socket.send_multipart(msg)


class Output(OutStream):
    """Standard output or error. The first line of a cell is sent immediately, further output is collected briefly."""

    _flusher: ClassVar[threading.Thread | None] = None
    _wanted = threading.Event()
    _all: ClassVar[list[Output]] = []
    _last = 0.0
    _size = 0
    _is_child = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turn = threading.RLock()
        Output._all.append(self)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._is_child = True
        self._buffer_lock = threading.RLock()
        self._turn = threading.RLock()

    def set_parent(self, parent: Any) -> None:
        super().set_parent(parent)
        self._last = 0.0

    def write(self, string: str) -> int | None:
        if self._is_child and self._should_watch and isinstance(string, str):
            # The parent reads it like the output of any other program.
            os.write(self._original_stdstream_fd, string.encode(errors="replace"))
            return len(string)
        count: int | None = super().write(string)
        self._size += len(string)
        if self._size >= FLUSH_SIZE or (string[-1:] == "\n" and time.monotonic() - self._last >= FLUSH_INTERVAL):
            self._flush()
        elif not Output._wanted.is_set():
            Output._wanted.set()
            if Output._flusher is None:
                Output._flusher = threading.Thread(target=Output._flush_all, name="Output", daemon=True)
                Output._flusher.pydev_do_not_trace = True  # type: ignore[attr-defined]
                Output._flusher.is_pydev_daemon_thread = True  # type: ignore[attr-defined]
                Output._flusher.start()
        return count

    def _is_master_process(self) -> bool:
        """Return whether this is the kernel and no fork of it, without a system call, which is slow in gVisor."""
        return not self._is_child

    def _schedule_flush(self) -> None: ...

    def _flush(self) -> None:
        """Send what is in the buffer. The thread that takes its text first also queues it first.

        A signal handler or finalizer may print in the middle of this, or while its thread holds the lock of the buffer.
        It then leaves its text to the thread that flushes.
        """
        if self._is_child:
            return
        if self._turn._is_owned() or not self._turn.acquire(timeout=TURN_TIMEOUT):  # type: ignore[attr-defined]
            Output._wanted.set()
            return
        sender = self.pub_thread.socket._sender
        try:
            self._size = 0
            self._last = time.monotonic()
            is_first = sender.hold()
            try:
                super()._flush()
            finally:
                if is_first:
                    sender.queue_held()
        finally:
            self._turn.release()
        if is_first:  # without the lock, because the host may take long to read
            sender.push()

    @classmethod
    def _flush_all(cls) -> None:
        while True:
            cls._wanted.wait()
            time.sleep(FLUSH_INTERVAL)
            cls._wanted.clear()
            for stream in cls._all:
                if stream._size:
                    with contextlib.suppress(Exception):
                        stream._flush()

    def _watch_pipe_fd(self) -> None:
        """Publish what child processes and libraries write to the descriptor."""
        assert self._fid is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while self._should_watch and (data := os.read(self._fid, 65536)):
            with contextlib.suppress(Exception):
                self.write(decoder.decode(data))
