# mypy: allow-untyped-calls
"""Provide the subshells of ipykernel 7 without its thread and sockets for them; for :mod:`.embedded`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import threading
import uuid
from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from ipykernel.control import ControlThread
from tornado.ioloop import IOLoop

from .embedded_streams import Frame, Stream, start_task

DELIMITER = b"<IDS|MSG>"


class Shells:
    """Main shell and subshells of ipykernel 7: its ``shell_channel_thread`` and that thread's manager.

    The main thread reads the FIFO as long as there are no subshells. Otherwise the control thread does.
    """

    def __init__(self, stream: Stream, main: IOLoop, control: ControlThread) -> None:
        self.manager = self
        self.parent_thread = threading.current_thread()
        self.io_loop = self
        self.asyncio_lock = asyncio.Lock()
        self.kernel: Any = None
        self.to_stream = self.shell_stream = stream
        self._control = control
        self._main = main
        self._context = copy_context()
        self._threads: dict[str, Any] = {}
        self._reply: dict[str, Any] = {}
        self._handle: Callable[..., Any] | None = None
        self.control_to_shell_channel = self
        self.from_socket = self
        stream.receiver.on_message = self.route

    def is_alive(self) -> bool:
        return False

    def add_callback(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function immediately, since the thread that it is meant for does not exist.

        The function marks the end of the messages to abort. Clients send further messages only after they see the
        error.
        """
        callback(*args)

    def set_on_recv_callback(self, on_recv_callback: Callable[..., Any]) -> None:
        self._handle = on_recv_callback

    def route(self, frames: list[Frame]) -> None:
        """Deliver a message to its shell."""
        subshell_id = None
        if self._threads or b'"subshell_id"' in b"".join(frames[:6]):
            with contextlib.suppress(ValueError, IndexError, KeyError, TypeError, AttributeError):
                subshell_id = self._addressee(frames)
        if subshell_id is None or subshell_id in self._threads:
            self._deliver(subshell_id, frames)
        elif hasattr(self.kernel, "_send_unknown_subshell_reply"):
            from ipykernel.subshell_manager import UnknownSubshellError

            idents, rest = self.kernel.session.feed_identities(frames, copy=False)
            with contextlib.suppress(ValueError, TypeError):  # invalid signature
                message = self.kernel.session.deserialize(rest, content=False, copy=False)
                self.kernel._send_unknown_subshell_reply(idents, message, UnknownSubshellError(str(subshell_id)))

    async def handle_comms(self) -> None:
        """Handle the comm messages for the main shell that have arrived, although it runs a cell. Deliver the others.

        Code calls this through ``do_one_iteration``, also from another thread while a cell blocks the main one.
        """
        comms = []
        for frames in self.shell_stream.receiver.take():
            if self._is_main_comm(frames):
                comms.append(frames)
            else:
                self.route(frames)
        for frames in comms:
            await self._handle_within_cell(frames)

    async def _handle_within_cell(self, frames: list[Frame]) -> None:
        """Handle a message while a cell runs, as ipykernel 7.4 handles comm messages."""
        kernel = self.kernel
        options = {"concurrent": True} if "concurrent" in inspect.signature(kernel.dispatch_shell).parameters else {}
        ident, parent = kernel._parent_ident["shell"], kernel.get_parent("shell")
        try:
            await asyncio.create_task(kernel.dispatch_shell(frames, **options))  # in a context of its own
        finally:
            kernel.set_parent(ident, parent, channel="shell")

    def _is_main_comm(self, frames: list[Frame]) -> bool:
        with contextlib.suppress(ValueError, IndexError, KeyError, TypeError, AttributeError):
            header = json.loads(frames[frames.index(DELIMITER) + 2])  # type: ignore[arg-type]
            return header["msg_type"].startswith("comm_") and self._addressee(frames) is None
        return False

    def _addressee(self, frames: list[Frame]) -> Any:
        start = frames.index(DELIMITER)  # type: ignore[arg-type]
        header = json.loads(frames[start + 2])
        subshell_id = header.get("subshell_id")
        if header["msg_type"] in ("comm_msg", "comm_close") and self._threads:
            content = json.loads(frames[start + 5])
            comm = self.kernel.comm_manager.comms.get(content.get("comm_id"))
            route = getattr(comm, "_reply_subshell_for", None)
            if route is not None:
                subshell_id = route(content.get("data"), subshell_id)
        return subshell_id

    def _deliver(self, subshell_id: str | None, frames: list[Frame]) -> None:
        if self._handle is None:
            return
        thread: Any = self._threads[subshell_id] if subshell_id is not None else self
        loop: Any = (self._main if thread is self else thread.io_loop).asyncio_loop
        start = functools.partial(self._start, loop, subshell_id, frames, thread._context)
        if loop is asyncio._get_running_loop():
            start()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(start)

    def _start(self, loop: Any, subshell_id: str | None, frames: list[Frame], context: Any) -> None:
        assert self._handle is not None
        if subshell_id is None and self.kernel._main_asyncio_lock.locked() and self._is_main_comm(frames):
            work = self._handle_within_cell(frames)
        else:
            work = self._handle(subshell_id, frames)
        start_task(loop, work, context)

    # -- what ipykernel calls on the manager -------------------------------------------------

    def get_shell_channel_to_subshell_pair(self, subshell_id: str | None) -> Shells:
        return self

    def get_shell_channel_to_subshell_socket(self, subshell_id: str | None) -> Any:
        return _ToShell(self, subshell_id)

    def get_subshell_to_shell_channel_socket(self, subshell_id: str | None) -> Stream:
        return self.shell_stream

    def get_subshell_aborting(self, subshell_id: str) -> bool:
        return bool(self._threads[subshell_id].aborting)

    def set_subshell_aborting(self, subshell_id: str, aborting: bool) -> None:
        self._threads[subshell_id].aborting = aborting

    def get_subshell_asyncio_lock(self, subshell_id: str) -> asyncio.Lock:
        return self._threads[subshell_id].asyncio_lock  # type: ignore[no-any-return]

    def list_subshell(self) -> list[str]:
        return list(self._threads)

    def subshell_id_from_thread_id(self, thread_id: int) -> str | None:
        if thread_id == self.parent_thread.ident:
            return None
        for subshell_id, thread in self._threads.items():
            if thread.ident == thread_id:
                return subshell_id
        raise RuntimeError(f"Thread id {thread_id!r} does not correspond to a subshell of this kernel")

    def send_json(self, request: dict[str, Any]) -> None:
        """Create, delete or list subshells, on the control thread. :meth:`recv_json` returns the answer."""
        self._reply = {"status": "ok"}
        kind = request["type"]
        if kind == "create":
            self._reply["subshell_id"] = self._create()
        elif kind == "list":
            self._reply["subshell_id"] = self.list_subshell()
        elif request.get("subshell_id") in self._threads:
            self._delete(request["subshell_id"])
        else:
            self._reply = {"status": "error", "evalue": f"Unknown subshell_id {request.get('subshell_id')!r}"}

    def recv_json(self) -> dict[str, Any]:
        return self._reply

    def _create(self) -> str:
        from ipykernel.thread import BaseThread

        subshell_id = str(uuid.uuid4())
        thread: Any = BaseThread(name=f"subshell-{subshell_id}", daemon=True)
        thread.aborting = False
        thread.asyncio_lock = asyncio.Lock()
        thread._context = copy_context()
        thread.start()
        self._threads[subshell_id] = thread
        self._choose_reader()
        return subshell_id

    def _delete(self, subshell_id: str) -> None:
        thread = self._threads.pop(subshell_id)
        thread.stop()
        thread.join()
        self._choose_reader()

    def _choose_reader(self) -> None:
        loop: Any = self._control.io_loop if self._threads else self._main
        self.shell_stream.receiver.read_on(loop.asyncio_loop)


class _ToShell:
    """Socket through which ipykernel marks the end of the messages to abort: everything received before it."""

    def __init__(self, shells: Shells, subshell_id: str | None) -> None:
        self._shells = shells
        self._subshell_id = subshell_id

    def send(self, data: bytes, *args: Any, **kwargs: Any) -> None:
        self._shells.shell_stream.receiver.read()
        self._shells._deliver(self._subshell_id, [Frame(data)])
