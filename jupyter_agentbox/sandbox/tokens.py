"""Issue and check scoped tokens, so that an agent never has the server's own token.

A scoped token is signed, expires, and is valid for one sandbox and a set of verbs. Its text is
``agentbox_<payload>.<signature>``: JSON and its HMAC-SHA256, both in base64url. The signing key is a file in the state
directory.

Each token has a record in its sandbox's directory, and is valid only while that record exists. Removing the record
immediately revokes the token in all processes. A token also ends with its sandbox, whose directory is removed. When
a sandbox continues as another one, after a restore or while it is parked, the live record is moved to the other
directory. It is never restored from a snapshot, so a revoked token stays revoked. Removing the key ends all tokens.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import hmac
import math
import os
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from jupyter_agentbox.errors import (
    LimitReached,
    NotAuthenticated,
    NotFound,
    PolicyRefused,
)
from jupyter_agentbox.linux import write_atomically
from jupyter_agentbox.models.redaction import PREFIX
from jupyter_agentbox.storage.key_files import make_key, read_key

Verb = Literal["read", "write", "execute", "restore"]
#: Verbs that a token can have: the actions of the REST API's routes, and restoring the sandbox to a snapshot.
VERBS: tuple[Verb, ...] = ("read", "write", "execute", "restore")
#: Default lifetime of a token, in seconds.
DEFAULT_LIFE = 3600.0
#: Characters of the longest text that is accepted for parsing.
MAX_LENGTH = 512
#: Tokens that one sandbox may have at a time.
MAX_TOKENS = 100
#: Lookups before a record counts as missing: it may be moved from one directory to another between two lookups.
_READ_ATTEMPTS = 3
_MAX_RECORD = 16 * 1024
# The store has a method called `list`.
Paths = list[Path]
_TEXT = re.compile(PREFIX + r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class TokenRecord(msgspec.Struct, frozen=True):
    """The stored facts about a token, without its text.

    Parameters
    ----------
    id, name : str
        Generated id, and the name chosen by the token's creator.
    sandbox, owner : str
        Id of the sandbox in the state directory, or the id under which it is parked; and the owner of the sandbox. On
        disk, the id is that of the sandbox for which the token was created. The record's location identifies the
        current one.
    verbs : tuple of str
        A subset of :data:`VERBS`.
    created, expires : float
        Seconds since the epoch.
    made_by : str
        Who created the token.
    """

    id: str
    name: str
    sandbox: str
    owner: str
    verbs: tuple[Verb, ...]
    created: float
    expires: float
    made_by: str


#: The permissions of a valid token.
Scope = TokenRecord


class _Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    i: str  # the token's id
    s: str  # the sandbox's id
    e: float  # when it expires


class TokenStore:
    """The tokens of one state directory.

    All methods block for a moment. Any thread and process may use them.

    Parameters
    ----------
    state_dir : Path
    max_life : float
        Seconds after which every token expires, whatever lifetime it was issued with.
    """

    def __init__(self, state_dir: Path, max_life: float = math.inf) -> None:
        self._state_dir = state_dir
        self._max_life = max_life
        self._key = (state_dir / "token.key", "token key", "Remove it to invalidate all tokens")

    def create(
        self, sandbox: str, *, owner: str, verbs: Sequence[Verb], life: float, name: str, made_by: str
    ) -> tuple[str, TokenRecord]:
        """Create a token that expires after `life` seconds. Return its text, which is not stored, and its record.

        Raises
        ------
        NotFound
            The sandbox does not exist.
        LimitReached
            The sandbox already has :data:`MAX_TOKENS` tokens.
        """
        if len(self.list(sandbox)) >= MAX_TOKENS:
            raise LimitReached(f"sandbox {sandbox} has {MAX_TOKENS} tokens, the maximum. Revoke one first")
        now = time.time()
        granted = tuple(verb for verb in VERBS if verb in verbs)
        record = TokenRecord(secrets.token_hex(8), name, sandbox, owner, granted, now, now + life, made_by)
        payload = _encode(msgspec.json.encode(_Payload(record.id, sandbox, record.expires)))
        text = f"{PREFIX}{payload}.{_sign(make_key(*self._key), payload)}"
        path = self._path(sandbox, record.id)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, msgspec.json.encode(record), is_durable=True)
        except FileNotFoundError:
            raise NotFound(f"sandbox {sandbox} has ended") from None
        return text, record

    def list(self, sandbox: str | None = None) -> list[TokenRecord]:
        """Return the tokens of one sandbox, or of all, oldest first. Removes expired tokens."""
        base = self._state_dir / "sandboxes"
        found = []
        if sandbox is None:
            paths = [*base.glob("*/tokens/*.json"), *(self._state_dir / "parked").glob("*/tokens/*.json")]
        else:
            paths = [path for directory in self._directories(sandbox) for path in directory.glob("*.json")]
        for path in paths:
            record = _read(path)
            if record is not None and (record := self._at(record, path)).expires > time.time():
                found.append(record)
            else:
                path.unlink(missing_ok=True)
        return sorted(found, key=lambda record: record.created)

    def revoke(self, sandbox: str, token_id: str) -> None:
        """Revoke a token. Raises NotFound."""
        for directory in {self._path(sandbox, token_id).parent, *self._directories(sandbox)}:
            with contextlib.suppress(OSError):
                (directory / f"{token_id}.json").unlink()
                return
        raise NotFound(f"token {token_id[:64]!r} does not exist")

    def carry(self, old: str, new: str) -> None:
        """Move the tokens of a sandbox to the sandbox that continues it, or to its parked form. Both are given by id.

        A token that is revoked meanwhile stays revoked, because records are moved and never rewritten.
        """
        source, target = self._directories(old)[0], self._directories(new)[0]
        try:
            source.rename(target)
        except FileNotFoundError:
            pass  # the sandbox has no tokens
        except OSError:  # the new sandbox already has tokens
            for path in source.glob("*.json"):
                with contextlib.suppress(FileNotFoundError):
                    path.rename(target / path.name)

    def authenticate(self, text: str) -> Scope:
        """Return the permissions of a token.

        Raises
        ------
        NotAuthenticated
            The token is malformed, was issued by another server, has expired or was revoked, or its sandbox has ended.
        """
        found = _TEXT.fullmatch(text) if len(text) <= MAX_LENGTH else None
        key = read_key(*self._key) if found is not None else None
        # Verify the signature before reading anything from the token.
        if found is None or key is None or not hmac.compare_digest(_sign(key, found[1]), found[2]):
            raise NotAuthenticated("token was not issued by this server")
        payload = msgspec.json.decode(_decode(found[1]), type=_Payload)
        if payload.e <= time.time():
            raise NotAuthenticated("the token has expired", setting="Policy.max_token_life")
        for _ in range(_READ_ATTEMPTS):  # the record may be moved between two lookups
            path = self._find(payload.s, payload.i)
            record = _read(path) if path is not None else None
            if record is not None and (record.id, record.sandbox) == (payload.i, payload.s):
                assert path is not None
                record = self._at(record, path)
                if record.expires <= time.time():
                    raise NotAuthenticated("the token has expired", setting="Policy.max_token_life")
                return record
        raise NotAuthenticated("the token was revoked, or its sandbox has ended")

    def is_valid(self, scope: Scope) -> bool:
        """Return whether a token's permissions still hold."""
        is_there = any(self._find(scope.sandbox, scope.id) is not None for _ in range(_READ_ATTEMPTS))
        return is_there and scope.expires > time.time()

    def _at(self, record: TokenRecord, path: Path) -> TokenRecord:
        """Return a record with the sandbox that it currently belongs to and its effective expiry."""
        expires = min(record.expires, record.created + self._max_life)
        return msgspec.structs.replace(record, sandbox=path.parent.parent.name, expires=expires)

    def _directories(self, sandbox: str) -> Paths:
        """Return the directories with the records of a sandbox's tokens.

        If it is parked, the parked directory comes first.
        """
        if not _NAME.fullmatch(sandbox):
            raise NotFound(f"sandbox {sandbox[:64]!r} does not exist")
        parked, living = (self._state_dir / kind / sandbox for kind in ("parked", "sandboxes"))
        return [parked / "tokens", living / "tokens"] if parked.is_dir() else [living / "tokens"]

    def _find(self, sandbox: str, token_id: str) -> Path | None:
        """Find a token's record: with its sandbox, or wherever that sandbox has continued since."""
        name = f"{token_id}.json"
        for directory in self._directories(sandbox):
            if (directory / name).exists():
                return directory / name
        for kind in ("sandboxes", "parked"):
            with contextlib.suppress(OSError), os.scandir(self._state_dir / kind) as entries:
                for entry in entries:
                    path = Path(entry.path, "tokens", name)
                    if path.exists():
                        return path
        return None

    def _path(self, sandbox: str, token_id: str) -> Path:
        if not (_NAME.fullmatch(sandbox) and _NAME.fullmatch(token_id)):
            raise NotFound(f"token {token_id[:64]!r} does not exist")
        return self._state_dir / "sandboxes" / sandbox / "tokens" / f"{token_id}.json"


def choose_life(requested: float | None, ceiling: float) -> float:
    """Return the lifetime of a new token in seconds. Raises PolicyRefused."""
    if requested is not None and requested > ceiling:
        raise PolicyRefused(
            f"a token lifetime of {requested:g} s exceeds the maximum of {ceiling:g} s",
            field="life",
            setting="Policy.max_token_life",
        )
    return min(DEFAULT_LIFE, ceiling) if requested is None else requested


def _read(path: Path) -> TokenRecord | None:
    """Read a record.

    Return None if it is missing or malformed. Raises OSError if the file can't be read for another reason.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as file:
            return msgspec.json.decode(file.read(_MAX_RECORD), type=TokenRecord)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise
    except ValueError:
        return None


def _sign(key: bytes, payload: str) -> str:
    return _encode(hmac.digest(key, f"{PREFIX}{payload}".encode(), hashlib.sha256))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
