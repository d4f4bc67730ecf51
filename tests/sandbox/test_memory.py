"""A program that uses too much memory is killed alone, and the sandbox lives; on real gVisor."""

from __future__ import annotations

import asyncio
import logging

import pytest
from contract.sandboxes import FILL_MEMORY
from support.boxes import ENV, boxed, run

from jupyter_agentbox.guest.memory import Program, choose
from jupyter_agentbox.runtimes.machine import find_memory_room
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command
from jupyter_agentbox.spec import GIB, MIB, Limits

real = pytest.mark.usefixtures("has_runsc")

#: Allocates about 40 MB/s, to far beyond what there is.
EAT = """
import time
kept = []
for _ in range(400):
    kept.append(bytearray(b"x" * 4_000_000))
    time.sleep(0.1)
print("it was not stopped")
"""


def make(pid: int, size: int) -> Program:
    return Program(pid, b"Name:\tx\nGroups:\t1 2 \nVmRSS:\t%d kB\n" % (size // 1024))


def shell(line: str) -> Command:
    return Command(line=line, env=ENV)


@pytest.mark.parametrize(
    ("sizes", "kernels", "chosen"),
    [
        ({2: 60, 3: 400}, {2}, 3),  # a program is the cause
        ({2: 400, 3: 60}, {2}, 3),  # one that matters goes before a kernel
        ({2: 450, 3: 5}, {2}, 2),  # a small one does not
        ({2: 60, **dict.fromkeys(range(3, 14), 40)}, {2}, 3),  # many small ones go before a small kernel
        (dict.fromkeys(range(2, 9), 70), set(range(2, 9)), 2),  # many small kernels
        ({2: 100, 3: 50}, {2}, None),  # most of it lies in files
        ({}, set(), None),
    ],
)
def test_the_choice(sizes: dict[int, int], kernels: set[int], chosen: int | None) -> None:
    programs = [make(pid, size * MIB) for pid, size in sizes.items()]
    victim = choose(programs, kernels, 480 * MIB, 16 * MIB, 512 * MIB)
    assert (victim.pid if victim else None) == chosen


def test_what_is_kept_free() -> None:
    sizes = (64 * MIB, 192 * MIB, 512 * MIB, 4 * GIB, 64 * GIB)
    assert [find_memory_room(size) // MIB for size in sizes] == [8, 24, 48, 204, 256]


@real
def test_a_command_is_killed_alone_and_told_why(manager: SandboxManager, caplog: pytest.LogCaptureFixture) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(memory=512 * MIB)) as box:
            other = await box.processes.start(shell("sleep 1000"))
            result = await box.argv(["/usr/bin/python3", "-c", EAT])
            assert (result.exit_code, result.stdout) == (137, b"")
            told = result.stderr.decode()
            assert told.startswith("agentbox: out of memory: killed python3 (process ")
            assert "MiB of 512 MiB (memory of the profile, Policy.max_memory)\n" in told
            # Again, as a part of a shell's line, which goes on.
            line = await box.run(f"python3 -c '{EAT}'; echo $?")
            assert line.stdout == b"137\n"
            assert b"agentbox: out of memory: killed python3" in line.stderr
            assert box.processes.get(other.id).state == "running"
            assert box.sandbox.end is None

    with caplog.at_level(logging.ERROR):
        run(test, manager)
    assert "out of memory: killed 'python3' (process " in caplog.text
    rows = [row.detail for row in manager.audit.query(kind="lifecycle") if row.detail["event"] == "killed"]
    assert [(row["cause"], row["setting"]) for row in rows] == [
        ("out_of_memory", "memory of the profile, Policy.max_memory")
    ] * 2


@real
def test_a_background_process_is_killed_alone_and_told_why(manager: SandboxManager) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(memory=512 * MIB)) as box:
            for command in (shell(f"python3 -c '{EAT}'"), None):
                if command is not None:
                    info, stream = await box.processes.start(command), "stderr"
                else:
                    info, stream = await box.processes.open_terminal(shell(f"python3 -c '{EAT}'")), "stdout"
                info = await box.processes.wait(info.id, 60)
                assert (info.state, info.exit_code) == ("exited", 137)
                chunk = await box.processes.read(info.id, stream=stream)
                assert b"agentbox: out of memory: killed python3" in chunk.data
            assert (await box.text("echo alive")) == "alive"

    run(test, manager)


@real
def test_what_no_program_has_ends_the_sandbox_and_no_innocent(
    manager: SandboxManager, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(manager: SandboxManager) -> None:
        async with boxed(manager, limits=Limits(memory=300 * MIB)) as box:
            await box.processes.start(shell("sleep 1000"))
            await box.processes.start(shell(FILL_MEMORY))
            end = await asyncio.wait_for(LinkThread.instance().run(box.sandbox.wait_ended()), 60)
            assert end.message == "out of memory (limit 300 MiB)"

    with caplog.at_level(logging.ERROR):
        run(test, manager)
    assert "killed" not in caplog.text
