"""Sandboxes that ended by a fault: their files are kept for a time, and they are revived with them; on real gVisor."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from contract.sandboxes import FILL_MEMORY
from support.waiting import scaled
from traitlets.config import Config

from jupyter_agentbox.errors import (
    Conflict,
    LimitReached,
    NotFound,
    PolicyRefused,
    RuntimeFailed,
    SandboxEnded,
)
from jupyter_agentbox.linux import kill_processes
from jupyter_agentbox.models import LimitsRequest, SandboxInfo, SandboxPatch, SandboxRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes import Handle
from jupyter_agentbox.sandbox.link.thread import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command, ExecResult
from jupyter_agentbox.sandbox.sweep import KEPT_MARK, sweep
from jupyter_agentbox.sandbox.tokens import TokenStore
from jupyter_agentbox.service import service as module
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService

pytestmark = pytest.mark.usefixtures("has_runsc")

ADA, BOB = Caller("ada"), Caller("bob")
SMALL = SandboxRequest(id="x", limits=LimitsRequest(memory="300 MiB", disk="64 MiB"), tools=None)


def make_policy(tmp_path: Path, **settings: Any) -> Policy:
    common = {"state_dir": str(tmp_path / "state"), "templates": False, "max_sandboxes_per_owner": 2}
    return Policy(config=Config({"Policy": {**common, **settings}}))


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return make_policy(tmp_path)


@asynccontextmanager
async def opened(policy: Policy, *, is_ended: bool = True) -> AsyncIterator[SandboxService]:
    """Have a server's sandboxes, as if in a process of their own."""
    SandboxManager._shared.clear()
    service = SandboxService(policy)
    try:
        yield service
    finally:
        await service.aclose(is_ended=is_ended)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 240))


async def bash(service: SandboxService, line: str, caller: Caller = ADA) -> ExecResult:
    async with service.registry.use("x", "bash", caller=caller) as managed:
        return await managed.running().processes.run(Command(line=line))


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + scaled(60)
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def ended(service: SandboxService) -> SandboxInfo:
    """Wait for its end, and until what is kept is in order."""

    async def is_over() -> bool:
        info = await service.registry.get("x", caller=ADA)
        return info.state == "ended" and is_kept(service.policy, info)

    await until(is_over, "it has not ended with its files kept")
    return await service.registry.get("x", caller=ADA)


def is_kept(policy: Policy, info: SandboxInfo) -> bool:
    assert info.sandbox_id is not None
    names = set(os.listdir(policy.state_path / "sandboxes" / info.sandbox_id))
    return names == {"work", "state.json", "lock", "session.json", KEPT_MARK} or names == {
        "work", "state.json", "lock", "session.json", "tokens", KEPT_MARK
    }  # fmt: skip


def directories(policy: Policy) -> list[str]:
    return os.listdir(policy.state_path / "sandboxes")


async def run_out_of_memory(service: SandboxService) -> SandboxInfo:
    with pytest.raises(SandboxEnded, match="out of memory"):
        await bash(service, f"echo precious > file; sync; {FILL_MEMORY}")
    return await ended(service)


def kill(policy: Policy, sandbox_id: str | None) -> None:
    """Kill gVisor itself, as the machine's own want of memory does."""
    record = next(record for record in _records(policy) if record.id == sandbox_id and record.handle is not None)
    kill_processes(Handle.from_dict(record.handle or {}).processes)


def _records(policy: Policy) -> list[Any]:
    from jupyter_agentbox.sandbox.record import Record

    return [Record.load(path) for path in (policy.state_path / "sandboxes").iterdir()]


def test_one_out_of_memory_is_revived_with_its_files(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            made, _ = await service.create(msgspec.structs.replace(SMALL, files={"seed": "of the request"}), caller=ADA)
            await service.patch("x", SandboxPatch(allowed_hosts=["pypi"], labels={"a": "b"}), caller=ADA)
            store = TokenStore(policy.state_path)
            text, _ = store.create(
                str(made.sandbox_id), owner="ada", verbs=("execute",), life=600, name="agent", made_by="ada"
            )
            hosts = (await service.registry.get("x", caller=ADA)).allowed_hosts
            await bash(service, "echo mine > seed")
            info = await run_out_of_memory(service)
            assert info.end is not None
            assert (info.end.cause, info.sandbox_id) == ("out_of_memory", made.sandbox_id)
            assert info.end.kept_until == pytest.approx(time.time() + 3600, abs=120)
            with pytest.raises(SandboxEnded, match=r"out of memory .*kept until .* UTC; revive it"):
                await bash(service, "true")
            with pytest.raises(NotFound):
                await service.revive("x", caller=BOB)
            # By the token too: it is of the same sandbox.
            agent = Caller("ada", scope=store.authenticate(text), verb="execute")
            revived = await service.revive("x", caller=agent)
            assert (revived.id, revived.state, revived.end) == ("x", "running", None)
            assert revived.sandbox_id != made.sandbox_id
            assert (revived.limits, revived.allowed_hosts, revived.labels) == (made.limits, hosts, {"a": "b"})
            assert revived.created == made.created, "its life goes on counting"
            assert (await bash(service, "cat file seed", agent)).stdout == b"precious\nmine\n"
            assert store.authenticate(text).sandbox == revived.sandbox_id
            assert directories(policy) == [revived.sandbox_id]
            assert (await service.revive("x", caller=ADA)).sandbox_id == revived.sandbox_id, "nothing is done twice"
            rows = await service.registry.audit().aquery(sandbox=revived.sandbox_id, kind="lifecycle")
            assert [row.detail["before"] for row in rows if row.detail["event"] == "revived"] == [made.sandbox_id]
            # And once more.
            await run_out_of_memory(service)
            await service.revive("x", caller=ADA)
            assert (await bash(service, "cat file")).stdout == b"precious\n"
        assert directories(policy) == []

    run(test)


#: Writes until it can't, although it was told to stop.
OVERFILL = (
    "import os, resource, time\n"
    "for n in range(1000):\n"
    "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)\n"
    "    try: open(f'large-{n}', 'wb').write(bytes(2 << 20))\n"
    "    except OSError: pass\n"
    "    time.sleep(.05)\n"
)


def test_one_that_is_revived_full_cannot_write_until_files_are_deleted(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            await service.create(SMALL, caller=ADA)
            with pytest.raises(SandboxEnded, match="disk full"):
                await bash(service, f'/usr/bin/python3 -c "{OVERFILL}"')
            info = await ended(service)
            assert info.end is not None
            assert info.end.cause == "disk_full"
            await service.revive("x", caller=ADA)

            async def can_write() -> bool:
                return (await bash(service, "echo x > small")).exit_code == 0

            async def cannot_write() -> bool:
                return not await can_write()

            await until(cannot_write, "it is seen that the disk is full")
            assert (await bash(service, "rm large-*; ls")).exit_code == 0
            await until(can_write, "it is seen that there is room")
            assert service.registry.sandboxes["ada", "x"].running().end is None

    run(test)


def test_what_is_kept_counts_and_goes_with_a_delete_or_its_time(policy: Policy) -> None:
    policy.keep_ended_for = 8.0

    async def test() -> None:
        async with opened(policy) as service:
            made, _ = await service.create(SMALL, caller=ADA)
            kill(policy, made.sandbox_id)
            await ended(service)
            await service.create(SandboxRequest(id="y"), caller=ADA)
            with pytest.raises(LimitReached, match="2 sandboxes, 1 of which have ended with their files kept"):
                await service.create(SandboxRequest(id="z"), caller=ADA)
            await service.delete("x", caller=ADA)
            assert str(made.sandbox_id) not in directories(policy)
            with pytest.raises(NotFound):
                await service.revive("x", caller=ADA)
            made, _ = await service.create(SMALL, caller=ADA)
            kill(policy, made.sandbox_id)
            await ended(service)

            async def is_gone() -> bool:
                return str(made.sandbox_id) not in directories(policy)

            await until(is_gone, "its time is over")
            info = await service.registry.get("x", caller=ADA)
            assert info.end is not None
            assert (info.state, info.end.cause, info.end.kept_until) == ("ended", "killed", None)
            with pytest.raises(SandboxEnded):
                await service.revive("x", caller=ADA)
            made, is_new = await service.create(SandboxRequest(id="x"), caller=ADA)
            assert is_new, "its name is free"
            # One that is deleted while it runs is not kept.
            await service.delete("x", caller=ADA)
            await until(is_gone, "it is gone")
            with pytest.raises((NotFound, SandboxEnded)):
                await service.revive("x", caller=ADA)

    run(test)


@pytest.mark.parametrize("how", ["nothing is kept", "idle"])
def test_what_was_meant_to_end_is_not_kept(tmp_path: Path, how: str) -> None:
    policy = make_policy(tmp_path, keep_ended_for=0.0 if how == "nothing is kept" else 3600.0)

    async def test() -> None:
        async with opened(policy) as service:
            idle = 1.0 if how == "idle" else None
            made, _ = await service.create(msgspec.structs.replace(SMALL, idle_timeout=idle), caller=ADA)
            if how == "nothing is kept":
                kill(policy, made.sandbox_id)

            async def is_gone() -> bool:
                return directories(policy) == []

            await until(is_gone, "it is not gone")
            with pytest.raises((NotFound, SandboxEnded)):
                await service.revive("x", caller=ADA)

    run(test)


def test_a_successor_has_what_was_kept(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy, is_ended=False) as first:
            made, _ = await first.create(SMALL, caller=ADA)
            before = await run_out_of_memory(first)
        sweep(policy.state_path)
        async with opened(policy, is_ended=False) as second:
            await second.recover()
            info = await second.registry.get("x", caller=ADA)
            assert info.end is not None
            assert before.end is not None
            assert (info.state, info.end.cause, info.end.message) == ("ended", "out_of_memory", before.end.message)
            assert info.end.kept_until == pytest.approx(before.end.kept_until, abs=30)
            rows = await second.registry.audit().aquery(sandbox=made.sandbox_id, kind="lifecycle")
            assert sum(row.detail["event"] == "ended" for row in rows) == 1
        async with opened(policy) as third:
            await third.recover()
            await third.revive("x", caller=ADA)
            assert (await bash(third, "cat file")).stdout == b"precious\n"
        assert directories(policy) == []

    run(test)


@pytest.mark.parametrize("is_swept", [False, True])
def test_one_that_dies_while_no_server_is_there_is_kept(policy: Policy, is_swept: bool) -> None:
    async def test() -> None:
        async with opened(policy, is_ended=False) as first:
            made, _ = await first.create(SMALL, caller=ADA)
            await bash(first, "echo precious > file")
        kill(policy, made.sandbox_id)
        if is_swept:

            async def is_marked() -> bool:
                await asyncio.to_thread(sweep, policy.state_path)
                return (policy.state_path / "sandboxes" / str(made.sandbox_id) / KEPT_MARK).exists()

            await until(is_marked, "the sweep keeps it")
        async with opened(policy) as second:
            await second.recover()
            info = await ended(second)
            assert info.end is not None
            assert info.end.cause in ("killed", "crashed")
            rows = await second.registry.audit().aquery(sandbox=made.sandbox_id, kind="lifecycle")
            assert sum(row.detail["event"] == "ended" for row in rows) == 1
            await second.revive("x", caller=ADA)
            assert (await bash(second, "cat file")).stdout == b"precious\n"

    run(test)


def test_the_sweep_removes_what_was_kept_when_its_time_is_over(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy, is_ended=False) as first:
            made, _ = await first.create(SMALL, caller=ADA)
            kill(policy, made.sandbox_id)
            await ended(first)
        directory = policy.state_path / "sandboxes" / str(made.sandbox_id)
        assert sweep(policy.state_path) == []
        os.utime(directory / KEPT_MARK, (time.time() - 3601,) * 2)

        async def is_gone() -> bool:
            await asyncio.to_thread(sweep, policy.state_path)
            return directories(policy) == []

        await until(is_gone, "it is not removed")

    run(test)


@pytest.mark.parametrize("at", ["start", "prepared"])
def test_a_server_killed_in_the_midst_of_a_revival_loses_no_files(
    policy: Policy, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with opened(policy, is_ended=False) as first:
            made, _ = await first.create(SMALL, caller=ADA)
            await bash(first, "echo precious > file")
            kill(policy, made.sandbox_id)
            await ended(first)
            old = first.registry.sandboxes["ada", "x"].sandbox
            loop, begun, never = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

            async def hang(*_: Any) -> None:
                loop.call_soon_threadsafe(begun.set)
                await never.wait()

            with monkeypatch.context() as patched:
                if at == "start":
                    patched.setattr("jupyter_agentbox.sandbox.sandbox.Sandbox._connected", hang)
                else:
                    patched.setattr(SandboxService, "_install", hang)
                reviving = asyncio.ensure_future(first.revive("x", caller=ADA))
                await begun.wait()
            # As the end of its process does.
            manager = first._manager_of(old)
            new = next(sandbox for sandbox in manager.sandboxes.values() if sandbox.id != made.sandbox_id)
            first.registry.sandboxes.clear()
            await LinkThread.instance().run(_let_go(new, old))
        async with opened(policy) as second:
            await second.recover()
            info = await second.registry.get("x", caller=ADA)
            if info.state == "ended":
                await second.revive("x", caller=ADA)
            assert (await bash(second, "cat file")).stdout == b"precious\n"
        assert directories(policy) == []
        reviving.cancel()
        await asyncio.wait([reviving])

    async def _let_go(*sandboxes: Any) -> None:
        for sandbox in sandboxes:
            await sandbox.leave()

    run(test)


def test_one_that_is_not_revived_is_kept_still(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            made, _ = await service.create(SMALL, caller=ADA)
            await bash(service, "echo precious > file")
            kill(policy, made.sandbox_id)
            await ended(service)
            managed = service.registry.sandboxes["ada", "x"]
            kept = managed.sandbox
            assert kept is not None
            spec = kept.spec
            kept.record.spec = replace(spec, init=("exit 3",))
            with pytest.raises(RuntimeFailed, match="init script 1 of 1"):
                await service.revive("x", caller=ADA)
            assert managed.sandbox is kept
            kept.record.spec = spec
            with monkeypatch.context() as patched:

                async def fail(*_: Any) -> None:
                    raise Conflict("the packages were not installed")

                patched.setattr(SandboxService, "_install", fail)
                with pytest.raises(Conflict, match="packages"):
                    await service.revive("x", caller=ADA)
                patched.setattr(module, "reapply_policy", _refuse)
                with pytest.raises(PolicyRefused):
                    await service.revive("x", caller=ADA)
            info = await ended(service)
            assert info.end is not None
            assert (info.state, info.end.cause) == ("ended", "killed")
            assert len(directories(policy)) == 1
            # Asking again in the same words revives it, in other words does not.
            with pytest.raises(Conflict, match=r"ended with its files kept.*delete it"):
                await service.create(SandboxRequest(id="x"), caller=ADA)
            _, is_new = await service.create(SMALL, caller=ADA)
            assert not is_new
            assert (await bash(service, "cat file")).stdout == b"precious\n"

    def _refuse(*_: Any, **__: Any) -> None:
        raise PolicyRefused("it is not allowed any more")

    run(test)


def test_policy_of_today_holds_for_what_is_revived(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            await service.create(msgspec.structs.replace(SMALL, limits=LimitsRequest(memory="600 MiB")), caller=ADA)
            info = await service.registry.get("x", caller=ADA)
            kill(policy, info.sandbox_id)
            await ended(service)
            policy.max_memory = 400 * 1024**2
            policy.allowed_hosts = ["pypi"]
            revived = await service.revive("x", caller=ADA)
            assert revived.limits is not None
            assert revived.limits.memory == 400 * 1024**2
            assert "github.com" in info.allowed_hosts
            assert "github.com" not in revived.allowed_hosts

    run(test)
