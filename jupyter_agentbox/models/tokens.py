"""Define the request and response bodies for tokens for one sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body, Name, Seconds


class TokenRequest(Body, frozen=True):
    """A token to create.

    Parameters
    ----------
    verbs : list of str
        What the token permits: `read`, `write`, `execute`, and `restore` to restore the sandbox's snapshots. Callers
        can give only their own rights. A caller with the right to `execute` can also give `restore`.
    name : str
        Name of the token.
    life : float, optional
        Lifetime in seconds; one hour by default.
    """

    verbs: Annotated[list[Literal["read", "write", "execute", "restore"]], Meta(min_length=1, max_length=4)]
    name: Name = "agent"
    life: Seconds | None = None


class TokenInfo(Answer, frozen=True):
    """A token, without its secret. Times are seconds since the epoch.

    Parameters
    ----------
    sandbox_id : str
        Id of its sandbox in the audit log and on the host.
    owner : str
        Owner of the sandbox.
    made_by : str
        Creator of the token.
    """

    id: str
    name: str
    sandbox_id: str
    owner: str
    verbs: list[Literal["read", "write", "execute", "restore"]]
    created: float
    expires: float
    made_by: str


class TokenMade(Answer, frozen=True):
    """A new token. Its secret is returned only once and is not stored.

    Parameters
    ----------
    token : str
        Value for the header `Authorization: Bearer ...`.
    info : TokenInfo
    """

    token: str
    info: TokenInfo


class TokenList(Answer, frozen=True):
    """Tokens of a sandbox that have not expired, oldest first."""

    tokens: list[TokenInfo]
