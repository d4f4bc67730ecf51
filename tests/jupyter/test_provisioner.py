"""Jupyter's calls on the provisioner: with recorded managers where only the calls matter, else in real gVisor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.ioloop.manager import AsyncIOLoopKernelManager
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from support.waiting import wait_until, wait_until_async
from traitlets.config import Config

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, PolicyRefused, RuntimeFailed
from jupyter_agentbox.jupyter.kernelspecs import OWN_SPEC
from jupyter_agentbox.jupyter.provisioner import AgentboxProvisioner, resolve_program
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.spec import OWN_HOSTS, Grant


@pytest.fixture(autouse=True)
def state_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directories of this test's own, on short paths; nothing may be left in them."""
    with tempfile.TemporaryDirectory(prefix="ab") as name:
        base = Path(name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(base / "runtime"))
        monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(base / "config"))
        yield base / "state"
        assert list((base / "state" / "sandboxes").glob("*")) == []
        wait_until(lambda: not list((base / "agentbox").glob("[!l]*")), 60, "fronts go, some a moment after")
        # Its sweeper would go on watching a directory that is gone.
        shutil.rmtree(base / "state", ignore_errors=True)


@pytest.fixture
def make(state_dir: Path) -> Callable[..., AsyncKernelManager]:
    """Return a maker of kernel managers with our kernelspec, whose stanza and policy the test chooses."""

    def made(
        config: dict[str, Any] | None = None,
        policy: dict[str, Any] | None = None,
        kind: type[AsyncKernelManager] = AsyncKernelManager,
        more: dict[str, Any] | None = None,
        **spec: Any,
    ) -> AsyncKernelManager:
        own = {"state_dir": str(state_dir), "lease_timeout": 10.0, **(policy or {})}
        manager = kind(config=Config({"Policy": own, **(more or {})}))
        merged = {**OWN_SPEC, **spec}
        merged["metadata"] = {
            "debugger": True,
            "kernel_provisioner": {"provisioner_name": "agentbox-provisioner", "config": config or {}},
        }
        manager._kernel_spec = KernelSpec(**merged)
        return manager

    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a notebook's folder."""
    path = tmp_path / "work"
    path.mkdir()
    (path / "data.csv").write_text("a,b\n1,2\n")
    return path


@asynccontextmanager
async def running(manager: AsyncKernelManager, *, interrupts: int = 0, **options: Any) -> AsyncIterator[Client]:
    """Run a kernel; `interrupts` are sent before it can be ready for them."""
    try:
        await manager.start_kernel(**options)
        await asyncio.gather(*(manager.interrupt_kernel() for _ in range(interrupts)))
        client = Client(manager.client())
        try:
            client.kc.start_channels()
            await client.kc.wait_for_ready(timeout=100)
            yield client
        finally:
            client.kc.stop_channels()
    finally:
        await manager.shutdown_kernel(now=True)


class Client:
    """A client's few words, for tests."""

    def __init__(self, client: AsyncKernelClient) -> None:
        self.kc = client

    async def run(self, code: str, timeout: float = 100, **options: Any) -> tuple[dict[str, Any], str]:
        """Execute; return the reply's content and the text of all streams."""
        text: list[str] = []

        def hook(message: Any) -> None:
            if message["msg_type"] == "stream":
                text.append(message["content"]["text"])

        reply = await self.kc.execute_interactive(code, timeout=timeout, output_hook=hook, **options)
        return reply["content"], "".join(text)

    async def output(self, code: str, **options: Any) -> str:
        """Execute what must succeed; return its text."""
        reply, text = await self.run(code, **options)
        assert reply["status"] == "ok", reply
        return text

    async def wait_running(self, code: str) -> str:
        """Send a cell and wait until it runs; return its message id."""
        request = self.kc.execute(code)
        while True:
            message = await self.kc.get_iopub_msg(timeout=60)
            if message["msg_type"] == "stream" and "started" in message["content"]["text"]:
                return request

    async def reply_to(self, request: str, timeout: float) -> dict[str, Any]:
        """Wait for the reply to one request."""
        while True:
            message = await self.kc.get_shell_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") == request:
                return message["content"]


# In real gVisor

pytestmark = pytest.mark.usefixtures("has_runsc")


async def test_a_kernel_works_in_the_notebooks_folder_and_ends_in_peace(
    make: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make()
    manager.shutdown_wait_time = 80.0  # half of it until SIGTERM
    async with running(manager, cwd=str(folder)) as client:
        await check_folder(manager, client, folder)
        await check_outputs(client)
        await check_control(manager, client)
        begun = time.monotonic()
        await manager.shutdown_kernel()
        assert time.monotonic() - begun < 38
        assert "the kernel ended" not in caplog.text


async def check_folder(manager: Any, client: Client, folder: Path) -> None:
    assert await client.output("import os; print(os.getcwd(), open('data.csv').read(3))") == "/workspace a,b\n"
    assert "gVisor" in await client.output("print(open('/proc/version').read())") or "gVisor" in await client.output(
        "import subprocess; print(subprocess.run('dmesg', capture_output=True, text=True).stdout)"
    )
    assert manager.resolve_path("data.csv") == str(folder / "data.csv")
    assert manager.resolve_path("/workspace/data.csv") == str(folder / "data.csv")
    await client.output("import os; os.symlink('/etc/passwd', 'link'); os.symlink('/', 'root')")
    for path in ("/etc/passwd", "../x", "link", "root/etc/passwd", "nothing", "a\0b", "/workspace/../etc/passwd"):
        assert manager.resolve_path(path) is None


async def check_outputs(client: Client) -> None:
    """Buffers, and large and many outputs, arrive whole."""
    await client.output(
        "def target(comm, msg):\n    comm.on_msg(lambda m: comm.send({}, buffers=[bytes(m['buffers'][0])[::-1]]))\n"
        "get_ipython().kernel.comm_manager.register_target('t', target)"
    )
    session, shell = client.kc.session, client.kc.shell_channel
    shell.send(session.msg("comm_open", {"comm_id": "c", "target_name": "t", "data": {}}))
    data = os.urandom(2_000_000)
    session.send(shell.socket, "comm_msg", {"comm_id": "c", "data": {}}, buffers=[data])
    while (message := await client.kc.get_iopub_msg(timeout=60))["msg_type"] != "comm_msg":
        pass
    assert bytes(message["buffers"][0]) == data[::-1]
    # More messages than ZeroMQ queues by default.
    text = await client.output("for i in range(2_000): print(f'{i:099d}', flush=True)\nprint('hi')", timeout=150)
    assert text.count("\n") == 2_001
    assert text.endswith("hi\n")
    assert len(await client.output("print('x' * 10_000_000)", timeout=150)) == 10_000_001


async def check_control(manager: Any, client: Client) -> None:
    """The debugger and subshells answer on control."""

    async def ask(kind: str, content: dict[str, Any]) -> dict[str, Any]:
        client.kc.control_channel.send(client.kc.session.msg(kind, content))
        return dict((await client.kc.get_control_msg(timeout=60))["content"])

    initialize = {
        "type": "request",
        "seq": 1,
        "command": "initialize",
        "arguments": {"clientID": "t", "adapterID": "", "pathFormat": "path", "linesStartAt1": True},
    }
    assert (await ask("debug_request", initialize))["success"]
    attach = {"type": "request", "seq": 2, "command": "attach", "arguments": {}}
    assert (await ask("debug_request", attach))["success"]
    disconnect = {"type": "request", "seq": 3, "command": "disconnect", "arguments": {"restart": False}}
    assert (await ask("debug_request", disconnect))["success"]

    subshell = (await ask("create_subshell_request", {}))["subshell_id"]
    await client.wait_running("import time; print('started', flush=True); time.sleep(300)")
    message = client.kc.session.msg("execute_request", {"code": "1", "silent": False, "allow_stdin": False})
    message["header"]["subshell_id"] = subshell
    client.kc.shell_channel.send(message)
    assert (await client.reply_to(message["header"]["msg_id"], timeout=60))["status"] == "ok"
    await manager.interrupt_kernel()


async def test_an_interrupt_ends_any_cell_and_its_children_at_once(make: Any, folder: Path, silent: Silent) -> None:
    manager = make(policy={"allowed_hosts": [silent.name], "private_hosts": [silent.name]})
    async with running(manager, interrupts=3, cwd=str(folder)) as client:
        first = manager.provisioner._sandboxed.sandbox.id
        await client.output(
            "x = 1; import os, subprocess, time, urllib.request\n"
            "for name in ('NO_PROXY', 'no_proxy'): os.environ[name] = ''"
        )
        for code in (
            "print('started', flush=True)\nwhile True: pass",
            "print('started', flush=True)\ntime.sleep(600)",
            # IPython takes an interrupt badly until its child runs.
            "subprocess.run(['sh', '-c', 'echo started; exec sleep 601'])",
            "get_ipython().system('echo started; exec sleep 602')",
            f"print('started', flush=True)\nurllib.request.urlopen('http://{silent.name}/')",
        ):
            request = await client.wait_running(code)
            if "urlopen" in code:
                await silent.is_asked()
            await asyncio.sleep(0.5)
            begun = time.monotonic()
            await manager.interrupt_kernel()
            reply = await client.reply_to(request, timeout=60)
            assert time.monotonic() - begun < 55, code  # two seconds on a machine that has nothing else to do
            assert reply["status"] == "error" or "system" in code, code
            assert reply.get("ename") in ("KeyboardInterrupt", None), reply
        assert await client.output("print(x)") == "1\n"
        assert manager.provisioner._sandboxed.sandbox.id == first
        sleepers = "print(subprocess.run('ps ax | grep [s]leep', shell=True, stdout=-1).stdout)"
        deadline = time.monotonic() + 60
        while (left := await client.output(sleepers)) != "b''\n":
            assert time.monotonic() < deadline, left


class Silent:
    """A server that takes connections and never answers; its name as policy has it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._taken: list[socket.socket] = []
        self.name = f"silent.test:{listener.getsockname()[1]}"

    async def is_asked(self) -> None:
        """Wait for a request."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        connection, _ = await asyncio.wait_for(loop.sock_accept(self._listener), 60)
        self._taken.append(connection)
        assert (await asyncio.wait_for(loop.sock_recv(connection, 3), 60)) == b"GET"

    def close(self) -> None:
        for connection in self._taken:
            connection.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    find = socket.getaddrinfo

    def find_silent(host: Any, *more: Any, **named: Any) -> Any:
        return find("127.0.0.1" if host == "silent.test" else host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", find_silent)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Silent(listener)
        yield server
        server.close()


async def test_a_restart_keeps_addresses_and_files_and_nothing_else(make: Any, folder: Path) -> None:
    manager = make()
    async with running(manager, cwd=str(folder)) as client:
        before, first = manager.get_connection_info(), manager.provisioner._sandboxed.sandbox
        assert Path(manager.connection_file).exists()
        await client.output("x = 1; open('kept', 'w').write('1'); open('/tmp/gone', 'w').write('1')")
        await manager.restart_kernel()
        assert manager.get_connection_info() == before
        assert json.loads(Path(manager.connection_file).read_text())["ip"] == before["ip"]
        # The same client, which never reconnected.
        await client.kc.wait_for_ready(timeout=100)
        assert (await client.run("x"))[0]["ename"] == "NameError"
        assert (
            await client.output("import os; print(os.path.exists('kept'), os.path.exists('/tmp/gone'))")
            == "True False\n"
        )
        assert manager.provisioner._sandboxed.sandbox.id != first.id
        assert not first.directory.exists()
        assert (
            await client.output("print(input('?'))", allow_stdin=True, stdin_hook=lambda m: client.kc.input("yes"))
            == "yes\n"
        )
        fresh = Client(manager.client())
        fresh.kc.start_channels()
        await fresh.kc.wait_for_ready(timeout=100)
        fresh.kc.stop_channels()


async def test_a_private_workspace_outlives_a_restart_and_not_the_kernel(make: Any) -> None:
    manager = make(config={"workspace": "private"})
    async with running(manager) as client:
        await client.output("open('kept', 'w').write('1')")
        await manager.restart_kernel(now=True)
        await client.kc.wait_for_ready(timeout=100)
        assert await client.output("import os; print(os.getcwd(), os.listdir())") == "/workspace ['kept']\n"
        workspace = manager.provisioner._sandboxed.sandbox.workspace
        assert workspace.exists()
    assert not workspace.exists()


async def test_a_kernel_that_dies_is_dead_with_its_code_and_can_be_started_again(make: Any, folder: Path) -> None:
    manager = make(config={"memory": "256 MiB"})
    async with running(manager, cwd=str(folder)) as client:
        before = manager.get_connection_info()
        request = client.kc.execute("import os; os.kill(os.getpid(), 9)")
        assert await dies(manager) == 137
        assert "the kernel ended: the kernel was killed" in await notice(client, request)
        # As the restarter does, asking for new ports since it never saw it live long.
        await manager.restart_kernel(now=True, newports=True)
        assert manager.get_connection_info() == before
        await client.kc.wait_for_ready(timeout=100)
        assert await client.output("print(6 * 7)") == "42\n"

        request = client.kc.execute("x = [bytearray(4_000_000) for _ in range(100)]")
        assert await dies(manager) == 137
        assert "out of memory (limit 256 MiB)" in await notice(client, request)
        await manager.restart_kernel(now=True)
        await client.kc.wait_for_ready(timeout=100)

        # The sandbox is removed by others.
        os.kill(manager.provisioner._sandboxed.sandbox._handle.pid, signal.SIGKILL)
        assert await dies(manager) not in (None, 0)


async def dies(manager: AsyncKernelManager, timeout: float = 60) -> int | None:
    deadline = time.monotonic() + timeout
    while await manager.is_alive():
        assert time.monotonic() < deadline, "still alive"
        await asyncio.sleep(0.05)
    return await manager.provisioner.poll()


async def notice(client: Client, request: str) -> str:
    """Return what the front says in the cell of that request."""
    while True:
        message = await client.kc.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and "agentbox" in message["content"]["text"]:
            assert message["parent_header"]["msg_id"] == request
            return str(message["content"]["text"])


def test_a_program_is_named_by_a_path_that_exists_inside(tmp_path: Path) -> None:
    target = tmp_path / "env/bin/python"
    target.parent.mkdir(parents=True)
    target.touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "env/bin")
    assert resolve_program(f"{tmp_path}/folder/../env//bin/python") == str(target)
    # Here the plain path would be another file than is meant.
    assert resolve_program(f"{tmp_path}/link/../bin/python") == str(target)
    assert resolve_program("R") == "R"
    assert resolve_program("python") == sys.executable


@pytest.fixture
def busy_ports() -> Iterator[None]:
    """Take and leave loopback ports as fast as can be, as other programs of a busy machine do."""
    is_over = threading.Event()

    def take() -> None:
        while not is_over.wait(0.001):
            with contextlib.ExitStack() as stack:
                for _ in range(20):
                    sock = stack.enter_context(socket.socket())
                    sock.bind(("127.0.0.1", 0))

    thread = threading.Thread(target=take)
    thread.start()
    yield
    is_over.set()
    thread.join()


@pytest.mark.timeout(700)
async def test_twenty_kernels_start_at_once_without_a_failure(make: Any, folder: Path, busy_ports: None) -> None:
    managers = [make(policy={"freeze_after": 1.0}) for _ in range(20)]

    async def ready(manager: Any) -> None:
        await manager.start_kernel(cwd=str(folder))
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=500)
        client.stop_channels()

    try:
        await asyncio.gather(*map(ready, managers))
        assert len({manager.ip for manager in managers}) == len(managers)
    finally:
        await asyncio.gather(*(manager.shutdown_kernel(now=True) for manager in managers))


async def test_a_kernel_starts_whatever_the_folder(make: Any, folder: Path, monkeypatch: Any) -> None:
    async def find_workspace(**options: Any) -> Path | None:
        provisioner = AgentboxProvisioner(kernel_id="x", kernel_spec=make().kernel_spec, parent=make())
        await provisioner.pre_launch(**options)
        await provisioner.cleanup()
        assert provisioner._spec is not None
        return provisioner._spec.workspace

    monkeypatch.chdir(folder.parent)
    for cwd in ("work", folder, str(folder)):
        assert await find_workspace(cwd=cwd) == folder
    monkeypatch.chdir(folder)
    assert await find_workspace() == folder
    monkeypatch.setenv("HOME", str(folder))
    assert await find_workspace() is None, "a home directory is not shown"
    async with running(make(), cwd="/no/such/folder") as client:
        notice, place = (await client.output("import os; print(os.getcwd(), os.listdir())")).splitlines()
        assert "/no/such/folder does not exist" in notice
        assert place == "/workspace []"


async def test_nothing_of_the_servers_environment_is_inside(make: Any, folder: Path, monkeypatch: Any) -> None:
    for name in ("CANARY", "JUPYTER_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "canary")
    env = {**os.environ, "JPY_PARENT_PID": "1"}
    manager = make(env={"GREETING": "hello ${CANARY}"}, argv=[*OWN_SPEC["argv"]])
    async with running(manager, cwd=str(folder), env=env, extra_arguments=["--IPKernelApp.quiet=False"]) as client:
        text = await client.output("import os, sys; print(dict(os.environ), open('/proc/self/cmdline').read())")
        assert "canary" not in text
        assert "JPY_PARENT_PID" not in text
        assert "hello ${CANARY}" in text
        assert "--IPKernelApp.quiet=False" in text
        await asyncio.sleep(1.5)
        assert await manager.is_alive()


# The calls, without a sandbox


async def test_a_failed_start_leaves_nothing_and_says_why(
    make: Any, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeFailed("the runtime does not answer")

    monkeypatch.setattr(RunscRuntime, "start", fail)
    manager = make()
    with pytest.raises(RuntimeFailed, match="does not answer"):
        await manager.start_kernel()
    assert not manager.has_kernel
    assert list((state_dir / "sandboxes").iterdir()) == []
    assert [path.name for path in (state_dir.parent / "agentbox").iterdir()] == ["lock"]


async def test_cleanup_may_come_at_any_time_and_again_and_calls_from_many_loops(make: Any, folder: Path) -> None:
    fresh = AgentboxProvisioner(kernel_id="x", kernel_spec=KernelSpec(**OWN_SPEC))
    for restart in (False, True, False):
        await fresh.cleanup(restart=restart)
    assert await fresh.poll() == 0
    assert not fresh.has_process

    one, two = make(), make()
    async with running(one, cwd=str(folder)), running(two, cwd=str(folder)) as client:
        provisioner = one.provisioner
        await asyncio.gather(*(provisioner.cleanup(restart=False) for _ in range(3)), provisioner.cleanup(restart=True))
        await provisioner.cleanup(restart=False)
        assert await client.output("print('alive')") == "alive\n"
        await check_many_loops(two)


async def check_many_loops(manager: AsyncKernelManager) -> None:
    def elsewhere(work: Any) -> Any:
        return asyncio.run(work)

    assert await asyncio.to_thread(elsewhere, manager.provisioner.poll()) is None
    await asyncio.to_thread(elsewhere, manager.provisioner.send_signal(2))
    await asyncio.to_thread(elsewhere, manager.provisioner.kill())
    assert await asyncio.to_thread(elsewhere, manager.provisioner.wait()) is not None
    await asyncio.to_thread(elsewhere, manager.provisioner.cleanup(False))


async def test_only_cleanup_decides_what_goes(make: Any, folder: Path) -> None:
    manager = make()
    async with running(manager, cwd=str(folder)):
        provisioner = manager.provisioner
        address = Path(f"{manager.ip}-1")
        await provisioner.terminate(restart=False)
        await provisioner.kill(restart=False)
        assert await provisioner.wait() is not None
        assert address.exists()
        # As KernelManager does just before.
        address.unlink()
        await provisioner.cleanup(restart=True)
        assert address.exists()
        await provisioner.cleanup(restart=False)
        assert not address.parent.exists()


async def test_a_dropped_provisioner_takes_its_sandbox_along(make: Any, folder: Path, state_dir: Path) -> None:
    manager = make()
    await manager.start_kernel(cwd=str(folder))
    manager.stop_restarter()
    manager._close_control_socket()
    manager.provisioner = None
    await wait_until_async(lambda: not list((state_dir / "sandboxes").iterdir()), 120, "its sandbox ends")


async def test_what_the_last_autorestart_leaves_is_removed(make: Any, state_dir: Path) -> None:
    restarts = {"restart_limit": 1, "time_to_dead": 0.2, "stable_start_time": 1000.0}
    manager = make(
        {"workspace": "private"},
        kind=AsyncIOLoopKernelManager,
        argv=["python", "-c", "raise SystemExit(3)", "{connection_file}"],
        policy={"keep_ended_for": 0.0},
        more={"AsyncIOLoopKernelRestarter": restarts},
    )
    is_dead = asyncio.Event()
    await manager.start_kernel()
    manager.add_restart_callback(is_dead.set, "dead")
    await asyncio.wait_for(is_dead.wait(), 150)

    def is_clean() -> bool:
        return not [*(state_dir / "sandboxes").iterdir(), *(state_dir.parent / "agentbox").glob("[!l]*")]

    # The manager is held still, as a server's session holds it, and nobody calls it.
    await wait_until_async(is_clean, 60, "nothing is left")
    assert manager.provisioner is not None
    manager._close_control_socket()


async def test_a_restart_keeps_the_hosts_that_were_decided_as_far_as_policy_allows(make: Any, folder: Path) -> None:
    manager = make(policy={"allowed_hosts": ["a.example", "*.b.example"]})
    provisioner = AgentboxProvisioner(kernel_id="x", kernel_spec=manager.kernel_spec, parent=manager)

    async def hosts_after(*decided: str, setting: str = OWN_HOSTS) -> tuple[str, ...]:
        await provisioner.pre_launch(cwd=str(folder))
        before = dataclasses.replace(provisioner._spec, grant=Grant(decided, ("x.example",), setting))
        provisioner._sandboxed._parked = SimpleNamespace(spec=before)
        await provisioner.pre_launch(cwd=str(folder))
        provisioner._sandboxed._parked = None
        assert provisioner._spec.grant.private_hosts == ()
        return provisioner._spec.grant.hosts

    assert await hosts_after() == ()
    assert await hosts_after("gone.example", "one.b.example", "a.example:8080") == ("one.b.example",)
    # Nobody has decided anything: a change of policy counts from the next start.
    assert await hosts_after("gone.example", setting="Policy.allowed_hosts") == ("a.example", "*.b.example")
    await provisioner.cleanup()


@pytest.mark.parametrize(
    ("stanza", "sentence"),
    [
        ({"parent": None}, "parent"),
        ({"kernel_spec": None}, "kernel_spec"),
        ({"connection_info": {"ip": "0.0.0.0"}}, "connection_info"),
        ({"config": {"Policy": {"max_memory": "1 TiB"}}}, "config"),
        ({"_request": {}}, "_request"),
        ({"log": None}, "log"),
        ({"allowed_host": ["x.test"]}, "did you mean 'allowed_hosts'"),
        ({"memory": "1 TiB"}, "memory"),
        ({"allowed_hosts": ["*.test"]}, "allowed_hosts|allows"),
        ({"profile": "wide"}, "profile 'wide' does not exist"),
        ({"is_root": True}, "is_root"),
        ({"mounts": {"/host": "/"}}, "mounts"),
        ({"env": {"LD_PRELOAD": "x"}}, "env"),
        ({"runtime": "runc"}, "runtime"),
    ],
)
async def test_a_hostile_kernelspec_gets_nothing(make: Any, stanza: dict[str, Any], sentence: str) -> None:
    with pytest.raises((AgentboxError, TypeError), match=sentence):
        await make(config=stanza).start_kernel()


async def test_a_kernelspec_that_asks_for_less_gets_less(make: Any, folder: Path) -> None:
    manager = make(config={"memory": "512 MiB", "allowed_hosts": []})
    provisioner = AgentboxProvisioner(
        kernel_id="x", kernel_spec=manager.kernel_spec, parent=manager, memory="512 MiB", allowed_hosts=[]
    )
    await provisioner.pre_launch(cwd=str(folder))
    assert provisioner._spec is not None
    assert provisioner._spec.limits.memory == 512 * 2**20
    assert provisioner._spec.grant.hosts == ()


async def test_encryption_that_is_required_is_refused(make: Any) -> None:
    manager = make()
    manager.kernel_spec.metadata["supported_encryption"] = "curve"
    with pytest.raises(InvalidRequest, match="transport_encryption"):
        await manager.start_kernel(transport_encryption="required")


async def test_a_folder_that_may_not_be_shown_is_refused(make: Any) -> None:
    with pytest.raises(PolicyRefused, match="/etc"):
        await make().start_kernel(cwd="/etc")


async def test_the_link_thread_is_never_blocked_by_a_slow_start(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, is_over = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        begun.set()
        is_over.wait(60)
        raise RuntimeFailed("it took too long")

    monkeypatch.setattr(RunscRuntime, "start", hang)
    starting = asyncio.ensure_future(make().start_kernel())
    assert await asyncio.to_thread(begun.wait, 60)
    await asyncio.wait_for(LinkThread.instance().run(asyncio.sleep(0)), 30)
    is_over.set()
    with pytest.raises(RuntimeFailed):
        await starting
