"""Store a snapshot's bytes as chunks in packs, each chunk once, with a table of their locations.

Memory is divided into pages of 4 KiB, other files into blocks of 64 KiB. A chunk that a related snapshot of the same
owner already has is not written again. Each snapshot with new chunks writes them to one *pack*. A chunk never moves
within its pack, so deleting one snapshot does not require rewriting the tables of others. The table contains a keyed
hash of each chunk, and every chunk is checked against its hash before it is handed out.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jupyter_agentbox.errors import Damaged, LimitReached

from .keys import TAG_SIZE, Keys
from .tree import MAX_FILE, Entry, data_ranges

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PAGE, BLOCK, BIG = 4096, 64 * 1024, 1024 * 1024
HASH_SIZE = 16
#: Maximum number of packs of related snapshots that a snapshot may refer to. It stores other chunks again, so that old
#: packs can be deleted and reading the hundredth snapshot opens no more files than reading the tenth.
MAX_PACKS = 24
#: Number of chunks that are read or written together.
_BATCH = 256
_ZERO = {PAGE: bytes(PAGE), BLOCK: bytes(BLOCK)}


class File(msgspec.Struct, array_like=True):
    """One file of a snapshot: its entry, and its chunks.

    Parameters
    ----------
    entry : Entry
    grain : int
        Bytes of a chunk; the last chunk may be shorter.
    runs : list of (int, int)
        Index of the first chunk within the file, and number of chunks. Holes lie between the runs. The chunk numbers
        follow those of the previous file in :attr:`Table.refs`.
    """

    entry: Entry
    grain: int = BLOCK
    runs: list[tuple[int, int]] = []


class Kept(msgspec.Struct, array_like=True):
    """One image file that is stored as it was written: its name, its size, and a hash of each MiB."""

    name: str
    size: int
    hashes: bytes


class Packed(msgspec.Struct, array_like=True):
    """One image file that is stored compressed: its name and size, and length and hash of each compressed MiB."""

    name: str
    size: int
    lengths: list[int]
    hashes: bytes


class Table(msgspec.Struct):
    """The locations of all of a snapshot's data. Chunk number n is at index n - 1 of the columns; 0 is all zeros."""

    packs: list[str] = []
    image: list[File] = []
    kept: list[Kept] = []
    packed: list[Packed] = []
    work: list[File] = []
    hashes: bytes = b""
    tags: bytes = b""
    pack_column: array[int] = msgspec.field(default_factory=lambda: array("I"))
    offsets: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    lengths: array[int] = msgspec.field(default_factory=lambda: array("I"))
    refs: array[int] = msgspec.field(default_factory=lambda: array("I"))

    def encode(self) -> bytes:
        """Return the table as bytes. Only a machine of the same byte order can read them."""
        return msgspec.msgpack.encode(self, enc_hook=lambda value: zlib.compress(value.tobytes(), 1))

    @classmethod
    def decode(cls, data: bytes) -> Table:
        """Read a table. Raises Damaged, although authenticated data should always be well-formed."""
        try:
            raw = msgspec.msgpack.decode(data, type=_Raw)
            table = cls(raw.packs, raw.image, raw.kept, raw.packed, raw.work, raw.hashes, raw.tags)
            for name, code in (("pack_column", "I"), ("offsets", "Q"), ("lengths", "I"), ("refs", "I")):
                column: array[int] = array(code)
                column.frombytes(zlib.decompress(getattr(raw, name)))
                setattr(table, name, column)
        except (zlib.error, ValueError) as error:
            raise Damaged(f"the snapshot's table is malformed: {error}") from None
        count = len(table.offsets)
        if (
            not len(table.hashes)
            == HASH_SIZE * count
            == HASH_SIZE * len(table.lengths)
            == HASH_SIZE * len(table.pack_column)
            or max(table.refs, default=0) > count
        ):
            raise Damaged("the snapshot's table is inconsistent")
        return table


class _Raw(msgspec.Struct):
    packs: list[str]
    image: list[File]
    kept: list[Kept]
    packed: list[Packed]
    work: list[File]
    hashes: bytes
    tags: bytes
    pack_column: bytes
    offsets: bytes
    lengths: bytes
    refs: bytes


class PackWriter:
    """Writer of one snapshot's new chunks and of its table.

    Parameters
    ----------
    path : Path
        Path of the pack, which must not exist.
    pack_id : str
        Id of the snapshot.
    keys : Keys
    hash_key : bytes
        Key for the hashes of the owner's chunks.
    relatives : iterable of Table
        Tables of related snapshots, whose chunks are not written again. Earlier tables take precedence.
    max_bytes : int
        Maximum bytes to read, not counting holes, and therefore also to write.
    """

    def __init__(
        self, path: Path, pack_id: str, keys: Keys, hash_key: bytes, relatives: Iterable[Table], max_bytes: int
    ) -> None:
        self.table = Table()
        self.size = 0
        self._max_bytes = max_bytes
        self._hash_key = hash_key
        self._pack_id = pack_id.encode()
        self._cipher: AESGCM | None = keys.cipher("pack", pack_id) if keys.is_sealed else None
        self._tables = list(relatives)
        self._known: dict[bytes, int] = {}  # hash: index of the relative, and number of its chunk
        shared = _choose_packs(self._tables)
        for index, table in reversed(list(enumerate(self._tables))):
            hashes, first = table.hashes, index << 32
            is_shared = [pack in shared for pack in table.packs]
            for number, pack in enumerate(table.pack_column):
                if is_shared[pack]:
                    self._known[hashes[number * HASH_SIZE : (number + 1) * HASH_SIZE]] = first + number
        self._numbers: dict[bytes, int] = {}
        self._packs: dict[str, int] = {}
        self._tags: list[bytes] = []
        self._own = pack_id
        self._offset = 0
        self._waiting: list[bytes] = []
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *problem: object) -> None:
        try:
            if problem[0] is None:
                self._flush()
                self.table.packs = list(self._packs)
                self.table.hashes = b"".join(self._numbers)
                self.table.tags = b"".join(self._tags)
        finally:
            os.close(self._handle)

    def add(self, entry: Entry, handle: int, *, grain: int = BLOCK, is_compressed: bool = False) -> File:
        """Read a whole open file, and return its description for the table."""
        file = File(entry, grain, [])
        append, numbers, key, zero = self.table.refs.append, self._numbers, self._hash_key, _ZERO[grain]
        for start, end in data_ranges(handle, entry.size, grain):
            self.count(end - start)
            file.runs.append((start // grain, -(-(end - start) // grain)))
            while start < end:
                block = _read(handle, min(BIG, end - start), start)
                start += len(block)
                for at in range(0, len(block), grain):
                    chunk = block[at : at + grain]
                    if chunk == zero:
                        append(0)
                        continue
                    digest = blake2b(chunk, digest_size=HASH_SIZE, key=key).digest()
                    number = numbers.get(digest)
                    append(self._keep(digest, chunk, is_compressed) if number is None else number)
        return file

    def count(self, size: int) -> None:
        """Add to the snapshot's size. Raises LimitReached."""
        self.size += size
        if self.size > self._max_bytes:
            raise LimitReached(
                f"the snapshot exceeds the {self._max_bytes} bytes allowed for all snapshots of one owner",
                setting="Policy.max_snapshot_bytes",
            )

    def _keep(self, digest: bytes, chunk: bytes, is_compressed: bool) -> int:
        table = self.table
        if (known := self._known.get(digest)) is not None:
            other, at = self._tables[known >> 32], known & 0xFFFFFFFF
            pack, offset, length = other.packs[other.pack_column[at]], other.offsets[at], other.lengths[at]
            if self._cipher is not None:
                self._tags.append(other.tags[at * TAG_SIZE : (at + 1) * TAG_SIZE])
        else:
            if is_compressed and len(packed := zlib.compress(chunk, 1)) < len(chunk):
                chunk = packed
            pack, offset, length = self._own, self._offset, len(chunk)
            if self._cipher is not None:
                sealed = self._cipher.encrypt(_nonce(offset), chunk, self._pack_id)
                chunk, tag = sealed[:-TAG_SIZE], sealed[-TAG_SIZE:]
                self._tags.append(tag)
            self._offset += length
            self._waiting.append(chunk)
            if len(self._waiting) == _BATCH:
                self._flush()
        table.pack_column.append(self._packs.setdefault(pack, len(self._packs)))
        table.offsets.append(offset)
        table.lengths.append(length)
        number = self._numbers[digest] = len(table.offsets)
        return number

    def _flush(self) -> None:
        total = sum(map(len, self._waiting))
        if total and os.writev(self._handle, self._waiting) != total:
            raise OSError(errno.ENOSPC, "no space left for a snapshot")
        self._waiting.clear()


class PackReader:
    """Reader that writes out the files of a snapshot after comparing each chunk with its hash.

    Parameters
    ----------
    folder : Path
        Directory of the packs.
    """

    def __init__(self, table: Table, folder: Path, keys: Keys, hash_key: bytes) -> None:
        self._table = table
        self._hash_key = hash_key
        self._next = 0
        self._ciphers = [keys.cipher("pack", pack) for pack in table.packs] if keys.is_sealed else None
        self._handles: list[int] = []
        self._closing = ExitStack()
        with ExitStack() as stack:
            for pack in table.packs:
                handle = open_regular(folder / pack, "chunks")
                stack.callback(os.close, handle)
                self._handles.append(handle)
            self._closing = stack.pop_all()

    def __enter__(self) -> PackReader:
        return self

    def __exit__(self, *problem: object) -> None:
        self._closing.close()

    def skip(self, files: Iterable[File]) -> None:
        """Skip the next files."""
        self._next += sum(count for file in files for _, count in file.runs)

    def write(self, file: File, handle: int, part: str) -> None:
        """Write the bytes of the next file. Files must be requested in the order in which they were added.

        Raises
        ------
        Damaged
            The data does not match; names `part`.
        """
        table, grain, size, first = self._table, file.grain, file.entry.size, self._next
        if grain not in _ZERO or not 0 <= size <= MAX_FILE:
            raise Damaged(f"the description of {part} is invalid")
        for start, count in file.runs:
            refs = table.refs[first : first + count]
            if len(refs) != count or start < 0 or (start + count - 1) * grain >= size:
                raise Damaged(f"the description of {part} is invalid")
            first += count
            self._write_run(refs, start * grain, file, handle, part)
        self._next = first

    def _write_run(self, refs: array[int], position: int, file: File, handle: int, part: str) -> None:
        table, grain, size = self._table, file.grain, file.entry.size
        packs, offsets, lengths, hashes, key = (
            table.pack_column,
            table.offsets,
            table.lengths,
            table.hashes,
            self._hash_key,
        )
        at, count = 0, len(refs)
        while at < count:
            number = refs[at] - 1
            if number < 0:
                at += 1
                position += grain
                continue
            # Chunks that are contiguous, full and uncompressed are read together.
            pack, offset, to = packs[number], offsets[number], at + 1
            if lengths[number] == grain:
                most, expected = min(count, at + BIG // grain), offset + grain
                while to < most:
                    other = refs[to] - 1
                    if other < 0 or offsets[other] != expected or packs[other] != pack or lengths[other] != grain:
                        break
                    to += 1
                    expected += grain
                data = os.pread(self._handles[pack], (to - at) * grain, offset)
            else:
                data = os.pread(self._handles[pack], lengths[number], offset)
            if self._ciphers is None and len(data) == (to - at) * grain:
                for index in range(to - at):
                    chunk = data[index * grain : (index + 1) * grain]
                    number = refs[at + index] - 1
                    if (
                        blake2b(chunk, digest_size=HASH_SIZE, key=key).digest()
                        != hashes[number * HASH_SIZE : number * HASH_SIZE + HASH_SIZE]
                    ):
                        raise changed(part)
            else:
                data = b"".join(
                    self._unpack(
                        refs[at + index] - 1,
                        data[index * grain : (index + 1) * grain],
                        min(grain, size - position - index * grain),
                        part,
                    )
                    for index in range(to - at)
                )
            if len(data) > size - position:
                raise changed(part)
            _write(handle, data, position)
            position += (to - at) * grain
            at = to

    def _unpack(self, number: int, stored: bytes, expected: int, part: str) -> bytes:
        """Return a chunk's original bytes: decrypted, decompressed and compared with its hash."""
        table = self._table
        pack = table.pack_column[number]
        if len(stored) != table.lengths[number]:
            raise changed(part)
        if self._ciphers is not None:
            from cryptography.exceptions import InvalidTag

            tag = table.tags[number * TAG_SIZE : (number + 1) * TAG_SIZE]
            try:
                stored = self._ciphers[pack].decrypt(
                    _nonce(table.offsets[number]), stored + tag, table.packs[pack].encode()
                )
            except InvalidTag:
                raise changed(part) from None
        if len(stored) < expected:
            try:
                stored = zlib.decompressobj().decompress(stored, expected)
            except zlib.error:
                raise changed(part) from None
        digest = blake2b(stored, digest_size=HASH_SIZE, key=self._hash_key).digest()
        if len(stored) != expected or digest != table.hashes[number * HASH_SIZE : (number + 1) * HASH_SIZE]:
            raise changed(part)
        return stored


def _choose_packs(tables: Iterable[Table]) -> set[str]:
    """Return the packs that contain most of the tables' chunks."""
    counts: Counter[str] = Counter()
    for table in tables:
        for pack, count in Counter(table.pack_column).items():
            counts[table.packs[pack]] += count
    return set(sorted(counts, key=counts.__getitem__, reverse=True)[:MAX_PACKS])


def changed(part: str) -> Damaged:
    """Return the error for a changed part."""
    return Damaged(f"{part} was changed on disk, so the snapshot cannot be used; delete it")


def open_regular(path: Path, part: str) -> int:
    """Open a file for reading. Raises Damaged unless it exists and is a regular file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged(f"{part} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Damaged(f"{part} is not a regular file")
    return handle


def hash_big(handle: int, size: int, key: bytes) -> bytes:
    """Return the concatenated hashes of each MiB of a file; the last part may be shorter."""
    return b"".join(
        blake2b(os.pread(handle, min(BIG, size - at), at), digest_size=HASH_SIZE, key=key).digest()
        for at in range(0, size, BIG)
    )


def _nonce(offset: int) -> bytes:
    # Each pack has its own key, and each offset of a pack is written at most once.
    return offset.to_bytes(12, "little")


def _read(handle: int, count: int, start: int) -> bytes:
    data = os.pread(handle, count, start)
    # A file that has become shorter is padded with zeros, as the remainder of a truncated file would be.
    return data if len(data) == count else data + bytes(count - len(data))


def _write(handle: int, data: bytes, position: int) -> None:
    done = os.pwrite(handle, data, position)
    if done != len(data):
        raise OSError(errno.ENOSPC, "no space left for a snapshot")
