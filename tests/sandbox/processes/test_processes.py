"""Commands, background processes and terminals on real gVisor; and a guest that lies."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from support.boxes import ENV, Box, boxed, run

from jupyter_agentbox.egress import PROXY_ENV
from jupyter_agentbox.errors import InvalidRequest, LinkClosed, NotFound, PolicyRefused, SandboxEnded
from jupyter_agentbox.guest.framing import pack_json, pack_message
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command, Events, Exit, Output, ProcessTable, background, table, wire
from jupyter_agentbox.spec import MIB, Cause, End, SandboxSpec

Test = Callable[[Box], Awaitable[None]]


@pytest.fixture
def in_box(has_runsc: None, manager: SandboxManager, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a way to run a test inside a sandbox."""
    for module in (wire, table, background):  # what is obeyed late is obeyed
        monkeypatch.setattr(module, "KILL_TIMEOUT", 60.0)

    def start(test: Test, **spec: Any) -> None:
        async def within(manager: SandboxManager) -> None:
            async with boxed(manager, **{"env": ENV, **spec}) as box:
                await test(box)

        run(within, manager)

    return start


async def gone(box: Box, name: str) -> bool:
    """Wait until no process of that name is left."""
    return await becomes(lambda: box.run(f"grep -lx {name} /proc/[0-9]*/comm"), lambda ran: ran.stdout == b"")


async def becomes(look: Callable[[], Awaitable[Any]], is_wanted: Callable[[Any], bool], timeout: float = 60) -> bool:
    """Look again and again until what is seen is what is wanted."""
    deadline = time.monotonic() + timeout
    while not is_wanted(await look()):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def until(events: Events, text: bytes, timeout: float = 60) -> bytes:
    """Read until a text has come."""
    seen = b""

    async def read() -> None:
        nonlocal seen
        async for event in events:
            if isinstance(event, Output):
                seen += event.data
                if text in seen:
                    return
        raise AssertionError("it ended")

    try:
        await asyncio.wait_for(read(), timeout)
    except (asyncio.TimeoutError, AssertionError) as error:
        raise AssertionError(f"{text!r} did not come: {seen!r}") from error
    return seen


def test_a_command_says_what_to_run_where_and_with_what(in_box: Callable[..., None]) -> None:
    proxied = {**ENV, **PROXY_ENV, "BASE": "1"}

    async def test(box: Box) -> None:
        runs = box.processes.run
        # Bash where there is one: [[ is not sh's.
        result = await runs(Command("[[ a == a ]] && echo $BASE $MORE; pwd; exit 3", env={"MORE": "a\nb"}))
        assert (result.stdout, result.exit_code) == (b"1 a b\n/workspace\n", 3)
        assert (await runs(Command(argv=["/usr/bin/printf", "%s", "$BASE"]))).stdout == b"$BASE"
        assert (await runs(Command("mkdir sub; cd sub; pwd"))).stdout == b"/workspace/sub\n"
        assert (await runs(Command("pwd", workdir="sub"))).stdout == b"/workspace/sub\n"
        assert (await runs(Command("pwd", workdir="/tmp"))).stdout == b"/tmp\n"
        assert (await runs(Command("tr a-z A-Z"), stdin=b"loud")).stdout == b"LOUD"
        # Nothing of the guest's is open in it, and no signal is ignored.
        assert (await runs(Command(argv=["ls", "/proc/self/fd"]))).stdout.split() == [b"0", b"1", b"2", b"3"]
        assert (await runs(Command("yes | head -n1 >/dev/null; echo ${PIPESTATUS[0]}"))).stdout == b"141\n"
        # Without input it reads an end, not the guest's.
        assert (await runs(Command("cat; readlink /proc/self/fd/0"))).stdout == b"/dev/null\n"
        result = await runs(Command("head -c 3000000 /dev/zero; echo e >&2"), max_output=7)
        assert result.stdout == b"\0\0\0\0\n[2,999,993 bytes of output left out]\n\0\0\0"
        assert (result.truncated, result.stdout_bytes, result.stderr_bytes) == (True, 3_000_000, 2)
        lines = await runs(Command("seq 60000; echo RESULT 42"), max_output=1000)
        assert lines.stdout.startswith(b"1\n2\n3\n")
        assert lines.stdout.endswith(b"\n60000\nRESULT 42\n")
        assert len(lines.stdout) < 1100
        # Output is data, and stays as it is if it fits.
        assert (await runs(Command("printf 'a\\rb\\r\\n'"))).stdout == b"a\rb\r\n"
        with pytest.raises(InvalidRequest, match="workdir") as caught:
            await runs(Command("pwd", workdir="no/such"))
        assert caught.value.field == "workdir"
        # A folder that only the guest may enter.
        with pytest.raises(InvalidRequest, match="workdir"):
            await runs(Command("pwd", workdir="/run/agentbox"))
        assert (await runs(Command(argv=["none-such"]))).exit_code == 127
        for refused in ({"HTTPS_PROXY": ""}, {"https_proxy": "http://elsewhere"}, {"A=B": ""}, {"": ""}, {"A": "\0"}):
            with pytest.raises(InvalidRequest) as caught:
                await runs(Command("true", env=refused))
            assert caught.value.field == "env"
        with pytest.raises(PolicyRefused, match="root"):
            await runs(Command("id -u", user="root"))
        for wrong in (
            Command("x", argv=["x"]),
            Command(argv=[]),
            Command(argv=["a\0"]),
            Command("a\0"),
            Command("true", workdir="\0"),
            Command("true", user="daemon"),
            Command("true", env={"A": "x" * 300_000}),
        ):
            with pytest.raises(InvalidRequest):
                await runs(wrong)
        for timeout in (0, -1, float("nan"), 1e9):
            with pytest.raises(InvalidRequest, match="timeout"):
                await runs(Command("true"), timeout=timeout)
        assert not box.processes.is_busy

    in_box(test, env=proxied)


def test_root_is_for_profiles_that_have_it(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        assert (await box.processes.run(Command("id -u", user="root"))).stdout == b"0\n"
        line = "setsid sleep 1000 & setpriv --clear-groups setsid sleep 1000 & echo up; sleep 1000"
        result = await box.processes.run(Command(line, user="root"), timeout=3.0)
        assert (result.stdout, result.timed_out) == (b"up\n", True)
        assert await gone(box, "sleep")

    in_box(test, is_root=True)


def test_a_command_out_of_time_gives_what_it_printed_and_takes_all_its_offspring_along(
    in_box: Callable[..., None],
) -> None:
    async def test(box: Box) -> None:
        offspring = "setsid sleep 1001 & (setsid env -i sh -c 'sleep 1002 & disown; sleep 1003' &) ; nohup sleep 1004 &"
        # One that is never the same process for long.
        hop = "import os\nwhile 1:\n  if os.fork(): os._exit(0)\n  os.setsid()"
        lines = f"{offspring} echo partial; sleep 1000", f"echo partial; python3 -c '{hop}' & sleep 1000"
        for line in lines:
            began = time.monotonic()
            result = await box.processes.run(Command(line), timeout=2.0)
            assert time.monotonic() - began < 60
            assert (result.stdout[:8], result.timed_out, result.exit_code) == (b"partial\n", True, 137)
            assert 2.0 <= result.duration < 60
            assert await gone(box, "sleep")
            assert await gone(box, "python3")
        # What others started is not touched, and what one leaves behind in time goes on.
        assert (await box.text("setsid sleep 1005 >/dev/null 2>&1 & echo left")) == "left"
        assert (await box.processes.run(Command("sleep 1006"), timeout=0.3)).timed_out
        sleepers = lambda: box.run("grep -lx sleep /proc/[0-9]*/comm")  # noqa: E731
        assert await becomes(sleepers, lambda ran: ran.stdout.count(b"\n") == 1)
        # One that prints without end from behind does not hold up the end.
        assert (await box.run("yes & echo done; exit 4")).exit_code == 4

    in_box(test)


def test_events_come_as_they_happen_and_a_slow_reader_gets_all(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        wait = "until [ -e /tmp/{} ]; do sleep 0.05; done"
        line = f"echo a; {wait.format(1)}; echo b >&2; {wait.format(2)}; exit 5"
        seen: list[Any] = []
        async with await box.processes.stream(Command(line)) as events:
            async for event in events:
                seen.append(event)
                await box.text(f"touch /tmp/{len(seen)}")
        assert seen == [Output("stdout", 0, b"a\n"), Output("stderr", 0, b"b\n"), Exit(5)]

        total = 0
        line = "for i in 0 1 2 3 4 5 6 7 8 9; do head -c 1000000 /dev/zero; echo $i > /tmp/at; done"
        async with await box.processes.stream(Command(line)) as events:
            await asyncio.sleep(1.0)
            assert (await box.text("cat /tmp/at 2>/dev/null || true")) in ("", "0")  # it waits for its reader
            async for event in events:
                if isinstance(event, Output):
                    assert event.offset == total
                    total += len(event.data)
                    if total < MIB:
                        await asyncio.sleep(0.02)
        assert (total, event) == (10_000_000, Exit(0))

        events = await box.processes.stream(Command("sleep 1 & sleep 1000"), timeout=3.0)
        assert [event async for event in events] == [Exit(137, 9, timed_out=True)]

    in_box(test)


def test_a_reader_who_goes_away_ends_the_command(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        async with await box.processes.stream(Command("echo started; setsid sleep 1000 & sleep 1000")) as events:
            await until(events, b"started")
        assert await gone(box, "sleep")
        forgotten = await box.processes.stream(Command("sleep 1000"))
        assert box.processes.is_busy
        del forgotten
        assert await gone(box, "sleep")
        running = asyncio.ensure_future(box.processes.run(Command("sleep 1000")))
        await asyncio.sleep(0.3)
        running.cancel()
        assert await gone(box, "sleep")
        assert await becomes(lambda: asyncio.sleep(0, box.processes.is_busy), lambda is_busy: not is_busy)

    in_box(test)


def test_a_hundred_at_once(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        results = await asyncio.gather(*(box.processes.run(Command(argv=["true"]), timeout=200) for _ in range(100)))
        assert {result.exit_code for result in results} == {0}
        assert not box.processes.is_busy
        assert await becomes(lambda: box.text("ls /proc | grep -c '^[0-9]'"), lambda count: int(count) < 9)

    in_box(test)


def test_an_end_of_the_sandbox_is_told_to_all_who_wait(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        info = await box.processes.start(Command("sleep 1000"))
        waiting = [
            asyncio.ensure_future(box.processes.run(Command("sleep 1000"))),
            asyncio.ensure_future(until(await box.processes.follow(info.id), b"never")),
        ]
        await asyncio.sleep(0.2)
        await LinkThread.instance().run(box.sandbox.stop(Cause.STOPPED))
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, SandboxEnded), outcome
        assert (await box.processes.wait(info.id, 60)).state == "lost"
        with pytest.raises(SandboxEnded):
            await box.processes.run(Command("true"))

    in_box(test)


def test_background_processes_are_fed_read_signalled_and_listed(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        processes = box.processes
        cat = await processes.start(Command("cat; echo over >&2; exit 6"))
        assert (cat.state, cat.exit_code, cat.command) == ("running", None, "cat; echo over >&2; exit 6")
        assert len(cat.id) <= 8
        assert (await processes.read(cat.id)).data == b""
        await processes.write(cat.id, b"hello ")
        assert (await processes.read(cat.id, wait=60)).data == b"hello "
        await processes.write(cat.id, b"world")
        chunk = await processes.read(cat.id, offset=6, wait=60)
        assert (chunk.data, chunk.offset, chunk.next_offset, chunk.dropped) == (b"world", 6, 11, 0)
        assert (await processes.read(cat.id, offset=3, count=4)).data == b"lo w"
        assert (await processes.wait(cat.id, 0.2)).state == "running"
        await processes.close_stdin(cat.id)
        await processes.close_stdin(cat.id)
        ended = await processes.wait(cat.id, 60)
        assert (ended.state, ended.exit_code, ended.stdout_bytes, ended.stderr_bytes) == ("exited", 6, 11, 5)
        assert (await processes.read(cat.id, stream="stderr")).is_end
        with pytest.raises(InvalidRequest, match="closed"):
            await processes.write(cat.id, b"more")
        with pytest.raises(InvalidRequest, match="offset"):
            await processes.read(cat.id, offset=12)

        trap = await processes.start(
            Command("trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.1; done")
        )
        async with await processes.follow(trap.id) as events:
            await until(events, b"ready")
            await processes.signal(trap.id, "TERM")
            await until(events, b"caught")
            assert [event async for event in events][-1] == Exit(7)
        with pytest.raises(InvalidRequest, match="not a signal"):
            await processes.signal(trap.id, "SIGNONE")

        for _ in range(5):  # at another moment of the start of its child each
            brief = await processes.start(Command("setsid sleep 1000 & sleep 1000"))
            assert (await processes.kill(brief.id)).exit_code == 137
            await processes.remove(brief.id)
        rename = "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, sys.argv[1].encode()); print(1, flush=True)"
        names = ("\nState:\tZ", "\nGroups:\t", "\nPPid:\tx", "\nPPid:\t1\n")
        for name in names:  # that look like other lines of /proc/PID/status
            argv = ["python3", "-c", f"{rename}; time.sleep(1000)", name]
            named = await processes.start(Command(f"setsid {shlex.join(argv)} & sleep 1000"))
            assert (await processes.read(named.id, wait=60)).data == b"1\n"
            await processes.kill(named.id)
            look = partial(box.run, "grep -l 'time.slee[p](1000)' /proc/[0-9]*/cmdline")
            assert await becomes(look, lambda ran: ran.stdout == b"")
            await processes.remove(named.id)
        stubborn = await processes.start(Command("trap '' TERM; setsid sleep 1000 & sleep 1000"))
        killed = await processes.kill(stubborn.id)
        assert (killed.state, killed.exit_code) == ("exited", 137)
        assert await gone(box, "sleep")

        big = await processes.start(Command("head -c 5000000 /dev/zero | tr '\\0' x; echo END"))
        assert (await processes.wait(big.id, 100)).stdout_bytes == 5_000_004
        chunk = await processes.read(big.id, count=10)
        assert (chunk.data, chunk.dropped) == (b"x" * 10, 5_000_004 - background.RING_SIZE)
        assert (await processes.read(big.id, offset=5_000_000)).data == b"END\n"

        with pytest.raises(InvalidRequest, match="workdir"):
            await processes.start(Command("true", workdir="/none"))
        assert [info.id for info in processes.list()] == [cat.id, trap.id, stubborn.id, big.id]
        await processes.remove(big.id)
        with pytest.raises(NotFound):
            processes.get(big.id)
        running = await processes.start(Command("setsid sleep 1000 & sleep 1000"))
        events = await processes.follow(running.id)
        await processes.remove(running.id)
        with pytest.raises(NotFound, match="removed"):
            await until(events, b"never")
        assert await gone(box, "sleep")
        with pytest.raises(NotFound):
            await processes.kill(running.id)

    in_box(test)


def test_ended_ones_make_room_and_running_ones_do_not(
    in_box: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MAX_PROCESSES", 3)

    async def test(box: Box) -> None:
        short = await box.processes.start(Command("true"))
        await box.processes.wait(short.id, 60)
        for _ in range(3):
            await box.processes.start(Command("sleep 1000"))
        with pytest.raises(NotFound):
            box.processes.get(short.id)
        with pytest.raises(PolicyRefused, match="3 background processes"):
            await box.processes.start(Command("true"))
        await box.processes.remove(box.processes.list()[0].id)
        await box.processes.start(Command("true"))

    in_box(test)


def test_one_that_floods_nobody_is_slowed_and_harms_nobody(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        began = time.monotonic()
        flood = await box.processes.start(Command("yes"))
        await box.processes.read(flood.id, wait=60)
        await asyncio.sleep(1.0)
        printed = box.processes.get(flood.id).stdout_bytes
        assert 0 < printed < (time.monotonic() - began + 2) * background.DRAIN_RATE
        assert (await box.processes.run(Command("echo fine"), timeout=60)).stdout == b"fine\n"
        assert (await box.processes.kill(flood.id)).exit_code == 137

    in_box(test)


def test_a_terminal_is_one(in_box: Callable[..., None]) -> None:
    async def test(box: Box) -> None:
        processes = box.processes
        shell = await processes.open_terminal(rows=30, columns=100)
        assert shell.is_terminal
        first = await processes.follow(shell.id)
        await until(first, b"$ ")

        async def type_in(line: bytes) -> None:
            await processes.write(shell.id, line)

        await type_in(b"tty; stty size; echo $TERM; echo [$0] $((1+1))end\n")
        seen = await until(first, b"2end")
        assert b"/dev/pts/" in seen
        assert b"30 100\r\n" in seen
        assert b"xterm-256color" in seen
        assert b"[-bash]" in seen
        await type_in(b"trap 'echo got-winch-$((2+2))' WINCH; echo trapped-$((2+2))\n")
        await until(first, b"trapped-4")
        await processes.resize(shell.id, 40, 120)
        await type_in(b"\n")  # bash runs a trap with the next line where the signal came just before its prompt
        await until(first, b"got-winch-4")
        await type_in(b"stty size\n")
        await until(first, b"40 120")
        # Control characters act on what runs in front.
        await type_in(b"sh -c 'echo asl''eep; exec sleep 100'; echo code-$?\n")
        await until(first, b"asleep")
        await type_in(b"\x03")
        await type_in(b"echo after-$((3+3))\n")
        await until(first, b"after-6")
        assert await gone(box, "sleep")
        # One who comes later, or again, sees what was shown; both see what follows.
        await type_in(b"printf '\\033[?1049h\\033[H''drawn'; sleep 0.2\n")
        await until(first, b"\x1b[?1049h\x1b[Hdrawn")
        second = await processes.follow(shell.id)
        replayed = await until(second, b"\x1b[?1049h\x1b[Hdrawn")
        assert b"30 100" in replayed
        await type_in(b"echo both-$((4+4))\n")
        await until(first, b"both-8")
        await until(second, b"both-8")
        await first.aclose()
        assert processes.get(shell.id).state == "running"
        await type_in(b"exit 9\n")
        async for event in second:
            last = event
        assert last == Exit(9)
        for rows, columns in ((0, 80), (24, 100_000)):
            with pytest.raises(InvalidRequest):
                await processes.open_terminal(rows=rows, columns=columns)
        # Another program than a shell, and an end of file typed.
        cat = await processes.open_terminal(Command(argv=["cat"]))
        await processes.write(cat.id, b"x\n")
        await processes.close_stdin(cat.id)
        assert (await processes.wait(cat.id, 60)).exit_code == 0
        assert (await processes.read(cat.id)).data == b"x\r\nx\r\n"
        # Jobs that a shell stopped or left die with it.
        shell = await processes.open_terminal()
        await processes.write(shell.id, b"sleep 1000 &\nsetsid sleep 1000 &\n")
        await asyncio.sleep(0.5)
        assert (await processes.kill(shell.id)).state == "exited"
        assert await gone(box, "sleep")

    in_box(test)


@pytest.mark.usefixtures("has_runsc")
def test_background_processes_survive_their_owner_and_nothing_they_printed_is_lost(manager: SandboxManager) -> None:
    async def before() -> tuple[str, list[str]]:
        sandbox = await manager.create(SandboxSpec(env=ENV, lease_timeout=60))
        processes = sandbox.processes
        counter = await processes.start(Command("for i in $(seq 40); do echo $i; sleep 0.05; done; cat"))
        done = await processes.start(Command("echo over >&2; exit 8"))
        shell = await processes.open_terminal()
        await processes.write(shell.id, b"echo shown-$((1+1))\n")
        await processes.wait(done.id, 60)
        command = asyncio.ensure_future(processes.run(Command("sleep 1000")))
        assert (await processes.read(counter.id, wait=60)).data  # an owner has taken some
        await manager.leave(sandbox)
        with pytest.raises((LinkClosed, SandboxEnded)):
            await command
        return sandbox.id, [counter.id, done.id, shell.id]

    async def after(sandbox_id: str, ids: list[str]) -> None:
        second = SandboxManager(manager.state_dir, RunscRuntime(state_dir=str(manager.state_dir)))
        sandbox = await second.adopt(sandbox_id)
        processes = sandbox.processes
        counter, done, shell = ids
        assert [info.id for info in processes.list()] == ids
        assert [info.is_terminal for info in processes.list()] == [False, False, True]
        async with await processes.follow(counter) as events:
            assert (await until(events, b"40\n")) == b"".join(b"%d\n" % number for number in range(1, 41))
            await processes.write(counter, b"heard")
            await until(events, b"heard")
            await processes.close_stdin(counter)
            assert [event async for event in events] == [Exit(0)]
        assert (await processes.wait(done, 60)).exit_code == 8
        assert (await processes.read(done, stream="stderr")).data == b"over\n"
        async with await processes.follow(shell) as events:
            await until(events, b"shown-2")
            await processes.write(shell, b"echo again-$((1+1))\n")
            await until(events, b"again-2")
        assert await gone(Box(sandbox), "sleep")  # a command has no life without its owner
        await second.stop(sandbox)
        assert not list((manager.state_dir / "sandboxes").iterdir())

    sandbox_id, ids = asyncio.run(asyncio.wait_for(before(), 120))
    time.sleep(0.5)
    asyncio.run(asyncio.wait_for(after(sandbox_id, ids), 120))


# -- a guest that lies -----------------------------------------------------------------------


class FakeStream:
    """What a guest sends, without a guest."""

    def __init__(self, data: list[bytes]) -> None:
        self.data = list(data)
        self.written: list[bytes] = []
        self.was_reset = asyncio.Event()

    def grant(self, count: int) -> None:
        pass

    async def read(self) -> bytes:
        if self.data:
            await asyncio.sleep(0.005)
            return self.data.pop(0)
        await self.was_reset.wait()
        raise LinkClosed("reset by the host")

    async def write(self, data: bytes) -> None:
        self.written.append(data)

    async def write_eof(self) -> None:
        pass

    def reset(self, reason: str = "") -> None:
        self.was_reset.set()


class FakeBox:
    """A sandbox whose processes' streams say what they are told to."""

    def __init__(self, data: list[bytes]) -> None:
        self.spec = SandboxSpec(env=ENV)
        self.end: End | None = None
        self._data = data
        self.streams: list[FakeStream] = []

    def open_stream(self, header: dict[str, Any]) -> Any:
        self.streams.append(FakeStream(self._data if header["kind"] == "process" else []))
        return self.streams[-1]

    async def wait_ended(self) -> End:
        await asyncio.sleep(100)
        raise AssertionError


EXIT = pack_message(b"exit", b'{"code":0,"signal":0}')
LIES = {
    "a huge message": b"\xff\xff\xff\xff",
    "no parts": b"\0\0\0\0",
    "an unknown tag": pack_message(b"3", b"0", b"x"),
    "a missing part": pack_message(b"1", b"0"),
    "a part too many": pack_message(b"1", b"0", b"x", b"y"),
    "no output": pack_message(b"1", b"0", b""),
    "no number": pack_message(b"1", b"one", b"x"),
    "bytes that are no text": pack_message(b"1", b"\xff", b"x"),
    "a negative offset": pack_message(b"1", b"-1", b"x"),
    "an offset beyond all": pack_message(b"1", b"9" * 4000, b"x"),
    "output that overlaps": pack_message(b"1", b"0", b"xy") + pack_message(b"1", b"1", b"y"),
    "an exit that is no JSON": pack_message(b"exit", b"{"),
    "an exit without a code": pack_message(b"exit", b"{}"),
    "an exit of another type": pack_message(b"exit", b'{"code":[],"signal":0}'),
    "an exit that is no number": pack_message(b"exit", b'{"code":NaN,"signal":0}'),
    "an infinite exit": pack_message(b"exit", b'{"code":1e999,"signal":0}'),
    "an exit that is a list": pack_message(b"exit", b"[]"),
    "an exit without more": pack_message(b"exit"),
    "an early end": b"",
    "JSON": pack_json({"event": "exit"}),
}


@asynccontextmanager
async def lying(data: list[bytes]) -> AsyncIterator[tuple[ProcessTable, FakeBox]]:
    box = FakeBox(data)
    yield ProcessTable(box), box
    await asyncio.sleep(0)


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_ends_the_process_that_it_is_about(lie: bytes) -> None:
    async def test() -> None:
        async with lying([lie]) as (processes, box):
            with pytest.raises(LinkClosed, match="invalid process output"):
                await processes.run(Command("true"))
            assert box.streams[0].was_reset.is_set()
            assert not processes.is_busy
        async with lying([pack_message(b"started"), lie]) as (processes, _):
            info = await processes.start(Command("true"))
            with pytest.raises(LinkClosed, match="invalid process output"):
                async for _ in await processes.follow(info.id):
                    pass
            assert (await processes.wait(info.id, 60)).state == "lost"

    LinkThread.instance().submit(asyncio.wait_for(test(), 100)).result(120)


def test_numbers_of_a_liar_are_clipped() -> None:
    async def test() -> None:
        async with lying([pack_message(b"exit", b'{"code":-99999999999,"signal":99999999999}')]) as (processes, _):
            assert 0 <= (await processes.run(Command("true"))).exit_code <= 255

    LinkThread.instance().submit(asyncio.wait_for(test(), 100)).result(120)


def test_offsets_may_jump_in_the_background_and_never_in_a_command() -> None:
    data = [pack_message(b"started"), pack_message(b"1", b"0", b"ab"), pack_message(b"1", b"10", b"cd") + EXIT]

    async def test() -> None:
        async with lying(data) as (processes, _):
            with pytest.raises(LinkClosed, match="does not continue"):
                await processes.run(Command("true"))
            info = await processes.start(Command("true"))
            await processes.wait(info.id, 60)
            chunk = await processes.read(info.id)
            assert (chunk.data, chunk.offset, chunk.dropped, chunk.is_end) == (b"cd", 10, 10, True)

    LinkThread.instance().submit(asyncio.wait_for(test(), 100)).result(120)


def test_a_guest_that_does_not_obey_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (wire, table, background):
        monkeypatch.setattr(module, "KILL_TIMEOUT", 0.3)
    monkeypatch.setattr(background, "START_TIMEOUT", 0.3)

    async def test() -> None:
        async with lying([pack_message(b"1", b"0", b"partial")]) as (processes, box):
            result = await processes.run(Command("true"), timeout=0.2)
            assert (result.stdout, result.timed_out, result.exit_code) == (b"partial", True, 137)
            assert b"kill" in b"".join(box.streams[0].written)
            assert result.duration < 20
        async with lying([]) as (processes, _):
            with pytest.raises(LinkClosed, match="did not start"):
                await processes.start(Command("true"))
            assert processes.list() == []
        async with lying([pack_message(b"started")]) as (processes, _):
            info = await processes.start(Command("true"))
            assert (await processes.kill(info.id)).state == "running"
            events = await processes.follow(info.id)
            await processes.remove(info.id)
            with pytest.raises(NotFound, match="removed"):
                await events.__anext__()

    LinkThread.instance().submit(asyncio.wait_for(test(), 100)).result(120)


def test_a_reader_in_the_background_is_waited_for_a_while_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "HOLD_TIMEOUT", 0.3)
    data = [pack_message(b"started")]
    data += [pack_message(b"1", b"%d" % (number * 65536), bytes(65536)) for number in range(64)]

    async def test() -> None:
        async with lying([*data, EXIT]) as (processes, _):
            info = await processes.start(Command("true"))
            reader = await processes.follow(info.id)
            await asyncio.sleep(0.1)
            held = processes.get(info.id).stdout_bytes
            assert held < background.RING_SIZE
            assert (await processes.wait(info.id, 60)).state == "exited"
            offsets = [event.offset async for event in reader if isinstance(event, Output)]
            assert offsets[0] == 64 * 65536 - background.RING_SIZE
        monkeypatch.setattr(background, "HOLD_TIMEOUT", 60.0)  # one that reads slowly misses nothing
        async with lying([*data, EXIT]) as (processes, _):
            info = await processes.start(Command("true"))
            total = 0
            async for event in await processes.follow(info.id, stdout_offset=0):
                if isinstance(event, Output):
                    assert event.offset == total
                    total += len(event.data)
                    await asyncio.sleep(0.005)
            assert total == 64 * 65536

    LinkThread.instance().submit(asyncio.wait_for(test(), 100)).result(120)
