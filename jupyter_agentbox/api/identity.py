"""Who calls: Jupyter's own authentication, and beside it tokens for one sandbox.

:class:`TokenMixin` stands before Jupyter's handler in every handler of this package, and :func:`caller_of` is the one
place where a request becomes a caller. A request that brings a scoped token is that token's, or nobody's: a bad one
never falls back to the cookie, nor to the user that a server without authentication makes up.
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
#: What a websocket's client offers beside a token, and what is agreed on: a browser can set no header.
SUBPROTOCOL = "agentbox"
#: What is said to one who brings no token.
WANTED = (
    "authentication is required: send the header `Authorization: token TOKEN` with the server's token, or "
    "`Authorization: Bearer TOKEN` with a token for one sandbox"
)
#: Seconds between two looks whether the token of a call that goes on is still good.
WATCH_INTERVAL = 2.0
#: Reasons of answers that are refusals.
REFUSALS = frozenset({"forbidden", "policy_refused", "limit_reached"})
_HEADER = re.compile(r"(?:token|bearer)\s+(\S+)", re.IGNORECASE)
_ANY = re.compile(rf"(?:^|\s){PREFIX}", re.IGNORECASE)


def authenticate(handler: JupyterHandler) -> Scope | None:
    """Return what the scoped token of a request stands for, or None if it brings none and is for Jupyter to judge.

    Raises
    ------
    NotAuthenticated
        It brings one that is not good, or in a place where tokens are written down.
    """
    request = handler.request
    for value in request.query_arguments.get("token", []):
        if _ANY.search(value.decode("latin-1")):
            raise NotAuthenticated("a token for one sandbox is sent in the header Authorization: addresses are logged")
    header = request.headers.get("Authorization", "").strip()
    found = []
    if _ANY.search(header):
        match = _HEADER.fullmatch(header)
        found.append(match[1] if match is not None else "")
    if request.headers.get("Upgrade", "").lower() == "websocket":
        offered = request.headers.get("Sec-WebSocket-Protocol", "").split(",")
        found += [word.strip() for word in offered if _ANY.match(word.strip())]
    if not found:
        return None
    if len(set(found)) > 1:
        raise NotAuthenticated("more than one token was sent")
    return store_of(handler).authenticate(found[0])


def store_of(handler: JupyterHandler) -> TokenStore:
    """The tokens of this server's state directory."""
    service: Service = handler.settings["agentbox"]
    return service.tokens


class _ScopedIdentity(IdentityProvider):
    """What Jupyter's handlers ask of who calls, for a request with a scoped token."""

    def get_user(self, handler: web.RequestHandler) -> User:
        assert isinstance(handler, TokenMixin)
        assert handler.scope is not None
        return User(f"agentbox-token-{handler.scope.id}", handler.scope.name)

    def is_token_authenticated(self, handler: web.RequestHandler) -> bool:
        return True


class _ScopedAuthorizer(Authorizer):
    """Its rights: the token's verbs on our resource, and nothing else of the server."""

    def is_authorized(self, handler: Any, user: User, action: str, resource: str) -> bool:
        route = getattr(handler, "route", None)
        verb = route.right if route is not None and action == route.action else action
        return resource == RESOURCE and verb in handler.scope.verbs


_IDENTITY = _ScopedIdentity(token="")
_AUTHORIZER = _ScopedAuthorizer(identity_provider=_IDENTITY)


class TokenMixin(JupyterHandler):
    """Takes scoped tokens: put it before Jupyter's and Tornado's classes in a handler's bases.

    One of websockets names JupyterHandler last, so that Tornado's own classes come before it.
    """

    #: What the request's token stands for; None where Jupyter has judged who calls.
    scope: Scope | None = None
    _status = 200
    _refused: ErrorAnswer | None = None

    def set_default_headers(self) -> None:
        """Say to one who is not known what is wanted, and that nothing more is read; and with 405 what there is."""
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
        """Answer an error. Jupyter's own answer to one who is not known, 403 or a word on XSRF, becomes a 401."""
        is_nobody = getattr(self, "_jupyter_current_user", self) is None
        self._status = 401 if status_code == 403 and is_nobody and self.check_host() else status_code
        super().send_error(self._status, **kwargs)

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Answer what Tornado or Jupyter has found wrong in the words of this API."""
        error = (kwargs.get("exc_info") or (None, None, None))[1]
        is_own = getattr(error, "status_code", None) == status_code
        message = (getattr(error, "log_message", None) if is_own else None) or self._reason
        if status_code == 401 and not (is_own and getattr(error, "log_message", None)):
            is_wrong = "Authorization" in self.request.headers
            message = "the header Authorization holds no token of this server's" if is_wrong else WANTED
        self._refused = ErrorAnswer(str(message), REASONS.get(status_code, "error"))
        self.set_header("Content-Type", "application/json")
        self.finish(msgspec.json.encode(self._refused))

    async def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Judge a scoped token, if there is one, before Jupyter judges the rest."""
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
        """Jupyter's, or one that knows the token alone."""
        return super().identity_provider if self.scope is None else _IDENTITY

    @property
    def authorizer(self) -> Authorizer:
        """Jupyter's, or one that goes by the token's verbs."""
        return super().authorizer if self.scope is None else _AUTHORIZER

    async def scope_ended(self) -> None:
        """Return when the token of this request is good no more; never if it has none."""
        while self.scope is None or store_of(self).is_valid(self.scope):  # noqa: ASYNC110  # files tell nobody
            await asyncio.sleep(WATCH_INTERVAL)


async def is_allowed(handler: JupyterHandler, action: str, resource: str = RESOURCE) -> bool:
    """Ask the authorizer, Jupyter's or the token's own, whether the request may do that.

    Authorizers of Jupyter's do not know ``restore``, a verb of tokens: who may execute may do that.
    """
    if action == "restore" and getattr(handler, "scope", None) is None:
        action = "execute"
    right: bool | Awaitable[bool] = handler.authorizer.is_authorized(handler, handler.current_user, action, resource)
    return right if isinstance(right, bool) else await right


def note_refusal(handler: JupyterHandler, operation: str, answer: ErrorAnswer, asked: str | None) -> None:
    """Have the audit log tell of a call that was refused to somebody who is known."""
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
    """Have the audit log tell of an answer, if it is a refusal: to a token, also that there is no such sandbox."""
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
    """Say who calls, and is about to do what: the one place where a request becomes a caller."""
    service: Service = handler.settings["agentbox"]
    scope: Scope | None = getattr(handler, "scope", None)
    if scope is not None:
        return Caller(scope.owner, scope=scope, verb=verb)
    has_kernels = await is_allowed(handler, "execute", "kernels")
    caller = service.caller_of(handler.current_user, has_kernels=has_kernels)
    return caller.acting(verb) if verb is not None else caller
