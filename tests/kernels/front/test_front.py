"""The front against a real ipykernel and real Jupyter clients, without any sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.session import Session
from support.bare_kernel import BareKernel, LoopThread
from support.waiting import wait_until

from jupyter_agentbox.errors import AgentboxError
from jupyter_agentbox.guest import zmtp
from jupyter_agentbox.guest.ipykernel.embedded_protocol import Unpacker, pack
from jupyter_agentbox.kernels.front import endpoints
from jupyter_agentbox.kernels.front.front import Front
from jupyter_agentbox.kernels.front.peers import MAX_FRAMES
from jupyter_agentbox.sandbox.drivers import messages
from jupyter_agentbox.sandbox.drivers.messages import DELIMITER, RunningCell, Signer, header_index
from jupyter_agentbox.spec import End

KEY = b"a-session-key"


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="f") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def front(loop: LoopThread) -> Iterator[Front]:
    made = loop.run(Front.open(key=KEY))
    yield made
    loop.call(made.close)
    assert not made.directory.exists()


@pytest.fixture
def kernel(loop: LoopThread, front: Front, tmp_path: Path) -> Iterator[BareKernel]:
    made = loop.run(start_kernel(front, tmp_path))
    yield made
    loop.run(made.close())


async def start_kernel(front: Front, directory: Path) -> BareKernel:
    kernel = await BareKernel(directory, KEY).start()
    front.attach(kernel)
    return kernel


@pytest.fixture
def client(front: Front) -> Iterator[BlockingKernelClient]:
    made = make_client(front)
    made.start_channels()
    yield made
    made.stop_channels()
    made.context.destroy(linger=0)


def make_client(front: Front) -> BlockingKernelClient:
    context: zmq.Context[Any] = zmq.Context()
    client = BlockingKernelClient(context=context)
    client.load_connection_info({**front.connection_info, "key": KEY, "signature_scheme": "hmac-sha256"})
    client.hb_channel.time_to_dead = 60.0  # a machine that stands still for a moment is no dead kernel
    return client


def run(
    client: BlockingKernelClient, code: str, timeout: float = 100, **options: Any
) -> tuple[dict[str, Any], list[Any]]:
    """Execute and return the reply and all that came on iopub for it."""
    seen: list[Any] = []
    reply = client.execute_interactive(code, timeout=timeout, output_hook=seen.append, **options)
    return reply["content"], seen


def text_of(messages: list[Any], name: str = "stdout") -> str:
    return "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream" and m["content"]["name"] == name)


# What a notebook does


def test_a_client_executes_through_the_front(client: BlockingKernelClient, kernel: BareKernel) -> None:
    client.wait_for_ready(timeout=60)
    reply, seen = run(client, "print(6 * 7)")
    assert reply["status"] == "ok"
    assert text_of(seen) == "42\n"


def test_what_is_no_message_reaches_no_client(client: BlockingKernelClient, kernel: BareKernel) -> None:
    client.wait_for_ready(timeout=60)
    nonsense = "[[b'x'], [b''], [b'x', b'<IDS|MSG>'], [b'x', b'<IDS|MSG>', b'', b'{}', b'{}', b'{}']]"
    reply, seen = run(
        client, f"for f in {nonsense}:\n    get_ipython().kernel.iopub_socket.send_multipart(f)\nprint('after')"
    )
    # Jupyter's own client raises at each, and its server stops listening.
    assert reply["status"] == "ok"
    assert text_of(seen) == "after\n"


def test_thousands_of_small_outputs_and_one_of_50_mb_arrive_whole(
    client: BlockingKernelClient, kernel: BareKernel
) -> None:
    client.wait_for_ready(timeout=60)
    # Else ZeroMQ in the kernel itself drops what is more than a thousand messages ahead of its reader.
    run(client, "get_ipython().kernel.iopub_thread.socket.sndhwm = 0")
    code = "import sys\nfor i in range(3_000):\n    print(f'{i:099d}', flush=True)\nprint('hi')"
    _, seen = run(client, code, timeout=150)
    lines = text_of(seen).split("\n")
    assert len(lines) == 3_002
    assert lines[-2] == "hi"
    _, seen = run(client, "print('x' * 50_000_000)", timeout=150)
    assert len(text_of(seen)) == 50_000_001


def test_input_finds_the_client_that_runs_the_cell(
    client: BlockingKernelClient, kernel: BareKernel, front: Front
) -> None:
    other = make_client(front)
    other.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        other.wait_for_ready(timeout=60)
        _, seen = run(client, "print(input('?').upper())", allow_stdin=True, stdin_hook=lambda m: client.input("abc"))
        assert text_of(seen) == "ABC\n"
        with pytest.raises(queue.Empty):
            other.get_stdin_msg(timeout=0.2)
    finally:
        other.stop_channels()
        other.context.destroy(linger=0)


def test_binary_buffers_go_both_ways(client: BlockingKernelClient, kernel: BareKernel) -> None:
    client.wait_for_ready(timeout=60)
    run(
        client,
        "def target(comm, msg):\n    comm.on_msg(lambda m: comm.send({}, buffers=[bytes(m['buffers'][0])[::-1]]))\n"
        "get_ipython().kernel.comm_manager.register_target('t', target)",
    )
    client.shell_channel.send(client.session.msg("comm_open", {"comm_id": "c", "target_name": "t", "data": {}}))
    data = os.urandom(3_000_000)
    client.session.send(client.shell_channel.socket, "comm_msg", {"comm_id": "c", "data": {}}, buffers=[data])
    while (message := client.get_iopub_msg(timeout=60))["msg_type"] != "comm_msg":
        pass
    assert bytes(message["buffers"][0]) == data[::-1]


def test_control_answers_while_a_cell_runs_and_the_shell_waits(
    client: BlockingKernelClient, kernel: BareKernel, loop: LoopThread
) -> None:
    client.wait_for_ready(timeout=60)
    sleeping = client.execute("import time; print('sleeps', flush=True); time.sleep(600)")
    for _ in range(20):
        client.execute("pass")
    while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
        pass  # before it runs, an interrupt is none
    client.control_channel.send(client.session.msg("kernel_info_request", {}))
    assert client.get_control_msg(timeout=60)["msg_type"] == "kernel_info_reply"
    loop.run(kernel.signal(signal.SIGINT))
    while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != sleeping:
        pass  # an answer to one of the questions whether it is ready
    assert reply["content"]["ename"] == "KeyboardInterrupt"


# What changes behind it


def test_an_open_client_lives_on_when_the_kernel_is_replaced(
    client: BlockingKernelClient, kernel: BareKernel, front: Front, loop: LoopThread, tmp_path: Path
) -> None:
    client.wait_for_ready(timeout=60)
    run(client, "x = 1")
    before = front.connection_info
    loop.run(kernel.close())
    loop.call(front.detach)
    # KernelManager removes these at each restart.
    for port in range(1, 6):
        os.unlink(f"{before['ip']}-{port}")
    waiting = client.execute("x")
    second = loop.run(start_kernel(front, tmp_path))
    try:
        assert front.connection_info == before
        reply = client.get_shell_msg(timeout=60)
        assert reply["parent_header"]["msg_id"] == waiting
        assert reply["content"]["ename"] == "NameError"
        fresh = make_client(front)
        fresh.start_channels()
        fresh.wait_for_ready(timeout=60)
        fresh.stop_channels()
        fresh.context.destroy(linger=0)
    finally:
        loop.run(second.close())


def test_what_waited_for_a_dead_kernel_is_not_run_by_its_successor(front: Front, loop: LoopThread) -> None:
    class Stuck:
        def __init__(self) -> None:
            self.end: End | None = None
            self.got: list[list[bytes]] = []
            self.is_stuck = True
            self.on_message: Any = None
            self.lost = 0

        def add_end_callback(self, callback: Any) -> None:
            self.callback = callback

        async def send(self, channel: str, frames: list[bytes]) -> None:
            self.got.append(frames)
            while self.is_stuck:
                await asyncio.sleep(0.01)

    first, second = Stuck(), Stuck()
    second.is_stuck = False
    loop.call(front.attach, first)
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"ipc://{front.directory}/k-1")
        for i in range(3):
            dealer.send_multipart([b"old %d" % i])
        shell = front._channels["shell"]
        until(lambda: first.got and len(shell.waiting) == 2)
        loop.call(first.callback)
        dealer.send_multipart([b"new"])
        time.sleep(0.1)
        loop.call(front.attach, second)
        until(lambda: second.got)
        assert [frames[1:] for frames in second.got] == [[b"new"]]


def test_heartbeats_are_true_to_the_state(front: Front, loop: LoopThread, kernel: BareKernel) -> None:
    context = zmq.Context()
    with context:

        def beats(wait: int = 60_000) -> bool:
            with context.socket(zmq.REQ) as heart:
                heart.linger = 0
                heart.connect(f"ipc://{front.directory}/k-4")
                heart.send(b"ping")
                return bool(heart.poll(wait)) and heart.recv() == b"ping"

        assert beats(), "a kernel that is starting is alive"
        loop.run(kernel.signal(signal.SIGKILL))
        until(lambda: kernel.end)
        assert not beats(500)
        loop.call(front.restarting)
        assert beats()


def test_the_cause_of_an_end_reaches_the_running_cell(
    client: BlockingKernelClient, kernel: BareKernel, front: Front
) -> None:
    client.wait_for_ready(timeout=60)
    kernel.end_message = "out of memory (limit 512 MiB)"
    request = client.execute("import os, time; time.sleep(0.2); os.kill(os.getpid(), 9)")
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream":
            break
    assert message["parent_header"]["msg_id"] == request
    assert message["content"]["name"] == "stderr"
    assert message["content"]["text"] == (
        "agentbox: the kernel ended: out of memory (limit 512 MiB). Raise memory of the profile to allow more\n"
    )


def test_an_end_that_was_asked_for_is_not_announced(
    client: BlockingKernelClient, kernel: BareKernel, front: Front, loop: LoopThread
) -> None:
    client.wait_for_ready(timeout=60)
    front.is_end_expected = True
    loop.run(kernel.signal(signal.SIGKILL))
    until(lambda: kernel.end)
    while client.iopub_channel.msg_ready():
        assert client.get_iopub_msg(timeout=1)["msg_type"] != "stream"


def test_refusals_are_told_once_a_cell_and_not_without_end(
    client: BlockingKernelClient, kernel: BareKernel, front: Front, loop: LoopThread, tmp_path: Path
) -> None:
    client.wait_for_ready(timeout=60)
    loop.call(front.refusal, "early.test", 443, "nobody runs a cell")
    cell = client.execute(f"import os, time\nwhile not os.path.exists('{tmp_path}/told'): time.sleep(0.02)")
    until(lambda: front.cell.header)
    for _ in range(3):
        for number in range(9):
            loop.call(front.refusal, f"h{number}.test", 443, f"h{number}.test:443 is not allowed\x1b[2J")
    (tmp_path / "told").touch()
    seen: list[Any] = []
    while not (
        seen
        and seen[-1]["content"].get("execution_state") == "idle"
        and seen[-1]["parent_header"].get("msg_id") == cell
    ):
        seen.append(client.get_iopub_msg(timeout=60))
    assert text_of(seen, "stderr").count("\n") == 5
    assert "\x1b" not in text_of(seen, "stderr")
    assert "nobody" not in text_of(seen, "stderr")


# Clients that misbehave


def until(condition: Any, timeout: float = 60) -> None:
    wait_until(condition, timeout, "the condition", pause=0.01)


def test_a_client_that_does_not_read_costs_the_others_one_pause_and_is_told(
    front: Front, loop: LoopThread, client: BlockingKernelClient, kernel: BareKernel
) -> None:
    client.wait_for_ready(timeout=60)
    # Long enough for a client that reads on a machine under load.
    front.slow_client_timeout = 3.0
    lazy = subscriber(front)
    _, seen = run(client, "for _ in range(40): print('y' * 1_000_000, flush=True)", timeout=60)
    assert len(text_of(seen)) == 40 * 1_000_001
    peer = next(p for p in front._channels["iopub"].peers if p.lost)
    assert peer.transport.get_write_buffer_size() < 4_000_000
    lazy.settimeout(60)
    data = b""
    while b"and lost" not in data:
        data = data[-200:] + lazy.recv(1 << 20)
    lazy.close()


def subscriber(front: Front) -> socket.socket:
    """A SUB socket of which nothing but the handshake is ever read."""
    raw = socket.socket(socket.AF_UNIX)
    raw.connect(f"{front.directory}/k-2")
    raw.sendall(zmtp.greeting() + zmtp.ready(b"SUB") + b"\x00\x01\x01")
    return raw


def read_messages(raw: socket.socket, count: int) -> list[list[bytes]]:
    """Read so many messages after the handshake, which was not read yet."""
    raw.settimeout(60)
    handshake, decoder, found = zmtp.Handshake(), zmtp.Decoder(10_000_000), []
    while (data := handshake.feed(raw.recv(64))) is None:
        pass
    while len(found) < count:
        found += decoder.feed(data)
        data = raw.recv(1 << 16) if len(found) < count else b""
    assert decoder.feed(zmtp.encode([b"next"])) == [[b"next"]]  # nothing of another one had come
    return found


def test_nothing_comes_between_the_pieces_of_a_large_message(front: Front, loop: LoopThread) -> None:
    iopub = front._channels["iopub"]
    first, second = ([b"t", b"head", b"%d" % n * 3_000_000, b"", b"tail"] for n in (1, 2))

    async def publish_both() -> None:
        await asyncio.gather(iopub.publish(first), iopub.publish(second))

    with subscriber(front) as raw:
        until(lambda: [peer for peer in iopub.peers if peer.topics])
        (peer,) = iopub.peers
        publishing = asyncio.run_coroutine_threadsafe(publish_both(), loop.loop)
        until(lambda: peer._is_amid_message)
        loop.call(front.notice, "of the front's own")
        assert peer._is_amid_message
        assert peer.transport.get_write_buffer_size() < 1_000_000
        welcome, *messages = read_messages(raw, 4)
        publishing.result(60)
    assert b"iopub_welcome" in welcome[3]
    assert [messages[0], messages[2]] == [first, second]
    assert b"of the front's own" in messages[1][-1]


def test_a_large_message_is_whole_for_a_client_that_stops_reading_in_its_midst(front: Front, loop: LoopThread) -> None:
    front.slow_client_timeout = 0.2
    iopub = front._channels["iopub"]
    frames = [b"t", b"x" * 3_000_000, b"y" * 3_000_000]
    with subscriber(front) as raw:
        until(lambda: [peer for peer in iopub.peers if peer.topics])
        loop.run(iopub.publish(frames))
        assert read_messages(raw, 2)[1] == frames


def test_a_full_queue_stops_reading_and_loses_nothing(front: Front, loop: LoopThread) -> None:
    class Slow:
        end = None
        lost = 0
        on_message: Any = None
        is_open = False

        def __init__(self) -> None:
            self.got: list[bytes] = []

        def add_end_callback(self, callback: Any) -> None: ...

        async def send(self, channel: str, frames: list[bytes]) -> None:
            while not self.is_open:
                await asyncio.sleep(0.01)
            self.got.append(frames[1])

    kernel = Slow()
    loop.call(front.attach, kernel)
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.sndhwm = 0, 0
        dealer.connect(f"ipc://{front.directory}/k-1")
        payload = bytes(100_000)
        for number in range(1000):
            dealer.send_multipart([str(number).encode() + payload])
        channel = front._channels["shell"]
        until(lambda: channel.is_paused)
        time.sleep(0.2)
        assert channel._queued_bytes < 20_000_000
        kernel.is_open = True
        until(lambda: len(kernel.got) == 1000)
        assert [int(p.rstrip(b"\0")) for p in kernel.got] == list(range(1000))


def test_a_reconnect_under_the_same_identity_takes_over(front: Front, loop: LoopThread) -> None:
    got: list[list[bytes]] = []

    class Echo:
        end = None
        lost = 0
        on_message: Any = None

        def add_end_callback(self, callback: Any) -> None: ...

        async def send(self, channel: str, frames: list[bytes]) -> None:
            got.append(frames)
            await self.on_message(channel, frames)
            await self.on_message(channel, [b"nobody", *frames[1:]])

    def message(text: str) -> list[bytes]:
        return Signer(KEY).message(b"", "request", {"text": text})[1:]

    loop.call(front.attach, Echo())
    context = zmq.Context()
    with context, context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for number, dealer in enumerate((first, second)):
            dealer.linger = 0
            dealer.identity = b"page"
            dealer.connect(f"ipc://{front.directory}/k-1")
            sent = message(str(number))
            dealer.send_multipart(sent)
            assert dealer.poll(60_000)
            assert dealer.recv_multipart() == sent
        first.close()
        time.sleep(0.1)
        second.send_multipart(message("again"))
        assert second.poll(60_000)
    assert [frames[0] for frames in got] == [b"page"] * 3


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x01" + bytes(60),
        zmtp.greeting().replace(b"NULL\0", b"CURVE"),
        zmtp.greeting() + b"\x00\x05hello",
        zmtp.greeting() + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff",
        zmtp.greeting() + b"\x04\x08\x05READY\xff\xff",
        zmtp.greeting() + zmtp.ready(b"DEALER") + b"\x02\x7f\xff\xff\xff\xff\xff\xff\xff",
    ],
)
def test_what_is_not_zmtp_is_cut_off(front: Front, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(f"{front.directory}/k-1")
        raw.settimeout(60)
        try:
            raw.sendall(data)
            while raw.recv(65536):
                pass
        except ConnectionError:
            pass


# Directories


def test_the_address_is_short_and_private(front: Front) -> None:
    assert len(front.connection_info["ip"]) < 100
    assert front.directory.stat().st_mode & 0o777 == 0o700


def test_a_runtime_directory_that_others_can_enter_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "agentbox").mkdir(mode=0o755)
    with pytest.raises(AgentboxError, match="only this user can enter"):
        endpoints.make_directory()


def test_a_runtime_directory_that_is_a_link_is_refused(runtime_dir: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (runtime_dir / "agentbox").symlink_to(tmp_path)
    with pytest.raises(AgentboxError, match="only this user can enter"):
        endpoints.make_directory()


def test_a_long_runtime_directory_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert endpoints.runtime_directory() == Path(f"/tmp/agentbox-{os.geteuid()}")


def test_directories_of_killed_processes_go_and_live_ones_stay(front: Front, runtime_dir: Path) -> None:
    dead = runtime_dir / "agentbox" / "dead"
    dead.mkdir()
    (dead / "lock").touch()
    directory, lock = endpoints.make_directory()
    assert not dead.exists()
    assert front.directory.exists()
    directory.joinpath("lock").unlink()
    directory.rmdir()
    os.close(lock)


# Messages


def test_what_a_restored_kernel_repeats_gets_an_id_of_its_own() -> None:
    """Jupyter's clients raise at a message that they have had, and are deaf from there on."""
    session, signer = Session(key=b"secret"), Signer(b"secret")
    frames = signer.message(b"topic", "stream", {"name": "stdout", "text": "x"})
    frames.append(b"buffer")
    session.deserialize(frames[2:])
    with pytest.raises(ValueError, match="Duplicate"):
        session.deserialize(frames[2:])
    renewed = signer.renew(frames, time.time() + 60)
    assert renewed is not None
    message = session.deserialize(renewed[2:])
    assert (message["content"]["text"], message["buffers"]) == ("x", [b"buffer"])
    assert message["msg_id"] != json.loads(frames[3])["msg_id"]
    assert signer.renew(frames, time.time() - 60) is None, "it is new"
    forged = [*frames[:2], b"0" * 64, *frames[3:]]
    assert signer.renew(forged, time.time() + 60) == forged, "nothing is signed that was not"
    for header in (b"{}", b"x", b'{"date": 5}', b'{"date": "9999-99"}', b"[" * 5000):
        assert signer.renew([*frames[:3], header, *frames[4:]], time.time() + 60) is None
    assert signer.renew([b"x"], time.time()) is None


def test_notices_are_signed_as_clients_expect() -> None:
    frames = Signer(KEY).message(b"stream.stderr", "stream", {"name": "stderr", "text": "é"}, b'{"msg_id": "p"}')
    session = Session(key=KEY, signature_scheme="hmac-sha256")
    _, parts = session.feed_identities(frames)
    assert session.deserialize(parts)["parent_header"]["msg_id"] == "p"
    with pytest.raises(ValueError, match="signature scheme"):
        Signer(KEY, "hmac-none")


HOSTILE_FRAMES = st.sampled_from([DELIMITER, b"{}", b'{"msg_type": "status"}', b'"status"'])


@given(st.lists(st.one_of(st.binary(max_size=80), HOSTILE_FRAMES), max_size=12))
@settings(max_examples=300, deadline=None)
def test_hostile_messages_are_looked_at_without_harm(frames: list[bytes]) -> None:
    cell = RunningCell()
    cell.track_request(frames)
    cell.track_output(frames)
    assert cell.header is None
    header_index(frames)


def test_a_kernel_whose_last_word_is_lost_does_not_work_for_ever(
    client: BlockingKernelClient, front: Front, loop: LoopThread, kernel: BareKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.wait_for_ready(timeout=60)
    mute = (
        "kernel = get_ipython().kernel\nsay = kernel._publish_status\n"
        "kernel._publish_status = lambda state, *args, **more: state == 'idle' or say(state, *args, **more)"
    )
    for lost_time, works in ((0.0, False), (3600.0, True)):
        monkeypatch.setattr(messages, "LOST_TIME", lost_time)
        request = client.execute(mute)
        while client.get_shell_msg(timeout=30)["parent_header"].get("msg_id") != request:
            pass
        assert loop.call(kernel.is_busy) == works
        assert loop.call(lambda: front.cell.is_busy) == works


def test_a_client_may_send_no_more_parts_than_a_kernel_takes() -> None:
    parts = [b""] * MAX_FRAMES
    (got,) = zmtp.Decoder(MAX_FRAMES, MAX_FRAMES).feed(zmtp.encode(parts))
    Unpacker(1 << 20).feed(pack([b"its identity", *got]))
    with pytest.raises(zmtp.ZmtpError):
        zmtp.Decoder(MAX_FRAMES, MAX_FRAMES).feed(zmtp.encode([*parts, b""]))


def test_the_running_cell_is_the_one_the_kernel_is_busy_with() -> None:
    cell, signer = RunningCell(), Signer(KEY)
    requests = []
    for _ in range(2):
        request = signer.message(b"id", "execute_request", {"code": ""})
        requests.append(request[3])
        cell.track_request(request)
    status = lambda parent, state: signer.message(b"", "status", {"execution_state": state}, parent)  # noqa: E731
    cell.track_output(status(requests[0], "busy"))
    assert cell.header == requests[0]
    cell.track_output(status(json.dumps({"msg_id": "forged"}).encode(), "busy"))
    cell.track_output(status(requests[1], "idle"))
    assert cell.header == requests[0]
    cell.track_output(status(requests[0], "idle"))
    assert cell.header is None
