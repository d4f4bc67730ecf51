"""Templates: a kernel goes on from one as somebody's own, and a template that does not fit or was changed is no use."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.warm_kernels import ARGV, PRELOADED, Place, Talk

from jupyter_agentbox.errors import InvalidConfig
from jupyter_agentbox.guest.covers import NOTE
from jupyter_agentbox.kernels.sandboxed_kernel import SandboxedKernel
from jupyter_agentbox.kernels.warm.template_key import can_be_warm, find_inputs, make_key, unclaimed_spec
from jupyter_agentbox.kernels.warm.templates import KernelRequest
from jupyter_agentbox.spec import SandboxSpec


@pytest.fixture(scope="module")
def place(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place with one template, with numpy imported."""
    made = Place(tmp_path_factory.mktemp("place"), profiles={"default": {"preload": [PRELOADED]}})
    made.run(lambda: made.templates.make(made.spec(), ARGV))
    yield made
    assert not list((made.policy.state_path / "sandboxes").iterdir())


async def start(place: Place, spec: SandboxSpec, key: str) -> Talk:
    """Start one off the template."""
    inputs = place.templates.inputs(spec, ARGV)
    assert inputs is not None
    sandbox = await place.templates.start(KernelRequest(spec, ARGV, key, "hmac-sha256"), make_key(inputs))
    assert sandbox is not None, "there is no template that works"
    return Talk(sandbox, key)


def test_two_kernels_of_one_template_share_nothing(place: Place) -> None:
    secret = place.folder("one")
    (secret / ".ssh").mkdir()
    (secret / ".ssh" / "config").write_text("secret")
    (secret / ".env").write_text("secret")
    (secret / "a.txt").write_text("one")
    other = place.folder("two")
    (other / "a.txt").write_text("two")
    specs = [
        replace(place.spec(secret, env={"KERNEL_MINE": "first"}, allowed_hosts=[]), kernel_id="one"),
        replace(
            place.spec(other, env={"KERNEL_MINE": "second"}, processes=100, cpus=3.9, allowed_hosts=["github"]),
            kernel_id="two",
        ),
    ]
    about = """
import ipykernel, json, os, random, resource, sys, time, uuid
print(json.dumps({
    "file": open("a.txt").read(), "cwd": os.getcwd(), "names": sorted(os.listdir()), "env": dict(os.environ),
    "random": [random.random(), __import__("numpy").random.random(), str(uuid.uuid4()), os.urandom(8).hex()],
    "nproc": resource.getrlimit(resource.RLIMIT_NPROC), "loaded": "numpy" in sys.modules, "time": time.time(),
    "key": json.load(open(ipykernel.get_connection_file()))["key"],
    "session": get_ipython().kernel.session.session, "ident": get_ipython().kernel.ident,
    "guest": open("/proc/1/status").read().split("CapEff:")[1].split()[0],
}))
"""

    async def work() -> None:
        talks = [await start(place, spec, f"key-{index}") for index, spec in enumerate(specs)]
        try:
            said = [json.loads(await talk.say(about)) for talk in talks]
            assert [item["file"] for item in said] == ["one", "two"]
            assert [item["cwd"] for item in said] == ["/workspace"] * 2
            assert [item["env"]["KERNEL_MINE"] for item in said] == ["first", "second"]
            assert [item["nproc"] for item in said] == [[512, 512], [100, 100]]
            assert [item["key"] for item in said] == ["key-0", "key-1"]
            for name in ("session", "ident"):
                assert said[0][name] != said[1][name]
            assert not set(map(str, said[0]["random"])) & set(map(str, said[1]["random"]))
            assert all(item["loaded"] and abs(item["time"] - time.time()) < 60 for item in said)
            # The guest's right to mount is gone.
            assert not any(int(item["guest"], 16) & (1 << 21 | 1 << 8) for item in said)
            # What is hidden can be neither read, nor moved away, nor replaced.
            hidden = """
import os, subprocess
print(os.path.getsize(".env"), os.listdir(".ssh"))
for command in ("mv .ssh x", "mv .env x", "rm .env", "echo x > .env", "rmdir .ssh", "touch .ssh/x"):
    print(subprocess.run(command, shell=True, capture_output=True).returncode != 0, end=" ")
print(os.path.lexists("/run/agentbox/claim/work/.env"))
open("new.txt", "w").write("here")
"""
            assert (await talks[0].say(hidden)).split() == [str(len(NOTE)), "[]", *["True"] * 6, "False"]
            assert (secret / ".ssh" / "config").read_text() == "secret"
            assert (secret / "new.txt").read_text() == "here"
            assert not (other / "new.txt").exists()
            groups = [map(Path, talk.sandbox.record.handle["cgroups"]) for talk in talks]  # type: ignore[index]
            found = [
                int((path / name).read_text().split()[0])
                for paths in groups
                for path in paths
                for name in ("cpu.cfs_quota_us", "cpu.max")
                if (path / name).exists()
            ]
            assert found == [400_000, 390_000]
            resolve = (
                "import socket\ntry: print(socket.gethostbyname('github.com'))\nexcept OSError as e: print('refused')"
            )
            assert await talks[0].say(resolve) == "refused"
            assert (await talks[1].say(resolve)).startswith("127.")
            # A snapshot of one that started warm goes on as any other does.
            await talks[0].say("kept = 41")
            await _fork(place, talks[0])
        finally:
            for talk in talks:
                await place.manager.stop(talk.sandbox)

    place.run(work)


async def _fork(place: Place, talk: Talk) -> None:
    from jupyter_agentbox.sandbox.record import Record

    staged = await asyncio.to_thread(place.templates.store.stage)
    try:
        record = Record.from_bytes(await talk.sandbox.checkpoint(staged))
        copy = await place.manager.restore(record.spec, record, staged)
        try:
            other = Talk(copy, "key-0")
            assert await other.say("print(kept + 1, open('new.txt').read())") == "42 here"
        finally:
            await place.manager.stop(copy)
    finally:
        await asyncio.to_thread(place.templates.store.discard, staged)


def test_a_slot_starts_off_the_template_and_restarts_with_its_files(place: Place) -> None:
    async def work() -> None:
        slot = SandboxedKernel(place.manager, key=b"slot-key", signature_scheme="hmac-sha256", warm=place.warm)
        try:
            spec = place.spec()
            info = await slot.start(spec, ARGV)
            assert info["key"] == b"slot-key"
            assert slot.sandbox is not None
            assert slot.sandbox.spec.layout == "claimed"
            (slot.sandbox.workspace / "kept.txt").write_text("kept")
            first = slot.sandbox.id
            assert await slot.start(spec, ARGV) == info
            assert slot.sandbox.id != first
            assert (slot.sandbox.workspace / "kept.txt").read_text() == "kept"
            assert slot.sandbox.spec.layout == "claimed"
        finally:
            await slot.release()

    place.run(work)


ENVIRONMENT = """
import ctypes, json, multiprocessing, os, subprocess
import helper
get = ctypes.CDLL(None).getenv
get.restype = ctypes.c_char_p
print(json.dumps({
    "env": dict(os.environ), "of C": {name: os.fsdecode(get(name.encode()) or b"") for name in os.environ},
    "of a command": dict(
        row.split("=", 1) for row in subprocess.check_output(["env", "-0"], text=True).split("\\0") if row
    ),
    "authkey": multiprocessing.current_process().authkey.hex(), "helper": helper.NAME,
}))
"""


def test_a_claimed_kernel_has_the_environment_that_it_would_have_cold(has_runsc: None, tmp_path: Path) -> None:
    # Python sets LC_CTYPE where LANG is C, and ipykernel MPLBACKEND where it is empty, and PAGER always.
    env = {
        "LANG": "C",
        "PAGER": "less",
        "MPLBACKEND": "",
        "JUPYTER_MAKER": "the maker's",
        "JUPYTER_BOTH": "the maker's",
    }
    place = Place(tmp_path, env=env, profiles={"default": {"preload": ["multiprocessing"]}})
    folder = place.folder("work")
    (folder / "helper.py").write_text("NAME = 'helper'")
    place.run(lambda: place.templates.make(place.spec(), ARGV))
    inputs = place.templates.inputs(place.spec(), ARGV)
    assert inputs is not None
    spec = place.spec(folder, env={"KERNEL_MINE": "1"})
    other = {**spec.env, "JUPYTER_BOTH": "the claimer's", "JUPYTER_OWN": "the claimer's", "GIT_PAGER": "less"}
    del other["JUPYTER_MAKER"]

    async def read(spec: SandboxSpec, *, is_cold: bool = False) -> dict[str, Any]:
        if is_cold:
            sandbox = await place.manager.create(spec)
            await sandbox.start_kernel(ARGV, spec.env, "/workspace", key="k", signature_scheme="hmac-sha256")
        else:
            found = await place.templates.start(KernelRequest(spec, ARGV, "k", "hmac-sha256"), make_key(inputs))
            assert found is not None
            sandbox = found
        try:
            said: dict[str, Any] = json.loads(await Talk(sandbox, "k").say(ENVIRONMENT))
            assert said["env"] == said["of C"] == said["of a command"]
            assert said["helper"] == "helper"
            return said
        finally:
            await place.manager.stop(sandbox)

    async def work() -> None:
        cold, first, second = await read(spec, is_cold=True), await read(spec), await read(spec)
        assert first["env"] == second["env"] == cold["env"]
        assert (cold["env"]["PAGER"], cold["env"]["LC_CTYPE"]) == ("cat", "C.UTF-8")
        assert len({item["authkey"] for item in (cold, first, second)}) == 3
        # No start asks for a template that was made with other variables than these; if one did, none would stay.
        claimed = (await read(replace(spec, env=other)))["env"]
        assert claimed == (await read(replace(spec, env=other), is_cold=True))["env"]
        assert "the maker's" not in claimed.values()

    place.run(work)


def test_what_was_changed_on_the_disk_is_refused_and_the_start_is_cold(
    has_runsc: None, place: Place, tmp_path: Path
) -> None:
    found = place.templates.list()[-1]
    image = next((place.policy.state_path / "snapshots" / "owners").glob(f"*/snapshots/{found.id}/image/pages.img"))
    kept = image.read_bytes()
    os.chmod(image, 0o600)
    with open(image, "r+b") as file:
        file.seek(len(kept) // 2)
        file.write(bytes([kept[len(kept) // 2] ^ 1]))

    async def work() -> None:
        slot = SandboxedKernel(place.manager, key=b"k", signature_scheme="hmac-sha256", warm=place.warm)
        try:
            await slot.start(place.spec(), ARGV)
            assert slot.sandbox is not None
            assert slot.sandbox.spec.layout == "plain"
        finally:
            await slot.release()

    place.run(work)
    assert found.id not in [item.id for item in place.templates.list()]
    # And it can be made again.
    place.run(lambda: place.templates.make(place.spec(), ARGV))
    assert len(place.templates.list()) == 1


def test_a_module_that_is_not_there_is_told_with_its_setting(has_runsc: None, tmp_path: Path) -> None:
    place = Place(tmp_path, profiles={"default": {"preload": ["no_such_module_here"]}})
    with pytest.raises(InvalidConfig, match="no_such_module_here") as caught:
        place.run(lambda: place.templates.make(place.spec(), ARGV))
    assert "preload" in str(caught.value.setting)
    assert place.templates.list() == []
    assert list((place.policy.state_path / "sandboxes").iterdir()) == []


def test_the_key_follows_what_is_in_memory_and_nothing_else(tmp_path: Path) -> None:
    packages = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    place = Place(tmp_path, mounts={"/env": str(tmp_path / "env")}, env={"SECRET": "x"})
    spec = place.spec()

    def key(spec: SandboxSpec, argv: list[str] = ARGV, fingerprint: str = "1") -> str:
        return make_key(find_inputs(spec, argv, {"release": fingerprint}))

    first = key(spec)
    for same in (
        replace(spec, kernel_id="x", workspace=tmp_path, hidden=()),
        replace(spec, env={**spec.env, "KERNEL_X": "1", "SECRET": "y", "TERM": "dumb"}),
        place.spec(processes=100, allowed_hosts=[]),
    ):
        assert key(same) == first
    for name in ("python", "python3"):
        (tmp_path / name).symlink_to(sys.executable)
    assert (
        key(spec, [str(tmp_path / "python"), *ARGV[1:]]) == key(spec, [str(tmp_path / "python3"), *ARGV[1:]]) != first
    )
    assert "SECRET" not in unclaimed_spec(spec, lease=1.0).env
    assert unclaimed_spec(spec, lease=1.0).grant.hosts == ()
    assert spec.warm is not None
    for other in (
        key(replace(spec, env={**spec.env, "PYTHONHASHSEED": "1"})),
        key(replace(spec, env={**spec.env, "LANG": "de_DE.UTF-8"})),
        key(replace(spec, warm=replace(spec.warm, preload=("numpy",)))),
        key(spec, [*ARGV, "--log-level=DEBUG"]),
        key(spec, fingerprint="2"),
        # Programs see these limits as the size of the machine, from the start on.
        key(place.spec(memory="300 MiB")),
        key(place.spec(cpus=1)),
    ):
        assert other != first
    (packages / "thing-1.0.dist-info").mkdir()
    assert key(spec) != first


def test_what_starts_cold(tmp_path: Path) -> None:
    place = Place(tmp_path)
    spec = place.spec()
    assert can_be_warm(spec, ARGV)
    assert not can_be_warm(spec, ["/usr/bin/R", "{connection_file}"])
    assert not can_be_warm(replace(spec, is_root=True), ARGV)
    assert not can_be_warm(replace(spec, driver="relay"), ARGV)
    assert not can_be_warm(replace(spec, init=("true",)), ARGV)
    assert not can_be_warm(replace(spec, env={"X": "x" * 100_000}), ARGV)
    assert not can_be_warm(replace(spec, limits=replace(spec.limits, processes=10**6)), ARGV)
    assert Place(tmp_path / "off", templates=False).spec().warm is None
