"""Map errors to HTTP status codes and reasons. No other module does."""

from __future__ import annotations

import asyncio
import errno
import re

import msgspec

from jupyter_agentbox.errors import (
    AgentboxError,
    Conflict,
    Damaged,
    DiskFull,
    InvalidConfig,
    InvalidRequest,
    LimitReached,
    LinkClosed,
    NotAuthenticated,
    NotAuthorized,
    NotFound,
    PolicyRefused,
    RuntimeFailed,
    RuntimeUnavailable,
    SandboxEnded,
    TooLarge,
)
from jupyter_agentbox.models import ErrorAnswer

_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (InvalidRequest, 400, "invalid_request"),
    (NotAuthenticated, 401, "unauthenticated"),
    (NotAuthorized, 403, "forbidden"),
    (PolicyRefused, 403, "policy_refused"),
    (NotFound, 404, "not_found"),
    (Conflict, 409, "conflict"),
    (Damaged, 409, "damaged"),
    (SandboxEnded, 410, "sandbox_ended"),
    (TooLarge, 413, "too_large"),
    (LimitReached, 429, "limit_reached"),
    (LinkClosed, 502, "link_closed"),
    (RuntimeFailed, 502, "runtime_failed"),
    (RuntimeUnavailable, 503, "runtime_unavailable"),
    (InvalidConfig, 503, "invalid_config"),
    (TimeoutError, 504, "timeout"),
    (asyncio.TimeoutError, 504, "timeout"),
    (DiskFull, 507, "disk_full"),
)

#: Resources that the server's machine can run out of, with the solution.
_EXHAUSTED = {
    errno.EROFS: "its disk is read-only. Mount it writable, or set Policy.state_dir",
    errno.EMFILE: "the server has too many open files. Raise its limit (`ulimit -n`), or end some sandboxes",
    errno.ENFILE: "the machine has too many open files. Raise fs.file-max, or end some sandboxes",
    errno.ENOMEM: "its memory is full. End some sandboxes",
}

#: Reason for a status that Tornado or Jupyter has chosen.
REASONS = {
    400: "invalid_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
}

_AT = re.compile(r"^(.*) - at `(key in )?\$\.?([^`]*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING = re.compile(r"Object missing required field `([^`]*)`")


def describe(error: BaseException) -> tuple[int, ErrorAnswer]:
    """Return the status and body for an error. An unexpected error becomes a 500 that reveals nothing."""
    for kind, status, reason in _KINDS:
        if isinstance(error, kind):
            field = getattr(error, "field", None)
            return status, ErrorAnswer(str(error), reason, field, getattr(error, "setting", None))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = "the server's disk is full. Free some space on it, or set Policy.state_dir to another disk"
        return 507, ErrorAnswer(message, "disk_full", setting="Policy.state_dir")
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        return 503, ErrorAnswer(f"the server's machine cannot do this: {_EXHAUSTED[error.errno]}", "unavailable")
    if isinstance(error, AgentboxError):
        return 503, ErrorAnswer(str(error), "unavailable", error.field, error.setting)
    return 500, ErrorAnswer("internal server error; see the server's log", "internal_error")


def invalid(error: msgspec.MsgspecError, where: str) -> InvalidRequest:
    """Convert a msgspec error about a body or query into a sentence that names the field."""
    text, field = str(error), ""
    if at := _AT.match(text):
        text, field = at[1], re.sub(r"\[(\d+|\.\.\.)?\]", "", at[3])
    for pattern in (_UNKNOWN, _MISSING):
        if found := pattern.search(text):
            field = f"{field}.{found[1]}" if field else found[1]
    text = text[:500].rstrip(".")
    return InvalidRequest(f"{where}: {text}" + (f" (field {field!r})" if field else ""), field=field or None)
