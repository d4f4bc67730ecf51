"""Errors of the client: what the API's reasons are here.

Each reason of the API has a class of the name that the same error has in :mod:`jupyter_agentbox.errors`, and is caught
by that name, too. All of them are :class:`ApiError` and carry the answer's words::

    ApiError
    ├── one for each reason of the API: NotFound, PolicyRefused, SandboxEnded, ...
    ├── Unreachable           no answer came: there is no server, or the connection broke
    ├── UnexpectedAnswer      what answers is not this API, or its answer was cut off
    ├── ChecksumMismatch      bytes that came are not those that were expected
    └── CommandFailed         a command that was to be checked ended with another status than 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_agentbox import errors
from jupyter_agentbox.models import ErrorAnswer

if TYPE_CHECKING:
    from jupyter_agentbox.models import ExecAnswer


class ApiError(errors.AgentboxError):
    """A call did not do what it was to do.

    Parameters
    ----------
    message : str
        A sentence for a person.
    status : int
        The answer's status in HTTP; 0 where there was no answer, 200 for a stream that failed on its way.
    reason : str
        The API's word for it, such as ``not_found``.
    field : str, optional
        The field of the request that is at fault.
    setting : str, optional
        The administrator's setting that would change it.
    """

    def __init__(
        self, message: str, *, status: int = 0, reason: str = "", field: str | None = None, setting: str | None = None
    ) -> None:
        errors.AgentboxError.__init__(self, message, field=field, setting=setting)
        self.status = status
        self.reason = reason


class InvalidRequest(ApiError, errors.InvalidRequest):
    """A value is malformed or unknown; ``field`` names it."""


class NotAuthenticated(ApiError, errors.NotAuthenticated):
    """The token is missing, wrong, expired or revoked."""


class NotAuthorized(ApiError, errors.NotAuthorized):
    """The token does not give the right to this."""


class PolicyRefused(ApiError, errors.PolicyRefused):
    """The administrator's policy does not allow it; ``setting`` names what does."""


class NotFound(ApiError, errors.NotFound):
    """There is no such thing, or it is another owner's."""


class Conflict(ApiError, errors.Conflict):
    """What is there already stands against it."""


class SandboxEnded(ApiError):
    """The sandbox has ended; the message says why, and ``end`` in what describes it has the cause."""


class TooLarge(ApiError, errors.TooLarge):
    """More bytes or entries than a limit allows."""


class LimitReached(ApiError, errors.LimitReached):
    """There are as many sandboxes as there may be."""


class LinkClosed(ApiError, errors.LinkClosed):
    """The sandbox ended or broke under the call."""


class RuntimeFailed(ApiError, errors.RuntimeFailed):
    """The runtime failed or did not answer in time."""


class RuntimeUnavailable(ApiError, errors.RuntimeUnavailable):
    """The server's machine cannot isolate anything as it is."""


class InvalidConfig(ApiError, errors.InvalidConfig):
    """A setting of the server's is wrong."""


class TimedOut(ApiError, TimeoutError):
    """The server, or what it waited for, took longer than it may."""


class Unreachable(ApiError):
    """No answer came. Whether the call was carried out is not known, and nothing is sent again."""


class UnexpectedAnswer(ApiError):
    """What answered is not this API, or the answer was cut off."""


class ChecksumMismatch(ApiError):
    """The bytes that came are not those that were expected; no file was made of them."""


class CommandFailed(ApiError):
    """A command ended with another status than 0.

    Parameters
    ----------
    result : ExecAnswer
        What it gave.
    """

    def __init__(self, result: ExecAnswer) -> None:
        last = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "")
        state = "did not end in time" if result.timed_out else f"ended with status {result.exit_code}"
        super().__init__(f"the command {state}" + (f": {last[:500]}" if last else ""), status=200)
        self.result = result


REASONS: dict[str, type[ApiError]] = {
    "invalid_request": InvalidRequest,
    "unauthenticated": NotAuthenticated,
    "forbidden": NotAuthorized,
    "policy_refused": PolicyRefused,
    "not_found": NotFound,
    "conflict": Conflict,
    "damaged": Conflict,
    "sandbox_ended": SandboxEnded,
    "too_large": TooLarge,
    "limit_reached": LimitReached,
    "link_closed": LinkClosed,
    "runtime_failed": RuntimeFailed,
    "runtime_unavailable": RuntimeUnavailable,
    "invalid_config": InvalidConfig,
    "timeout": TimedOut,
}


def make_error(answer: ErrorAnswer, status: int) -> ApiError:
    """Return the error that an answer of the API stands for."""
    kind = REASONS.get(answer.reason, ApiError)
    return kind(answer.message, status=status, reason=answer.reason, field=answer.field, setting=answer.setting)
