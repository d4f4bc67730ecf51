"""Define the request and response bodies for egress, the audit log and the service itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from .base import Answer, Body, HostName


class GrantQuery(Body, frozen=True):
    """Options for reading a grant.

    Parameters
    ----------
    host : str, optional
        A host for which to return a verdict: whether the caller may allow it.
    """

    host: HostName | None = None


#: What a person allows a host for: the kernel, the notebook, or always for the profile.
Scope = Literal["kernel", "notebook", "always"]


class HostVerdict(Answer, frozen=True):
    """Whether a sandbox may be allowed to reach a host.

    Parameters
    ----------
    host : str
        `name`, or `name:port` for a port other than 80 and 443.
    is_allowed : bool
        Whether the sandbox may already reach the host.
    may_allow : bool
        Whether the caller may allow the host.
    message : str
        Why the caller may not allow it.
    setting : str, optional
        The administrator's setting that controls this.
    scopes : list of str
        For what the caller may allow it: `kernel`, `notebook`, `always` (for the profile).
    """

    host: str
    is_allowed: bool
    may_allow: bool
    message: str
    setting: str | None
    scopes: list[Scope]


class HostRule(Answer, frozen=True):
    """A host that a person allowed.

    Parameters
    ----------
    host : str
        Host pattern.
    scope : str
        `kernel`, `notebook` or `always`.
    target : str
        The kernel's id, the notebook's path on the server, or the profile's name.
    by : str
        Who allowed it.
    added : float
        When, in seconds since the epoch.
    """

    host: str
    scope: Scope
    target: str
    by: str
    added: float


class HostRules(Answer, frozen=True):
    """All hosts that a person allowed, oldest first."""

    rules: list[HostRule]


class HostConsent(Body, frozen=True):
    """A host that a person allows.

    Parameters
    ----------
    host : str
        The `host` of a verdict, or another host pattern.
    scope : str
        For what: one of the verdict's `scopes`.
    """

    host: HostName
    scope: Scope = "kernel"


class HostRevocation(Body, frozen=True):
    """Which of the hosts that a person allowed to revoke; without `scope`, for each scope.

    Parameters
    ----------
    host : str
        The rule's host.
    scope : str, optional
        The rule's scope.
    """

    host: HostName
    scope: Scope | None = None


class SavedRevocation(HostRevocation, frozen=True):
    """Which of all hosts that a person allowed to revoke.

    Parameters
    ----------
    host : str
        The rule's host.
    scope : str, optional
        The rule's scope. Without it, for each scope.
    target : str, optional
        The rule's target. Without it, for each target.
    """

    target: Annotated[str, Meta(max_length=4096)] | None = None


class GrantInfo(Answer, frozen=True):
    """The hosts that a sandbox may reach.

    Parameters
    ----------
    hosts, private_hosts : list of str
        Host patterns, with presets expanded.
    ceiling : list of str
        Hosts that the sandbox may be granted at most; presets are listed by name.
    setting : str
        The administrator's setting that defines the ceiling.
    may_allow : list of str
        Hosts that a person may allow in addition. The port `*` stands for every port.
    rules : list of HostRule
        The hosts that a person allowed and that apply to the sandbox.
    refused : list of HostVerdict
        Verdicts on the hosts of refused connections that are still not allowed.
    verdict : HostVerdict, optional
        Verdict on the host in the query.
    """

    hosts: list[str]
    private_hosts: list[str]
    ceiling: list[str]
    setting: str
    may_allow: list[str]
    rules: list[HostRule]
    refused: list[HostVerdict]
    verdict: HostVerdict | None = None


class AskRequest(Body, frozen=True):
    """A host that the sandbox needs, and the reason."""

    host: HostName
    why: Annotated[str, Meta(max_length=1000)] = ""


class AskDecision(Body, frozen=True):
    """A person's decision on a host request."""

    decision: Annotated[Literal["allow", "deny"], Meta(description="Whether the sandbox may reach the host.")]
    note: Annotated[str, Meta(max_length=1000)] = ""


class AskInfo(Answer, frozen=True):
    """A host request."""

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
    """Host requests, oldest first."""

    asks: list[AskInfo]


class ToolInfo(Answer, frozen=True):
    """A tool that a sandbox can allow."""

    name: str
    description: str


class ToolList(Answer, frozen=True):
    """All tools that a sandbox can allow."""

    tools: list[ToolInfo]


class CheckInfo(Answer, frozen=True):
    """The result of one health check."""

    name: str
    is_ok: bool
    message: str


class Health(Answer, frozen=True):
    """Whether this server can start sandboxes.

    Parameters
    ----------
    status : str
        `ok`, or `degraded` with at least one failed check.
    sandboxes : int
        Number of running sandboxes.
    """

    status: Literal["ok", "degraded"]
    version: str
    runtime: str
    isolation: Literal["gvisor", "none"]
    sandboxes: int
    checks: list[CheckInfo]


class ServerInfo(Answer, frozen=True):
    """The configuration of a running server.

    Parameters
    ----------
    enforced_by : list of str
        Files and other places that enforce sandboxed kernels; empty if none do.
    kernel_spec_manager, kernel_manager, contents_manager : str
        Class names with their modules.
    is_guarded : bool
        Whether the file browser refuses links that point outside its root directory.
    terminals : str
        ``sandboxed``, ``host`` or ``off``.
    default_kernel : str
        Name of the kernel that is started if a request names none.
    host_kernels : list of str
        Names of the kernels that run on the host.
    extension_manager : str
        JupyterLab's extension manager; empty without JupyterLab.
    problems : list of str
        Problems with this configuration.
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
    """A row of the audit log."""

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
    """The result of verifying the audit log.

    Parameters
    ----------
    rows : int
        Number of intact rows.
    dropped : int
        Number of rows that were dropped because the log was full.
    head : str
        Number and hash of the last intact row. Store it elsewhere for a later verification.
    row : int, optional
        The first row that is damaged or missing.
    problem : str, optional
        What is wrong with it.
    """

    is_ok: bool
    rows: int
    dropped: int
    head: str
    row: int | None
    problem: str | None


class VerifyQuery(Body, frozen=True):
    """What to compare the audit log with.

    Parameters
    ----------
    head : str, optional
        The head that an earlier verification returned.
    """

    head: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,17}:[0-9a-f]{64}$(?!\n)")] | None = None


class AuditExport(Body, frozen=True):
    """Which rows to return; a row must match all filters.

    Parameters
    ----------
    kind : str, optional
        Kind of row, such as `egress`, `call` or `lifecycle`.
    is_allowed : bool, optional
        True for rows about what was allowed, false for refusals.
    since : float, optional
        Only rows from this time on, in seconds since the epoch.
    until : float, optional
        Only rows before this time, in seconds since the epoch.
    after_id : int, optional
        Only rows after this id.
    """

    kind: Annotated[str, Meta(max_length=64)] | None = None
    is_allowed: bool | None = None
    since: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    until: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    after_id: Annotated[int, Meta(ge=0, le=2**62)] | None = None


class AuditFilters(AuditExport, frozen=True):
    """Which rows to return: the newest `limit` rows that match all filters, or with `after_id` the first ones after it.

    Parameters
    ----------
    before_id : int, optional
        Only rows before this id. Pass the first id of a response to get older rows.
    limit : int
        Maximum number of rows.
    """

    before_id: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 1000
