"""The embedded driver on real gVisor: every part of Jupyter's protocol, and what must hold when owners come and go."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.embedded_client import Client, spec, start
from support.harness import wait_until

from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.drivers import Kernel
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.sandbox import Sandbox
from jupyter_agentbox.spec import Cause

pytestmark = pytest.mark.usefixtures("has_runsc")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    state = tmp_path_factory.mktemp("embedded") / "state"
    manager = SandboxManager(state, RunscRuntime(state_dir=str(state)))
    thread = LinkThread.instance()
    made = thread.submit(manager.create(spec())).result(150)
    yield made
    thread.submit(manager.stop(made)).result(150)
    assert not list((state / "sandboxes").iterdir())


@pytest.fixture(scope="module")
def client(sandbox: Sandbox) -> Client:
    client = Client(LinkThread.instance().submit(start(sandbox)).result(60))
    assert client.kernel.driver == "embedded"
    client.reply(client.send("shell", "kernel_info_request", {}), timeout=60)
    return client


def test_code_runs(client: Client) -> None:
    assert client.run("print('hello'); 1 + 1") == "hello\n2"


def test_silent_code_and_history(client: Client) -> None:
    assert client.run("'kept'") == "'kept'"
    assert client.run("1", silent=True, store_history=False) == ""
    history = client.send(
        "shell", "history_request", {"hist_access_type": "tail", "n": 1, "raw": True, "output": False}
    )
    assert client.reply(history)["content"]["history"][-1][2] == "'kept'"
    # It was written down as somebody asked. What nobody asks for is, for other programs, after twenty cells.
    client.run(
        "import contextlib, sqlite3, time\n"
        "def count():\n"
        "    with contextlib.closing(sqlite3.connect(get_ipython().history_manager.hist_file)) as database:\n"
        "        return database.execute('select count(*) from history').fetchone()[0]\n"
        "def has_grown():\n"
        "    end = time.monotonic() + 60\n"
        "    while count() <= before and time.monotonic() < end: time.sleep(0.05)\n"
        "    return count() > before\n"
        "before = count()"
    )
    for _ in range(20):
        client.run("1")
    assert client.run("has_grown()") == "True"


def test_the_kernels_log_is_for_whoever_listens(client: Client) -> None:
    code = (
        "import logging.handlers\nlog, ears = get_ipython().kernel.log, logging.handlers.MemoryHandler(9)\n"
        "quiet = log.isEnabledFor(logging.DEBUG), log.isEnabledFor(logging.ERROR)\n"
        "log.addHandler(ears); log.debug('heard'); log.removeHandler(ears)\n"
        "print(quiet, [record.getMessage() for record in ears.buffer])"
    )
    assert client.run(code) == "(False, True) ['heard']\n"


def test_the_parts_of_the_protocol_answer(client: Client) -> None:
    def ask(kind: str, **content: Any) -> Any:
        return client.reply(client.send("shell", kind, content))["content"]

    client.run("number = 7")
    assert "number" in ask("complete_request", code="numb", cursor_pos=4)["matches"]
    assert "7" in ask("inspect_request", code="number", cursor_pos=3, detail_level=0)["data"]["text/plain"]
    assert ask("is_complete_request", code="if 1:")["status"] == "incomplete"
    info = ask("kernel_info_request")
    assert info["implementation"] == "ipython"
    request = client.start("", user_expressions={"n": "number + 1"})
    assert client.reply(request)["content"]["user_expressions"]["n"]["data"]["text/plain"] == "8"


def test_an_error_aborts_what_is_queued(client: Client, sandbox: Sandbox) -> None:
    first = client.start("import os, time\nwhile not os.path.exists('/workspace/queued'): time.sleep(0.02)\n1 / 0")
    others = [client.start(f"never = {i}") for i in range(3)]
    (sandbox.workspace / "queued").touch()  # they are in the kernel's FIFO by now
    assert client.reply(first)["content"]["ename"] == "ZeroDivisionError"
    assert [client.reply(other)["content"]["status"] for other in others] == ["aborted"] * 3
    assert client.run("'never' in dir()") == "False"


def test_an_interrupt_ends_code_and_children(client: Client) -> None:
    async def interrupt() -> None:
        await client.kernel.signal(signal.SIGINT)

    for code in ("while True: pass", "import time; time.sleep(60)", "import asyncio; await asyncio.sleep(60)"):
        request = client.until("print('go')\n" + code, "go")
        began = time.monotonic()
        LinkThread.instance().submit(interrupt()).result(30)
        assert client.reply(request)["content"]["ename"] in ("KeyboardInterrupt", "CancelledError")
        assert time.monotonic() - began < 30
    # Said by the child: what comes while it is started may be too early for it.
    request = client.until("import subprocess; subprocess.run(['sh', '-c', 'echo go; exec sleep 61'])", "go")
    client.reply(client.send("control", "interrupt_request", {}), "control")
    assert client.reply(request)["content"]["ename"] == "KeyboardInterrupt"
    wait_until(lambda: client.run("!pgrep -f 'sleep 6[1]' || echo none").strip() == "none", 60, "the child ends")


def test_a_command_that_ends_as_its_reader_gives_up_loses_nothing(client: Client) -> None:
    late = (
        "import os, pexpect",
        "calls, real = [], pexpect.spawn.isalive",
        "def isalive(self):",
        "    calls.append(1)",
        "    if len(calls) == 2:",
        "        open('/tmp/asked', 'w').close()",
        "        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # it speaks and ends at this moment",
        "    return real(self)",
        "pexpect.spawn.isalive = isalive",
    )
    client.run("\n".join(late))
    try:
        assert client.run("!until [ -e /tmp/asked ]; do sleep 0.02; done; echo said").strip() == "said"
        assert client.run("len(calls) >= 2") == "True"
    finally:
        client.run("pexpect.spawn.isalive = real")


def test_the_note_after_an_installation_is_true_in_a_sandbox(client: Client) -> None:
    shown = client.run("%pip --version")
    assert "a restart of the kernel discards installed packages" in shown
    assert "you may need to restart" not in shown
    assert "not appear to be a conda environment" in client.run("try:\n  %conda list\nexcept ValueError as e: print(e)")


def test_a_cell_that_follows_an_interrupt_is_not_hit_by_it(client: Client) -> None:
    statuses = []
    for _ in range(100):
        LinkThread.instance().submit(client.kernel.signal(signal.SIGINT)).result(30)
        statuses.append(client.reply(client.start("1"))["content"]["status"])
    assert statuses == ["ok"] * 100


def test_an_interrupt_at_any_moment_loses_no_reply(client: Client) -> None:
    for wait in range(100):
        request = client.start("1")
        time.sleep(wait / 20_000)
        LinkThread.instance().submit(client.kernel.signal(signal.SIGINT)).result(30)
        assert client.reply(request)["content"].get("ename", "KeyboardInterrupt") == "KeyboardInterrupt"
    assert client.run("2") == "2"


def test_output_survives_an_interrupt_at_any_moment(client: Client) -> None:
    request = client.until("while True: print('x' * 5000)", "x")
    for _ in range(3):
        LinkThread.instance().submit(client.kernel.signal(signal.SIGINT)).result(30)
    assert client.reply(request)["content"]["status"] == "error"
    assert client.run("print('y' * 100_000)") == "y" * 100_000 + "\n"


def test_control_answers_while_a_cell_runs(client: Client) -> None:
    request = client.until("import time; print('go'); time.sleep(60)", "go")
    client.reply(client.send("control", "kernel_info_request", {}), "control")
    client.reply(client.send("control", "interrupt_request", {}), "control")
    assert client.reply(request)["content"]["ename"] == "KeyboardInterrupt"


def test_input_and_passwords_are_asked_for(client: Client) -> None:
    request = client.start("import getpass; print(input('name? '), getpass.getpass('secret? '))")
    for prompt, is_password in (("name? ", False), ("secret? ", True)):
        asked = client.find(lambda c, m, prompt=prompt: c == "stdin" and m["content"]["prompt"] == prompt)  # type: ignore[misc]
        assert asked["content"]["password"] is is_password
        client.send("stdin", "input_reply", {"value": prompt.upper()})
    assert client.text(request) == "NAME?  SECRET? \n"


def test_output_of_children_and_of_libraries_is_shown(client: Client) -> None:
    code = """
    import ctypes, os, subprocess, multiprocessing
    subprocess.run(['sh', '-c', 'echo child; echo wrong >&2'])
    os.system('echo system')
    libc = ctypes.CDLL(None); libc.puts(b'library'); libc.fflush(None)
    child = multiprocessing.get_context('fork').Process(target=lambda: print('forked'))
    child.start(); child.join()
    import time; time.sleep(0.5)
    """
    request = client.start(code.replace("\n    ", "\n"))
    client.outputs(request)
    expected = ["child", "forked", "library", "system"]
    wait_until(lambda: sorted(client.text(request).split()) == expected, 60, "all of it is shown in its cell")
    wait_until(lambda: client.text(request, "stderr") == "wrong\n", 60, "its error is shown in its cell")


def test_a_forked_child_speaks_only_by_its_output(client: Client) -> None:
    code = """
    import os, time
    child = os.fork()
    if child == 0:
        display('a message of its own')
        print('output', flush=True)
        os._exit(7)
    print(os.waitpid(child, 0)[1] >> 8)
    time.sleep(0.5)
    """
    request = client.start(code.replace("\n    ", "\n"))
    # What a child prints comes by another way, and its line's end may be shown after what the parent prints.
    wait_until(lambda: sorted(client.text(request)) == sorted("output\n7\n"), 60, "the child's output is shown")
    assert "display_data" not in [message["msg_type"] for message in client.outputs(request)]
    request = client.start("print('goes on')")
    assert client.text(request) == "goes on\n"


def test_much_output_comes_whole(client: Client) -> None:
    request = client.start("block = 'ä' * 99 + '\\n'\nfor _ in range(200): print(block * 1000, end='')")
    assert client.text(request, timeout=60) == ("ä" * 99 + "\n") * 200_000


def test_output_that_follows_is_shown_before_the_cell_ends(client: Client) -> None:
    code = "import time\nprint('one')\nprint('two')\nprint('three', end='')\ntime.sleep(60)"
    request = client.until(code, "three", timeout=55)
    client.reply(client.send("control", "interrupt_request", {}), "control")
    assert client.reply(request)["content"]["ename"] == "KeyboardInterrupt"


def test_threads_and_tasks_go_on_between_cells(client: Client) -> None:
    code = """
    import asyncio, threading, time
    async def count():
        global ticks
        for ticks in range(10_000): await asyncio.sleep(0.01)
    task = asyncio.create_task(count())
    threading.Timer(0.5, lambda: print('later')).start()
    """
    request = client.start(code.replace("\n    ", "\n"))
    assert client.reply(request)["content"]["status"] == "ok"
    client.find(lambda c, m: m["msg_type"] == "stream" and m["content"]["text"] == "later\n")
    wait_until(lambda: int(client.run("ticks")) > 10, 60, "the task goes on between cells")
    assert client.run("await asyncio.sleep(0.01, 'top level')") == "'top level'"
    assert client.run("%gui asyncio") == ""


def test_displays_are_updated(client: Client) -> None:
    request = client.start("h = display('old', display_id=True); h.update('new')")
    kinds = [m["msg_type"] for m in client.outputs(request)]
    assert kinds == ["status", "execute_input", "display_data", "update_display_data", "status"]


def test_comms_carry_buffers_both_ways(client: Client) -> None:
    code = """
    from comm import create_comm
    data = bytes(range(256)) * 40_000
    got = []
    c = create_comm(target_name='x', data={}, buffers=[data, memoryview(data)[:10]])
    c.on_msg(lambda m: (got.append(m['buffers'][0].tobytes() == data), print('handled')))
    """
    opened = client.outputs(client.start(code.replace("\n    ", "\n")))
    message = next(m for m in opened if m["msg_type"] == "comm_open")
    data = bytes(range(256)) * 40_000
    assert [bytes(b) for b in message["buffers"]] == [data, data[:10]]
    request = client.send("shell", "comm_msg", {"comm_id": message["content"]["comm_id"], "data": {}}, buffers=[data])
    assert client.text(request) == "handled\n"
    assert client.run("got") == "[True]"


def test_subshells_run_beside_the_main_shell(client: Client) -> None:
    def control(kind: str, **content: Any) -> Any:
        return client.reply(client.send("control", kind, content), "control")["content"]

    subshell = control("create_subshell_request")["subshell_id"]
    assert control("list_subshell_request")["subshell_id"] == [subshell]
    code = "import time; print('go')\nfor _ in range(300):\n    time.sleep(0.1)\n    if 'go_on' in globals(): break"
    busy = client.until(code, "go")
    assert client.run("6 * 7", subshell_id=subshell) == "42"
    failed = client.start("1 / 0", subshell_id=subshell)
    assert client.reply(failed)["content"]["ename"] == "ZeroDivisionError"
    assert client.run("go_on = 'again'; go_on", subshell_id=subshell) == "'again'"
    assert client.run("'main'", subshell_id=subshell) == "'main'"
    assert client.reply(busy)["content"]["status"] == "ok"
    assert control("delete_subshell_request", subshell_id=subshell)["status"] == "ok"
    assert control("list_subshell_request")["subshell_id"] == []
    assert client.reply(client.start("1", subshell_id=subshell))["content"]["status"] == "error"
    assert client.run("'main goes on'") == "'main goes on'"


def test_the_debugger_is_loaded_when_somebody_debugs(client: Client) -> None:
    loaded = "import sys; [name for name in sys.modules if name.startswith(('debugpy', '_pydev'))] != []"
    assert client.run(loaded) == "False"
    info = client.reply(client.send("shell", "kernel_info_request", {}))["content"]
    assert "debugger" in info["supported_features"]
    # A kernel's own module, and its own class, for whoever looks for them.
    assert client.run("import ipykernel.debugger as d; d.Debugger.__module__, d.__file__[-11:]") == (
        "('ipykernel.debugger', 'debugger.py')"
    )
    assert client.run(loaded) == "True"
    assert client.run("get_ipython().kernel.debugger.breakpoint_list") == "{}"


def test_the_client_is_loaded_when_somebody_wants_it(client: Client) -> None:
    assert client.run("import sys; import jupyter_client.session; 'jupyter_client.manager' in sys.modules") == "False"
    # A module of it that needs others, before the package itself.
    assert client.run("from jupyter_client.manager import AsyncKernelManager; AsyncKernelManager.__name__") == (
        "'AsyncKernelManager'"
    )
    assert client.run("from jupyter_client import *; KernelManager.__module__") == "'jupyter_client.manager'"
    assert client.run("import jupyter_client; jupyter_client.KernelManager is KernelManager, type(jupyter_client)") == (
        "(True, module)"
    )
    assert "has no attribute 'nonesuch'" in client.run(
        "try: jupyter_client.nonesuch\nexcept AttributeError as e: print(e)"
    )


def test_the_debugger_stops_at_breakpoints(client: Client) -> None:
    sequence = iter(range(1, 100))

    def debug(command: str, **arguments: Any) -> Any:
        content = {"type": "request", "seq": next(sequence), "command": command, "arguments": arguments}
        return client.reply(client.send("control", "debug_request", content), "control")["content"]

    debug("initialize", clientID="test", adapterID="")
    assert debug("attach")["success"]
    code = "def f():\n    x = 41\n    return x + 1\nf()"
    source = debug("dumpCell", code=code)["body"]["sourcePath"]
    assert debug("setBreakpoints", source={"path": source}, breakpoints=[{"line": 3}])["body"]["breakpoints"]
    debug("configurationDone")
    request = client.start(code)
    stopped = client.find(lambda c, m: m["msg_type"] == "debug_event" and m["content"]["event"] == "stopped")
    thread = stopped["content"]["body"]["threadId"]
    assert debug("stackTrace", threadId=thread)["body"]["stackFrames"][0]["line"] == 3
    debug("continue", threadId=thread)
    assert client.reply(request)["content"]["status"] == "ok"
    debug("disconnect", restart=False, terminateDebuggee=False)


def test_programs_that_look_for_sockets_are_told_there_are_none(client: Client) -> None:
    code = """
    from ipykernel.connect import get_connection_file
    from jupyter_client.blocking.client import BlockingKernelClient
    try: BlockingKernelClient().load_connection_file(get_connection_file())
    except Exception as error: print(type(error).__name__)
    k = get_ipython().kernel
    k.session.send(k.iopub_socket, 'stream', {'name': 'stdout', 'text': 'sent'}, parent=k.get_parent())
    message = k.session.msg('stream', {'name': 'stdout', 'text': '!'}, k.get_parent())
    k.iopub_socket.send_multipart(k.session.serialize(message))
    """
    assert client.run(code.replace("\n    ", "\n")) == "TraitError\nsent!"


def test_a_kernel_that_writes_nonsense_ends_with_its_sandbox_and_nothing_else(tmp_path: Path) -> None:
    manager = SandboxManager(tmp_path / "state", RunscRuntime(state_dir=str(tmp_path / "state")))
    thread = LinkThread.instance()
    made = thread.submit(manager.create(spec())).result(150)
    other = Client(thread.submit(start(made)).result(60))
    code = """
    import os
    for name in os.listdir('/proc/self/fd'):
        path = '/proc/self/fd/' + name
        if os.path.lexists(path) and os.readlink(path).endswith(('-said', '-answers')):
            os.write(int(name), os.urandom(5000))
    """
    other.start(code.replace("\n    ", "\n"))
    wait_until(lambda: other.kernel.end, 100, "the kernel ends")
    assert other.kernel.end is not None
    assert other.kernel.end.cause is Cause.CRASHED
    assert "exceeded a limit" in other.kernel.end.message
    thread.submit(manager.stop(made)).result(100)


def test_how_a_kernel_ended_is_told_and_its_last_words_are_heard(sandbox: Sandbox) -> None:
    thread = LinkThread.instance()
    for code, cause in (
        ("import os; print('last', flush=True); os._exit(3)", Cause.EXITED),
        ("import os, signal; print('last', flush=True); os.kill(os.getpid(), signal.SIGKILL)", Cause.KILLED),
    ):
        client = Client(thread.submit(start(sandbox)).result(60))
        client.until(code, "last", timeout=60)
        end = wait_until(lambda client=client: client.kernel.end, 60, "its end is told")  # type: ignore[misc]
        assert end.cause is cause
        thread.submit(forget(sandbox, client.kernel)).result(150)
        assert not list(sandbox.directory.glob(f"link/{client.kernel.name}_*"))
        assert not (sandbox.directory / f"{client.kernel.name}.taken").exists()


async def forget(sandbox: Sandbox, kernel: Kernel) -> None:
    sandbox.forget_kernel(kernel)


def test_it_hangs_up_and_goes_on_with_what_was_said_meanwhile(client: Client) -> None:
    thread = LinkThread.instance()
    assert client.kernel.end is None
    request = client.until("import time\nfor i in range(6): print(i); time.sleep(0.3)", "0")
    late = client.start("'queued'")
    thread.submit(client.kernel.hang_up()).result(150)
    time.sleep(1)

    async def redial() -> None:
        client.kernel.redial()

    thread.submit(redial()).result(150)
    assert client.text(request) == "0\n1\n2\n3\n4\n5\n"
    assert client.reply(late)["content"]["status"] == "ok"
