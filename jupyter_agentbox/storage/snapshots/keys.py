"""Manage a store's keys: authenticate everything that is written, and encrypt it if there is a secret.

All keys are derived from one root: 32 random bytes in the state directory, or the administrator's secret. Each purpose
has its own derived key, so that data for one purpose is never accepted for another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jupyter_agentbox.errors import Damaged, InvalidConfig
from jupyter_agentbox.storage.key_files import KEY_SIZE, make_key

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

#: The setting through which an administrator provides the secret.
SECRET_SETTING = "Policy.snapshot_key_file"
MIN_SECRET = 32
NONCE_SIZE = 12
TAG_SIZE = 16
MAC_SIZE = 32
_MAGIC = b"agbxsn1\n"
_ID_SIZE = 8


class Keys:
    """The keys derived from one root.

    Parameters
    ----------
    root : bytes
        32 bytes.
    is_sealed : bool
        Whether to encrypt. If false, data is only authenticated.
    """

    def __init__(self, root: bytes, *, is_sealed: bool) -> None:
        self._root = root
        self.is_sealed = is_sealed
        self.id = self.derive("id")[:_ID_SIZE]
        if is_sealed:
            self.cipher("probe")  # fails early if the library is missing

    def derive(self, *purpose: str) -> bytes:
        """Return a 32-byte key for this purpose only."""
        return hashlib.blake2b(msgspec.msgpack.encode(purpose), key=self._root, digest_size=KEY_SIZE).digest()

    def cipher(self, *purpose: str) -> AESGCM:
        """Return AES-256-GCM with a key for this purpose. Raises InvalidConfig if the library is missing."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise InvalidConfig(
                "encrypted snapshots require cryptography: run pip install 'jupyter-agentbox[encryption]'",
                setting=SECRET_SETTING,
            ) from None
        return AESGCM(self.derive("cipher", *purpose))

    def protect(self, kind: str, owner: str, snapshot_id: str, payload: bytes) -> bytes:
        """Return `payload` in a form that opens only as this kind of part of this owner's snapshot with this id."""
        if self.is_sealed:
            nonce = secrets.token_bytes(NONCE_SIZE)
            payload = nonce + self.cipher("part", kind, owner, snapshot_id).encrypt(nonce, payload, None)
        data = _MAGIC + self.id + payload
        return data + self._sign(data, kind, owner, snapshot_id)

    def open(self, kind: str, owner: str, snapshot_id: str, data: bytes) -> bytes:
        """Return the payload of protected data.

        Raises
        ------
        Damaged
            The data was changed, or belongs to another part, id, owner or key.
        """
        head = len(_MAGIC) + _ID_SIZE
        if data[:head] != _MAGIC + self.id and data.startswith(_MAGIC) and len(data) >= head + MAC_SIZE:
            raise Damaged("the snapshot was created with another key, or its description was changed on disk")
        payload, mac = data[:-MAC_SIZE], data[-MAC_SIZE:]
        if len(data) < head + MAC_SIZE or not hmac.compare_digest(mac, self._sign(payload, kind, owner, snapshot_id)):
            raise Damaged("the snapshot's description was changed on disk")
        payload = payload[head:]
        if self.is_sealed:
            nonce, sealed = payload[:NONCE_SIZE], payload[NONCE_SIZE:]
            payload = self.cipher("part", kind, owner, snapshot_id).decrypt(nonce, sealed, None)
        return payload

    def _sign(self, data: bytes, *purpose: str) -> bytes:
        return hashlib.blake2b(data, key=self.derive("mac", *purpose), digest_size=MAC_SIZE).digest()


def load_keys(state_dir: Path, secret: bytes | None) -> Keys:
    """Return a store's keys, from the administrator's secret or from ``snapshots.key``, which is created at first use.

    Raises
    ------
    InvalidConfig
        The secret is shorter than 32 bytes, or the file is not readable by this user only.
    """
    if secret is not None:
        if len(secret) < MIN_SECRET:
            raise InvalidConfig(
                f"the snapshot key has {len(secret)} bytes, but must have at least {MIN_SECRET}",
                setting=SECRET_SETTING,
            )
        return Keys(hashlib.blake2b(secret, digest_size=KEY_SIZE, person=b"agentbox-snap").digest(), is_sealed=True)
    remedy = "Remove it; existing snapshots then become unreadable"
    return Keys(make_key(state_dir / "snapshots.key", "snapshot key", remedy), is_sealed=False)


def write_new(path: Path, data: bytes) -> None:
    """Write a new file with mode 0600. Raises FileExistsError if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(data)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Raises OSError, or Damaged for a link, a non-regular file or more than `max_bytes`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"the snapshot's description cannot be read: {error.strerror}") from None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > max_bytes:
            raise Damaged("the snapshot's description is not a regular file, or is too long")
        with open(handle, "rb", closefd=False) as file:
            return file.read(max_bytes)
    finally:
        os.close(handle)
