"""Files over REST, in one sandbox: small ones, any size, archives, between sandboxes and host folders."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import socket
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from support.api import Api, Make


@pytest.fixture
def files(box: str) -> str:
    return box + "/files"


def test_small_files(api: Api, files: str) -> None:
    entry = api.ok("PUT", files + "/content", {"path": "f/a.txt", "text": "one\ntwo\n"})
    assert (entry["kind"], entry["size"]) == ("file", 8)
    api.ok("POST", files + "/append", {"path": "f/a.txt", "text": "three\n"})
    assert api.ok("POST", files + "/edit", {"path": "f/a.txt", "old": "two", "new": "2"})["replacements"] == 1
    content = api.ok("GET", files + "/content", params={"path": "/workspace/f/a.txt", "offset": 4, "length": 3})
    assert (content["data"], content["truncated"], content["is_text"]) == ("2\nt", True, True)
    api.ok("PUT", files + "/content", {"path": "f/b.bin", "base64": "AP8="})
    assert api.ok("GET", files + "/content", params={"path": "f/b.bin", "encoding": "base64"})["data"] == "AP8="
    assert api.ok("GET", files + "/content", params={"path": "f/b.bin"})["is_text"] is False
    listed = api.ok("GET", files, params={"path": "f"})
    assert [item["path"] for item in listed["entries"]] == ["f/a.txt", "f/b.bin"]
    assert [item["path"] for item in api.ok("GET", files + "/glob", params={"pattern": "**/*.bin"})["entries"]]
    found = api.ok("GET", files + "/grep", params={"pattern": "^thr", "path": "f", "before": 1})["matches"]
    assert (found[0]["line"], found[0]["text"], found[0]["before"]) == (3, "three", ["2"])
    api.ok("POST", files + "/copy", {"source": "f", "target": "g"})
    api.ok("POST", files + "/move", {"source": "g/a.txt", "target": "h/c.txt"})
    assert api.ok("GET", files + "/exists", params={"path": "h/c.txt"})["exists"] is True
    assert api.ok("GET", files + "/stat", params={"path": "h"})["kind"] == "directory"
    api.ok("POST", files + "/mkdir", {"path": "h/i/j"})
    api.fails(409, "POST", files + "/delete", {"path": "h"})
    assert api.ok("POST", files + "/delete", {"path": "h", "recursive": True})["deleted"] >= 3
    assert api.ok("GET", files + "/exists", params={"path": "h"})["exists"] is False


def test_what_is_wrong_is_named(api: Api, files: str) -> None:
    for path in ("../x", "/etc/passwd", "a\0b"):
        assert api.fails(400, "GET", files + "/content", params={"path": path})["field"] == "path"
    assert api.fails(404, "GET", files + "/content", params={"path": "none"})["reason"] == "not_found"
    assert api.fails(400, "GET", files + "/content")["field"] == "path"
    assert api.fails(400, "GET", files + "/content", params={"path": "a", "offset": "x"})["field"] == "offset"
    assert api.fails(400, "PUT", files + "/content", {"path": "a", "text": "x", "base64": "eA=="})["field"] == "base64"
    api.ok("PUT", files + "/content", {"path": "twice", "text": "x x"})
    assert api.fails(409, "POST", files + "/edit", {"path": "twice", "old": "x", "new": "y"})["field"] == "old"
    assert api.fails(400, "GET", files + "/grep", params={"pattern": "("})["field"] == "pattern"
    assert api.fails(413, "PUT", files + "/content", b"x" * (33 << 20))["reason"] == "too_large"


def test_any_size_up_and_down(api: Api, files: str) -> None:
    size = 24 << 20
    block = os.urandom(1 << 20)
    digest = hashlib.sha256(block * 24).hexdigest()

    def pieces() -> Iterator[bytes]:
        for _ in range(24):
            yield block

    entry = api.ok("PUT", files + "/upload", pieces(), params={"path": "big", "sha256": digest, "size": size})
    assert entry["size"] == size
    got = hashlib.sha256()
    answer = api("GET", files + "/download", params={"path": "big"}, stream=True)
    assert answer.headers["Content-Length"] == str(size)
    for chunk in answer.iter_content(1 << 20):
        got.update(chunk)
    assert got.hexdigest() == digest
    part = api("GET", files + "/download", params={"path": "big"}, headers={"Range": "bytes=1048570-1048580"})
    assert (part.status_code, part.content) == (206, (block * 2)[1048570:1048581])
    assert part.headers["Content-Range"] == f"bytes 1048570-1048580/{size}"
    tail = api("GET", files + "/download", params={"path": "big", "digest": "true"}, headers={"Range": "bytes=-5"})
    announced = base64.b64encode(hashlib.sha256(block[-5:]).digest()).decode()
    assert tail.headers["Content-Digest"] == f"sha-256=:{announced}:", "of what comes, which is a part"
    assert tail.content == block[-5:]
    assert "attachment" in tail.headers["Content-Disposition"]
    wrong = api.fails(400, "PUT", files + "/upload", block, params={"path": "bad", "sha256": "0" * 64})
    assert wrong["field"] == "sha256"
    assert api.fails(400, "PUT", files + "/upload", block, params={"path": "bad", "size": 5})["field"] == "size"
    assert api.fails(400, "PUT", files + "/upload", b"x", params={"path": "../bad"})["field"] == "path"
    assert api.ok("GET", files + "/exists", params={"path": "bad"})["exists"] is False


def test_an_upload_cut_short_leaves_nothing(api: Api, files: str) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"x" * (1 << 20)
        raise ConnectionError("the client has gone")

    with pytest.raises((ConnectionError, requests.ConnectionError)):
        api("PUT", files + "/upload", pieces(), params={"path": "cut"})
    time.sleep(0.5)  # for a half-written one to be found, if there were any
    assert api.ok("GET", files + "/exists", params={"path": "cut"})["exists"] is False
    assert api.ok("GET", files, params={"path": "."})["entries"]


def test_an_upload_beyond_the_quota_is_refused_early(api: Api, make: Make) -> None:
    path = make(limits={"disk": "20 MiB"}) + "/files/upload"

    def pieces() -> Iterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 20)

    # Not by requests, which leaves its socket behind when the server hangs up in the middle.
    connection = http.client.HTTPConnection("127.0.0.1", api.server.port, timeout=60)
    try:
        headers = {**{str(k): str(v) for k, v in api.http.headers.items()}, "Transfer-Encoding": "chunked"}
        target = f"{urlsplit(api.url(path)).path}?path=big"
        connection.request("PUT", target, pieces(), headers, encode_chunked=True)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["reason"]) == (413, "too_large")
    except ConnectionError:
        pass  # it was closed before the client had said all; that is fine too
    finally:
        connection.close()
    assert api.fails(413, "PUT", path, bytes(30 << 20), params={"path": "b"})["setting"] == "Policy.max_disk"


def test_who_is_refused_before_the_body_was_read_gets_to_read_why(api: Api) -> None:
    address = urlsplit(api.url("/sandboxes/none/files/upload?path=x"))
    for token in ("wrong", "agentbox_wrong"):
        lines = (f"PUT {address.path}?{address.query} HTTP/1.1", f"Host: {address.netloc}", "Content-Length: 1000000",
                 f"Authorization: token {token}")  # fmt: skip
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as raw:
            raw.sendall("\r\n".join((*lines, "", "")).encode())
            for _ in range(10):
                time.sleep(0.02)  # so that a connection that is closed already is noticed
                raw.sendall(bytes(100_000))
            answer = http.client.HTTPResponse(raw)
            answer.begin()
            assert answer.status == 401
            assert (answer.headers["Connection"], json.loads(answer.read())["reason"]) == ("close", "unauthenticated")
            assert raw.recv(1) == b""


def test_archives(api: Api, files: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("in/x.txt")
        info.size = 2
        archive.addfile(info, io.BytesIO(b"hi"))
        link = tarfile.TarInfo("in/evil")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    done = api.ok("PUT", files + "/archive", buffer.getvalue(), params={"path": "arch"})
    assert done["skipped_count"] == 1
    got = api("GET", files + "/archive", params={"path": "arch", "kind": "zip"})
    assert got.status_code == 200
    with zipfile.ZipFile(io.BytesIO(got.content)) as unzipped:
        assert unzipped.read("in/x.txt") == b"hi"
    got = api("GET", files + "/archive", params={"path": "arch"})
    with tarfile.open(fileobj=io.BytesIO(got.content)) as untarred:
        assert "in/x.txt" in untarred.getnames()
    api.fails(409, "GET", files + "/archive", params={"path": "arch/in/x.txt"})


def test_between_sandboxes_and_folders_of_the_host(api: Api, files: str, make: Make, exchange: dict[str, Path]) -> None:
    other = make(files={"from/y.txt": "yes"})
    done = api.ok("POST", files + "/import", {"sandbox": other.rpartition("/")[2], "source": "from", "target": "into"})
    assert done["entries"] >= 1
    assert api.ok("GET", files + "/content", params={"path": "into/y.txt"})["data"] == "yes"
    api.ok("POST", files + "/import", {"folder": "datasets", "source": "a.csv", "target": "data/a.csv"})
    assert api.ok("GET", files + "/content", params={"path": "data/a.csv"})["data"] == "x\n1\n"
    api.ok("POST", files + "/export", {"folder": "results", "source": "into", "target": "mine"})
    assert (exchange["results"] / "mine" / "y.txt").read_text() == "yes"
    error = api.fails(404, "POST", files + "/import", {"folder": "etc", "source": "a", "target": "b"})
    assert error["setting"] == "Policy.import_folders"
    api.fails(404, "POST", files + "/import", {"sandbox": "none", "source": "a", "target": "b"})
    api.fails(400, "POST", files + "/import", {"source": "a", "target": "b"})
    api.fails(400, "POST", files + "/import", {"folder": "datasets", "source": "../a.csv", "target": "b"})


def test_links_lead_nowhere_else(api: Api, box: str, files: str) -> None:
    api.ok("POST", box + "/exec", {"command": "ln -s /etc/passwd out; ln -s ../../.. up; mkfifo pipe"})
    for path in ("out", "up/etc/passwd", "pipe"):
        answer: Any = api("GET", files + "/content", params={"path": path})
        assert answer.status_code in (400, 404, 409), answer.text
        assert api("GET", files + "/download", params={"path": path}).status_code in (400, 404, 409)
