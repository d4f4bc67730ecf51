"""Define the table of all REST operations.

Each operation is a coroutine function with a :func:`route` decorator, which gives its path, input and output. Tornado's
handlers, the validation of bodies, the OpenAPI document and the tests are all derived from the table.
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

#: Kind of an operation's HTTP exchange: JSON both ways, server-sent events out, bytes out, or bytes in.
Kind = Literal["json", "events", "download", "upload"]
Operation = TypeVar("Operation", bound=Callable[..., Any])

#: Statuses that any operation may return, in addition to its own.
COMMON_ERRORS = (400, 401, 403, 500, 503, 507)
#: Statuses that any operation on one sandbox may return; 429 and 504 if a parked sandbox does not wake.
SANDBOX_ERRORS = (404, 409, 410, 429, 502, 504)


@dataclass(frozen=True)
class Route:
    """One operation of the API.

    Parameters
    ----------
    verb, path : str
        ``get`` and so on, and a path below the API's root with parameters in braces.
    operation : coroutine function
        The function. Takes a :class:`~jupyter_agentbox.api.call.Call`.
    action : str
        The action on the resource ``agentbox`` that Jupyter's authorizer checks: ``read``, ``write`` or ``execute``.
    query, body : type, optional
        Structs of the input.
    answer : type, optional
        Struct of the output; for events, a mapping of their names to structs.
    kind : str
    status : int
        Status on success.
    errors : tuple of int
        Statuses of failures, in addition to the common ones.
    tool : str, optional
        The corresponding tool of :data:`~jupyter_agentbox.models.TOOLS`.
    is_poll : bool
        Whether it only reads, and keeps neither the server nor the sandbox from being idle.
    max_body : int
        Maximum size of a JSON body in bytes.
    is_open : bool
        Whether any scoped token may call it, because it reveals nothing about sandboxes.
    token_verb : str, optional
        The verb of tokens that it requires, if that differs from the action.
    is_owners : bool
        Whether scoped tokens may not call it, because it changes permissions or creates sandboxes.
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
        """The right to check with :func:`~jupyter_agentbox.api.identity.is_allowed`."""
        return self.token_verb or self.action

    @property
    def takes_scope(self) -> bool:
        """Whether a scoped token may call it for its own sandbox, within its verbs."""
        if self.is_open:
            return True
        return self.path.startswith("/sandboxes/{id}") and not self.is_owners

    @property
    def name(self) -> str:
        """The operation id in the OpenAPI document."""
        return self.operation.__name__

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.operation.__doc__ or "").strip().partition("\n")[0].rstrip(".")

    @property
    def description(self) -> str:
        """The rest of the docstring."""
        rest = (self.operation.__doc__ or "").strip().partition("\n")[2]
        return "\n".join(line.strip() for line in rest.strip().splitlines())

    @property
    def parameters(self) -> list[str]:
        """Names of the path parameters."""
        return re.findall(r"{(\w+)}", self.path)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status that it may return."""
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
    """Add an operation to the table; see :class:`Route`."""

    def add(operation: Operation) -> Operation:
        TABLE.append(Route(verb.lower(), path, operation, action, **options))
        return operation

    return add


#: The result of an operation of kind ``events``. The first item is always :data:`READY`.
EventStream = AsyncIterator[tuple[str, msgspec.Struct | None]]
#: Yielded when all checks have passed. An error before it becomes a response with its own status.
READY: tuple[str, None] = ("", None)
