"""One sandbox on real gVisor: what runs in it, how it ends, and what is left."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.sandboxes import FILL_MEMORY
from jupyter_client.session import Session
from support import ROOT
from support.boxes import ENV, Box, boxed, run
from support.waiting import scaled, wait_until_async

from jupyter_agentbox.errors import NotFound, RuntimeFailed, SandboxEnded
from jupyter_agentbox.runtimes import Handle, namespaces, oci
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.drivers import Kernel
from jupyter_agentbox.sandbox.drivers.embedded import READ_BY_KERNEL, WRITTEN_BY_KERNEL
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import MIB, Cause, Limits, Mount, SandboxSpec

pytestmark = pytest.mark.usefixtures("has_runsc")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxManager, Box]]:
    """Sandbox for tests that leave it as it was, and its manager."""
    state = tmp_path_factory.mktemp("shared") / "state"
    manager, thread = SandboxManager(state, RunscRuntime(state_dir=str(state))), LinkThread.instance()
    sandbox = thread.submit(manager.create(SandboxSpec(profile="small", kernel_id="k1", owner="ada"))).result(100)
    yield manager, Box(sandbox)
    thread.submit(manager.stop(sandbox)).result(100)
    assert not list((state / "sandboxes").iterdir())
    assert manager.list() == []


@pytest.fixture
def box(shared: tuple[SandboxManager, Box]) -> Box:
    return shared[1]


def work(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 250))


def test_commands_give_their_outputs_apart_and_their_status(box: Box) -> None:
    async def test() -> None:
        result = await box.run("echo out; echo err >&2; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)
        assert (await box.run("kill -SEGV $$")).exit_code == 128 + 11
        assert (await box.argv(["/no/such/program"])).exit_code == 127
        assert b"/no/such/program" in (await box.argv(["/no/such/program"])).stderr
        data = os.urandom(3_000_000)
        assert (await box.argv(["/bin/cat"], stdin=data)).stdout == data
        # A program that reads nothing must not make the rest wait.
        assert (await box.argv(["/bin/true"], stdin=data)).exit_code == 0
        assert (await box.run("sleep 100 & echo started")).stdout == b"started\n"

    work(test)


def test_output_beyond_the_limit_is_cut_and_said(box: Box) -> None:
    async def test() -> None:
        result = await box.run("head -c 30000000 /dev/zero")
        assert result.truncated
        assert result.stdout_bytes == 30_000_000
        assert result.stdout.count(b"\0") == 10 * MIB
        assert result.exit_code == 0

    work(test)


def test_a_command_out_of_time_is_killed_with_its_children(box: Box) -> None:
    async def test() -> None:
        await box.text("cp /bin/sleep /tmp/nap")
        assert (await box.run("/tmp/nap 1000 & /tmp/nap 1000", timeout=0.5)).timed_out
        deadline = time.monotonic() + scaled(60)
        while left := (await box.run("grep -l nap /proc/[0-9]*/comm")).stdout:
            assert time.monotonic() < deadline, left
            await asyncio.sleep(0.1)

    work(test)


def test_user_code_is_not_root_and_cannot_reach_the_guest_or_the_link(box: Box) -> None:
    async def test() -> None:
        # The one group beside its own marks what the command starts; it owns nothing.
        uid, *groups = (await box.text("id -u; id -G")).split()
        assert (uid, groups[0], len(groups)) == ("1000", "1000", 2)
        assert int(groups[1]) > 0x40000000
        assert "CapEff:\t0000000000000000" in await box.text("cat /proc/self/status")
        for attempt in ("ls /run/agentbox", "kill -9 1", "echo x > /proc/1/mem"):
            assert (await box.run(attempt)).exit_code != 0, attempt
        assert await box.text("echo alive") == "alive"

    work(test)


def test_without_subordinate_ids_user_code_has_the_capabilities_that_the_documentation_names(
    manager: SandboxManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "find_spare_ids", lambda uid: None)

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager) as box:
            assert await box.text("id -u") == "0"
            sets = dict(line.split() for line in (await box.text("grep ^Cap /proc/self/status")).splitlines())
            names = ("DAC_OVERRIDE", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
            wanted = sum(1 << oci.CAPABILITIES[f"CAP_{name}"] for name in names)
            assert {int(sets[f"{name}:"], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {wanted}
            documented = (ROOT / "docs" / "security.md").read_text()
            assert all(f"`{name}`" in documented for name in names)

    run(test, manager)


@pytest.mark.parametrize("step", ["start", "restore"])
def test_a_start_that_is_given_up_at_its_last_moment_leaves_nothing(
    manager: SandboxManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    handles: list[Handle] = []

    async def test(manager: SandboxManager) -> None:
        staged, begun = tmp_path / "staged", asyncio.Event()
        for name in ("image", "work"):
            (staged / name).mkdir(parents=True)
        async with boxed(manager) as box:
            saved = await LinkThread.instance().run(box.sandbox.checkpoint(staged))
        loop, given_up, real = asyncio.get_running_loop(), threading.Event(), getattr(manager.runtime, step)

        def slow(*arguments: Any) -> Handle:
            handles.append(real(*arguments))
            loop.call_soon_threadsafe(begun.set)
            assert given_up.wait(60)
            return handles[0]

        monkeypatch.setattr(manager.runtime, step, slow)
        record = Record.from_bytes(saved)
        made = manager.create(record.spec) if step == "start" else manager.restore(record.spec, record, staged)
        making = asyncio.ensure_future(made)
        await begun.wait()
        making.cancel()
        await asyncio.wait([making])
        await LinkThread.instance().run(asyncio.sleep(0))  # by then it was told
        given_up.set()
        while list((manager.state_dir / "sandboxes").iterdir()):
            await asyncio.sleep(0.05)

    run(test, manager)
    assert not handles[0].is_running
    assert not [path for path in handles[0].cgroups if Path(path).exists()]


def test_orphans_are_reaped(box: Box) -> None:
    async def test() -> None:
        await box.text("for i in $(seq 60); do (sh -c 'true &' ); done")
        deadline = time.monotonic() + scaled(60)
        while zombies := (await box.run("grep -l '^State:.Z' /proc/[0-9]*/status")).stdout:
            assert time.monotonic() < deadline, zombies
            await asyncio.sleep(0.1)

    work(test)


def test_memory_of_no_program_ends_its_sandbox_which_says_why(
    manager: SandboxManager, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(memory=300 * MIB)) as box:
            with pytest.raises(SandboxEnded, match=r"out of memory \(limit 300 MiB"):
                await box.run(FILL_MEMORY)
            end = await asyncio.wait_for(LinkThread.instance().run(box.sandbox.wait_ended()), 60)
            assert (end.cause, end.exit_code) == (Cause.OUT_OF_MEMORY, 137)
            assert "300 MiB" in end.message
            with pytest.raises(SandboxEnded, match="out of memory"):
                await box.run("true")

    with caplog.at_level(logging.ERROR):
        run(test, manager)
    assert "out of memory (limit 300 MiB)" in caplog.text
    assert [row.detail["cause"] for row in manager.audit.query(kind="lifecycle") if "cause" in row.detail] == [
        "out_of_memory"
    ]


FILL = """
import errno, os
made = []
try:
    for n in range(3000):
        with open(f"{0}/part-{n}", "wb") as file:
            made.append(file.name)
            file.write(os.urandom(1 << 20))
except OSError as error:
    print(len(made), errno.errorcode[error.errno])
"""


def notices(manager: SandboxManager) -> list[str]:
    """Return what the user was told."""
    rows = manager.audit.query(kind="lifecycle")
    return [row.detail["message"] for row in rows if row.detail["event"] == "notice"]


def test_a_write_to_a_full_disk_fails_and_the_sandbox_continues(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(disk=64 * MIB)) as box:
            # All places share one limit, which programs see.
            await box.text("head -c 20000000 /dev/zero > ~/a; head -c 20000000 /dev/zero > /var/tmp/a")
            count, name = (await box.python(FILL.replace("{0}", "/tmp"))).split()
            assert 20 <= int(count) <= 27
            assert name == "ENOSPC"
            assert (await box.text("df --output=size,pcent -B 1M / /tmp /home/user")).split()[2:] == ["64", "100%"] * 3
            await wait_until_async(lambda: bool(notices(manager)), 60, "the user is told")
            assert notices(manager) == ["disk full: 64 MiB of 64 MiB used. Delete files to continue"]
            await box.text("rm /tmp/part-* ~/a && head -c 20000000 /dev/zero > /tmp/again")
            assert box.sandbox.end is None

    run(test, manager)


def test_a_full_private_folder_stops_writing_until_files_are_deleted(manager: SandboxManager) -> None:
    slow = FILL.replace("{0}", "/workspace").replace("made.append", "time.sleep(.05); made.append")

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(disk=64 * MIB)) as box:
            found = await box.argv(["/usr/bin/python3", "-c", "import time" + slow], timeout=120)
            assert b"agentbox: disk full: " in found.stderr
            count, name = found.stdout.decode().split()
            assert name == "EFBIG"
            assert 60 <= int(count) <= 200
            assert (await box.run("echo x > later")).exit_code != 0, "programs that start now can't write either"
            assert any("disk full" in text for text in notices(manager))
            await box.text("rm part-*")
            await wait_until_async(lambda: not box.sandbox._is_stop_sent, 60, "the space is free")
            assert await box.text("echo x > later; cat later") == "x"
            assert box.sandbox.end is None

    run(test, manager)


def test_a_sandbox_that_writes_although_it_was_stopped_ends(manager: SandboxManager) -> None:
    raise_limit = (
        "import resource, time\n"
        "for n in range(1000):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)\n"
        "    try: open(f'/workspace/{n}', 'wb').write(bytes(1 << 20))\n"
        "    except OSError: pass\n"
        "    time.sleep(.03)\n"
    )

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(disk=64 * MIB)) as box:
            with pytest.raises(SandboxEnded, match=r"disk full \(limit 64 MiB"):
                await box.python(raise_limit)
            end = await asyncio.wait_for(LinkThread.instance().run(box.sandbox.wait_ended()), 60)
            assert end.cause is Cause.DISK_FULL
            assert end.setting == "disk of the profile, Policy.max_disk"

    run(test, manager)


def test_what_is_written_to_the_links_folder_counts_towards_the_disk_limit(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, is_root=True, limits=Limits(disk=40 * MIB)) as box:
            write = "head -c 2000000 /dev/zero > /run/agentbox/link/$n"
            await box.run(f"n=0; while [ $n -lt 60 ]; do n=$((n+1)); {write}; sleep .1; done")
            assert "disk full" in notices(manager)[0]
            assert sum(path.stat().st_size for path in (box.sandbox.directory / "link").iterdir()) < 110_000_000

    run(test, manager)


def test_one_that_is_killed_from_outside_is_seen_and_cleared(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager) as box:
            state = json.loads((box.sandbox.directory / "state.json").read_text())
            os.kill(state["handle"]["pid"], 9)
            end = await asyncio.wait_for(LinkThread.instance().run(box.sandbox.wait_ended()), 60)
            assert (end.cause, end.exit_code) == (Cause.KILLED, 137)

    run(test, manager)


def test_a_failed_start_leaves_nothing(manager: SandboxManager, tmp_path: Path) -> None:
    broken = tmp_path / "guest"
    broken.mkdir()
    (broken / "__main__.py").write_text("print('this guest is broken'); raise SystemExit(3)")
    manager.runtime.guest_dir = str(broken)  # type: ignore[attr-defined]

    async def test(manager: SandboxManager) -> None:
        with pytest.raises(RuntimeFailed, match="this guest is broken"):
            await manager.create(SandboxSpec())
        assert not list((manager.state_dir / "sandboxes").iterdir())
        assert not manager.sandboxes

    run(test, manager)


def test_a_private_workspace_passes_to_the_successor_and_nothing_else_does(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        first = await manager.create(SandboxSpec())
        await Box(first).text("echo kept > /workspace/a; echo lost > /tmp/b; echo lost > $HOME/c")
        await manager.stop(first, is_kept=True)
        # A successor that fails to start leaves the work where it was.
        working = manager.runtime.guest_dir  # type: ignore[attr-defined]
        manager.runtime.guest_dir = "/nonexistent"  # type: ignore[attr-defined]
        with pytest.raises(RuntimeFailed, match=r"FileNotFoundError: .*agentbox/guest"):
            await manager.create(SandboxSpec(), inherit=first)
        manager.runtime.guest_dir = working  # type: ignore[attr-defined]
        second = await manager.create(SandboxSpec(), inherit=first)
        assert await Box(second).text("cat /workspace/a; ls /tmp/b $HOME/c 2>/dev/null || true") == "kept"
        assert [entry.name for entry in (manager.state_dir / "sandboxes").iterdir()] == [second.id]
        # Stopping is safe at once and again.
        await asyncio.gather(*(manager.stop(second) for _ in range(5)))
        await manager.stop(second)
        assert second.end is not None
        assert second.end.cause is Cause.STOPPED
        assert not list((manager.state_dir / "sandboxes").iterdir())

    run(test, manager)


def test_the_list_tells_of_every_sandbox(shared: tuple[SandboxManager, Box]) -> None:
    manager, box = shared
    (item,) = manager.list()
    assert (item.id, item.profile, item.kernel_id, item.owner) == (box.sandbox.id, "small", "k1", "ada")
    assert item.state == "running"
    assert item.memory > 5 * MIB


def test_many_at_once(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        sandboxes = await asyncio.gather(*(manager.create(SandboxSpec()) for _ in range(6)))
        answers = await asyncio.gather(*(Box(sandbox).text("echo $$") for sandbox in sandboxes))
        assert len(answers) == 6
        await asyncio.gather(*(manager.stop(sandbox) for sandbox in sandboxes))
        assert not list((manager.state_dir / "sandboxes").iterdir())

    run(test, manager)


PYTHON = sys.executable


def kernel_spec() -> SandboxSpec:
    prefixes = {sys.prefix, sys.base_prefix}
    return SandboxSpec(mounts=tuple(Mount(Path(prefix), prefix) for prefix in prefixes), env=ENV, lease_timeout=60)


class Talk:
    """Speaks Jupyter's protocol to a driver."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.session = Session(key=b"secret")
        self.got: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        kernel.on_message = self.on_message

    async def on_message(self, channel: str, frames: list[bytes]) -> None:
        _, parts = self.session.feed_identities(frames)
        message = self.session.deserialize(parts)
        await self.got.put((channel, message))

    async def execute(self, code: str) -> str:
        content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        request = self.session.msg("execute_request", content)
        await self.kernel.send("shell", [b"test", *self.session.serialize(request)])
        return str(request["header"]["msg_id"])

    async def stream_until_idle(self, request: str) -> str:
        text = ""
        while True:
            channel, message = await asyncio.wait_for(self.got.get(), 100)
            if channel != "iopub" or message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream":
                text += message["content"]["text"]
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return text


async def talk_to_kernel(sandbox: Sandbox) -> Talk:
    """Start a kernel, in which x is 41."""
    command = [PYTHON, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    key = {"key": "secret", "signature_scheme": "hmac-sha256"}
    talk = Talk(await sandbox.start_kernel(command, ENV, "/workspace", **key))
    await talk.stream_until_idle(await talk.execute("x = 41"))
    return talk


def test_another_owner_goes_on_with_the_kernel_and_misses_nothing(manager: SandboxManager) -> None:
    async def before() -> tuple[str, str]:
        sandbox = await manager.create(kernel_spec())
        talk = await talk_to_kernel(sandbox)
        code = "import os, time\nfor i in range(40):\n    print(i, flush=True)\n"
        wait = "    while i == 19 and not os.path.exists('/tmp/next'): time.sleep(0.02)"
        request = await talk.execute(code + wait)
        while (await asyncio.wait_for(talk.got.get(), 100))[1]["msg_type"] != "stream":
            pass
        await sandbox.leave()
        return sandbox.id, request

    async def after(sandbox_id: str, request: str) -> None:
        second = SandboxManager(manager.state_dir, RunscRuntime(state_dir=str(manager.state_dir)))
        assert [item.state for item in second.list()] == ["orphaned"]
        sandbox = await second.adopt(sandbox_id)
        assert [item.state for item in second.list()] == ["running"]
        (kernel,) = sandbox.kernels.values()
        talk = Talk(kernel)
        await sandbox.run(["/bin/touch", "/tmp/next"], {})
        rest = (await talk.stream_until_idle(request)).split()
        # What the first owner had taken is its own; all that follows is there, once and in order.
        assert rest == [str(number) for number in range(40 - len(rest), 40)]
        assert len(rest) >= 20
        assert await talk.stream_until_idle(await talk.execute("print(x + 1)")) == "42\n"
        await second.stop(sandbox)
        assert not list((manager.state_dir / "sandboxes").iterdir())

    thread = LinkThread.instance()
    sandbox_id, request = thread.submit(before()).result(200)
    time.sleep(1.0)
    thread.submit(after(sandbox_id, request)).result(200)


@pytest.mark.parametrize("whose", ["guest", "kernel"])
def test_a_guest_that_waits_for_a_dead_owners_files_is_found_by_the_next(manager: SandboxManager, whose: str) -> None:
    async def before() -> str:
        sandbox = await manager.create(kernel_spec())
        talk = await talk_to_kernel(sandbox)
        # As they are left by an owner that is killed before the guest has opened them: gVisor has it wait in that.
        link = sandbox.directory / "link"
        if whose == "guest":
            os.mkfifo(link / f"down.{sandbox.link.number + 1}")
            os.mkfifo(link / f"up.{sandbox.link.number + 1}")
        else:
            for channel in (*READ_BY_KERNEL, *WRITTEN_BY_KERNEL):
                os.mkfifo(link / f"left-{channel}")
            talk.kernel.request({"fifos": "left", "taken": None, "room": [65536, 65536]})
        await asyncio.sleep(0.2)
        await sandbox.leave()
        return sandbox.id

    async def after(sandbox_id: str) -> None:
        second = SandboxManager(manager.state_dir, RunscRuntime(state_dir=str(manager.state_dir)))
        sandbox = await second.adopt(sandbox_id)
        (kernel,) = sandbox.kernels.values()
        talk = Talk(kernel)
        assert await talk.stream_until_idle(await talk.execute("print(x + 1)")) == "42\n"
        assert (await sandbox.run(["/bin/echo", "here"], {})).stdout == b"here\n"
        await second.stop(sandbox)

    thread = LinkThread.instance()
    sandbox_id = thread.submit(before()).result(200)
    time.sleep(1.0)  # it looks for an owner every 20 ms
    thread.submit(after(sandbox_id)).result(200)


def test_one_with_an_owner_is_not_for_the_taking(shared: tuple[SandboxManager, Box]) -> None:
    manager, box = shared

    async def test() -> None:
        second = SandboxManager(manager.state_dir, manager.runtime)
        with pytest.raises(RuntimeFailed, match="belongs to another"):
            await second.adopt(box.sandbox.id)
        with pytest.raises(NotFound):
            await second.adopt("0" * 16)
        assert await box.text("echo unharmed") == "unharmed"

    work(test)


def test_without_an_owner_it_ends_with_its_lease_and_nothing_is_left(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        sandbox = await manager.create(SandboxSpec(lease_timeout=2.0))
        state = json.loads((sandbox.directory / "state.json").read_text())
        await manager.leave(sandbox)
        await wait_until_async(lambda: not sandbox.directory.exists(), 100, "the lease is over")
        assert not manager.runtime.is_alive(Handle.from_dict(state["handle"]))

    run(test, manager)


def test_no_set_user_id_file_can_be_made_in_a_work_folder(manager: SandboxManager, tmp_path: Path) -> None:
    """Outside it would be the user's own, and whoever runs it would act as the user."""
    folder = tmp_path / "work"
    folder.mkdir()
    lines = (
        "cp /bin/true /workspace/a && chmod u+s /workspace/a",
        "cp /bin/true /workspace/b && chmod g+s /workspace/b",
        "python3 -c \"import os; os.open('/workspace/c', os.O_CREAT | os.O_WRONLY, 0o4755)\"",
        "install -m 4755 /bin/true /workspace/d",
        "mkdir /workspace/e && chmod 2755 /workspace/e",
        "tar -C /workspace -xpf - < /dev/null; python3 -c \"import os; os.mknod('/workspace/f', 0o104755)\"",
    )

    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, workspace=folder) as box:
            for line in lines:
                await box.run(line)
            assert (await box.run("chmod 755 /workspace/a; chmod +t /workspace")).exit_code == 0

    run(test, manager)
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert {"a", "b"} <= set(modes)
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o6000} == {}
