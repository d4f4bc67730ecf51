"""Jupyter's own terminals, over a real server's REST and websockets: in a sandbox where kernels are, else as ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_server.serverapp import ServerApp
from support.harness import CANARY, Env, Server, wait_until
from support.terminal import Terminal
from tornado.httpclient import HTTPClientError

ENFORCED = "--ServerApp.kernel_spec_manager_class=jupyter_agentbox.AgentboxKernelSpecManager"
EXTENSIONS = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True, 'jupyter_server_terminals': True}"
#: A server extension that has terminals made before ours is asked.
EARLY = """
def _jupyter_server_extension_points():
    return [{"module": "aaa_early"}]

def _load_jupyter_server_extension(server):
    manager = server.extension_manager
    manager.load_extension("jupyter_server_terminals")
    manager.extensions["jupyter_server_terminals"].enabled = False
"""


@pytest.fixture(scope="module")
def enforced(make_env: Callable[..., Env]) -> Iterator[Server]:
    # What only the server's command line says must hold in its terminals too.
    env = make_env()
    (env.work / "sub").mkdir()
    (env.work / "sub" / "note.txt").write_text("from outside\n")
    (env.work / "sub" / ".env").write_text(CANARY)
    (env.work / "sub" / "jupyter_agentbox.py").write_text("raise SystemExit('a sandbox wrote this')\n")
    with env.server("server", ENFORCED, EXTENSIONS, "--Policy.max_processes=77") as server:
        yield server


def test_a_terminal_is_inside_and_its_folder_is_the_work_folder(enforced: Server) -> None:
    terminal = Terminal(enforced, cwd="sub")
    terminal.send("set_size", 31, 97)
    assert "gVisor" in terminal.run("dmesg | head -1")
    assert "uid=1000(user)" in terminal.run("id")
    assert "No such file" in terminal.run("cat /etc/shadow")
    assert "from outside" in terminal.run("pwd; cat note.txt; cat .env; env")
    seen = terminal.run("pwd; cat .env; env; ls /root /home/*; cat /proc/*/environ")
    assert seen.startswith("/workspace\r\n")
    assert CANARY not in seen
    assert terminal.run("stty size") == "31 97\r\n"
    terminal.run("trap 'echo resi''zed' WINCH")
    terminal.send("set_size", 20, 50)
    terminal.expect("resized\r\n")
    assert terminal.run("stty size") == "20 50\r\n"
    terminal.run("echo inside > made.txt")
    assert (enforced.env.work / "sub" / "made.txt").read_text() == "inside\n"
    (sandbox,) = enforced.env.sandboxes()
    assert json.loads((sandbox / "state.json").read_text())["spec"]["limits"]["processes"] == 77
    terminal.send("stdin", "exit\r")
    terminal.wait_ended()
    wait_until(lambda: not enforced.env.sandboxes(), 60, "the sandbox ends with its shell")
    wait_until(lambda: enforced.call("GET", "api/terminals") == [], 60, "it is listed no more")


def test_a_deleted_terminal_takes_its_sandbox_along(enforced: Server) -> None:
    terminal = Terminal(enforced)
    assert "sub" in terminal.run("ls")
    enforced.call("DELETE", f"api/terminals/{terminal.name}")
    wait_until(lambda: not enforced.env.sandboxes(), 60, "the sandbox ends with its terminal")


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"shell_command": ["/bin/sh"]}, 400, "'shell_command' cannot be set"),
        ({"extra_env": {"PYTHONPATH": "."}}, 400, "'extra_env' cannot be set"),
        ({"cwd": "/etc"}, 403, "/etc is not a folder in the server's root directory"),
        ({"cwd": ".."}, 403, "is not a folder in the server's root directory"),
        ({"name": "../x"}, 400, "use letters, digits and underscores"),
    ],
)
def test_a_request_names_no_program_and_no_foreign_folder(
    enforced: Server, body: dict[str, object], status: int, sentence: str
) -> None:
    answer = enforced.http.post(enforced.url("api/terminals"), json=body, timeout=100)
    assert (answer.status_code, sentence in answer.json()["message"]) == (status, True), answer.text
    assert enforced.call("GET", "api/terminals") == []


def test_without_enforcement_terminals_are_the_hosts(make_env: Callable[..., Env]) -> None:
    env = make_env()
    with env.server("server", EXTENSIONS) as server:
        assert CANARY in Terminal(server).run("cat ~/secret.txt")
        assert env.sandboxes() == []


BOTH = {"jupyter_agentbox": True, "jupyter_server_terminals": True}


@pytest.mark.parametrize(
    "jp_server_config", [{"ServerApp": {"jpserver_extensions": BOTH}, "AgentboxExtension": {"terminals": "off"}}]
)
async def test_terminals_can_be_turned_off(jp_serverapp: ServerApp, jp_fetch: Callable[..., Any]) -> None:
    assert jp_serverapp.web_app.settings["terminals_available"] is False
    with pytest.raises(HTTPClientError, match="404"):
        await jp_fetch("api", "terminals", method="POST", body="{}")


@pytest.fixture
def early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "aaa_early.py").write_text(EARLY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "jp_server_config",
    [
        {
            "ServerApp": {
                "jpserver_extensions": {"aaa_early": True, **BOTH},
                "kernel_spec_manager_class": "jupyter_agentbox.AgentboxKernelSpecManager",
            }
        }
    ],
)
async def test_terminals_that_were_made_before_they_could_be_sandboxed_open_none(
    early: None, jp_serverapp: ServerApp, jp_fetch: Callable[..., Any]
) -> None:
    with pytest.raises(HTTPClientError) as caught:
        await jp_fetch("api", "terminals", method="POST", body="{}")
    assert caught.value.code == 403
    assert caught.value.response is not None
    assert b"Set TerminalsExtensionApp.terminal_manager_class" in caught.value.response.body
    assert json.loads((await jp_fetch("api", "terminals")).body) == []
