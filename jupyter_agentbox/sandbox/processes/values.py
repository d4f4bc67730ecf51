"""What callers of ``sandbox.processes`` give and get: plain values, checked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jupyter_agentbox.egress import PROXY_ENV
from jupyter_agentbox.errors import InvalidRequest, PolicyRefused
from jupyter_agentbox.spec import WORKSPACE, SandboxSpec

_VARIABLE = re.compile(r"[^=\0]+")
_SHOWN = 200
#: Rows or columns of a terminal, at most.
MAX_SIDE = 1000


@dataclasses.dataclass(frozen=True)
class Command:
    """What to run.

    Parameters
    ----------
    line : str, optional
        For the shell: bash where the image has it, else sh.
    argv : sequence of str, optional
        A program and its arguments, without a shell. With neither, a login shell.
    workdir : str
        Directory inside; a relative one is beneath ``/workspace``.
    env : mapping of str to str
        Added to the sandbox's own; the variables that lead to the egress gate can't be replaced.
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
        """One short line for people."""
        text = self.line if self.line is not None else " ".join(self.argv or ("login shell",))
        return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"

    def header(self, spec: SandboxSpec) -> dict[str, Any]:
        """Check it and put it into the guest's words. Raises InvalidRequest, PolicyRefused."""
        if self.line is not None and self.argv is not None:
            raise InvalidRequest("give either a line for the shell or argv, not both", field="argv")
        header: dict[str, Any] = {"cwd": f"{WORKSPACE}/{check_text(self.workdir, 'workdir')}"}
        if self.workdir.startswith("/"):
            header["cwd"] = self.workdir
        if self.line is not None:
            header["line"] = check_text(self.line, "line")
        elif self.argv is not None:
            header["argv"] = [check_text(part, "argv") for part in self.argv]
            if not header["argv"] or not header["argv"][0]:
                raise InvalidRequest("argv names no program", field="argv")
        for name, value in self.env.items():
            if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
                raise InvalidRequest(f"{name!r:.100} is no name of a variable", field="env")
            check_text(value, "env")
            if name in PROXY_ENV and name in spec.env and value != spec.env[name]:
                raise InvalidRequest(f"{name} leads to the sandbox's egress gate and can't be replaced", field="env")
        header["env"] = {**spec.env, **self.env}
        if self.user not in ("user", "root"):
            raise InvalidRequest(f"user is 'user' or 'root', not {self.user!r:.100}", field="user")
        if self.user == "root" and not spec.is_root:
            raise PolicyRefused(
                f"profile {spec.profile!r} does not let code be root", field="user", setting="is_root of the profile"
            )
        header["is_root"] = self.user == "root"
        return header


def check_text(value: object, field: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise InvalidRequest(f"{field} must be text without NUL characters", field=field)
    return value


@dataclasses.dataclass(frozen=True)
class Output:
    """Something a process printed.

    Parameters
    ----------
    stream : str
        ``stdout`` or ``stderr``; all that a terminal shows is ``stdout``.
    offset : int
        Of its first byte in all that was printed there. If it is beyond the end of the last one, bytes between were
        dropped.
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
        That ended it; 0 for none.
    timed_out : bool
        It was killed because its time was over.
    """

    exit_code: int
    signal: int = 0
    timed_out: bool = False


@dataclasses.dataclass(frozen=True)
class ExecResult:
    """What a command gave.

    Parameters
    ----------
    stdout, stderr : bytes
        All that it printed, or the first part.
    exit_code : int
        128 + n after signal n, 127 if there is no such program.
    timed_out : bool
        It was killed because its time was over.
    truncated : bool
        It printed more than was kept.
    stdout_bytes, stderr_bytes : int
        All that it printed.
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
    """A background process, as it is now.

    Parameters
    ----------
    id, command : str
    started : float
        Seconds since the epoch.
    state : str
        ``running``, ``exited``, or ``lost`` when its end could not be learnt.
    exit_code : int or None
        Once it has exited.
    is_terminal : bool
        It runs on a terminal.
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


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of what a background process printed.

    Parameters
    ----------
    data : bytes
    offset, next_offset : int
        Of its first byte, and where to read on.
    dropped : int
        Bytes between the offset that was asked for and the oldest that is kept.
    is_end : bool
        The process has ended, and nothing follows.
    """

    data: bytes
    offset: int
    next_offset: int
    dropped: int
    is_end: bool


def check_size(rows: int, columns: int) -> tuple[int, int]:
    for field, value in (("rows", rows), ("columns", columns)):
        if not isinstance(value, int) or not 1 <= value <= MAX_SIDE:
            raise InvalidRequest(f"{field} is 1 to {MAX_SIDE}", field=field)
    return rows, columns
