"""A restart of a kernel has what the kernel had, whoever started it: the folder, the profile, hosts and names."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import nbformat
import pytest
import requests
from support.harness import Env, KernelClient, Server, wait_until

SHOW = "import json, os; print(json.dumps([sorted(os.listdir()), os.environ.get('JPY_SESSION_NAME'), 6 * 7]))"
#: A profile that the kernelspec does not name any more once the kernel runs.
PROFILES = {"small": {"memory": "700 MiB", "allowed_hosts": ["github.com"]}}


@pytest.fixture
def env(agentbox_env: Env) -> Env:
    agentbox_env.configure({"Policy": {"lease_timeout": 600.0, "profiles": PROFILES}})
    (agentbox_env.work / "study").mkdir()
    nbformat.write(nbformat.v4.new_notebook(), agentbox_env.work / "study" / "book.ipynb")
    write_kernelspec(agentbox_env, {"profile": "small"})
    return agentbox_env


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


def start(env: Env) -> Server:
    server = Server(env, "server", (), {})
    server.wait_ready()
    return server


def crash(server: Server) -> None:
    server.process.kill()
    server.stop(signal.SIGKILL)


def describe(server: Server, kernel_id: str) -> tuple[object, ...]:
    """Tell of a kernel's sandbox what a restart has to keep."""
    found = server.call("GET", f"api/agentbox/sandboxes/{kernel_id}")
    hosts = server.call("GET", f"api/agentbox/sandboxes/{kernel_id}/egress")["hosts"]
    return found["profile"], found["limits"], found["workspace"], hosts


def assert_same(server: Server, client: KernelClient, shown: str, described: tuple[object, ...], folder: Path) -> None:
    assert "NameError" in client.execute("x").error, "it was restarted"
    assert client.check(SHOW) == shown
    assert describe(server, client.id) == described
    client.check("open('result.csv', 'w').write('1')")
    assert (folder / "result.csv").read_text() == "1"


@pytest.mark.parametrize("how", ["restarted", "died", "parked", "forked"])
def test_after_a_crash_of_the_server_a_restart_has_what_the_kernel_had(env: Env, how: str) -> None:
    first = start(env)
    client = first.notebook("study/book.ipynb", "box")
    client.check("x = 41")
    shown = client.check(SHOW)
    assert json.loads(shown) == [["book.ipynb"], "/workspace/book.ipynb", 42]
    described = describe(first, client.id)
    if how == "parked":
        first.call("POST", f"api/agentbox/sandboxes/{client.id}/park")
    crash(first)
    write_kernelspec(env, {})

    with env.server("server") as second:
        again = KernelClient(second, client.id, client.session)
        if how == "forked":
            fork = second.call("POST", f"api/agentbox/sandboxes/{client.id}/fork", {"as_kernel": True})
            again = KernelClient(second, fork["kernels"][0]["id"])
        if how == "died":
            assert again.execute("import os; os._exit(1)").death == "restarting"
            wait_until(lambda: again.execute("1").reply.get("status") == "ok", 60, "it was restarted by itself")
        else:
            again.restart()
        assert_same(second, again, shown, described, env.work / "study")
        again.restart()  # and once more: the first one leaves what the second goes by
        (env.work / "study" / "result.csv").unlink()
        assert_same(second, again, shown, described, env.work / "study")


@pytest.mark.parametrize("is_adopted", [False, True], ids=["same server", "after a crash"])
@pytest.mark.parametrize("how", ["restarted", "died"])
def test_a_restart_in_a_folder_that_was_renamed_is_refused_and_says_so(env: Env, how: str, is_adopted: bool) -> None:
    server = start(env)
    client = server.notebook("study/book.ipynb", "box")
    client.check("x = 41")
    if is_adopted:
        crash(server)
    (env.work / "study").rename(env.work / "renamed")
    if is_adopted:
        server = start(env)
        client = KernelClient(server, client.id, client.session)
        # It goes on where it is.
        assert client.check("open('later.csv', 'w').write('1'); print(x)") == "41\n"
        assert (env.work / "renamed" / "later.csv").exists()
    sentence = f"the work folder {env.work / 'study'} was renamed, moved or deleted"
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
        (env.work / "renamed").rename(env.work / "study")
        client.restart()
        client.check("open('found.csv', 'w').write('1')")
        assert (env.work / "study" / "found.csv").exists()
    assert not list(env.base.rglob("lost.csv"))
    server.stop()
    wait_until(lambda: not env.sandboxes(), 60, "no sandbox is left")


def test_a_first_start_in_a_folder_that_is_not_there_says_that_files_will_be_lost(env: Env) -> None:
    program = (
        "from jupyter_client.manager import start_new_kernel\n"
        "manager, client = start_new_kernel(kernel_name='agentbox', cwd='/nowhere/at/all')\n"
        "said = []\n"
        "client.execute_interactive('print(1)', output_hook=lambda m: said.append(m['content'].get('text', '')))\n"
        "client.execute_interactive('print(2)', output_hook=lambda m: said.append(m['content'].get('text', '')))\n"
        "print(''.join(said))\n"
        "client.stop_channels(); manager.shutdown_kernel()\n"
    )
    (env.base / "program.py").write_text(program)
    output = env.run("python", env.base / "program.py").output
    assert output.count("the work folder /nowhere/at/all does not exist, so the kernel uses a private folder") >= 1
    shown = output[output.rindex("agentbox: ") :]
    assert shown.startswith("agentbox: the work folder /nowhere/at/all does not exist")
    assert [line for line in shown.splitlines() if line in ("1", "2")] == ["1", "2"]
