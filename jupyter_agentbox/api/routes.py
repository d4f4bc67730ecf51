"""The one table of everything the REST API does.

Each operation is a coroutine function with a :func:`route` above it, which says where it stands, what it takes and what
it answers. Tornado's handlers, the checks of bodies, the OpenAPI document and the tests are all made from the table.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from jupyter_agentbox.sandbox.tokens import Verb

if TYPE_CHECKING:
    from .call import Call

#: What an operation is as an HTTP exchange: JSON both ways, server-sent events out, bytes out, or bytes in.
Kind = Literal["json", "events", "download", "upload"]
Operation = TypeVar("Operation", bound=Callable[..., Any])

#: Statuses that any operation may answer, beside those of its own.
COMMON_ERRORS = (400, 401, 403, 500, 503, 507)
#: Statuses that any operation on one sandbox may answer; 429, 504: what is parked may not wake.
SANDBOX_ERRORS = (404, 409, 410, 429, 502, 504)


@dataclass(frozen=True)
class Route:
    """One operation.

    Parameters
    ----------
    verb, path : str
        ``get``, and a path beneath the API's root with parameters in braces.
    operation : coroutine function
        Does it. Takes a :class:`~jupyter_agentbox.api.call.Call`.
    action : str
        What Jupyter's authorizer is asked for on the resource ``agentbox``: ``read``, ``write`` or ``execute``.
    query, body : type, optional
        Structs of what comes in.
    answer : type, optional
        Struct of what goes out; of events, a mapping of their names to structs.
    kind : str
    status : int
        Of success.
    errors : tuple of int
        Statuses of failures that are its own.
    tool : str, optional
        The tool of :data:`~jupyter_agentbox.models.TOOLS` that it is.
    is_poll : bool
        It only looks, and keeps neither the server nor the sandbox awake.
    max_body : int
        Bytes of a JSON body.
    is_open : bool
        Any token for one sandbox may call it, though it is of none: it tells nothing of sandboxes.
    token_verb : str, optional
        The verb of tokens that it takes, where that is not the action.
    is_owners : bool
        No token for one sandbox may call it: it changes the terms that the sandbox is under.
    """

    verb: str
    path: str
    operation: Callable[[Call], Awaitable[Any]]
    action: Literal["read", "write", "execute"]
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    answer: Any = None
    kind: Kind = "json"
    status: int = 200
    errors: tuple[int, ...] = ()
    tool: str | None = None
    is_poll: bool = False
    max_body: int = 1024 * 1024
    is_open: bool = False
    token_verb: Verb | None = None
    is_owners: bool = False

    @property
    def right(self) -> Verb:
        """What :func:`~jupyter_agentbox.api.identity.is_allowed` is asked for it."""
        return self.token_verb or self.action

    @property
    def takes_scope(self) -> bool:
        """Whether a token for one sandbox may call it, for that sandbox and its own verbs."""
        if self.is_open:
            return True
        return self.path.startswith("/sandboxes/{id}") and not self.is_owners

    @property
    def name(self) -> str:
        """Its name in the OpenAPI document."""
        return self.operation.__name__

    @property
    def summary(self) -> str:
        """One line for people."""
        return (self.operation.__doc__ or "").strip().partition("\n")[0].rstrip(".")

    @property
    def description(self) -> str:
        """The rest of what is to be said."""
        rest = (self.operation.__doc__ or "").strip().partition("\n")[2]
        return "\n".join(line.strip() for line in rest.strip().splitlines())

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters in its path."""
        return re.findall(r"{(\w+)}", self.path)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status that it may answer."""
        found = {self.status, *COMMON_ERRORS, *self.errors}
        if self.path.startswith("/sandboxes/{id}"):
            found.update(SANDBOX_ERRORS)
        if self.body is not None or self.kind == "upload":
            found.add(413)
        return tuple(sorted(found))


TABLE: list[Route] = []


def route(
    verb: str, path: str, action: Literal["read", "write", "execute"], **options: Any
) -> Callable[[Operation], Operation]:
    """Put an operation into the table; see :class:`Route`."""

    def add(operation: Operation) -> Operation:
        TABLE.append(Route(verb.lower(), path, operation, action, **options))
        return operation

    return add


#: What an operation of kind ``events`` returns. The first of all is :data:`READY`.
EventStream = AsyncIterator[tuple[str, msgspec.Struct | None]]
#: Said when all is judged and begun: what fails before it is an answer with a status of its own.
READY: tuple[str, None] = ("", None)
