"""Every route, walked by those who may not: nobody, a cookie alone, a token for another sandbox, one who may only read.

Each call is one that would do something if it were let through, which the last test shows; on real gVisor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
import requests
import websocket
from jupyter_core.utils import ensure_async
from jupyter_server.auth.authorizer import Authorizer
from jupyter_server.auth.identity import User
from support.api import Api
from tornado.httpclient import HTTPClientError

from jupyter_agentbox.api import TABLE
from jupyter_agentbox.api.routes import Route

RUN = {"command": "touch done-by-run"}
CODE = {"code": "open('done-by-code', 'w').close()"}
#: What each operation is called with: a body, or the query of one that has none.
CALLS: dict[str, Any] = {
    "create_sandbox": {"id": "walked"}, "patch_sandbox": {"labels": {"done": "1"}}, "run_code": CODE,
    "stream_code": CODE, "create_context": {"name": "made"}, "run_command": RUN, "stream_command": RUN,
    "start_process": {"command": "touch done-by-process"}, "open_terminal": {}, "write_stdin": {"text": "x\n"},
    "signal_process": {"signal": "USR1"}, "resize_terminal": {"rows": 10, "columns": 20},
    "write_file": {"path": "done-by-write", "text": "x"}, "append_file": {"path": "a", "text": "x"},
    "edit_file": {"path": "a", "old": "hello", "new": "bye"}, "make_directory": {"path": "done-by-mkdir"},
    "move_file": {"source": "b", "target": "done-by-move"}, "copy_file": {"source": "a", "target": "done-by-copy"},
    "delete_file": {"path": "c"}, "import_files": {"folder": "datasets", "source": "a.csv", "target": "done-by-import"},
    "export_files": {"folder": "results", "source": "a", "target": "walked"}, "install_packages": {"packages": ["six"]},
    "stream_installation": {"packages": ["six"]}, "ask_host": {"host": "codeload.github.com"},
    "allow_host": {"host": "walk.example:8443"}, "revoke_host": {"host": "walk.example:8443"},
    "revoke_allowed_host": {"host": "walk.example:8443"}, "decide_ask": {"decision": "allow"}, "http_request": {"url": "https://walk.example.org/"},
    "add_folder": {"source": "/srv"}, "remove_folder": {"source": "/srv"}, "create_token": {"verbs": ["read"]},
    "read_file": {"path": "a"}, "stat_file": {"path": "a"}, "file_exists": {"path": "a"},
    "glob_files": {"pattern": "*"}, "grep_files": {"pattern": "x"}, "download_file": {"path": "a"},
    "upload_file": {"path": "done-by-upload"}, "upload_archive": {"path": "done-by-archive"},
    "wait_process": {"timeout": 0.1}, "take_snapshot": {"name": "done"}, "fork_sandbox": {"id": "walked-too"},
}  # fmt: skip
#: Those that take away what others are tried on; last in the walk of one who may.
LAST = (
    "kill_process", "remove_process", "delete_context", "revoke_token", "park_sandbox", "wake_sandbox",
    "restore_sandbox", "delete_snapshot", "delete_sandbox",
)  # fmt: skip
#: What the sandbox, which is an agent's and has no network, does not let its owner do either.
REFUSED = {
    "http_request": (403, "policy_refused"),
    "add_folder": (400, "invalid_request"),
    "remove_folder": (404, "not_found"),
}
#: Larger than what is buffered anywhere before a handler is asked.
BYTES = b"x" * 2_000_000


class Place:
    """A sandbox with one of everything that a path can name."""

    def __init__(self, path: str, names: dict[str, str]) -> None:
        self.path = path
        self.names = {"id": path.rpartition("/")[2], **names}

    def request(self, route: Route) -> tuple[str, bytes | None]:
        """Return path with query, and body."""
        path = route.path
        for name in route.parameters:
            path = path.replace(f"{{{name}}}", self.names[name])
        values = CALLS.get(route.name)
        if route.name == "restore_sandbox":
            values = {"snapshot": self.names["snapshot"]}
        if route.kind == "upload" or (route.body is None and values is not None):
            path += "?" + urlencode(values or {})
        if route.kind == "upload":
            return path, BYTES
        if route.body is not None:
            assert values is not None, f"this test knows no body for {route.name}"
            return path, msgspec.json.encode(values)
        return path, b"" if route.verb in ("post", "put", "patch") else None


@pytest.fixture(scope="module")
def place(api: Api) -> Iterator[Place]:
    path = "/sandboxes/" + api.ok("POST", "/sandboxes", {"id": "walk", "allowed_hosts": ["github.com"]})["id"]
    for name in ("a", "b", "c"):
        api.ok("PUT", path + "/files/content", {"path": name, "text": "hello"})
    api.ok("POST", path + "/contexts", {"name": "side"})
    process = api.ok("POST", path + "/terminals", {"argv": ["sh", "-c", "trap '' USR1; sleep 600"]})["id"]
    ask = api.ok("POST", path + "/egress/asks", {"host": "api.github.com"})["id"]
    token = api.ok("POST", path + "/tokens", {"verbs": ["read"], "name": "walked"})["info"]["id"]
    snapshot = api.ok("POST", path + "/snapshots", {})["id"]
    yield Place(path, {"process": process, "context": "side", "ask": ask, "token": token, "snapshot": snapshot})
    for name in ("walk", "walked", "walked-too"):
        api("DELETE", f"/sandboxes/{name}")
    for item in api.ok("GET", "/snapshots")["snapshots"]:
        api("DELETE", f"/snapshots/{item['id']}")


def state_of(api: Api, place: Place) -> Any:
    """Return all that a call could have changed."""
    info = api.ok("GET", place.path)
    return {
        "sandboxes": sorted(item["id"] for item in api.ok("GET", "/sandboxes")["sandboxes"]),
        "info": {name: info[name] for name in ("state", "labels", "allowed_hosts", "max_life", "idle_timeout")},
        "files": [
            (item["path"], item["size"], item["mtime"])
            for item in api.ok("GET", place.path + "/files", params={"recursive": "true"})["entries"]
        ],
        "processes": [(item["id"], item["state"]) for item in api.ok("GET", place.path + "/processes")["processes"]],
        "contexts": [item["name"] for item in api.ok("GET", place.path + "/contexts")["contexts"]],
        "asks": [(item["id"], item["state"]) for item in api.ok("GET", place.path + "/egress/asks")["asks"]],
        "tokens": [item["id"] for item in api.ok("GET", place.path + "/tokens")["tokens"]],
        "snapshots": [item["id"] for item in api.ok("GET", "/snapshots")["snapshots"]],
        "calls": [
            row["detail"]["tool"]
            for row in api.ok("GET", place.path + "/audit", params={"kind": "call", "is_allowed": "true"})["rows"]
            if row["detail"]["tool"] != "list"  # as this function does
        ],
    }


def walk(api: Api, place: Place, routes: list[Route], **options: Any) -> Iterator[tuple[Route, requests.Response]]:
    for route in routes:
        path, body = place.request(route)
        # A connection for each: one who is refused may be hung up on before all that is sent is read.
        with contextlib.closing(
            requests.request(route.verb, api.url(path), data=body, stream=True, timeout=150, **options)
        ) as answer:
            yield route, answer


def socket_status(api: Api, place: Place, **options: Any) -> int:
    try:
        websocket.create_connection(
            api.url(f"{place.path}/terminals/{place.names['process']}/socket").replace("http", "ws", 1),
            http_no_proxy=["127.0.0.1"], timeout=60, **options,
        ).close()  # fmt: skip
    except websocket.WebSocketBadStatusException as error:
        return int(error.status_code)
    return 101


def test_nobody_comes_in(api: Api, place: Place) -> None:
    before = state_of(api, place)
    for header in (None, "token wrong", f"Basic {api.server.token}"):
        headers = {"Authorization": header} if header else {}
        for route, answer in walk(api, place, TABLE, headers=headers):
            assert answer.status_code == 401, (route, header)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json()["reason"] == "unauthenticated"
            words = "authentication is required" if header is None else "was not issued by this server"
            assert words in answer.json()["message"]
        assert socket_status(api, place, header=headers) == 401
    assert state_of(api, place) == before


def test_a_token_for_another_sandbox_opens_nothing_of_this_one(api: Api, place: Place, box: str) -> None:
    before = state_of(api, place)
    token = api.ok("POST", box + "/tokens", {"verbs": ["read", "write", "execute", "restore"]})["token"]
    headers = {"Authorization": f"Bearer {token}"}
    harmless = {"get_health", "list_tools", "get_openapi"}
    for route, answer in walk(api, place, TABLE, headers=headers):
        if route.name in harmless:
            assert answer.ok, route
        elif route.takes_scope:
            assert answer.status_code == 404, (route, answer.text)
        else:
            assert answer.status_code == 403, (route, answer.text)
    assert socket_status(api, place, header=headers) == 404
    assert state_of(api, place) == before


def test_a_cookie_alone_changes_nothing(api: Api, place: Place) -> None:
    before = state_of(api, place)
    login = requests.get(api.server.url("agentbox/docs"), headers={"Authorization": f"token {api.server.token}"})
    cookies = login.cookies.get_dict()
    changing = [route for route in TABLE if route.verb != "get"]
    for route, answer in walk(api, place, changing, cookies=cookies):
        assert answer.status_code == 403, (route, answer.text)
        assert "_xsrf" in answer.json()["message"]
    for headers in ({"X-XSRFToken": "wrong"}, {"X-XSRFToken": cookies["_xsrf"], "Origin": "https://evil.example"}):
        for route, answer in walk(api, place, changing, cookies=cookies, headers=headers):
            assert answer.status_code in (403, 404), (route, headers)
    elsewhere = {"Origin": "https://evil.example"}
    reading = [route for route in TABLE if route.verb == "get"]
    for route, answer in walk(api, place, reading, cookies=cookies, headers=elsewhere):
        assert answer.status_code == 404, route
        assert "Access-Control-Allow-Origin" not in answer.headers
    cookie = "; ".join(f"{name}={value}" for name, value in cookies.items())
    assert socket_status(api, place, cookie=cookie, origin="https://evil.example") == 403
    assert state_of(api, place) == before
    # It is the header that was missing, and nothing else.
    answer = requests.post(
        api.url(place.path + "/exec"),
        json={"command": "id"},
        cookies=cookies,
        headers={"X-XSRFToken": cookies["_xsrf"]},
    )
    assert answer.ok


def test_a_token_to_read_reads_and_the_owner_does_all(api: Api, place: Place) -> None:
    before = state_of(api, place)
    token = api.ok("POST", place.path + "/tokens", {"verbs": ["read"]})["token"]
    routes = [route for route in TABLE if route.takes_scope]
    for route, answer in walk(api, place, routes, headers={"Authorization": f"Bearer {token}"}):
        if route.action == "read":
            assert answer.ok, (route, answer.text)
        else:
            assert answer.status_code == 403, (route, answer.text)
    assert socket_status(api, place, header=[f"Authorization: Bearer {token}"]) == 403
    after = state_of(api, place)
    after["tokens"].pop()
    assert {**after, "calls": 0} == {**before, "calls": 0}
    # No network, no archive, and no exported snapshot.
    left_out = {"install_packages", "stream_installation", "upload_archive", "import_snapshot"}
    left_out.add("revoke_allowed_host")  # revoke_host has left nothing to revoke
    assert socket_status(api, place, header=[f"Authorization: token {api.server.token}"]) == 101
    order = sorted(TABLE, key=lambda route: LAST.index(route.name) if route.name in LAST else -1)
    done = [route for route in order if route.name not in left_out]
    for route, answer in walk(api, place, done, headers={"Authorization": f"token {api.server.token}"}):
        if route.name in REFUSED:
            assert (answer.status_code, answer.json()["reason"]) == REFUSED[route.name], route
        else:
            assert answer.ok, (route, answer.text)


# -- the authorizer ----------------------------------------------------------------------------------


class Only(Authorizer):
    """Allows what is named, and everything of kernels."""

    actions: tuple[str, ...] = ()

    def is_authorized(self, handler: Any, user: Any, action: str, resource: str) -> bool:
        return action in self.actions or resource == "kernels"


@pytest.fixture
def jp_server_config(tmp_path: Any, has_runsc: None) -> dict[str, Any]:
    return {
        "ServerApp": {"jpserver_extensions": {"jupyter_agentbox": True}},
        "Policy": {"state_dir": str(tmp_path / "state"), "import_folders": {"datasets": "/srv"}},
    }


async def fetch(jp_fetch: Any, verb: str, path: str, body: bytes | None, **headers: str) -> tuple[int, Any]:
    """Make a call of a server in this process; return its status and what it answers."""
    path, _, query = path.partition("?")
    params = dict(item.split("=") for item in query.split("&")) if query else None
    try:
        answer = await jp_fetch(
            "api",
            "agentbox",
            *path.strip("/").split("/"),
            method=verb.upper(),
            params=params,
            body=body,
            headers=headers,
            request_timeout=150,
        )
    except HTTPClientError as error:
        return error.code, msgspec.json.decode(error.response.body) if error.response else None
    return answer.code, answer.body


async def test_one_who_may_only_read_reads_and_does_nothing(jp_fetch: Any, jp_serverapp: Any) -> None:
    settings = jp_serverapp.web_app.settings
    before, only = settings["authorizer"], Only(parent=jp_serverapp, identity_provider=settings["identity_provider"])
    inner = Place(
        "/sandboxes/inner", {"process": "none", "context": "none", "ask": "none", "token": "none", "snapshot": "0" * 20}
    )

    async def call(verb: str, path: str, body: bytes | None) -> tuple[int, Any]:
        return await fetch(jp_fetch, verb, path, body)

    assert (await call("POST", "/sandboxes", b'{"id": "inner"}'))[0] == 201
    settings["authorizer"] = only
    try:
        only.actions = ("read",)
        for route in TABLE:
            status, answer = await call(route.verb, *inner.request(route))
            if route.action == "read":
                assert status != 403, (route, answer)
            else:
                assert (status, answer["reason"]) == (403, "forbidden"), route
        only.actions = ()
        for route in TABLE:
            assert (await call(route.verb, *inner.request(route)))[0] == 403, route
        # One who may write makes tokens, but none that may more than itself.
        only.actions = ("read", "write")
        tokens = inner.path + "/tokens"
        assert (await call("POST", tokens, b'{"verbs": ["read", "write"]}'))[0] == 201
        status, answer = await call("POST", tokens, b'{"verbs": ["read", "execute"]}')
        assert (status, answer["reason"], answer["field"]) == (403, "forbidden", "verbs")
        listed = msgspec.json.decode((await call("GET", tokens, None))[1])["tokens"]
        assert [item["verbs"] for item in listed] == [["read", "write"]]
    finally:
        settings["authorizer"] = before
        assert (await call("DELETE", "/sandboxes/inner", None))[0] == 204


# -- several people on one server --------------------------------------------------------------------


async def test_nobody_finds_what_is_another_users(
    jp_fetch: Any, jp_serverapp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = jp_serverapp.web_app.settings["identity_provider"]
    original = provider.get_user

    async def get_user(handler: Any) -> Any:
        user = await ensure_async(original(handler))
        name = handler.request.headers.get("X-User")
        return User(name) if user is not None and name else user

    monkeypatch.setattr(provider, "get_user", get_user)

    async def ask(user: str, verb: str, path: str, body: bytes | None = None) -> Any:
        status, answer = await fetch(jp_fetch, verb, path, body, **{"X-User": user})
        assert 200 <= status < 300, (path, answer)
        return msgspec.json.decode(answer) if answer else None

    made = await ask("ann", "POST", "/sandboxes", b'{"id": "anns", "allowed_hosts": ["github.com"], "tenant": "lab"}')
    path = "/sandboxes/anns"
    process = (await ask("ann", "POST", path + "/processes", b'{"argv": ["sleep", "600"]}'))["id"]
    host = (await ask("ann", "POST", path + "/egress/asks", b'{"host": "api.github.com"}'))["id"]
    token = (await ask("ann", "POST", path + "/tokens", b'{"verbs": ["read"]}'))["info"]["id"]
    snapshot = (await ask("ann", "POST", path + "/snapshots", b'{"name": "anns-own"}'))["id"]
    await ask("ann", "PUT", path + "/files/content", b'{"path": "secret.txt", "text": "anns"}')
    names = {"process": process, "context": "default", "ask": host, "token": token, "snapshot": snapshot}
    anns = Place(path, names)
    secrets = {made["sandbox_id"], snapshot, process, host, token, "anns-own"}
    try:
        for route in TABLE:
            if route.name == "create_sandbox":
                continue
            verb, (target, body) = route.verb, anns.request(route)
            status, answer = await fetch(jp_fetch, verb, target, body, **{"X-User": "bob"})
            if route.parameters:
                assert (status, answer["reason"]) == (404, "not_found"), route
            else:
                text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
                assert not [secret for secret in secrets if secret in text], route
        # The name is free for another, and so is a tenant's, whose files are others.
        await ask("bob", "POST", "/sandboxes", b'{"id": "anns", "tenant": "lab"}')
        assert (await ask("bob", "GET", path + "/files"))["entries"] == []
        listed = (await ask("ann", "GET", "/sandboxes"))["sandboxes"]
        assert [item["sandbox_id"] for item in listed] == [made["sandbox_id"]]
        assert (await ask("ann", "GET", path + "/files"))["entries"][0]["path"] == "secret.txt"
        assert (await ask("ann", "GET", path + "/processes"))["processes"][0]["state"] == "running"
    finally:
        for user in ("ann", "bob"):
            await fetch(jp_fetch, "DELETE", path, None, **{"X-User": user})
        await fetch(jp_fetch, "DELETE", f"/snapshots/{snapshot}", None, **{"X-User": "ann"})
