"""Bodies and answers about sandboxes."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from jupyter_agentbox.spec import WORKSPACE

from .base import Answer, Body, HostName, Label, Name, SandboxState, Seconds, State

Port = Annotated[int, Meta(ge=1, le=65535)]


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
    image : str, optional
        Name of the image that it is to run on; the profile's, or the host's own system, unless given.
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
        What an idle one comes to: its end, or its being parked, saved on the disk until its next use.
    tenant : str, optional
        Name of a workspace that is kept and shared by the owner's sandboxes of that tenant.
    tools : list of str, optional
        The tools that may be used on it; all unless given.
    blocked_commands : list of str
        Shell patterns of commands to refuse: a guard rail against accidents, no boundary.
    workdir : str
        Where commands and code start.
    ports : list of int
        TCP ports on which programs inside listen that may be reached at `/sandboxes/{id}/ports/{port}/`.
    labels : dict of str to str
        The caller's own notes.
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
    """What to change of a living sandbox; what is left out stays. `allowed_hosts` replaces the whole list."""

    allowed_hosts: Annotated[list[HostName], Meta(max_length=1000)] | UnsetType = UNSET
    idle_timeout: Seconds | UnsetType = UNSET
    max_life: Seconds | UnsetType = UNSET
    labels: Annotated[dict[Name, Label], Meta(max_length=64)] | UnsetType = UNSET


#: A value to compare with.
Text = Annotated[str, Meta(max_length=256)]


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

    state: SandboxState | None = None
    profile: Text | None = None
    tenant: Text | None = None
    kernel_id: Text | None = None
    label: Annotated[list[Text], Meta(max_length=16)] = []
    owner: Text | None = None


class EndInfo(Answer, frozen=True):
    """How and why it ended.

    Parameters
    ----------
    time : float
        When, in seconds since the epoch.
    kept_until : float, optional
        Until when its files are kept, in seconds since the epoch: it can be revived with them. Null if they are not.
    """

    cause: str
    exit_code: int
    message: str
    setting: str | None
    time: float
    kept_until: float | None = None


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


class UsageInfo(Answer, frozen=True):
    """What it used when it was measured last, which is every two seconds while it is not frozen.

    Parameters
    ----------
    memory, disk : int
        Bytes.
    cpu : float
        Seconds of processor time since its start.
    time : float
        When, in seconds since the epoch.
    """

    memory: int
    cpu: float
    disk: int
    time: float


class CallInfo(Answer, frozen=True):
    """A call of a tool that is on it now.

    Parameters
    ----------
    by : str
        Who calls.
    token : str, optional
        Name of the token for this sandbox that it is made with.
    since : float
        Seconds since the epoch.
    """

    tool: str
    by: str
    token: str | None
    since: float


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
    state : str
        `unknown` if the runtime does not respond; `lost` if its record on disk is damaged: `end` says what is wrong,
        and deleting it removes its files.
    end : EndInfo, optional
        Once it has ended, or is lost.
    idle_timeout, max_life : float, optional
        Seconds; null where the rules of sessions do not hold, as for notebooks.
    workspace : str
        `private`, `folder` (the notebook's own) or `tenant`.
    tools : list of str
        Those that may be used.
    usage : UsageInfo, optional
        What it uses; null until it was measured, and of one that does not live.
    calls : list of CallInfo
        Calls of tools that are on it now.
    image : str
        Address of its image; empty where it runs on the host's own system.
    languages : list of str
        What code in it may be written in.
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
