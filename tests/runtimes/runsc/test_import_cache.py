"""The import cache: used by the first kernel of a sandbox, where all is as it was, and by nothing else."""

from __future__ import annotations

import asyncio
import marshal
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import IPython.core.release
import pytest
from support.boxes import Box
from support.warm_kernels import ARGV, Place, Talk

from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.sandbox import Sandbox

#: A module that ipykernel imports as it starts, and what tells the cached one.
MODULE = "IPython.core.release"
ASK = f"import importlib, sys; print(getattr(sys.modules['{MODULE}'], 'is_cached', False))"


@pytest.fixture
def place(has_runsc: None, tmp_path: Path) -> Iterator[Place]:
    """A place with a cache in which one module is another one than its file says."""
    made = Place(tmp_path)
    state = made.policy.state_path
    assert import_cache.make(state)
    rewrite(find(state), source="is_cached = True\n")
    yield made
    assert not list(state.glob("sandboxes/*"))


def find(state: Path) -> Path:
    """Return the one cache that there is."""
    (path,) = (state / "imports").iterdir()
    return path


def load(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and body."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return marshal.loads(content[8:end]), content[end:]


def rewrite(path: Path, /, *, source: str = "", **changes: Any) -> None:
    """Add a line to the source of the module, or change the header."""
    header, body = load(path)
    location = IPython.core.release.__file__
    code = compile(Path(location).read_text() + source, location, "exec")
    header["modules"][MODULE] = (location, len(body), len(body) + len(marshal.dumps(code)))
    header.update(changes)
    head = marshal.dumps(header)
    path.write_bytes(len(head).to_bytes(8, "little") + head + body + marshal.dumps(code))


async def ask(sandbox: Sandbox, code: str = ASK) -> str:
    """Start a kernel, and run code in it."""
    kernel = await sandbox.start_kernel(ARGV, sandbox.spec.env, "/workspace", key="key", signature_scheme="hmac-sha256")
    talk = Talk(sandbox, "key")
    talk.kernel = kernel
    kernel.on_message = talk._take
    return await talk.say(code)


async def asked(place: Place, command: list[str] | None = None, code: str = ASK) -> str:
    """Ask the first kernel of a new sandbox, or one after a command."""
    sandbox = await place.manager.create(place.spec())
    try:
        if command is not None:
            await Box(sandbox).argv(command)
        return await ask(sandbox, code)
    finally:
        await place.manager.stop(sandbox)


def test_the_first_kernel_has_its_modules_from_the_cache(place: Place) -> None:
    about = f"""
import inspect, sys, traitlets
module = sys.modules["{MODULE}"]
print(module.is_cached, module.__file__, type(module.__loader__).__name__, module.__spec__.loader is module.__loader__,
      "class HasTraits" in inspect.getsource(traitlets.HasTraits), len(sys.meta_path),
      [finder for finder in sys.meta_path if "ImportCache" in str(finder)])
"""

    async def work() -> str:
        return await asked(place, code=about)

    said = place.run(work).split()
    assert said[:5] == ["True", IPython.core.release.__file__, "SourceFileLoader", "True", "True"]
    assert said[-1] == "[]", "the cache is still asked"


def test_after_any_program_the_files_count(place: Place) -> None:
    async def work() -> tuple[str, str, list[Path]]:
        after = await asked(place, ["/bin/true"])
        sandbox = await place.manager.create(place.spec())
        try:
            await ask(sandbox)
            second = await ask(sandbox)
            return after, second, list((sandbox.directory / "link").glob(import_cache.NAME))
        finally:
            await place.manager.stop(sandbox)

    assert place.run(work) == ("False", "False", [])


@pytest.mark.parametrize("changes", [{"python": ("3.0", "/usr", 0)}, {"path": []}, {"roots": {"/nowhere"}}])
def test_that_of_another_interpreter_or_search_path_is_not_used(place: Place, changes: dict[str, Any]) -> None:
    rewrite(find(place.policy.state_path), source="is_cached = True\n", **changes)

    async def work() -> str:
        return await asked(place)

    assert place.run(work) == "False"


def test_a_changed_file_or_folder_makes_it_stale(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    assert import_cache.read(state) is None
    assert import_cache.make(state)
    path = find(state)
    header, _ = load(path)
    assert import_cache.read(state) == path.read_bytes()
    assert {IPython.core.release.__file__, os.path.dirname(IPython.__file__)} <= set(header["stamps"])

    changed = tmp_path / "module.py"
    changed.write_text("1")
    rewrite(path, stamps={**header["stamps"], str(changed): import_cache.make_stamp(str(changed))})
    assert import_cache.read(state) is not None
    changed.write_text("12")
    assert import_cache.read(state) is None
    before = path.stat().st_ino
    assert import_cache.make(state), "it is made anew"
    assert path.stat().st_ino != before
    assert import_cache.read(state) is not None


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08" + bytes(7) + b"nonsense"])
def test_one_that_was_spoilt_is_none_and_is_made_anew(tmp_path: Path, content: bytes) -> None:
    assert import_cache.make(tmp_path)
    path = find(tmp_path)
    path.write_bytes(content)
    assert import_cache.read(tmp_path) is None
    assert import_cache.make(tmp_path)
    assert load(path)[0]["python"][0] == sys.version


def test_what_a_killed_maker_left_is_removed_and_another_ones_is_not(tmp_path: Path) -> None:
    left, busy = tmp_path / "imports" / ".new-left", tmp_path / "imports" / ".new-busy"
    for folder in (left, busy):
        folder.mkdir(parents=True)
        (folder / "imports").touch()
    os.utime(left, (0, 0))
    assert import_cache.make(tmp_path)
    assert not left.exists()
    assert busy.exists()


def test_a_server_makes_it_once_kernels_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_agentbox.kernels.warm import starts

    monkeypatch.setattr(starts, "TEMPLATE_DELAY", 0.0)
    monkeypatch.setattr(starts.WarmStarts, "is_keeping", True)
    path = find(place.policy.state_path)
    path.unlink()

    async def work() -> None:
        place.warm._schedule_import_cache()
        for _ in range(1000):
            if path.exists():
                break
            await asyncio.sleep(0.1)
        await place.warm.aclose()

    LinkThread.instance().submit(work()).result(150)
    assert import_cache.read(place.policy.state_path) is not None
