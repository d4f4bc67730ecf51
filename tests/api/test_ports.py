"""Programs inside that listen on a port, through the server: what passes, what does not, and who may."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
import websocket
from support import TESTS
from support.api import Api
from support.gate_box import read_all
from support.harness import wait_until

#: A program that says what it got, and answers as hostile as it can.
APP = (TESTS / "support" / "hostile_app.py").read_text()


@pytest.fixture(scope="module")
def app(api: Api) -> Iterator[str]:
    """Path of the port of a program that runs inside."""
    api.ok("POST", "/sandboxes", {"id": "ports", "files": {"app.py": APP}, "ports": [7001, 7999]})
    api.ok("POST", "/sandboxes/ports/processes", {"command": "exec python3 app.py"})
    path = "/sandboxes/ports/ports/7001"
    wait_until(lambda: api("GET", path + "/").status_code == 207, 90, "the program listens")
    yield path
    api("DELETE", "/sandboxes/ports")


def echo(api: Api, verb: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
    answer = api(verb, path, body, **options)
    assert answer.status_code == 207, answer.text
    found: dict[str, Any] = answer.json()
    return found


def browser(api: Api) -> requests.Session:
    """A browser that is logged in by cookie."""
    session = requests.Session()
    session.trust_env = False
    assert (
        session.get(api.server.url("?token=" + api.server.token), timeout=30, allow_redirects=False).status_code < 400
    )
    assert session.cookies
    return session


def test_a_request_goes_in_whole_and_without_credentials(api: Api, app: str) -> None:
    headers = {
        "Cookie": "username-x=secret", "X-XSRFToken": "secret", "X-Forwarded-Access-Token": "secret",
        "Referer": "http://h/?token=secret", "Origin": api.server.url("")[:-1], "Accept": "text/x", "Range": "bytes=1-",
        "Connection": "Accept", "Proxy-Authorization": "secret",
    }  # fmt: skip
    got = echo(api, "GET", app + f"/a%2Fb/c?x=1&token={api.server.token}&y=%20", headers=headers)
    assert (got["method"], got["target"]) == ("GET", "/a%2Fb/c?x=1&y=+")
    assert "secret" not in json.dumps(got)
    assert api.server.token not in json.dumps(got)
    assert got["headers"]["host"] == "localhost:7001"
    assert got["headers"]["origin"] == "http://localhost:7001"
    assert (got["headers"]["accept"], got["headers"]["range"]) == ("text/x", "bytes=1-")


def test_an_answer_comes_out_without_what_acts_on_the_server(api: Api, app: str) -> None:
    answer = api("GET", app + "/")
    assert answer.headers["Content-Type"] == "text/html"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("sandbox allow-scripts")
    assert "allow-same-origin" not in policy
    assert "allow-top-navigation" not in policy
    assert set(answer.headers) == {
        "Content-Type", "Content-Length", "Content-Security-Policy", "Cache-Control", "Referrer-Policy",
        "X-Content-Type-Options", "Connection",
    }  # fmt: skip
    assert api("HEAD", app + "/").headers["Content-Length"] != "0"


def test_bodies_are_streamed_both_ways(api: Api, app: str) -> None:
    data = bytes(range(256)) * 8000
    sized = echo(api, "POST", app + "/up", data)
    chunked = echo(api, "PUT", app + "/up", (data[place : place + 100_000] for place in range(0, len(data), 100_000)))
    assert sized["size"] == chunked["size"] == len(data)
    assert sized["hash"] == chunked["hash"]
    assert len(api("GET", app + "/big").content) == 5_000_000
    answer = api("GET", app + "/chunks", stream=True)
    assert next(answer.iter_content(5)) == b"first"
    answer.close()
    answer = api("GET", app + "/slow", stream=True)
    assert next(answer.iter_content(9)) == b"data: 1\n\n"
    answer.close()
    (process,) = api.ok("GET", "/sandboxes/ports/processes")["processes"]
    output = f"/sandboxes/ports/processes/{process['id']}/output"
    wait_until(lambda: "hung up" in json.dumps(api.ok("GET", output)), 60, "a client that goes away hangs up inside")


@pytest.mark.parametrize("path", ["/both", "/huge", "/noise"])
def test_what_is_no_plain_http_is_told(api: Api, app: str, path: str) -> None:
    error = api.fails(502, "GET", app + path)
    assert "the response on port 7001 is not valid HTTP/1.1" in error["message"]


def test_an_answer_that_lies_about_its_size_harms_nobody(api: Api, app: str) -> None:
    assert api("GET", app + "/long").content == b"ok"
    with pytest.raises((requests.exceptions.ChunkedEncodingError, requests.exceptions.ConnectionError)):
        api("GET", app + "/short")


def test_the_server_frames_what_a_program_frames_loosely(api: Api, app: str) -> None:
    answer = api("GET", app + "/loose")
    assert (answer.headers["Transfer-Encoding"], answer.content) == ("chunked", b"hello")
    server = urlsplit(api.url(app + "/loose"))
    for version, body in (("1.1", b"5\r\nhello\r\n0\r\n\r\n"), ("1.0", b"hello")):
        with socket.create_connection((server.hostname, server.port), 60) as sock:
            sock.sendall(
                f"GET {server.path} HTTP/{version}\r\nHost: localhost\r\n"
                f"Authorization: token {api.server.token}\r\n\r\n".encode()
            )
            head, _, rest = read_all(sock).partition(b"\r\n\r\n")
        assert (b"Transfer-Encoding" in head, rest) == (version == "1.1", body)


@pytest.mark.parametrize(
    "place",
    ["next?a=1#b", "/next?a=1#b", "http://localhost:7001/next?a=1#b", "http://127.0.0.1:7001/next?a=1#b"],
)
def test_a_redirect_stays_at_the_port(api: Api, app: str, place: str) -> None:
    answer = api("GET", f"{app}/go?{place}".replace("#", "%23"), allow_redirects=False)
    assert answer.headers["Location"].replace("%23", "#") == "/api/agentbox" + app + "/next?a=1#b"


@pytest.mark.parametrize(
    "place",
    [
        "http://evil.example/",
        "//evil.example/",
        "https://localhost:7001/",
        "http://localhost:7002/",
        "javascript:1",
    ],
)
def test_a_redirect_elsewhere_is_none(api: Api, app: str, place: str) -> None:
    assert "redirects to another server" in api.fails(502, "GET", f"{app}/go?{place}", allow_redirects=False)["message"]


def test_only_listed_ports_and_only_one_who_may(api: Api, app: str) -> None:
    error = api.fails(403, "GET", "/sandboxes/ports/ports/7002/")
    assert (error["field"], "exposed: 7001, 7999)" in error["message"]) == ("port", True)
    assert "no response on port 7999" in api.fails(502, "GET", "/sandboxes/ports/ports/7999/")["message"]
    api.fails(404, "GET", "/sandboxes/nobodys/ports/7001/")
    nobody = Api(api.server, token="wrong")
    for verb in ("GET", "POST", "OPTIONS"):
        nobody.fails(401, verb, app + "/")
    assert "max_ports" in api.fails(403, "POST", "/sandboxes", {"ports": list(range(1, 20))})["setting"]
    assert api.fails(400, "POST", "/sandboxes", {"ports": [0]})["field"] == "ports"
    assert api.ok("GET", "/sandboxes/ports")["ports"] == [7001, 7999]


def test_a_scoped_token_needs_execute_and_reaches_its_own_sandbox(api: Api, app: str) -> None:
    for verbs, status in ((["execute"], 207), (["read", "write"], 403)):
        token = api.ok("POST", "/sandboxes/ports/tokens", {"verbs": verbs})["token"]
        answer = Api(api.server, token=token)("GET", app + "/")
        assert (answer.status_code, token in answer.text) == (status, False)
    foreign = api.ok("POST", "/sandboxes", {"ports": [7001], "env": {"PATH": "/nowhere"}})["id"]
    token = api.ok("POST", f"/sandboxes/{foreign}/tokens", {"verbs": ["execute"]})["token"]
    assert Api(api.server, token=token)("GET", app + "/").status_code in (403, 404)
    for manager in ("npm", "R"):  # where its own PATH has none
        refused = api.ok("POST", f"/sandboxes/{foreign}/packages", {"packages": ["some"], "manager": manager})
        assert not refused["is_ok"]
        assert refused["message"].startswith(f"{manager} is not installed in this sandbox")
    api.ok("DELETE", f"/sandboxes/{foreign}")


def test_connections_are_bounded_and_given_back(api: Api, app: str) -> None:
    address = api.url(app + "/").replace("http", "ws", 1)
    header, opened = [f"Authorization: token {api.server.token}"], []
    for _ in range(64):
        opened.append(websocket.create_connection(address, header=header, http_no_proxy=["127.0.0.1"], timeout=30))
    assert "64 open connections" in api.fails(429, "GET", app + "/")["message"]
    for opening in opened:
        opening.close()
    wait_until(lambda: api("GET", app + "/").status_code == 207, 60, "they are given back")


def test_a_browser_gets_an_address_of_the_ports_own(api: Api, app: str) -> None:
    page = browser(api)
    answer = page.get(api.url(app + "?x=1"), timeout=30, allow_redirects=False)
    place = answer.headers["Location"]
    assert re.fullmatch(r"/api/agentbox" + app + r"/~[\w-]{32}/\?x=1", place)
    shared = requests.Session()  # as a page without an origin: no cookie, no token
    shared.trust_env = False
    own = api.server.url(place[1:].partition("?")[0])
    answer = shared.post(own + "form", data="y=2", headers={"Origin": "null"}, timeout=30)
    assert (answer.status_code, answer.json()["target"]) == (207, "/form")
    assert answer.headers["Access-Control-Allow-Origin"] == "*"
    ask = {"Origin": "null", "Access-Control-Request-Method": "PUT"}
    assert shared.options(own, headers=ask, timeout=30).status_code == 204
    assert shared.get(own.replace("/~", "/~x"), timeout=30).status_code == 403
    assert shared.get(own.replace("/7001/", "/7999/"), timeout=30).status_code == 403
    assert shared.get(own, headers={"Service-Worker": "script"}, timeout=30).status_code == 403
    assert shared.get(api.url(app + "/"), timeout=30).status_code == 401
    # A cookie alone does nothing else: any page of the web could make a browser send it.
    assert page.get(api.url(app + "/"), headers={"Upgrade": "websocket"}, timeout=30).status_code == 403
    xsrf = {"X-XSRFToken": page.cookies.get("_xsrf", "")}
    assert page.post(api.url(app + "/"), headers=xsrf, timeout=30).status_code == 403
    word = own.split("/")[-2]
    assert word not in api.server.log.read_text()


def test_a_websocket_is_carried(api: Api, app: str) -> None:
    address = api.url(app + "/socket").replace("http", "ws", 1)
    options: dict[str, Any] = {"http_no_proxy": ["127.0.0.1"], "timeout": 30}
    carried = websocket.create_connection(address, header=[f"Authorization: token {api.server.token}"], **options)
    assert "set-cookie" not in carried.getheaders()
    for text in ("hello", "again"):
        carried.send(text)
        assert carried.recv() == text
    carried.close()
    with pytest.raises(websocket.WebSocketBadStatusException, match="401"):
        websocket.create_connection(address, **options)
    place = browser(api).get(api.url(app), timeout=30, allow_redirects=False).headers["Location"]
    carried = websocket.create_connection(api.server.url(place[1:]).replace("http", "ws", 1), **options)
    carried.send("shared")
    assert carried.recv() == "shared"
    carried.close()


def test_a_program_that_listens_on_the_second_localhost_only(api: Api) -> None:
    app = APP.replace("socket.socket()", "socket.socket(socket.AF_INET6)").replace('"127.0.0.1"', '"::1"')
    assert app.count("::1") == 1
    api.ok("POST", "/sandboxes", {"id": "second", "files": {"app.py": app}, "ports": [7001, 7005]})
    api.ok("POST", "/sandboxes/second/processes", {"command": "exec python3 app.py"})
    path = "/sandboxes/second/ports/7001"
    wait_until(lambda: api("GET", path + "/").status_code == 207, 90, "the program listens")
    assert echo(api, "GET", path + "/a")["target"] == "/a"
    carried = websocket.create_connection(
        api.url(path + "/socket").replace("http", "ws", 1),
        header=[f"Authorization: token {api.server.token}"],
        http_no_proxy=["127.0.0.1"],
        timeout=30,
    )
    carried.send("hello")
    assert carried.recv() == "hello"
    carried.close()
    refused = api("GET", "/sandboxes/second/ports/7005/")
    assert refused.status_code >= 400
    assert "Connection refused" in refused.text
    api("DELETE", "/sandboxes/second")
