"""What the API says over HTTP: to nobody, on unknown paths, to wrong values, and while a sandbox is being made."""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import requests
from support.api import Api
from support.harness import wait_until

from jupyter_agentbox.api.routes import TABLE


@pytest.mark.parametrize("verb", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_who_brings_no_token_is_asked_for_one(api: Api, box: str, verb: str) -> None:
    for path in ("/health", "/sandboxes", box, box + "/exec", box + "/ports/1/", "/none"):
        for headers in ({}, {"Authorization": "token wrong"}):
            answer = requests.request(verb, api.url(path), headers=headers, data=b"{}", timeout=60)
            if answer.status_code == 405:
                continue  # the path takes other methods, as anybody may know
            assert answer.status_code == 401, (path, answer.text)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json()["reason"] == "unauthenticated"
            assert "xsrf" not in answer.text.lower()


def test_a_browser_is_held_to_xsrf_as_ever(api: Api, box: str) -> None:
    with requests.Session() as browser:
        browser.trust_env = False
        browser.get(api.server.url(f"agentbox/docs?token={api.server.token}"), timeout=60)
        assert browser.get(api.url("/health"), timeout=60).ok
        answer = browser.post(api.url(box + "/exec"), json={"command": "true"}, timeout=60)
    assert (answer.status_code, answer.json()["reason"]) == (403, "forbidden")
    assert "_xsrf" in answer.json()["message"]


def test_unknown_paths_are_json_and_unknown_methods_say_which_there_are(api: Api, box: str) -> None:
    for verb, path in (
        ("GET", ""),
        ("GET", "/"),
        ("GET", "/none"),
        ("POST", box + "/none"),
        ("DELETE", "/sandboxes/a/b/c"),
    ):
        error = api.fails(404, verb, path)
        assert error["reason"] == "not_found"
    verbs: dict[str, set[str]] = {}
    for route in TABLE:
        verbs.setdefault(route.path, set()).add(route.verb.upper())
    for path, known in verbs.items():
        for verb in {"GET", "POST", "PUT", "PATCH", "DELETE"} - known:
            answer = api(verb, path.replace("{id}", "none").replace("{", "").replace("}", ""))
            assert (answer.status_code, answer.json()["reason"]) == (405, "method_not_allowed"), (verb, path)
            assert set(answer.headers["Allow"].split(", ")) == known | {"OPTIONS"}, path


@pytest.mark.parametrize("value", ["null", "NULL", "", "NaN", "Infinity", "1e400", "-1", "9" * 400, "x", "[]", "\0"])
def test_a_wrong_value_of_a_query_is_refused_by_its_name(api: Api, box: str, value: str) -> None:
    for path, names in (
        ("/audit", ("since", "until", "is_allowed", "limit", "after_id", "before_id")),
        ("/sandboxes", ("state",)),
        (box + "/audit", ("since", "limit")),
    ):
        for name in names:
            assert api.fails(400, "GET", path, params={name: value})["field"] == name, (path, name)


@pytest.mark.parametrize("value", [None, "", "x", [], {}, True, -1, 10**400, "\0"], ids=repr)
def test_a_wrong_value_of_a_body_is_never_a_fault(api: Api, box: str, value: Any) -> None:
    fields = {
        "/sandboxes": ("idle_timeout", "max_life", "ports", "limits", "env", "tools", "labels", "packages", "id"),
        box + "/exec": ("timeout", "env", "argv", "stdin", "workdir"),
        box + "/code": ("timeout", "context", "language"),
    }
    base = {"/sandboxes": {"profile": "none-such"}, box + "/exec": {"command": "true"}, box + "/code": {"code": "1"}}
    for path, names in fields.items():
        for name in names:
            body = json.dumps({**base[path], name: value})
            answer = api("POST", path, body)
            assert answer.status_code in (200, 400, 403), (path, name, answer.text)
    raw = '{"timeout": NaN, "command": "true"}'
    assert api.fails(400, "POST", box + "/exec", raw)["reason"] == "invalid_request"


def test_calls_on_a_sandbox_that_is_being_made_never_get_its_makers_error(api: Api) -> None:
    answers: dict[str, requests.Response] = {}

    def call(name: str, verb: str, path: str, body: Any) -> None:
        other = Api(api.server)
        answers[name] = other(verb, path, body)

    # Packages of a host that does not exist take pip a while, and fail.
    body = {"id": "coming", "packages": ["no-such-package-of-anybody"], "allowed_hosts": []}
    maker = threading.Thread(target=call, args=("made", "POST", "/sandboxes", body))
    maker.start()
    wait_until(lambda: api("GET", "/sandboxes/coming").status_code == 200, 60, "it is being made")
    waiting = [
        threading.Thread(target=call, args=(str(number), "POST", "/sandboxes/coming/exec", {"command": "true"}))
        for number in range(3)
    ]
    for thread in waiting:
        thread.start()
    for thread in (maker, *waiting):
        thread.join(140)
    assert answers["made"].status_code == 409, answers["made"].text
    assert "packages" in answers["made"].json()["message"]
    for number in range(3):
        answer = answers[str(number)]
        assert (answer.status_code, "did not start" in answer.json()["message"]) == (404, True), answer.text


CALL = """
import sys
sys.path.insert(0, sys.argv[1])
from jupyter_agentbox_client import AuthenticatedClient
from jupyter_agentbox_client.api.sandboxes import list_sandboxes
from jupyter_agentbox_client.api.service import get_health
client = AuthenticatedClient(base_url=sys.argv[2], token=sys.argv[3], prefix="token", raise_on_unexpected_status=True)
print(get_health.sync(client=client).status)
print([item.id for item in list_sandboxes.sync(client=client).sandboxes])
"""


def test_a_client_that_others_generate_works(api: Api, box: str, tmp_path: Path) -> None:
    document = api.ok("GET", "/openapi.json")
    (tmp_path / "openapi.json").write_text(json.dumps(document))
    (tmp_path / "config.yml").write_text("package_name_override: jupyter_agentbox_client\npost_hooks: []\n")
    made = tmp_path / "made"
    command = [
        sys.executable, "-m", "openapi_python_client", "generate", "--path", str(tmp_path / "openapi.json"),
        "--output-path", str(made), "--config", str(tmp_path / "config.yml"), "--meta", "setup",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    # What it says of a download of JSON lines is that it has no type for it.
    assert "Error" not in done.stdout, done.stdout
    assert compileall.compile_dir(made, quiet=1)
    found = {path.stem for path in made.rglob("api/*/*.py")}
    operations = {item["operationId"] for path in document["paths"].values() for item in path.values()}
    assert operations <= found, operations - found
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", CALL, str(made), api.url(""), api.server.token],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] in ("ok", "degraded")
    assert box.rpartition("/")[2] in ran.stdout
