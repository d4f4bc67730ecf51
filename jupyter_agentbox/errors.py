"""Every error of the package. Only the REST handlers map them to HTTP.

The tree::

    AgentboxError
    ├── InvalidRequest        the caller's value is wrong; names the field
    ├── NotAuthenticated      the token is none, has expired or was revoked
    ├── NotAuthorized         the caller has not the right; asking for it is another matter
    ├── PolicyRefused         the value is well-formed, policy does not allow it; names the setting
    ├── InvalidConfig         a setting of the administrator's is wrong; names the setting
    ├── RuntimeUnavailable    the runtime is missing, too old or unusable here; says how to get it
    ├── RuntimeFailed         the runtime was asked and failed or did not answer in time
    ├── SandboxEnded          the sandbox is gone; carries its :class:`~jupyter_agentbox.spec.End`
    ├── LinkClosed            the link or one of its streams ended under an operation
    ├── NotFound              no such sandbox, kernel or file
    ├── Conflict              what is there already, or its state, stands against the request
    ├── TooLarge              the request asks for, or would store, more than a limit; names the limit
    ├── Damaged               what was stored is not what was written; it is not used
    ├── DiskFull              the server's disk has no room for what was asked for
    └── LimitReached          there are as many sandboxes as there may be at a time; later is another matter
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import End


class AgentboxError(Exception):
    """Base of all errors of this package.

    Parameters
    ----------
    message : str
        One sentence for a person: what happened and what to do about it.
    field : str, optional
        The field of the request whose value is at fault.
    setting : str, optional
        The configuration setting that changes the outcome, such as ``Policy.allowed_hosts``.

    Attributes
    ----------
    is_logged : bool
        The audit log tells of it already.
    retry_after : int or None
        Seconds after which the same call is worth another try.
    """

    is_logged = False
    retry_after: int | None = None

    def __init__(self, message: str, *, field: str | None = None, setting: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.setting = setting


class InvalidRequest(AgentboxError):
    """A value of the request is malformed or unknown."""


class NotAuthenticated(AgentboxError):
    """Nobody knows who calls: the token is malformed, expired or revoked."""


class NotAuthorized(AgentboxError):
    """It is known who calls, and the caller has not the right to it."""


class PolicyRefused(AgentboxError):
    """The request is well-formed, and the administrator's policy does not allow it."""


class InvalidConfig(AgentboxError):
    """A setting is malformed, unknown or contradicts another: nothing starts until it is mended."""


class RuntimeUnavailable(AgentboxError):
    """The runtime cannot isolate anything on this machine as it is."""


class RuntimeFailed(AgentboxError):
    """The runtime failed at an operation, or did not answer within its timeout."""


class LinkClosed(AgentboxError):
    """The link to the guest, or one stream on it, ended before the operation was done."""


class NotFound(AgentboxError):
    """There is no such thing, or it is not the caller's to see."""


class Conflict(AgentboxError):
    """The request is sound, but what is there already stands against it: it exists, is not empty, matches twice."""


class TooLarge(AgentboxError):
    """More bytes, entries or time than a limit allows; the sentence names the limit."""


class Damaged(AgentboxError):
    """What lies on the disk, or was sent, is not what this package wrote; the sentence names the part."""


class DiskFull(AgentboxError):
    """The disk of the server's state directory is full."""


class LimitReached(AgentboxError):
    """There are as many of them as there may be at a time."""


class SandboxEnded(AgentboxError):
    """The sandbox has ended; ``end`` says why.

    Parameters
    ----------
    end : End
        Cause, exit code and a sentence for a person.
    remedy : str
        What to do about it, as another sentence.
    """

    def __init__(self, end: End, remedy: str = "") -> None:
        super().__init__(f"sandbox ended: {end.message}", setting=end.setting)
        self.end = end
        self.advise(remedy)

    def advise(self, remedy: str) -> None:
        """Say what to do about it, unless the message does already."""
        if remedy and remedy not in str(self):
            self.args = (f"{self}. {remedy}",)
