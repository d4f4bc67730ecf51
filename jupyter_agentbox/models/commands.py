"""Bodies and answers about commands, background processes and terminals."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body

Encoding = Literal["utf-8", "base64"]


class ExecRequest(Body, frozen=True):
    """A command: `command` for the shell, or `argv` for a program without one.

    Parameters
    ----------
    command : str, optional
        A line for the shell.
    argv : list of str, optional
        A program and its arguments.
    workdir : str, optional
        Where it starts; the sandbox's own unless given.
    env : dict of str to str
        More variables.
    stdin : str
        What it can read.
    stdin_base64 : bytes
        The same for what is no text.
    user : str
        `root` where the profile allows it.
    timeout : float
        Seconds, after which it is killed with all that it started; what it printed comes back.
    max_output : int
        Bytes kept of each output.
    encoding : str
        How output is written in the answer. In `utf-8`, other bytes become U+FFFD.
    """

    command: Annotated[str, Meta(max_length=200_000)] | None = None
    argv: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | None = None
    workdir: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    env: dict[str, str] = {}
    stdin: str = ""
    stdin_base64: bytes = b""
    user: Literal["user", "root"] = "user"
    timeout: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    max_output: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 10 * 1024 * 1024
    encoding: Encoding = "utf-8"


class RefusedHost(Answer, frozen=True):
    """A connection that the gate did not let through."""

    host: str
    port: int
    message: str


class ExecAnswer(Answer, frozen=True):
    """What a command gave.

    Parameters
    ----------
    exit_code : int
        128 + n after signal n; 127 if there is no such program.
    timed_out : bool
        It was killed since its time was over.
    truncated : bool
        It printed more than is here; how much, `stdout_bytes` and `stderr_bytes` tell.
    duration : float
        Seconds.
    refused : list of RefusedHost
        What the gate refused to the sandbox meanwhile.
    """

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool
    truncated: bool
    stdout_bytes: int
    stderr_bytes: int
    duration: float
    encoding: Encoding
    refused: list[RefusedHost]


class OutputEvent(Answer, frozen=True):
    """Something was printed; `offset` is that of its first byte."""

    text: str
    offset: int


class ExitEvent(Answer, frozen=True):
    """It has ended."""

    exit_code: int
    timed_out: bool
    refused: list[RefusedHost]


class ProcessRequest(Body, frozen=True):
    """A command to run in the background; see ExecRequest."""

    command: Annotated[str, Meta(max_length=200_000)] | None = None
    argv: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | None = None
    workdir: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    env: dict[str, str] = {}
    user: Literal["user", "root"] = "user"


class TerminalRequest(Body, frozen=True):
    """A terminal; a login shell runs on it unless a command is given."""

    command: Annotated[str, Meta(max_length=200_000)] | None = None
    argv: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | None = None
    workdir: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    env: dict[str, str] = {}
    user: Literal["user", "root"] = "user"
    rows: Annotated[int, Meta(ge=1, le=1000)] = 24
    columns: Annotated[int, Meta(ge=1, le=1000)] = 80


class ProcessAnswer(Answer, frozen=True):
    """A background process as it is now.

    Parameters
    ----------
    state : str
        `running`, `exited`, or `lost` when its end could not be learnt.
    stdout_bytes, stderr_bytes : int
        Printed so far.
    """

    id: str
    command: str
    started: float
    state: str
    exit_code: int | None
    is_terminal: bool
    stdout_bytes: int
    stderr_bytes: int


class ProcessList(Answer, frozen=True):
    """Background processes, oldest first."""

    processes: list[ProcessAnswer]


class OutputQuery(Body, frozen=True):
    """Which part of what a process printed; `wait` is for something to come, in seconds."""

    stream: Literal["stdout", "stderr"] = "stdout"
    offset: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit: Annotated[int, Meta(ge=1, le=1024 * 1024)] = 256 * 1024
    wait: Annotated[float, Meta(ge=0, le=60)] = 0.0
    encoding: Encoding = "utf-8"


class OutputChunk(Answer, frozen=True):
    """A part of what a process printed.

    Parameters
    ----------
    next_offset : int
        Where to read on.
    dropped : int
        Bytes between the offset that was asked for and the oldest that is kept.
    is_end : bool
        Nothing follows.
    """

    data: str
    offset: int
    next_offset: int
    dropped: int
    is_end: bool
    encoding: Encoding


class FollowQuery(Body, frozen=True):
    """From where on; the oldest that is kept unless given."""

    stdout_offset: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    stderr_offset: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    encoding: Encoding = "utf-8"


class WaitQuery(Body, frozen=True):
    """How long to wait for an end, in seconds."""

    timeout: Annotated[float, Meta(gt=0, le=600)] = 30.0


class InputRequest(Body, frozen=True):
    """What a process is to read; `is_last` closes its input."""

    text: str = ""
    base64: bytes = b""
    is_last: bool = False


class SignalRequest(Body, frozen=True):
    """A signal by name or number, such as `TERM`."""

    signal: str | int = "TERM"


class SizeRequest(Body, frozen=True):
    """The size of a terminal."""

    rows: Annotated[int, Meta(ge=1, le=1000)]
    columns: Annotated[int, Meta(ge=1, le=1000)]
