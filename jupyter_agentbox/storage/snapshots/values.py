"""The values of the snapshot store's interface: a caller's description of a snapshot, and the store's own."""

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
    """A caller's description of a snapshot. The store keeps it unchanged.

    Parameters
    ----------
    sandbox : str
        Id of the sandbox that the snapshot was taken of.
    owner : str
        Owner of the snapshot. Owners share no data, and no one can see another owner's snapshots.
    kind : str
        ``user`` and ``auto`` snapshots share pages with related snapshots. ``park`` stores its memory compressed.
        ``template`` stores memory as it was written, which takes more space and less time. An unnamed ``auto`` snapshot
        may be deleted to make room for a newer one.
    created : float
        Seconds since the epoch.
    name, note : str
        Texts for people: a name of at most 100 characters on one line, and a note of at most 1,000 characters.
    parent : str or None
        Id of the snapshot that the sandbox was started from, or of the last one taken of it.
    fingerprint : dict of str to str
        Properties that a machine must have to load the snapshot. The caller compares them.
    record : bytes
        Data that the store does not interpret.
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
    """A snapshot in the store.

    Parameters
    ----------
    id : str
    meta : SnapshotMeta
    size : int
        Bytes of memory and files as restored, without holes.
    cost : int
        Bytes on the disk that are charged to it: the data that it added, and shared data of older snapshots that were
        deleted. The costs of an owner's snapshots add up to the space that they use.
    dropped : dict of str to int
        Number of workspace files that a snapshot cannot contain, by kind: ``sockets``, ``fifos``...
    """

    id: str
    meta: SnapshotMeta
    size: int
    cost: int
    dropped: dict[str, int] = {}


def check_id(snapshot_id: str) -> str:
    """Return an id after checking that it is well-formed and safe as a file name. Raises NotFound otherwise."""
    if not _ID.fullmatch(snapshot_id):
        raise NotFound(f"snapshot {snapshot_id[:64]!r} does not exist")
    return snapshot_id


def check_meta(meta: SnapshotMeta) -> None:
    """Refuse values that are too long or not printable. Raises InvalidRequest, which names the field."""
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
