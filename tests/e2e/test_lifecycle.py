"""Starts, interrupts, restarts, deaths and ends, from the clients' side; nothing may be left by any of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pexpect
import pytest
from support import notebooks
from support.harness import (
    BIN,
    KERNEL,
    LEASE,
    Env,
    KernelClient,
    Server,
    kill_group,
    link,
    processes_naming,
    wait_until,
)

EAT = "keep = []\nfor _ in range(100):\n    keep.append(bytearray(b'x' * 2**24))"  # 1.6 GiB


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    """One JupyterLab for the tests that leave it whole."""
    env = make_env(config={"Policy": {"lease_timeout": LEASE, "profiles": {"small": {"memory": "400 MiB"}}}})
    install_kernelspec(env, "small", ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"], profile="small")
    with env.server("lab") as server:
        yield server


@pytest.fixture
def kernel(server: Server) -> Iterator[KernelClient]:
    """A kernel of its own for each test."""
    kernel = server.kernel()
    yield kernel
    with contextlib.suppress(AssertionError):
        kernel.shutdown()


def install_kernelspec(env: Env, name: str, argv: list[str], **config: str) -> None:
    """Install a sandboxed kernelspec beside ours, with another program or profile."""
    provisioner = {"provisioner_name": "agentbox-provisioner", "config": config}
    spec = {
        "argv": argv,
        "display_name": name,
        "language": "python",
        "metadata": {"kernel_provisioner": provisioner},
    }
    folder = env.data / "kernels" / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))


# Deaths


def test_a_batch_run_that_exceeds_its_memory_ends_at_once_and_says_why(server: Server) -> None:
    env = server.env
    book = notebooks.make(env.work / "batch", ["import time\nprint(time.time())", EAT])
    command = ("jupyter-nbconvert", "--to", "notebook", "--execute", "--ExecutePreprocessor.kernel_name=small", book)
    begin = time.monotonic()
    run = env.run(*command, check=False)
    assert run.code != 0
    assert "DeadKernelError" in run.output
    assert "out of memory (limit 400 MiB)" in run.output
    assert time.monotonic() - begin < 150  # start and all; an endless wait is what this is about
    wait_until(lambda: not env.sandboxes(), 60, "its sandbox is gone")


def test_a_notebook_that_exceeds_its_memory_is_told_and_goes_on(server: Server) -> None:
    kernel = server.kernel("small")
    kernel.check("open('kept.txt', 'w').write('kept')")
    assert kernel.execute(EAT).death in ("restarting", "dead")
    wait_until(lambda: "out of memory (limit 400 MiB)" in server.log.read_text(), 60, "the log says why")
    assert "kept" in kernel.check("print(open('kept.txt').read())")
    kernel.shutdown()


#: Of what the gateway passes on, variables of the caller's own go inside, and the server's never do.
GIVEN = {"KERNEL_X": "given", "CANARY": "given"}
KILL = "import os; os.kill(os.getpid(), 9)"


def check_death(kernel: KernelClient) -> str:
    """Have a kernel kill itself, and check that it comes back; what it had in its environment is returned."""
    seen = kernel.check("import os; print(os.environ)")
    assert "'CANARY'" not in seen
    assert "JUPYTER_TOKEN" not in seen
    assert kernel.execute(KILL).death == "restarting"
    assert kernel.check("print(1 + 1)").strip() == "2"
    return seen


def test_a_kernel_of_the_gateway_that_kills_itself_is_seen_dead_and_comes_back(agentbox_env: Env) -> None:
    with agentbox_env.server("kernelgateway") as server:
        kernel = server.kernel(env=GIVEN)
        assert "'KERNEL_X': 'given'" in check_death(kernel)
        kernel.shutdown()


def test_a_kernel_that_is_killed_comes_back_until_it_is_shut_down(server: Server) -> None:
    """By itself, with its whole sandbox behind Jupyter's back, and once more while it is shut down."""
    kernel = server.kernel(env=GIVEN)
    assert "'KERNEL_X'" not in check_death(kernel)
    kernel.check("x = 1")
    before = server.env.sandboxes()
    assert len(before) == 1, before
    for pid in processes_naming(str(before[0])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert kernel.finish("none").death == "restarting"
    assert kernel.execute("x").error == "NameError"
    before, other = server.env.sandboxes(), before
    assert before != other
    kernel.start(KILL)
    wait_until(lambda: server.env.sandboxes() not in ([], before), 60, "it restarts")
    kernel.shutdown()
    assert server.call("GET", "api/kernels") == []
    wait_until(lambda: not server.env.sandboxes(), 60, "its sandbox is gone")


# Restarts and interrupts


def test_a_restart_is_a_new_sandbox_with_the_same_files_and_leaves_nothing_open(
    server: Server, kernel: KernelClient
) -> None:
    kernel.check("x = 1; open('file.txt', 'w').write('kept'); open('/tmp/gone.txt', 'w').write('gone')")
    opened: list[int] = []
    for name in ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay"):
        assert f"hello {name}" in kernel.execute("print('hello', input('name? '))", answers=[name], timeout=100).text
        opened.append(descriptors(server))
        before = server.env.sandboxes()
        kernel.restart()
        assert kernel.execute("x").error == "NameError"
        seen = kernel.check("import os; print(open('file.txt').read(), os.path.exists('/tmp/gone.txt'))")
        assert seen == "kept False\n"
        assert len(server.env.sandboxes()) == 1
        assert server.env.sandboxes() != before
    # The same socket, and as many descriptors as before: one less in each restart would be five by now.
    wait_until(lambda: descriptors(server) < opened[0] + 5, 60, f"nothing is left open: {opened}")


def descriptors(server: Server) -> int:
    """Count what the server has open."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


INTERRUPTED = (
    "print('started', flush=True); import time; time.sleep(610)",
    "print('started', flush=True)\nwhile True: pass",
    "!echo started; exec sleep 611",
    "import subprocess; subprocess.run(['sh', '-c', 'echo started; exec sleep 611'])",
    "print('started', flush=True); import socket; s = socket.create_server(('127.0.0.1', 0)); s.accept()",
)


def test_an_interrupt_stops_cell_and_children(kernel: KernelClient) -> None:
    kernel.check("x = 1")
    children = (
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n"
        "        try: print(open(f'/proc/{p}/cmdline').read().replace(chr(0), ' '))\n        except OSError: pass"
    )
    for code in INTERRUPTED:
        request = start_and_wait(kernel, code)
        kernel.interrupt()
        result = kernel.finish(request)
        assert result.error == "KeyboardInterrupt" or code.startswith("!"), code
        assert kernel.check("print(x)").strip() == "1", code
        wait_until(lambda: "sleep 611" not in kernel.check(children), 60, "its child has ended")
    # Nor is anything left of children that ended by themselves.
    kernel.check("import subprocess\nfor _ in range(100): subprocess.run(['sh', '-c', '(sleep 0.1 &) ; exit 0'])")
    zombies = (
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n"
        "        try: state = open(f'/proc/{p}/stat').read().rpartition(')')[2].split()[0]\n"
        "        except OSError: continue\n        if state == 'Z': print(p)"
    )
    wait_until(lambda: kernel.check(zombies) == "", 60, "the last ones have ended and were reaped")


def start_and_wait(kernel: KernelClient, code: str) -> str:
    """Send code that says 'started', and return once it has and goes on."""
    request, deadline = kernel.start(code), time.monotonic() + 100
    while "started" not in kernel.receive(deadline)["content"].get("text", ""):
        pass
    time.sleep(0.5)
    return request


def test_many_kernels_start_at_once(server: Server) -> None:
    def start(number: int) -> KernelClient:
        return server.kernel(path="no/such/folder") if number == 0 else server.kernel()  # which stops none of them

    with ThreadPoolExecutor(6) as pool:
        kernels = list(pool.map(start, range(6)))
        answers = list(pool.map(lambda kernel: kernel.check("print(6 * 7)", timeout=200).strip(), kernels))
        assert answers == ["42"] * 6
        list(pool.map(KernelClient.shutdown, kernels))
    assert wait_until(lambda: not server.env.sandboxes(), 60, "all are gone")


def test_a_sandbox_that_stands_still_holds_nobody_up(server: Server, kernel: KernelClient) -> None:
    kernel.check("x = 1")
    found = server.call("GET", f"api/agentbox/sandboxes/{kernel.id}")["sandbox_id"]
    directory = server.env.state_dir / "sandboxes" / found
    stopped = processes_naming(str(directory))
    assert stopped
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        interrupt = pool.submit(server.http.post, server.url(f"api/kernels/{kernel.id}/interrupt"), timeout=60)
        while not interrupt.done():
            server.call("GET", "api/status")
        interrupt.result()
        delete, answers = pool.submit(server.call, "DELETE", f"api/kernels/{kernel.id}"), 0
        while not delete.done():
            server.call("GET", "api/status")
            answers += 1
        delete.result()
    assert answers > 2  # Jupyter waits for seconds until it kills a kernel, and does so without standing still itself
    wait_until(lambda: not directory.exists() and not processes_naming(str(directory)), 60, "the sandbox is gone")


# Ends


def test_a_killed_servers_sandboxes_end_with_the_lease_and_no_one_elses(server: Server, kernel: KernelClient) -> None:
    env = server.env
    kernel.check("x = 1")
    victim = Server(env, "server", (), {})
    victim.wait_ready()
    victim.kernel().check("1")
    assert len(env.sandboxes()) == 2
    kill_group(victim.process)
    victim.stop()
    wait_until(lambda: len(env.sandboxes()) == 1, 2 * LEASE + 60, "the orphan is gone")
    env.run("jupyter-agentbox", "prune")
    assert kernel.check("print(x)").strip() == "1"


@contextlib.contextmanager
def console(env: Env) -> Iterator[pexpect.spawn[str]]:
    """A console in which a cell ran and asked for input; its terminal is gone at the end."""
    child = pexpect.spawn(
        str(BIN / "jupyter-console"), ["--simple-prompt", "--kernel", KERNEL], cwd=str(env.work),
        env={**env.variables, "TERM": "dumb"}, encoding="utf-8", timeout=100, echo=False,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        child.expect(r"In \[1\]: ")
        child.sendline("print(6 * 7)")
        child.expect("42")
        child.sendline("print('hel' + 'lo', input('na' + 'me? '))")
        child.expect(r"name\? ")
        child.sendline("Ann")
        child.expect("hello Ann")
        yield child
    finally:
        child.close(force=True)


def test_clients_that_end_or_are_killed_leave_nothing_after_the_lease(agentbox_env: Env) -> None:
    book = notebooks.make(agentbox_env.work, ["open('begun', 'w').close()\nimport time\ntime.sleep(1000)"])
    with agentbox_env.spawn("jupyter-execute", book) as batch:
        with console(agentbox_env) as child:
            child.sendline("exit")
            child.expect(pexpect.EOF)
        with console(agentbox_env):  # whose terminal is closed while it waits for a cell
            pass
        wait_until((agentbox_env.work / "begun").exists, 150, "the cell runs")
        kill_group(batch)
        batch.communicate()
    # No process of ours is there to sweep: the guest ends itself, the next program removes the rest.
    wait_until(lambda: not agentbox_env.processes(), 2 * LEASE + 60, "the sandboxes have ended")
    agentbox_env.run("jupyter-agentbox", "prune")
    agentbox_env.assert_clean()


def test_culling_counts_from_the_end_of_a_cell_and_of_a_call(agentbox_env: Env) -> None:
    settings = ("cull_idle_timeout=4", "cull_interval=1", "cull_connected=True")
    cull = [f"--MappingKernelManager.{setting}" for setting in settings]
    with agentbox_env.server("server", *cull) as server:
        kernel = server.kernel()
        box = f"api/agentbox/sandboxes/{kernel.id}"
        kernel.check("import time; time.sleep(6)")
        ran = server.call("POST", f"{box}/exec", {"command": "sleep 6; echo done"})
        assert (ran["exit_code"], ran["stdout"]) == (0, "done\n")
        assert [k["id"] for k in server.call("GET", "api/kernels")] == [kernel.id]

        def is_culled() -> bool:
            """Look, which is no use of it."""
            server.http.get(server.url(box), timeout=60)
            return not server.call("GET", "api/kernels")

        wait_until(is_culled, 90, "it is culled", pause=0.5)
        wait_until(lambda: not agentbox_env.sandboxes(), 60, "its sandbox is gone")
        rows = [row["detail"] for row in server.call("GET", "api/agentbox/audit?kind=lifecycle")["rows"]]
        (end,) = [row for row in rows if row["event"] == "ended"]
        assert (end["cause"], end["setting"]) == ("idle", "MappingKernelManager.cull_idle_timeout")
        server.kernel().check("1")
    agentbox_env.assert_clean()  # of a server that is told to end nothing is left either


def test_a_kernel_that_never_answers_leaves_nothing(agentbox_env: Env) -> None:
    install_kernelspec(agentbox_env, "mute", ["python", "-c", "import time; time.sleep(1000)", "{connection_file}"])
    script = (
        "import nbformat, nbclient\n"
        "book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('1')])\n"
        "nbclient.NotebookClient(book, kernel_name='mute', startup_timeout=4).execute()"
    )
    run = agentbox_env.run(sys.executable, "-c", script, check=False)
    assert run.code != 0
    agentbox_env.assert_clean()


def test_a_kernel_that_cannot_start_says_why_and_leaves_nothing(server: Server) -> None:
    install_kernelspec(server.env, "absent", ["/no/such/program", "{connection_file}"])
    answer = server.http.post(server.url("api/kernels"), json={"name": "absent"}, timeout=150)
    if answer.ok:  # the start was in time, the death came after it
        wait_until(lambda: "/no/such/program" in server.log.read_text(), 60, "the log names the program")
    else:
        assert "/no/such/program" in answer.text + server.log.read_text()
    wait_until(lambda: not server.env.sandboxes(), 60, "its sandbox is gone")
    wait_until(lambda: not server.call("GET", "api/kernels"), 60, "Jupyter has no such kernel")


def test_a_runtime_that_hangs_hangs_nobody_else(agentbox_env: Env) -> None:
    stuck = agentbox_env.base / "runsc"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    agentbox_env.configure({"RunscRuntime": {"runsc": str(stuck), "start_timeout": 10.0}})
    with agentbox_env.server("server") as server:
        with ThreadPoolExecutor(1) as pool:
            start = pool.submit(server.http.post, server.url("api/kernels"), json={"name": KERNEL}, timeout=150)
            time.sleep(2)
            for _ in range(5):
                server.call("GET", "api/status")
            assert not start.done()  # a loop that is blocked answers only when the start has failed
            answer = start.result()
        assert answer.status_code >= 500
        assert "did not answer within 10 s" in answer.text + server.log.read_text()
    agentbox_env.assert_clean()


# Versions of ipykernel


@pytest.mark.network
def test_an_older_ipykernel_works_too(server: Server, tmp_path: Path) -> None:
    env, prefix = server.env, tmp_path / "old"
    env.run(sys.executable, "-m", "venv", "--without-pip", prefix)
    # What it depends on is that of this environment.
    packages = Path(sysconfig.get_path("purelib"))
    others = shutil.ignore_patterns("ipykernel*", "*agentbox*", "jupyterlab*", "numpy*", "pandas*", "mypy*", "*.pyc.*")
    target = prefix / packages.relative_to(sys.prefix)
    shutil.copytree(packages, target, copy_function=link, dirs_exist_ok=True, ignore=others)
    python = prefix / "bin" / "python"
    env.run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "ipykernel==6.31.0")
    install_kernelspec(env, "old", [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    kernel = server.kernel("old")
    assert kernel.check("import ipykernel; print(ipykernel.__version__)").strip() == "6.31.0"
    for number in range(100):
        assert kernel.check(f"print({number})").strip() == str(number)
    request = start_and_wait(kernel, "print('started', flush=True); import time; time.sleep(600)")
    kernel.interrupt()
    assert kernel.finish(request).error == "KeyboardInterrupt"
    kernel.restart()
    assert kernel.check("print(6 * 7)").strip() == "42"
    kernel.shutdown()
