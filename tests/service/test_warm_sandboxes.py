"""Sandboxes of agents and programs off templates and out of the pool: what was asked for, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.warm_kernels import ARGV, Place

from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.kernels.warm import pool as pools
from jupyter_agentbox.kernels.warm.starts import WarmStarts, context_argv
from jupyter_agentbox.models import ForkRequest, LimitsRequest, SandboxInfo, SandboxRequest, SnapshotRequest
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.service.live.live_snapshots import LiveSnapshots
from jupyter_agentbox.service.live.parking import Parker
from jupyter_agentbox.service.registry import Caller
from jupyter_agentbox.service.service import SandboxService

ADA = Caller("ada")


class Server:
    """The sandboxes of agents as a server has them, in a place with a template."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.service = SandboxService(place.policy)
        self.snapshots = LiveSnapshots(self.service)
        self.parker = Parker(self.service, self.snapshots)

    async def make(self, **request: Any) -> Sandbox:
        """Start a sandbox."""
        info, is_new = await self.service.create(SandboxRequest(**request), caller=ADA)
        assert is_new
        return await self.sandbox(info)

    async def sandbox(self, info: SandboxInfo) -> Sandbox:
        """Have what it is at hand, awake."""
        async with self.service.registry.use(info.id, caller=ADA) as managed:
            return managed.running()

    async def say(self, sandbox: Sandbox, code: str) -> str:
        """Run code, and return what it printed."""
        ran = await Runner.shared().run(sandbox, code)
        assert ran.status == "ok", ran
        return ran.stdout.strip()

    async def started(self, sandbox: Sandbox, how: str) -> bool:
        """Whether the audit log has it that it started so; a warm start does not wait for that."""
        for _ in range(1500):
            rows = self.place.manager.audit.query(kind="lifecycle", sandbox=sandbox.id)
            if how in (found := [(row.detail or {}).get("how") for row in rows]):
                return True
            await asyncio.sleep(0.1)
        raise AssertionError(f"it started {found}, not {how}")


@pytest.fixture(scope="module")
def place(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place with a template, as a notebook's kernel makes it, after which nothing is left."""
    patch = pytest.MonkeyPatch()
    patch.setattr(pools, "FILL_DELAY", 0.2)
    made = Place(tmp_path_factory.mktemp("sessions"), profiles={"pooled": {"pool_size": 1}})
    made.run(lambda: made.templates.make(made.spec(), ARGV))
    yield made
    patch.undo()
    assert not list((made.policy.state_path / "sandboxes").iterdir())


def run(place: Place, test: Callable[[Server], Awaitable[None]]) -> None:
    """Run a test with a server of its own, whose sandboxes end with it."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Server]:
        server = Server(place)
        try:
            yield server
        finally:
            await server.service.aclose()
            server.parker.close()

    async def work() -> None:
        async with opened() as server:
            await test(server)

    asyncio.run(asyncio.wait_for(work(), 280))


ABOUT = """
import json, os, resource, uuid
print(json.dumps({"env": dict(os.environ), "names": sorted(os.listdir()), "file": open("a/b").read(),
    "nproc": resource.getrlimit(resource.RLIMIT_NPROC)[0], "uuid": str(uuid.uuid4())}))
"""


def test_a_sandbox_off_a_template_is_what_was_asked_for(place: Place) -> None:
    async def test(server: Server) -> None:
        asked: dict[str, Any] = {
            "env": {"MINE": "a$b"}, "files": {"a/b": "given"}, "allowed_hosts": ["github"],
            "limits": LimitsRequest(processes=100),
        }  # fmt: skip
        boxes = [await server.make(**asked), await server.make(files={"a/b": "other"}, allowed_hosts=[])]
        for box in boxes:  # before anything was run
            assert [(item.name, item.state) for item in await Runner.shared().contexts(box)] == [("default", "idle")]
            assert await server.started(box, "template")
            assert not box.is_busy
        said = [json.loads(await server.say(box, ABOUT)) for box in boxes]
        assert [item["file"] for item in said] == ["given", "other"]
        assert [item["names"] for item in said] == [["a"], ["a"]]
        assert [item["nproc"] for item in said] == [100, 512]
        assert [item["env"].get("MINE") for item in said] == ["a$b", None]
        assert said[0]["uuid"] != said[1]["uuid"]
        assert boxes[0].spec.owner == "ada"
        hosts = "import socket\ntry: print(socket.gethostbyname('github.com'))\nexcept OSError: print('refused')"
        assert (await server.say(boxes[0], hosts)).startswith("127.")
        assert await server.say(boxes[1], hosts) == "refused"
        # What programs see is what the kernel sees.
        ran = await boxes[0].processes.run(
            Command(argv=["/bin/sh", "-c", "cat a/b; printf $MINE > c"], env=boxes[0].spec.env)
        )
        assert ran.stdout == b"given", ran
        assert await server.say(boxes[0], "print(open('c').read())") == "a$b"

    run(place, test)


def test_its_context_can_be_made_anew_and_removed_before_it_was_used(place: Place) -> None:
    async def test(server: Server) -> None:
        runner, box = Runner.shared(), await server.make()
        (first,) = box.kernels.values()
        await runner.restart_context(box)
        assert first.end is not None
        assert await server.say(box, "print(6 * 7)") == "42"
        await runner.delete_context(box, "default")
        assert await runner.contexts(box) == []
        assert await server.say(box, "print('again')") == "again"

    run(place, test)


def test_it_is_parked_woken_saved_and_forked_as_any_other(place: Place) -> None:
    async def test(server: Server) -> None:
        box = await server.make(id="kept", files={"f": "private"})
        await server.service.park("kept", caller=ADA)  # nothing was ever run in it
        info = await server.service.wake("kept", caller=ADA)
        box = await server.sandbox(info)
        assert await server.say(box, "x = 1; print(open('f').read())") == "private"
        saved = await server.snapshots.take("kept", SnapshotRequest(), caller=ADA)
        await server.say(box, "x = 2; open('f', 'w').write('changed')")
        await server.service.park("kept", caller=ADA)
        box = await server.sandbox(await server.service.wake("kept", caller=ADA))
        assert await server.say(box, "print(x, open('f').read())") == "2 changed"
        box = await server.sandbox(await server.snapshots.restore("kept", saved.id, caller=ADA))
        assert await server.say(box, "print(x, open('f').read())") == "1 private"
        fork = await server.sandbox(await server.snapshots.fork("kept", ForkRequest(id="other"), caller=ADA))
        assert await server.say(fork, "x += 10; print(x)") == "11"
        assert await server.say(box, "print(x)") == "1"

    run(place, test)


def test_what_cannot_have_a_kernel_that_waited_starts_cold(place: Place) -> None:
    async def test(server: Server) -> None:
        small = LimitsRequest(memory="200 MiB")
        asked: tuple[dict[str, Any], ...] = (
            {"limits": small},
            {"tools": ["bash"]},
            {"tenant": "t", "files": {"f": "1"}},
        )
        boxes = await asyncio.gather(*(server.make(**item) for item in asked))
        assert all([await server.started(box, "cold") for box in boxes])
        assert [len(box.kernels) for box in boxes] == [0] * 3
        assert await server.say(boxes[2], "print(open('f').read())") == "1"

    run(place, test)


def test_odd_environments_start_nothing_ahead(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[bool] = []

    async def start(self: WarmStarts, request: Any, *, is_from_pool: bool = False) -> None:
        wanted.append(request.is_usual)

    monkeypatch.setattr(WarmStarts, "start", start)

    async def test(server: Server) -> None:
        await asyncio.gather(server.make(), server.make(env={"PYTHONHASHSEED": "1"}))

    run(place, test)
    assert sorted(wanted) == [False, True]


def test_one_that_waits_is_taken_for_a_sandbox_and_for_a_script(place: Place) -> None:
    policy = place.policy
    manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config)
    warm = WarmStarts.shared(manager, policy)
    spec = policy.resolve({"profile": "pooled"}, executable=sys.executable)

    async def filled() -> Path:
        inputs = await asyncio.to_thread(warm.templates.inputs, spec, context_argv(spec))
        assert inputs is not None
        key = pools.make_key(inputs)
        warm.keeper.record_start(key, spec, context_argv(spec))
        for _ in range(1500):
            if found := await asyncio.to_thread(warm.pool.find, key):
                return found[0]
            await asyncio.sleep(0.1)
        raise AssertionError("nothing came to wait in the pool")

    async def test(server: Server) -> None:
        waiting = await asyncio.to_thread(place.run, filled)
        box = await server.make(profile="pooled", files={"f": "mine"}, env={"MINE": "1"})
        assert box.id == waiting.name
        assert await server.started(box, "pool")
        assert await server.say(box, "import os; print(os.environ['MINE'], open('f').read())") == "1 mine"

        waiting = await asyncio.to_thread(place.run, filled)
        config = place.folder("config")
        settings = {"Policy": {"state_dir": str(policy.state_path), "profiles": {"pooled": {"pool_size": 1}}}}
        (config / "jupyter_agentbox_config.json").write_text(json.dumps(settings))
        program = [sys.executable, "-m", "jupyter_agentbox.cli", "run", "--profile=pooled", "-c", "print(6 * 7)"]
        env = {**os.environ, "JUPYTER_CONFIG_DIR": str(config)}
        ran = await asyncio.to_thread(
            subprocess.run, program, env=env, cwd=config, capture_output=True, text=True, timeout=200
        )
        assert (ran.returncode, ran.stdout) == (0, "42\n"), ran.stderr
        assert not waiting.exists()
        rows = place.manager.audit.query(kind="lifecycle", sandbox=waiting.name)
        assert "pool" in [(row.detail or {}).get("how") for row in rows]

    try:
        run(place, test)
    finally:
        place.run(warm.keeper.aclose)


@pytest.mark.timeout(400)
def test_an_encrypted_store_keeps_templates_and_what_is_parked(has_runsc: None, tmp_path: Path) -> None:
    key = tmp_path / "snapshot.key"
    key.write_bytes(os.urandom(32).hex().encode())
    key.chmod(0o600)
    place = Place(tmp_path, snapshot_key_file=str(key))
    place.run(lambda: place.templates.make(place.spec(), ARGV))

    async def test(server: Server) -> None:
        box = await server.make(id="secret")
        assert await server.started(box, "template")
        assert await server.say(box, "word = 'mark' + 'word-' * 5; print(word)") == "markword-word-word-word-word-"
        await server.service.park("secret", caller=ADA)
        files = [path for path in (place.policy.state_path / "snapshots").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) > 20_000_000
        assert not [
            path for path in files if b"markword-word" in path.read_bytes() or b"ipykernel" in path.read_bytes()
        ]
        box = await server.sandbox(await server.service.wake("secret", caller=ADA))
        assert await server.say(box, "print(word[:5])") == "markw"

    run(place, test)
