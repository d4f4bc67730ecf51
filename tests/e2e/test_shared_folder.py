"""Two notebooks of one folder: their locks exclude each other."""

from __future__ import annotations

import fcntl
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import Env, KernelClient, Server, wait_until

pytestmark = pytest.mark.timeout(600)

COUNT = 50
TAKE = "import fcntl; file = open('lock', 'a+'); fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB); print('held')"


def test_two_notebooks_do_not_hold_one_lock(make_env: Callable[..., Env]) -> None:
    env = make_env()
    take = TAKE
    increment = (
        "import sqlite3\n"
        "connection = sqlite3.connect('d.sqlite', timeout=200, isolation_level=None)\n"
        f"for _ in range({COUNT}):\n"
        "    for line in ('BEGIN IMMEDIATE', 'UPDATE t SET n = n + 1', 'COMMIT'): connection.execute(line)\n"
    )
    with env.server("server") as server:
        kernels = [server.notebook(f"{name}.ipynb") for name in "ab"]
        one, other = kernels
        assert one.check(take) == "held\n"
        assert other.execute(take).error == "BlockingIOError"
        one.check("file.close(); import time; time.sleep(1)")
        assert other.check(take) == "held\n"
        # Programs that a kernel starts exclude each other, too.
        told = one.execute(f'import subprocess, sys; subprocess.run([sys.executable, "-c", {take!r}], check=True)')
        assert told.error == "CalledProcessError"
        for mode in ("delete", "wal"):
            connection = sqlite3.connect(env.work / "d.sqlite")
            with connection:
                connection.execute("DROP TABLE IF EXISTS t")
                connection.execute("CREATE TABLE t (n INTEGER)")
                connection.execute("INSERT INTO t VALUES (0)")
            connection.execute(f"PRAGMA journal_mode={mode}")
            connection.close()
            requests = [kernel.start(increment) for kernel in kernels]
            for kernel, request in zip(kernels, requests, strict=True):
                check_done(kernel, request)
            connection = sqlite3.connect(env.work / "d.sqlite")
            assert connection.execute("SELECT n FROM t").fetchone() == (2 * COUNT,)
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            connection.close()
            for kernel in kernels:
                kernel.check("connection.close()")
        # A restarted kernel has released everything.
        other.restart()
        assert one.check(take) == "held\n"
        for kernel in kernels:
            kernel.shutdown()
    env.assert_clean()


def is_held(path: Path) -> bool:
    """Return whether the host finds a file locked."""
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_lock_is_held_again_after_the_server_was_killed(make_env: Callable[..., Env]) -> None:
    env = make_env(config={"Policy": {"lease_timeout": 300.0}})
    first = Server(env, "server", (), {})
    first.wait_ready()
    ids = [first.notebook(f"{name}.ipynb").id for name in "ab"]
    assert KernelClient(first, ids[0]).check(TAKE) == "held\n"
    first.stop(signal.SIGKILL)
    with env.server("server") as second:
        one, other = (KernelClient(second, kernel) for kernel in ids)
        wait_until(lambda: is_held(env.work / "lock"), 60, "the host finds the file locked")
        assert other.execute(TAKE).error == "BlockingIOError"
        one.check("file.close()")
        wait_until(lambda: not is_held(env.work / "lock"), 60, "the lock is released")
        assert other.check(TAKE) == "held\n"
        for kernel in (one, other):
            kernel.shutdown()
    env.assert_clean()


WATCH = """
import threading, time, watchfiles
seen, stop = [], threading.Event()
def watch():
    for changes in watchfiles.watch(".", stop_event=stop, rust_timeout=500):
        seen.extend(path for _, path in changes)
thread = threading.Thread(target=watch)
thread.start()
time.sleep(2)
"""
WAIT = """
for _ in range(300):
    if any(path.endswith("changed.py") for path in seen): break
    time.sleep(0.1)
stop.set(); thread.join(); print(sorted(set(seen)))
"""


@pytest.mark.network
def test_a_program_that_watches_files_sees_what_is_changed_outside(make_env: Callable[..., Env]) -> None:
    env = make_env(config={"Policy": {"allowed_hosts": ["pypi"]}})
    (env.work / "changed.py").write_text("1")
    with env.server("server") as server:
        kernel = server.notebook("watch.ipynb")
        kernel.check("%pip install -q watchfiles")
        kernel.check(WATCH)
        (env.work / "changed.py").write_text("1 + 1")
        assert kernel.check(WAIT) == "['./changed.py']\n"
        kernel.shutdown()
    env.assert_clean()


def check_done(kernel: KernelClient, request: str) -> None:
    result = kernel.finish(request, timeout=250)
    assert result.reply.get("status") == "ok", result
