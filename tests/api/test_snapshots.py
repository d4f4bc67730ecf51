"""Snapshots of live sandboxes over REST: save, go back, fork. Real checkpoints of real kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.api import Api
from support.harness import KernelClient, wait_until

Make = Callable[..., str]


def list_ids(api: Api) -> set[str]:
    """All snapshots of the server, other tests' among them."""
    return {item["id"] for item in api.ok("GET", "/snapshots")["snapshots"]}


def value(api: Api, path: str, code: str) -> str:
    ran = api.ok("POST", path + "/code", {"code": code}, timeout=180)
    assert ran["status"] == "ok", ran
    return str(ran["result"]["data"]["text/plain"])


def test_a_sandbox_goes_back_to_what_it_was(api: Api, make: Make) -> None:
    path = make(allowed_hosts=["pypi"])
    api.ok("POST", path + "/code", {"code": "x = 1\nopen('/tmp/layer', 'w').write('then')"})
    # A program that inherits all that the kernel does not close.
    api.ok("POST", path + "/code", {"code": "import os; os.system('sleep 600 > /dev/null 2>&1 < /dev/null &')"})
    api.ok("PUT", path + "/files/content", {"path": "kept.txt", "text": "then"})
    job = api.ok("POST", path + "/processes", {"command": "i=0; while true; do i=$((i+1)); echo $i; sleep 0.1; done"})
    time.sleep(0.5)
    answer = api("POST", path + "/snapshots", {"name": "before", "note": "all is well"})
    assert answer.status_code == 201, answer.text
    first = answer.json()
    assert (first["name"], first["parent"], first["is_folder_kept"]) == ("before", None, True)
    assert first["size"] > 10_000_000
    api.ok("POST", path + "/code", {"code": "x = 2\nopen('/tmp/layer', 'w').write('now')"})
    api.ok("PUT", path + "/files/content", {"path": "kept.txt", "text": "now"})
    api.ok("PUT", path + "/files/content", {"path": "new.txt", "text": "new"})
    second = api.ok("POST", path + "/snapshots", {"name": "after"})
    assert second["parent"] == first["id"]
    assert [item["id"] for item in api.ok("GET", path + "/snapshots")["snapshots"]] == [first["id"], second["id"]]

    back = api.ok("POST", path + "/restore", {"snapshot": first["id"]})
    assert back["state"] == "running"
    assert value(api, path, "x, open('/tmp/layer').read(), open('kept.txt').read()") == "(1, 'then', 'then')"
    api.fails(404, "GET", path + "/files/content?path=new.txt")
    counted = api.ok("GET", path + f"/processes/{job['id']}/output")
    later = f"{path}/processes/{job['id']}/output?offset={counted['next_offset']}"
    wait_until(lambda: api.ok("GET", later)["data"], 60, "what ran goes on")

    api.ok("POST", path + "/restore", {"snapshot": second["id"]})
    assert value(api, path, "x, open('kept.txt').read()") == "(2, 'now')"
    for item in (first, second):
        assert api("DELETE", f"/snapshots/{item['id']}").status_code == 204
    api.fails(404, "POST", path + "/restore", {"snapshot": first["id"]})
    assert value(api, path, "x") == "2", "a refused restore changes nothing"


def test_forks_go_their_own_ways(api: Api, make: Make) -> None:
    path = make()
    api.ok("POST", path + "/code", {"code": "import random, uuid, ssl\nx = ['origin']\nrandom.seed(1)"})
    kept, before = {"keep_seeds": True}, list_ids(api)
    forks = [api.ok("POST", path + "/fork", body) for body in ({"id": "left"}, kept, kept)]
    paths = [path, *(f"/sandboxes/{fork['id']}" for fork in forks)]
    try:
        assert forks[0]["id"] == "left"
        assert len({fork["sandbox_id"] for fork in forks}) == 3
        for number, place in enumerate(paths):
            assert value(api, place, f"x.append({number}); x") == f"['origin', {number}]"
        numbers = [value(api, place, "random.random(), uuid.uuid4().hex, ssl.RAND_bytes(8)") for place in paths]
        seeded = [number.split(",")[0] for number in numbers]
        assert len(set(numbers)) == 4
        assert seeded[2] == seeded[3] != seeded[1]
        now = time.time()
        assert now - 2 < float(value(api, paths[1], "import time; time.time()")) < time.time() + 2
        assert list_ids(api) == before, "nothing is left of what forks began with"
        api.fails(409, "POST", path + "/fork", {"id": "left"})
        assert [row["detail"]["event"] for row in api.ok("GET", paths[1] + "/audit?kind=lifecycle")["rows"]] == [
            "restored", "forked",
        ]  # fmt: skip
    finally:
        for place in paths[1:]:
            api("DELETE", place)


def test_four_forks_at_once_have_the_right_time_and_numbers_of_their_own(api: Api, make: Make) -> None:
    path = make()
    api.ok("POST", path + "/code", {"code": (
        "import threading, time, numpy\nnumpy.random.seed(1)\nthen, fired = time.monotonic(), []\n"
        "timer = threading.Timer(6, lambda: fired.append(time.monotonic()))\ntimer.start()"
    )})  # fmt: skip
    saved = api.ok("POST", path + "/snapshots", {})["id"]
    taken = time.monotonic()
    wait_until(lambda: time.monotonic() - taken > 3, 60, "time passes")

    def check_clock(place: str) -> None:
        before = time.time()
        inside, moved = map(float, value(api, place, "time.time(), time.monotonic() - then").strip("()").split(","))
        assert before - 2 < inside < time.time() + 2, "the clock is that of now"
        assert moved >= 0, "and the other one never goes back"
        wait_until(lambda: value(api, place, "len(fired)") == "1", 90, "what slept wakes")

    api.ok("POST", path + "/restore", {"snapshot": saved}, timeout=180)
    check_clock(path)
    with ThreadPoolExecutor(4) as pool:
        forks = list(pool.map(lambda _: api.ok("POST", path + "/fork", {"snapshot": saved}, timeout=300), range(4)))
    places = [f"/sandboxes/{fork['id']}" for fork in forks]
    try:
        check_clock(places[0])
        drawn = {value(api, place, "numpy.random.random()") for place in [path, *places]}
        assert len(drawn) == 5
    finally:
        for place in places:
            api("DELETE", place)
        api("DELETE", f"/snapshots/{saved}")


def test_what_was_running_goes_on_in_the_fork(api: Api, make: Make) -> None:
    path = make()
    api.ok("POST", path + "/code", {"code": "done = []"})
    code = "import time\nfor i in range(30):\n    print(i, flush=True); time.sleep(0.1)\ndone.append(i)"
    events = api.events("POST", path + "/code/stream", {"code": code})
    next(events)
    fork = api.ok("POST", path + "/fork", {})
    try:
        said = "".join(body["text"] for name, body in events if name == "stream" and body["name"] == "stdout")
        assert said.split()[-1] == "29", "the original went on"
        assert value(api, f"/sandboxes/{fork['id']}", "done") == "[29]"
    finally:
        api("DELETE", f"/sandboxes/{fork['id']}")


def test_bad_requests_name_the_field(api: Api, make: Make) -> None:
    path = make()
    assert api.fails(400, "POST", path + "/restore", {"snapshot": "../../x"})["field"] == "snapshot"
    assert api.fails(404, "POST", path + "/restore", {"snapshot": "0" * 20})["field"] == "snapshot"
    assert api.fails(400, "POST", path + "/snapshots", {"name": "a\nb"})["field"] == "name"
    before = list_ids(api)
    assert api.fails(409, "POST", path + "/fork", {"as_kernel": True})["field"] == "as_kernel", "it is no notebook's"
    assert list_ids(api) == before
    other = make()
    taken: dict[str, Any] = api.ok("POST", other + "/snapshots", {})
    assert "another sandbox" in api.fails(409, "POST", path + "/restore", {"snapshot": taken["id"]})["message"]
    assert api("DELETE", f"/snapshots/{taken['id']}").status_code == 204


def test_a_parked_sandbox_takes_nothing_and_wakes_at_its_next_use(api: Api, make: Make) -> None:
    path = make(id="sleeper", idle_policy="park", idle_timeout=1000)
    api.ok("POST", path + "/code", {"code": "x = 41"})
    api.ok("PUT", path + "/files/content", {"path": "kept.txt", "text": "kept"})
    before, others = api.ok("GET", path), list_ids(api)
    parked = api.ok("POST", path + "/park")
    assert (parked["state"], parked["end"], parked["sandbox_id"]) == ("parked", None, None)
    assert api.ok("POST", path + "/park")["state"] == "parked"
    assert "sleeper" in [item["id"] for item in api.ok("GET", "/sandboxes?state=parked")["sandboxes"]]
    assert list_ids(api) == others, "what it is parked as is nobody's to restore"
    assert value(api, path, "x + 1") == "42"
    awake = api.ok("GET", path)
    assert awake["state"] == "running"
    assert awake["sandbox_id"] != before["sandbox_id"]
    assert api.ok("GET", path + "/files/content?path=kept.txt")["data"] == "kept"
    # By its idle policy; then whatever call comes first, however many at once.
    api.ok("PATCH", path, {"idle_timeout": 1})
    wait_until(lambda: api.ok("GET", path)["state"] == "parked", 60, "it is parked", pause=0.2)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: api.ok("POST", path + "/exec", {"command": "cat kept.txt"}), range(4)))
    assert {answer["stdout"] for answer in answers} == {"kept"}
    api.ok("PATCH", path, {"idle_timeout": 1000})
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: api.ok("POST", path + "/park"), range(2)))
    assert [answer["state"] for answer in answers] == ["parked"] * 2
    assert api.ok("POST", path + "/wake")["state"] == "running"
    assert api.ok("POST", path + "/park")["state"] == "parked"
    assert api("DELETE", path).status_code == 204
    api.fails(404, "GET", path)


def test_a_notebooks_kernel_is_undone_under_its_open_socket_and_forked_into_another_kernel(api: Api) -> None:
    kernel = api.server.kernel()
    path = f"/sandboxes/{kernel.id}"
    kernel.check("import random\nrandom.seed(1)\nx = ['then']\nopen('kept.txt', 'w').write('then')")
    saved = api.ok("POST", path + "/snapshots", {"name": "then"})
    assert saved["sandbox"] == kernel.id

    api.fails(400, "POST", path + "/fork", {"as_kernel": True, "id": "mine"})
    fork = api.ok("POST", path + "/fork", {"as_kernel": True, "snapshot": saved["id"]})
    assert (fork["kind"], len(fork["kernels"])) == ("notebook", 1)
    other = KernelClient(api.server, fork["kernels"][0]["id"])
    assert other.id != kernel.id
    assert api.ok("GET", path)["sandbox_id"] != fork["sandbox_id"]
    assert other.check("x.append('fork'); print(x)") == "['then', 'fork']\n"
    drawn = "print(random.random())"
    assert kernel.check(drawn) != other.check(drawn), "a fork's generators are seeded anew"
    assert {item["id"] for item in api.server.call("GET", "api/kernels")} >= {kernel.id, other.id}

    kernel.check("x.append('later')")
    api.ok("PATCH", path, {"allowed_hosts": []})
    running = kernel.start("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    while kernel.receive(time.monotonic() + 90)["msg_type"] != "stream":
        pass
    api.ok("POST", path + "/restore", {"snapshot": saved["id"]})
    undone = kernel.finish(running, timeout=90)
    assert undone.reply["status"] == "aborted"
    assert not undone.death
    assert kernel.check("print(x)") == "['then']\n"
    assert api.ok("GET", path)["allowed_hosts"] == [], "what was narrowed since stays so"
    assert other.check("print(x)") == "['then', 'fork']\n"

    other.restart()
    assert other.check("print('x' in globals())") == "False\n"
    other.shutdown()
    kernel.shutdown()
    assert api("DELETE", f"/snapshots/{saved['id']}").status_code == 204


def test_an_exported_snapshot_is_imported_and_nothing_that_was_changed(api: Api, make: Make) -> None:
    path, before = make(), list_ids(api)
    api.ok("POST", path + "/code", {"code": "x = 'exported'"})
    saved = api.ok("POST", path + "/snapshots", {"name": "kept"})
    exported = api("GET", f"/snapshots/{saved['id']}/export")
    assert exported.status_code == 200
    assert exported.headers["Content-Type"] == "application/octet-stream"
    assert api("DELETE", f"/snapshots/{saved['id']}").status_code == 204
    content = bytearray(exported.content)
    assert len(content) > saved["cost"]

    answer = api("POST", "/snapshots/import", bytes(content))
    assert answer.status_code == 201, answer.text
    again = answer.json()
    assert (again["name"], again["sandbox"], again["owner"]) == ("kept", saved["sandbox"], saved["owner"])
    assert again["id"] != saved["id"]
    api.ok("POST", path + "/code", {"code": "x = 'later'"})
    api.ok("POST", path + "/restore", {"snapshot": again["id"]})
    assert value(api, path, "x") == "'exported'"

    content[len(content) // 2] ^= 1
    for wrong in (bytes(content), exported.content[:-1], exported.content + b"x", b"", b"no snapshot"):
        assert "message" in api.fails(409, "POST", "/snapshots/import", wrong)
    assert list_ids(api) == {*before, again["id"]}
    api.fails(404, "GET", f"/snapshots/{'0' * 20}/export")
    assert api("DELETE", f"/snapshots/{again['id']}").status_code == 204


def test_the_state_of_a_tenants_sandbox_shows_the_owners_own_folders_only(api: Api, make: Make) -> None:
    path = make(tenant="kept")
    saved = api.ok("POST", path + "/snapshots", {})
    assert not saved["is_folder_kept"]
    fork = api.ok("POST", path + "/fork", {"snapshot": saved["id"]})
    assert api("DELETE", f"/sandboxes/{fork['id']}").status_code == 204
    assert api("DELETE", f"/snapshots/{saved['id']}").status_code == 204
