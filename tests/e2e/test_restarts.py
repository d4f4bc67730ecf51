"""A restart of a kernel has what the kernel had, whoever started it: the folder, the profile, hosts and names."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
import requests
from support.harness import Env, KernelClient, Server, wait_until

SHOW = "import json, os; print(json.dumps([sorted(os.listdir()), os.environ.get('JPY_SESSION_NAME'), 6 * 7]))"
#: A profile that the kernelspec does not name any more once the kernel runs.
PROFILES = {"small": {"memory": "700 MiB", "allowed_hosts": ["github.com"]}}
RESTARTS = ("restarted", "died", "parked", "forked")
#: Ways to be restarted.
ENDS = ("restarted", "died")


pytestmark = pytest.mark.timeout(600)


@dataclass
class Started:
    """A notebook's kernel, and what it was before."""

    kernel_id: str
    session: str
    folder: Path
    shown: str
    described: tuple[object, ...]

    def connect(self, server: Server) -> KernelClient:
        return KernelClient(server, self.kernel_id, self.session)


def open_notebook(server: Server, name: str) -> Started:
    """Start the kernel of a notebook in a folder of its own."""
    folder = server.env.work / name
    folder.mkdir()
    nbformat.write(nbformat.v4.new_notebook(), folder / "book.ipynb")
    client = server.notebook(f"{name}/book.ipynb", "box")
    client.check("x = 41")
    shown = client.check(SHOW)
    assert json.loads(shown) == [["book.ipynb"], "/workspace/book.ipynb", 42]
    return Started(client.id, client.session, folder, shown, describe(server, client.id))


@pytest.fixture(scope="module")
def crashed(make_env: Callable[..., Env]) -> Iterator[tuple[Server, dict[str, Started]]]:
    """A server, and kernels that it took over from one that was killed, by what is done with them."""
    env = make_env(config={"Policy": {"lease_timeout": 600.0, "profiles": PROFILES}})
    write_kernelspec(env, {"profile": "small"})
    first = Server(env, "server", (), {})
    first.wait_ready()
    started = {name: open_notebook(first, name) for name in (*RESTARTS, *(f"renamed {how}" for how in ENDS))}
    first.call("POST", f"api/agentbox/sandboxes/{started['parked'].kernel_id}/park")
    first.process.kill()
    first.stop(signal.SIGKILL)
    write_kernelspec(env, {})
    for how in ENDS:
        (env.work / f"renamed {how}").rename(env.work / f"elsewhere {how}")

    with env.server("server") as second:
        yield second, started
    wait_until(lambda: not env.sandboxes(), 60, "no sandbox is left, long before the lease")


def write_kernelspec(env: Env, config: dict[str, str]) -> None:
    folder = env.data / "kernels" / "box"
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "Box",
        "language": "python",
        "metadata": {"kernel_provisioner": {"provisioner_name": "agentbox-provisioner", "config": config}},
    }
    (folder / "kernel.json").write_text(json.dumps(spec))


def describe(server: Server, kernel_id: str) -> tuple[object, ...]:
    """Tell of a kernel's sandbox what a restart has to keep."""
    found = server.call("GET", f"api/agentbox/sandboxes/{kernel_id}")
    hosts = server.call("GET", f"api/agentbox/sandboxes/{kernel_id}/egress")["hosts"]
    return found["profile"], found["limits"], found["workspace"], hosts


def assert_same(server: Server, client: KernelClient, before: Started) -> None:
    assert "NameError" in client.execute("x").error, "it was restarted"
    assert client.check(SHOW) == before.shown
    assert describe(server, client.id) == before.described
    client.check("open('result.csv', 'w').write('1')")
    assert (before.folder / "result.csv").read_text() == "1"


@pytest.mark.parametrize("how", RESTARTS)
def test_after_a_crash_of_the_server_a_restart_has_what_the_kernel_had(
    crashed: tuple[Server, dict[str, Started]], how: str
) -> None:
    server, before = crashed[0], crashed[1][how]
    kernel = before.connect(server)
    if how == "forked":
        fork = server.call("POST", f"api/agentbox/sandboxes/{kernel.id}/fork", {"as_kernel": True})
        kernel = KernelClient(server, fork["kernels"][0]["id"])
    if how == "died":
        assert kernel.execute("import os; os._exit(1)").death == "restarting"
        wait_until(lambda: kernel.execute("1").reply.get("status") == "ok", 60, "it was restarted by itself")
    else:
        kernel.restart()
    assert_same(server, kernel, before)
    kernel.restart()  # and once more: the first one leaves what the second goes by
    (before.folder / "result.csv").unlink()
    assert_same(server, kernel, before)


@pytest.mark.parametrize("is_adopted", [False, True], ids=["same server", "after a crash"])
@pytest.mark.parametrize("how", ENDS)
def test_a_restart_in_a_folder_that_was_renamed_is_refused_and_says_so(
    crashed: tuple[Server, dict[str, Started]], how: str, is_adopted: bool
) -> None:
    server = crashed[0]
    renamed = server.env.work / f"elsewhere {how}"
    if is_adopted:
        before = crashed[1][f"renamed {how}"]
        client = before.connect(server)
        # It goes on where it is.
        assert client.check("open('later.csv', 'w').write('1'); print(x)") == "41\n"
        assert (renamed / "later.csv").exists()
    else:
        before = open_notebook(server, f"same server {how}")
        renamed = before.folder.rename(server.env.work / f"elsewhere on the same server {how}")
        client = before.connect(server)
    sentence = f"the work folder {before.folder} was renamed, moved or deleted"
    if how == "died":
        assert client.execute("import os; os._exit(1)").death == "restarting"
        wait_until(lambda: sentence in server.log.read_text(), 60, "it was not restarted")
    else:
        answer = requests.post(
            server.url(f"api/kernels/{client.id}/restart"), headers=dict(server.http.headers), timeout=150
        )
        assert answer.status_code == 500
        assert sentence in server.log.read_text()
        # Who runs a cell is told, and nothing has run anywhere.
        result = client.execute("open('lost.csv', 'w').write('1')")
        assert result.reply["status"] == "error"
        assert sentence in result.reply["evalue"]
        assert "shut down the kernel" in result.reply["evalue"]
        # Once the folder is back, so is the kernel.
        renamed.rename(before.folder)
        client.restart()
        client.check("open('found.csv', 'w').write('1')")
        assert (before.folder / "found.csv").exists()
    assert not list(server.env.base.rglob("lost.csv"))


@pytest.mark.parametrize("how", ENDS)
def test_a_restart_follows_a_notebook_whose_folder_was_renamed_in_jupyter(
    crashed: tuple[Server, dict[str, Started]], how: str
) -> None:
    server = crashed[0]
    before = open_notebook(server, f"followed {how}")
    client = before.connect(server)
    found = [item for item in server.call("GET", "api/sessions") if item["kernel"]["id"] == client.id]
    new = f"new name {how}"
    server.call("PATCH", f"api/contents/{before.folder.name}", {"path": new})
    server.call("PATCH", f"api/sessions/{found[0]['id']}", {"path": f"{new}/book.ipynb"})  # as JupyterLab does
    if how == "died":
        assert client.execute("import os; os._exit(1)").death == "restarting"
        wait_until(lambda: client.execute("1").reply.get("status") == "ok", 60, "it was restarted by itself")
    else:
        client.restart()
    assert client.check("import os; print(os.listdir())") == "['book.ipynb']\n"
    client.check("open('result.csv', 'w').write('1')")
    assert (server.env.work / new / "result.csv").exists()
    assert not before.folder.exists()


def test_a_first_start_in_a_folder_that_is_not_there_says_that_files_will_be_lost(agentbox_env: Env) -> None:
    program = (
        "from jupyter_client.manager import start_new_kernel\n"
        "manager, client = start_new_kernel(kernel_name='agentbox', cwd='/nowhere/at/all')\n"
        "said = []\n"
        "client.execute_interactive('print(1)', output_hook=lambda m: said.append(m['content'].get('text', '')))\n"
        "client.execute_interactive('print(2)', output_hook=lambda m: said.append(m['content'].get('text', '')))\n"
        "print(''.join(said))\n"
        "client.stop_channels(); manager.shutdown_kernel()\n"
    )
    (agentbox_env.base / "program.py").write_text(program)
    output = agentbox_env.run("python", agentbox_env.base / "program.py").output
    assert output.count("the work folder /nowhere/at/all does not exist, so the kernel uses a private folder") >= 1
    shown = output[output.rindex("agentbox: ") :]
    assert shown.startswith("agentbox: the work folder /nowhere/at/all does not exist")
    assert [line for line in shown.splitlines() if line in ("1", "2")] == ["1", "2"]
