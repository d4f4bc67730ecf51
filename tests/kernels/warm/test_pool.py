"""The pool: kernels that wait are taken once, by any process, as somebody's own, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from support import TESTS
from support.waiting import wait_until
from support.warm_kernels import ARGV, Kept, Talk

from jupyter_agentbox.errors import RuntimeFailed
from jupyter_agentbox.guest.covers import NOTE
from jupyter_agentbox.kernels.warm import pool as pools
from jupyter_agentbox.kernels.warm.templates import KernelRequest
from jupyter_agentbox.runtimes import Handle
from jupyter_agentbox.sandbox.drivers.messages import header_index
from jupyter_agentbox.sandbox.record import Record
from jupyter_agentbox.sandbox.sweep import sweep


@pytest.fixture(scope="module")
def kept(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """A place with a template and a pool, of which nothing may be left in the end."""
    patch = pytest.MonkeyPatch()
    patch.setattr(pools, "FILL_DELAY", 0.2)
    made = Kept(tmp_path_factory.mktemp("kept"))
    made.run(lambda: made.templates.make(made.spec(), ARGV))
    try:
        yield made
    finally:
        made.run(made.keeper.aclose)
        patch.undo()
    assert not list((made.policy.state_path / "sandboxes").iterdir())


def test_what_waits_costs_no_processor_and_is_taken_as_somebodys_own(kept: Kept) -> None:
    folder = kept.folder("taken")
    (folder / ".env").write_text("secret")
    (folder / "a.txt").write_text("mine")

    async def work() -> None:
        directory = await kept.filled()
        record = Record.load(directory)
        pid = Handle.from_dict(record.handle or {}).pid
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.01)  # a moment later than the signal
        assert [item.state for item in kept.manager.list() if item.id == record.id] == ["pooled"]
        assert record.spec.grant.hosts == ()
        spec = kept.spec(folder, env={"KERNEL_MINE": "yes"}, processes=100)
        sandbox = await kept.warm.pool.take(KernelRequest(spec, ARGV, "own-key", "hmac-sha256"), kept.key(spec))
        assert sandbox is not None
        assert sandbox.id == record.id
        try:
            heard: list[str] = []
            kernel = next(iter(sandbox.kernels.values()))
            talk = Talk(sandbox, "own-key")

            async def take(channel: str, frames: list[bytes]) -> None:
                index = header_index(frames)
                assert index is not None
                heard.append(json.loads(frames[index])["msg_type"])
                await talk._take(channel, frames)

            kernel.on_message = take
            # Of the cell that it has run while it waited, nothing is left.
            assert await talk.say("print(len(In), Out, repr(_i), repr(_))") == "2 {} '' ''"
            assert [kind for kind in heard if kind in ("execute_input", "execute_reply")] == [
                "execute_input",
                "execute_reply",
            ]
            code = """
import os, resource, json, subprocess
print(json.dumps([open("a.txt").read(), os.getcwd(), os.environ["KERNEL_MINE"], os.path.getsize(".env"),
    resource.getrlimit(resource.RLIMIT_NPROC)[0], subprocess.run(["mv", ".env", "x"], stderr=-3).returncode]))
open("new.txt", "w").write("here")
"""
            said = json.loads(await talk.say(code))
            assert said == ["mine", "/workspace", "yes", len(NOTE), 100, 1]
            assert (folder / "new.txt").read_text() == "here"
            assert sandbox.spec.grant.hosts == spec.grant.hosts != ()
            assert [item.state for item in kept.manager.list() if item.id == record.id] == ["running"]
            # Nobody gets it a second time.
            with pytest.raises(RuntimeFailed):
                await kept.manager.claim(record, spec, KernelRequest(spec, ARGV, "k", "hmac-sha256").claim)
        finally:
            await kept.manager.stop(sandbox)

    kept.run(work)


def test_a_claimer_that_is_killed_in_the_midst_leaves_nothing(kept: Kept) -> None:
    directory = kept.run(kept.filled)
    program = f"""
import asyncio, os, sys
sys.path.insert(0, {str(TESTS)!r})
from pathlib import Path
from jupyter_agentbox.sandbox import sandbox
from jupyter_agentbox.kernels.warm.pool import KernelRequest
from support.warm_kernels import ARGV, Kept
async def stall(*arguments):
    print("claimed", flush=True)
    await asyncio.sleep(600)
sandbox.apply_claim = stall
kept = Kept(Path({str(kept.base)!r}))
spec = kept.spec()
kept.run(lambda: kept.warm.pool.take(KernelRequest(spec, ARGV, "k", "hmac-sha256"), kept.key(spec)))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        record = Record.load(directory)  # before its lease may be over
        process.send_signal(signal.SIGKILL)
    assert record.spec.layout == "claimed"
    assert record.kernels == []
    handle = Handle.from_dict(record.handle or {})

    def is_swept() -> bool:
        sweep(kept.policy.state_path)
        return not directory.exists()

    wait_until(is_swept, 100, "it is swept", pause=0.2)
    assert not kept.manager.runtime.is_alive(handle)


def test_another_process_takes_from_the_pool_by_nbclient(kept: Kept) -> None:
    directory = kept.run(kept.filled)
    config = kept.folder("config")
    settings = {"Policy": {"state_dir": str(kept.policy.state_path), "pool_size": 1, "lease_timeout": 2.0}}
    (config / "jupyter_agentbox_config.json").write_text(json.dumps(settings))
    work = kept.folder("book")
    code = "import os; open('out.txt', 'w').write(os.getcwd())"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), work / "book.ipynb")
    program = """
import os, nbformat
from nbclient import NotebookClient
book = nbformat.read("book.ipynb", 4)
NotebookClient(book, kernel_name="agentbox", timeout=150).execute()
"""
    env = {**os.environ, "JUPYTER_CONFIG_DIR": str(config), "JUPYTER_RUNTIME_DIR": str(config / "run")}
    subprocess.run([sys.executable, "-c", program], cwd=work, env=env, check=True, timeout=200)
    assert (work / "out.txt").read_text() == "/workspace"
    assert not directory.exists()
    rows = kept.manager.audit.query(kind="lifecycle", sandbox=directory.name)
    assert "pool" in [(row.detail or {}).get("how") for row in rows]


def test_what_waits_ends_when_a_package_is_installed(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = kept.run(kept.filled)
    monkeypatch.setattr(kept.templates, "inputs", lambda spec, argv: {"packages": "others"})
    kept.run(kept.keeper._drop_changed)
    wait_until(lambda: not directory.exists(), 60, "it ends")
