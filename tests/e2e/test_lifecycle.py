"""Starts, interrupts, restarts, deaths and ends, from the clients' side; nothing may be left by any of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pexpect
import pytest
from support import notebooks
from support.harness import BIN, KERNEL, LEASE, Env, KernelClient, Server, kill_group, processes_naming, wait_until

MIB = 1024 * 1024
EAT = "keep = []\nfor _ in range(100):\n    keep.append(bytearray(b'x' * 2**24))"  # 1.6 GiB


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    """One JupyterLab for the tests that leave it whole."""
    env = make_env()
    with env.server("lab") as server:
        yield server


@pytest.fixture
def kernel(server: Server) -> Iterator[KernelClient]:
    """A kernel of its own for each test."""
    kernel = server.kernel()
    yield kernel
    with contextlib.suppress(AssertionError):
        kernel.shutdown()


def small(env: Env) -> Env:
    """Give the environment's sandboxes little memory."""
    env.configure({"Policy": {"lease_timeout": LEASE, "max_memory": "400 MiB"}})
    return env


# Deaths


def test_a_batch_run_that_exceeds_its_memory_ends_at_once_and_says_why(agentbox_env: Env) -> None:
    book = notebooks.make(agentbox_env.work, ["import time\nprint(time.time())", EAT])
    begin = time.monotonic()
    run = small(agentbox_env).run("jupyter-nbconvert", "--to", "notebook", "--execute", book, check=False)
    assert run.code != 0
    assert "DeadKernelError" in run.output
    assert "out of memory (limit 400 MiB)" in run.output
    assert time.monotonic() - begin < 150  # start and all; an endless wait is what this is about
    wait_until(lambda: not agentbox_env.sandboxes(), 60, "its sandbox is gone")


def test_a_notebook_that_exceeds_its_memory_is_told_and_goes_on(agentbox_env: Env) -> None:
    with small(agentbox_env).server("lab") as server:
        kernel = server.kernel()
        kernel.check("open('kept.txt', 'w').write('kept')")
        assert kernel.execute(EAT).death in ("restarting", "dead")
        wait_until(lambda: "out of memory (limit 400 MiB)" in server.log.read_text(), 60, "the log says why")
        assert "kept" in kernel.check("print(open('kept.txt').read())")
        kernel.shutdown()


@pytest.mark.parametrize("program", ["lab", "kernelgateway"])
def test_a_kernel_that_kills_itself_is_seen_dead_and_comes_back(agentbox_env: Env, program: str) -> None:
    with agentbox_env.server(program) as server:
        # Of what the gateway passes on, variables of the caller's own go inside, and the server's never do.
        kernel = server.kernel(env={"KERNEL_X": "given", "CANARY": "given"})
        seen = kernel.check("import os; print(os.environ)")
        assert ("'KERNEL_X': 'given'" in seen) == (program == "kernelgateway")
        assert "'CANARY'" not in seen
        assert "JUPYTER_TOKEN" not in seen
        assert kernel.execute("import os; os.kill(os.getpid(), 9)").death == "restarting"
        assert kernel.check("print(1 + 1)").strip() == "2"
        kernel.shutdown()


def test_a_sandbox_killed_behind_jupyters_back_is_replaced(server: Server, kernel: KernelClient) -> None:
    kernel.check("x = 1")
    before = server.env.sandboxes()
    assert len(before) == 1, before
    for pid in processes_naming(str(before[0])):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert kernel.finish("none").death == "restarting"
    assert kernel.execute("x").error == "NameError"
    assert server.env.sandboxes() != before


def test_a_kernel_that_is_shut_down_while_it_restarts_is_gone(server: Server) -> None:
    kernel = server.kernel()
    kernel.check("1")
    before = server.env.sandboxes()
    kernel.start("import os; os.kill(os.getpid(), 9)")
    wait_until(lambda: server.env.sandboxes() not in ([], before), 60, "it restarts")
    kernel.shutdown()
    assert server.call("GET", "api/kernels") == []
    wait_until(lambda: not server.env.sandboxes(), 60, "its sandbox is gone")


# Restarts and interrupts


def test_a_restart_is_a_new_sandbox_with_the_same_files(server: Server, kernel: KernelClient) -> None:
    kernel.check("x = 1; open('file.txt', 'w').write('kept'); open('/tmp/gone.txt', 'w').write('gone')")
    before = server.env.sandboxes()
    kernel.restart()
    assert kernel.execute("x").error == "NameError"
    assert kernel.check("import os; print(open('file.txt').read(), os.path.exists('/tmp/gone.txt'))") == "kept False\n"
    assert len(server.env.sandboxes()) == 1
    assert server.env.sandboxes() != before


def test_restarts_leave_input_answered_and_no_descriptor_behind(server: Server, kernel: KernelClient) -> None:
    opened: list[int] = []
    for name in ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay"):
        assert f"hello {name}" in kernel.execute("print('hello', input('name? '))", answers=[name], timeout=100).text
        opened.append(descriptors(server))
        kernel.restart()
    # The same socket, and as many descriptors as before: one less in each restart would be five by now.
    wait_until(lambda: descriptors(server) < opened[0] + 5, 60, f"nothing is left open: {opened}")


def descriptors(server: Server) -> int:
    """Count what the server has open."""
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.parametrize(
    "code",
    [
        "print('started', flush=True); import time; time.sleep(610)",
        "print('started', flush=True)\nwhile True: pass",
        "!echo started; exec sleep 611",
        "import subprocess; subprocess.run(['sh', '-c', 'echo started; exec sleep 611'])",
        "print('started', flush=True); import socket; s = socket.create_server(('127.0.0.1', 0)); s.accept()",
    ],
)
def test_an_interrupt_stops_cell_and_children(kernel: KernelClient, code: str) -> None:
    kernel.check("x = 1")
    request = start_and_wait(kernel, code)
    kernel.interrupt()
    result = kernel.finish(request)
    assert result.error == "KeyboardInterrupt" or code.startswith("!")
    assert kernel.check("print(x)").strip() == "1"
    children = (
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n"
        "        try: print(open(f'/proc/{p}/cmdline').read().replace(chr(0), ' '))\n        except OSError: pass"
    )
    wait_until(lambda: "sleep 611" not in kernel.check(children), 60, "its child has ended")


def start_and_wait(kernel: KernelClient, code: str) -> str:
    """Send code that says 'started', and return once it has and goes on."""
    request, deadline = kernel.start(code), time.monotonic() + 100
    while "started" not in kernel.receive(deadline)["content"].get("text", ""):
        pass
    time.sleep(0.5)
    return request


def test_children_leave_no_zombies(kernel: KernelClient) -> None:
    kernel.check("import subprocess\nfor _ in range(100): subprocess.run(['sh', '-c', '(sleep 0.1 &) ; exit 0'])")
    zombies = (
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n"
        "        try: state = open(f'/proc/{p}/stat').read().rpartition(')')[2].split()[0]\n"
        "        except OSError: continue\n        if state == 'Z': print(p)"
    )
    wait_until(lambda: kernel.check(zombies) == "", 60, "the last ones have ended and were reaped")


def test_many_kernels_start_at_once(server: Server) -> None:
    with ThreadPoolExecutor(10) as pool:
        kernels = list(pool.map(lambda _: server.kernel(), range(10)))
        answers = list(pool.map(lambda kernel: kernel.check("print(6 * 7)", timeout=200).strip(), kernels))
        assert answers == ["42"] * 10
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


def test_a_server_that_is_told_to_end_leaves_nothing_after_the_lease(agentbox_env: Env) -> None:
    with agentbox_env.server("lab") as server:
        server.kernel().check("1")
    agentbox_env.assert_clean()


def test_a_killed_servers_sandboxes_end_with_the_lease_and_no_one_elses(agentbox_env: Env) -> None:
    with agentbox_env.server("lab") as survivor:
        kept = survivor.kernel()
        kept.check("x = 1")
        victim = Server(agentbox_env, "lab", (), {})
        victim.wait_ready()
        victim.kernel().check("1")
        assert len(agentbox_env.sandboxes()) == 2
        kill_group(victim.process)
        victim.stop()
        wait_until(lambda: len(agentbox_env.sandboxes()) == 1, 2 * LEASE + 60, "the orphan is gone")
        agentbox_env.run("jupyter-agentbox", "prune")
        assert kept.check("print(x)").strip() == "1"
        kept.shutdown()


@pytest.mark.parametrize("command", [["jupyter-execute"], ["jupyter-nbconvert", "--execute", "--to", "notebook"]])
def test_a_batch_run_killed_midway_leaves_nothing_after_the_lease(agentbox_env: Env, command: list[str]) -> None:
    book = notebooks.make(agentbox_env.work, ["open('begun', 'w').close()\nimport time\ntime.sleep(1000)"])
    with agentbox_env.spawn(*command, book) as process:
        wait_until((agentbox_env.work / "begun").exists, 150, "the cell runs")
        kill_group(process)
        process.communicate()
    # No process of ours is there to sweep: the guest ends itself, the next program removes the rest.
    wait_until(lambda: not agentbox_env.processes(), 2 * LEASE + 60, "the sandbox has ended")
    agentbox_env.run("jupyter-agentbox", "prune")
    agentbox_env.assert_clean()


@pytest.mark.parametrize("ending", ["exit", "killed terminal"])
def test_a_closed_console_leaves_nothing(agentbox_env: Env, ending: str) -> None:
    child = pexpect.spawn(
        str(BIN / "jupyter-console"), ["--simple-prompt", "--kernel", KERNEL], cwd=str(agentbox_env.work),
        env={**agentbox_env.variables, "TERM": "dumb"}, encoding="utf-8", timeout=100, echo=False,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        child.expect(r"In \[1\]: ")
        child.sendline("print(6 * 7)")
        child.expect("42")
        child.sendline("print('hel' + 'lo', input('na' + 'me? '))")
        child.expect(r"name\? ")
        child.sendline("Ann")
        child.expect("hello Ann")
        if ending == "exit":
            child.sendline("exit")
            child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    wait_until(lambda: not agentbox_env.processes(), 2 * LEASE + 60, "the sandbox has ended")
    agentbox_env.run("jupyter-agentbox", "prune")
    agentbox_env.assert_clean()


def test_culling_counts_from_the_end_of_a_cell_and_of_a_call(agentbox_env: Env) -> None:
    settings = ("cull_idle_timeout=8", "cull_interval=1", "cull_connected=True")
    cull = [f"--MappingKernelManager.{setting}" for setting in settings]
    with agentbox_env.server("lab", *cull) as server:
        kernel = server.kernel()
        box = f"api/agentbox/sandboxes/{kernel.id}"
        kernel.check("import time; time.sleep(10)")
        ran = server.call("POST", f"{box}/exec", {"command": "sleep 10; echo done"})
        assert (ran["exit_code"], ran["stdout"]) == (0, "done\n")
        assert [k["id"] for k in server.call("GET", "api/kernels")] == [kernel.id]

        def is_culled() -> bool:
            """Look, which is no use of it."""
            server.http.get(server.url(box), timeout=60)
            return not server.call("GET", "api/kernels")

        wait_until(is_culled, 90, "it is culled")
        wait_until(lambda: not agentbox_env.sandboxes(), 60, "its sandbox is gone")
        rows = [row["detail"] for row in server.call("GET", "api/agentbox/audit?kind=lifecycle")["rows"]]
        (end,) = [row for row in rows if row["event"] == "ended"]
        assert (end["cause"], end["setting"]) == ("idle", "MappingKernelManager.cull_idle_timeout")


def test_a_kernel_that_never_answers_leaves_nothing(agentbox_env: Env) -> None:
    twin(agentbox_env, "mute", ["python", "-c", "import time; time.sleep(1000)", "{connection_file}"])
    script = (
        "import nbformat, nbclient\n"
        "book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('1')])\n"
        "nbclient.NotebookClient(book, kernel_name='mute', startup_timeout=6).execute()"
    )
    run = agentbox_env.run(sys.executable, "-c", script, check=False)
    assert run.code != 0
    agentbox_env.assert_clean()


def test_a_kernel_that_cannot_start_says_why_and_leaves_nothing(agentbox_env: Env) -> None:
    twin(agentbox_env, "absent", ["/no/such/program", "{connection_file}"])
    with agentbox_env.server("lab") as server:
        answer = server.http.post(server.url("api/kernels"), json={"name": "absent"}, timeout=150)
        if answer.ok:  # the start was in time, the death came after it
            wait_until(lambda: "/no/such/program" in server.log.read_text(), 60, "the log names the program")
        else:
            assert "/no/such/program" in answer.text + server.log.read_text()
    agentbox_env.assert_clean()


def test_a_runtime_that_hangs_hangs_nobody_else(agentbox_env: Env) -> None:
    stuck = agentbox_env.base / "runsc"
    stuck.write_text("#!/bin/sh\nexec sleep 1000\n")
    stuck.chmod(0o755)
    agentbox_env.configure({"RunscRuntime": {"runsc": str(stuck), "start_timeout": 20.0}})
    with agentbox_env.server("lab") as server:
        with ThreadPoolExecutor(1) as pool:
            start = pool.submit(server.http.post, server.url("api/kernels"), json={"name": KERNEL}, timeout=150)
            time.sleep(2)
            for _ in range(5):
                server.call("GET", "api/status")
            assert not start.done()  # a loop that is blocked answers only when the start has failed
            answer = start.result()
        assert answer.status_code >= 500
        assert "did not answer within 20 s" in answer.text + server.log.read_text()
    agentbox_env.assert_clean()


def twin(env: Env, name: str, argv: list[str]) -> None:
    """Install a kernelspec with another program beside ours, sandboxed like it."""
    import json

    spec = {"argv": argv, "display_name": name, "language": "python",
            "metadata": {"kernel_provisioner": {"provisioner_name": "agentbox-provisioner"}}}  # fmt: skip
    folder = env.data / "kernels" / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))


# Working directories


def test_the_csv_beside_the_notebook_opens_whatever_the_client_says_of_the_folder(agentbox_env: Env) -> None:
    """The server passes an absolute path, nbconvert a relative one, `jupyter execute` a Path, papermill none."""
    cells = ["print(open('data.csv').read())", "import os\nprint(os.getcwd())\nopen('made.txt', 'w').write('by user')"]
    for client in (notebooks.nbconvert, notebooks.jupyter_execute, notebooks.papermill, notebooks.lab):
        folder = agentbox_env.work / client.__name__
        text = client(agentbox_env, notebooks.make(folder, cells))
        assert "5,6" in text, client
        assert "/workspace" in text
        made = folder / "made.txt"
        assert (made.read_text(), made.stat().st_uid, made.stat().st_gid) == ("by user", os.geteuid(), os.getegid())


def test_a_folder_that_does_not_exist_does_not_stop_the_start(server: Server) -> None:
    kernel = server.kernel(path="no/such/folder")
    assert kernel.check("print(6 * 7)").strip() == "42"
    kernel.shutdown()


# Versions of ipykernel


@pytest.mark.network
@pytest.mark.timeout(900)
def test_an_older_ipykernel_works_too(agentbox_env: Env, tmp_path: Path) -> None:
    python = tmp_path / "old" / "bin" / "python"
    agentbox_env.run(sys.executable, "-m", "venv", tmp_path / "old")
    agentbox_env.run(python, "-m", "pip", "install", "-q", "ipykernel==6.31.0", timeout=200)
    twin(agentbox_env, "old", [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    with agentbox_env.server("lab") as server:
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
