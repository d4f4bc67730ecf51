"""Bodies and answers about tokens for one sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .base import Answer, Body, Name, Seconds


class TokenRequest(Body, frozen=True):
    """What a token is to be for.

    Parameters
    ----------
    verbs : list of str
        What its holder may do in the sandbox: `read`, `write`, `execute`, and `restore`, which takes it back to one of
        its snapshots. None that its maker may not; who may `execute` may give `restore`.
    name : str
        To tell it by.
    life : float, optional
        Seconds until it expires; an hour unless given.
    """

    verbs: Annotated[list[Literal["read", "write", "execute", "restore"]], Meta(min_length=1, max_length=4)]
    name: Name = "agent"
    life: Seconds | None = None


class TokenInfo(Answer, frozen=True):
    """A token, without its text. Times are seconds since the epoch.

    Parameters
    ----------
    sandbox_id : str
        Of its sandbox, in the audit log and on the machine.
    owner, made_by : str
        Whose sandbox it is, and who made the token.
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
    """A new token. Its text is told once, and kept nowhere.

    Parameters
    ----------
    token : str
        For the header `Authorization: Bearer ...`.
    info : TokenInfo
    """

    token: str
    info: TokenInfo


class TokenList(Answer, frozen=True):
    """Tokens of a sandbox that have not expired, oldest first."""

    tokens: list[TokenInfo]
