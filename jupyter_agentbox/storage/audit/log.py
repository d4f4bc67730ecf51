"""Record every action and every egress decision in the audit log, one row each, in SQLite.

Rows are never changed. When the log is full, the oldest are dropped. Many processes write to one file, each from many
threads and event loops. An operation that depends on a row must not continue without it: a row that cannot be written
raises :class:`~jupyter_agentbox.errors.AgentboxError`, and the egress gate then refuses. A hash chain over the rows
(``storage.audit.chain``) reveals later changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import re
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jupyter_agentbox.errors import AgentboxError, DiskFull, InvalidRequest
from jupyter_agentbox.models.redaction import redact

from . import chain
from .chain import COLUMNS, Verification

log = logging.getLogger(__name__)

_SCHEMA = 2
#: Maximum characters of a text column, because code inside chooses many of the texts.
MAX_TEXT = 1024
_SELECT = f"SELECT id, hash, {', '.join(COLUMNS)} FROM audit"
_HEAD = re.compile(r"([1-9][0-9]{0,17}):([0-9a-f]{64})")


@dataclass(frozen=True)
class AuditRow:
    """One row of the audit log.

    Parameters
    ----------
    id : int
        Increasing number that is never reused.
    time : float
        Seconds since the epoch, UTC.
    sandbox : str
        Id of the sandbox.
    kind : str
        ``egress`` (a decision), ``egress_closed`` (the end of an allowed connection), ``lifecycle``, ...
    is_allowed : bool or None
        The decision, if there was one.
    host, port, rule, reason
        The requested destination, the pattern that allowed it, and the reason for a refusal or failure.
    bytes_up, bytes_down : int or None
        Bytes sent and received by the sandbox.
    duration : float or None
        Seconds.
    detail : dict
        Further details.
    hash : str
        Hash of this row and all previous ones, in hexadecimal digits.
    """

    id: int
    time: float
    sandbox: str
    kind: str
    is_allowed: bool | None = None
    host: str | None = None
    port: int | None = None
    rule: str | None = None
    reason: str | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    duration: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    hash: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain values for JSON."""
        return asdict(self)


class AuditLog:
    """The audit log in one file. Threads may share it. It connects at first use.

    Parameters
    ----------
    path : str or Path
        The file; created with mode 0600 in a directory of mode 0700.
    max_rows : int
        Approximate number of rows to keep. Beyond it, the sandbox with the most rows loses the oldest rows of its most
        frequent kinds. So one busy sandbox cannot displace the rows of others, and its refused requests cannot displace
        the rows of its allowed ones.
    busy_timeout : float
        Seconds to wait while another process writes.
    """

    #: Called with kind, sandbox and columns of each row that this process has written, on the thread that wrote it.
    observers: ClassVar[list[Callable[[str, str, Mapping[str, Any]], None]]] = []

    def __init__(self, path: str | Path, *, max_rows: int = 1_000_000, busy_timeout: float = 10.0) -> None:
        self.path = Path(path)
        self.max_rows = max_rows
        self.busy_timeout = busy_timeout
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._closer: weakref.finalize[..., Any] | None = None
        self._inode: tuple[int, int] | None = None
        self._until_prune = 0
        self._is_closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="agentbox-audit")

    # -- writing -------------------------------------------------------------------------------

    def record(
        self,
        kind: str,
        sandbox: str,
        *,
        is_allowed: bool | None = None,
        host: str | None = None,
        port: int | None = None,
        rule: str | None = None,
        reason: str | None = None,
        bytes_up: int | None = None,
        bytes_down: int | None = None,
        duration: float | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> int:
        """Write one row and return its id. Blocks; see :class:`AuditRow` for the columns.

        Raises
        ------
        AgentboxError
            The row could not be written.
        """
        redacted = json.loads(redact(json.dumps(dict(detail or {}), default=str)))
        host, reason = _text(host), _text(reason)
        row = (
            time.time(), _text(sandbox), _text(kind), None if is_allowed is None else int(is_allowed), host,
            port, _text(rule), reason, bytes_up, bytes_down, None if duration is None else float(duration),
            json.dumps(redacted),
        )  # fmt: skip
        with self._lock:
            try:
                number = self._write(row)
            except (sqlite3.Error, OSError, TypeError, ValueError, OverflowError) as error:
                self._disconnect()
                raise self._unwritable(error) from error
        columns = {
            "is_allowed": is_allowed, "host": host, "port": port, "reason": reason, "duration": duration,
            "detail": redacted,
        }  # fmt: skip
        for observer in tuple(self.observers):
            try:
                observer(kind, sandbox, columns)
            except Exception:
                log.exception("an observer of the audit log failed")
        return number

    def _unwritable(self, error: Exception) -> AgentboxError:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "disk is full" in str(error):
            return DiskFull(
                f"the audit log {self.path} cannot be written: the disk is full. Free some space, or move "
                "Policy.state_dir to another disk",
                setting="Policy.state_dir",
            )
        remedy = ""
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            remedy = ". Move it elsewhere and check it with `jupyter agentbox audit verify`; a new log is created"
        return AgentboxError(
            f"the audit log {self.path} cannot be written: {error}{remedy}", setting="Policy.state_dir"
        )

    def check(self) -> None:
        """Check that rows can be written, without writing one. Blocks.

        Raises
        ------
        AgentboxError
            Rows cannot be written; see :meth:`record`.
        """
        with self._lock:
            try:
                connection = self._connected()
                connection.execute("BEGIN IMMEDIATE")
                try:
                    chain.append(connection, (time.time(), "", chain.OWN_KIND, *(None,) * 8, "{}"))
                finally:
                    connection.execute("ROLLBACK")
            except (sqlite3.Error, OSError, TypeError, ValueError, OverflowError) as error:
                self._disconnect()
                raise self._unwritable(error) from error

    def submit(self, kind: str, sandbox: str, **columns: Any) -> Future[int]:
        """Write one row on the log's own thread, after the rows submitted earlier."""
        return self._worker.submit(self.record, kind, sandbox, **columns)

    def note(self, kind: str, sandbox: str, **columns: Any) -> None:
        """Write one row without waiting for it. If that fails, the server's log reports it."""
        with contextlib.suppress(RuntimeError):  # the log is closed already
            self.submit(kind, sandbox, **columns).add_done_callback(_log_missing_row)

    async def arecord(self, kind: str, sandbox: str, **columns: Any) -> int:
        """Write one row without blocking the caller's event loop; see :meth:`record`."""
        return await asyncio.wrap_future(self.submit(kind, sandbox, **columns))

    def _write(self, row: tuple[Any, ...]) -> int:
        connection = self._connected()
        # Locked against all other writers, because a row depends on the previous one.
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            number = chain.append(connection, row)
            self._until_prune -= 1
            if self._until_prune <= 0:
                self._prune(connection)
        return number

    def _prune(self, connection: sqlite3.Connection) -> None:
        batch = max(1, self.max_rows // 20)
        self._until_prune = batch
        counts = dict(connection.execute("SELECT sandbox, COUNT(*) FROM audit GROUP BY sandbox").fetchall())
        surplus = sum(counts.values()) - self.max_rows
        if surplus <= 0:
            return
        surplus += batch
        chain.check_gaps(connection)
        dropped: list[chain.Gap] = []
        while surplus > 0 and counts:
            noisiest = max(counts, key=counts.__getitem__)
            count = min(surplus, counts.pop(noisiest))
            dropped += chain.drop(connection, noisiest, count)
            surplus -= count
        chain.close_gaps(connection, dropped)

    # -- reading -------------------------------------------------------------------------------

    def query(
        self,
        *,
        sandbox: str | None = None,
        kind: str | None = None,
        is_allowed: bool | None = None,
        since: float | None = None,
        until: float | None = None,
        after_id: int | None = None,
        before_id: int | None = None,
        limit: int = 1000,
    ) -> list[AuditRow]:
        """Return the rows that match all filters, oldest first: the newest rows, or the first ones after `after_id`.

        Parameters
        ----------
        sandbox, kind : str, optional
            Exact values.
        is_allowed : bool, optional
            Only allowed rows, or only refused ones.
        since, until : float, optional
            Seconds since the epoch: start, inclusive, and end, exclusive.
        after_id, before_id : int, optional
            Only rows after the first id and before the second one.
        limit : int
            Maximum number of rows.
        """
        where, values = _where(sandbox, kind, is_allowed, since, until, after_id, before_id)
        sql = f"{_SELECT} {where} ORDER BY id {'DESC' if after_id is None else 'ASC'} LIMIT ?"
        with self._lock:
            try:
                found = self._connected().execute(sql, [*values, limit]).fetchall()
            except (sqlite3.Error, OSError) as error:
                self._disconnect()
                raise AgentboxError(f"the audit log {self.path} cannot be read: {error}") from error
        return [_row(values) for values in (reversed(found) if after_id is None else found)]

    async def aquery(self, **filters: Any) -> list[AuditRow]:
        """Query without blocking the caller's event loop; see :meth:`query`."""
        return await asyncio.wrap_future(self._worker.submit(self.query, **filters))

    def read(
        self,
        *,
        sandbox: str | None = None,
        kind: str | None = None,
        is_allowed: bool | None = None,
        since: float | None = None,
        until: float | None = None,
        after_id: int | None = None,
        before_id: int | None = None,
    ) -> Iterator[AuditRow]:
        """Yield all rows that match, oldest first, as of this moment; for the filters see :meth:`query`.

        SQLite's log file grows during the iteration. Slow readers should use :meth:`pages`.
        """
        where, values = _where(sandbox, kind, is_allowed, since, until, after_id, before_id)
        with self._reading() as connection:
            for row in connection.execute(f"{_SELECT} {where} ORDER BY id", values):
                yield _row(row)

    def pages(self, *, after_id: int | None = None, size: int = 1000, **filters: Any) -> Iterator[list[AuditRow]]:
        """Yield all rows that match, oldest first, up to the newest one of this moment, in lists of `size` rows.

        For the filters see :meth:`query`. No lock or transaction is held between two pages. Blocks.
        """
        newest = self.query(limit=1)
        before, last = (newest[-1].id + 1 if newest else 1), after_id or 0
        while rows := self.query(**filters, after_id=last, before_id=before, limit=size):
            yield rows
            last = rows[-1].id

    def verify(self, head: str | None = None) -> Verification:
        """Check that the log contains what was written. Blocks for seconds, without delaying writers.

        Parameters
        ----------
        head : str, optional
            A :attr:`~jupyter_agentbox.storage.audit.chain.Verification.head` from an earlier check, kept where no one
            who can write to this file can write.

        Raises
        ------
        InvalidRequest
            The head is malformed.
        AgentboxError
            The log does not exist, or cannot be read.
        """
        trusted = None
        if head is not None:
            match = _HEAD.fullmatch(head)
            if match is None:
                raise InvalidRequest("a head must be a row number and its hash, as NUMBER:HASH", field="head")
            trusted = int(match[1]), bytes.fromhex(match[2])
        with self._reading() as connection:
            return chain.verify(connection, trusted)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a separate connection whose reads all see the same moment."""
        if not self.path.exists():
            raise AgentboxError(f"the audit log {self.path} does not exist yet")
        try:
            with self._lock:
                self._connected()  # upgrades a log of an earlier release to the current format
            connection = sqlite3.connect(self.path, timeout=self.busy_timeout, isolation_level=None)
            with contextlib.closing(connection):
                connection.execute("PRAGMA query_only = ON")
                connection.execute("BEGIN")
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise AgentboxError(f"the audit log {self.path} cannot be read: {error}") from error

    # -- the file ------------------------------------------------------------------------------

    def close(self) -> None:
        """Write the submitted rows and close the log. Idempotent."""
        self._worker.shutdown(wait=True)
        with self._lock:
            self._disconnect()
            self._is_closed = True

    def _connected(self) -> sqlite3.Connection:
        if self._is_closed:
            raise OSError("the log is closed")
        is_lost = False
        if self._connection is not None:
            if self._inode == self._file_id():
                return self._connection
            # SQLite would continue to write to a file that no longer has a name.
            log.error("the audit log %s was removed or replaced while in use; starting a new one", self.path)
            self._disconnect()
            is_lost = True
        else:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        # One connection for all threads; every use holds the lock.
        connection = sqlite3.connect(
            self.path, timeout=self.busy_timeout, isolation_level=None, check_same_thread=False
        )
        try:
            # Rows survive the end of any process. A power failure may lose the last moments.
            _retried(lambda: connection.execute("PRAGMA journal_mode = WAL"), self.busy_timeout)
            connection.execute("PRAGMA synchronous = NORMAL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > _SCHEMA:
                raise OSError(f"it was created by a newer release (format {version})")
            if version < _SCHEMA:
                self._upgrade(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        # Closes the connection of a log that was never closed. Not at exit, when rows may still be written.
        self._closer = weakref.finalize(self, connection.close)
        self._closer.atexit = False
        self._inode = self._file_id()
        self._until_prune = 0
        if is_lost:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                chain.append_own(connection, "the log was removed or replaced")
        return connection

    @staticmethod
    def _upgrade(connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            # Another process may have upgraded it in the meantime.
            if connection.execute("PRAGMA user_version").fetchone()[0] < _SCHEMA:
                chain.create(connection)
                connection.execute(f"PRAGMA user_version = {_SCHEMA}")

    def _file_id(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _disconnect(self) -> None:
        if self._closer is not None:
            self._closer()
        self._connection = self._closer = None


def _log_missing_row(row: Future[int]) -> None:
    if not row.cancelled() and (error := row.exception()) is not None:
        log.error("a row could not be written to the audit log: %s", error)


def _retried(action: Any, timeout: float) -> None:
    """Retry an action. Changing to WAL fails without a wait while another process does the same."""
    end = time.monotonic() + timeout
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.01)


def _text(value: str | None) -> str | None:
    if value is None:
        return None
    return redact("".join(c if c.isprintable() else "?" for c in value[:MAX_TEXT]))


def _where(
    sandbox: str | None,
    kind: str | None,
    is_allowed: bool | None,
    since: float | None,
    until: float | None,
    after_id: int | None,
    before_id: int | None,
) -> tuple[str, list[Any]]:
    filters = [
        (condition, value)
        for condition, value in (
            ("sandbox = ?", sandbox),
            ("kind = ?", kind),
            ("is_allowed = ?", is_allowed),
            ("time >= ?", since),
            ("time < ?", until),
            ("id > ?", after_id),
            ("id < ?", before_id),
        )
        if value is not None
    ]
    where = "WHERE " + " AND ".join(condition for condition, _ in filters) if filters else ""
    return where, [value for _, value in filters]


def _row(values: tuple[Any, ...]) -> AuditRow:
    columns: dict[str, Any] = dict(zip(COLUMNS, values[2:], strict=True))
    decision = columns.pop("is_allowed")
    detail = json.loads(columns.pop("detail"))
    return AuditRow(
        values[0],
        hash=values[1].hex() if isinstance(values[1], bytes) else "",
        is_allowed=None if decision is None else bool(decision),
        detail=detail,
        **columns,
    )
