"""Sandboxes over REST, on real gVisor."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("has_runsc")


async def test_one_life(api: Any) -> None:
    made = await api("POST", "/sandboxes", {"id": "mine", "labels": {"a": "b"}, "files": {"d/x.txt": "hello"}})
    assert made.status == 201, made.body
    assert made.json["state"] == "running"
    again = await api("POST", "/sandboxes", {"id": "mine", "labels": {"a": "b"}, "files": {"d/x.txt": "hello"}})
    assert (again.status, again.json["sandbox_id"]) == (200, made.json["sandbox_id"])
    other = await api("POST", "/sandboxes", {"id": "mine"})
    assert (other.status, other.json["reason"], other.json["field"]) == (409, "conflict", "id")
    ran = await api("POST", "/sandboxes/mine/exec", {"command": "cat d/x.txt; echo err >&2; exit 3"})
    assert ran.status == 200, ran.body
    assert (ran.json["stdout"], ran.json["stderr"], ran.json["exit_code"]) == ("hello", "err\n", 3)
    code = await api("POST", "/sandboxes/mine/code", {"code": "x = 20\nx + 1"})
    assert code.status == 200, code.body
    assert code.json["result"]["data"]["text/plain"] == "21"
    read = await api("GET", "/sandboxes/mine/files/content", params={"path": "d/x.txt"})
    assert read.json["data"] == "hello", read.body
    gone = await api("DELETE", "/sandboxes/mine")
    assert (gone.status, gone.body) == (204, b"")
    assert (await api("GET", "/sandboxes/mine")).status == 404
