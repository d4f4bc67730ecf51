"""Define the client's errors, one class for each reason of the API.

Each class has the name of the corresponding error in :mod:`jupyter_agentbox.errors` and derives from it, so either can
be caught. All of them are :class:`ApiError` and carry the answer's message::

    ApiError
    ├── one for each reason of the API: NotFound, PolicyRefused, SandboxEnded, ...
    ├── Unreachable           no answer was received: no server is running, or the connection failed
    ├── UnexpectedAnswer      the answer is not from this API, or was cut off
    ├── ChecksumMismatch      the received bytes do not have the expected checksum
    └── CommandFailed         a command run with ``check=True`` exited with a status other than 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jupyter_agentbox import errors
from jupyter_agentbox.models import ErrorAnswer

if TYPE_CHECKING:
    from jupyter_agentbox.models import ExecAnswer


class ApiError(errors.AgentboxError):
    """A call failed.

    Parameters
    ----------
    message : str
        Sentence for a person.
    status : int
        HTTP status of the answer; 0 without an answer, 200 for a stream that failed midway.
    reason : str
        Reason code of the API, such as ``not_found``.
    field : str, optional
        Invalid field of the request.
    setting : str, optional
        Administrator's setting that controls the refused behaviour.
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
    """The token does not permit this call."""


class PolicyRefused(ApiError, errors.PolicyRefused):
    """The administrator's policy does not allow the request; ``setting`` names the setting that would."""


class NotFound(ApiError, errors.NotFound):
    """The object does not exist or belongs to another owner."""


class Conflict(ApiError, errors.Conflict):
    """The request conflicts with the current state."""


class SandboxEnded(ApiError):
    """The sandbox has ended. The message says why, and ``end`` in the sandbox's description has the cause."""


class TooLarge(ApiError, errors.TooLarge):
    """The request exceeds a limit on bytes or entries."""


class LimitReached(ApiError, errors.LimitReached):
    """The maximum number of sandboxes is reached."""


class LinkClosed(ApiError, errors.LinkClosed):
    """The sandbox ended or failed during the call."""


class RuntimeFailed(ApiError, errors.RuntimeFailed):
    """The runtime failed or did not answer in time."""


class RuntimeUnavailable(ApiError, errors.RuntimeUnavailable):
    """The server's machine cannot run isolated sandboxes in its present state."""


class InvalidConfig(ApiError, errors.InvalidConfig):
    """A setting of the server is invalid."""


class TimedOut(ApiError, TimeoutError):
    """The server, or an operation that it waited for, exceeded its timeout."""


class Unreachable(ApiError):
    """No answer was received. The call may have been carried out. It is not sent again."""


class UnexpectedAnswer(ApiError):
    """The answer is not from this API, or was cut off."""


class ChecksumMismatch(ApiError):
    """The received bytes do not have the expected checksum; no file was created."""


class CommandFailed(ApiError):
    """A command exited with a status other than 0.

    Parameters
    ----------
    result : ExecAnswer
        Result of the command.
    """

    def __init__(self, result: ExecAnswer) -> None:
        last = next((line for line in reversed(result.stderr.splitlines()) if line.strip()), "")
        state = "did not end in time" if result.timed_out else f"exited with status {result.exit_code}"
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
    """Return the error for an error answer of the API."""
    kind = REASONS.get(answer.reason, ApiError)
    return kind(answer.message, status=status, reason=answer.reason, field=answer.field, setting=answer.setting)
