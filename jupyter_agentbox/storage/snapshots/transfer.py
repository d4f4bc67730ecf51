"""Write a snapshot as one stream of bytes and read it back, to move it between stores that share a key.

The stream is a magic number, a salt, then frames. A frame is its length, kind, body, and a MAC over the frame's number,
kind and body, under a key derived for that stream only. So no frame can be changed, removed, moved or added, and the
last frame distinguishes a complete stream from a truncated one. A frame's MAC is checked before anything but its length
is used. If the store has a secret, bodies are encrypted.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from jupyter_agentbox.errors import Damaged, LimitReached

from .keys import MAC_SIZE, NONCE_SIZE, Keys
from .tree import Entry, Walk, Writer, data_ranges
from .values import SnapshotMeta

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_T = TypeVar("_T")
_MAGIC = b"agentbox snapshot 1\n"
_SALT_SIZE = 32
_PIECE = 1024 * 1024
_MAX_FRAME = 8 * 1024 * 1024
# Kinds: description of the snapshot; an entry beneath image or work; a part of the preceding file; the end.
_META, _IMAGE, _WORK, _DATA, _END = range(5)


class _Frames:
    """Writer and reader of the frames of one stream."""

    def __init__(self, keys: Keys, salt: bytes) -> None:
        self._key = keys.derive("export", salt.hex())
        self._cipher: AESGCM | None = keys.cipher("export", salt.hex()) if keys.is_sealed else None
        self._number = 0

    def write(self, kind: int, body: bytes) -> bytes:
        if self._cipher is not None:
            body = self._cipher.encrypt(self._number.to_bytes(NONCE_SIZE, "little"), body, bytes((kind,)))
        frame = len(body).to_bytes(4, "little") + bytes((kind,)) + body
        return frame + self._sign(frame)

    def read(self, frame: bytes, mac: bytes) -> tuple[int, bytes]:
        number = self._number
        if not compare_digest(mac, self._sign(frame)):
            raise Damaged(
                "the file was changed, or exported with a different key. To move snapshots between machines, use the "
                "same Policy.snapshot_key_file on both",
                setting="Policy.snapshot_key_file",
            )
        kind, body = frame[4], frame[5:]
        if self._cipher is not None:
            body = self._cipher.decrypt(number.to_bytes(NONCE_SIZE, "little"), body, bytes((kind,)))
        return kind, body

    def _sign(self, frame: bytes) -> bytes:
        number = self._number.to_bytes(8, "little")
        self._number += 1
        return blake2b(number + frame, key=self._key, digest_size=MAC_SIZE).digest()


def write(path: Path, meta: SnapshotMeta, keys: Keys) -> Iterator[bytes]:
    """Yield the stream of a snapshot that is checked out at `path`."""
    salt = secrets.token_bytes(_SALT_SIZE)
    frames = _Frames(keys, salt)
    yield _MAGIC + salt
    yield frames.write(_META, msgspec.msgpack.encode(meta))
    for kind, top in ((_IMAGE, "image"), (_WORK, "work")):
        for entry, handle in Walk(path / top):
            yield frames.write(kind, msgspec.msgpack.encode(entry))
            for start, end in data_ranges(handle, entry.size, 4096) if entry.kind == "f" else ():
                for at in range(start, end, _PIECE):
                    piece = os.pread(handle, min(_PIECE, end - at), at)
                    yield frames.write(_DATA, at.to_bytes(8, "little") + piece)
    yield frames.write(_END, b"")


def read(chunks: Iterable[bytes], staged: Path, keys: Keys, max_bytes: int) -> SnapshotMeta:
    """Write a stream to a staged directory and return the snapshot's description.

    Raises
    ------
    Damaged
    LimitReached
        It is larger than `max_bytes`.
    """
    source = _Source(chunks)
    if source.take(len(_MAGIC)) != _MAGIC:
        raise Damaged("the file is not an exported snapshot")
    frames = _Frames(keys, source.take(_SALT_SIZE))
    meta: SnapshotMeta | None = None
    entry, handle, left = None, None, max_bytes
    with Writer(staged / "image") as image, Writer(staged / "work") as work:
        try:
            while True:
                length = source.take(4)
                size = int.from_bytes(length, "little")
                if size > _MAX_FRAME:
                    raise Damaged("the file is not an exported snapshot, or was changed")
                kind, body = frames.read(length + source.take(1 + size), source.take(MAC_SIZE))
                if (kind == _META) is not (meta is None):
                    raise Damaged("the exported snapshot's parts are out of order")
                if kind == _META:
                    meta = _decode(body, SnapshotMeta)
                elif kind == _DATA:
                    at, piece = int.from_bytes(body[:8], "little"), body[8:]
                    if entry is None or handle is None or at + len(piece) > entry.size:
                        raise Damaged("the exported snapshot's parts are out of order")
                    left -= len(piece)
                    if left < 0:
                        raise LimitReached(
                            f"the snapshot exceeds the {max_bytes} bytes allowed for all snapshots of one owner",
                            setting="Policy.max_snapshot_bytes",
                        )
                    if os.pwrite(handle, piece, at) != len(piece):
                        raise OSError(errno.ENOSPC, "no space left for a snapshot")
                else:
                    if entry is not None and handle is not None:
                        done, handle = handle, None
                        work.finish(entry, done)
                    if kind not in (_IMAGE, _WORK):
                        break
                    entry = _decode(body, Entry)
                    if kind == _IMAGE and (entry.kind != "f" or b"/" in entry.path):
                        raise Damaged("the exported snapshot's image contains an invalid entry")
                    handle = (image if kind == _IMAGE else work).add(entry)
        finally:
            if handle is not None:
                os.close(handle)
    if kind != _END or meta is None or source.has_more():
        raise Damaged("the exported snapshot has no valid end")
    return meta


def adopt(meta: SnapshotMeta, owner: str, known: Collection[str]) -> SnapshotMeta:
    """Return the description for the importing owner, without a parent that the owner does not have."""
    parent = meta.parent if meta.parent in known else None
    return msgspec.structs.replace(meta, owner=owner, parent=parent)


class _Source:
    """Reader of exact numbers of bytes from chunks of any size."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = bytearray()

    def take(self, count: int) -> bytes:
        while len(self._rest) < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise Damaged("the exported snapshot is truncated")
            self._rest += chunk
        taken = bytes(self._rest[:count])
        del self._rest[:count]
        return taken

    def has_more(self) -> bool:
        return bool(self._rest) or any(self._chunks)


def _decode(body: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except ValueError as error:
        raise Damaged(f"the exported snapshot is malformed: {error}") from None
