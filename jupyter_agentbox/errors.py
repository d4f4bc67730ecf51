"""The error classes of the package. Only the REST handlers map them to HTTP status codes.

The tree::

    AgentboxError
    ├── InvalidRequest        a value in the request is invalid; names the field
    ├── NotAuthenticated      the token is malformed, expired or revoked
    ├── NotAuthorized         the caller lacks the permission for this operation
    ├── PolicyRefused         the value is well-formed, but policy does not allow it; names the setting
    ├── InvalidConfig         a setting of the administrator is invalid; names the setting
    ├── RuntimeUnavailable    the runtime is missing, too old or unusable here; says how to get it
    ├── RuntimeFailed         a runtime operation failed or timed out
    ├── SandboxEnded          the sandbox has ended; carries its :class:`~jupyter_agentbox.spec.End`
    ├── LinkClosed            the link or one of its streams closed during an operation
    ├── NotFound              no such sandbox, kernel or file
    ├── Conflict              the request conflicts with what exists, or with its state
    ├── TooLarge              the request asks for, or would store, more than a limit; names the limit
    ├── Damaged               stored data differs from what was written; it is not used
    ├── DiskFull              the server's disk has too little free space
    └── LimitReached          the maximum number of sandboxes is in use; the call may succeed later
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import End


class AgentboxError(Exception):
    """Base class of all errors of this package.

    Parameters
    ----------
    message : str
        One sentence for a person: what failed and what to do about it.
    field : str, optional
        The request field whose value is invalid.
    setting : str, optional
        The configuration setting that changes the outcome, such as ``Policy.allowed_hosts``.

    Attributes
    ----------
    is_logged : bool
        Whether the audit log already records this error.
    retry_after : int or None
        Seconds to wait before the caller retries the same call; None if a retry does not help.
    """

    is_logged = False
    retry_after: int | None = None

    def __init__(self, message: str, *, field: str | None = None, setting: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.setting = setting


class InvalidRequest(AgentboxError):
    """A value in the request is malformed or unknown."""


class NotAuthenticated(AgentboxError):
    """The caller cannot be identified: the token is malformed, expired or revoked."""


class NotAuthorized(AgentboxError):
    """The caller is identified, but lacks the permission for this operation."""


class PolicyRefused(AgentboxError):
    """The request is well-formed, but the administrator's policy does not allow it."""


class InvalidConfig(AgentboxError):
    """A setting is malformed, unknown or contradicts another setting. Nothing starts until it is corrected."""


class RuntimeUnavailable(AgentboxError):
    """The runtime cannot isolate anything on this machine in its current state."""


class RuntimeFailed(AgentboxError):
    """A runtime operation failed, or did not finish within its timeout."""


class LinkClosed(AgentboxError):
    """The link to the guest, or one of its streams, closed before the operation completed."""


class NotFound(AgentboxError):
    """The object does not exist, or the caller may not see it."""


class Conflict(AgentboxError):
    """The request conflicts with existing state: the target exists, is not empty, or matches more than once."""


class TooLarge(AgentboxError):
    """The request exceeds a limit on bytes, entries or time; the message names the limit."""


class Damaged(AgentboxError):
    """Data on the disk or in a transfer is not what this package wrote; the message names the part."""


class DiskFull(AgentboxError):
    """A disk of the server is full, or has less free space than must stay free."""


class LimitReached(AgentboxError):
    """The maximum number of these objects is in use."""


class SandboxEnded(AgentboxError):
    """The sandbox has ended; ``end`` gives the reason.

    Parameters
    ----------
    end : End
        Cause, exit code and a sentence for a person.
    remedy : str
        What the caller can do about it, as another sentence.
    """

    def __init__(self, end: End, remedy: str = "") -> None:
        super().__init__(f"sandbox ended: {end.message}", setting=end.setting)
        self.end = end
        self.advise(remedy)

    def advise(self, remedy: str) -> None:
        """Append `remedy` to the message, unless the message contains it already."""
        if remedy and remedy not in str(self):
            self.args = (f"{self}. {remedy}",)
