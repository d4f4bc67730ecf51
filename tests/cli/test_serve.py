"""``jupyter agentbox serve``: what it serves, to whom, and what it leaves behind."""

from __future__ import annotations

import signal
import stat
import subprocess
from collections.abc import Iterator

import pytest
import requests
from support.harness import Env, files_with, processes_naming, wait_until
from support.serving import Serving, run_all

from jupyter_agentbox.client import Client


@pytest.fixture(scope="module")
def env(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    env = Env(tmp_path_factory.mktemp("serve"), {"Policy": {"lease_timeout": 60.0}})
    # What an administrator has for another server, and must not widen this one.
    (env.config_dir / "jupyter_server_config.py").write_text(
        "c.ServerApp.ip = '0.0.0.0'\nc.IdentityProvider.token = ''\nc.PasswordIdentityProvider.token = 'known'\n"
        "c.ServerApp.allow_unauthenticated_access = True\nc.ServerApp.root_dir = '/'\n"
        "c.ServerApp.jpserver_extensions = {'jupyterlab': True}\n"
        "c.AgentboxKernelSpecManager.unsandboxed_kernelspecs = {'python3'}\n"
    )
    try:
        yield env
    finally:
        env.close()


@pytest.fixture(scope="module")
def serving(env: Env) -> Iterator[Serving]:
    serving = Serving(env, "--keep-sandboxes")
    yield serving
    serving.stop()


def test_it_serves_the_api_and_nothing_of_the_host(serving: Serving, env: Env) -> None:
    headers = {"Authorization": f"token {serving.token}"}

    def status(path: str, **options: object) -> int:
        return requests.get(serving.url + path, headers=headers, timeout=100, **options).status_code  # type: ignore[arg-type]

    assert status("api/agentbox/health") == 200
    assert status("agentbox/docs") == 200
    for path in (
        "api/contents",
        "files/etc/passwd",
        "api/terminals",
        "lab",
        "tree",
        "nbconvert/html/x",
        "api/sessions",
    ):
        assert status(path) == 404, path
    specs = requests.get(serving.url + "api/kernelspecs", headers=headers, timeout=100).json()
    assert (list(specs["kernelspecs"]), specs["default"]) == (["agentbox"], "agentbox")
    answer = requests.post(serving.url + "api/kernels", headers=headers, json={"name": "ir"}, timeout=100)
    assert (answer.status_code, "Offered kernels: agentbox" in answer.json()["message"]) == (404, True)
    answer = requests.post(serving.url + "api/kernels", headers=headers, json={"name": "python3"}, timeout=100)
    assert (answer.status_code, len(env.sandboxes())) == (201, 1)
    requests.delete(serving.url + f"api/kernels/{answer.json()['id']}", headers=headers, timeout=100)


def test_its_callers_allow_no_more_than_the_profile(serving: Serving) -> None:
    path = f"{serving.url}api/agentbox/sandboxes/asking"
    headers = {"Authorization": f"token {serving.token}"}
    with Client(serving.url, serving.token) as client, client.create(id="asking") as box:
        body = {"host": "blocked.example", "scope": "kernel"}
        for route in ("rules", "asks"):
            answer = requests.post(f"{path}/egress/{route}", headers=headers, json=body, timeout=100)
            assert (answer.status_code, answer.json()["reason"]) == (403, "policy_refused"), answer.text
            body.pop("scope", None)
        told = requests.get(f"{path}/egress", headers=headers, timeout=100).json()
        assert (told["may_allow"], told["rules"]) == ([], [])
        kernel = requests.post(
            serving.url + "api/kernels", headers=headers, json={"name": "agentbox"}, timeout=100
        ).json()
        told = requests.get(f"{serving.url}api/agentbox/sandboxes/{kernel['id']}/egress", headers=headers, timeout=100)
        assert told.json()["may_allow"] == []
        requests.delete(serving.url + f"api/kernels/{kernel['id']}", headers=headers, timeout=100)
        refused = box.exec("curl -sS -m 5 http://blocked.example/")
        assert "Blocked by sandbox: blocked.example:80. Ask your administrator" in refused.stdout + refused.stderr


def test_only_the_token_opens_it_and_no_log_or_command_line_has_it(serving: Serving, env: Env) -> None:
    for token in ("", "known", "x"):
        answer = requests.get(
            serving.url + "api/agentbox/sandboxes", headers={"Authorization": f"token {token}"}, timeout=100
        )
        assert answer.status_code in (401, 403)
    assert len(serving.token) >= 32
    assert serving.token not in serving.log.read_text()
    assert processes_naming(serving.token) == {}
    holders = files_with(serving.token, env.base, env.runtime)
    assert [path.name for path in holders] == [f"jpserver-{serving.process.pid}.json"]
    assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600


def test_it_listens_where_it_is_told_and_elsewhere_only_when_that_is_said_by_name(serving: Serving, env: Env) -> None:
    assert serving.url.startswith("http://127.0.0.1:")
    port = serving.url.rpartition(":")[2].strip("/")
    (env.work / "there").write_text("mine")
    found = run_all(
        env,
        ("serve", "--ip=0.0.0.0"),
        ("serve", "--ip=::"),
        ("serve", "--ip=example"),
        ("serve", "--token-file=there"),
        ("serve", f"--port={port}", "--token-file=token"),
    )
    assert [(ran.status, ran.out) for ran in found] == [(1, "")] * 5, found
    words = (
        "Add --remote",
        "Add --remote",
        "is not an IP address",
        "cannot be written",
        f"port {port} is not available",
    )
    assert all(word in ran.err for word, ran in zip(words, found, strict=True)), found
    assert not (env.work / "token").exists()
    assert (env.work / "there").read_text() == "mine"


def test_sandboxes_live_on_for_their_lease_or_end_with_it(serving: Serving, env: Env) -> None:
    with Client(serving.url, serving.token) as client:
        client.create(id="lasting", keep=True).run_code("x = 41")
    said = serving.stop(signal.SIGTERM)
    assert said == ""
    assert "the sandboxes run for another 60 s (Policy.lease_timeout)" in serving.log.read_text()
    following = Serving(env, "--token-file=token")
    try:
        assert following.token == ""
        assert stat.S_IMODE((env.work / "token").stat().st_mode) == 0o600
        token = (env.work / "token").read_text().strip()
        assert token != serving.token
        with Client(following.url, token) as client:
            found = wait_until(lambda: client.list(state="running"), 100, "the sandbox is there")
            assert [info.id for info in found] == ["lasting"]
            assert client.sandbox("lasting").exec("echo alive").stdout == "alive\n"
    finally:
        following.stop(signal.SIGINT)
    assert following.process.returncode == 0
    assert "the sandboxes have ended" in following.log.read_text()
    assert not (env.work / "token").exists()
    env.assert_clean()


def test_without_json_address_and_token_are_printed_once(env: Env) -> None:
    command = [word for word in Serving.command_line() if word != "--json"]
    with (env.base / "plain.log").open("w") as log:
        process = subprocess.Popen(command, env=env.variables, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    serving, token = process.stdout.readline(), process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=100)
    assert serving.startswith("serving http://127.0.0.1:")
    assert serving.endswith("/api/agentbox\n")
    assert token.startswith("token ")
    assert rest == ""
