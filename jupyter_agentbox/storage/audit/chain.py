"""The hash chain of the audit log: each row's hash covers its content and the hash of the previous row.

A row's hash is SHA-256 over the previous hash (32 bytes, zero for the first row) and the compact JSON array of its id
and columns. Floating-point numbers are written in hexadecimal, as ``float.hex`` does, so that no library rounds or
shortens them. Ids are consecutive, so a missing row is detected. Rows that were dropped to limit the size of the log
leave *gaps*: their first and last id and the hash of the last row. Adjacent gaps are merged, so there are never more
gaps than rows. The log records each drop in a row of its own, with a digest of all gaps, so a forged gap that hides a
removed row is detected. ``storage.audit.log`` calls this module within its transactions.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

#: The columns of a row, besides its id and hash.
COLUMNS = (
    "time", "sandbox", "kind", "is_allowed", "host", "port", "rule", "reason", "bytes_up", "bytes_down", "duration",
    "detail",
)  # fmt: skip
#: The hash before the first row.
GENESIS = bytes(32)
#: The kind of rows that the log writes about itself.
OWN_KIND = "audit"
_NAMES = ", ".join(COLUMNS)
_INSERT = f"INSERT INTO audit (id, {_NAMES}, hash) VALUES ({', '.join('?' * (len(COLUMNS) + 2))})"
_LAST = (
    "SELECT (SELECT seq FROM sqlite_sequence WHERE name = 'audit'), (SELECT hash FROM audit ORDER BY id DESC LIMIT 1)"
)
#: Condition for rows that record damage. They are kept when other rows are dropped.
_IS_ALARM = "(sandbox = '' AND is_allowed IS 0)"
_CREATE = (
    """CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, sandbox TEXT NOT NULL, kind TEXT NOT NULL,
    is_allowed INTEGER, host TEXT, port INTEGER, rule TEXT, reason TEXT,
    bytes_up INTEGER, bytes_down INTEGER, duration REAL, detail TEXT NOT NULL)""",
    "CREATE INDEX IF NOT EXISTS audit_of_sandbox ON audit (sandbox, id)",
    "ALTER TABLE audit ADD COLUMN hash BLOB NOT NULL DEFAULT x''",
    "CREATE TABLE gaps (first INTEGER PRIMARY KEY, last INTEGER NOT NULL, hash BLOB NOT NULL)",
)
_ENCODER = msgspec.json.Encoder()
_FORGED_GAPS = "rows are missing that the log itself did not drop"
#: First id, last id, and hash of the last row.
Gap = tuple[int, int, bytes]


def create(connection: sqlite3.Connection) -> None:
    """Create the tables within a transaction, and chain the rows of a log from before chains existed."""
    for statement in _CREATE:
        connection.execute(statement)
    previous, expected, gaps = GENESIS, 1, list[Gap]()
    while rows := connection.execute(
        f"SELECT id, {_NAMES} FROM audit WHERE id >= ? ORDER BY id LIMIT 10000", (expected,)
    ).fetchall():
        hashes = []
        for number, *values in rows:
            if number > expected:
                gaps.append((expected, number - 1, previous))
            previous, expected = hash_row(previous, number, values), number + 1
            hashes.append((previous, number))
        connection.executemany("UPDATE audit SET hash = ? WHERE id = ?", hashes)
    last = connection.execute(_LAST).fetchone()[0] or 0
    if last >= expected:
        gaps.append((expected, last, previous))
    if last:
        connection.executemany("INSERT INTO gaps VALUES (?, ?, ?)", gaps)
        append_own(connection, "the hash chain starts here; earlier rows are unverified", gaps, event="chained")


def hash_row(previous: bytes, number: int, values: Sequence[Any]) -> bytes:
    """Return the hash of a row, given the hash of the previous one."""
    content = [number, *(value.hex() if isinstance(value, float) else value for value in values)]
    return hashlib.sha256(previous + _ENCODER.encode(content)).digest()


def append(connection: sqlite3.Connection, values: Sequence[Any]) -> int:
    """Add a row and return its id. The caller's transaction must exclude other writers."""
    last, previous = connection.execute(_LAST).fetchone()
    # The next number after the last one ever assigned: if rows were removed at the end, a gap in the numbers remains.
    number, previous = (last or 0) + 1, GENESIS if previous is None else previous
    connection.execute(_INSERT, (number, *values, hash_row(previous, number, values)))
    return number


def append_own(
    connection: sqlite3.Connection,
    reason: str,
    gaps: Iterable[Gap] | None = None,
    *,
    is_alarm: bool = False,
    **detail: Any,
) -> None:
    """Add a row that the log writes about itself."""
    if gaps is not None:
        detail["gaps"] = digest_gaps(gaps)
    mark, text = 0 if is_alarm else None, json.dumps(detail)
    append(connection, (time.time(), "", OWN_KIND, mark, None, None, None, reason, None, None, None, text))


def drop(connection: sqlite3.Connection, sandbox: str, count: int) -> list[Gap]:
    """Remove rows of a sandbox, and return the gaps that they leave, for :func:`close_gaps`.

    The oldest rows of the most frequent kinds are removed, so that many refusals do not displace rows of allowed
    requests.
    """
    kinds = connection.execute(
        f"SELECT kind, is_allowed, COUNT(*) FROM audit WHERE sandbox = ? AND NOT {_IS_ALARM} GROUP BY kind, is_allowed",
        (sandbox,),
    ).fetchall()
    found: list[tuple[int, bytes]] = []
    for (kind, is_allowed, _), some in zip(kinds, level([size for *_, size in kinds], count), strict=True):
        found += connection.execute(
            "DELETE FROM audit WHERE id IN "
            f"(SELECT id FROM audit WHERE sandbox = ? AND kind = ? AND is_allowed IS ? AND NOT {_IS_ALARM}"
            " ORDER BY id LIMIT ?) RETURNING id, hash",
            (sandbox, kind, is_allowed, some),
        ).fetchall()
    return [(number, number, hashed) for number, hashed in found]


def level(sizes: Sequence[int], count: int) -> list[int]:
    """Return how much to take from each of several sizes, so that the largest remaining size is as small as possible.

    Parameters
    ----------
    sizes : sequence of int
        The sizes.
    count : int
        Total to take. If the sizes add up to less, everything is taken.
    """
    taken = [0] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda index: sizes[index], reverse=True)
    left = min(count, sum(sizes))
    for number, index in enumerate(order, 1):
        # The `number` largest sizes are equal now. Reduce them to the next size, or by what is left to take.
        below = sizes[order[number]] if number < len(order) else 0
        step = min(left, (sizes[index] - below) * number)
        for place, lowered in enumerate(order[:number]):
            taken[lowered] += step // number + (place < step % number)
        left -= step
    return taken


def close_gaps(connection: sqlite3.Connection, fresh: Iterable[Gap]) -> None:
    """Merge new gaps with existing ones, and record that rows were dropped."""
    dropped = list(fresh)
    merged: list[Gap] = []
    for first, last, hashed in sorted([*_gaps(connection), *dropped]):
        if merged and merged[-1][1] + 1 == first:
            first = merged.pop()[0]
        merged.append((first, last, hashed))
    connection.execute("DELETE FROM gaps")
    connection.executemany("INSERT INTO gaps VALUES (?, ?, ?)", merged)
    append_own(connection, "the oldest rows were dropped", merged, event="dropped", rows=len(dropped))


def check_gaps(connection: sqlite3.Connection) -> None:
    """Record an alarm if the gaps are not those that the log has left. Call this before :func:`drop`."""
    gaps = _gaps(connection)
    recorded = connection.execute(
        "SELECT detail FROM audit WHERE sandbox = '' AND kind = ? AND detail LIKE '%\"gaps\"%' "
        "ORDER BY id DESC LIMIT 1",
        (OWN_KIND,),
    ).fetchone()
    expected = json.loads(recorded[0])["gaps"] if recorded is not None else digest_gaps(())
    if digest_gaps(gaps) != expected:
        append_own(connection, _FORGED_GAPS, gaps, is_alarm=True, event="damaged")


def digest_gaps(gaps: Iterable[Gap]) -> str:
    """Return a digest over gaps in their order, in hexadecimal digits."""
    digest = hashlib.sha256()
    for first, last, hashed in gaps:
        digest.update(b"%d-%d:" % (first, last) + hashed)
    return digest.hexdigest()


def _gaps(connection: sqlite3.Connection) -> list[Gap]:
    return connection.execute("SELECT first, last, hash FROM gaps ORDER BY first").fetchall()


@dataclass(frozen=True)
class Verification:
    """The result of checking a log.

    Parameters
    ----------
    is_ok : bool
    rows, dropped : int
        Number of valid rows, and number of rows that were dropped earlier.
    head : str
        Id and hash of the last valid row, to be kept elsewhere: ``1234:9f...``. Empty if there is none.
    row : int or None
        Id of the first row that is invalid or missing.
    problem : str or None
        A sentence that describes the problem.
    """

    is_ok: bool
    rows: int
    dropped: int
    head: str
    row: int | None = None
    problem: str | None = None


class _BrokenError(Exception):
    def __init__(self, row: int, problem: str) -> None:
        super().__init__(problem)
        self.row = row


class _Check:
    """One pass over the chain."""

    def __init__(self, trusted: tuple[int, bytes] | None) -> None:
        self.trusted = trusted
        self.previous, self.expected = GENESIS, 1
        self.rows = self.dropped = 0
        self.head = ""
        self.gaps_digest: str | None = None
        self.gaps_row = 0

    def walk(self, connection: sqlite3.Connection) -> None:
        gaps = _gaps(connection)
        if not all(isinstance(value, kind) for gap in gaps for value, kind in zip(gap, (int, int, bytes), strict=True)):
            raise _BrokenError(1, "the table of dropped rows is malformed")
        by_first = {gap[0]: gap for gap in gaps}
        for number, hashed, *values in connection.execute(f"SELECT id, hash, {_NAMES} FROM audit ORDER BY id"):
            while self.expected < number and (gap := by_first.pop(self.expected, None)) is not None:
                self._pass_gap(gap, number)
            if self.expected != number:
                raise _BrokenError(self.expected, f"{_rows(self.expected, number - 1)} missing")
            self._pass_row(number, hashed, values)
        last = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").fetchone()
        if last is not None and last[0] >= self.expected:
            raise _BrokenError(self.expected, f"{_rows(self.expected, last[0])} missing at the end")
        if by_first:
            raise _BrokenError(min(by_first), "the log lists rows as dropped that it did not drop")
        if gaps and digest_gaps(gaps) != self.gaps_digest:
            raise _BrokenError(self.gaps_row or gaps[0][0], _FORGED_GAPS)
        if self.trusted is not None and self.trusted[0] >= self.expected:
            raise _BrokenError(self.expected, f"row {self.trusted[0]} of the given head is missing")

    def _pass_gap(self, gap: Gap, until: int) -> None:
        first, last, hashed = gap
        if not first <= last < until:
            raise _BrokenError(first, "the log lists rows as dropped that it did not drop")
        if self.trusted is not None and first <= self.trusted[0] < last:
            raise _BrokenError(
                self.trusted[0], f"row {self.trusted[0]} of the given head was dropped since; use a newer head"
            )
        self.dropped += last - first + 1
        self._pass(last, hashed)

    def _pass_row(self, number: int, hashed: bytes, values: list[Any]) -> None:
        # A value of a type that the log never writes could have the same encoding as another value.
        is_known = all(value is None or isinstance(value, (str, int, float)) for value in values)
        if not is_known or hash_row(self.previous, number, values) != hashed:
            raise _BrokenError(number, f"row {number} was changed or moved")
        self._pass(number, hashed)
        self.rows += 1
        self.head = f"{number}:{hashed.hex()}"
        if values[COLUMNS.index("kind")] == OWN_KIND:
            if values[COLUMNS.index("is_allowed")] == 0:
                raise _BrokenError(number, f"row {number} is an alarm: {values[COLUMNS.index('reason')]}")
            detail = json.loads(values[-1])
            if "gaps" in detail:
                self.gaps_digest, self.gaps_row = detail["gaps"], number

    def _pass(self, number: int, hashed: bytes) -> None:
        if self.trusted is not None and number == self.trusted[0] and hashed != self.trusted[1]:
            raise _BrokenError(number, f"row {number} does not match the given head: the log was rewritten")
        self.previous, self.expected = hashed, number + 1


def verify(connection: sqlite3.Connection, trusted: tuple[int, bytes] | None = None) -> Verification:
    """Check the chain up to its end or to the first invalid row.

    Parameters
    ----------
    connection : sqlite3.Connection
        A connection within a transaction, so that all rows are from the same moment.
    trusted : int and bytes, optional
        Id and hash of a row, as kept elsewhere.
    """
    check = _Check(trusted)
    try:
        check.walk(connection)
    except _BrokenError as broken:
        return Verification(False, check.rows, check.dropped, check.head, broken.row, str(broken))
    return Verification(True, check.rows, check.dropped, check.head)


def _rows(first: int, last: int) -> str:
    return f"row {first} is" if first == last else f"rows {first} to {last} are"
