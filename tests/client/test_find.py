"""Which server is called, and what becomes of the token; with servers that are none, or misbehave."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.serving import Serving

from jupyter_agentbox.client import (
    ApiError,
    Client,
    InvalidRequest,
    NotAuthenticated,
    NotFound,
    Output,
    UnexpectedAnswer,
    Unreachable,
    find_server,
    running_servers,
)
from jupyter_agentbox.client.find import Server, check_url, named_server
from jupyter_agentbox.client.wire import EventReader, output_decoders


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No server but those of the test."""
    for name in ("JUPYTER_AGENTBOX_URL", "JUPYTER_AGENTBOX_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir(mode=0o700)
    return tmp_path / "runtime"


@contextmanager
def fake(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers so; its address, and the Authorization headers that it got."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            answer(self)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def test_a_running_server_is_found_by_its_file(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", serving.env.variables["JUPYTER_RUNTIME_DIR"])
    assert [server.url for server in running_servers()] == [serving.url]
    with Client() as client:
        assert client.url() == serving.url
        health = client.health()
        assert health.status == "ok", [check for check in health.checks if not check.is_ok]


def test_files_of_dead_servers_and_of_others_are_passed_over(environment: Path, serving: Serving) -> None:
    good = {"url": serving.url, "token": serving.token, "pid": serving.process.pid}

    def write(name: str, info: object, mode: int = 0o600) -> None:
        path = environment / f"jpserver-{name}.json"
        path.write_text(info if isinstance(info, str) else json.dumps(info))
        path.chmod(mode)

    write("dead", {**good, "pid": 2**22 + 3})
    write("odd", {**good, "pid": -1})
    write("garbage", "{")
    write("open", good, 0o666)
    (environment / "jpserver-link.json").symlink_to(environment / "elsewhere")
    os.mkfifo(environment / "jpserver-fifo.json")
    assert running_servers() == []
    with pytest.raises(NotFound, match="jupyter agentbox serve"), Client() as client:
        client.list()
    write("good", good)
    assert find_server().token == serving.token


def test_the_environment_names_a_server_and_its_token_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_AGENTBOX_TOKEN", "secret")
    assert named_server(None, None) is None
    other = named_server("http://b.example", None)
    assert other is not None
    assert other.token == "secret"
    monkeypatch.setenv("JUPYTER_AGENTBOX_URL", "http://a.example/user/x")
    for url, token in ((None, "secret"), ("http://a.example/user/x/", "secret"), ("http://b.example/", "")):
        server = named_server(url, None)
        assert server is not None
        assert server.token == token
    given = named_server("http://b.example/", "given")
    assert given is not None
    assert given.token == "given"
    assert "given" not in repr(given)


@pytest.mark.parametrize(
    "url", ["localhost:8888", "ftp://x/", "http://", "http://u:p@x/", "http://x/?token=a", "http://x/#a", "http://x:y/"]
)
def test_addresses_that_are_none_or_hold_a_secret_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        check_url(url)


def test_addresses_are_read_with_or_without_the_api() -> None:
    assert check_url(" https://x:1/base ") == check_url("https://x:1/base/api/agentbox/") == "https://x:1/base/"
    with pytest.raises(InvalidRequest):
        Server("http://x/", "a\nb")


def test_a_redirect_is_not_followed_and_takes_no_token_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with fake(lambda handler: send(handler, 200, b"{}")) as (target, stolen):
        with fake(lambda handler: send(handler, 307, b"", Location=target)) as (url, seen):
            with Client(url, "secret") as client, pytest.raises(UnexpectedAnswer, match="never followed"):
                client.list()
    assert (seen, stolen) == (["token secret"], [])


def test_a_call_that_broke_is_not_made_again() -> None:
    def hang_up(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True

    with fake(hang_up) as (url, seen), Client(url, "t") as client:
        with pytest.raises(Unreachable):
            client.create()
        assert len(seen) == 1
    with Client(url) as client, pytest.raises(Unreachable, match="cannot be reached"):
        client.list()


def test_what_is_not_this_api_is_told_as_such(serving: Serving) -> None:
    with fake(lambda handler: send(handler, 200, b"<html>")) as (url, _), Client(url) as client:
        with pytest.raises(UnexpectedAnswer):
            client.health()
    with fake(lambda handler: send(handler, 502, b"<html>")) as (url, _), Client(url) as client:
        with pytest.raises(UnexpectedAnswer, match="status 502"):
            client.health()
    with Client(serving.url, "wrong") as client, pytest.raises(ApiError) as caught:
        client.list()
    assert caught.value.status == 401
    with Client(serving.url, "agentbox_wrong.wrong") as client, pytest.raises(NotAuthenticated):
        client.list()


def test_a_stream_that_is_cut_off_is_an_error_and_no_end() -> None:
    data = base64.b64encode(b"some").decode()
    event = f'event: stdout\ndata: {{"text": "{data}", "offset": 0}}\n\n'.encode()
    with fake(lambda handler: send(handler, 200, event)) as (url, _), Client(url) as client:
        with client.sandbox("x").stream("true") as events:
            assert next(events) == Output("stdout", b"some", "some", 0)
            with pytest.raises(UnexpectedAnswer, match="cut off"):
                next(events)


def test_events_are_read_in_whatever_pieces_they_come() -> None:
    text = (
        b': keep-alive\n\nevent: stdout\ndata: {"text": "YQ==", "offset": 0}\n\nevent: of-a-newer-server\ndata: {}\n\n'
        b'event: failure\ndata: {"message": "gone", "reason": "sandbox_ended"}\n\n'
    )
    for size in (1, 7, len(text)):
        reader = EventReader(output_decoders(), "exit")
        for start in range(0, len(text), size):
            reader.feed(text[start : start + size])
        output, failure = reader.found
        assert output.data == b"a"
        assert (type(failure).__name__, str(failure)) == ("SandboxEnded", "gone")
        assert reader.is_done
    with pytest.raises(UnexpectedAnswer):
        EventReader(output_decoders(), "exit").feed(b'event: stdout\ndata: {"text": "\xc3\xa9", "offset": 0}\n')
