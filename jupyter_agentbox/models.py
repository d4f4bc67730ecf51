"""Bodies and answers of the API: frozen structs, one for each, checked as they are decoded.

The REST handlers, MCP and the client share them, and the OpenAPI document is made from them. A field that is not
here is refused by its name. What file operations, commands and code answer is theirs and stands with them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from .spec import WORKSPACE

#: A name that a caller chooses: for a sandbox, a tenant.
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)", description="Letters, digits, `.`, `_`, `-`.")
]
Label = Annotated[str, Meta(max_length=256)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000, description="Seconds.")]
HostName = Annotated[str, Meta(min_length=1, max_length=300, description="`name`, `*.name`, `name:port` or a preset.")]

#: What a session's tool allowlist is made of: one word for each thing that an agent can do in a sandbox.
TOOLS: dict[str, str] = {
    "bash": "Run commands in the foreground and in the background, and answer them.",
    "terminal": "Open a terminal.",
    "run_code": "Run code in the sandbox's persistent kernels.",
    "read": "Read files: content, facts, downloads.",
    "write": "Write, append, move, copy, delete and upload files, and make directories.",
    "edit": "Replace text in a file.",
    "list": "List directories.",
    "glob": "Find files by name.",
    "grep": "Find lines by pattern.",
    "install": "Install packages.",
    "ask_host": "Ask a person for access to a host.",
    "http_request": "Send one HTTP request through the egress gate.",
}

State = Literal["starting", "running", "ended"]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what comes in."""


class Answer(msgspec.Struct, frozen=True):
    """Base of what goes out."""


class ErrorAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Every answer that is an error.

    Parameters
    ----------
    message : str
        A sentence for a person.
    reason : str
        One word for a program, such as `not_found`.
    field : str, optional
        The field of the request that is at fault.
    setting : str, optional
        The administrator's setting that would change it.
    """

    message: str
    reason: str
    field: str | None = None
    setting: str | None = None


# -- sandboxes -----------------------------------------------------------------------------------


class LimitsRequest(Body, frozen=True):
    """Limits to narrow; what is left out is the profile's."""

    memory: int | str | None = None
    cpus: float | None = None
    processes: int | None = None
    disk: int | str | None = None


class FileBytes(Body, frozen=True):
    """The content of a file that is not text."""

    base64: bytes


class SandboxRequest(Body, frozen=True):
    """What a sandbox is to be like. Everything is optional, and nothing may be more than policy allows.

    Parameters
    ----------
    id : str, optional
        An id of the caller's own: asking again for the same returns the sandbox that is there.
    profile : str, optional
        One of the administrator's named sets of values.
    env : dict
        Variables of everything that runs inside.
    packages : list of str
        Python packages to install before it is ready.
    files : dict
        Files of the workspace to write first: text, or `{"base64": ...}`.
    allowed_hosts : list of str, optional
        What it may reach; the profile's unless given, `[]` for nothing.
    limits : LimitsRequest
    idle_timeout : float, optional
        Seconds without use after which it ends.
    max_life : float, optional
        Seconds after which it ends, whatever it does.
    idle_policy : str
        What an idle one comes to.
    tenant : str, optional
        Name of a workspace that is kept and shared by the owner's sandboxes of that tenant.
    tools : list of str, optional
        The tools that may be used on it; all unless given.
    blocked_commands : list of str
        Shell patterns of commands to refuse: a guard rail against accidents, no boundary.
    workdir : str
        Where commands and code start.
    labels : dict of str to str
        The caller's own notes.
    """

    id: Name | None = None
    profile: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    env: dict[str, str] = {}
    packages: Annotated[list[str], Meta(max_length=200)] = []
    files: dict[str, str | FileBytes] = {}
    allowed_hosts: Annotated[list[HostName], Meta(max_length=1000)] | None = None
    limits: LimitsRequest = LimitsRequest()
    idle_timeout: Seconds | None = None
    max_life: Seconds | None = None
    idle_policy: Literal["delete"] = "delete"
    tenant: Name | None = None
    tools: list[str] | None = None
    blocked_commands: Annotated[list[Annotated[str, Meta(min_length=1, max_length=500)]], Meta(max_length=200)] = []
    workdir: Annotated[str, Meta(min_length=1, max_length=4096)] = WORKSPACE
    labels: Annotated[dict[Name, Label], Meta(max_length=64)] = {}


class SandboxPatch(Body, frozen=True):
    """What to change of a living sandbox; what is left out stays. `allowed_hosts` replaces the whole list."""

    allowed_hosts: Annotated[list[HostName], Meta(max_length=1000)] | UnsetType = UNSET
    idle_timeout: Seconds | UnsetType = UNSET
    max_life: Seconds | UnsetType = UNSET
    labels: Annotated[dict[Name, Label], Meta(max_length=64)] | UnsetType = UNSET


class SandboxFilters(Body, frozen=True):
    """Which sandboxes to list; all filters must fit.

    Parameters
    ----------
    state, profile, tenant, kernel_id : str, optional
        Exact values.
    label : list of str
        `name` or `name=value`.
    owner : str, optional
        For administrators; others see only their own.
    """

    state: State | None = None
    profile: str | None = None
    tenant: str | None = None
    kernel_id: str | None = None
    label: list[str] = []
    owner: str | None = None


class EndInfo(Answer, frozen=True):
    """How and why it ended."""

    cause: str
    exit_code: int
    message: str
    setting: str | None
    time: float


class LimitsInfo(Answer, frozen=True):
    """Its limits: bytes, processors' worth of time, processes and threads."""

    memory: int
    cpus: float
    processes: int
    disk: int


class KernelInfo(Answer, frozen=True):
    """A kernel that runs in it.

    Parameters
    ----------
    id : str
        Jupyter's id of a notebook's kernel, else the name inside.
    state : str
        `starting`, `running` or `ended`.
    """

    id: str
    state: State


class SandboxInfo(Answer, frozen=True):
    """A sandbox as it is now. Times are seconds since the epoch.

    Parameters
    ----------
    id : str
        The id to call it by.
    sandbox_id : str
        Its id in the audit log and on the machine.
    kind : str
        `session` for one made here, `notebook` for that of a Jupyter kernel.
    end : EndInfo, optional
        Once it has ended.
    idle_timeout, max_life : float, optional
        Seconds; null where the rules of sessions do not hold, as for notebooks.
    workspace : str
        `private`, `folder` (the notebook's own) or `tenant`.
    tools : list of str
        Those that may be used.
    """

    id: str
    sandbox_id: str | None
    kind: Literal["session", "notebook"]
    owner: str
    profile: str
    state: State
    end: EndInfo | None
    created: float
    last_used: float
    idle_timeout: float | None
    max_life: float | None
    limits: LimitsInfo | None
    allowed_hosts: list[str]
    kernels: list[KernelInfo]
    workspace: Literal["private", "folder", "tenant"]
    tenant: str | None
    tools: list[str]
    blocked_commands: list[str]
    workdir: str
    labels: dict[str, str]
    runtime: str
    isolation: Literal["gvisor", "none"]


class SandboxList(Answer, frozen=True):
    """Sandboxes, oldest first."""

    sandboxes: list[SandboxInfo]


# -- egress --------------------------------------------------------------------------------------


class GrantInfo(Answer, frozen=True):
    """What a sandbox may reach.

    Parameters
    ----------
    hosts, private_hosts : list of str
        Patterns, presets expanded.
    ceiling : list of str
        The most that it may be given, presets by name.
    setting : str
        The setting behind it.
    """

    hosts: list[str]
    private_hosts: list[str]
    ceiling: list[str]
    setting: str


class AskRequest(Body, frozen=True):
    """A host that the sandbox needs, and what for."""

    host: HostName
    why: Annotated[str, Meta(max_length=1000)] = ""


class AskDecision(Body, frozen=True):
    """A person's word on it."""

    decision: Literal["allow", "deny"]
    note: Annotated[str, Meta(max_length=1000)] = ""


class AskInfo(Answer, frozen=True):
    """A host asked for."""

    id: str
    sandbox: str
    host: str
    why: str
    state: Literal["pending", "allowed", "denied"]
    asked: float
    decided: float | None = None
    decided_by: str | None = None
    note: str = ""


class AskList(Answer, frozen=True):
    """Hosts asked for, oldest first."""

    asks: list[AskInfo]


# -- answers about the service ---------------------------------------------------------------------


class ToolInfo(Answer, frozen=True):
    """A tool that sessions can allow."""

    name: str
    description: str


class ToolList(Answer, frozen=True):
    """All tools there are."""

    tools: list[ToolInfo]


class CheckInfo(Answer, frozen=True):
    """One thing that was looked at."""

    name: str
    is_ok: bool
    message: str


class Health(Answer, frozen=True):
    """Whether sandboxes can be started here.

    Parameters
    ----------
    status : str
        `ok`, or `degraded` with a check that says why.
    sandboxes : int
        That live in this server.
    """

    status: Literal["ok", "degraded"]
    version: str
    runtime: str
    isolation: Literal["gvisor", "none"]
    sandboxes: int
    checks: list[CheckInfo]


class AuditItem(Answer, frozen=True):
    """A row of the audit log; see the page on it."""

    id: int
    time: float
    sandbox: str
    kind: str
    is_allowed: bool | None
    host: str | None
    port: int | None
    rule: str | None
    reason: str | None
    bytes_up: int | None
    bytes_down: int | None
    duration: float | None
    detail: dict[str, Any]


class AuditRows(Answer, frozen=True):
    """Rows, oldest first."""

    rows: list[AuditItem]


class AuditFilters(Body, frozen=True):
    """Which rows; all filters must fit, and the newest `limit` rows are answered."""

    kind: str | None = None
    is_allowed: bool | None = None
    since: float | None = None
    after_id: int | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 1000


# -- commands ------------------------------------------------------------------------------------

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


# -- files -----------------------------------------------------------------------------------------

Path = Annotated[str, Meta(min_length=1, max_length=16_384, description="Beneath the workspace, or `/workspace/...`.")]
Mode = Annotated[int, Meta(ge=0, le=0o777, description="Permission bits.")]


class PathQuery(Body, frozen=True):
    """An entry of the workspace."""

    path: Path


class StatQuery(Body, frozen=True):
    """An entry of the workspace; `follow` leads on from a link."""

    path: Path
    follow: bool = True


class ReadQuery(Body, frozen=True):
    """A part of a file; a negative `offset` counts from the end."""

    path: Path
    offset: Annotated[int, Meta(ge=-(2**62), le=2**62)] = 0
    length: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] | None = None
    encoding: Encoding = "utf-8"


class FileContent(Answer, frozen=True):
    """A part of a file. In `utf-8`, other bytes have become U+FFFD, and `is_text` is false."""

    path: str
    size: int
    offset: int
    data: str
    truncated: bool
    encoding: Encoding
    is_text: bool


class Existence(Answer, frozen=True):
    """Whether there is something."""

    exists: bool


class ListQuery(Body, frozen=True):
    """A directory."""

    path: Path = "."
    recursive: bool = False
    depth: Annotated[int, Meta(ge=1, le=100)] | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class GlobQuery(Body, frozen=True):
    """Entries by pattern, such as `**/*.py`."""

    pattern: Annotated[str, Meta(min_length=1, max_length=4096)]
    path: Path = "."
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1000


class GrepQuery(Body, frozen=True):
    """Lines by a regular expression of Python's, or by plain text."""

    pattern: Annotated[str, Meta(min_length=1, max_length=4096)]
    path: Path = "."
    glob: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    is_literal: bool = False
    ignore_case: bool = False
    before: Annotated[int, Meta(ge=0, le=50)] = 0
    after: Annotated[int, Meta(ge=0, le=50)] = 0
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 200


class WriteRequest(Body, frozen=True):
    """The whole content of a file, as text or as bytes."""

    path: Path
    text: str = ""
    base64: bytes = b""
    parents: bool = True
    overwrite: bool = True
    mode: Mode | None = None


class AppendRequest(Body, frozen=True):
    """What to add to a file."""

    path: Path
    text: str = ""
    base64: bytes = b""
    parents: bool = True


class EditRequest(Body, frozen=True):
    """A text to replace. It must be there once, or `count` times; `all` takes any number."""

    path: Path
    old: Annotated[str, Meta(min_length=1)]
    new: str
    count: Annotated[int, Meta(ge=1)] = 1
    all: bool = False


class MoveRequest(Body, frozen=True):
    """An entry and its new path."""

    source: Path
    target: Path
    parents: bool = True
    overwrite: bool = False


class CopyRequest(Body, frozen=True):
    """An entry and the copy's path."""

    source: Path
    target: Path
    recursive: bool = True
    parents: bool = True
    overwrite: bool = False


class MakeDirectoryRequest(Body, frozen=True):
    """A directory to make."""

    path: Path
    parents: bool = True
    exist_ok: bool = True


class DeleteRequest(Body, frozen=True):
    """An entry to delete."""

    path: Path
    recursive: bool = False
    missing_ok: bool = False


class Deleted(Answer, frozen=True):
    """How many entries were deleted."""

    deleted: int


class UploadQuery(Body, frozen=True):
    """Where an upload goes. A `size` or `sha256` that is given must be that of what comes, or nothing appears."""

    path: Path
    size: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$(?!\n)")] | None = None
    parents: bool = True
    overwrite: bool = True
    mode: Mode | None = None


class UnpackQuery(Body, frozen=True):
    """Where an archive (tar, tar.gz or zip) is unpacked."""

    path: Path = "."
    size: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$(?!\n)")] | None = None
    overwrite: bool = True


class PackQuery(Body, frozen=True):
    """A directory to be answered as an archive."""

    path: Path = "."
    kind: Literal["tar", "zip"] = "tar"


class ImportRequest(Body, frozen=True):
    """Files from another sandbox of the caller's, or from a host folder that policy names.

    Parameters
    ----------
    sandbox : str, optional
        Where they are.
    folder : str, optional
        Name of one of `Policy.import_folders`.
    source, target : str
        Path there, path here.
    """

    source: Path
    target: Path
    sandbox: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    folder: Name | None = None
    overwrite: bool = False


class ExportRequest(Body, frozen=True):
    """Files for a host folder that policy names in `Policy.export_folders`."""

    source: Path
    target: Path
    folder: Name
    overwrite: bool = False


# -- packages, requests ------------------------------------------------------------------------------


class InstallRequest(Body, frozen=True):
    """Packages to install.

    Parameters
    ----------
    packages : list of str
        Names with extras and versions, such as `pandas[excel]==2.2.*`.
    requirements : str, optional
        Path of a requirements file in the workspace.
    manager : str
        `pip`, or `npm` where the sandbox has it.
    upgrade : bool
        Newer versions in place of what is there.
    """

    packages: Annotated[list[Annotated[str, Meta(min_length=1, max_length=300)]], Meta(max_length=200)] = []
    requirements: Path | None = None
    manager: Literal["pip", "npm"] = "pip"
    upgrade: bool = False
    timeout: Annotated[float, Meta(gt=0, le=3600)] = 600.0


class Installed(Answer, frozen=True):
    """What came of it.

    Parameters
    ----------
    is_ok : bool
        All of them are there.
    message : str
        What was installed, or what went wrong.
    log : str
        The end of what the package manager printed.
    refused : list of RefusedHost
        What the gate refused meanwhile: most often the reason.
    """

    is_ok: bool
    message: str
    exit_code: int
    duration: float
    log: str
    refused: list[RefusedHost]


class ProgressEvent(Answer, frozen=True):
    """A line of what the package manager prints."""

    text: str


class HttpRequest(Body, frozen=True):
    """A request to be sent through the sandbox's egress gate.

    Parameters
    ----------
    url : str
        `http` or `https`.
    max_bytes : int
        Bytes kept of the answer.
    """

    url: Annotated[str, Meta(min_length=8, max_length=8192)]
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] = "GET"
    headers: Annotated[dict[str, str], Meta(max_length=100)] = {}
    body: str = ""
    body_base64: bytes = b""
    timeout: Annotated[float, Meta(gt=0, le=300)] = 30.0
    max_bytes: Annotated[int, Meta(ge=0, le=16 * 1024 * 1024)] = 1024 * 1024


class HttpAnswer(Answer, frozen=True):
    """What the server answered. Redirects are not followed: ask for the next address, if policy allows its host."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: str
    encoding: Encoding
    truncated: bool
    duration: float


# -- code --------------------------------------------------------------------------------------------


class CodeRequest(Body, frozen=True):
    """Code for a persistent kernel.

    Parameters
    ----------
    code : str
        What to run.
    context : str
        Which of the sandbox's kernels; it is started at first use. In a notebook's sandbox, `default` is the
        notebook's own.
    language : str, optional
        Must be the context's, if given.
    timeout : float, optional
        Seconds until it is interrupted; null for none.
    stream_bytes, display_bytes : int
        Bytes kept of stdout and of stderr, and of all displays together.
    displays : int
        Displays kept.
    keep_running : bool
        Let it run on when the caller goes away, instead of interrupting it.
    """

    code: str
    context: Name = "default"
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = 60.0
    stream_bytes: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 1024 * 1024
    display_bytes: Annotated[int, Meta(ge=0, le=64 * 1024 * 1024)] = 10 * 1024 * 1024
    displays: Annotated[int, Meta(ge=0, le=10_000)] = 1000
    keep_running: bool = False


class ContextRequest(Body, frozen=True):
    """A kernel to start before it is needed."""

    name: Name = "default"
    language: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
