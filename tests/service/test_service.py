"""Sandboxes of agents: whose they are, how many there may be, and who takes them back; on real gVisor."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.waiting import wait_until_async
from traitlets.config import Config

from jupyter_agentbox.errors import (
    AgentboxError,
    Conflict,
    InvalidRequest,
    LimitReached,
    NotFound,
    PolicyRefused,
    SandboxEnded,
)
from jupyter_agentbox.models import FileBytes, SandboxFilters, SandboxPatch, SandboxRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes import Handle
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command
from jupyter_agentbox.service.live.live_snapshots import LiveSnapshots
from jupyter_agentbox.service.live.parking import Parker
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService

pytestmark = pytest.mark.usefixtures("has_runsc")

ADA, BOB = Caller("ada"), Caller("bob")
ROOT = Caller("root-of-all", is_admin=True)


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    settings = {"state_dir": str(tmp_path / "state"), "max_sandboxes_per_owner": 2, "max_sandboxes": 3}
    return Policy(config=Config({"Policy": settings}))


@asynccontextmanager
async def opened(policy: Policy) -> AsyncIterator[SandboxService]:
    service = SandboxService(policy)
    try:
        yield service
    finally:
        await service.aclose()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 240))


def test_another_owners_is_not_found_by_any_call(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            made, _ = await service.create(SandboxRequest(id="adas-own"), caller=ADA)
            assert made.sandbox_id is not None

            async def use(name: str) -> None:
                async with service.registry.use(name, "bash", caller=BOB):
                    raise AssertionError("it was let in")

            for name in ("adas-own", made.sandbox_id):
                calls: list[Callable[[str], Coroutine[Any, Any, Any]]] = [
                    lambda name: service.registry.get(name, caller=BOB),
                    lambda name: service.delete(name, caller=BOB),
                    lambda name: service.patch(name, SandboxPatch(idle_timeout=5), caller=BOB),
                    lambda name: service.grants.get(name, caller=BOB),
                    lambda name: service.grants.ask(name, "pypi", "", caller=BOB),
                    lambda name: service.grants.asks(name, caller=BOB),
                    lambda name: service.grants.get_ask(name, "a", caller=BOB),
                    lambda name: service.grants.decide(name, "a", is_allowed=True, caller=BOB),
                    lambda name: service.registry.peek(name, caller=BOB),
                    use,
                ]
                for call in calls:
                    with pytest.raises(NotFound) as caught:
                        await call(name)
                    # The very words for what never was.
                    with pytest.raises(NotFound) as never:
                        await call("0" * len(name))
                    assert str(caught.value).replace(name, "0" * len(name)) == str(never.value)
            assert await service.registry.list(caller=BOB) == []
            # His own of that name is another, and no conflict tells that there is one.
            own, is_new = await service.create(SandboxRequest(id="adas-own", labels={"a": "b"}), caller=BOB)
            assert (is_new, own.owner) == (True, "bob")
            assert (await service.registry.get("adas-own", caller=ADA)).sandbox_id == made.sandbox_id
            assert {info.owner for info in await service.registry.list(caller=ROOT)} == {"ada", "bob"}
            assert len(await service.registry.list(SandboxFilters(owner="ada"), caller=ROOT)) == 1
            assert (await service.registry.get(made.sandbox_id, caller=ROOT)).owner == "ada"

    run(test)


def test_there_are_no_more_than_may_be(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            found = await asyncio.gather(
                *(service.create(SandboxRequest(), caller=ADA) for _ in range(4)), return_exceptions=True
            )
            refused = [item for item in found if isinstance(item, LimitReached)]
            assert len(refused) == 2
            assert refused[0].setting == "Policy.max_sandboxes_per_owner"
            await service.create(SandboxRequest(), caller=BOB)
            with pytest.raises(LimitReached) as caught:
                await service.create(SandboxRequest(), caller=Caller("eve"))
            assert caught.value.setting == "Policy.max_sandboxes"

    run(test)


def test_what_is_parked_wakes_only_where_there_is_room(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            Parker(service, LiveSnapshots(service))
            parked = [(await service.create(SandboxRequest(), caller=ADA))[0].id for _ in range(2)]
            async with service.registry.use(parked[0], caller=ADA) as managed:
                await managed.running().processes.run(Command("echo kept > kept"))
            for name in parked:
                assert (await service.park(name, caller=ADA)).state == "parked"
            others = [(await service.create(SandboxRequest(), caller=who))[0].id for who in (ADA, BOB)]
            found = await asyncio.gather(*(service.wake(name, caller=ADA) for name in parked), return_exceptions=True)
            refused = [item for item in found if isinstance(item, LimitReached)]
            assert [item.setting for item in refused] == ["Policy.max_sandboxes_per_owner"], "one of them has room"
            await service.delete(others[0], caller=ADA)
            await service.create(SandboxRequest(), caller=BOB)
            states = {name: (await service.registry.get(name, caller=ADA)).state for name in parked}
            assert sorted(states.values()) == ["parked", "running"], "nothing is lost"
            last = next(name for name, state in states.items() if state == "parked")
            with pytest.raises(LimitReached) as caught:
                await service.wake(last, caller=ADA)
            assert caught.value.setting == "Policy.max_sandboxes"
            await service.delete(others[1], caller=BOB)
            assert (await service.wake(last, caller=ADA)).state == "running"
            async with service.registry.use(parked[0], caller=ADA) as managed:
                assert (await managed.running().processes.run(Command("cat kept"))).stdout == b"kept\n"

    run(test)


def test_what_a_call_does_while_it_is_saved_to_be_parked_is_not_lost(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            snapshots = LiveSnapshots(service)
            Parker(service, snapshots)
            await service.create(SandboxRequest(id="x"), caller=ADA)
            saved, is_used, commit = threading.Event(), threading.Event(), snapshots.store.commit

            def commit_late(*arguments: Any) -> Any:
                saved.set()
                assert is_used.wait(60)
                return commit(*arguments)

            async def bash(line: str) -> bytes:
                async with service.registry.use("x", caller=ADA) as managed:
                    return (await managed.running().processes.run(Command(line))).stdout

            async def park(meanwhile: Coroutine[Any, Any, Any]) -> None:
                saved.clear()
                is_used.clear()
                parking = asyncio.ensure_future(service.park("x", caller=ADA))
                assert await asyncio.to_thread(saved.wait, 60)
                await meanwhile
                is_used.set()
                with pytest.raises(Conflict, match="in use"):
                    await parking

            monkeypatch.setattr(snapshots.store, "commit", commit_late)
            await park(bash("echo kept > kept"))
            await park(service.patch("x", SandboxPatch(allowed_hosts=[]), caller=ADA))
            assert snapshots.store.list() == []
            assert (await service.park("x", caller=ADA)).state == "parked"
            assert await bash("cat kept") == b"kept\n"
            assert (await service.registry.get("x", caller=ADA)).allowed_hosts == []

    run(test)


def test_one_that_is_deleted_while_it_starts_is_gone(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, is_deleted, start = threading.Event(), threading.Event(), RunscRuntime.start

    def start_late(runtime: RunscRuntime, *arguments: Any) -> Handle:
        begun.set()
        assert is_deleted.wait(60)
        return start(runtime, *arguments)

    monkeypatch.setattr(RunscRuntime, "start", start_late)

    async def test() -> None:
        async with opened(policy) as service:
            making = asyncio.ensure_future(service.create(SandboxRequest(id="x"), caller=ADA))
            assert await asyncio.to_thread(begun.wait, 60)
            waiting = asyncio.ensure_future(service.create(SandboxRequest(id="x"), caller=ADA))
            with pytest.raises(Conflict):
                await service.create(SandboxRequest(id="x", profile="default"), caller=ADA)
            await service.delete("x", caller=ADA)
            is_deleted.set()
            for task in (making, waiting):
                with pytest.raises((AgentboxError, asyncio.CancelledError)):
                    await task
            with pytest.raises(NotFound):
                await service.registry.get("x", caller=ADA)
            await wait_until_async(lambda: not list((policy.state_path / "sandboxes").glob("*")), 60, "it is gone")

    run(test)


def test_a_failed_preparation_leaves_nothing(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            with pytest.raises(InvalidRequest) as caught:
                await service.create(SandboxRequest(id="x", files={"a/../../b": "x"}), caller=ADA)
            assert caught.value.field == "files"
            assert await service.registry.list(caller=ADA) == []
            assert not list((policy.state_path / "sandboxes").glob("*"))

    run(test)


def test_a_successor_takes_them_back(policy: Policy) -> None:
    async def test() -> None:
        first = SandboxService(policy)
        files = {"seed": "x", "other": FileBytes(base64=b"\0")}
        tools = ["bash", "ask_host"]
        request = SandboxRequest(id="x", labels={"a": "b"}, tools=tools, idle_timeout=77, files=files, allowed_hosts=[])
        made, _ = await first.create(request, caller=ADA)
        asks = [await first.grants.ask("x", host, "why", caller=ADA) for host in ("github.com", "codeload.github.com")]
        await first.grants.decide("x", asks[1].id, is_allowed=False, caller=ADA)
        await first.patch("x", SandboxPatch(allowed_hosts=["pypi"], labels={"c": "d"}), caller=ADA)
        async with first.registry.use("x", "bash", caller=ADA) as managed:
            await managed.running().processes.run(Command(line="echo kept > file"))
        await first.aclose(is_ended=False)
        SandboxManager._shared.clear()
        async with opened(policy) as second:
            assert await second.recover() == ["x"]
            info = await second.registry.get("x", caller=ADA)
            assert (info.sandbox_id, info.labels, info.idle_timeout, info.tools) == (
                made.sandbox_id, {"c": "d"}, 77, tools,
            )  # fmt: skip
            assert info.allowed_hosts == (await first_hosts(policy))
            async with second.registry.use("x", "bash", caller=ADA) as managed:
                ran = await managed.running().processes.run(Command(line="cat file"))
            assert ran.stdout == b"kept\n"
            with pytest.raises(PolicyRefused):
                async with second.registry.use("x", "write", caller=ADA):
                    pass
            assert (await second.create(request, caller=ADA))[1] is False
            for changes in ({"files": {**files, "seed": "y"}}, {"files": {}}, {"idle_timeout": 78}):
                with pytest.raises(Conflict):
                    await second.create(msgspec.structs.replace(request, **changes), caller=ADA)
            kept = await second.grants.asks("x", caller=ADA)
            assert [(item.id, item.state) for item in kept] == [(asks[0].id, "pending"), (asks[1].id, "denied")]
            await second.grants.decide("x", asks[0].id, is_allowed=True, caller=ADA)
            assert "github.com" in (await second.registry.get("x", caller=ADA)).allowed_hosts
            await second.delete("x", caller=ADA)

    async def first_hosts(policy: Policy) -> list[str]:
        return list((await asyncio.to_thread(policy.narrow_grant, "default", ["pypi"])).hosts)

    run(test)


def test_a_successor_tells_of_those_whose_lease_was_over(policy: Policy) -> None:
    async def test() -> None:
        first = SandboxService(policy)
        assert await first.recover() == []
        made, _ = await first.create(SandboxRequest(id="x"), caller=ADA)
        await first.aclose(is_ended=False)
        SandboxManager._shared.clear()
        lock = policy.state_path / "sandboxes" / str(made.sandbox_id) / "lock"
        os.utime(lock, (time.time() - policy.lease_timeout - 1,) * 2)
        await wait_until_async(lambda: not lock.parent.exists(), 60, "it is swept")
        for _ in range(2):
            async with opened(policy) as second:
                assert await second.recover() == []
                if (found := await second.registry.list(caller=ADA)) == []:
                    break
                (info,) = found
                assert (info.id, info.state, info.end and info.end.cause) == ("x", "ended", "lease_over")
                with pytest.raises(SandboxEnded, match="its lease expired"):
                    async with second.registry.use("x", "bash", caller=ADA):
                        pass
                rows = await second.registry.audit().aquery(sandbox=made.sandbox_id, kind="lifecycle")
                assert [row.detail["cause"] for row in rows if row.detail["event"] == "ended"] == ["lease_over"]
        else:
            raise AssertionError("it is told once more")
        assert rows[-1].detail["setting"] == "Policy.lease_timeout"

    run(test)


def test_an_ended_one_says_why(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as service:
            made, _ = await service.create(SandboxRequest(id="x", max_life=1), caller=ADA)
            for _ in range(1200):
                if (await service.registry.get("x", caller=ADA)).state == "ended":
                    break
                await asyncio.sleep(0.05)
            with pytest.raises(SandboxEnded, match="it reached its maximum lifetime of 1 s"):
                async with service.registry.use("x", "bash", caller=ADA):
                    pass
            assert made.state == "running"

    run(test)


def test_a_tenant_that_keeps_too_much_cannot_write_until_files_are_deleted(policy: Policy) -> None:
    policy.max_tenant_disk = 20 * 1024 * 1024

    async def test() -> None:
        async with opened(policy) as service:
            for name in ("hog", "other"):
                await service.create(SandboxRequest(id=name, tenant="acme"), caller=ADA)

            async def write(name: str, line: str) -> int | None:
                async with service.registry.use(name, "bash", caller=ADA) as managed:
                    return (await managed.running().processes.run(Command(line))).exit_code

            async def until(is_wanted: Callable[[bool], bool]) -> None:
                for _ in range(1000):
                    if is_wanted(await write("other", "echo x > /workspace/small") == 0):
                        return
                    await asyncio.sleep(0.1)
                raise AssertionError("the quota has no effect")

            await write("hog", "head -c 40000000 /dev/zero > /workspace/big")
            await until(lambda can_write: not can_write)
            await write("hog", "rm /workspace/big")
            await until(lambda can_write: can_write)
            assert (await service.registry.get("hog", caller=ADA)).state == "running"

    run(test)
