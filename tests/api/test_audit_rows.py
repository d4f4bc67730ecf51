"""What becomes a row of the audit log: what was refused, what leaves the host, who came to look; and how it is read."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import websocket
from support.api import Api, Make, give
from support.harness import wait_until

from jupyter_agentbox.service.refusals import INTERVAL, MAX_REFUSALS, Refusals, Throttle
from jupyter_agentbox.storage.audit.log import AuditLog

SECRET = "canary-5f0d2b91"


def last_id(api: Api) -> int:
    return int(api.ok("GET", "/audit", params={"limit": 1})["rows"][-1]["id"])


def rows(api: Api, after: int, **filters: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.ok("GET", "/audit", params={"after_id": after, "limit": 1000, **filters})["rows"]
    return found


def test_every_refusal_is_a_row_without_what_was_sent(api: Api, make: Make, box: str) -> None:
    path = make(id="refused", allowed_hosts=[])
    reader = give(api, path, ["read"], name="reader")
    sandbox, before = api.ok("GET", path)["sandbox_id"], last_id(api)
    api.fails(403, "POST", "/sandboxes", {"allowed_hosts": ["not-allowed.example"], "env": {"A": SECRET}})
    reader.fails(403, "POST", path + "/exec", {"command": SECRET})
    reader.fails(403, "PUT", path + "/files/upload?path=a", SECRET.encode())
    reader.fails(403, "POST", "/sandboxes", {})
    reader.fails(404, "GET", box)
    api.fails(403, "POST", path + "/egress/asks", {"host": "not-allowed.example", "why": SECRET})
    api.fails(403, "PATCH", path, {"idle_timeout": 1e6})
    api.fails(403, "POST", path + "/exec", {"command": f"forbidden-program {SECRET}"})
    api.fails(404, "GET", "/sandboxes/none-such")  # nobody was refused anything

    def found() -> list[tuple[str, ...]]:
        mine = [row for row in rows(api, before, is_allowed="false") if row["kind"] in ("refusal", "call")]
        names = ("operation", "tool", "asked", "token_name")
        return [(row["sandbox"], row["reason"], *(row["detail"].get(name, "") for name in names)) for row in mine]

    expected = [
        ("-", "policy_refused", "create_sandbox", "", "", ""),
        (sandbox, "forbidden", "run_command", "", "refused", "reader"),
        (sandbox, "forbidden", "upload_file", "", "refused", "reader"),
        (sandbox, "forbidden", "create_sandbox", "", "", "reader"),
        (sandbox, "not_found", "get_sandbox", "", "shared", "reader"),
        (sandbox, "policy_refused", "ask_host", "", "not-allowed.example", ""),
        ("-", "policy_refused", "patch_sandbox", "", "refused", ""),
        (sandbox, "PolicyRefused", "", "bash", "", ""),
    ]
    wait_until(lambda: len(found()) >= len(expected), 60, "the rows are written")
    assert sorted(found()) == sorted(expected)
    assert SECRET not in json.dumps(rows(api, before))


def test_changes_of_terms_and_what_is_done_with_snapshots_are_rows(api: Api, make: Make) -> None:
    path = make(labels={"a": SECRET})
    sandbox, before = api.ok("GET", path)["sandbox_id"], last_id(api)
    api.ok("PATCH", path, {"idle_timeout": 100, "labels": {"team": SECRET}})
    saved = api.ok("POST", path + "/snapshots", {"name": "kept"})["id"]
    file = api("GET", f"/snapshots/{saved}/export").content
    imported = api.ok("POST", "/snapshots/import", file)["id"]
    for snapshot in (saved, imported):
        assert api("DELETE", f"/snapshots/{snapshot}").status_code == 204
    mine = [row for row in rows(api, before, kind="lifecycle") if row["sandbox"] == sandbox]
    told = [row["detail"] for row in mine]
    events = [(item["event"], item.get("snapshot")) for item in told]
    assert events == [
        ("changed", None), ("snapshot", saved), ("exported", saved), ("imported", imported),
        ("snapshot_deleted", saved), ("snapshot_deleted", imported),
    ]  # fmt: skip
    assert all(item["by"] for item in told if item["event"] != "snapshot")
    assert (told[0]["idle_timeout"], told[0]["labels"]) == (100, ["team"])
    assert SECRET not in json.dumps(mine)


def test_starts_are_counted_by_what_they_went_on_from(api: Api, make: Make) -> None:
    def counted() -> dict[str, float]:
        text = api.server.http.get(api.server.url("metrics"), timeout=60).text
        found = re.findall(r'^agentbox_starts_total{how="(\w+)"} (\S+)$', text, re.MULTILINE)
        return {how: float(number) for how, number in found}

    path, before = make(), counted()
    saved = api.ok("POST", path + "/snapshots", {})["id"]
    api.ok("POST", path + "/restore", {"snapshot": saved})
    fork = api.ok("POST", path + "/fork", {"snapshot": saved})["id"]
    assert api("DELETE", f"/sandboxes/{fork}").status_code == 204
    api.ok("POST", path + "/park")
    api.ok("POST", path + "/wake")
    after = counted()
    grown = {how: after[how] - before.get(how, 0) for how in ("restored", "forked", "woken")}
    assert grown == {"restored": 1, "forked": 1, "woken": 1}
    assert api("DELETE", f"/snapshots/{saved}").status_code == 204


def test_who_comes_to_a_port_or_a_terminal_is_a_row(api: Api, make: Make) -> None:
    path = make(ports=[8000])
    sandbox, before = api.ok("GET", path)["sandbox_id"], last_id(api)
    api.ok("POST", path + "/processes", {"command": "exec python3 -m http.server 8000"})
    wait_until(lambda: api("GET", path + "/ports/8000/").status_code == 200, 60, "the program listens")
    agent = give(api, path, ["read", "execute"], name="visitor")
    for _ in range(3):
        assert agent("GET", path + "/ports/8000/").status_code == 200
    agent.fails(403, "GET", path + "/ports/8001/")
    seen = [row for row in rows(api, before, kind="port") if row["sandbox"] == sandbox]
    assert [(row["port"], row["detail"].get("token_name")) for row in seen] == [(8000, None), (8000, "visitor")]

    terminal = api.ok("POST", path + "/terminals", {})["id"]
    address = api.url(f"{path}/terminals/{terminal}/socket").replace("http", "ws", 1)
    socket = websocket.create_connection(address, header=[f"Authorization: token {api.server.token}"], timeout=60)

    def attaches() -> list[dict[str, Any]]:
        return [row for row in rows(api, before, kind="call") if row["detail"].get("process") == terminal]

    attached = wait_until(attaches, 60, "the row is written")
    socket.close()
    assert [(row["sandbox"], row["is_allowed"], row["detail"]["tool"]) for row in attached] == [
        (sandbox, True, "terminal")
    ]


def test_the_log_is_read_page_by_page_and_exported_whole(api: Api, make: Make) -> None:
    path = make()
    sandbox = api.ok("GET", path)["sandbox_id"]
    log = AuditLog(api.server.env.state_dir / "audit.sqlite")
    for number in range(1500):
        log.record("call", sandbox, detail={"tool": "filler", "number": number})
    log.close()

    def ids(place: str, **query: Any) -> list[int]:
        return [row["id"] for row in api.ok("GET", path + place, params=query)["rows"]]

    exported = [json.loads(line)["id"] for line in api("GET", path + "/audit/export?kind=call").text.splitlines()]
    assert len(exported) == 1500
    assert ids("/audit", kind="call") == exported[-1000:], "the newest"
    first = ids("/audit", kind="call", after_id=0, limit=600)
    assert first == exported[:600], "from the beginning on"
    assert ids("/audit", kind="call", after_id=first[-1], limit=600) == exported[600:1200]
    assert ids("/audit", kind="call", before_id=exported[-600], limit=600) == exported[-1200:-600], "the older ones"
    middle = api.ok("GET", path + "/audit", params={"kind": "call", "after_id": exported[699], "limit": 1})["rows"][0]
    earlier = api("GET", path + f"/audit/export?kind=call&until={middle['time']!r}").text.splitlines()
    assert len(earlier) == 700
    assert api("GET", "/audit/export?kind=call").text.count('"filler"') == 1500
    assert api.fails(400, "GET", path + "/audit/export?limit=5")["field"] == "limit"


def test_a_flood_of_refusals_is_bounded_and_counted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = AuditLog(tmp_path / "audit.sqlite"), 1000.0
    monkeypatch.setattr("jupyter_agentbox.service.refusals.time", SimpleNamespace(monotonic=lambda: now))
    refusals = Refusals(lambda: log)
    for _ in range(MAX_REFUSALS + 500):
        refusals.note("run_command", {"by": "flooder"}, "forbidden", asked="x" * 1000)
    refusals.note("run_command", {"by": "other"}, "forbidden")
    now += INTERVAL
    refusals.note("run_command", {"by": "flooder"}, "forbidden")
    log._worker.submit(lambda: None).result(60)
    kept = log.query(limit=10_000)
    assert len(kept) == MAX_REFUSALS + 2
    assert (kept[-1].detail["left_out"], len(kept[0].detail["asked"])) == (500, 64)
    log.close()
    throttle = Throttle(1, 60.0)
    for number in range(5000):
        assert throttle.admit(number) == 0
    assert len(throttle._seen) <= 1000
