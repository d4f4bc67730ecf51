"""Starting, signalling and reaping the processes of one sandbox; and commands run for the host."""

from __future__ import annotations

import functools
import os
import signal

from .framing import MessageReader, ProtocolError, load_json, pack_message
from .loop import CHUNK, LinkDown, Loop, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Room that a message's own framing takes, bytes.
_OVERHEAD = 32
_PASSED_ON = (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGXFSZ)


class StartError(Exception):
    """The program could not be started; the message says why."""


class Process:
    """One child, leader of its own session and process group."""

    def __init__(self, pid: int, on_exit: Callable[[int, int], object]) -> None:
        self.pid = pid
        self.is_running = True
        self.on_exit = on_exit

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        if self.is_running:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                pass


class Processes:
    """All children, PID 1's adopted orphans included.

    Parameters
    ----------
    loop : Loop
    uid, gid : int
        Whom user code runs as.
    """

    def __init__(self, loop: Loop, uid: int, gid: int) -> None:
        self.uid = uid
        self.gid = gid
        self._running: dict[int, Process] = {}
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        def wake() -> None:
            try:
                os.read(reader, 4096)
            except BlockingIOError:
                pass
            self.reap()

        loop.watch(reader, wake)

    def spawn(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        on_exit: Callable[[int, int], object],
        stdio: tuple[int, int, int] | None = None,
        is_root: bool = False,
        files: dict[str, bytes] | None = None,
    ) -> Process:
        """Start a program.

        Parameters
        ----------
        argv, env, cwd
            What to run; a ``cwd`` that is not there falls back to ``/``.
        on_exit : callable
            Called with exit code (128 + n after signal n) and signal (0 for none).
        stdio : tuple of int, optional
            Descriptors for 0, 1 and 2; without them it reads nothing and prints to PID 1's own.
        is_root : bool
            Run as uid 0.
        files : dict
            Files to write first, as the user, mode 0600.

        Raises
        ------
        StartError
        """
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._become(argv, env, cwd, stdio, is_root, files or {})
            except BaseException as error:
                text = f"{error.strerror}: {error.filename or argv[0]}" if isinstance(error, OSError) else repr(error)
                os.write(writer, text.encode("utf-8", "replace")[:512] or b"unknown error")
            os._exit(127)
        os.close(writer)
        try:
            failure = os.read(reader, 512)  # at once: exec closes it, or the child reports
        finally:
            os.close(reader)
        if failure:
            os.waitpid(pid, 0)
            raise StartError(failure.decode("utf-8", "replace"))
        process = self._running[pid] = Process(pid, on_exit)
        return process

    def _become(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        stdio: tuple[int, int, int] | None,
        is_root: bool,
        files: dict[str, bytes],
    ) -> None:
        os.setsid()
        if not is_root:
            os.setgroups([])
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)
        os.umask(0o022)
        for path, content in files.items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
        try:
            os.chdir(cwd)
        except OSError:
            os.chdir("/")
        if stdio is None:
            stdio = (os.open("/dev/null", os.O_RDONLY), 1, 2)
        # Through high numbers first, so that none is overwritten before it is used.
        for fd, source in enumerate([os.dup(os.dup(os.dup(fd))) for fd in stdio]):
            os.dup2(source, fd, inheritable=True)
        signal.set_wakeup_fd(-1)
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(argv[0], argv, env)

    def reap(self) -> None:
        """Collect every child that has ended, adopted ones too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._running.pop(pid, None)
            if process is not None:
                process.is_running = False
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                process.on_exit(128 + number if number else os.WEXITSTATUS(status), number)

    def signal_all(self, number: int) -> None:
        """Send a signal to everything but PID 1."""
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            pass


class Command:
    """One command run for the host over one stream of messages.

    To the host: ``1`` + output, ``2`` + error output, ``exit`` + JSON (``code``, ``signal`` or ``error``).
    From the host: ``0`` + input (empty: no more), ``signal`` + decimal number.
    """

    def __init__(self, loop: Loop, processes: Processes, stream: Stream) -> None:
        self._loop = loop
        self._stream = stream
        self._reader = MessageReader(CHUNK * 4)
        self._outputs: dict[int, bytes] = {}
        self._input: list[bytes] = []
        self._input_size = 0
        self._has_input_eof = False
        self._exit: bytes | None = None
        self._stdin = -1
        header = stream.header
        pipes = [os.pipe() for _ in range(3)]
        (child_in, stdin), (stdout, child_out), (stderr, child_err) = pipes
        try:
            self._process = processes.spawn(
                [str(part) for part in header["argv"]],
                {str(name): str(value) for name, value in header.get("env", {}).items()},
                str(header.get("cwd", "/")),
                self._exited,
                (child_in, child_out, child_err),
                bool(header.get("is_root")),
            )
        except (StartError, OSError) as error:
            for pair in pipes:
                for fd in pair:
                    os.close(fd)
            self._exit = b'{"code":127,"signal":0}'
            stream.write(pack_message(b"2", str(error).encode() + b"\n"))
            self._finish()
            return
        for fd in (child_in, child_out, child_err):
            os.close(fd)
        for fd in (stdin, stdout, stderr):
            os.set_blocking(fd, False)
        self._stdin = stdin
        self._outputs = {stdout: b"1", stderr: b"2"}
        stream.on_data = self._from_host
        stream.on_reset = lambda reason: self._abort()
        stream.on_eof = self._abort
        stream.on_credit = self._watch_outputs
        self._watch_outputs()

    def _watch_outputs(self) -> None:
        can_write = self._stream.credit > _OVERHEAD
        for fd in self._outputs:
            self._loop.watch(fd, functools.partial(self._read, fd) if can_write else None)
        if self._exit is not None and can_write:
            self._drain()

    def _read(self, fd: int) -> bool:
        """Pass on what one pipe has; whether there may be more."""
        room = self._stream.credit - _OVERHEAD
        if room <= 0:
            self._watch_outputs()
            return False
        try:
            data = os.read(fd, min(room, CHUNK - _OVERHEAD))
        except BlockingIOError:
            return False
        if not data:
            self._loop.watch(fd)
            del self._outputs[fd]
            os.close(fd)
            return False
        self._stream.write(pack_message(self._outputs[fd], data))
        return True

    def _exited(self, code: int, number: int) -> None:
        self._exit = b'{"code":%d,"signal":%d}' % (code, number)
        self._drain()

    def _drain(self) -> None:
        """After the exit: what is in the pipes still goes out; then the end is told."""
        try:
            for fd in list(self._outputs):
                while fd in self._outputs and self._read(fd):
                    pass
            if self._stream.credit > len(self._exit or b"") + _OVERHEAD:
                self._finish()
        except LinkDown:
            self._close()

    def _finish(self) -> None:
        self._stream.write(pack_message(b"exit", self._exit or b"{}"))
        self._exit = None
        self._stream.write_eof()
        self._close()

    def _from_host(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
        except ProtocolError:
            self._abort()
            return
        for parts in messages:
            if parts[0] == b"0" and len(parts) == 2:
                if parts[1]:
                    self._input.append(parts[1])
                else:
                    self._has_input_eof = True
            elif parts[0] == b"signal" and len(parts) == 2:
                self._process.signal(int(parts[1]))
        self._input_size += len(data)
        self._write_input()

    def _write_input(self) -> None:
        if self._stdin >= 0:
            try:
                while self._input:
                    count = os.write(self._stdin, self._input[0])
                    self._input[0] = self._input[0][count:]
                    if not self._input[0]:
                        del self._input[0]
            except BlockingIOError:
                self._loop.watch(self._stdin, None, self._write_input)
                return
            except OSError:  # nobody reads it any more
                self._input.clear()
                self._has_input_eof = True
            self._loop.watch(self._stdin)
            if self._has_input_eof:
                os.close(self._stdin)
                self._stdin = -1
        # Credit comes back only when the program has taken what was sent.
        self._stream.consumed(self._input_size)
        self._input_size = 0

    def _abort(self) -> None:
        self._process.signal(signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        for fd in (*self._outputs, self._stdin):
            if fd >= 0:
                self._loop.watch(fd)
                os.close(fd)
        self._outputs = {}
        self._stdin = -1
        for name in ("on_data", "on_reset", "on_eof", "on_credit"):
            setattr(self._stream, name, lambda *_: None)


def read_requests(stream: Stream, on_request: Callable[[dict[str, Any]], object]) -> None:
    """Hand each JSON message of a stream to ``on_request``."""
    reader = MessageReader(CHUNK)

    def feed(data: bytes) -> None:
        try:
            for parts in reader.feed(data):
                on_request(load_json(parts[0]))
        except (ProtocolError, IndexError):
            stream.reset("not a request")
        stream.consumed(len(data))

    stream.on_data = feed
