"""Libraries that reach into the kernel: they change signal handlers, serve in cells, and wait there for events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import nbformat
import pytest
from support.harness import Env, KernelClient, Server
from support.notebooks import read
from support.waiting import scaled, wait_until

#: What a cell does before, and what the next one waits in.
WAITS = {
    "a handler was removed": (
        "import asyncio, signal\nloop = asyncio.get_running_loop()\n"
        "loop.add_signal_handler(signal.SIGUSR1, print); loop.remove_signal_handler(signal.SIGUSR1)",
        "await asyncio.sleep(600)",
    ),
    "the handler of interrupts was removed": (
        "import asyncio, signal\nloop = asyncio.get_running_loop()",
        "loop.add_signal_handler(signal.SIGINT, print); loop.remove_signal_handler(signal.SIGINT)\n"
        "print('go', flush=True)\nawait asyncio.sleep(600)",
    ),
    "a server in the cell": (
        "import uvicorn\nasync def app(scope, receive, send): ...",
        "await uvicorn.Server(uvicorn.Config(app, port=8123, lifespan='off', log_level='critical')).serve()",
    ),
    "nested event loops": ("import asyncio, nest_asyncio\nnest_asyncio.apply()", "asyncio.run(asyncio.sleep(600))"),
    "after nested event loops": ("", "await asyncio.sleep(600)"),
}
BUTTON = (
    "import asyncio, ipywidgets, time\nclicks = []\nbutton = ipywidgets.Button()\n"
    "button.on_click(clicks.append)\nprint(button.model_id)"
)
POLLS = {
    "ui_events": "from jupyter_ui_poll import ui_events\nwith ui_events() as poll:\n"
    "    while not clicks and time.monotonic() < end: poll(10); time.sleep(0.05)",
    "asynchronous ui_events": "from jupyter_ui_poll import ui_events\nasync with ui_events() as poll:\n"
    "    while not clicks and time.monotonic() < end: await poll(10); await asyncio.sleep(0.05)",
    "do_one_iteration": "while not clicks and time.monotonic() < end:\n"
    "    await get_ipython().kernel.do_one_iteration(); time.sleep(0.05)",
}


@pytest.fixture(scope="module")
def server(make_env: Callable[..., Env]) -> Iterator[Server]:
    with make_env(config={"Policy": {"freeze_after": 2.0}}).server("server") as running:
        yield running


@pytest.fixture(scope="module")
def kernel(server: Server) -> Iterator[KernelClient]:
    client = server.kernel()
    yield client
    client.shutdown()


@pytest.mark.parametrize("name", WAITS)
def test_an_interrupt_ends_a_cell_again_and_again(kernel: KernelClient, name: str) -> None:
    before, wait = WAITS[name]
    kernel.check(f"kept = 7\n{before}")
    for code in (wait, wait, "await asyncio.sleep(600)", "time.sleep(600)"):
        request = kernel.start(f"import asyncio, time\nprint('go', flush=True)\n{code}")
        read_until(kernel, "go")
        time.sleep(0.5)
        began = time.monotonic()
        kernel.interrupt()
        kernel.finish(request, timeout=scaled(20))
        assert time.monotonic() - began < scaled(2), code
    kernel.interrupt()  # while nothing runs
    assert kernel.check("print(kept)") == "7\n"


def read_until(kernel: KernelClient, text: str) -> None:
    deadline = time.monotonic() + scaled(60)
    while text not in kernel.receive(deadline)["content"].get("text", ""):
        pass


@pytest.mark.parametrize("name", POLLS)
def test_a_click_arrives_while_a_cell_runs_and_the_next_cell_waits(kernel: KernelClient, name: str) -> None:
    comm = kernel.check(BUTTON).strip()
    poll = (
        f"print('go', flush=True)\nend = time.monotonic() + {scaled(20)}\n{POLLS[name]}\nprint('clicks', len(clicks))"
    )
    first = kernel.start(poll)
    read_until(kernel, "go")
    second = kernel.start("print('then', len(clicks)); clicks.append('next')")
    data = {"method": "custom", "content": {"event": "click"}}
    kernel.send("shell", "comm_msg", {"comm_id": comm, "data": data})
    assert "clicks 1\n" in kernel.finish(first).text
    assert kernel.finish(second).text == "then 1\n"
    assert kernel.check("print(clicks[1:])") == "['next']\n"


@pytest.mark.parametrize("name", ["agentbox", "mine"])
def test_a_notebook_runs_notebooks_that_were_saved_with_its_kernel(server: Server, name: str) -> None:
    folder = server.env.data / "kernels" / "mine"
    folder.mkdir(parents=True, exist_ok=True)
    stanza = {"provisioner_name": "agentbox-provisioner", "config": {}}
    argv = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Mine", "language": "python", "metadata": {"kernel_provisioner": stanza}}
    (folder / "kernel.json").write_text(json.dumps(spec))
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("import os\nx = 'child'\nprint(x, os.getppid() > 0, os.getcwd())")],
        metadata={"kernelspec": {"name": name, "display_name": "Sandboxed", "language": "python"}},
    )
    work = server.env.work / f"nested {name}"
    work.mkdir()
    nbformat.write(book, work / "child.ipynb")
    nbformat.write(nbformat.v4.new_notebook(), work / "parent.ipynb")
    parent = server.notebook(f"{work.name}/parent.ipynb", name)
    parent.check("import papermill\npapermill.execute_notebook('child.ipynb', 'out.ipynb', progress_bar=False)")
    assert read(work / "out.ipynb").strip() == "child True /workspace"
    if name == "mine":
        parent.check("!jupyter execute --inplace child.ipynb")
        assert read(work / "child.ipynb") == read(work / "out.ipynb")
    parent.shutdown()


def test_what_an_idle_notebook_has_scheduled_happens_in_time(server: Server) -> None:
    begun = time.time()
    notebook = server.notebook("scheduled.ipynb")
    notebook.check(
        "import asyncio, threading\nfrom pathlib import Path\n"
        "threading.Timer(10, lambda: Path('thread').touch()).start()\n"
        "async def later():\n    await asyncio.sleep(10)\n    Path('task').touch()\n"
        "task = asyncio.get_running_loop().create_task(later())"
    )
    files = [server.env.work / name for name in ("thread", "task")]
    wait_until(lambda: all(file.exists() for file in files), 60, "both have happened")
    assert all(file.stat().st_mtime - begun < scaled(15) for file in files)
    notebook.shutdown()
