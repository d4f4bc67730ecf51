"""Compress the memory of parked kernels, which may be stored for long, in pieces that several threads can restore.

The hash of each piece covers its compressed form, so nothing is decompressed that this store has not written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

import zstandard

from .pages import BIG, HASH_SIZE, Packed, changed, open_regular
from .tree import MAX_FILE

#: Threads for compression and decompression. The library releases the interpreter lock for both.
_WORKERS = min(4, os.cpu_count() or 1)
#: Pieces in progress at a time, which limits the memory used.
_AHEAD = 4 * _WORKERS
#: Level of zstd. The next level takes three times as long and saves one fourteenth.
_LEVEL = 3


def pack(handle: int, name: str, size: int, target: Path, key: bytes) -> Packed:
    """Write an open file to `target`, compressed."""
    lengths, hashes = [], []
    with open(target, "xb") as file, ThreadPoolExecutor(_WORKERS) as pool:
        for group in _groups(size):
            for piece, digest in pool.map(lambda at: _compress(handle, at, size, key), group):
                file.write(piece)
                lengths.append(len(piece))
                hashes.append(digest)
    target.chmod(0o400)
    return Packed(name, size, lengths, b"".join(hashes))


def _compress(handle: int, at: int, size: int, key: bytes) -> tuple[bytes, bytes]:
    data = os.pread(handle, min(BIG, size - at), at)
    piece = zstandard.ZstdCompressor(level=_LEVEL).compress(data.ljust(min(BIG, size - at), b"\0"))
    return piece, _digest(piece, key)


def unpack(packed: Packed, source: Path, handle: int, key: bytes, part: str) -> None:
    """Write the original content to an empty open file. Raises Damaged, which names `part`."""
    count = -(-packed.size // BIG)
    if not 0 <= packed.size <= MAX_FILE or not len(packed.lengths) * HASH_SIZE == count * HASH_SIZE == len(
        packed.hashes
    ):
        raise changed(part)
    starts = [0, *accumulate(packed.lengths)]
    stored = open_regular(source, part)
    try:
        if os.fstat(stored).st_size != starts[-1]:
            raise changed(part)
        os.ftruncate(handle, packed.size)

        def restore(number: int) -> None:
            piece = os.pread(stored, packed.lengths[number], starts[number])
            if _digest(piece, key) != packed.hashes[number * HASH_SIZE : (number + 1) * HASH_SIZE]:
                raise changed(part)
            expected = min(BIG, packed.size - number * BIG)
            try:
                data = zstandard.ZstdDecompressor().decompress(piece)
            except zstandard.ZstdError:
                raise changed(part) from None
            if len(data) != expected or os.pwrite(handle, data, number * BIG) != expected:
                raise changed(part)

        with ThreadPoolExecutor(_WORKERS) as pool:
            for group in _groups(packed.size):
                list(pool.map(restore, [at // BIG for at in group]))
    finally:
        os.close(stored)


def _groups(size: int) -> Iterator[range]:
    for start in range(0, size, _AHEAD * BIG):
        yield range(start, min(size, start + _AHEAD * BIG), BIG)


def _digest(piece: bytes, key: bytes) -> bytes:
    return blake2b(piece, digest_size=HASH_SIZE, key=key).digest()
