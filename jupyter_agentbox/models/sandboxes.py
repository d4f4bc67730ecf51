"""Define the request and response bodies for sandboxes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from jupyter_agentbox.spec import WORKSPACE

from .base import Answer, Body, HostName, Label, Name, SandboxState, Seconds, State

Port = Annotated[int, Meta(ge=1, le=65535)]


class LimitsRequest(Body, frozen=True):
    """Limits below those of the profile; omitted limits are the profile's."""

    memory: int | str | None = None
    cpus: float | None = None
    processes: int | None = None
    disk: int | str | None = None


class FileBytes(Body, frozen=True):
    """The content of a file that is not text."""

    base64: bytes


class SandboxRequest(Body, frozen=True):
    """A sandbox to create. Every field is optional, and no value may exceed what policy allows.

    Parameters
    ----------
    id : str, optional
        Id that the caller chooses. Repeating the request returns the existing sandbox.
    profile : str, optional
        Name of a profile that the administrator defines.
    image : str, optional
        Name of the image to run; by default the profile's image, or the host's own system.
    env : dict
        Environment variables of all processes inside.
    packages : list of str
        Packages to install before it is ready: of Python, such as `pandas==2.2.*`, and with a prefix those of Node.js
        and R, such as `npm:left-pad@1.3.0` and `R:data.table`.
    files : dict
        Files to write to the workspace before it is ready: text, or `{"base64": ...}`.
    allowed_hosts : list of str, optional
        Hosts that it may reach; by default those of the profile. `[]` for none.
    limits : LimitsRequest
    idle_timeout : float, optional
        Seconds without use after which the sandbox ends.
    max_life : float, optional
        Maximum lifetime in seconds.
    idle_policy : str
        What happens at the idle timeout: the sandbox is deleted, or parked on disk until its next use.
    tenant : str, optional
        Name of a persistent workspace, shared by all of the owner's sandboxes of this tenant.
    tools : list of str, optional
        Tools that may be used on the sandbox; all by default.
    blocked_commands : list of str
        Shell patterns of commands to refuse: a guard rail against accidents, not a security boundary.
    workdir : str
        Working directory of commands and code.
    ports : list of int
        TCP ports inside the sandbox to expose at `/sandboxes/{id}/ports/{port}/`.
    labels : dict of str to str
        Labels that the caller chooses.
    """

    id: Name | None = None
    profile: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    image: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    env: dict[str, str] = {}
    packages: Annotated[list[str], Meta(max_length=200)] = []
    files: dict[str, str | FileBytes] = {}
    allowed_hosts: Annotated[list[HostName], Meta(max_length=1000)] | None = None
    limits: LimitsRequest = LimitsRequest()
    idle_timeout: Seconds | None = None
    max_life: Seconds | None = None
    idle_policy: Literal["delete", "park"] = "delete"
    tenant: Name | None = None
    tools: list[str] | None = None
    blocked_commands: Annotated[list[Annotated[str, Meta(min_length=1, max_length=500)]], Meta(max_length=200)] = []
    workdir: Annotated[str, Meta(min_length=1, max_length=4096)] = WORKSPACE
    ports: Annotated[list[Port], Meta(max_length=100)] = []
    labels: Annotated[dict[Name, Label], Meta(max_length=64)] = {}


class SandboxPatch(Body, frozen=True):
    """Changes to a running sandbox; omitted fields stay unchanged. `allowed_hosts` replaces the whole list."""

    allowed_hosts: Annotated[list[HostName], Meta(max_length=1000)] | UnsetType = UNSET
    idle_timeout: Seconds | UnsetType = UNSET
    max_life: Seconds | UnsetType = UNSET
    labels: Annotated[dict[Name, Label], Meta(max_length=64)] | UnsetType = UNSET


#: An exact value to filter by.
Text = Annotated[str, Meta(max_length=256)]


class SandboxFilters(Body, frozen=True):
    """Which sandboxes to list; a sandbox must match all filters.

    Parameters
    ----------
    state, profile, tenant, kernel_id : str, optional
        Exact value to match.
    label : list of str
        `name` or `name=value`.
    owner : str, optional
        Owner to match, for administrators. Other callers see only their own sandboxes.
    """

    state: SandboxState | None = None
    profile: Text | None = None
    tenant: Text | None = None
    kernel_id: Text | None = None
    label: Annotated[list[Text], Meta(max_length=16)] = []
    owner: Text | None = None


class EndInfo(Answer, frozen=True):
    """How and why a sandbox ended.

    Parameters
    ----------
    time : float
        When it ended, in seconds since the epoch.
    kept_until : float, optional
        Time until which its files are kept for reviving it, in seconds since the epoch. Null if they are not kept.
    """

    cause: str
    exit_code: int
    message: str
    setting: str | None
    time: float
    kept_until: float | None = None


class LimitsInfo(Answer, frozen=True):
    """The limits of a sandbox: bytes of memory and disk, CPU cores, and number of processes and threads."""

    memory: int
    cpus: float
    processes: int
    disk: int


class KernelInfo(Answer, frozen=True):
    """A kernel that runs in the sandbox.

    Parameters
    ----------
    id : str
        Jupyter's kernel id for a notebook's kernel; otherwise the name of the context.
    state : str
        `starting`, `running` or `ended`.
    """

    id: str
    state: State


class UsageInfo(Answer, frozen=True):
    """The last measurement of a sandbox's resource use, made every two seconds while it is not frozen.

    Parameters
    ----------
    memory, disk : int
        Bytes in use.
    cpu : float
        Seconds of CPU time since its start.
    time : float
        When it was measured, in seconds since the epoch.
    """

    memory: int
    cpu: float
    disk: int
    time: float


class CallInfo(Answer, frozen=True):
    """A tool call in progress.

    Parameters
    ----------
    by : str
        Name of the caller.
    token : str, optional
        Name of the scoped token used for the call.
    since : float
        When it began, in seconds since the epoch.
    """

    tool: str
    by: str
    token: str | None
    since: float


class SandboxInfo(Answer, frozen=True):
    """The current state of a sandbox. Times are seconds since the epoch.

    Parameters
    ----------
    id : str
        Id for calls of the API.
    sandbox_id : str
        Id in the audit log and on the host.
    kind : str
        `session` if it was created over the API, `notebook` if it belongs to a Jupyter kernel.
    state : str
        Current state. `unknown` if the runtime does not respond; `lost` if its record on disk is damaged: `end` has
        the reason, and deleting the sandbox removes its files.
    end : EndInfo, optional
        Why it ended or is lost.
    idle_timeout, max_life : float, optional
        Seconds; null if they do not apply, as for notebooks.
    workspace : str
        `private`, `folder` (the notebook's own folder) or `tenant`.
    workspace_notice : str
        Why a private workspace replaces the notebook's folder; empty if it does not.
    suggested_folder : str
        Name of a folder to create beside the notebook. A notebook in it gets its own folder. Empty for none.
    tools : list of str
        Tools that may be used on it.
    usage : UsageInfo, optional
        Resource use; null if it is not running or was not measured yet.
    calls : list of CallInfo
        Tool calls in progress.
    image : str
        Reference of its image; empty if it runs on the host's own system.
    languages : list of str
        Languages that its kernels run.
    """

    id: str
    sandbox_id: str | None
    kind: Literal["session", "notebook"]
    owner: str
    profile: str
    state: SandboxState
    end: EndInfo | None
    created: float
    last_used: float
    idle_timeout: float | None
    max_life: float | None
    limits: LimitsInfo | None
    allowed_hosts: list[str]
    kernels: list[KernelInfo]
    workspace: Literal["private", "folder", "tenant"]
    workspace_notice: str
    suggested_folder: str
    tenant: str | None
    tools: list[str]
    blocked_commands: list[str]
    workdir: str
    ports: list[int]
    labels: dict[str, str]
    runtime: str
    isolation: Literal["gvisor", "none"]
    image: str
    languages: list[str]
    usage: UsageInfo | None
    calls: list[CallInfo]


class SandboxList(Answer, frozen=True):
    """Sandboxes, oldest first."""

    sandboxes: list[SandboxInfo]
