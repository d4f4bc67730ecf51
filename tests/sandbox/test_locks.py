"""File locks exclude other sandboxes of a folder, and programs of the host."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.boxes import Box, run
from support.waiting import wait_until_async

from jupyter_agentbox.sandbox.locks import MAX_FILES
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.spec import SandboxSpec

#: Increments a number in a database, each time in a transaction of its own.
INCREMENT = """
import sqlite3, sys
database, mode, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
connection = sqlite3.connect(database, timeout=200, isolation_level=None)
for _ in range(count):
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("UPDATE t SET n = n + 1")
    connection.execute("COMMIT")
assert connection.execute("PRAGMA journal_mode").fetchone()[0] == mode
print("done")
"""
#: Takes a lock in one of several ways, reports, and ends when its input does.
HOLD = """
import fcntl, sys
file = open("/workspace/lock", "a+")
try:
    {0}
    print("held", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
sys.stdin.read()
"""
FLOCK = "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"
LOCKF = "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"


@asynccontextmanager
async def two_boxes(manager: SandboxManager, folder: Path) -> AsyncIterator[tuple[Box, Box]]:
    folder.mkdir(exist_ok=True)
    made = [await manager.create(SandboxSpec(workspace=folder)) for _ in range(2)]
    try:
        yield Box(made[0]), Box(made[1])
    finally:
        for sandbox in made:
            await manager.stop(sandbox)


async def attempt(box: Box, way: str) -> str:
    """Return what a program reports that tries to take the lock."""
    result = await box.argv(["/usr/bin/python3", "-c", HOLD.replace("{0}", way)])
    assert result.stderr == b""
    return result.stdout.decode().strip()


def holds_on_host(path: Path, way: Callable[..., object]) -> bool:
    """Return whether the host finds the file locked."""
    with path.open("a+") as file:
        try:
            way(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize(("way", "host"), [(FLOCK, fcntl.flock), (LOCKF, fcntl.lockf)], ids=["flock", "lockf"])
def test_a_lock_excludes_the_other_sandbox_and_the_host(
    manager: SandboxManager, tmp_path: Path, way: str, host: Callable[..., object]
) -> None:
    folder = tmp_path / "folder"

    async def test(manager: SandboxManager) -> None:
        async with two_boxes(manager, folder) as (one, other):
            assert await attempt(one, way) == "held"
            assert await attempt(other, way) == "held", "it was released at the program's end"
            # Closing the file, or a context manager's end, releases it too.
            close = f"{way}; file.close(); print('closed', flush=True); time.sleep(600)"
            hold = f"{way}; print('held', flush=True); time.sleep(600)"
            for code, word in ((hold, "held"), (close, "closed")):
                (folder / "out").touch()
                (folder / "code.py").write_text(f"import fcntl, time\nfile = open('lock', 'a+')\n{code}\n")
                await one.text("(/usr/bin/python3 code.py > out 2>&1 & echo $! > pid)")
                await wait_until_async(lambda: word in (folder / "out").read_text(), 60, word)  # noqa: B023
                if word == "held":
                    assert await attempt(other, way) == "BlockingIOError"
                    assert holds_on_host(folder / "lock", host)
                    await one.text("kill $(cat pid)")
                await wait_until_async(lambda: not holds_on_host(folder / "lock", host), 60, "it is released")
                assert await attempt(other, way) == "held"
            # A lock of the host is respected, and one that waits gets it afterward. Another process has it, because one
            # that closes a file loses its own POSIX locks.
            command = [sys.executable, "-c", HOLD.replace("{0}", way).replace("/workspace", str(folder))]
            holder = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert await holder.stdout.readline() == b"held\n"
            assert await attempt(one, way) == "BlockingIOError"
            waiting = asyncio.ensure_future(attempt(one, way.replace(" | fcntl.LOCK_NB", "")))
            await asyncio.sleep(1)
            assert not waiting.done()
            holder.stdin.close()
            await holder.wait()
            assert await waiting == "held"

    run(test, manager)


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_sqlite_loses_no_change_of_two_sandboxes_and_the_host(
    manager: SandboxManager, tmp_path: Path, mode: str
) -> None:
    folder, count = tmp_path / "folder", 100
    folder.mkdir()
    database = folder / "d.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE t (n INTEGER)")
        connection.execute("INSERT INTO t VALUES (0)")
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.close()

    async def test(manager: SandboxManager) -> None:
        async with two_boxes(manager, folder) as boxes:
            command = [sys.executable, "-c", INCREMENT, str(database), mode, str(count)]
            host = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            inside = ["/usr/bin/python3", "-c", INCREMENT, "/workspace/d.sqlite", mode, str(count)]
            for result in await asyncio.gather(*(box.argv(inside, timeout=230) for box in boxes)):
                assert (result.stderr, result.stdout) == (b"", b"done\n")
            assert (await host.communicate())[0] == b"done\n"

    run(test, manager)
    connection = sqlite3.connect(database)
    assert connection.execute("SELECT n FROM t").fetchone() == (3 * count,)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def test_what_programs_ask_for_is_bounded(manager: SandboxManager, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text("")
    (folder / "link").symlink_to(tmp_path / "outside")
    ask = (
        "import json, os, socket\n"
        "def ask(*requests):\n"
        "    sock = socket.socket(socket.AF_UNIX)\n"
        "    sock.connect('\\0agentbox-locks')\n"
        "    for request in requests: sock.sendall(json.dumps(request).encode() + b'\\n')\n"
        "    found = b''\n"
        "    while found.count(b'\\n') < len(requests):\n"
        "        data = sock.recv(65536)\n"
        "        if not data: break\n"
        "        found += data\n"
        "    return sock, found.decode().split()\n"
    )
    paths = "['link', '../outside', '/etc/passwd', 'gone', '.', '']"
    code = (
        f"{ask}print([ask(['f', 'x', 3, path, 0, 0, os.getpid()])[1] for path in {paths}])\n"
        "print(ask('nonsense')[1], ask(['f', 'x', 3, 'a', -1, 0, os.getpid()])[1])\n"
        f"files = [open(f'file-{{n}}', 'w') for n in range({MAX_FILES + 9})]\n"
        "many = [['p', 's', file.fileno(), file.name, 0, 0, os.getpid()] for file in files]\n"
        "sock, found = ask(*many[:200]); other, more = ask(*many[200:])\n"
        "print(sorted(set(found + more)))\n"
    )

    async def test(manager: SandboxManager) -> None:
        async with two_boxes(manager, folder) as (one, other):
            (folder / "code.py").write_text(code)
            result = await one.run("/usr/bin/python3 code.py")
            assert result.stderr == b""
            refused, nonsense, many = result.stdout.decode().splitlines()
            assert "['0']" not in refused.replace("['0'], ['22'], ['22']]", ""), refused
            assert nonsense == "[] ['11']"
            assert many == "['0', '37']"
            assert await attempt(other, FLOCK) == "held", "the server continues"

    run(test, manager)
