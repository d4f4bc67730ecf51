"""Sandboxes that an earlier server left are held to the policy of the one that takes them back."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
import requests
from support.harness import Env, KernelClient, Server, wait_until

MIB = 1 << 20
AGENTS = "api/agentbox/sandboxes"
HOSTS = ["github.com", "static.example.org", "db.example.org:5432"]
#: Sandboxes by the API, and their profiles.
PROFILES = {
    "a": "low",
    "b": "low",
    "m": "mounted",
    "g": "gone",
    "c": "crowd",
    "parked-a": "low",
    "parked-m": "mounted",
}


@dataclass
class Narrowed:
    """A server that took over what one with a wider policy left, which was killed."""

    server: Server
    #: Ids of kernels by their notebook's name.
    kernels: dict[str, str]
    #: Directories of sandboxes by name.
    directories: dict[str, Path]
    #: One for the sandbox ``a``.
    token: str


@pytest.fixture(scope="module")
def narrowed(make_env: Callable[..., Env]) -> Iterator[Narrowed]:
    env = make_env()
    (env.base / "shown").mkdir()
    for name in ("low", "folder", "hidden"):
        folder = env.data / "kernels" / name
        folder.mkdir(parents=True)
        stanza = {"provisioner_name": "agentbox-provisioner", "config": {"profile": name}}
        spec = {
            "argv": ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "metadata": {"kernel_provisioner": stanza},
        }
        (folder / "kernel.json").write_text(json.dumps(spec))
    widen(env)
    first = Server(env, "server", (), {})
    first.wait_ready()
    for name, profile in PROFILES.items():
        body = {"id": name, "profile": profile, "ports": [8000, 8001], "idle_timeout": 900, "max_life": 7200}
        first.call("POST", AGENTS, body)
    run(first, "parked-a", "x = 41")
    kernels = {name: open_notebook(first, name, name) for name in ("low", "folder", "hidden")}
    kernels["parked"] = open_notebook(first, "parked", "low")
    token = first.call("POST", f"{AGENTS}/a/tokens", {"name": "t", "verbs": ["read"], "life": 7200})["token"]
    directories = {
        name: env.state_dir / "sandboxes" / first.call("GET", f"{AGENTS}/{name}")["sandbox_id"]
        for name in (*PROFILES, *kernels.values())
    }
    for name in ("parked-a", "parked-m", kernels["parked"]):
        first.call("POST", f"{AGENTS}/{name}/park")
    first.process.kill()
    first.stop(signal.SIGKILL)
    narrow(env)
    with env.server("server") as second:
        yield Narrowed(second, kernels, directories, token)
    wait_until(lambda: not env.sandboxes(), 60, "no sandbox is left, long before the lease")


def open_notebook(server: Server, name: str, kernelspec: str) -> str:
    nbformat.write(nbformat.v4.new_notebook(), server.env.work / f"{name}.ipynb")
    kernel = server.notebook(f"{name}.ipynb", kernelspec)
    kernel.check("x = 41")
    return kernel.id


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


def test_what_an_earlier_server_left_is_held_to_todays_policy(narrowed: Narrowed) -> None:
    server, kernels = narrowed.server, narrowed.kernels
    listed = [item["id"] for item in server.call("GET", "api/kernels")]
    assert kernels["low"] in listed
    assert not {kernels["folder"], kernels["hidden"]} & set(listed)
    assert KernelClient(server, kernels["low"]).check("print(x)") == "41\n"
    for name in ("a", kernels["low"]):
        assert_narrow(server, name)
    assert_narrow(server, "a", narrowed.token)
    (record,) = server.call("GET", f"{AGENTS}/a/tokens")["tokens"]
    assert record["expires"] - record["created"] == 3000
    # It is so, and not only said.
    refused = run(server, "a", "import urllib.request as u; u.urlopen('http://github.com')")
    assert "Policy" in json.dumps(refused)
    assert_out_of_memory(server, "a")
    wrote = requests.put(
        server.url(f"{AGENTS}/b/files/content"),
        json={"path": "big", "text": "1" * (20 * MIB)},
        timeout=150,
        headers=dict(server.http.headers),
    )
    assert wrote.status_code >= 400, wrote.text
    # What can't be changed in a sandbox that runs has ended, and says why.
    log = server.log.read_text()
    for name, setting in (("m", "Policy.mounts"), ("g", "Policy.profiles"), ("c", "Policy.max_processes")):
        found = server.call("GET", f"{AGENTS}/{name}")
        assert (found["state"], found["end"]["setting"]) == ("ended", setting), found
        assert found["end"]["message"].startswith("it could not be taken over from an earlier server: ")
        assert found["end"]["message"] in log
    sentences = {"folder": "its profile now allows only private folders", "hidden": "now hides (.*, *.pem)"}
    for name, sentence in sentences.items():
        assert sentence in log
        rows = server.call("GET", "api/agentbox/audit?kind=lifecycle&limit=100")["rows"]
        assert any(sentence in json.dumps(row) for row in rows), name
    ended = [narrowed.directories[name] for name in ("a", "m", "g", "c", kernels["folder"], kernels["hidden"])]
    wait_until(lambda: not any(path.exists() for path in ended), 200, "they are gone long before their leases")


def test_what_an_earlier_server_parked_is_held_to_todays_policy_when_it_wakes(narrowed: Narrowed) -> None:
    server, kernel = narrowed.server, narrowed.kernels["parked"]
    for name in ("parked-a", kernel):
        server.call("POST", f"{AGENTS}/{name}/wake")
        assert run(server, name, "x")["result"]["data"]["text/plain"] == "41"
        assert_narrow(server, name)
    assert_out_of_memory(server, "parked-a")
    answer = requests.post(server.url(f"{AGENTS}/parked-m/wake"), headers=dict(server.http.headers), timeout=150)
    assert answer.status_code == 403
    assert "Policy.mounts" in answer.text
    assert server.call("GET", f"{AGENTS}/parked-m")["state"] == "parked"
