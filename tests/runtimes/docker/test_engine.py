"""Engines that hang, trickle, lie or refuse: each call ends in time with an error of ours, and leaves no socket."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jupyter_agentbox.errors import NotFound, RuntimeFailed, RuntimeUnavailable
from jupyter_agentbox.runtimes.docker import engine as module
from jupyter_agentbox.runtimes.docker import orphans
from jupyter_agentbox.runtimes.docker.engine import Engine

VERSION = {"Version": "20.10", "ApiVersion": "1.41", "MinAPIVersion": "1.12"}
Answer = Callable[[str, str], Iterator[bytes]]


def reply(body: object, status: str = "200 OK", *headers: str) -> bytes:
    """Return a whole HTTP response; what is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class FakeEngine:
    """A server that answers each request by a generator of the bytes that it sends."""

    def __init__(self, path: str, answer: Answer) -> None:
        self.host = f"unix://{path}"
        self.asked: list[tuple[str, str]] = []
        self.is_over = threading.Event()
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                while line := lines.readline():
                    method, path, _ = line.decode().split(" ")
                    while lines.readline() not in (b"\r\n", b""):
                        pass
                    if path == "/version":
                        connection.sendall(reply(VERSION))
                        continue
                    self.asked.append((method, path.partition("?")[0].removeprefix("/v1.41")))
                    for part in self._answer(*self.asked[-1]):
                        connection.sendall(part)
                        if self.is_over.is_set():
                            return
            except (OSError, ValueError):
                pass  # the client has given up, or sends what was not read

    def close(self) -> None:
        self.is_over.set()
        with contextlib.suppress(OSError):  # it is closed
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)


@pytest.fixture
def make_engine() -> Iterator[Callable[[Answer], FakeEngine]]:
    """Start engines; afterwards this process has no socket that it had not before."""
    made: list[FakeEngine] = []
    before = find_sockets()
    with TemporaryDirectory(prefix="ab") as short:

        def make(answer: Answer) -> FakeEngine:
            made.append(FakeEngine(f"{short}/{len(made)}", answer))
            return made[-1]

        yield make
        for engine in made:
            engine.close()
    assert find_sockets() <= before


def find_sockets() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(f"{entry.name} {target}")
    return found


def say(*parts: bytes) -> Answer:
    """Answer every request so."""
    return lambda method, path: iter(parts)


def trickle(head: bytes, piece: bytes) -> Answer:
    """Begin an answer, and go on with a byte now and then, for ever."""

    def answer(method: str, path: str) -> Iterator[bytes]:
        yield head
        while True:
            time.sleep(0.05)
            yield piece

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        trickle(b"", b"H"),
        trickle(b"HTTP/1.1 200 OK\r\n", b"x"),
        trickle(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        trickle(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        trickle(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        trickle(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"),
        trickle(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    ],
    ids=["status", "headers", "header", "body", "chunks", "continue", "until closed"],
)
def test_one_that_trickles_is_given_up_in_time(make_engine: Callable[[Answer], FakeEngine], answer: Answer) -> None:
    fake = make_engine(answer)
    engine = Engine(fake.host, 0.5)
    for call in (engine.info, lambda: engine.read_log("x"), lambda: engine.start("x", 0.5)):
        started = time.monotonic()
        with pytest.raises(RuntimeFailed, match=r"did not answer within 0\.5 s"):
            call()
        assert time.monotonic() - started < 20


def test_one_that_hangs_is_given_up_in_time() -> None:
    with TemporaryDirectory(prefix="ab") as short, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{short}/s")
        silent.listen()
        engine = Engine(f"unix://{short}/s", 0.5)
        during = find_sockets()
        for call in (engine.info, lambda: engine.ensure_image(bytes(1 << 22)), lambda: engine.remove("x")):
            started = time.monotonic()
            with pytest.raises(RuntimeFailed, match="did not answer within"):
                call()
            assert time.monotonic() - started < 20
            assert find_sockets() == during


def test_an_image_that_one_does_not_read_is_given_up_in_time(
    make_engine: Callable[[Answer], FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(method: str, path: str) -> Iterator[bytes]:
        if method == "GET":
            yield reply({"message": "No such image"}, "404 Not Found")
        while not fake.is_over.wait(0.05):  # and reads nothing
            pass

    fake = make_engine(answer)
    connect = Engine.connect
    monkeypatch.setattr(Engine, "connect", lambda self, timeout=0.0: connect(self, min(timeout, 0.5)))
    with pytest.raises(RuntimeFailed, match="did not answer within"):
        Engine(fake.host, 20.0).ensure_image(bytes(1 << 24))
    assert fake.asked[-1] == ("POST", "/images/create")


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (reply(b"{"), RuntimeFailed, "invalid answer"),
        (reply(b"[" * 100_000), RuntimeFailed, "invalid answer"),
        (reply([1]), RuntimeFailed, "invalid answer"),
        (reply({"Runtimes": [1]}), RuntimeFailed, "invalid answer"),
        (reply(b"\xff\xfe"), RuntimeFailed, "invalid answer"),
        (reply({}, "302 Found", "Location: http://127.0.0.1:1/x"), RuntimeUnavailable, "redirects"),
        (reply({}, "307 Moved", "Location: /v1.41/info"), RuntimeUnavailable, "redirects"),
        (reply(b" " * (1 << 20)), RuntimeFailed, "more than"),
        (reply({"message": "no"}, "500 Internal Server Error"), RuntimeFailed, "engine refused: no"),
        (reply([1], "500 Internal Server Error"), RuntimeFailed, "invalid answer"),
        (reply(b"oh", "503 Service Unavailable"), RuntimeFailed, "engine refused: oh"),
        (reply({"message": "where"}, "404 Not Found"), NotFound, "no such object: where"),
        (b"nonsense\r\n\r\n", RuntimeUnavailable, "Cannot reach"),
        (b"", RuntimeUnavailable, "Cannot reach"),
        (reply(b"{}")[:-1], RuntimeUnavailable, "Cannot reach"),
        (reply(gzip.compress(bytes(1 << 24)), "200 OK", "Content-Encoding: gzip"), RuntimeFailed, "invalid answer"),
    ],
)
def test_lies_and_refusals_are_errors_of_ours(
    make_engine: Callable[[Answer], FakeEngine],
    monkeypatch: pytest.MonkeyPatch,
    answer: bytes,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr(module, "MAX_ANSWER", 500_000)

    def answer_once(method: str, path: str) -> Iterator[bytes]:
        yield answer
        raise OSError  # closes the connection

    fake = make_engine(answer_once)
    with pytest.raises(error, match=words):
        Engine(fake.host, 20.0).runtimes()


def test_no_socket_is_left_by_what_succeeds(make_engine: Callable[[Answer], FakeEngine]) -> None:
    fake = make_engine(say(reply({"Runtimes": {}})))
    before = find_sockets()
    engine = Engine(fake.host, 20.0)
    for _ in range(3):
        assert engine.runtimes() == []
        assert engine.inspect_image("x") == {"Runtimes": {}}
    fake.close()
    assert find_sockets() <= before


def test_variables_of_proxies_and_of_docker_are_not_used(
    make_engine: Callable[[Answer], FakeEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = make_engine(say(reply({"Runtimes": {}})))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name, value in (("DOCKER_HOST", "tcp://127.0.0.1:1"), ("DOCKER_TLS_VERIFY", "1"), ("DOCKER_API_VERSION", "9")):
        monkeypatch.setenv(name, value)
    assert Engine(fake.host, 20.0).info() == {"Runtimes": {}}
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"proxies": {"default": {"httpProxy": "http://127.0.0.1:1"}}}')
    assert Engine(fake.host, 20.0).info() == {"Runtimes": {}}
    (tmp_path / "config.json").write_text('{"auths": 1}')
    with pytest.raises(RuntimeUnavailable, match=r"config\.json"):
        Engine(fake.host, 20.0).info()


def test_one_that_is_too_old_is_refused(make_engine: Callable[[Answer], FakeEngine]) -> None:
    fake = make_engine(say(reply({})))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VERSION, "ApiVersion", "1.40")
        with pytest.raises(RuntimeUnavailable, match=r"too old: it has version 1\.40"):
            Engine(fake.host, 20.0).info()


def test_docker_is_imported_only_with_its_runtime() -> None:
    code = (
        "import sys, jupyter_agentbox.jupyter.extension, jupyter_agentbox.jupyter.provisioner\n"
        "import jupyter_agentbox.sandbox.sweep, jupyter_agentbox.runtimes.runsc.runtime\n"
        "assert not {'docker', 'requests'} & set(sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr


def test_an_engines_lies_about_containers_remove_nothing_else(
    make_engine: Callable[[Answer], FakeEngine], tmp_path: Path
) -> None:
    (tmp_path / "sandboxes/mine").mkdir(parents=True)
    names = ("mine", "gone", "", "../../etc", "refused")
    listed: list[object] = [{"Id": f"id-{name}", "Labels": {f"{orphans.LABEL}.sandbox": name}} for name in names]

    def answer(method: str, path: str) -> Iterator[bytes]:
        if method == "GET":
            yield reply(listed)
        else:
            yield reply({"message": "no"}, "409 Conflict") if "refused" in path else reply(b"", "204 No Content")

    fake = make_engine(answer)
    assert orphans.remove_orphans(fake.host, tmp_path) == (["gone"], False)
    removed = [path for method, path in fake.asked if method == "DELETE"]
    assert removed == ["/containers/id-gone", "/containers/id-refused"]
    for listed[:] in ([{"what": "ever"}], [1], [{"Id": 1, "Labels": {f"{orphans.LABEL}.sandbox": "x"}}]):
        assert orphans.remove_orphans(fake.host, tmp_path) == ([], False)
