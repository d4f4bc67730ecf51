"""What the machine runs out of is no reason to end sandboxes, nor to forget them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_server.services.sessions.sessionmanager import SessionManager
from support.boxes import boxed, run

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.jupyter.adoption import keep_sessions
from jupyter_agentbox.linux import kill_processes, read_start_time
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes import Handle, Usage
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox import tokens
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process none that is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def handle() -> Iterator[Handle]:
    with subprocess.Popen(["sleep", "300"]) as process:
        yield Handle("x", process.pid, read_start_time(process.pid) or 0)
        process.kill()


def read_state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, *states: str) -> None:
    deadline = time.monotonic() + 60
    while read_state(pid) not in states:
        assert time.monotonic() < deadline, f"process {pid} is not {states}"
        time.sleep(0.01)


def test_without_descriptors_a_sandbox_neither_counts_as_gone_nor_as_killed(handle: Handle) -> None:
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
        is_running = handle.is_running
        left = kill_processes(handle.processes, 0.1)
    assert is_running
    assert left == [handle.pid]
    assert handle.is_running
    assert kill_processes(handle.processes) == []
    assert not handle.is_running


def test_without_descriptors_a_frozen_sandbox_goes_on(handle: Handle) -> None:
    os.kill(handle.pid, signal.SIGSTOP)
    wait_for_state(handle.pid, "T")
    with no_descriptors():
        handle.resume()
    wait_for_state(handle.pid, "S", "R")


def test_without_descriptors_a_token_is_neither_malformed_nor_revoked(tmp_path: Path) -> None:
    (tmp_path / "sandboxes" / "one").mkdir(parents=True)
    store = tokens.TokenStore(tmp_path)
    text, record = store.create("one", owner="me", verbs=["read"], life=60, name="", made_by="me")
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        tokens._read(tmp_path / "sandboxes" / "one" / "tokens" / f"{record.id}.json")
    assert store.list("one") == [record]
    assert store.authenticate(text) == record


def test_a_server_out_of_descriptors_keeps_its_sandboxes(has_runsc: None, manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager) as box:
            with no_descriptors():
                # Several looks at it, and what it takes to believe that it is gone.
                await asyncio.sleep(4)
            assert box.sandbox.end is None
            assert await box.text("echo alive") == "alive"

    run(test, manager)


def test_a_sandbox_that_can_not_be_measured_is_measured_again(has_runsc: None, tmp_path: Path) -> None:
    failures: list[Exception] = [OSError(24, "Too many open files"), RuntimeError("can't start new thread")]

    class Failing(RunscRuntime):
        def usage(self, handle: Handle, directory: Path) -> Usage:
            if failures:
                raise failures.pop()
            return super().usage(handle, directory)

    state = tmp_path / "state"

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager) as box:
            while box.sandbox.measured is None:
                await asyncio.sleep(0.1)
            assert not failures
            assert box.sandbox.end is None

    run(test, SandboxManager(state, Failing(state_dir=str(state))))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    assert os.geteuid() == 0, "only root can mount a small disk"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "none", tmp_path], check=True, timeout=10)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True, timeout=10)


def test_a_full_disk_is_told_and_ends_nothing(
    has_runsc: None, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = small_disk / "state"
    manager = SandboxManager(state, RunscRuntime(state_dir=str(state)))

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager) as box:
            with open(small_disk / "fill", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            assert await box.text("echo alive") == "alive"
            with pytest.raises((AgentboxError, OSError), match=r"No space left|is full|cannot be written"):
                async with boxed(manager):
                    pass
            for _ in range(20):  # what SQLite has room for is still written
                manager.audit.note("call", box.sandbox.id, detail={"much": "x" * 100_000})
            with pytest.raises(AgentboxError, match="cannot be written"):
                await manager.audit.arecord("call", box.sandbox.id, detail={"much": "x" * 100_000})
            (small_disk / "fill").unlink()
            await manager.audit.arecord("call", box.sandbox.id)
            assert await box.text("echo alive") == "alive"

    run(test, manager)
    assert any("written to the audit log" in text for _, level, text in caplog.record_tuples if level == logging.ERROR)
    assert manager.audit.verify().is_ok
    manager.audit.close()
    assert not list((state / "sandboxes").iterdir())


@contextlib.contextmanager
def kept(state: Path) -> Iterator[SessionManager]:
    """A server's own session manager, whose list is kept."""
    server: Any = SimpleNamespace(
        session_manager=SessionManager(),  # type: ignore[no-untyped-call]
        root_dir=str(state),
        log=logging.getLogger("server"),
    )
    lock = keep_sessions(server, Policy(state_dir=str(state)))
    manager: SessionManager = server.session_manager
    with contextlib.closing(manager.connection), contextlib.closing(manager):
        yield manager
    if lock is not None:
        lock.release()


def note(manager: SessionManager, name: str) -> None:
    manager.cursor.execute("INSERT INTO session VALUES (?, 'a.ipynb', 'a', 'notebook', 'a-kernel')", (name,))


def noted(manager: SessionManager) -> list[str]:
    return [row[0] for row in manager.cursor.execute("SELECT session_id FROM session ORDER BY session_id")]


def keep(state: Path) -> SessionManager:
    """Have a server's list be kept; what it finds there is told by using it."""
    with kept(state) as manager:
        note(manager, "an-id")
        assert noted(manager) == ["an-id"]
        manager.cursor.execute("DELETE FROM session")
    return manager


def test_each_server_has_a_list_of_notebooks_and_takes_in_what_others_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kept(tmp_path) as first:
        note(first, "first")
        for name in ("second", "third"):
            with kept(tmp_path) as other:
                assert noted(other) == (["second"] if name == "third" else []), "the first one lives"
                note(other, name)
        assert noted(first) == ["first"]
    with kept(tmp_path) as next_one, kept(tmp_path) as beside:
        assert noted(next_one) == ["first", "second", "third"]
        assert noted(beside) == []
    assert caplog.records == []


@pytest.mark.parametrize("damage", ["header", "middle"])
def test_a_broken_list_of_notebooks_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    path = Path(keep(tmp_path).database_filepath)
    assert caplog.records == []
    data = path.read_bytes()
    path.write_bytes(bytes(100) + data[100:] if damage == "header" else data[:100] + b"x" * (len(data) - 100))
    assert keep(tmp_path).database_filepath == str(path)
    (record,) = caplog.records
    assert f"{path} is damaged and was renamed" in record.getMessage()
    assert path.with_suffix(".broken").exists()


def test_without_a_place_for_it_the_list_of_notebooks_is_kept_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "servers").write_text("in the way")
    assert keep(tmp_path).database_filepath == ":memory:"
    (record,) = caplog.records
    assert "cannot be stored for a later server" in record.getMessage()


def test_a_watch_goes_on_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    thread, done = LinkThread.instance(), asyncio.Event()
    failures = iter([OSError(28, "No space left on device"), RuntimeError("can't start new thread")])

    async def look() -> None:
        for error in failures:
            raise error
        done.set()

    async def watch() -> None:
        task = thread.spawn(thread.repeat(0.01, look))
        await asyncio.wait_for(done.wait(), 60)
        task.cancel()

    thread.submit(watch()).result(90)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == [
        "[Errno 28] No space left on device", "can't start new thread",
    ]  # fmt: skip
