"""Define what all request and response bodies share."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

#: A name that the caller chooses, for a sandbox or a tenant.
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)", description="Letters, digits, `.`, `_`, `-`.")
]
Label = Annotated[str, Meta(max_length=256)]
Seconds = Annotated[float, Meta(gt=0, le=31_536_000, description="Seconds.")]
HostName = Annotated[str, Meta(min_length=1, max_length=300, description="`name`, `*.name`, `name:port` or a preset.")]

#: The tools that a sandbox can allow: one name for each thing that an agent can do in a sandbox.
TOOLS: dict[str, str] = {
    "bash": "Run commands in the foreground and in the background, and send them input.",
    "terminal": "Open a terminal.",
    "run_code": "Run code in the sandbox's persistent kernels.",
    "read": "Read and download files, and read their metadata.",
    "write": "Write, append to, move, copy, delete and upload files, and create directories.",
    "edit": "Replace text in a file.",
    "list": "List directories.",
    "glob": "Find files by path pattern.",
    "grep": "Search file contents.",
    "install": "Install packages.",
    "ask_host": "Ask a person for access to a host.",
    "snapshot": "Save the state of the sandbox, including running kernels.",
    "restore": "Restore the sandbox to a snapshot.",
    "fork": "Start a new sandbox from this one or from a snapshot.",
    "http_request": "Send one HTTP request through the egress gate.",
}

State = Literal["starting", "running", "parked", "ended"]
#: `unknown` if the runtime does not respond, `lost` if the record on disk is damaged.
SandboxState = Literal["starting", "running", "parked", "ended", "unknown", "lost"]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of request bodies and queries."""


class Answer(msgspec.Struct, frozen=True):
    """Base class of response bodies."""


class ErrorAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of every error response.

    Parameters
    ----------
    message : str
        Description of the error for people.
    reason : str
        Error code for programs, such as `not_found`.
    field : str, optional
        The invalid field of the request.
    setting : str, optional
        The administrator's setting that controls this.
    """

    message: str
    reason: str
    field: str | None = None
    setting: str | None = None
