"""Sandboxes over REST: ids, filters, patches, ends, egress, audit; on real gVisor."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import websocket
from contract.sandboxes import FILL_MEMORY
from support.api import Api, Make
from support.harness import wait_until


def test_an_id_of_ones_own_is_made_once(api: Api, make: Make) -> None:
    request = {"id": "mine", "labels": {"a": "b"}, "files": {"d/x.txt": "hello", "b.bin": {"base64": "AAEC"}}}
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(api("POST", "/sandboxes", request))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200, 200, 201]
    assert len({answer.json()["sandbox_id"] for answer in answers}) == 1
    info = answers[0].json()
    assert (info["id"], info["state"], info["kind"], info["workspace"]) == ("mine", "running", "session", "private")
    error = api.fails(409, "POST", "/sandboxes", {"id": "mine"})
    assert (error["reason"], error["field"]) == ("conflict", "id")
    assert api.ok("POST", "/sandboxes/mine/exec", {"command": "cat d/x.txt; od -An -tx1 b.bin"})["stdout"] == (
        "hello 00 01 02\n"
    )
    assert api.ok("GET", f"/sandboxes/{info['sandbox_id']}")["id"] == "mine"
    listed = api.ok("GET", "/sandboxes", params={"label": "a=b", "state": "running"})["sandboxes"]
    assert [item["id"] for item in listed] == ["mine"]
    assert api.ok("GET", "/sandboxes", params={"label": ["a", "b"]})["sandboxes"] == []
    assert api("DELETE", "/sandboxes/mine").status_code == 204
    assert api.fails(404, "GET", "/sandboxes/mine")["reason"] == "not_found"
    api.fails(404, "DELETE", "/sandboxes/mine")


def test_what_is_wrong_is_named(api: Api) -> None:
    cases: list[tuple[Any, int, str | None]] = [
        ({"nonsense": 1}, 400, "nonsense"),
        ({"limits": {"memory": "lots"}}, 400, "memory"),
        ({"limits": {"memory": "900 GiB"}}, 403, "memory"),
        ({"limits": {"wings": 2}}, 400, "limits.wings"),
        ({"profile": "none such"}, 400, "profile"),
        ({"allowed_hosts": ["exa mple.org"]}, 400, "allowed_hosts"),
        ({"allowed_hosts": ["not-allowed.example.org"]}, 403, "allowed_hosts"),
        ({"idle_timeout": 10_000_000}, 403, "idle_timeout"),
        ({"idle_timeout": -1}, 400, "idle_timeout"),
        ({"id": "a/b"}, 400, "id"),
        ({"id": "a\n"}, 400, "id"),
        ({"tools": ["fly"]}, 400, "tools"),
        ({"packages": ["--index-url=http://evil"]}, 400, "packages"),
        ({"env": {"A=B": "x"}}, 400, "env"),
        ({"idle_policy": "sing"}, 400, "idle_policy"),
        ("[]", 400, None),
        ("{", 400, None),
        (b"\xff", 400, None),
        ("[" * 100_000, 400, None),
    ]
    for body, status, field in cases:
        error = api.fails(status, "POST", "/sandboxes", body)
        assert error.get("field") == field, (body, error)
    assert api.fails(403, "POST", "/sandboxes", {"limits": {"cpus": 99}})["setting"] == "Policy.max_cpus"
    assert api.fails(400, "GET", "/sandboxes", params={"stat": "running"})["field"] == "stat"
    error = api.fails(400, "POST", "/sandboxes", {"files": {"../evil": "x"}})
    assert error["field"] == "files"
    assert api.fails(405, "PUT", "/sandboxes", {})["reason"] == "method_not_allowed"
    assert api.fails(413, "PATCH", "/sandboxes/x", b"x" * 2_000_000)["reason"] == "too_large"
    assert [item["id"] for item in api.ok("GET", "/sandboxes", params={"state": "starting"})["sandboxes"]] == []


def test_lists_are_filtered_by_profile_and_tenant(api: Api, make: Make) -> None:
    made = {make(profile="small"), make(tenant="filtered"), make(profile="small", tenant="filtered")}
    own = {path.rpartition("/")[2] for path in made}

    def count(**filters: str) -> int:
        found = api.ok("GET", "/sandboxes", params=filters)["sandboxes"]
        assert all(item[name] == value for item in found for name, value in filters.items())
        return len(own & {item["id"] for item in found})

    assert [count(), count(profile="small"), count(tenant="filtered")] == [3, 2, 2]
    assert count(profile="small", tenant="filtered") == 1
    assert (count(profile="smal"), count(tenant="filtered2")) == (0, 0)


def test_the_cause_of_an_end_stays_until_it_is_revived(api: Api, make: Make) -> None:
    path = make(id="hog", profile="small")
    api.ok("PUT", path + "/files/content", {"path": "a/b.txt", "text": "precious"})
    token = api.ok("POST", path + "/tokens", {"verbs": ["read", "execute"], "name": "agent"})["token"]
    error = api.fails(410, "POST", path + "/exec", {"command": FILL_MEMORY})
    assert re.fullmatch(
        r"sandbox ended: out of memory \(limit 300 MiB\)\. Its files are kept until \d\d:\d\d:\d\d UTC; "
        "revive it to continue with them",
        error["message"],
    )
    info = api.ok("GET", path)
    assert (info["state"], info["end"]["cause"], info["end"]["exit_code"]) == ("ended", "out_of_memory", 137)
    assert api.fails(410, "GET", path + "/files")["reason"] == "sandbox_ended"
    listed = api.ok("GET", "/sandboxes", params={"state": "ended"})["sandboxes"]
    assert [item["id"] for item in listed] == ["hog"]
    assert info["end"]["kept_until"] == pytest.approx(time.time() + 3600, abs=200)
    # Its files stand in the way of its name, for another one.
    assert "delete it" in api.fails(409, "POST", "/sandboxes", {"id": "hog"})["message"]
    agent = Api(api.server, token)
    try:
        assert agent.ok("GET", path)["end"]["cause"] == "out_of_memory"
        revived = agent.ok("POST", path + "/revive")
        assert (revived["state"], revived["end"]) == ("running", None)
        assert agent.ok("GET", path + "/files/content", params={"path": "a/b.txt"})["data"] == "precious"
        assert agent.ok("POST", path + "/code", {"code": "print(open('a/b.txt').read())"})["stdout"] == "precious\n"
    finally:
        agent.http.close()
    assert api.ok("POST", path + "/revive")["sandbox_id"] == revived["sandbox_id"]
    api.ok("DELETE", path)
    assert api.fails(404, "POST", path + "/revive")["reason"] == "not_found"
    assert api.ok("POST", "/sandboxes", {"id": "hog"})["state"] == "running"
    kernel = api.server.kernel()
    assert "restart the kernel" in api.fails(409, "POST", f"/sandboxes/{kernel.id}/revive")["message"]
    kernel.shutdown()


def test_code_that_takes_all_memory_is_told_so_at_once(api: Api, make: Make) -> None:
    path = make(profile="small")
    eat = "x = [bytearray(60_000_000) for _ in range(10)]"
    began = time.monotonic()
    ran = api.ok("POST", path + "/code", {"code": eat, "timeout": 300}, timeout=310)
    assert time.monotonic() - began < 250
    assert ran["status"] == "kernel_died", ran
    assert ran["end"]["cause"] == "out_of_memory"


#: Allocates some 40 MB/s from 120 MB on, which the watch notices on a busy machine, too.
ALLOCATE = """
import time
kept = [bytearray(b"x" * 4_000_000) for _ in range(30)]
while True:
    kept.append(bytearray(b"x" * 4_000_000))
    time.sleep(0.1)
"""


def check_code_out_of_memory(api: Api, path: str) -> None:
    """Code that takes all memory ends its kernel, and nothing else of the sandbox."""
    before = api.ok("GET", path)["sandbox_id"]
    ran = api.ok("POST", path + "/code", {"code": f"open('file', 'w').write('precious')\n{ALLOCATE}", "timeout": 100})
    assert ran["status"] == "kernel_died", ran
    end = ran["end"]
    assert (end["cause"], end["exit_code"], end["message"]) == ("out_of_memory", 137, "out of memory (limit 300 MiB)")
    assert end["setting"] == "memory of the profile, Policy.max_memory"
    after = api.ok("POST", path + "/code", {"code": "print(open('file').read(), 'kept' in globals())"})
    assert after["stdout"] == "precious False\n"
    info = api.ok("GET", path)
    assert (info["state"], info["sandbox_id"], info["end"]) == ("running", before, None)


def test_a_program_out_of_memory_is_killed_alone_and_so_is_a_kernel(api: Api, make: Make) -> None:
    path = make(profile="small")
    child = f"import subprocess, sys; x = 41\nprint(subprocess.run([sys.executable, '-c', {ALLOCATE!r}]).returncode)"
    ran = api.ok("POST", path + "/code", {"code": child, "timeout": 100})
    assert (ran["status"], ran["stdout"]) == ("ok", "-9\n"), ran
    done = api.ok("POST", path + "/exec", {"argv": ["python3", "-c", ALLOCATE], "timeout": 100})
    assert (done["exit_code"], done["stdout"]) == (137, "")
    assert "MiB of 300 MiB (memory of the profile, Policy.max_memory)" in done["stderr"]
    assert api.ok("POST", path + "/code", {"code": "print(x + 1)"})["stdout"] == "42\n"
    assert api.ok("GET", path)["state"] == "running"
    rows = api.ok("GET", path + "/audit", params={"kind": "lifecycle"})["rows"]
    killed = [row for row in rows if row["detail"]["event"] == "killed"]
    assert [row["detail"]["cause"] for row in killed] == ["out_of_memory"] * 2
    check_code_out_of_memory(api, path)


def test_calls_are_activity_of_the_server_and_looks_are_none(api: Api, box: str) -> None:
    def last() -> str:
        return str(api.server.call("GET", "api/status")["last_activity"])

    before = last()
    for path in ("/sandboxes", box, box + "/egress", "/egress/asks"):
        api.ok("GET", path)
    assert last() == before
    api.ok("POST", box + "/exec", {"command": "true"})
    assert last() > before


def test_idle_ones_end_and_looking_is_no_use(api: Api, make: Make) -> None:
    old, idle, busy = make(max_life=6), make(idle_timeout=3), make()
    done = threading.Event()

    def use() -> None:
        api.ok("POST", busy + "/exec", {"command": "sleep 7; echo done"})
        done.set()

    thread = threading.Thread(target=use)
    thread.start()
    # It must not end before it is used.
    wait_until(lambda: api.ok("GET", busy)["calls"] or done.is_set(), 60, "it is in use")
    api.ok("PATCH", busy, {"idle_timeout": 3})
    wait_until(lambda: api.ok("GET", idle)["state"] == "ended", 60, "the idle one ends", pause=0.2)
    end = api.ok("GET", idle)["end"]
    assert (end["cause"], end["setting"]) == ("idle", "Policy.idle_timeout")
    thread.join()
    assert done.is_set()
    wait_until(lambda: api.ok("GET", old)["state"] == "ended", 60, "the old one ends", pause=0.2)
    assert api.ok("GET", old)["end"]["cause"] == "life_over"


def test_patching_and_asking_for_hosts(api: Api, make: Make) -> None:
    path = make(allowed_hosts=[])
    assert api.ok("GET", path + "/egress")["hosts"] == []
    error = api.fails(403, "POST", path + "/egress/asks", {"host": "example.org"})
    assert error["setting"] == "Policy.allowed_hosts"
    ask = api("POST", path + "/egress/asks", {"host": "github.com", "why": "to clone"})
    assert (ask.status_code, ask.json()["state"]) == (202, "pending")
    name = ask.json()["id"]
    verdicts = [
        api.ok("GET", path + "/egress", params={"host": host})["verdict"] for host in ("github.com", "x.example")
    ]
    assert [(verdict["may_allow"], verdict["scopes"]) for verdict in verdicts] == [(True, ["kernel"]), (False, [])]
    assert (verdicts[1]["setting"], "x.example" in verdicts[1]["message"]) == ("Policy.allowed_hosts", True)
    assert api.ok("POST", path + "/egress/asks", {"host": "github.com"})["id"] == name
    assert name in [item["id"] for item in api.ok("GET", "/egress/asks")["asks"]]
    allowed = api.ok("POST", f"{path}/egress/asks/{name}", {"decision": "allow"})
    assert (allowed["state"], bool(allowed["decided_by"])) == ("allowed", True)
    api.fails(409, "POST", f"{path}/egress/asks/{name}", {"decision": "deny"})
    assert api.ok("GET", path)["allowed_hosts"] == ["github.com"]
    assert api.ok("POST", path + "/egress/asks", {"host": "github.com"})["state"] == "allowed"
    other = api.ok("POST", path + "/egress/asks", {"host": "codeload.github.com"})["id"]
    assert api.ok("POST", f"{path}/egress/asks/{other}", {"decision": "deny", "note": "no"})["state"] == "denied"
    patched = api.ok("PATCH", path, {"allowed_hosts": [], "labels": {"x": "y"}, "idle_timeout": 60})
    assert (patched["allowed_hosts"], patched["labels"], patched["idle_timeout"]) == ([], {"x": "y"}, 60)
    assert api.fails(403, "PATCH", path, {"allowed_hosts": ["example.org"]})["field"] == "allowed_hosts"
    assert api.fails(403, "PATCH", path, {"max_life": 31_000_000})["setting"] == "Policy.max_life"
    api.fails(404, "GET", path + "/egress/asks/none")


def test_refusals_requests_and_the_log(api: Api, make: Make) -> None:
    path = make(allowed_hosts=["github.com"])
    ran = api.ok(
        "POST",
        path + "/exec",
        {"argv": ["python3", "-c", "import socket; socket.create_connection(('example.org', 443))"]},
    )
    assert ran["exit_code"] != 0
    assert [item["host"] for item in ran["refused"]] == ["example.org"]
    error = api.fails(403, "POST", path + "/http", {"url": "https://example.org/"})
    assert "example.org" in error["message"]
    for url in (
        "http://127.0.0.1:8888/",
        "http://[::1]/",
        "ftp://x.org/",
        "https://u:p@github.com/",
        "https://github.com/\r\nX: y",
        "https://:9/",
        "nonsense",
    ):
        assert api.fails(400, "POST", path + "/http", {"url": url})["field"] == "url"
    assert api.fails(400, "POST", path + "/http", {"url": "http://github.com/", "headers": {"Host": "x"}})["field"] == (
        "headers"
    )
    rows = api.ok("GET", path + "/egress/log", params={"is_allowed": "false"})["rows"]
    assert {row["host"] for row in rows} >= {"example.org"}
    kinds = {row["kind"] for row in api.ok("GET", path + "/audit")["rows"]}
    assert kinds >= {"lifecycle", "egress", "call"}
    exported = api("GET", path + "/audit/export")
    assert exported.headers["Content-Type"] == "application/jsonl"
    lines = [json.loads(line) for line in exported.text.splitlines()]
    assert {line["sandbox"] for line in lines} == {api.ok("GET", path)["sandbox_id"]}
    assert len(api.ok("GET", "/audit", params={"kind": "call", "limit": 3})["rows"]) == 3


def test_tools_and_commands_that_are_not_allowed(api: Api, make: Make) -> None:
    path = make(tools=["read", "bash"], blocked_commands=["git push*", "curl"])
    assert api.ok("GET", path)["tools"] == ["read", "bash"]
    error = api.fails(403, "PUT", path + "/files/content", {"path": "a", "text": "x"})
    assert "'write'" in error["message"]
    api.fails(403, "POST", path + "/code", {"code": "1"})
    for command in ("git push origin", "true; curl x", "X=1 sudo /usr/bin/curl", "forbidden-program"):
        assert api.fails(403, "POST", path + "/exec", {"command": command})["setting"] == "blocked_commands"
    assert api.fails(403, "POST", path + "/processes", {"argv": ["curl", "x"]})["field"] == "command"
    assert api.ok("POST", path + "/exec", {"command": "echo curl git push"})["stdout"] == "curl git push\n"
    api.fails(403, "POST", path + "/exec", {"command": "id", "user": "root"})
    denied = api.ok("GET", path + "/audit", params={"kind": "call", "is_allowed": "false"})["rows"]
    assert [row["detail"]["tool"] for row in denied] == ["write", "run_code", *["bash"] * 6]
    assert denied[-1]["reason"] == "PolicyRefused"


def test_a_tenants_files_stay(api: Api, make: Make) -> None:
    first = make(tenant="acme")
    api.ok("POST", first + "/exec", {"command": "echo kept > a; echo out > /mnt/user-data/outputs/b"})
    assert api("DELETE", first).status_code == 204
    second = make(tenant="acme")
    ran = api.ok("POST", second + "/exec", {"command": "cat a /mnt/user-data/outputs/b"})
    assert ran["stdout"] == "kept\nout\n", ran
    assert api.ok("GET", second + "/files/content", params={"path": "a"})["data"] == "kept\n"
    full = api.fails(413, "PUT", second + "/files/content", {"path": "big", "text": "x" * (9 << 20)})
    assert full["setting"] == "Policy.max_tenant_disk"
    other = make(tenant="other")
    listed = api.ok("POST", other + "/exec", {"command": "find /workspace /mnt/user-data/outputs -name '[ab]'"})
    assert listed["stdout"] == "", "another tenant's"


def test_a_caller_who_goes_away_leaves_no_sandbox(api: Api) -> None:
    before = len(api.ok("GET", "/sandboxes")["sandboxes"])
    with pytest.raises(requests.Timeout):
        api("POST", "/sandboxes", {"labels": {"left": "1"}}, timeout=0.05)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        found = api.ok("GET", "/sandboxes")["sandboxes"]
        if len(found) == before:
            break
        time.sleep(0.2)
    assert len(found) == before


def test_a_notebooks_sandbox_is_there_too(api: Api) -> None:
    kernel = api.server.kernel()
    try:
        kernel.check("shared = 41")
        path = f"/sandboxes/{kernel.id}"
        info = api.ok("GET", path)
        assert (info["kind"], info["kernels"][0]["id"]) == ("notebook", kernel.id)
        ran = api.ok("POST", path + "/code", {"code": "shared + 1"})
        assert ran["result"]["data"]["text/plain"] == "42"
        assert api.ok("GET", "/sandboxes", params={"kernel_id": kernel.id})["sandboxes"][0]["id"] == info["id"]
        usage = wait_until(lambda: api.ok("GET", path)["usage"], 60, "its use is measured")
        assert 0 < usage["memory"] <= info["limits"]["memory"]
        assert (usage["cpu"] > 0, abs(usage["time"] - time.time()) < 60) == (True, True)
        api.fails(409, "DELETE", path)
        api.fails(409, "PATCH", path, {"idle_timeout": 5})
        # What it may reach is the kernel's: neither a restart nor the code's own death gives a host back.
        assert info["allowed_hosts"] != []
        assert api.ok("PATCH", path, {"allowed_hosts": []})["allowed_hosts"] == []
        kernel.restart()
        restarted = api.ok("GET", path)
        assert (restarted["allowed_hosts"], restarted["sandbox_id"] == info["sandbox_id"]) == ([], False)
        kernel.start("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
        ended = {"event": "ended", "cause": "crashed", "kernel_id": kernel.id}
        log = f"/audit?kind=lifecycle&since={time.time() - 60}"
        wait_until(
            lambda: any(row["detail"].items() >= ended.items() for row in api.ok("GET", log)["rows"]),
            60,
            "the cause of the kernel's end is its sandbox's",
        )
        again = {"kernel_id": kernel.id, "state": "running"}
        (back,) = wait_until(lambda: api.ok("GET", "/sandboxes", params=again)["sandboxes"], 60, "it restarts")
        assert (back["allowed_hosts"], back["sandbox_id"] == restarted["sandbox_id"]) == ([], False)
    finally:
        kernel.shutdown()


def test_what_happens_is_counted_and_told(api: Api, make: Make) -> None:
    counted = api.counted
    names = (
        'agentbox_start_seconds_count{kind="session"}',
        'agentbox_start_seconds_count{kind="notebook"}',
        'agentbox_call_seconds_count{outcome="ok",tool="bash"}',
        'agentbox_egress_total{decision="denied"}',
        'agentbox_ends_total{cause="stopped"}',
    )
    before = {name: counted(name) for name in names}
    api.server.kernel().shutdown()
    events = websocket.create_connection(
        api.server.url("api/events/subscribe").replace("http", "ws", 1),
        header=[f"Authorization: token {api.server.token}"],
        http_no_proxy=["127.0.0.1"],
        timeout=100,
    )
    try:
        sandbox = make()
        running = {"state": "running"}
        wait_until(
            lambda: counted("agentbox_sandboxes ") == len(api.ok("GET", "/sandboxes", params=running)["sandboxes"]),
            60,
            "those that live are counted",
        )
        assert counted("agentbox_sandboxes ") >= 1
        api.ok("POST", sandbox + "/exec", {"command": "curl -s https://not-granted.example.org; true"})
        with ThreadPoolExecutor(1) as pool:
            line = "until [ -e /tmp/seen ]; do sleep 0.1; done"
            waiting = pool.submit(api.ok, "POST", sandbox + "/exec", {"command": line, "timeout": 90})
            calls = wait_until(lambda: api.ok("GET", sandbox)["calls"], 60, "a call is seen")
            api.ok("POST", sandbox + "/exec", {"command": "touch /tmp/seen"})
            waiting.result()
        assert [(call["tool"], call["token"]) for call in calls] == [("bash", None)]
        assert api.ok("GET", sandbox)["calls"] == []
        api("DELETE", sandbox)
        told = []
        while not any(event.get("event") == "ended" for event in told):
            told.append(json.loads(events.recv()))
    finally:
        events.close()
    assert {name: counted(name) - before[name] >= 1 for name in names} == dict.fromkeys(names, True)
    assert "started" in [event.get("event") for event in told]
    assert {event["kind"] for event in told if "kind" in event} == {"call"}
    ended = next(event for event in told if event.get("event") == "ended")
    assert (ended["message"], ended["kernel_id"]) == ("it was deleted", "")
    refused = [event for event in told if event.get("host") == "not-granted.example.org"]
    assert refused
    assert "Policy.allowed_hosts" in refused[0]["reason"]
