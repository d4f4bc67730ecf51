"""What travels in and out of the store: what a caller says of a snapshot, and what the store says back."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from jupyter_agentbox.errors import InvalidRequest, NotFound

Kind = Literal["user", "auto", "park", "template"]

MAX_NAME, MAX_NOTE, MAX_OWNER = 100, 1000, 256  # characters
MAX_RECORD = 4 * 1024 * 1024  # bytes
MAX_FINGERPRINT = 64  # entries
_ID = re.compile(r"[0-9a-f]{20}")
_SANDBOX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


class SnapshotMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller says of a snapshot; the store keeps it and changes none of it.

    Parameters
    ----------
    sandbox : str
        Id of the sandbox that it was taken of.
    owner : str
        Whose it is. Nothing is shared between owners, and nobody sees what is another's.
    kind : str
        ``user`` and ``auto`` share pages with their relatives. ``park`` keeps its memory compressed. ``template`` keeps
        it as it was written, which takes more room and less time. An ``auto`` one without a name may be dropped for a
        newer one.
    created : float
        Seconds since the epoch.
    name, note : str
        For people: at most 100 characters on one line, and 1,000.
    parent : str or None
        Id of the snapshot that the sandbox came from, or that was taken of it last.
    fingerprint : dict of str to str
        What a machine has to have to load it; the caller compares it.
    record : bytes
        Opaque to the store.
    """

    sandbox: str
    owner: str
    kind: Kind
    created: float
    name: str = ""
    note: str = ""
    parent: str | None = None
    fingerprint: dict[str, str] = {}
    record: bytes = b""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is in the store.

    Parameters
    ----------
    id : str
    meta : SnapshotMeta
    size : int
        Bytes of memory and files as restored, holes left out.
    cost : int
        Bytes on the disk that are charged to it: what it added, and what older ones that are gone had left to it. The
        costs of an owner's snapshots add up to what they take.
    dropped : dict of str to int
        Files of the workspace that no snapshot can hold, counted by what they were: ``sockets``, ``fifos``...
    """

    id: str
    meta: SnapshotMeta
    size: int
    cost: int
    dropped: dict[str, int] = {}


def check_id(snapshot_id: str) -> str:
    """Return it. Raises NotFound unless it is made as ids are, so that it can be a file's name."""
    if not _ID.fullmatch(snapshot_id):
        raise NotFound(f"there is no snapshot {snapshot_id[:64]!r}")
    return snapshot_id


def check_meta(meta: SnapshotMeta) -> None:
    """Refuse what is too long or can't be printed. Raises InvalidRequest, which names the field."""
    problems = {
        "sandbox": not _SANDBOX.fullmatch(meta.sandbox),
        "owner": not 0 < len(meta.owner) <= MAX_OWNER or not meta.owner.isprintable(),
        "kind": meta.kind not in ("user", "auto", "park", "template"),
        "created": not 0 <= meta.created < 1e11,
        "name": len(meta.name) > MAX_NAME or not meta.name.isprintable(),
        "note": len(meta.note) > MAX_NOTE or not meta.note.replace("\n", "").replace("\t", "").isprintable(),
        "parent": meta.parent is not None and not _ID.fullmatch(meta.parent),
        "fingerprint": len(meta.fingerprint) > MAX_FINGERPRINT
        or any(len(key + value) > 1024 or not (key + value).isprintable() for key, value in meta.fingerprint.items()),
        "record": len(meta.record) > MAX_RECORD,
    }
    for field, is_wrong in problems.items():
        if is_wrong:
            raise InvalidRequest(f"a snapshot's {field} is malformed or too long", field=field)
