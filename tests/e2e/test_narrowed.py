"""Sandboxes that an earlier server left are held to the policy of the one that takes them back."""

from __future__ import annotations

import json
import signal
from typing import Any

import nbformat
import pytest
import requests
from support.harness import Env, KernelClient, Server, wait_until

MIB = 1 << 20
AGENTS = "api/agentbox/sandboxes"
HOSTS = ["github.com", "static.example.org", "db.example.org:5432"]


@pytest.fixture
def env(agentbox_env: Env) -> Env:
    (agentbox_env.base / "shown").mkdir()
    for name in ("low", "folder", "hidden"):
        folder = agentbox_env.data / "kernels" / name
        folder.mkdir(parents=True)
        stanza = {"provisioner_name": "agentbox-provisioner", "config": {"profile": name}}
        spec = {
            "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "metadata": {"kernel_provisioner": stanza},
        }
        (folder / "kernel.json").write_text(json.dumps(spec))
        nbformat.write(nbformat.v4.new_notebook(), agentbox_env.work / f"{name}.ipynb")
    return agentbox_env


def widen(env: Env) -> None:
    profiles = {
        "low": {"memory": "1 GiB", "cpus": 2, "disk": "1 GiB"},
        "mounted": {"mounts": {"/data": str(env.base / "shown")}},
        "gone": {},
        "crowd": {"processes": 300},
        "folder": {},
        "hidden": {},
    }
    policy = {"allowed_hosts": HOSTS, "private_hosts": HOSTS[2:], "profiles": profiles}
    env.configure({"Policy": {"lease_timeout": 600.0, "max_token_life": 7200.0, **policy}})


def narrow(env: Env) -> None:
    profiles = {
        "low": {"memory": "400 MiB", "cpus": 1, "disk": "16 MiB"},
        "mounted": {},
        "crowd": {"processes": 200},
        "folder": {"workspace": "private"},
        "hidden": {"hidden_files": [".*", "*.pem"]},
    }
    policy: dict[str, Any] = {"allowed_hosts": ["static.example.org"], "max_ports": 1, "profiles": profiles}
    times = {"idle_timeout": 600.0, "max_idle_timeout": 600.0, "max_life": 3600.0, "max_token_life": 3000.0}
    env.configure({"Policy": {"lease_timeout": 600.0, **policy, **times}})


def start(env: Env) -> Server:
    server = Server(env, "server", (), {})
    server.wait_ready()
    return server


def create(server: Server, name: str, profile: str) -> None:
    body = {"id": name, "profile": profile, "ports": [8000, 8001], "idle_timeout": 900, "max_life": 7200}
    server.call("POST", AGENTS, body)
    run(server, name, "x = 41")


def run(server: Server, name: str, code: str) -> Any:
    return server.call("POST", f"{AGENTS}/{name}/code", {"code": code})


def assert_narrow(server: Server, name: str, token: str = "") -> None:
    headers = {"Authorization": f"token {token or server.token}"}
    found = requests.get(server.url(f"{AGENTS}/{name}"), headers=headers, timeout=150).json()
    limits = {"memory": 400 * MIB, "cpus": 1.0, "processes": 512, "disk": 16 * MIB}
    assert (found["state"], found["limits"], found["allowed_hosts"]) == ("running", limits, ["static.example.org"])
    if found["kind"] == "session":
        assert (found["ports"], found["idle_timeout"], found["max_life"]) == ([8000], 600.0, 3600.0)
    answer = requests.get(server.url(f"{AGENTS}/{name}/egress"), headers=headers, timeout=150).json()
    assert (answer["hosts"], answer["private_hosts"]) == (["static.example.org"], [])


def assert_out_of_memory(server: Server, name: str) -> None:
    ran = run(server, name, "block = b'1' * (600 << 20)")
    assert ran["status"] == "kernel_died", ran
    assert ran["end"]["message"] == "out of memory (limit 400 MiB)"
    server.call("DELETE", f"{AGENTS}/{name}")  # with the files that are kept of it


def test_what_an_earlier_server_left_is_held_to_todays_policy(env: Env) -> None:
    widen(env)
    first = start(env)
    for name, profile in (("a", "low"), ("b", "low"), ("m", "mounted"), ("g", "gone"), ("c", "crowd")):
        create(first, name, profile)
    token = first.call("POST", f"{AGENTS}/a/tokens", {"name": "t", "verbs": ["read"], "life": 7200})["token"]
    kernels = {name: first.notebook(f"{name}.ipynb", name) for name in ("low", "folder", "hidden")}
    for kernel in kernels.values():
        kernel.check("x = 41")
    first.process.kill()
    first.stop(signal.SIGKILL)
    narrow(env)

    second = start(env)
    assert [item["id"] for item in second.call("GET", "api/kernels")] == [kernels["low"].id]
    kernel = KernelClient(second, kernels["low"].id)
    assert kernel.check("print(x)") == "41\n"
    for name in ("a", kernel.id):
        assert_narrow(second, name)
    assert_narrow(second, "a", token)
    (record,) = second.call("GET", f"{AGENTS}/a/tokens")["tokens"]
    assert record["expires"] - record["created"] == 3000
    # It is so, and not only said.
    refused = run(second, "a", "import urllib.request as u; u.urlopen('http://github.com')")
    assert "Policy" in json.dumps(refused)
    assert_out_of_memory(second, "a")
    wrote = requests.put(
        second.url(f"{AGENTS}/b/files/content"),
        json={"path": "big", "text": "1" * (20 * MIB)},
        timeout=150,
        headers=dict(second.http.headers),
    )
    assert wrote.status_code >= 400, wrote.text
    # What can't be changed in a sandbox that runs has ended, and says why.
    log = second.log.read_text()
    for name, setting in (("m", "Policy.mounts"), ("g", "Policy.profiles"), ("c", "Policy.max_processes")):
        found = second.call("GET", f"{AGENTS}/{name}")
        assert (found["state"], found["end"]["setting"]) == ("ended", setting), found
        assert found["end"]["message"].startswith("it could not be taken over from an earlier server: ")
        assert found["end"]["message"] in log
    for name, sentence in (("folder", "its profile now allows only private folders"), ("hidden", "now hides (*.pem)")):
        assert sentence in log
        rows = second.call("GET", "api/agentbox/audit?kind=lifecycle&limit=100")["rows"]
        assert any(sentence in json.dumps(row) for row in rows), name
    wait_until(lambda: len(env.sandboxes()) == 2, 200, "the others are gone long before their leases")
    second.stop()
    wait_until(lambda: not env.sandboxes(), 60, "no sandbox is left")


def test_what_an_earlier_server_parked_is_held_to_todays_policy_when_it_wakes(env: Env) -> None:
    widen(env)
    first = start(env)
    create(first, "a", "low")
    create(first, "m", "mounted")
    kernel = first.notebook("low.ipynb", "low")
    kernel.check("x = 41")
    for name in ("a", "m", kernel.id):
        first.call("POST", f"{AGENTS}/{name}/park")
    first.process.kill()
    first.stop(signal.SIGKILL)
    narrow(env)

    second = start(env)
    for name in ("a", kernel.id):
        second.call("POST", f"{AGENTS}/{name}/wake")
        assert run(second, name, "x")["result"]["data"]["text/plain"] == "41"
        assert_narrow(second, name)
    assert_out_of_memory(second, "a")
    answer = requests.post(second.url(f"{AGENTS}/m/wake"), headers=dict(second.http.headers), timeout=150)
    assert answer.status_code == 403
    assert "Policy.mounts" in answer.text
    assert second.call("GET", f"{AGENTS}/m")["state"] == "parked"
    second.stop()
