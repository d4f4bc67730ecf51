"""The link's directory, in which code that is uid 0 inside may replace anything: the host opens only what it made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.embedded_client import ENV, Client, spec, start

from jupyter_agentbox.errors import AgentboxError, LinkClosed
from jupyter_agentbox.runtimes import linkdir, namespaces
from jupyter_agentbox.sandbox.link.link import Link, LinkThread, Stream
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command
from jupyter_agentbox.sandbox.sandbox import Sandbox

SECRET = b"what the user wrote\n"

#: Puts a link to a host file in place of what has one of some names in the link's directory, as fast as it can.
ATTACK = """
import os, sys, time
folder, target, end = sys.argv[1], sys.argv[2], time.monotonic() + float(sys.argv[3])
os.chdir(folder)
print("ready", flush=True)
while time.monotonic() < end:
    for name in sys.argv[4:]:
        try:
            os.symlink(target, "mine")
            os.rename("mine", name)
        except OSError:
            pass
"""


@pytest.fixture
def link_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "sandbox" / "link"
    directory.mkdir(parents=True, mode=0o700)
    return directory


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user's that must be neither opened nor changed."""
    path = tmp_path / "victim"
    path.write_bytes(SECRET)
    yield path
    assert path.read_bytes() == SECRET
    assert not is_open(path)


def is_open(path: Path) -> bool:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samefile(f"/proc/self/fd/{name}", path):
                return True
    return False


def replace_all(directory: Path, target: Path) -> None:
    for name in os.listdir(directory):
        os.unlink(directory / name)
        os.symlink(target, directory / name)


async def ignore(stream: Stream) -> None:
    stream.reset()


def test_what_is_replaced_just_before_it_is_opened_is_not_opened(
    link_dir: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker wins every race: whatever has a name in the directory is a link by the time that it is opened."""
    real = os.open

    def hostile(path: object, flags: int, *arguments: object, **options: object) -> int:
        replace_all(link_dir, victim)
        return real(path, flags, *arguments, **options)  # type: ignore[arg-type]

    async def listen() -> None:
        link = Link(link_dir, ignore, lambda reason: None)
        link.listen()
        for fd in (link._reader, link._writer):
            assert stat.S_ISFIFO(os.fstat(fd).st_mode)
        link.close()

    os.mkfifo(link_dir / "up.1")  # of an earlier owner
    monkeypatch.setattr(os, "open", hostile)
    LinkThread.instance().submit(listen()).result(60)


def test_a_thread_that_replaces_names_all_the_time_has_nothing_opened(link_dir: Path, victim: Path) -> None:
    done = threading.Event()

    def attack() -> None:
        serial = 0
        while not done.is_set():
            for name in {"fifo.new", "fifo", *os.listdir(link_dir)}:
                serial += 1
                with contextlib.suppress(OSError):
                    os.symlink(victim, link_dir / f"mine-{serial % 8}")
                    os.rename(link_dir / f"mine-{serial % 8}", link_dir / name)

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        for number in range(1500):
            fd = linkdir.share_fifo(link_dir, f"fifo-{number % 10}", os.O_RDWR)
            opened = linkdir.reference_fifos(link_dir, 5)
            try:
                assert all(stat.S_ISFIFO(os.fstat(handle).st_mode) for handle in (fd, *opened))
                os.write(fd, b"what the host says")
            finally:
                for handle in (fd, *opened):
                    os.close(handle)
            linkdir.remove_names(link_dir, linkdir.list_names(link_dir))
    finally:
        done.set()
        thread.join(60)
    assert os.listdir(link_dir.parent) == ["link"]


def test_names_that_stand_in_the_way_do_not_break_the_owner(link_dir: Path) -> None:
    """Numbers that are none, folders in place of FIFOs, more entries than anybody looks at."""
    for name in ("up.²", f"up.{'9' * 200}", "up.", "down.x", "up.7.\n", "up.-3", b"up.\xff"):
        os.mkdir(os.fsencode(link_dir) + b"/" + os.fsencode(name))
    for number in range(linkdir.MAX_ENTRIES):
        os.symlink("/", link_dir / f"{number}")

    async def listen() -> int:
        link = Link(link_dir, ignore, lambda reason: None)
        link.listen()
        with pytest.raises(LinkClosed):
            await link.wait_connected(0.01)
        link.close()
        return link.number

    first, second = (LinkThread.instance().submit(listen()).result(60) for _ in range(2))
    assert first > 0
    assert 0 < second < 10**18
    assert len(os.listdir(link_dir)) < linkdir.MAX_ENTRIES


def test_no_name_can_be_had_where_a_folder_has_it_and_nothing_is_left_open(link_dir: Path) -> None:
    (link_dir / "fifo" / "full").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="fifo"):
        linkdir.share_fifo(link_dir, "fifo", os.O_RDWR)
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(link_dir.parent) == ["link"]


@pytest.mark.usefixtures("has_runsc")
@pytest.mark.parametrize("why", ["is_root", "no subordinate ids"])
def test_code_that_is_root_inside_opens_no_file_of_the_host(
    manager: SandboxManager, victim: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A real sandbox, attacked from inside while its owner opens the kernel's and the link's files again and again."""
    if why != "is_root":
        monkeypatch.setattr(namespaces, "find_spare_ids", lambda uid: None)
    thread = LinkThread.instance()
    sandbox: Sandbox = thread.submit(manager.create(replace(spec(), is_root=why == "is_root"))).result(150)
    try:
        kernel = thread.submit(start(sandbox)).result(60)
        client = Client(kernel)
        assert client.run("import os; print(os.getuid())") == "0\n"
        # Names that FIFOs once had when they were made, and that of today.
        names = ["new-shell", "new-stdin", "new-control", "fifo.new"]
        argv = ["/usr/bin/python3", "-c", ATTACK, "/run/agentbox/link", str(victim), "60", *names]
        attack = thread.submit(sandbox.processes.start(Command(argv=argv, env=ENV))).result(60)
        assert thread.submit(sandbox.processes.read(attack.id, wait=60)).result(90).data == b"ready\n"

        async def open_again() -> None:
            with contextlib.suppress(AgentboxError, OSError, asyncio.TimeoutError):
                await asyncio.wait_for(kernel.hang_up(), 0.5)
            with contextlib.suppress(OSError):
                kernel.redial()
            await asyncio.sleep(0.02)

        for _ in range(40):
            if sandbox.end is not None or is_open(victim) or victim.read_bytes() != SECRET:
                break
            thread.submit(open_again()).result(60)
        assert victim.read_bytes() == SECRET
        assert not is_open(victim)
    finally:
        thread.submit(manager.stop(sandbox)).result(150)
