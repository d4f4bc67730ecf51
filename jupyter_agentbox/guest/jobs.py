"""Run programs for the host, and carry their output to the host and their input from it."""

from __future__ import annotations

import functools
import json
import os
import signal
import struct

from .framing import pack_message
from .loop import CHUNK, Loop, Stream
from .processes import Process, Processes, StartError, read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: Maximum size of a message's own framing, in bytes.
_OVERHEAD = 64
#: Bytes of output that a kept job holds for the next owner, and bytes read from a program ahead of the host.
KEPT_OUTPUT = 1024 * 1024
READ_AHEAD = 128 * 1024
#: Maximum number of bytes left in a pipe when a program ends.
_PIPE = 1024 * 1024
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")


class Output:
    """Output of a program on one descriptor: what the host has not read, and for a kept job also the most recent part.

    Parameters
    ----------
    keep : int
        Number of bytes to keep after they were sent, for another owner.

    Attributes
    ----------
    start, sent, end : int
        Offsets in the whole output: of the first byte held, of the next byte to send, and after the last byte.
    """

    def __init__(self, keep: int) -> None:
        self.start = self.sent = self.end = 0
        self._keep = keep
        self._buffer = bytearray()

    def put(self, data: bytes, *, has_owner: bool = True) -> None:
        """Add output. Without an owner (``has_owner`` is false), output older than the kept part is never sent."""
        self._buffer += data
        self.end += len(data)
        if not has_owner:
            self.sent = max(self.sent, self.end - self._keep)
        self._trim()

    def take(self, count: int) -> tuple[int, bytes]:
        """Return the next bytes to send, at most `count`, and the offset of the first."""
        offset = self.sent
        data = bytes(self._buffer[offset - self.start : offset - self.start + count])
        self.sent += len(data)
        self._trim()
        return offset, data

    def rewind(self) -> None:
        """Start over with the first byte that is held."""
        self.sent = self.start

    def _trim(self) -> None:
        excess = min(len(self._buffer) - self._keep, self.sent - self.start)
        if excess > 0:
            del self._buffer[:excess]
            self.start += excess


class Job:
    """Program run for the host, over a stream ``{"kind": "process", "process": id, ...}``.

    The header says what to run: ``argv``, or ``line`` for a shell, or neither for a login shell; ``env``, ``cwd``,
    ``is_root``, ``has_stdin``; ``size`` (rows, columns) gives it a terminal. To the host: ``1`` or ``2`` + decimal
    offset + output; ``started``; ``exit`` + JSON (``code``, ``signal``, and ``message`` and ``field`` if it did not
    start). From the host JSON: ``{"signal": n}``, ``{"kill": true}``, ``{"size": [rows, columns]}``. Input comes
    as the raw bytes of a stream ``{"kind": "stdin", "process": id}``, whose EOF closes it.

    A job with ``is_kept`` survives the loss of its owner, and its record survives the end of the program. An EOF from
    the host ends and removes it. Another owner opens it with a header that has ``is_resumed``, and receives all held
    output. Any other job is killed when its stream ends.
    """

    def __init__(self, loop: Loop, processes: Processes, jobs: dict[str, Job], stream: Stream) -> None:
        header = stream.header
        self._loop = loop
        self._processes = processes
        self._jobs = jobs
        self._name = header["process"]
        self._is_kept = bool(header.get("is_kept"))
        self._has_terminal = "size" in header
        self.mark = processes.new_mark()
        self._outputs = {tag: Output(KEPT_OUTPUT if self._is_kept else 0) for tag in (b"1", b"2")}
        self._fds: dict[int, bytes] = {}
        self._watched: set[int] = set()
        self._stream: Stream | None = None
        self._exit: bytes | None = None
        self._is_start_sent = self._is_exit_sent = False
        self._process: Process | None = None
        self._stdin = -1
        self._input: list[bytes] = []
        self._input_size = 0
        self._has_input_eof = False
        self._input_stream: Stream | None = None
        jobs[self._name] = self
        try:
            self._start(header)
        except (StartError, OSError) as error:
            self._outputs[b"2"].put(f"{error}\n".encode("utf-8", "replace"))
            field = getattr(error, "field", "argv")
            self._note_exit({"code": 127, "signal": 0, "message": str(error), "field": field})
        self.attach(stream)

    def attach(self, stream: Stream) -> None:
        """Take requests from this owner, and send it all held output."""
        for output in self._outputs.values():
            output.rewind()
        self._is_start_sent = self._is_exit_sent = False
        self._stream = stream
        read_requests(stream, self._on_request)
        stream.on_credit = self._push
        stream.on_eof = self._end
        stream.on_reset = lambda reason: self._detach(stream)
        self._push()

    def attach_input(self, stream: Stream) -> None:
        """Read the program's input from this stream."""
        if self._stdin < 0:
            stream.reset("the input is closed")
            return
        self._input_stream = stream
        self._input_size = 0  # input of an earlier owner does not count as credit of this one
        stream.on_data = functools.partial(self._on_input, stream)
        stream.on_eof = self._on_input_eof

    # -- start and end -----------------------------------------------------------------------

    def _start(self, header: dict[str, Any]) -> None:
        ours: list[int] = []
        theirs: list[int] = []
        try:
            if self._has_terminal:
                master, slave = self._open_terminal(header["size"], bool(header.get("is_root")))
                ours += [os.dup(master), master]
                theirs += [slave]
                stdio = (slave, slave, slave)
            else:
                if header.get("has_stdin"):
                    child_in, stdin = os.pipe()
                else:
                    child_in, stdin = os.open("/dev/null", os.O_RDONLY), -1
                theirs.append(child_in)
                ours.append(stdin)
                for _ in range(2):
                    reader, writer = os.pipe()
                    ours.append(reader)
                    theirs.append(writer)
                stdio = (child_in, theirs[1], theirs[2])
            program, argv = _command(header)
            self._process = self._processes.spawn(
                argv,
                header["env"],
                header["cwd"],
                self._exited,
                stdio,
                bool(header.get("is_root")),
                program=program,
                mark=self.mark,
                needs_cwd=True,
                has_terminal=self._has_terminal,
            )
        except BaseException:
            for fd in ours:
                if fd >= 0:
                    os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        for fd in ours:
            if fd >= 0:
                os.set_blocking(fd, False)
        self._stdin = ours[0]
        self._fds = dict(zip(ours[1:], (b"1", b"2"), strict=False))

    def _open_terminal(self, size: list[int], is_root: bool) -> tuple[int, int]:
        """Open a terminal that belongs to the job's user. The owner cannot be changed later without the capability."""
        os.seteuid(0 if is_root else self._processes.uid)
        try:
            master, slave = os.openpty()
        finally:
            os.seteuid(0)
        _set_size(master, *size)
        return master, slave

    def _on_request(self, request: dict[str, Any]) -> None:
        if "signal" in request and self._process is not None:
            self._process.signal(int(request["signal"]))
        elif "kill" in request:
            self._processes.kill_marked(self.mark, self._process)
        elif "size" in request and self._has_terminal and self._fds:
            _set_size(next(iter(self._fds)), *request["size"])
            if self._process is not None:  # gVisor does not send it by itself
                self._processes.signal_session(self.mark, self._process.pid, signal.SIGWINCH)

    def _exited(self, code: int, number: int) -> None:
        # The pipes hold output from before the exit. Output of programs that are still running is not collected.
        for fd in list(self._fds):
            count = 0
            while fd in self._fds and count < _PIPE and (size := self._read(fd)):
                count += size
            self._close_output(fd)
        self._close_input()
        self._note_exit({"code": code, "signal": number})
        self._push()

    def _note_exit(self, event: dict[str, Any]) -> None:
        self._exit = json.dumps(event).encode()

    def _detach(self, stream: Stream) -> None:
        if stream is not self._stream:
            return
        self._stream = None
        if self._is_kept:
            self._watch()
        else:
            self._end()

    def _end(self) -> None:
        """End a job that is no longer wanted. Programs left behind by a command that exited on its own keep running."""
        if self._is_kept or self._exit is None:
            self._processes.kill_marked(self.mark, self._process)
        for fd in list(self._fds):
            self._close_output(fd)
        self._close_input()
        self._jobs.pop(self._name, None)
        if self._stream is not None:
            self._stream.write_eof()
            self._stream = None

    # -- output ------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Add a line of the guest's to the program's stderr, or to its terminal, unless it has ended."""
        if self._exit is None:
            tag, end = (b"1", "\r\n") if self._has_terminal else (b"2", "\n")
            self._outputs[tag].put((text + end).encode("utf-8", "replace"), has_owner=self._stream is not None)
            self._push()

    def _watch(self) -> None:
        for fd, tag in self._fds.items():
            output = self._outputs[tag]
            is_wanted = self._stream is None or output.end - output.sent < READ_AHEAD
            if is_wanted != (fd in self._watched):
                (self._watched.add if is_wanted else self._watched.discard)(fd)
                self._loop.watch(fd, functools.partial(self._readable, fd) if is_wanted else None)

    def _readable(self, fd: int) -> None:
        self._read(fd)
        self._push()

    def _read(self, fd: int) -> int:
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # a terminal whose other end is closed
            data = b""
        if data:
            self._outputs[self._fds[fd]].put(data, has_owner=self._stream is not None)
        else:
            self._close_output(fd)
        return len(data)

    def _close_output(self, fd: int) -> None:
        if self._fds.pop(fd, None) is not None:
            self._watched.discard(fd)
            self._loop.watch(fd)
            os.close(fd)

    def _push(self) -> None:
        stream = self._stream
        if stream is None:
            return
        if self._is_kept and not self._is_start_sent and self._exit is None and stream.credit > _OVERHEAD:
            stream.write(pack_message(b"started"))
            self._is_start_sent = True
        is_moving = True
        while is_moving:  # alternate, so that neither output starves the other
            is_moving = False
            for tag, output in self._outputs.items():
                room = stream.credit - _OVERHEAD
                if output.sent < output.end and room > 0:
                    offset, data = output.take(min(room, CHUNK // 2))
                    stream.write(pack_message(tag, b"%d" % offset, data))
                    is_moving = True
        is_all_sent = all(output.sent == output.end for output in self._outputs.values())
        if self._exit is not None and is_all_sent and not self._is_exit_sent:
            if stream.credit < len(self._exit) + _OVERHEAD:
                return
            stream.write(pack_message(b"exit", self._exit))
            self._is_exit_sent = True
            if not self._is_kept:
                self._end()
                return
        self._watch()

    # -- input -------------------------------------------------------------------------------

    def _on_input(self, stream: Stream, data: bytes) -> None:
        if stream is not self._input_stream:
            return
        self._input.append(data)
        self._input_size += len(data)
        self._write_input()

    def _on_input_eof(self) -> None:
        if self._has_terminal:
            self._input.append(b"\x04")
        else:
            self._has_input_eof = True
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
            except OSError:  # the program has closed its input
                self._has_input_eof = True
            if self._has_input_eof:
                self._close_input()
            else:
                self._loop.watch(self._stdin)
        # Return credit only when the program has read the input, or never will.
        if self._input_stream is not None:
            self._input_stream.consumed(self._input_size)
        self._input_size = 0

    def _close_input(self) -> None:
        self._input.clear()
        if self._stdin >= 0:
            self._loop.watch(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
            if self._input_stream is not None:
                self._input_stream.reset("the input is closed")


def _command(header: dict[str, Any]) -> tuple[str, list[str]]:
    if "argv" in header:
        return header["argv"][0], header["argv"]
    shell = next((path for path in _SHELLS if os.access(path, os.X_OK)), "/bin/sh")
    if "line" in header:
        return shell, [shell, "-c", header["line"]]
    return shell, ["-" + os.path.basename(shell)]


def _set_size(terminal: int, rows: int, columns: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def open_job(loop: Loop, processes: Processes, jobs: dict[str, Job], stream: Stream) -> None:
    """Serve a stream of kind ``process`` (start or resume a job) or ``stdin``."""
    job = jobs.get(stream.header["process"])
    is_input = stream.header["kind"] == "stdin"
    if job is not None:
        (job.attach_input if is_input else job.attach)(stream)
    elif is_input or stream.header.get("is_resumed"):
        stream.reset("no such process")
    else:
        Job(loop, processes, jobs, stream)
