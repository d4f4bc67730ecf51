"""What a server that is killed between two steps leaves: the next one clears it, and it counts as nothing else.

Each test makes what such a kill would leave by the product's own steps, and lets go of it as the end of a process does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from traitlets.config import Config

from jupyter_agentbox.errors import NotFound, RuntimeFailed
from jupyter_agentbox.jupyter.adoption import _end_duplicates
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.kernels.warm.starts import context_argv
from jupyter_agentbox.models import SandboxRequest, SnapshotRequest
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes import Handle
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.sandbox.sweep import sweep
from jupyter_agentbox.sandbox.tokens import TokenStore
from jupyter_agentbox.service.live import parking
from jupyter_agentbox.service.live.live_snapshots import LiveSnapshots, read_saved
from jupyter_agentbox.service.live.parking import Parker
from jupyter_agentbox.service.managed_sandbox import SESSION_FILE, ManagedSandbox
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService
from jupyter_agentbox.spec import Cause

pytestmark = pytest.mark.usefixtures("has_runsc")

ADA = Caller("ada")


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    settings = {"state_dir": str(tmp_path / "state"), "lease_timeout": 600.0, "templates": False}
    return Policy(config=Config({"Policy": settings}))


class Server:
    """What a server has, without one."""

    def __init__(self, policy: Policy) -> None:
        # As in another process: it knows none of the sandboxes of this one.
        SandboxManager._shared.clear()
        self.service = SandboxService(policy)
        self.snapshots = LiveSnapshots(self.service)
        self.parker = Parker(self.service, self.snapshots)
        self.manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
        self.parked = policy.state_path / "parked"

    async def make(self, **request: Any) -> ManagedSandbox:
        await self.service.create(SandboxRequest(id="x", **request), caller=ADA)
        await self.bash("echo first > file")
        return self.managed

    @property
    def managed(self) -> ManagedSandbox:
        return self.service.registry.sandboxes["ada", "x"]

    async def bash(self, line: str) -> str:
        async with self.service.registry.use("x", caller=ADA) as managed:
            return (await managed.running().processes.run(Command(line=line))).stdout.decode()

    async def kill(self, *left: Sandbox) -> None:
        """Let go of all that it holds, as its end does."""
        for sandbox in left:
            await self.manager.leave(sandbox)
        self.parker.close()
        await self.service.aclose(is_ended=False)

    def living(self) -> list[str]:
        """Return the ids of all sandboxes that run, whoever has them."""
        return [item.id for item in self.manager.list() if item.state != "ended"]


@asynccontextmanager
async def opened(policy: Policy) -> AsyncIterator[Server]:
    server = Server(policy)
    try:
        yield server
    finally:
        await server.service.aclose()
        server.parker.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 240))


def make_token(policy: Policy, sandbox: str) -> str:
    text, _ = TokenStore(policy.state_path).create(
        sandbox, owner="ada", verbs=["read"], life=600, name="", made_by="ada"
    )
    return text


def place_of(policy: Policy, token: str) -> str:
    """Return the sandbox that a token is good for."""
    return TokenStore(policy.state_path).authenticate(token).sandbox


def test_one_that_was_saved_to_be_parked_and_has_not_ended_lives_on_with_its_tokens(policy: Policy) -> None:
    async def test() -> None:
        first = Server(policy)
        managed = await first.make()
        sandbox = managed.running()
        token = make_token(policy, sandbox.id)
        parked = await LinkThread.instance().run(first.parker._save(managed, sandbox))
        assert place_of(policy, token) == parked.id
        await first.bash("echo later > file")
        await first.kill()
        async with opened(policy) as second:
            assert await second.service.recover() == ["x"]
            assert await second.bash("cat file") == "later\n"
            assert second.managed.running().id == sandbox.id
            assert place_of(policy, token) == sandbox.id
            assert not second.snapshots.store.exists(parked.id)
            assert list(second.parked.iterdir()) == []

    run(test)


def test_of_two_that_are_parked_the_later_one_counts(policy: Policy) -> None:
    async def test() -> None:
        first = Server(policy)
        managed = await first.make()
        sandbox = managed.running()
        # As it was not removed when it was woken.
        old = await LinkThread.instance().run(first.parker._save(managed, sandbox))
        await first.bash("echo later > file")
        await first.service.park("x", caller=ADA)
        await first.kill()
        async with opened(policy) as second:
            assert await second.service.recover() == ["x"]
            assert second.managed.state == "parked"
            assert await second.bash("cat file") == "later\n"
            assert not second.snapshots.store.exists(old.id)
            assert list(second.parked.iterdir()) == []

    run(test)


@pytest.mark.parametrize("is_carried", [False, True])
def test_of_two_after_a_restore_that_was_cut_off_one_is_ended(is_carried: bool, policy: Policy) -> None:
    async def test() -> None:
        first = Server(policy)
        managed = await first.make()
        old = managed.running()
        token = make_token(policy, old.id)
        snapshot = await first.snapshots.save(managed, SnapshotRequest())
        saved = read_saved(snapshot)
        async with first.snapshots.checked_out(snapshot) as files:
            new = await first.manager.restore(old.spec, saved.record, files)
        # As `swap` does it, up to where it ends the old one.
        managed.attach(new)
        managed.save()
        if is_carried:
            TokenStore(policy.state_path).carry(old.id, new.id)
        await first.kill(old)
        async with opened(policy) as second:
            assert sorted(second.living()) == sorted([old.id, new.id])
            assert await second.service.recover() == ["x"]
            assert await second.bash("cat file") == "first\n"
            survivor = second.managed.running().id
            assert second.living() == [survivor]
            assert place_of(policy, token) == survivor

    run(test)


@pytest.mark.parametrize("is_carried", [False, True])
def test_of_two_kernels_of_one_id_one_is_ended_and_its_tokens_are_the_others(is_carried: bool, policy: Policy) -> None:
    async def test() -> None:
        thread, first = LinkThread.instance(), Server(policy)
        spec = await asyncio.to_thread(lambda: policy.resolve({}, executable=sys.executable, kernel_id="k"))
        slot = SandboxedKernel(first.manager, key=b"secret", signature_scheme="hmac-sha256")
        await thread.run(slot.start(spec, context_argv(spec)))
        old = slot.sandbox
        assert old is not None
        token = make_token(policy, old.id)
        while not all(kernel.is_ready for kernel in old.kernels.values()):
            await asyncio.sleep(0.05)
        # As the slot takes it back to a snapshot, up to where it ends the old one.
        staged = first.snapshots.store.stage()
        record = Record.from_bytes(await thread.run(old.checkpoint(staged)))
        new = await first.manager.restore(spec, record, staged)
        first.snapshots.store.discard(staged)
        if is_carried:
            TokenStore(policy.state_path).carry(old.id, new.id)
        await first.manager.leave(new)
        await thread.run(slot.leave())
        second = Server(policy)
        left = {record.id: record for record in second.manager.orphans()}
        assert left.keys() == {old.id, new.id}
        slot = SandboxedKernel(second.manager, key=b"", signature_scheme="hmac-sha256")
        await thread.run(slot.adopt(left[old.id], left[old.id].spec))
        try:
            await asyncio.to_thread(_end_duplicates, second.manager, {"k"})
            assert second.living() == [old.id]
            assert place_of(policy, token) == old.id
        finally:
            await thread.run(slot.release())

    run(test)


def test_a_twin_that_somebody_has_is_left_alone(policy: Policy) -> None:
    async def test() -> None:
        async with opened(policy) as server:
            managed = await server.make()
            sandbox = managed.running()
            record, handle = sandbox.record, Handle.from_dict(sandbox.record.handle or {})
            await asyncio.to_thread(server.manager.end_duplicate, record, None)
            assert server.manager.runtime.is_alive(handle)
            assert await server.bash("cat file") == "first\n"

    run(test)


def test_one_that_was_told_to_end_is_no_later_servers(policy: Policy) -> None:
    async def test() -> None:
        first = Server(policy)
        managed = await first.make()
        sandbox = managed.running()
        sandbox.end_lease()
        await first.kill()
        second = Server(policy)
        assert second.manager.orphans() == []
        with pytest.raises(RuntimeFailed, match="about to end"):
            await second.manager.adopt(sandbox.id)
        assert await second.service.recover() == []
        while sandbox.directory.exists():  # long before its lease
            await asyncio.to_thread(sweep, policy.state_path)
        with pytest.raises(NotFound):  # it did not lapse either
            await second.service.registry.get("x", caller=ADA)
        await second.service.aclose()

    run(test)


def test_one_that_was_not_prepared_is_not_taken_for_what_was_asked_for(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = SandboxService._prepare

    async def test() -> None:
        first = Server(policy)
        loop, begun, never = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        async def hang(self: SandboxService, managed: ManagedSandbox, tell: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            await never.wait()

        monkeypatch.setattr(SandboxService, "_prepare", hang)
        request = SandboxRequest(id="x", files={"wanted": "here"})
        making = asyncio.ensure_future(first.service.create(request, caller=ADA))
        await begun.wait()
        left = first.managed.sandbox
        assert left is not None
        await first.manager.leave(left)
        monkeypatch.setattr(SandboxService, "_prepare", prepare)
        async with opened(policy) as second:
            assert not (left.directory / SESSION_FILE).exists()
            assert await second.service.recover() == []
            assert (await second.service.create(request, caller=ADA))[1], "it is made anew"
            assert await second.bash("cat wanted") == "here"
        await first.service.aclose()
        await asyncio.wait([making])

    run(test)


def test_what_another_server_is_about_to_park_stays_its_own(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "PARKING_TIMEOUT", 0.3)

    async def test() -> None:
        first = Server(policy)
        managed = await first.make()
        sandbox = managed.running()
        snapshot = await first.snapshots.save(managed, SnapshotRequest(), kind="park")
        async with opened(policy) as second:

            async def finds() -> list[str]:
                found = await second.service.recover()
                assert second.snapshots.store.exists(snapshot.id)
                return found

            assert await finds() == [], "it is saved, and nobody holds that yet"
            assert await first.bash("cat file") == "first\n"
            assert first.parker._take_lock(snapshot.id)
            assert await finds() == [], "it has not ended yet"
            managed.close()
            managed.sandbox, managed.parked = None, snapshot.id
            await first.manager.stop(sandbox, Cause.STOPPED)
            assert await finds() == [], "it is parked, and the first server's"
            await first.kill()
            assert await finds() == ["x"]
            assert await second.bash("cat file") == "first\n"

    run(test)
