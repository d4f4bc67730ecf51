"""The audit log: complete, bounded, private, shared by processes, and never lost in silence."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.errors import AgentboxError, InvalidRequest
from jupyter_agentbox.storage.audit import chain
from jupyter_agentbox.storage.audit.chain import hash_row
from jupyter_agentbox.storage.audit.log import AuditLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "audit.sqlite"


def test_rows_come_back_as_they_were_written(path: Path) -> None:
    log = AuditLog(path)
    first = log.record(
        "egress", "one", is_allowed=True, host="a.example", port=443, rule="*.example", detail={"x": [1]}
    )
    log.record("egress", "one", is_allowed=False, host="b\x1b[2J\n", port=22, reason="no")
    log.record("egress_closed", "two", bytes_up=1, bytes_down=2, duration=0.5)
    rows = log.query()
    assert [row.id for row in rows] == [first, first + 1, first + 2]
    assert (rows[0].is_allowed, rows[0].rule, rows[0].detail) == (True, "*.example", {"x": [1]})
    assert rows[1].host == "b?[2J?"
    assert rows[2].to_dict()["bytes_down"] == 2
    assert [r.id for r in log.query(sandbox="one", is_allowed=False)] == [first + 1]
    assert log.query(kind="lifecycle") == []
    assert [r.id for r in log.query(limit=1)] == [first + 2]
    assert [r.id for r in log.query(after_id=first)] == [first + 1, first + 2]
    assert log.query(since=rows[2].time + 1) == []
    log.close()


def test_only_its_owner_can_read_it(path: Path) -> None:
    old = os.umask(0)
    try:
        log = AuditLog(path)
        log.record("egress", "one")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}
    log.close()


def test_many_processes_write_at_once(path: Path) -> None:
    program = (
        "import sys; from jupyter_agentbox.storage.audit.log import AuditLog\n"
        "log = AuditLog(sys.argv[1], busy_timeout=60)\n"
        "for n in range(100): log.record('egress', sys.argv[2], port=n)\n"
        "log.close()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(path), f"box{n}"]) for n in range(3)]
    assert [process.wait(150) for process in processes] == [0] * 3
    log = AuditLog(path)
    for n in range(3):
        assert [row.port for row in log.query(sandbox=f"box{n}")] == list(range(100))
    assert log.verify().rows == 300
    log.close()


def test_many_loops_and_threads_write_at_once(path: Path) -> None:
    log = AuditLog(path)

    async def write(name: str) -> None:
        await asyncio.gather(*(log.arecord("egress", name, port=n) for n in range(50)))

    threads = [threading.Thread(target=lambda n=n: asyncio.run(write(f"box{n}"))) for n in range(5)]
    for thread in threads:
        thread.start()
    for n in range(100):
        log.record("egress", "sync", port=n)
    for thread in threads:
        thread.join(60)
    assert len(asyncio.run(log.aquery(limit=10_000))) == 350
    log.close()


def test_a_noisy_sandbox_pushes_out_its_own_rows_only(path: Path) -> None:
    log = AuditLog(path, max_rows=200)
    quiet = [log.record("egress", "quiet", port=n) for n in range(20)]
    for n in range(1000):
        log.record("egress", "noisy", port=n)
    assert [row.id for row in log.query(sandbox="quiet")] == quiet
    assert 150 < len(log.query(limit=10_000)) <= 220
    noisy = log.query(sandbox="noisy", limit=10_000)
    assert [row.port for row in noisy] == list(range(1000 - len(noisy), 1000))
    log.close()


def test_a_flood_of_refusals_leaves_the_rows_of_what_was_allowed(path: Path) -> None:
    log = AuditLog(path, max_rows=200)
    started = log.record("lifecycle", "one", detail={"event": "started"})
    allowed = [log.record("egress", "one", is_allowed=True, port=n) for n in range(10)]
    closed = [log.record("egress_closed", "one", port=n) for n in range(10)]
    other = [log.record("egress", "other", is_allowed=False, port=n) for n in range(20)]
    for n in range(1000):
        log.record("egress", "one", is_allowed=False, port=n)
    assert [row.id for row in log.query(sandbox="one", kind="lifecycle")] == [started]
    assert [row.id for row in log.query(sandbox="one", is_allowed=True)] == allowed
    assert [row.id for row in log.query(sandbox="one", kind="egress_closed")] == closed
    assert [row.id for row in log.query(sandbox="other")] == other
    refused = log.query(sandbox="one", is_allowed=False, limit=10_000)
    assert [row.port for row in refused] == list(range(1000 - len(refused), 1000))
    assert 150 < len(log.query(limit=10_000)) <= 220
    assert log.verify().is_ok
    log.close()


@given(st.lists(st.integers(0, 40), max_size=7), st.integers(0, 200))
def test_the_largest_heaps_are_lowered_first(sizes: list[int], count: int) -> None:
    taken = chain.level(sizes, count)
    left = [size - some for size, some in zip(sizes, taken, strict=True)]
    assert sum(taken) == min(count, sum(sizes))
    assert all(some >= 0 and rest >= 0 for some, rest in zip(taken, left, strict=True))
    assert all(rest >= max(left) - 1 for some, rest in zip(taken, left, strict=True) if some)


def test_long_texts_are_cut(path: Path) -> None:
    log = AuditLog(path)
    log.record("egress", "one", host="x" * 100_000)
    assert len(log.query()[0].host or "") == 1024
    log.close()


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    log = AuditLog(blocked / "audit.sqlite")
    with pytest.raises(AgentboxError, match="cannot be written"):
        log.record("egress", "one")
    with pytest.raises(AgentboxError, match="cannot be written"):
        asyncio.run(log.arecord("egress", "one"))
    log.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        log.submit("egress", "one").result(10)
    log = AuditLog(tmp_path / "audit.sqlite")
    with pytest.raises(AgentboxError, match="cannot be written"):
        log.record("egress", "one", port=1 << 64)
    log.record("egress", "one")
    assert len(log.query()) == 1
    assert log.verify().is_ok
    log.close()
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    log = AuditLog(broken)
    with pytest.raises(AgentboxError, match="file is not a database"):
        log.record("egress", "one")
    log.close()


def test_a_row_that_nobody_waits_for_is_missed_aloud(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(path, busy_timeout=0.1)
    log.note("call", "one")
    log.note("call", "one", port=1 << 64)
    log.close()
    log.note("call", "one")
    log = AuditLog(path)
    assert len(log.query()) == 1
    log.close()
    (record,) = caplog.records
    assert "could not be written to the audit log" in record.getMessage()


def test_a_writer_that_holds_the_log_is_waited_for_and_then_said(path: Path) -> None:
    log = AuditLog(path, busy_timeout=0.2)
    log.record("egress", "one")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(AgentboxError, match="locked"):
        log.record("egress", "one")
    other.execute("COMMIT")
    other.close()
    log.record("egress", "one")
    log.close()


def test_a_log_removed_while_in_use_begins_anew_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(path)
    log.record("egress", "one")
    for file in path.parent.iterdir():
        file.unlink()
    log.record("egress", "two")
    assert [(row.kind, row.sandbox) for row in log.query()] == [("audit", ""), ("egress", "two")]
    assert log.verify().is_ok
    assert "removed or replaced" in caplog.text
    log.close()


def test_a_log_of_a_newer_release_is_left_alone(path: Path) -> None:
    log = AuditLog(path)
    log.record("egress", "one")
    log.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    log = AuditLog(path)
    with pytest.raises(AgentboxError, match="newer release"):
        log.record("egress", "one")
    log.close()


def test_a_log_that_nobody_closes_leaves_no_file_open(path: Path) -> None:
    log = AuditLog(path)
    log.record("egress", "one")
    assert [link for link in open_files() if link.startswith(str(path))]
    del log
    gc.collect()
    assert not [link for link in open_files() if link.startswith(str(path))]


def open_files() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing itself
            links.append(os.readlink(entry))
    return links


# -- the chain ---------------------------------------------------------------------------------------

#: Rows of a log that was full: one sandbox lost its oldest, between those of another.
FULL = {"max_rows": 40}


def write(log: AuditLog, count: int = 60) -> None:
    for number in range(count):
        name = "quiet" if number % 10 == 0 else "noisy"
        log.record("egress", name, is_allowed=number % 2 == 0, host=f"h{number}.example", port=number, duration=number)


def tamper(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("options", [{}, FULL], ids=["whole", "with dropped rows"])
def test_what_was_written_is_verified(path: Path, options: dict[str, int]) -> None:
    log = AuditLog(path, **options)
    write(log)
    found = log.verify()
    assert (found.is_ok, found.problem, found.row) == (True, None, None)
    assert found.rows == len(log.query())
    last = log.query(limit=1)[0]
    assert found.head == f"{last.id}:{last.hash}"
    assert found.rows + found.dropped == last.id
    assert bool(found.dropped) == bool(options)
    write(log)
    assert log.verify(found.head).is_ok
    assert [row.id for row in log.read(sandbox="quiet")] == [row.id for row in log.query(sandbox="quiet")]
    if options:
        own = log.query(kind="audit")
        assert own
        assert (own[-1].reason, own[-1].detail["event"]) == ("the oldest rows were dropped", "dropped")
    log.close()


#: What is done, and how far from row ``:late`` the first broken row is, where that is known.
DAMAGES = {
    "changed": ("UPDATE audit SET host = 'x' WHERE id = :late", 0),
    "turned": ("UPDATE audit SET is_allowed = COALESCE(1 - is_allowed, 1) WHERE id = :late", 0),
    "of another kind": ("UPDATE audit SET host = x'00ff' WHERE id = :late", 0),
    "another's": ("UPDATE audit SET sandbox = 'quiet' WHERE id = :late", 0),
    "its hash changed": ("UPDATE audit SET hash = x'00' WHERE id = :late", 0),
    "its hash a text": ("UPDATE audit SET hash = 'x' WHERE id = :late", 0),
    "removed": ("DELETE FROM audit WHERE id = :late", 0),
    "the first removed": ("DELETE FROM audit WHERE id = (SELECT MIN(id) FROM audit)", None),
    "swapped": ("UPDATE audit SET id = CASE id WHEN :late THEN -1 ELSE :late END WHERE id IN (:late, :next);"
                "UPDATE audit SET id = :next WHERE id = -1", 0),
    "its content swapped": ("UPDATE audit SET host = 'h1.example' WHERE id = :next", 1),
    "inserted at the end": ("INSERT INTO audit (time, sandbox, kind, detail) VALUES (1, 'x', 'call', '{}')", None),
    "inserted before all": ("INSERT INTO audit (id, time, sandbox, kind, detail) VALUES (0, 1, 'x', 'y', '{}')", None),
    "cut": ("DELETE FROM audit WHERE id > :cut", 2),
    "emptied": ("DELETE FROM audit", None),
    "removed, and a gap made up": ("INSERT INTO gaps SELECT id, id, hash FROM audit WHERE id = :late;"
                                   "DELETE FROM audit WHERE id = :late", None),
    "a gap made up alone": ("INSERT INTO gaps VALUES (1000, 1001, x'00')", None),
    "a gap over what is there": ("INSERT INTO gaps VALUES (:late, :late, x'00')", None),
    "a gap of nonsense": ("INSERT INTO gaps VALUES (1001, 'x', 'y')", None),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("options", [{}, FULL], ids=["whole", "with dropped rows"])
def test_damage_is_found(path: Path, damage: str, options: dict[str, int]) -> None:
    log = AuditLog(path, **options)
    write(log)
    assert log.verify().is_ok
    if options:
        assert log.verify().dropped
    late = log.query(limit=1)[0].id - 8
    statements, offset = DAMAGES[damage]
    for name, number in (("late", late), ("next", late + 1), ("cut", late + 1)):
        statements = statements.replace(f":{name}", str(number))
    tamper(path, *statements.split(";"))
    found = log.verify()
    assert not found.is_ok
    assert found.problem
    assert found.row is not None
    if offset is not None:
        assert found.row == late + offset, found
    # Rows that are written later do not cover it up.
    with contextlib.suppress(AgentboxError):  # a log whose own table is nonsense takes no more rows
        write(log, 5)
    assert not log.verify().is_ok
    log.close()


def test_only_a_head_kept_elsewhere_tells_a_log_written_anew(path: Path) -> None:
    log = AuditLog(path)
    write(log)
    head = log.verify().head
    log.close()
    with sqlite3.connect(path) as connection:
        previous = bytes(32)
        connection.execute("DELETE FROM audit WHERE id > 55")
        connection.execute("UPDATE sqlite_sequence SET seq = 55")
        connection.execute("UPDATE audit SET host = 'harmless.example' WHERE id = 7")
        columns = "time, sandbox, kind, is_allowed, host, port, rule, reason, bytes_up, bytes_down, duration, detail"
        for number, *values in connection.execute(f"SELECT id, {columns} FROM audit ORDER BY id").fetchall():
            previous = hash_row(previous, number, values)
            connection.execute("UPDATE audit SET hash = ? WHERE id = ?", (previous, number))
    connection.close()
    log = AuditLog(path)
    assert log.verify().is_ok
    found = log.verify(head)
    assert (found.is_ok, found.row) == (False, 56)
    assert "is missing" in (found.problem or "")
    write(log, 10)
    assert "the log was rewritten" in (log.verify(head).problem or "")
    log.close()


def test_a_head_that_was_dropped_or_is_none(path: Path) -> None:
    log = AuditLog(path, **FULL)
    write(log, 12)
    head = log.verify().head
    write(log, 200)
    found = log.verify(head)
    assert not found.is_ok
    assert "dropped since" in (found.problem or "")
    for nonsense in ("", "x", "1:", "0:" + "0" * 64, "1:" + "G" * 64, "1:" + "0" * 65):
        with pytest.raises(InvalidRequest):
            log.verify(nonsense)
    log.close()


def test_there_are_never_more_gaps_than_rows(path: Path) -> None:
    log = AuditLog(path, max_rows=40)
    for number in range(600):
        log.record("egress", f"box{number % 2 + 2 * (number // 100)}", port=number)
    with sqlite3.connect(path) as connection:
        gaps = connection.execute("SELECT COUNT(*) FROM gaps").fetchone()[0]
    connection.close()
    found = log.verify()
    assert found.is_ok, found
    assert 1 <= gaps <= found.rows + 1
    log.close()


FORMAT_1 = """
CREATE TABLE audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, sandbox TEXT NOT NULL, kind TEXT NOT NULL,
    is_allowed INTEGER, host TEXT, port INTEGER, rule TEXT, reason TEXT,
    bytes_up INTEGER, bytes_down INTEGER, duration REAL, detail TEXT NOT NULL
);
CREATE INDEX audit_of_sandbox ON audit (sandbox, id);
PRAGMA user_version = 1;
"""


def test_a_log_of_format_1_is_chained(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.executescript(FORMAT_1)
        for number in range(20):
            connection.execute(
                "INSERT INTO audit (time, sandbox, kind, duration, detail) VALUES (?, 'one', 'call', 0.25, '{}')",
                (number,),
            )
        connection.execute("DELETE FROM audit WHERE id < 4 OR id IN (10, 11, 20)")
    connection.close()
    log, other = AuditLog(path), AuditLog(path)
    log.record("call", "one")
    other.record("call", "one")
    found = log.verify()
    assert (found.is_ok, found.rows, found.dropped) == (True, 14 + 3, 6), found
    assert [row.kind for row in log.query()][-3:] == ["audit", "call", "call"]
    tamper(path, "UPDATE audit SET kind = 'x' WHERE id = 12")
    assert log.verify().row == 12
    other.close()
    log.close()


def test_checking_does_not_keep_writers_waiting(path: Path) -> None:
    log = AuditLog(path, busy_timeout=0.2)
    write(log)
    rows = log.read()
    next(rows)
    log.record("egress", "one")
    assert len(list(rows)) == 59
    log.close()
    with pytest.raises(AgentboxError, match="does not exist yet"):
        AuditLog(path.with_name("none")).verify()
