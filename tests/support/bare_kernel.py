"""Run a real ipykernel on its own sockets, without a sandbox, in place of a kernel in a sandbox.

It has the interface that a front drives. The front is thereby tested independently of gVisor and against the real
protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from jupyter_agentbox.errors import LinkClosed
from jupyter_agentbox.spec import Cause, End

T = TypeVar("T")


class LoopThread:
    """Event loop on its own thread, like the link thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = 90) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(timeout)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        async def wrapped() -> T:
            return function(*args)

        return self.run(wrapped())

    def close(self) -> None:
        async def drain() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.run(drain())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


class BareKernel:
    """Real ipykernel process, with complete messages carried in both directions."""

    def __init__(self, directory: Path, key: bytes) -> None:
        self.end: End | None = None
        self.end_message = "killed"
        self.on_message: Callable[[str, list[bytes]], Awaitable[None]] | None = None
        self.lost = 0
        self._callbacks: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()
        self._sockets: dict[str, zmq.asyncio.Socket] = {}
        self._file = directory / "kernel.json"
        # Paths that no other process uses, and short ones, because UNIX socket paths have a maximum length.
        self._addresses = tempfile.TemporaryDirectory(prefix="bk")
        self._key = key

    async def start(self) -> BareKernel:
        names = ("shell", "iopub", "control", "stdin", "hb")
        ports = {f"{name}_port": number for number, name in enumerate(names, 1)}
        address = f"{self._addresses.name}/k"
        info = {"transport": "ipc", "ip": address, "key": self._key.decode(), "signature_scheme": "hmac-sha256"}
        self._file.write_text(json.dumps({**info, **ports}))
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", str(self._file)]
        self.process = subprocess.Popen(argv, start_new_session=True, stdin=subprocess.DEVNULL)
        identity = b"one-identity"
        for name in names[:4]:
            sock = self._context.socket(zmq.SUB if name == "iopub" else zmq.DEALER)
            sock.linger = 0
            if name == "iopub":
                sock.rcvhwm = 0
                sock.subscribe(b"")
            else:
                sock.identity = identity
            self._sockets[name] = sock
        # Listen to its output before sending requests, as in a sandbox.
        monitor = self._sockets["iopub"].get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        for name in ("iopub", "shell", "control", "stdin"):
            self._sockets[name].connect(f"ipc://{address}-{ports[name + '_port']}")
            if name == "iopub":
                await asyncio.wait_for(monitor.recv_multipart(), 60)
                self._sockets["iopub"].disable_monitor()
                monitor.close(linger=0)
            self._tasks.append(asyncio.create_task(self._read(name, self._sockets[name])))
        self._tasks.append(asyncio.create_task(self._watch()))
        return self

    async def _read(self, name: str, sock: zmq.asyncio.Socket) -> None:
        while True:
            frames = await sock.recv_multipart()
            while self.on_message is None:
                await asyncio.sleep(0.01)
            await self.on_message(name, frames)

    async def _watch(self) -> None:
        while (code := self.process.poll()) is None:
            await asyncio.sleep(0.05)
        self.end = End(Cause.KILLED, code if code >= 0 else 128 - code, self.end_message, "memory of the profile")
        for callback in self._callbacks:
            callback()

    def add_end_callback(self, callback: Callable[..., None]) -> None:
        self._callbacks.append(callback)

    async def send(self, channel: str, frames: list[bytes]) -> None:
        if self.end is not None:
            raise LinkClosed("the kernel is gone")
        await self._sockets[channel].send_multipart(frames)

    async def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signum)

    async def close(self) -> None:
        await self.signal(signal.SIGKILL)
        self.process.wait(60)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for sock in self._sockets.values():
            sock.close()
        self._context.term()
        self._addresses.cleanup()
