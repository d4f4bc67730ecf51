"""Tokens for one sandbox over REST, on real gVisor: what they open, what they don't, and when they end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import websocket
from support.api import Api, Holder, Make, give
from support.harness import wait_until

from jupyter_agentbox.storage.audit.log import AuditLog

ALL = ["read", "write", "execute"]
CANARY = "canary-3e7b0d5c"


@pytest.fixture(scope="module")
def own(api: Api) -> Iterator[str]:
    """Path of a sandbox of this module."""
    yield "/sandboxes/" + api.ok("POST", "/sandboxes", {"id": "scoped", "allowed_hosts": ["github.com"]})["id"]
    api("DELETE", "/sandboxes/scoped")


def test_a_token_opens_one_sandbox_and_its_verbs(api: Api, own: str, box: str) -> None:
    agent = give(api, own, ALL, name="worker")
    info = api.ok("GET", own)
    assert agent.ok("GET", own)["sandbox_id"] == info["sandbox_id"]
    assert agent.ok("GET", f"/sandboxes/{info['sandbox_id']}")["id"] == "scoped"
    assert agent.ok("PUT", own + "/files/content", {"path": "a", "text": "hello"})["size"] == 5
    assert agent.ok("POST", own + "/exec", {"command": "cat a"})["stdout"] == "hello"
    assert agent.ok("PUT", own + "/files/upload", b"x" * 3_000_000, params={"path": "up"})["size"] == 3_000_000
    assert agent.ok("GET", "/health")["status"] == "ok"
    assert agent.ok("GET", "/tools")
    assert agent.ok("GET", "/openapi.json")
    for path in (box, "/sandboxes/none"):
        agent.fails(404, "GET", path)
        agent.fails(404, "POST", path + "/exec", {"command": "id"})
    agent.fails(404, "POST", own + "/files/import", {"sandbox": "shared", "source": ".", "target": "stolen"})
    reader = give(api, own, ["read"])
    assert reader.ok("GET", own + "/files/content", params={"path": "a"})["data"] == "hello"
    for verb, path, body in (
        ("PUT", "/files/content", {"path": "b", "text": "x"}),
        ("PUT", "/files/upload?path=b", b"x" * 3_000_000),
        ("POST", "/exec", {"command": "touch b"}),
        ("POST", "/code", {"code": "1"}),
        ("DELETE", "", None),
    ):
        assert reader.fails(403, verb, own + path, body)["reason"] == "forbidden"
    writer = give(api, own, ["write"])
    writer.fails(403, "GET", own + "/files/content", params={"path": "a"})
    writer.fails(403, "POST", own + "/exec", {"command": "touch b"})
    assert not api.ok("GET", own + "/files/exists", params={"path": "b"})["exists"]


def test_no_token_changes_the_terms_it_is_under(api: Api, own: str) -> None:
    agent = give(api, own, ALL)
    ask = agent.ok("POST", own + "/egress/asks", {"host": "codeload.github.com"})["id"]
    refused = [
        ("POST", f"{own}/egress/asks/{ask}", {"decision": "allow"}),
        ("POST", f"{own}/egress/rules", {"host": "walk.example"}),
        ("DELETE", f"{own}/egress/rules?host=walk.example", None),
        ("GET", "/egress/rules", None),
        ("DELETE", "/egress/rules?host=walk.example", None),
        ("PATCH", own, {"allowed_hosts": ["pypi"]}),
        ("PATCH", own, {"max_life": 60}),
        ("POST", own + "/tokens", {"verbs": ["read"]}),
        ("GET", own + "/tokens", None),
        ("DELETE", own + "/tokens/x", None),
        ("POST", "/sandboxes", {}),
        ("GET", "/sandboxes", None),
        ("GET", "/egress/asks", None),
        ("GET", "/audit", None),
        ("GET", "/audit/export", None),
        ("GET", "/audit/verify", None),
    ]
    for verb, path, body in refused:
        assert agent.fails(403, verb, path, body)["reason"] == "forbidden", path
    assert agent.ok("GET", f"{own}/egress/asks/{ask}")["state"] == "pending"
    assert api.ok("GET", own)["allowed_hosts"] == ["github.com"]
    for path in ("api/kernels", "api/contents", "api/terminals", "api/sessions", "metrics"):
        answer = agent.http.get(api.server.url(path), allow_redirects=False)
        assert answer.status_code in (302, 401, 403), path


def test_tokens_are_listed_and_revoked_and_never_shown_again(api: Api, own: str) -> None:
    made = api.ok("POST", own + "/tokens", {"verbs": ["read", "execute"], "name": "short", "life": 120})
    token, info = made["token"], made["info"]
    assert (info["name"], info["verbs"]) == ("short", ["read", "execute"])
    assert 100 < info["expires"] - time.time() <= 120
    listed = {item["id"]: item for item in api.ok("GET", own + "/tokens")["tokens"]}
    assert listed[info["id"]] == info
    holder = Holder(api, token, "token")
    holder.ok("GET", own)
    assert api("DELETE", f"{own}/tokens/{info['id']}").status_code == 204
    assert holder.fails(401, "GET", own)["reason"] == "unauthenticated"
    assert info["id"] not in [item["id"] for item in api.ok("GET", own + "/tokens")["tokens"]]
    api.fails(404, "DELETE", f"{own}/tokens/{info['id']}")
    api.fails(404, "DELETE", f"{own}/tokens/..%2fsession")
    for body, status, field in (
        ({}, 400, "verbs"),
        ({"verbs": []}, 400, "verbs"),
        ({"verbs": ["fly"]}, 400, "verbs"),
        ({"verbs": ["read"], "life": 0}, 400, "life"),
        ({"verbs": ["read"], "life": 86_401}, 403, "life"),
        ({"verbs": ["read"], "name": "a b"}, 400, "name"),
    ):
        assert api.fails(status, "POST", own + "/tokens", body)["field"] == field
    rows = api.ok("GET", own + "/audit", params={"kind": "token"})["rows"]
    mine = [row["detail"] for row in rows if row["detail"]["token"] == info["id"]]
    assert [(item["event"], bool(item["by"])) for item in mine] == [("created", True), ("revoked", True)]


def test_a_bad_token_is_nobody_and_never_the_cookie(api: Api, own: str) -> None:
    expired = give(api, own, ["read"], life=0.3).token
    revoked = api.ok("POST", own + "/tokens", {"verbs": ["read"]})
    api("DELETE", f"{own}/tokens/{revoked['info']['id']}")
    good = give(api, own, ALL).token
    browser = requests.Session()
    browser.trust_env = False
    browser.get(api.url("/health"), headers={"Authorization": f"token {api.server.token}"})
    assert browser.get(api.url(own)).ok
    time.sleep(0.4)
    bad = [
        f"Bearer {expired}", f"token {revoked['token']}", "Bearer agentbox_", f"Bearer {good}x",
        f"bearer {good[:-2]}AA", f"Basic {good}", good, f"xtoken {good}", f"Bearer {good} more",
        f"Bearer AGENTBOX_{good[9:]}", f"Bearer {good},Bearer {good}", "Token agentbox_" + "A" * 3000,
    ]  # fmt: skip
    for header in bad:
        answer = browser.get(api.url(own), headers={"Authorization": header})
        assert (answer.status_code, answer.json()["reason"]) == (401, "unauthenticated"), header[:40]
        assert "Set-Cookie" not in answer.headers
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        answer = browser.put(
            api.url(own + "/files/upload?path=bad"), b"x" * 3_000_000, headers={"Authorization": header}
        )
        assert answer.status_code == 401
    answer = browser.get(api.url(own), params={"token": good})
    assert answer.status_code == 401
    assert "Authorization" in answer.json()["message"]
    assert not api.ok("GET", own + "/files/exists", params={"path": "bad"})["exists"]
    # Good ones need neither cookie nor XSRF's header, and get no cookie.
    answer = requests.post(api.url(own + "/exec"), json={"command": "id"}, headers={"Authorization": f"BEARER  {good}"})
    assert answer.ok
    assert "Set-Cookie" not in answer.headers


def test_no_token_is_written_to_a_log(api: Api, own: str) -> None:
    """Tokens that were put into addresses, where they do not belong: in the query, in the path, in the Referer."""
    token = api.ok("POST", own + "/tokens", {"verbs": ["read"]})["token"]
    _, _, signature = token.rpartition(".")
    before = len(api.server.log.read_text())
    browser = requests.Session()
    browser.trust_env = False
    referer = {"Referer": api.url(own) + f"?q={token}"}
    for path in (
        f"{own}?token={token}", f"{own}?%74oken={token}", f"{own}?q={token}",
        f"{own}?token={token.replace('_', '%5F')}",
        f"/sandboxes/{token}", f"/sandboxes/{token}/files/content?path={token}", f"/nowhere/{token}",
    ):  # fmt: skip
        browser.get(api.url(path), headers=referer)
        api.http.get(api.url(path), headers=referer)
    for path in (f"api/contents/{token}?token={token}", f"api/kernels/{token}"):
        browser.get(api.server.url(path), headers=referer)
        api.http.get(api.server.url(path), headers=referer)
    agent = Holder(api, token)
    agent("POST", own + "/exec", {"command": "id"}, params={"q": token})
    assert agent("GET", f"/sandboxes/{token}").status_code == 404
    # Jupyter takes its own token there, and tells of it when the call fails.
    browser.get(api.url("/sandboxes/none"), params={"token": api.server.token})
    browser.get(api.url("/sandboxes/last-one"))
    wait_until(lambda: "last-one" in api.server.log.read_text()[before:], 60, "the last call is in the log")
    text = api.server.log.read_text()[before:]
    assert "agentbox_[secret]" in text
    assert signature not in text
    assert api.server.token not in text
    (audit,) = api.server.env.base.rglob("audit.sqlite")
    log = AuditLog(audit)
    wait_until(
        lambda: "agentbox_[secret]" in str(log.query(kind="refusal")), 60, "the refused call is in the audit log"
    )
    assert "agentbox_eyJ" not in str(log.query(limit=100_000))
    log.close()


def test_a_running_call_ends_with_its_token(api: Api, own: str) -> None:
    made = api.ok("POST", own + "/tokens", {"verbs": ["execute"]})
    agent = Holder(api, made["token"])
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            agent("POST", own + "/exec", {"command": "touch begun; sleep 200; touch over", "timeout": 250})
        )
    )
    thread.start()
    begun = {"path": "begun"}
    wait_until(lambda: api.ok("GET", own + "/files/exists", params=begun)["exists"], 60, "it runs")
    api("DELETE", f"{own}/tokens/{made['info']['id']}")
    thread.join(90)
    assert not thread.is_alive()
    assert answers[0].status_code == 401
    look = {"command": "pgrep -x sleep; true"}
    wait_until(lambda: api.ok("POST", own + "/exec", look)["stdout"] == "", 60, "the command has ended")
    assert not api.ok("GET", own + "/files/exists", params={"path": "over"})["exists"]


def connect(api: Api, path: str, protocols: list[str], **options: Any) -> websocket.WebSocket:
    return websocket.create_connection(
        api.url(path).replace("http", "ws", 1),
        subprotocols=protocols,
        http_no_proxy=["127.0.0.1"],
        timeout=60,
        **options,
    )


def test_a_browsers_terminal_brings_its_token_as_a_subprotocol(api: Api, own: str) -> None:
    made = api.ok("POST", own + "/tokens", {"verbs": ALL})
    agent = Holder(api, made["token"])
    name = agent.ok("POST", own + "/terminals", {})["id"]
    path = f"{own}/terminals/{name}/socket"
    socket = connect(api, path, ["agentbox", made["token"]])
    assert socket.getsubprotocol() == "agentbox"
    socket.send_binary(b"echo $((40 + 2))-ok\n")
    seen = b""
    while b"42-ok" not in seen:
        data = socket.recv()
        seen += data if isinstance(data, bytes) else data.encode()
    for protocols, status in (
        (["agentbox", made["token"] + "x"], 401),
        (["agentbox", give(api, own, ["read"]).token], 403),
        (["agentbox"], 401),
        (["agentbox", made["token"], give(api, own, ALL).token], 401),
    ):
        with pytest.raises(websocket.WebSocketBadStatusException) as caught:
            connect(api, path, protocols)
        assert caught.value.status_code == status
    with pytest.raises(websocket.WebSocketBadStatusException):
        connect(api, path + f"?token={made['token']}", [])
    api("DELETE", f"{own}/tokens/{made['info']['id']}")
    with pytest.raises(websocket.WebSocketException):
        while socket.recv_data(control_frame=True)[0] != websocket.ABNF.OPCODE_CLOSE:
            pass
        raise websocket.WebSocketConnectionClosedException
    socket.shutdown()  # the client's own close() does nothing after a close frame
    api("DELETE", f"{own}/processes/{name}")


def test_a_token_ends_with_its_sandbox_and_is_not_the_next_ones(api: Api, make: Make) -> None:
    path = make(id="again")
    agent = give(api, path, ALL)
    assert agent("DELETE", path).status_code == 204
    make(id="again")
    assert agent.fails(401, "GET", path)["reason"] == "unauthenticated"


def test_an_agent_undoes_what_it_did_with_a_token_for_that(api: Api, make: Make) -> None:
    path, other = make(allowed_hosts=["github.com", "codeload.github.com"]), make()
    made = api.ok("POST", f"{path}/tokens", {"verbs": ["read", "execute", "restore"], "name": "undoer"})
    agent, plain = Holder(api, made["token"]), give(api, path, ["read", "write", "execute"])
    revoked = api.ok("POST", f"{path}/tokens", {"verbs": ["read"]})
    foreign = api.ok("POST", other + "/snapshots", {})["id"]
    agent.ok("POST", path + "/code", {"code": "x = 'then'"})
    saved = agent.ok("POST", path + "/snapshots", {"name": "then"})["id"]
    agent.ok("POST", path + "/code", {"code": "x = 'later'"})
    # The record that is live goes on, never one of the snapshot's time.
    assert api("DELETE", f"{path}/tokens/{revoked['info']['id']}").status_code == 204
    assert plain.fails(403, "POST", path + "/restore", {"snapshot": saved})["reason"] == "forbidden"
    agent.fails(404, "POST", path + "/restore", {"snapshot": foreign})
    agent.fails(404, "POST", other + "/restore", {"snapshot": foreign})
    agent.fails(403, "POST", path + "/fork", {"snapshot": saved})
    for _ in range(2):
        assert agent.ok("POST", path + "/restore", {"snapshot": saved})["state"] == "running"
        assert agent.ok("POST", path + "/code", {"code": "x"})["result"]["data"]["text/plain"] == "'then'"
    plain.ok("GET", path)
    Holder(api, revoked["token"]).fails(401, "GET", path)
    # What its owner has narrowed since is not had back by going back.
    assert "github.com" in api.ok("GET", path)["allowed_hosts"]
    assert api.ok("PATCH", path, {"allowed_hosts": ["codeload.github.com"]})["allowed_hosts"] == ["codeload.github.com"]
    assert agent.ok("POST", path + "/restore", {"snapshot": saved})["allowed_hosts"] == ["codeload.github.com"]
    api.ok("PATCH", path, {"allowed_hosts": []})
    assert agent.ok("POST", path + "/restore", {"snapshot": saved})["allowed_hosts"] == []
    assert "github.com" in agent.fails(403, "POST", path + "/http", {"url": "https://github.com/"})["message"]
    fork = api.ok("POST", path + "/fork", {"snapshot": saved})
    assert fork["allowed_hosts"] == []
    assert api("DELETE", f"/sandboxes/{fork['id']}").status_code == 204
    agent.ok("POST", path + "/park")
    assert agent.ok("POST", path + "/code", {"code": "x"})["result"]["data"]["text/plain"] == "'then'"
    assert made["info"]["id"] in [item["id"] for item in api.ok("GET", path + "/tokens")["tokens"]]
    assert api("DELETE", f"{path}/tokens/{made['info']['id']}").status_code == 204
    agent.fails(401, "GET", path)
    for snapshot in (saved, foreign):
        assert api("DELETE", f"/snapshots/{snapshot}").status_code == 204


def test_a_token_from_the_shell_is_good_at_the_server(api: Api, own: str) -> None:
    env, program = api.server.env, "jupyter-agentbox"
    lines = env.run(program, "token", "create", "scoped", "--verbs=read,execute", "--life=900").output.splitlines()
    token = next(line for line in lines if line.startswith("agentbox_"))
    agent = Holder(api, token)
    assert agent.ok("POST", own + "/exec", {"command": "echo hi"})["stdout"] == "hi\n"
    agent.fails(403, "PUT", own + "/files/content", {"path": "a", "text": "x"})
    listed = json.loads(env.run(program, "token", "list", "--json").output)
    mine = [item for item in listed if item["verbs"] == ["read", "execute"] and item["expires"] < time.time() + 901]
    assert token not in json.dumps(listed)
    assert "revoked" in env.run(program, "token", "revoke", mine[-1]["id"]).output
    agent.fails(401, "GET", own)
    for arguments in (("create",), ("create", "scoped", "--verbs=fly")):
        assert env.run(program, "token", *arguments, check=False).code == 2
    for arguments in (("create", "none-such"), ("revoke", "x")):
        assert env.run(program, "token", *arguments, check=False).code == 1
    assert env.run(program, "token", "create", "scoped", "--life=1000000", check=False).code == 1


def test_the_log_names_tokens_and_holds_no_secret(api: Api, make: Make) -> None:
    path = make(env={"SECRET": CANARY}, files={"a": CANARY})
    agent = give(api, path, ALL, name="worker")
    agent.ok("POST", path + "/exec", {"command": f"echo {CANARY}; exit 3"})
    agent.ok("POST", path + "/code", {"code": f"x = '{CANARY}'; x"})
    agent.ok("PUT", path + "/files/content", {"path": "b", "text": CANARY})
    agent.ok("PUT", path + "/files/upload", CANARY.encode(), params={"path": "c"})
    agent.fails(404, "GET", path + "/files/content", params={"path": "none"})
    agent.fails(400, "POST", path + "/exec", {"command": CANARY, "cwd": "\0"})
    api.fails(403, "POST", path + "/exec", {"command": f"forbidden-program {CANARY}"})
    process = agent.ok("POST", path + "/processes", {"command": f"echo {CANARY}"})["id"]
    agent.ok("GET", f"{path}/processes/{process}/wait")
    rows = api.ok("GET", path + "/audit", params={"kind": "call"})["rows"]
    named = [row["detail"] for row in rows if row["detail"].get("token_name") == "worker"]
    assert {item["tool"] for item in named} >= {"bash", "run_code", "write", "read"}
    assert all(item["by"] and item["token"] for item in named)
    found = api.ok("GET", "/audit/verify")
    assert found["is_ok"], found
    assert api.ok("GET", "/audit/verify", params={"head": found["head"]})["is_ok"]
    text = api.server.env.run("jupyter-agentbox", "audit", "export").output
    assert json.loads(text.splitlines()[-1])["hash"]
    assert "ok: " in api.server.env.run("jupyter-agentbox", "audit", "verify", f"--head={found['head']}").output
    kept = [file.read_bytes() for file in api.server.env.state_dir.glob("audit.sqlite*")]
    kept += [text.encode(), api.server.log.read_bytes()]
    for secret in (CANARY, agent.token, agent.token.rpartition(".")[2]):
        assert not any(secret.encode() in content for content in kept), secret
    wrong = api.server.env.run("jupyter-agentbox", "audit", "verify", "--head=1:" + "0" * 64, check=False)
    assert (wrong.code, "BROKEN at row 1" in wrong.output) == (2, True)
