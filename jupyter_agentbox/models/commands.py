"""Define the request and response bodies for commands, background processes and terminals."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body

Encoding = Literal["utf-8", "base64"]


class ExecRequest(Body, frozen=True):
    """A command to run: either `command` for the shell, or `argv` for a program without a shell.

    Parameters
    ----------
    command : str, optional
        Command line for the shell.
    argv : list of str, optional
        Program and its arguments.
    workdir : str, optional
        Working directory; the sandbox's own by default.
    env : dict of str to str
        Additional environment variables.
    stdin : str
        Text for its standard input.
    stdin_base64 : bytes
        The same for input that is not text.
    user : str
        User to run it as: `root` only if the profile allows it.
    timeout : float
        Seconds after which it is killed with all of its child processes. Output printed until then is returned.
    max_output : int
        Maximum number of bytes kept of each output: the beginning and the end, with a line between that says how much
        is left out.
    encoding : str
        Encoding of output in the response. With `utf-8`, invalid bytes become U+FFFD.
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
    """A connection that the gate refused."""

    host: str
    port: int
    message: str


class ExecAnswer(Answer, frozen=True):
    """The result of a command.

    Parameters
    ----------
    exit_code : int
        Exit code; 128 + n after signal n, 127 if the program does not exist.
    timed_out : bool
        Whether it was killed because it reached its timeout.
    truncated : bool
        Whether some of the output was left out. The full sizes are in `stdout_bytes` and `stderr_bytes`.
    duration : float
        Run time in seconds.
    refused : list of RefusedHost
        Connections of the sandbox that the gate refused while the command ran.
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
    """New output; `offset` is the position of its first byte in the whole output."""

    text: str
    offset: int


class ExitEvent(Answer, frozen=True):
    """The command has ended."""

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
    """A terminal to open. It runs a login shell unless a command is given."""

    command: Annotated[str, Meta(max_length=200_000)] | None = None
    argv: Annotated[list[str], Meta(min_length=1, max_length=10_000)] | None = None
    workdir: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    env: dict[str, str] = {}
    user: Literal["user", "root"] = "user"
    rows: Annotated[int, Meta(ge=1, le=1000)] = 24
    columns: Annotated[int, Meta(ge=1, le=1000)] = 80


class ProcessAnswer(Answer, frozen=True):
    """The current state of a background process.

    Parameters
    ----------
    state : str
        `running`, `exited`, or `lost` if it ended and its exit code is unknown.
    stdout_bytes, stderr_bytes : int
        Number of bytes printed so far.
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
    """Which part of a process's output to read; `wait` is the number of seconds to wait for new output."""

    stream: Literal["stdout", "stderr"] = "stdout"
    offset: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit: Annotated[int, Meta(ge=1, le=1024 * 1024, description="Maximum number of bytes.")] = 256 * 1024
    wait: Annotated[float, Meta(ge=0, le=60)] = 0.0
    encoding: Encoding = "utf-8"


class OutputChunk(Answer, frozen=True):
    """A part of a process's output.

    Parameters
    ----------
    next_offset : int
        Offset of the next part.
    dropped : int
        Number of bytes between the requested offset and the oldest output that is still kept.
    is_end : bool
        Whether this is the end of the output.
    """

    data: str
    offset: int
    next_offset: int
    dropped: int
    is_end: bool
    encoding: Encoding


class FollowQuery(Body, frozen=True):
    """Offsets to start at; by default, the oldest output that is still kept."""

    stdout_offset: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    stderr_offset: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    encoding: Encoding = "utf-8"


class WaitQuery(Body, frozen=True):
    """Maximum number of seconds to wait for the process to end."""

    timeout: Annotated[float, Meta(gt=0, le=600)] = 30.0


class InputRequest(Body, frozen=True):
    """Input for a process; `is_last` closes its standard input."""

    text: str = ""
    base64: bytes = b""
    is_last: bool = False


class SignalRequest(Body, frozen=True):
    """A signal to send, by name or number, such as `TERM`."""

    signal: str | int = "TERM"


class SizeRequest(Body, frozen=True):
    """The new size of a terminal."""

    rows: Annotated[int, Meta(ge=1, le=1000)]
    columns: Annotated[int, Meta(ge=1, le=1000)]
