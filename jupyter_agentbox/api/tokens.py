"""Operations on tokens for one sandbox. Such a token cannot create, list or revoke tokens."""

from __future__ import annotations

from jupyter_agentbox.errors import AgentboxError, NotAuthorized
from jupyter_agentbox.models import TokenInfo, TokenList, TokenMade, TokenRequest
from jupyter_agentbox.sandbox.tokens import TokenRecord, TokenStore, choose_life
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox

from .call import Call, blocking
from .routes import route

TOKENS = "/sandboxes/{id}/tokens"


@route("POST", TOKENS, "write", body=TokenRequest, answer=TokenMade, status=201, errors=(409, 429, 503), is_owners=True)
async def create_token(call: Call) -> TokenMade:
    """Create a token for this sandbox, so that an agent does not need the server's own token.

    The token ends with the sandbox. A caller can give only rights that it has itself.
    """
    body: TokenRequest = call.body
    managed = await _managed(call)
    for verb in body.verbs:
        if not await call.is_allowed(verb):
            raise NotAuthorized(f"you have no {verb} permission, so you cannot give it", field="verbs")
    life = choose_life(body.life, call.sandboxes.policy.max_token_life)
    sandbox, tokens = managed.running().id, _store(call)
    text, record = await blocking(
        tokens.create,
        sandbox,
        owner=managed.owner,
        verbs=body.verbs,
        life=life,
        name=body.name,
        made_by=call.caller.name,
    )
    detail = {
        "event": "created", "token": record.id, "token_name": record.name, "verbs": record.verbs,
        "expires": record.expires, "by": call.caller.name,
    }  # fmt: skip
    try:
        await call.sandboxes.registry.audit().arecord("token", sandbox, is_allowed=True, detail=detail)
    except AgentboxError:
        await blocking(tokens.revoke, sandbox, record.id)
        raise
    return TokenMade(text, _info(record))


@route("GET", TOKENS, "read", answer=TokenList, is_poll=True, errors=(409,), is_owners=True)
async def list_tokens(call: Call) -> TokenList:
    """List the valid tokens of this sandbox, without their secrets."""
    managed = await _managed(call)
    return TokenList([_info(record) for record in await blocking(_store(call).list, managed.running().id)])


@route("DELETE", TOKENS + "/{token}", "write", status=204, errors=(409, 503), is_owners=True)
async def revoke_token(call: Call) -> None:
    """Revoke a token immediately. Running calls that were made with it end within seconds."""
    sandbox, token = (await _managed(call)).running().id, call.params["token"]
    await blocking(_store(call).revoke, sandbox, token)
    detail = {"event": "revoked", "token": token, "by": call.caller.name}
    await call.sandboxes.registry.audit().arecord("token", sandbox, detail=detail)


async def _managed(call: Call) -> ManagedSandbox:
    call.caller.check_unscoped("manage tokens")
    return await call.sandboxes.registry.peek(call.id, caller=call.caller)


def _store(call: Call) -> TokenStore:
    store: TokenStore = call.service.tokens
    return store


def _info(record: TokenRecord) -> TokenInfo:
    return TokenInfo(
        id=record.id,
        name=record.name,
        sandbox_id=record.sandbox,
        owner=record.owner,
        verbs=list(record.verbs),
        created=record.created,
        expires=record.expires,
        made_by=record.made_by,
    )
