"""Identify callers: by Jupyter's own authentication, or by a scoped token for one sandbox.

:class:`TokenMixin` precedes Jupyter's handler in the bases of every handler of this package, and :func:`caller_of` is
the only function that turns a request into a caller. A request with a scoped token has the token's rights only. If the
token is invalid, the request never falls back to the cookie, or to the user of a server without authentication.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import msgspec
from jupyter_server.auth.authorizer import Authorizer
from jupyter_server.auth.identity import IdentityProvider, User
from jupyter_server.base.handlers import JupyterHandler
from tornado import web

from jupyter_agentbox.errors import AgentboxError, NotAuthenticated
from jupyter_agentbox.models import ErrorAnswer
from jupyter_agentbox.models.redaction import PREFIX
from jupyter_agentbox.sandbox.link.thread import LinkThread
from jupyter_agentbox.sandbox.tokens import Scope, TokenStore, Verb
from jupyter_agentbox.service.registry import Caller

from .failures import REASONS, describe

if TYPE_CHECKING:
    from .service import Service

RESOURCE = "agentbox"
#: The subprotocol that is agreed on. A browser cannot set headers on a websocket, so it offers this and its token.
SUBPROTOCOL = "agentbox"
#: Message for requests without a token.
TOKEN_REQUIRED = (
    "authentication is required: send the header `Authorization: token TOKEN` with the server's token, or "
    "`Authorization: Bearer TOKEN` with a token for one sandbox"
)
#: Seconds between checks whether the token of a call in progress is still valid.
WATCH_INTERVAL = 2.0
#: Reasons that count as refusals.
REFUSALS = frozenset({"forbidden", "policy_refused", "limit_reached"})
_HEADER = re.compile(r"(?:token|bearer)\s+(\S+)", re.IGNORECASE)
_TOKEN_START = re.compile(rf"(?:^|\s){PREFIX}", re.IGNORECASE)


def authenticate(handler: JupyterHandler) -> Scope | None:
    """Return the scope of a request's scoped token, or None if it has none and Jupyter authenticates the request.

    Raises
    ------
    NotAuthenticated
        The token is invalid, or was sent in the URL, which is logged.
    """
    request = handler.request
    for value in request.query_arguments.get("token", []):
        if _TOKEN_START.search(value.decode("latin-1")):
            raise NotAuthenticated("send a token for one sandbox in the Authorization header: URLs are logged")
    header = request.headers.get("Authorization", "").strip()
    found = []
    if _TOKEN_START.search(header):
        match = _HEADER.fullmatch(header)
        found.append(match[1] if match is not None else "")
    if request.headers.get("Upgrade", "").lower() == "websocket":
        offered = request.headers.get("Sec-WebSocket-Protocol", "").split(",")
        found += [word.strip() for word in offered if _TOKEN_START.match(word.strip())]
    if not found:
        return None
    if len(set(found)) > 1:
        raise NotAuthenticated("more than one token was sent")
    return store_of(handler).authenticate(found[0])


def store_of(handler: JupyterHandler) -> TokenStore:
    """Return the token store of this server's state directory."""
    service: Service = handler.settings["agentbox"]
    return service.tokens


class _ScopedIdentity(IdentityProvider):
    """Identity provider of Jupyter for a request with a scoped token."""

    def get_user(self, handler: web.RequestHandler) -> User:
        assert isinstance(handler, TokenMixin)
        assert handler.scope is not None
        return User(f"agentbox-token-{handler.scope.id}", handler.scope.name)

    def is_token_authenticated(self, handler: web.RequestHandler) -> bool:
        return True


class _ScopedAuthorizer(Authorizer):
    """Authorizer that grants the token's verbs on our resource, and nothing else on the server."""

    def is_authorized(self, handler: Any, user: User, action: str, resource: str) -> bool:
        route = getattr(handler, "route", None)
        verb = route.right if route is not None and action == route.action else action
        return resource == RESOURCE and verb in handler.scope.verbs


_IDENTITY = _ScopedIdentity(token="")
_AUTHORIZER = _ScopedAuthorizer(identity_provider=_IDENTITY)


class TokenMixin(JupyterHandler):
    """Accepts scoped tokens. List it before Jupyter's and Tornado's classes in a handler's bases.

    A websocket handler lists JupyterHandler last, so that Tornado's own classes come before it.
    """

    #: Scope of the request's token; None if Jupyter authenticates the request.
    scope: Scope | None = None
    _status = 200
    _refused: ErrorAnswer | None = None

    def set_default_headers(self) -> None:
        """Set the headers that a 401 or 405 response needs. After a 401, the rest of the request is not read."""
        super().set_default_headers()
        if self._status == 401:
            self.set_header("WWW-Authenticate", "Bearer")
            self.set_header("Connection", "close")
        elif self._status == 405:
            self.set_header("Allow", ", ".join(self._allowed_methods()))

    def _allowed_methods(self) -> list[str]:
        missing = web.RequestHandler._unimplemented_method
        return [name for name in self.SUPPORTED_METHODS if getattr(type(self), name.lower(), missing) is not missing]

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        """Send an error. Jupyter's response to an unauthenticated request, a 403, becomes a 401."""
        is_anonymous = getattr(self, "_jupyter_current_user", self) is None
        self._status = 401 if status_code == 403 and is_anonymous and self.check_host() else status_code
        super().send_error(self._status, **kwargs)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Write an error of Tornado or Jupyter in this API's format."""
        error = (kwargs.get("exc_info") or (None, None, None))[1]
        is_own = getattr(error, "status_code", None) == status_code
        message = (getattr(error, "log_message", None) if is_own else None) or self._reason
        if status_code == 401 and not (is_own and getattr(error, "log_message", None)):
            has_header = "Authorization" in self.request.headers
            message = (
                "the token in the Authorization header was not issued by this server" if has_header else TOKEN_REQUIRED
            )
        self._refused = ErrorAnswer(str(message), REASONS.get(status_code, "error"))
        self.set_header("Content-Type", "application/json")
        self.finish(msgspec.json.encode(self._refused))

    async def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Check a scoped token, if there is one, before Jupyter's own checks."""
        try:
            self.scope = authenticate(self)
        except AgentboxError as error:
            self.current_user = self._jupyter_current_user = None
            raise web.HTTPError(describe(error)[0], str(error)) from None
        result = super().prepare(*args, **kwargs)
        if result is not None:
            await result

    @property
    def identity_provider(self) -> IdentityProvider:
        """Jupyter's identity provider, or the one for scoped tokens."""
        return super().identity_provider if self.scope is None else _IDENTITY

    @property
    def authorizer(self) -> Authorizer:
        """Jupyter's authorizer, or the one for scoped tokens."""
        return super().authorizer if self.scope is None else _AUTHORIZER

    async def scope_ended(self) -> None:
        """Wait until the request's token is no longer valid. Never returns for a request without one."""
        while self.scope is None or store_of(self).is_valid(self.scope):  # noqa: ASYNC110  # files send no notification
            await asyncio.sleep(WATCH_INTERVAL)


async def is_allowed(handler: JupyterHandler, action: str, resource: str = RESOURCE) -> bool:
    """Return whether the authorizer, Jupyter's or the token's own, allows an action.

    Jupyter's authorizers do not know ``restore``, a verb of tokens. A user who may ``execute`` may also restore.
    """
    if action == "restore" and getattr(handler, "scope", None) is None:
        action = "execute"
    right: bool | Awaitable[bool] = handler.authorizer.is_authorized(handler, handler.current_user, action, resource)
    return right if isinstance(right, bool) else await right


def record_refusal(handler: JupyterHandler, operation: str, answer: ErrorAnswer, asked: str | None) -> None:
    """Write a refused call to the audit log, if the caller is authenticated."""
    service: Service = handler.settings["agentbox"]
    scope: Scope | None = getattr(handler, "scope", None)
    if scope is not None:
        caller = Caller(scope.owner, scope=scope)
    elif handler.current_user is not None:
        caller = service.caller_of(handler.current_user)
    else:
        return
    refuse(service, caller, operation, answer, asked)


def refuse(service: Service, caller: Caller, operation: str, answer: ErrorAnswer, asked: str | None) -> None:
    """Write a refused call to the audit log; for a token, also one on a sandbox that was not found."""
    scope = caller.scope
    if answer.reason in REFUSALS or (answer.reason == "not_found" and scope is not None):
        LinkThread.instance().loop.call_soon_threadsafe(
            functools.partial(
                service.sandboxes.registry.refusals.note,
                operation,
                caller.to_detail(),
                answer.reason,
                sandbox=scope.sandbox if scope is not None else None,
                asked=asked,
                setting=answer.setting,
            )
        )


async def caller_of(handler: JupyterHandler, verb: Verb | None = None) -> Caller:
    """Return the caller of a request and its verb. The only function that turns a request into a caller."""
    service: Service = handler.settings["agentbox"]
    scope: Scope | None = getattr(handler, "scope", None)
    if scope is not None:
        return Caller(scope.owner, scope=scope, verb=verb)
    has_kernels = await is_allowed(handler, "execute", "kernels")
    caller = service.caller_of(handler.current_user, has_kernels=has_kernels)
    return caller.acting(verb) if verb is not None else caller
