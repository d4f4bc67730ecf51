"""How kernels are started inside, and what both drivers do alike."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.embedded_client import Client, spec, start

from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
from jupyter_agentbox.sandbox.drivers import Kernel, prepare_argv
from jupyter_agentbox.sandbox.link.link import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.spec import Cause, End


def test_ipykernel_is_started_by_our_launcher_and_keeps_its_arguments() -> None:
    argv = prepare_argv(["/env/bin/python", "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "x", "--debug"])
    assert argv[:3] == ["/env/bin/python", "-Xfrozen_modules=off", "-c"]
    assert "launch_new_instance" in argv[3]
    assert argv[4:] == ["-f", "x", "--debug"]


def test_other_kernels_are_started_as_their_kernelspecs_say() -> None:
    for argv in (["R", "--slave", "-e", "IRkernel::main()"], ["python", "-m", "bash_kernel", "-f", "x"]):
        assert prepare_argv(argv) == argv


@pytest.fixture(scope="module", params=["relay", "auto"])
def client(
    request: pytest.FixtureRequest, has_runsc: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    state = tmp_path_factory.mktemp("driver") / "state"
    manager = SandboxManager(state, RunscRuntime(state_dir=str(state)))
    thread = LinkThread.instance()
    sandbox = thread.submit(manager.create(replace(spec(), driver=request.param))).result(150)
    made = Client(thread.submit(start(sandbox)).result(150))
    assert made.kernel.driver == ("relay" if request.param == "relay" else "embedded")
    made.reply(made.send("shell", "kernel_info_request", {}), timeout=60)
    yield made
    thread.submit(manager.stop(sandbox)).result(150)
    assert not list((state / "sandboxes").iterdir())


def test_requests_are_answered_on_every_channel(client: Client) -> None:
    assert client.run("print('out'); 6 * 7") == "out\n42"
    client.reply(client.send("control", "kernel_info_request", {}), "control")
    request = client.start("print(input('? '))")
    client.find(lambda channel, message: channel == "stdin" and message["content"]["prompt"] == "? ")
    client.send("stdin", "input_reply", {"value": "answer"})
    assert client.text(request) == "answer\n"


def test_much_is_carried_both_ways(client: Client) -> None:
    assert client.run(f"text = {'x' * 3_000_000!r}; print(text)", timeout=60) == "x" * 3_000_000 + "\n"


def test_a_signal_interrupts_and_an_end_is_told(client: Client) -> None:
    request = client.until("import time; print('go'); time.sleep(60)", "go")
    LinkThread.instance().submit(client.kernel.signal(signal.SIGINT)).result(60)
    assert client.reply(request)["content"]["ename"] == "KeyboardInterrupt"
    client.run("'whatever was to be aborted is past'")
    client.start("import os; os._exit(4)")
    assert ended(client.kernel).exit_code == 4


def ended(kernel: Kernel) -> End:
    deadline = time.monotonic() + 60
    while kernel.end is None:
        assert time.monotonic() < deadline, "its end is not told"
        time.sleep(0.02)
    assert kernel.end.cause is Cause.EXITED
    return kernel.end
