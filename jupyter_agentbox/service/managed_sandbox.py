"""Represent a sandbox with an owner, rules and a time to live, as agents and programs see it.

``service.service`` creates and ends managed sandboxes, and ``service.registry`` finds them. A notebook's sandbox is
also represented here, but without a time to live, because Jupyter manages its life cycle. Everything runs on the link
thread, except what is documented as safe from any thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from jupyter_agentbox.errors import AgentboxError, Conflict, InvalidRequest, NotFound, PolicyRefused, SandboxEnded
from jupyter_agentbox.kernels.parked_kernel import ParkedKernel
from jupyter_agentbox.linux import write_atomically
from jupyter_agentbox.models import TOOLS, AskInfo, EndInfo, KernelInfo, LimitsInfo, SandboxInfo, SandboxRequest, State
from jupyter_agentbox.models.base import SandboxState
from jupyter_agentbox.models.sandboxes import CallInfo, UsageInfo
from jupyter_agentbox.policy.languages import list_languages
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.sandbox.sweep import SESSION_FILE as SESSION_FILE
from jupyter_agentbox.spec import INTENDED, End, Limits, SandboxSpec
from jupyter_agentbox.storage.files import Folder

#: Maximum number of refused connections and of host requests that a sandbox remembers.
MAX_REFUSALS = 100
MAX_ASKS = 100
#: Maximum number of earlier ids that a sandbox remembers.
MAX_PREVIOUS_IDS = 16


@dataclass(frozen=True)
class Refusal:
    """A connection that the gate refused.

    Parameters
    ----------
    number : int
        Sequence number, increasing.
    time : float
        Seconds since the epoch.
    host, sentence : str
    port : int
    """

    number: int
    time: float
    host: str
    port: int
    sentence: str


class SessionRecord(msgspec.Struct):
    """Record that a later owner needs to adopt a sandbox; kept beside the sandbox's own state."""

    id: str
    owner: str
    request: SandboxRequest
    created: float
    idle_timeout: float
    max_life: float
    labels: dict[str, str]
    #: Digest of the whole request, because the record does not contain the request's files.
    digest: str = ""
    asks: list[AskInfo] = []
    #: Seconds for which the files are kept after an unintended end. The sweeper reads this field.
    keep_ended_for: float = 0.0
    end: End | None = None


class ManagedSandbox:
    """A sandbox with an owner, rules and a time to live.

    Parameters
    ----------
    sandbox_id : str
        The owner's name for it.
    owner : str
        Name of the owner.
    request : SandboxRequest
        The request that created it.
    idle_timeout, max_life : float or None
        Seconds. None if this service does not end the sandbox.

    Attributes
    ----------
    sandbox : Sandbox or None
        None until it has started. An ended sandbox keeps its value.
    uses : int
        Number of calls in progress.
    parked : str or None
        Id of its snapshot while it is parked.
    keep_ended_for : float
        Seconds for which its files are kept after an unintended end. 0 means that they are not kept.
    lost : str or None
        Name of its directory, if its record is damaged.
    """

    def __init__(
        self,
        sandbox_id: str,
        owner: str,
        request: SandboxRequest,
        *,
        idle_timeout: float | None = None,
        max_life: float | None = None,
        kind: Literal["session", "notebook"] = "session",
    ) -> None:
        self.id = sandbox_id
        self.owner = owner
        self.request = request
        self.idle_timeout = idle_timeout
        self.max_life = max_life
        self.kind = kind
        self.labels = dict(request.labels)
        self.created = self.last_used = time.time()
        self.sandbox: Sandbox | None = None
        self.spec: SandboxSpec | None = None
        self.end: End | None = None
        self.ended_at = 0.0
        self.keep_ended_for = 0.0
        self.uses = 0
        self.blocked_commands: tuple[str, ...] = tuple(request.blocked_commands)
        self.starting: asyncio.Task[None] | None = None
        self.parked: str | None = None
        self.lost: str | None = None
        #: Ids that it had, the current sandbox last. A token's scope refers to one of them.
        self.previous_ids: deque[str] = deque(maxlen=MAX_PREVIOUS_IDS)
        self.asks: dict[str, AskInfo] = {}
        #: Tool calls in progress. May be accessed from any thread.
        self.calls: dict[object, CallInfo] = {}
        self._refusals: deque[Refusal] = deque(maxlen=MAX_REFUSALS)
        self._refused = 0
        self._digest = ""
        self._folder: Folder | None = None
        self.quota: int | None = None
        self.quota_setting = "Policy.max_disk"

    # -- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """State: ``starting``, ``running``, ``parked`` or ``ended``."""
        if self.end is not None or (self.sandbox is not None and self.sandbox.end is not None):
            return "ended"
        if self.parked is not None:
            return "parked"
        return "running" if self.sandbox is not None and self.starting is None else "starting"

    @property
    def kept_until(self) -> float | None:
        """Time until which its files are kept, in seconds since the epoch; None if it runs or they are not kept."""
        end = self.end or (self.sandbox.end if self.sandbox is not None else None)
        if end is None or end.cause in INTENDED or self.sandbox is None or not self.keep_ended_for:
            return None
        until = (self.ended_at or time.time()) + self.keep_ended_for
        return until if self.max_life is None else min(until, self.created + self.max_life)

    @property
    def _shown_state(self) -> SandboxState:
        if self.lost is not None:
            return "lost"
        return "unknown" if self.state == "running" and not self.is_reachable else self.state

    @property
    def is_reachable(self) -> bool:
        """Whether the runtime responds. If it does not, the state of the sandbox is unknown."""
        return self.sandbox is None or self.sandbox.runtime.is_reachable()

    @property
    def tools(self) -> list[str]:
        """The tools that may be used on it."""
        return list(TOOLS) if self.request.tools is None else list(self.request.tools)

    @property
    def key(self) -> tuple[str, str]:
        """Owner and id. Ids are scoped to the owner, so that owners cannot learn which ids others use."""
        return self.owner, self.id

    def info(self) -> SandboxInfo:
        """Return a description of the sandbox for the API."""
        sandbox, spec = self.sandbox, self.spec
        end = self.end or (sandbox.end if sandbox is not None else None)
        request = self.request
        workspace: Literal["private", "folder", "tenant"] = "tenant" if request.tenant else "private"
        if self.kind == "notebook" and spec is not None and spec.workspace is not None:
            workspace = "folder"
        return SandboxInfo(
            id=self.id,
            sandbox_id=sandbox.id if sandbox is not None else self.lost,
            kind=self.kind,
            owner=self.owner,
            profile=spec.profile if spec is not None else request.profile or "",
            state=self._shown_state,
            end=self._end_info(end) if end is not None else None,
            created=self.created,
            last_used=self.last_used,
            idle_timeout=self.idle_timeout,
            max_life=self.max_life,
            limits=_limits_info(spec.limits) if spec is not None else None,
            allowed_hosts=list(sandbox.gate.grant.all_hosts) if sandbox is not None else [],
            kernels=list(self._kernels()),
            workspace=workspace,
            workspace_notice=spec.workspace_notice if spec is not None else "",
            suggested_folder=spec.suggested_folder if spec is not None else "",
            tenant=request.tenant,
            tools=self.tools,
            blocked_commands=list(self.blocked_commands),
            workdir=request.workdir,
            ports=list(request.ports),
            labels=self.labels,
            runtime=spec.runtime if spec is not None else "",
            isolation=sandbox.runtime.isolation if sandbox is not None else "gvisor",
            image=spec.image if spec is not None else "",
            languages=list(list_languages(spec.kernels)) if spec is not None else [],
            usage=self._usage(),
            calls=list(self.calls.values()),
        )

    def _usage(self) -> UsageInfo | None:
        measured = self.sandbox.measured if self.sandbox is not None and self.state == "running" else None
        if measured is None:
            return None
        when, usage = measured
        return UsageInfo(usage.memory, usage.cpu, usage.disk, when)

    def _end_info(self, end: End) -> EndInfo:
        return EndInfo(
            end.cause.value, end.exit_code, end.message, end.setting, self.ended_at or time.time(), self.kept_until
        )

    def _kernels(self) -> Iterator[KernelInfo]:
        if self.parked is not None and self.kind == "notebook" and self.spec is not None:
            yield KernelInfo(self.spec.kernel_id, "parked")
        for name, kernel in self.sandbox.kernels.items() if self.sandbox is not None else ():
            state: State = "ended" if kernel.end is not None else "running" if kernel.is_ready else "starting"
            assert self.spec is not None
            yield KernelInfo(self.spec.kernel_id or name, state)

    # -- use -----------------------------------------------------------------------------------

    def check_tool(self, tool: str | None) -> None:
        """Refuse a tool that is not in the sandbox's list of tools. Raises PolicyRefused."""
        if tool is not None and tool not in self.tools:
            raise PolicyRefused(
                f"the tool {tool!r} is not allowed in this sandbox (allowed: {', '.join(self.tools) or 'none'})",
                setting="tools of the sandbox's request",
            )

    def restrict(self, blocked_commands: Sequence[str]) -> None:
        """Block the commands that policy blocks, in addition to those that the sandbox's own request blocks."""
        self.blocked_commands = tuple(dict.fromkeys((*blocked_commands, *self.request.blocked_commands)))

    def running(self) -> Sandbox:
        """Return the running sandbox. Raises SandboxEnded, Conflict."""
        end = self.end or (self.sandbox.end if self.sandbox is not None else None)
        if end is not None:
            raise SandboxEnded(end, self.remedy())
        if self.sandbox is None:
            raise Conflict(f"sandbox {self.id!r} is {'parked' if self.parked is not None else 'still starting'}")
        return self.sandbox

    def remedy(self) -> str:
        """Return a sentence on how to recover from its end; empty if recovery is impossible."""
        until = self.kept_until
        if until is None:
            return ""
        at = time.strftime("%H:%M:%S UTC", time.gmtime(until))
        return f"Its files are kept until {at}; revive it to continue with them"

    def begin(self) -> None:
        """Record that a call has begun."""
        self.uses += 1
        self.touch()

    def done(self) -> None:
        """Record that a call has ended."""
        self.uses -= 1
        self.touch()

    def touch(self) -> None:
        """Set the time of last use to now."""
        self.last_used = time.time()

    def overdue(self) -> str | None:
        """Return which limit has expired, ``idle_timeout`` or ``max_life``, or None."""
        now = time.time()
        if self.max_life is not None and now - self.created > self.max_life:
            return "max_life"
        if self.idle_timeout is not None and not self.uses and now - self.last_used > self.idle_timeout:
            return "idle_timeout"
        return None

    def folder(self) -> Folder:
        """Return its workspace for file operations. Blocks briefly. May be called from any thread."""
        sandbox = self.running()
        if self._folder is None:
            # The classes of names apply to a folder that existed before. In its own workspace, any name is allowed.
            is_own = sandbox.spec.workspace is None or bool(self.request.tenant)
            self._folder = Folder(
                sandbox.workspace,
                () if is_own else sandbox.spec.hidden,
                self.quota,
                read_only=() if is_own else sandbox.spec.read_only,
                quota_setting=self.quota_setting,
                held=lambda: sandbox.measured[1].held if sandbox.measured is not None else 0,
                free=lambda: sandbox.free_space.room(),
            )
        return self._folder

    def write_files(self) -> None:
        """Write the files of its request to the workspace. Blocks. Raises AgentboxError."""
        folder = self.folder()
        for path, content in self.request.files.items():
            data = content.encode() if isinstance(content, str) else content.base64
            try:
                folder.write(path, data, parents=True)
            except AgentboxError as error:
                error.field = "files"
                raise

    def close(self) -> None:
        """Release its resources on the host."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    # -- the gate ------------------------------------------------------------------------------

    def attach(self, sandbox: Sandbox) -> None:
        """Set its sandbox, and record the gate's refusals. An existing refusal callback stays in effect."""
        self.sandbox = sandbox
        self.spec = sandbox.spec
        self.previous_ids.append(sandbox.id)
        if self.kind == "session" and self.request.tenant is None:
            self.quota = sandbox.spec.limits.disk
        previous_callback = sandbox.gate.on_refusal

        def on_refusal(host: str, port: int, sentence: str) -> None:
            self._refused += 1
            self._refusals.append(Refusal(self._refused, time.time(), host, port, sentence))
            if previous_callback is not None:
                previous_callback(host, port, sentence)

        sandbox.gate.on_refusal = on_refusal

    def mark_parked(self, parked: ParkedKernel | None) -> None:
        """Record that a notebook's kernel was parked. Does nothing if `parked` is None: the kernel is awake again."""
        if parked is not None:
            self.close()
            self.sandbox, self.spec, self.parked = None, parked.spec, parked.snapshot_id
            self.previous_ids.append(parked.snapshot_id)

    def move_to(self, sandbox: Sandbox) -> None:
        """Record that a notebook's kernel was restored in another sandbox."""
        self.close()
        self.id, self.created, self.parked, self.end = sandbox.id, sandbox.record.created, None, None
        self.recall([msgspec.to_builtins(item) for item in self.asks.values()])
        self.attach(sandbox)

    @property
    def refusal_count(self) -> int:
        """Number of refusals so far, for the parameter of :meth:`refusals`."""
        return self._refused

    def refusals(self, after: int = 0) -> list[Refusal]:
        """Return the gate's refusals after the first `after`, without duplicates. May be called from any thread."""
        found = {(item.host, item.port): item for item in list(self._refusals) if item.number > after}
        return list(found.values())

    def ask(self, host: str, why: str) -> AskInfo:
        """Record a request for a host, or return the request for it that is pending already."""
        for known in self.asks.values():
            if known.host == host and known.state == "pending":
                return known
        if len(self.asks) >= MAX_ASKS:
            oldest = next((key for key, item in self.asks.items() if item.state != "pending"), None)
            if oldest is None:
                raise Conflict(f"this sandbox has {MAX_ASKS} pending host requests, the maximum; wait for a decision")
            del self.asks[oldest]
        item = AskInfo(id=secrets.token_hex(6), sandbox=self.id, host=host, why=why, state="pending", asked=time.time())
        self.asks[item.id] = item
        return item

    def recall(self, asks: Sequence[dict[str, Any]]) -> None:
        """Take over the host requests of the previous sandbox of a notebook."""
        with suppress(msgspec.ValidationError):  # written by another release
            found = msgspec.convert(list(asks)[-MAX_ASKS:], list[AskInfo])
            self.asks = {item.id: msgspec.structs.replace(item, sandbox=self.id) for item in found}

    def pending(self, ask_id: str) -> AskInfo:
        """Return a pending host request. Raises NotFound, Conflict."""
        item = self.asks.get(ask_id)
        if item is None:
            raise NotFound(f"host request {ask_id[:64]!r} does not exist")
        if item.state != "pending":
            raise Conflict(f"the host request was already {item.state} by {item.decided_by}")
        return item

    # -- record --------------------------------------------------------------------------------

    def is_asked_for_by(self, request: SandboxRequest) -> bool:
        """Return whether `request` equals the request that created it. Blocks briefly: it may contain files."""
        return self._digest == digest_of(request) if self._digest else self.request == request

    @property
    def record(self) -> SessionRecord:
        """Record that a later owner needs."""
        assert self.idle_timeout is not None
        assert self.max_life is not None
        return SessionRecord(
            id=self.id,
            owner=self.owner,
            request=msgspec.structs.replace(self.request, files={}),
            created=self.created,
            idle_timeout=self.idle_timeout,
            max_life=self.max_life,
            labels=self.labels,
            digest=self._digest,
            asks=list(self.asks.values()),
            keep_ended_for=self.keep_ended_for,
            end=self.end,
        )

    def save(self, directory: Path | None = None) -> None:
        """Write the record to the sandbox's directory, or to `directory`. Blocks briefly."""
        if directory is None:
            assert self.sandbox is not None
            directory = self.sandbox.directory
        self._digest = self._digest or digest_of(self.request)
        write_atomically(directory / SESSION_FILE, msgspec.json.encode(self.record))

    @classmethod
    def load(cls, directory: Path) -> ManagedSandbox:
        """Read the record that an earlier owner wrote. Raises NotFound."""
        try:
            record = msgspec.json.decode((directory / SESSION_FILE).read_bytes(), type=SessionRecord)
        except (OSError, ValueError, RecursionError) as error:
            raise NotFound(f"the record {SESSION_FILE} of sandbox {directory.name} cannot be read: {error}") from None
        return cls.of(record)

    @classmethod
    def of(cls, record: SessionRecord) -> ManagedSandbox:
        """Create a managed sandbox from a record."""
        managed = cls(
            record.id, record.owner, record.request, idle_timeout=record.idle_timeout, max_life=record.max_life
        )
        managed.created, managed.labels, managed._digest = record.created, record.labels, record.digest
        managed.asks = {item.id: item for item in record.asks[-MAX_ASKS:]}
        managed.keep_ended_for, managed.end = record.keep_ended_for, record.end
        return managed


def _limits_info(limits: Limits) -> LimitsInfo:
    return LimitsInfo(limits.memory, limits.cpus, limits.processes, limits.disk)


def digest_of(request: SandboxRequest) -> str:
    """Return a digest of the complete request, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(msgspec.to_builtins(request), sort_keys=True).encode()).hexdigest()


def check_request(request: SandboxRequest) -> None:
    """Check the parts of a request that its struct cannot validate. Raises InvalidRequest."""
    for tool in request.tools or ():
        if tool not in TOOLS:
            raise InvalidRequest(f"{tool[:100]!r} is not a tool; tools are {', '.join(TOOLS)}", field="tools")
    if "\0" in request.workdir:
        raise InvalidRequest("workdir must not contain a NUL character", field="workdir")
    for name, value in request.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise InvalidRequest(f"{name[:100]!r} is not a valid environment variable", field="env")
