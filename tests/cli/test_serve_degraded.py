"""``jupyter agentbox serve`` on a full or read-only disk, and with files of its own that are damaged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from support.harness import Env, wait_until
from support.serving import Serving, run, run_command

SIZE = 64 * 1024 * 1024


class Disk:
    """A small file system of its own, which is the state directory of an environment."""

    def __init__(self, env: Env) -> None:
        self.path = env.state_dir
        self.path.mkdir(parents=True)
        options = f"size={SIZE},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "agentbox-test", self.path], check=True, timeout=30)

    def fill(self) -> None:
        """Write until not a byte fits any more."""
        with (self.path / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def empty(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)

    def set_read_only(self, is_so: bool) -> None:
        options = f"remount,{'ro' if is_so else 'rw'}"
        subprocess.run(["mount", "-o", options, self.path], check=True, timeout=30)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", self.path], check=True, timeout=30)


@pytest.fixture
def env(has_runsc: None, tmp_path: Path) -> Iterator[Env]:
    env = Env(tmp_path / "jupyter", {"Policy": {"lease_timeout": 120.0}})
    try:
        yield env
    finally:
        env.close()


@pytest.fixture
def disk(env: Env) -> Iterator[Disk]:
    disk = Disk(env)
    yield disk
    env.close()
    disk.unmount()


class Api:
    """Calls of the API of ``serve``."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving

    def __call__(self, verb: str, path: str, body: Any = None) -> tuple[int, Any]:
        answer = requests.request(
            verb,
            f"{self.serving.url}api/agentbox{path}",
            json=body,
            headers={"Authorization": f"token {self.serving.token}"},
            timeout=150,
        )
        return answer.status_code, answer.json() if answer.content else None

    def ok(self, verb: str, path: str, body: Any = None) -> Any:
        status, answer = self(verb, path, body)
        assert status < 300, (verb, path, status, answer, self.serving.log.read_text()[-4000:])
        return answer

    def failing(self) -> dict[str, str]:
        """Return what fails of the checks of storage in ``/health``; others depend on the load of the machine."""
        health = self.ok("GET", "/health")
        failed = {check["name"]: check["message"] for check in health["checks"] if not check["is_ok"]}
        assert health["status"] == ("degraded" if failed else "ok")
        return {name: message for name, message in failed.items() if name in ("disk", "audit log", "runtime")}

    def kill(self) -> None:
        """End the server as a crash would."""
        self.serving.process.send_signal(signal.SIGKILL)
        self.serving.process.communicate()


@pytest.fixture
def serve(env: Env) -> Iterator[Callable[..., Api]]:
    made: list[Serving] = []

    def serve(*arguments: str) -> Api:
        made.append(Serving(env, *arguments))
        return Api(made[-1])

    yield serve
    for serving in made:
        if serving.process.poll() is None:
            serving.stop()


def test_on_a_full_disk_it_serves_what_is_there(env: Env, disk: Disk, serve: Callable[..., Api]) -> None:
    api = serve()
    assert api.failing() == {}
    api.ok("POST", "/sandboxes", {"id": "old"})
    assert api.ok("POST", "/sandboxes/old/code", {"code": "x = 41"})["status"] == "ok"
    api.kill()
    disk.fill()

    api = serve()
    assert "disk" in api.failing()
    assert "is full" in api.failing()["disk"]
    assert "Policy.state_dir" in api.failing()["disk"]
    assert [item["state"] for item in api.ok("GET", "/sandboxes")["sandboxes"]] == ["running"]
    assert api.ok("POST", "/sandboxes/old/code", {"code": "x + 1"})["result"]["data"]["text/plain"] == "42"
    for verb, path, body in (
        ("POST", "/sandboxes", {"id": "new"}),
        ("POST", "/sandboxes/old/snapshots", {}),
        ("POST", "/sandboxes/old/fork", {"id": "fork"}),
        ("POST", "/sandboxes/old/park", None),
        ("PUT", "/sandboxes/old/files/content", {"path": "big", "text": "x" * 1_000_000}),
    ):
        status, answer = api(verb, path, body)
        assert (status, answer["reason"]) == (507, "disk_full"), (path, answer)
        assert re.search("free some space|delete files", answer["message"].lower()), answer
    assert [item["id"] for item in api.ok("GET", "/sandboxes")["sandboxes"]] == ["old"]

    disk.empty()
    assert api.failing() == {}
    api.ok("POST", "/sandboxes", {"id": "new"})
    for name in ("old", "new"):
        api.ok("DELETE", f"/sandboxes/{name}")


def test_on_a_read_only_disk_it_says_so(env: Env, disk: Disk, serve: Callable[..., Api]) -> None:
    serve().serving.stop()
    disk.set_read_only(True)
    try:
        api = serve()
        assert api.failing()
        assert all("read-only" in message or "readonly" in message for message in api.failing().values())
        assert api.ok("GET", "/sandboxes") == {"sandboxes": []}
        status, answer = api("POST", "/sandboxes", {})
        assert (status, "read-only" in answer["message"]) == (503, True), answer
        api.serving.stop()
    finally:
        disk.set_read_only(False)


def test_with_a_damaged_audit_log_nothing_is_made_and_health_says_why(env: Env, serve: Callable[..., Api]) -> None:
    api = serve()
    api.ok("POST", "/sandboxes", {"id": "old"})
    api.kill()
    log = env.state_dir / "audit.sqlite"
    for path in env.state_dir.glob("audit.sqlite*"):
        path.write_bytes(b"no database" * 1000)
    api = serve()
    failing = api.failing()
    assert list(failing) == ["audit log"], failing
    message = failing["audit log"]
    assert "not a database" in message
    assert "Move it elsewhere" in message
    assert [item["state"] for item in api.ok("GET", "/sandboxes")["sandboxes"]] == ["running"]
    status, answer = api("POST", "/sandboxes", {})
    assert (status, answer["reason"]) == (503, "unavailable")
    assert "Move it elsewhere" in answer["message"]
    assert api("GET", "/audit")[0] == 503
    api.ok("DELETE", "/sandboxes/old")
    for path in env.state_dir.glob("audit.sqlite*"):
        path.unlink()
    assert api.failing() == {}
    made = api.ok("POST", "/sandboxes", {})["id"]
    api.ok("DELETE", f"/sandboxes/{made}")
    assert log.exists()


#: In turns of one and of the other file.
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "zeros": lambda data: bytes(len(data)),
    "deep": lambda data: b"[" * 200_000,
    "list": lambda data: b"[]",
    "shape": lambda data: json.dumps({**json.loads(data), "spec": 3, "request": 3}).encode(),
    "other": lambda data: json.dumps({**json.loads(data), "id": "../../other", "request": None}).encode(),
    "utf8": lambda data: data.replace(b'"id":"', b'"id":"\xff\xfe'),
}


def test_sandboxes_with_damaged_records_are_listed_as_lost_and_can_be_deleted(
    env: Env, serve: Callable[..., Api]
) -> None:
    api = serve("--AgentboxExtension.keep_sandboxes=True")
    places = {}
    for name in ("good", *DAMAGE):
        made = api.ok("POST", "/sandboxes", {"id": name})
        places[name] = env.state_dir / "sandboxes" / made["sandbox_id"]
        api.ok("PUT", f"/sandboxes/{name}/files/content", {"path": "kept.txt", "text": name})
    api.kill()
    damaged = {name: ("state.json", "session.json")[number % 2] for number, name in enumerate(DAMAGE)}
    for name, file in damaged.items():
        path = places[name] / file
        path.write_bytes(DAMAGE[name](path.read_bytes()))

    api = serve()
    listed = {item["sandbox_id"]: item for item in api.ok("GET", "/sandboxes")["sandboxes"]}
    assert sorted(listed) == sorted(path.name for path in places.values())
    assert listed[places["good"].name]["state"] == "running"
    for name, file in damaged.items():
        item = listed[places[name].name]
        assert item["state"] == "lost", item
        assert item["end"]["cause"] == "lost"
        assert file in item["end"]["message"]
        assert api.ok("GET", f"/sandboxes/{item['id']}") == item
        status, answer = api("POST", f"/sandboxes/{item['id']}/exec", {"command": "true"})
        assert (status, answer["reason"]) == (410, "sandbox_ended")
    printed = api.serving.run("ps")
    assert printed.out.count(" lost ") == len(damaged), printed.out
    machine = run(env, "list")
    assert f"{places['zeros'].name}: the record state.json" in machine.out

    assert api.serving.run("stop", listed[places["empty"].name]["id"]).status == 0
    for name in damaged:
        if name != "empty":
            api.ok("DELETE", f"/sandboxes/{listed[places[name].name]['id']}")
    assert [item["id"] for item in api.ok("GET", "/sandboxes")["sandboxes"]] == ["good"]
    assert api.ok("POST", "/sandboxes/good/exec", {"command": "cat kept.txt"})["stdout"] == "good"
    api.ok("DELETE", "/sandboxes/good")
    env.assert_clean()
    assert not list((env.state_dir / "lost").glob("*")) if (env.state_dir / "lost").exists() else True


def test_the_sweeper_keeps_the_files_of_one_whose_record_is_damaged(env: Env, serve: Callable[..., Api]) -> None:
    api = serve()
    made = api.ok("POST", "/sandboxes", {"id": "old"})
    api.ok("PUT", "/sandboxes/old/files/content", {"path": "kept.txt", "text": "kept"})
    api.kill()
    place, lost = env.state_dir / "sandboxes" / made["sandbox_id"], env.state_dir / "lost" / made["sandbox_id"]
    (place / "state.json").write_bytes(b"{")
    os.utime(place, (0, 0))  # older than any that is just being made
    wait_until(lost.exists, 60, "the sweeper has set it aside")
    assert not place.exists()
    assert (lost / "work" / "kept.txt").read_text() == "kept"
    wait_until(lambda: not env.processes(), 60, "its processes have ended")

    api = serve()
    (item,) = api.ok("GET", "/sandboxes")["sandboxes"]
    assert (item["id"], item["state"]) == ("old", "lost")
    api.ok("DELETE", "/sandboxes/old")
    assert not lost.exists()
    assert api.ok("GET", "/sandboxes") == {"sandboxes": []}


def test_a_server_that_cannot_serve_says_why_and_prints_no_address(env: Env) -> None:
    # Of the server alone, so that the command itself reads a sound policy.
    config = env.config_dir / "jupyter_server_config.py"
    (env.work / "taken").write_text("")
    for text, words in (
        ("c.Policy.runtime = 'none-such'", "Policy.runtime"),
        ("import jupyter_agentbox.jupyter.extension as it\nit.make_all = lambda base: 1 / 0", "division by zero"),
        (
            "from jupyter_agentbox.jupyter.extension import AgentboxExtension\n"
            "AgentboxExtension.initialize_handlers = lambda self: None",
            "failed its startup check",
        ),
    ):
        config.write_text(text)
        ran = run_command(("serve", "--json"), env.work, env.variables)
        assert (ran.status, ran.out) == (1, ""), (ran.out, ran.err[-3000:])
        assert words in ran.err, ran.err[-3000:]
    config.unlink()
    env.configure({"Policy": {"state_dir": str(env.work / "taken" / "below")}})
    ran = run_command(("serve", "--json"), env.work, env.variables)
    assert (ran.status, ran.out) == (1, "")
    assert "Not a directory" in ran.err


def test_a_jupyter_server_with_a_broken_policy_runs_and_the_api_says_what_is_wrong(env: Env) -> None:
    (env.config_dir / "jupyter_server_config.py").write_text("c.Policy.profiles = {'x': {'no_such_field': 1}}")
    with env.server("server", "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}") as server:
        assert server.http.get(server.url("api/kernelspecs"), timeout=60).ok
        for verb, path in (("GET", "health"), ("POST", "sandboxes"), ("DELETE", "sandboxes/x")):
            answer = server.http.request(verb, server.url(f"api/agentbox/{path}"), timeout=60)
            assert (answer.status_code, answer.json()["reason"]) == (503, "invalid_config"), answer.text
            assert "no_such_field" in answer.json()["message"]
