"""Cells that are for the host: read by the front, done by the host, never seen by the kernel."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from support.bare_kernel import BareKernel, LoopThread
from support.harness import Env, KernelClient, Server, wait_until

from jupyter_agentbox.errors import Conflict, InvalidRequest, NotFound
from jupyter_agentbox.kernels.front.cell_commands import MAX_CONTENT, read_host_cell
from jupyter_agentbox.kernels.front.front import Front
from jupyter_agentbox.models import SnapshotInfo
from jupyter_agentbox.sandbox.drivers.messages import Signer
from jupyter_agentbox.service.live.magics import choose

KEY = b"a-session-key"


def make_request(code: str, kind: str = "execute_request", **content: Any) -> list[bytes]:
    return Signer(KEY).message(b"", kind, {"code": code, **content})[1:]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%snapshot", ("snapshot", "")),
        ("  %snapshot  before it\t ", ("snapshot", "before it")),
        ("# why\n\n// or so\n%restore 'a name'\n\n", ("restore", "a name")),
        ("%snapshots", ("snapshots", "")),
        ("%fork", ("fork", "")),
        ("%forks", None),
        ("%snapshotted", None),
        ("%%snapshot", None),
        ("x = 1\n%snapshot", None),
        ("%snapshot\n%snapshot", None),
        ("get_ipython().run_line_magic('snapshot', '')", None),
        ("# %snapshot", None),
        ("", None),
        ("%snapshot " + "x" * MAX_CONTENT, None),
    ],
)
def test_a_cell_for_the_host_is_one_such_line_and_nothing_else(code: str, expected: tuple[str, str] | None) -> None:
    found = read_host_cell(b"id", make_request(code))
    assert (None if found is None else (found.name, found.argument)) == expected


def test_what_is_no_request_to_execute_is_none() -> None:
    frames = make_request("%snapshot")
    for broken in (
        make_request("%snapshot", "inspect_request"),
        frames[1:],
        frames[:-1],
        [*frames[:-1], b"%"],
        [*frames[:-1], json.dumps({"code": ["%snapshot"]}).encode()],
        [],
    ):
        assert read_host_cell(b"id", broken) is None


def test_the_newest_of_a_name_is_chosen_or_one_by_the_begin_of_its_id() -> None:
    def make(snapshot_id: str, name: str) -> SnapshotInfo:
        return SnapshotInfo(snapshot_id, "s", "o", name, "", None, 0.0, 0, 0, True)

    found = [make("aa1", "one"), make("ab2", "one"), make("b3", "")]
    wanted = {"": "b3", "one": "ab2", "aa1": "aa1", "aa": "aa1", "b": "b3"}
    assert {text: choose(found, text).id for text in wanted} == wanted
    with pytest.raises(InvalidRequest, match="2 snapshots"):
        choose(found, "a")
    for text, among in (("", []), ("none", found)):
        with pytest.raises(NotFound):
            choose(among, text)


# The front, with a kernel that is in no sandbox


class Bench:
    """A front with a real kernel and a client, and what cells for the host asked for."""

    def __init__(self, loop: LoopThread, front: Front, client: BlockingKernelClient) -> None:
        self.loop, self.front, self.client = loop, front, client
        self.asked: list[tuple[str, str]] = []
        self.seen: dict[Any, list[tuple[str, Any]]] = defaultdict(list)
        self.replies: dict[str, dict[str, Any]] = {}
        front.on_command = self.do

    async def do(self, name: str, argument: str) -> str:
        self.asked.append((name, argument))
        await asyncio.sleep(0.2)
        if argument == "fail":
            while not self.front._channels["shell"].waiting:  # what it takes along
                await asyncio.sleep(0.01)
            raise Conflict("it cannot be")
        if argument == "crash":
            raise RuntimeError("a secret of the server's")
        return f"done {argument}\n"

    def finish(self, request: str) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        """Return the reply, and what came on iopub for the request."""
        while ("status", "idle") not in self.seen[request]:
            message = self.client.get_iopub_msg(timeout=60)
            content = message["content"]
            said = (message["msg_type"], content.get("execution_state", content.get("text")))
            self.seen[message["parent_header"].get("msg_id")].append(said)
        while request not in self.replies:
            reply = self.client.get_shell_msg(timeout=60)
            self.replies[reply["parent_header"]["msg_id"]] = reply["content"]
        return self.replies[request], self.seen[request]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    loop, context = LoopThread(), zmq.Context()
    with tempfile.TemporaryDirectory(prefix="m") as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", runtime)

        async def start() -> tuple[Front, BareKernel]:
            front = await Front.open(key=KEY)
            kernel = await BareKernel(tmp_path_factory.mktemp("kernel"), KEY).start()
            front.attach(kernel)
            return front, kernel

        front, kernel = loop.run(start())
        client = BlockingKernelClient(context=context)
        client.load_connection_info({**front.connection_info, "key": KEY, "signature_scheme": "hmac-sha256"})
        client.hb_channel.time_to_dead = 60.0  # a machine that stands still for a moment is no dead kernel
        client.start_channels()
        try:
            client.wait_for_ready(timeout=60)
            yield Bench(loop, front, client)
        finally:
            client.stop_channels()
            context.destroy(linger=0)
            loop.run(kernel.close())
            loop.call(front.close)
            loop.close()


def test_it_is_answered_as_a_cell_is_and_the_kernel_knows_nothing(bench: Bench) -> None:
    count = bench.finish(bench.client.execute("mark = 1"))[0]["execution_count"]
    reply, seen = bench.finish(bench.client.execute("%snapshot before"))
    assert (reply["status"], reply["execution_count"], reply["user_expressions"]) == ("ok", count, {})
    assert seen == [
        ("status", "busy"), ("execute_input", None), ("stream", "done before\n"), ("status", "idle"),
    ]  # fmt: skip
    reply, seen = bench.finish(bench.client.execute("%snapshot quiet", silent=True))
    assert reply["status"] == "ok"
    assert seen == [("status", "busy"), ("status", "idle")]
    assert bench.asked[-2:] == [("snapshot", "before"), ("snapshot", "quiet")]
    reply, seen = bench.finish(bench.client.execute("print(In[-2:], mark)"))
    assert ("stream", "['mark = 1', 'print(In[-2:], mark)'] 1\n") in seen
    wait_until(lambda: not bench.front.cell.is_working, 60, "what the kernel never saw is not waited for")


def test_it_comes_after_the_cells_before_it_and_before_those_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jupyter_agentbox.kernels.front.front.QUIET_TIME", 3600.0
    )  # what is behind it is not waited for
    bench.asked.clear()
    requests = [
        bench.client.execute(code)
        for code in ("import time; time.sleep(0.5); a = time.time()", "%snapshot now", "print(time.time() - a > 0.15)")
    ]
    replies = [bench.finish(request) for request in requests]
    assert [reply["status"] for reply, _ in replies] == ["ok"] * 3
    assert ("stream", "True\n") in replies[2][1]


def test_a_failure_aborts_what_is_behind_it(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jupyter_agentbox.kernels.front.front.QUIET_TIME", 3600.0)
    bench.asked.clear()
    fails = f"import os, time\nwhile not os.path.exists('{tmp_path}/queued'): time.sleep(0.02)\n1/0"
    failing = [bench.client.execute(c) for c in (fails, "%snapshot never", "late = 1")]
    wait_until(lambda: len(bench.front._channels["shell"].waiting) == 2, 60, "they wait")
    (tmp_path / "queued").touch()
    assert [bench.finish(request)[0]["status"] for request in failing] == ["error", "aborted", "aborted"]
    assert bench.asked == []
    failing = [bench.client.execute(c) for c in ("%restore fail", "late = 1")]
    reply, seen = bench.finish(failing[0])
    assert (reply["status"], reply["ename"], reply["evalue"]) == ("error", "Conflict", "it cannot be")
    assert [kind for kind, _ in seen] == ["status", "execute_input", "error", "status"]
    assert bench.finish(failing[1])[0]["status"] == "aborted"
    asked = [bench.client.execute(c, stop_on_error=False) for c in ("%restore crash", "print('late' in globals())")]
    reply, _ = bench.finish(asked[0])
    assert reply["status"] == "error"
    assert "secret" not in json.dumps(reply)
    assert ("stream", "False\n") in bench.finish(asked[1])[1]


def test_what_is_not_signed_is_the_kernels(bench: Bench) -> None:
    bench.asked.clear()
    frames = make_request("%snapshot", silent=False)
    bench.client.shell_channel.socket.send_multipart([frames[0], b"0" * 64, *frames[2:]])
    bench.front.on_command, kept = None, bench.front.on_command
    try:
        reply, _ = bench.finish(bench.client.execute("%snapshot off"))
        assert reply["status"] == "error", "turned off, it is the kernel's, which has none of that name"
    finally:
        bench.front.on_command = kept
    assert bench.asked == []


# A real server


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    env = make_env()
    extension = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}"
    with env.server("server", extension) as running:
        yield running


def test_a_notebook_undoes_and_forks_itself(server: Server) -> None:
    kernel = server.kernel()
    kernel.check("x = ['then']")
    assert "no snapshots" in kernel.check("%snapshots")
    assert kernel.execute("%restore").reply["ename"] == "NotFound"
    said = kernel.check("# before the worst\n%snapshot then")
    assert "(then)" in said
    kernel.check("x.append('later')")
    assert said.split()[1] in kernel.check("%snapshots")
    assert "restored snapshot" in kernel.check("%restore then")
    assert kernel.check("print(x)") == "['then']\n"
    kernel.check("x.append('again')")
    assert "restored snapshot" in kernel.check("%restore")
    forked = kernel.check("%fork").split()[2]
    other = KernelClient(server, forked)
    assert other.check("x.append('fork'); print(x)") == "['then', 'fork']\n"
    assert kernel.check("print(x)") == "['then']\n"
    other.shutdown()
    inside = kernel.execute("get_ipython().run_line_magic('restore', '')")
    assert inside.reply["status"] == "error", "code inside has no way to ask for it"
    assert kernel.execute("%restore none").reply["ename"] == "NotFound"
    assert kernel.execute("%fork now").reply["ename"] == "InvalidRequest"
    # Agents have calls of their own for it, and tokens that say whether they may.
    ran = server.call("POST", f"api/agentbox/sandboxes/{kernel.id}/code", {"code": "%restore"})
    assert ran["status"] == "error"
    kernel.shutdown()


def test_a_program_without_a_server_goes_back_too(agentbox_env: Env) -> None:
    script = """
import nbformat
from nbclient import NotebookClient
cells = ["x = 1", "%snapshot", "x = 2", "%restore", "print('x is', x)"]
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(book, kernel_name="agentbox", timeout=90).execute()
print(book.cells[-1].outputs[0].text)
"""
    assert "x is 1" in agentbox_env.run("python", "-c", script).output
    wait_until(lambda: not agentbox_env.sandboxes(), 60, "it is gone")
