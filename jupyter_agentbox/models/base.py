"""What all bodies and answers share."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

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
    "snapshot": "Save the sandbox as it is, kernels and all.",
    "restore": "Take the sandbox back to a snapshot.",
    "fork": "Start another sandbox off this one or off a snapshot.",
    "http_request": "Send one HTTP request through the egress gate.",
}

State = Literal["starting", "running", "parked", "ended"]
#: The state if the runtime does not respond, and if the record on disk is damaged.
SandboxState = Literal["starting", "running", "parked", "ended", "unknown", "lost"]


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
