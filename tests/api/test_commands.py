"""Commands, background processes, terminals and packages over REST, in one sandbox."""

from __future__ import annotations

import base64
import contextlib
import time
from typing import Any

import pytest
import requests
import websocket
from support.api import Api, Make


def test_a_command_to_its_end(api: Api, box: str) -> None:
    body: dict[str, Any] = {
        "command": "cat; echo $X; pwd; echo err >&2; exit 3", "stdin": "in\n", "env": {"X": "y"}, "workdir": "/tmp",
    }  # fmt: skip
    ran = api.ok("POST", box + "/exec", body)
    assert (ran["stdout"], ran["stderr"], ran["exit_code"]) == ("in\ny\n/tmp\n", "err\n", 3)
    raw = api.ok("POST", box + "/exec", {"argv": ["cat"], "stdin_base64": "AP8=", "encoding": "base64"})
    assert base64.b64decode(raw["stdout"]) == b"\0\xff"
    cut = api.ok("POST", box + "/exec", {"command": "yes | head -c 100000", "max_output": 10})
    assert cut["stdout"] == "y\ny\ny\n[99,990 bytes of output left out]\ny\ny\n"
    assert (cut["truncated"], cut["stdout_bytes"]) == (True, 100_000)


def test_a_command_out_of_time_says_what_it_had_printed(api: Api, box: str) -> None:
    ran = api.ok("POST", box + "/exec", {"command": "echo so far; (sleep 999 &); sleep 999", "timeout": 4})
    assert (ran["stdout"], ran["timed_out"]) == ("so far\n", True)


def test_what_is_wrong_with_a_command_is_named(api: Api, box: str) -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({}, 400, "command"),
        ({"command": "a", "argv": ["a"]}, 400, "argv"),
        ({"argv": []}, 400, "argv"),
        ({"command": "a\0b"}, 400, "line"),
        ({"command": "a", "timeout": 0}, 400, "timeout"),
        ({"command": "a", "timeout": 1e9}, 400, "timeout"),
        ({"command": "a", "env": {"": "x"}}, 400, "env"),
        ({"command": "a", "env": {"HTTPS_PROXY": "x"}}, 400, "env"),
        ({"command": "a", "workdir": "/no/such"}, 400, "workdir"),
        ({"command": "a", "user": "root"}, 403, "user"),
        ({"command": "a", "stdin": "x", "stdin_base64": "eA=="}, 400, "stdin_base64"),
    ]
    for body, status, field in cases:
        assert api.fails(status, "POST", box + "/exec", body)["field"] == field, body
    assert api.fails(400, "POST", box + "/exec/stream", {})["field"] == "command"
    api.fails(404, "POST", "/sandboxes/none/exec", {"command": "a"})


def test_output_comes_as_it_happens(api: Api, box: str) -> None:
    line, seen = "echo a; until [ -e /tmp/heard ]; do sleep 0.1; done; echo ü >&2; exit 4", []
    for name, event in api.events("POST", box + "/exec/stream", {"command": line}):
        seen.append((name, event.get("text", event.get("exit_code"))))
        api.ok("POST", box + "/exec", {"command": "touch /tmp/heard"})
    assert seen == [("stdout", "a\n"), ("stderr", "ü\n"), ("exit", 4)]


def test_a_reader_who_goes_away_ends_the_command(api: Api, box: str) -> None:
    events = api.events("POST", box + "/exec/stream", {"command": "echo up; exec sleep 4242"})
    assert next(events)[0] == "stdout"
    events.close()
    with pytest.raises(requests.Timeout):
        api("POST", box + "/exec", {"command": "exec sleep 4243"}, timeout=1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        left = api.ok(
            "POST", box + "/exec", {"command": "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o 'sleep 424[23]'"}
        )
        if not left["stdout"]:
            break
        time.sleep(0.2)
    assert left["stdout"] == ""


def test_background_processes(api: Api, box: str) -> None:
    made = api("POST", box + "/processes", {"command": "echo ready; read line; echo got $line; exec sleep 999"})
    assert made.status_code == 201
    path = f"{box}/processes/{made.json()['id']}"
    chunk = api.ok("GET", path + "/output", params={"wait": 60})
    assert (chunk["data"], chunk["is_end"]) == ("ready\n", False)
    api.ok("POST", path + "/stdin", {"text": "hello\n"})
    chunk = api.ok("GET", path + "/output", params={"offset": chunk["next_offset"], "wait": 60})
    assert chunk["data"] == "got hello\n"
    assert api.ok("GET", path)["state"] == "running"
    assert api.ok("GET", path + "/wait", params={"timeout": 0.2})["exit_code"] is None
    api.ok("POST", path + "/signal", {"signal": "TERM"})
    assert api.ok("GET", path + "/wait")["exit_code"] == 128 + 15
    events = list(api.events("GET", path + "/follow"))
    assert "".join(event["text"] for name, event in events if name == "stdout") == "ready\ngot hello\n"
    assert events[-1][1]["exit_code"] == 128 + 15
    assert path.rpartition("/")[2] in [item["id"] for item in api.ok("GET", box + "/processes")["processes"]]
    assert api("DELETE", path).status_code == 204
    api.fails(404, "GET", path)
    api.fails(404, "POST", path + "/kill")
    other = api.ok("POST", box + "/processes", {"command": "sleep 999"})["id"]
    assert api.ok("POST", f"{box}/processes/{other}/kill")["exit_code"] == 137
    api.fails(400, "POST", f"{box}/processes/{other}/signal", {"signal": "BOGUS"})
    api.fails(400, "GET", f"{box}/processes/{other}/output", params={"offset": 10_000})


def connect(api: Api, path: str, **options: Any) -> websocket.WebSocket:
    address = api.url(path).replace("http", "ws", 1)
    options.setdefault("header", [f"Authorization: token {api.server.token}"])
    return websocket.create_connection(address, http_no_proxy=["127.0.0.1"], timeout=60, **options)


def read_until(socket: websocket.WebSocket, text: bytes) -> bytes:
    data = b""
    while text not in data:
        _, frame = socket.recv_data()
        data += frame
    return data


def test_a_terminal(api: Api, box: str) -> None:
    made = api.ok("POST", box + "/terminals", {"command": "exec sh", "rows": 30, "columns": 100})
    path = f"{box}/terminals/{made['id']}/socket"
    with contextlib.closing(connect(api, path)) as socket:
        socket.send_binary(b"stty size; echo 4$((1+1))\r")
        assert b"30 100" in read_until(socket, b"42\r\n")
        socket.send('{"rows": 40, "columns": 120}')
        socket.send_binary(b"while stty size | grep -q ^30; do sleep 0.1; done; stty size; echo 5$((1+1))\r")
        assert b"40 120" in read_until(socket, b"52\r\n")
    # It lives on, and whoever comes back sees what it showed.
    with contextlib.closing(connect(api, path)) as socket:
        read_until(socket, b"52\r\n")
        socket.send_binary(b"exit 7\r")
        assert b'{"exit_code":7}' in read_until(socket, b"exit_code")
    for wrong, status in ((path.replace(made["id"], "none"), 404), (path.replace("shared", "none"), 404)):
        with pytest.raises(websocket.WebSocketBadStatusException) as caught:
            connect(api, wrong)
        assert caught.value.status_code == status


def test_a_terminal_is_for_those_who_may(api: Api, box: str) -> None:
    made = api.ok("POST", box + "/terminals", {})
    path = f"{box}/terminals/{made['id']}/socket"
    # A browser that is logged in, on a page of somebody else's.
    login = requests.get(api.server.url(f"tree?token={api.server.token}"), timeout=60, proxies={"no": "127.0.0.1"})
    cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in login.cookies)
    assert "username" in cookies
    for options, status in (
        ({"header": []}, 401),
        ({"header": ["Authorization: token x"]}, 401),
        ({"header": [], "cookie": cookies, "origin": "http://evil.example.org"}, 403),
    ):
        with pytest.raises(websocket.WebSocketBadStatusException) as caught:
            connect(api, path, **options)
        assert caught.value.status_code == status
    with contextlib.closing(connect(api, path)) as socket:
        socket.send("nonsense")
        with contextlib.suppress(websocket.WebSocketException):
            while socket.recv_data()[0] != websocket.ABNF.OPCODE_CLOSE:
                pass
        socket.shutdown()  # the client's own close() does nothing after a close frame
    api.ok("POST", f"{box}/processes/{made['id']}/kill")


def test_a_page_of_somebody_elses_can_do_nothing(api: Api, box: str) -> None:
    with requests.Session() as browser:
        browser.trust_env = False
        browser.get(api.server.url(f"tree?token={api.server.token}"), timeout=60)
        assert browser.get(api.url(box), timeout=60).status_code == 200
        for verb, path in (("POST", "/exec"), ("PUT", "/files/upload?path=x"), ("PUT", "/files/content")):
            answer = browser.request(verb, api.url(box + path), data="{}", timeout=60)
            assert (answer.status_code, answer.json()["reason"]) == (403, "forbidden"), answer.text
        token = browser.cookies["_xsrf"]
        body, headers = {"command": "echo hi"}, {"X-XSRFToken": token}
        answer = browser.post(api.url(box + "/exec"), json=body, headers=headers, timeout=60)
        assert answer.json()["stdout"] == "hi\n"


def test_packages_that_cannot_be(api: Api, box: str) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "packages"),
        ({"packages": ["https://example.org/x.whl"]}, "packages"),
        ({"packages": ["./here"]}, "packages"),
        ({"packages": ["a; rm -rf /"]}, "packages"),
        ({"packages": ["a @ file:///etc/passwd"]}, "packages"),
        ({"requirements": "../x"}, "requirements"),
        ({"packages": ["x"], "manager": "npm", "requirements": "r"}, "requirements"),
        ({"packages": ["x"], "manager": "cargo"}, "manager"),
    ]
    for body, field in cases:
        assert api.fails(400, "POST", box + "/packages", body)["field"] == field, body


def test_a_refused_index_is_named(api: Api, box: str) -> None:
    offline = "/sandboxes/" + api.ok("POST", "/sandboxes", {"profile": "offline"})["id"]
    try:
        done = api.ok("POST", offline + "/packages", {"packages": ["six==1.16.0"], "timeout": 100})
        assert done["is_ok"] is False
        assert done["refused"], done
        assert done["message"].startswith("the gate refused: ")
    finally:
        api("DELETE", offline)


@pytest.mark.network
def test_packages_are_there_from_the_start_by_requirements_and_with_extras(api: Api, make: Make) -> None:
    path = make(packages=["six==1.16.0"], allowed_hosts=["pypi"])
    api.ok("PUT", path + "/files/content", {"path": "wanted.txt", "text": "colorama==0.4.5\n"})
    for body in ({"requirements": "wanted.txt"}, {"packages": ["requests[socks]"]}):
        done = api.ok("POST", path + "/packages", body)
        assert done["is_ok"], done
    code = "import six, colorama, socks; six.__version__, colorama.__version__"
    ran = api.ok("POST", path + "/code", {"code": code, "timeout": 100})
    assert ran["result"]["data"]["text/plain"] == "('1.16.0', '0.4.5')", ran
    refused = api.fails(409, "POST", "/sandboxes", {"packages": ["six==1.15.0"], "allowed_hosts": []}, timeout=150)
    assert refused["field"] == "packages"
    assert "Blocked by sandbox: " in refused["message"]


@pytest.mark.network
def test_packages_come_with_progress(api: Api, box: str) -> None:
    events = list(api.events("POST", box + "/packages/stream", {"packages": ["iniconfig"], "upgrade": True}))
    assert events[-1][0] == "result"
    assert events[-1][1]["is_ok"], events[-1]
    assert any("iniconfig" in event["text"] for name, event in events if name == "progress")
