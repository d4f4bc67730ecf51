"""Define the values that callers of ``sandbox.processes`` pass and receive, and validate them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jupyter_agentbox.egress import PROXY_ENV
from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.spec import WORKSPACE, SandboxSpec

_VARIABLE = re.compile(r"[^=\0]+")
_MAX_SHOWN = 200
#: Maximum number of rows or columns of a terminal.
MAX_TERMINAL_SIZE = 1000


@dataclasses.dataclass(frozen=True)
class Command:
    """A command to run.

    Parameters
    ----------
    line : str, optional
        Command line for the shell: bash if the image has it, otherwise sh.
    argv : sequence of str, optional
        A program and its arguments, run without a shell. Without `line` and `argv`, a login shell is run.
    workdir : str
        Directory inside. A relative path is resolved against ``/workspace``.
    env : mapping of str to str
        Variables to add to the sandbox's environment. The variables that point to the egress gate can't be replaced.
    user : str
        ``user``, or ``root`` where the profile allows it.
    """

    line: str | None = None
    argv: Sequence[str] | None = None
    workdir: str = WORKSPACE
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    user: str = "user"

    @property
    def shown(self) -> str:
        """The command as one short line for people."""
        text = self.line if self.line is not None else " ".join(self.argv or ("login shell",))
        return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"

    def header(self, spec: SandboxSpec) -> dict[str, Any]:
        """Validate the command and return it as a header for the guest. Raises InvalidRequest, PolicyRefused."""
        if self.line is not None and self.argv is not None:
            raise InvalidRequest("pass either a line for the shell or argv, not both", field="argv")
        header: dict[str, Any] = {"cwd": f"{WORKSPACE}/{check_text(self.workdir, 'workdir')}"}
        if self.workdir.startswith("/"):
            header["cwd"] = self.workdir
        if self.line is not None:
            header["line"] = check_text(self.line, "line")
        elif self.argv is not None:
            header["argv"] = [check_text(part, "argv") for part in self.argv]
            if not header["argv"] or not header["argv"][0]:
                raise InvalidRequest("argv must start with a program", field="argv")
        for name, value in self.env.items():
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
                raise InvalidRequest(f"{name!r:.100} is not a valid variable name", field="env")
            check_text(value, "env")
            if name in PROXY_ENV and name in spec.env and value != spec.env[name]:
                raise InvalidRequest(f"{name} points to the sandbox's egress gate and can't be replaced", field="env")
        header["env"] = {**spec.env, **self.env}
        if self.user not in ("user", "root"):
            raise InvalidRequest(f"user must be 'user' or 'root', not {self.user!r:.100}", field="user")
        if self.user == "root" and not spec.is_root:
            raise PolicyRefused(
                f"profile {spec.profile!r} does not allow root", field="user", setting="is_root of the profile"
            )
        header["is_root"] = self.user == "root"
        return header


def check_text(value: object, field: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidRequest(f"{field} must be text without NUL characters", field=field)
    return value


@dataclasses.dataclass(frozen=True)
class Output:
    """Output of a process.

    Parameters
    ----------
    stream : str
        ``stdout`` or ``stderr``. All output of a terminal is ``stdout``.
    offset : int
        Offset of the first byte within the whole output of that stream. If it is beyond the end of the previous output,
        the bytes between were dropped.
    data : bytes
    """

    stream: str
    offset: int
    data: bytes


@dataclasses.dataclass(frozen=True)
class Exit:
    """The end of a process.

    Parameters
    ----------
    exit_code : int
        128 + n after signal n.
    signal : int
        Signal that ended the process; 0 for none.
    timed_out : bool
        Whether it was killed because it reached its timeout.
    """

    exit_code: int
    signal: int = 0
    timed_out: bool = False


@dataclasses.dataclass(frozen=True)
class ExecResult:
    """The result of a command.

    Parameters
    ----------
    stdout, stderr : bytes
        The command's output. If it is truncated, its beginning and its end, with a line between that says how much is
        left out.
    exit_code : int
        128 + n after signal n, 127 if the program does not exist.
    timed_out : bool
        Whether it was killed because it reached its timeout.
    truncated : bool
        Whether it printed more than was kept.
    stdout_bytes, stderr_bytes : int
        Bytes printed in total.
    duration : float
        Seconds.
    """

    stdout: bytes
    stderr: bytes
    exit_code: int
    timed_out: bool
    truncated: bool
    stdout_bytes: int
    stderr_bytes: int
    duration: float


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """The current state of a background process.

    Parameters
    ----------
    id, command : str
    started : float
        Seconds since the epoch.
    state : str
        ``running``, ``exited``, or ``lost`` if its end could not be determined.
    exit_code : int or None
        None until the process has exited.
    is_terminal : bool
        Whether it runs on a terminal.
    stdout_bytes, stderr_bytes : int
        Bytes printed so far.
    """

    id: str
    command: str
    started: float
    state: str
    exit_code: int | None
    is_terminal: bool
    stdout_bytes: int
    stderr_bytes: int


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Part of a background process's output.

    Parameters
    ----------
    data : bytes
    offset, next_offset : int
        Offset of the first byte, and the offset at which to continue reading.
    dropped : int
        Bytes between the requested offset and the oldest byte that is kept.
    is_end : bool
        Whether the process has ended and no more output follows.
    """

    data: bytes
    offset: int
    next_offset: int
    dropped: int
    is_end: bool


def check_size(rows: int, columns: int) -> tuple[int, int]:
    for field, value in (("rows", rows), ("columns", columns)):
        if not isinstance(value, int) or not 1 <= value <= MAX_TERMINAL_SIZE:
            raise InvalidRequest(f"{field} must be between 1 and {MAX_TERMINAL_SIZE}", field=field)
    return rows, columns
