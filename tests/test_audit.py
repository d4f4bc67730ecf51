"""The audit log: complete, bounded, private, shared by processes, and never lost in silence."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jupyter_agentbox.audit import AuditLog
from jupyter_agentbox.errors import AgentboxError


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
        "import sys; from jupyter_agentbox.audit import AuditLog\n"
        "log = AuditLog(sys.argv[1])\n"
        "for n in range(100): log.record('egress', sys.argv[2], port=n)\n"
        "log.close()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(path), f"box{n}"]) for n in range(6)]
    assert [process.wait(60) for process in processes] == [0] * 6
    log = AuditLog(path)
    for n in range(6):
        assert [row.port for row in log.query(sandbox=f"box{n}")] == list(range(100))
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
        thread.join(30)
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
    with pytest.raises(AgentboxError):
        asyncio.run(log.arecord("egress", "one"))
    log.close()
    with pytest.raises((AgentboxError, RuntimeError)):
        log.submit("egress", "one").result(10)
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"this is no database" * 100)
    log = AuditLog(broken)
    with pytest.raises(AgentboxError):
        log.record("egress", "one")
    log.close()


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
