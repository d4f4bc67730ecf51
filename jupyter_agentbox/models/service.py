"""Bodies and answers about egress, the audit log and the service itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from .base import Answer, Body, HostName


class GrantQuery(Body, frozen=True):
    """What else to tell.

    Parameters
    ----------
    host : str, optional
        A host to judge: whether the caller may have the sandbox reach it.
    """

    host: HostName | None = None


class HostVerdict(Answer, frozen=True):
    """Whether a sandbox may be given a host.

    Parameters
    ----------
    is_allowed : bool
        It is among those that it may reach, in the same words.
    may_allow : bool
        The caller may allow it.
    message : str
        Why not.
    setting : str, optional
        The administrator's setting that would change it.
    """

    host: str
    is_allowed: bool
    may_allow: bool
    message: str
    setting: str | None


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
    verdict : HostVerdict, optional
        On the host that was asked about.
    """

    hosts: list[str]
    private_hosts: list[str]
    ceiling: list[str]
    setting: str
    verdict: HostVerdict | None = None


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


class ServerInfo(Answer, frozen=True):
    """What a running server uses.

    Parameters
    ----------
    enforced_by : list of str
        The files and other places that enforce sandboxed kernels; empty if nothing does.
    kernel_spec_manager, kernel_manager, contents_manager : str
        Classes with their modules.
    is_guarded : bool
        Whether the file browser follows no link out of its root directory.
    terminals : str
        ``sandboxed``, ``host`` or ``off``.
    default_kernel : str
        Name of the kernel that a request without a name starts.
    host_kernels : list of str
        Names of the kernels that run on the host.
    extension_manager : str
        JupyterLab's; empty without JupyterLab.
    problems : list of str
        What keeps this from being what it should be.
    """

    enforced_by: list[str]
    kernel_spec_manager: str
    kernel_manager: str
    contents_manager: str
    is_guarded: bool
    terminals: str
    default_kernel: str
    host_kernels: list[str]
    extension_manager: str
    problems: list[str]


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
    hash: str


class AuditRows(Answer, frozen=True):
    """Rows, oldest first."""

    rows: list[AuditItem]


class AuditVerification(Answer, frozen=True):
    """What the check of the audit log has found.

    Parameters
    ----------
    rows, dropped : int
        Rows that fit, and those that were dropped since the log was full.
    head : str
        Number and hash of the last row that fits, to be kept elsewhere.
    row : int, optional
        The first row that is broken or missing.
    problem : str, optional
        A sentence on it.
    """

    is_ok: bool
    rows: int
    dropped: int
    head: str
    row: int | None
    problem: str | None


class VerifyQuery(Body, frozen=True):
    """With what to compare.

    Parameters
    ----------
    head : str, optional
        That of an earlier check.
    """

    head: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,17}:[0-9a-f]{64}$(?!\n)")] | None = None


class AuditExport(Body, frozen=True):
    """Which rows; all filters must fit.

    Parameters
    ----------
    kind : str, optional
        Such as `egress`, `call` or `lifecycle`.
    is_allowed : bool, optional
        Only what was allowed, or only what was refused.
    since, until : float, optional
        Seconds since the epoch: from the one, and before the other.
    after_id : int, optional
        Only rows after that one.
    """

    kind: Annotated[str, Meta(max_length=64)] | None = None
    is_allowed: bool | None = None
    since: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    until: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    after_id: Annotated[int, Meta(ge=0, le=2**62)] | None = None


class AuditFilters(AuditExport, frozen=True):
    """Which rows; all filters must fit. Answered are the newest `limit` rows, or with `after_id` the first after it.

    Parameters
    ----------
    before_id : int, optional
        Only rows before that one: the first of an answer leads to the older ones.
    limit : int
        Most rows.
    """

    before_id: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 1000
