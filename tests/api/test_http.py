"""Requests that are sent in a sandbox's name, to a server that policy lets it reach."""

from __future__ import annotations

import importlib
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.api import Api


def package_index() -> str:
    """Return the address of the index that pip is set to, as pip itself finds it."""
    # By name: pip has no stubs.
    commands: Any = importlib.import_module("pip._internal.commands")
    address: str = commands.create_command("download").parser.get_default_values().index_url
    return address.rstrip("/")


@pytest.mark.network
def test_a_request_goes_out_through_the_gate(api: Api, box: str) -> None:
    address = package_index()
    host = urlsplit(address).hostname
    metric = 'agentbox_egress_total{decision="allowed"}'
    counted = api.counted(metric)
    before = api.ok("GET", box + "/egress/log", params={"is_allowed": "true", "limit": 100})["rows"]
    request = {"url": f"{address}/iniconfig/", "headers": {"Accept": "text/html"}, "timeout": 60}
    answer = api.ok("POST", box + "/http", request, timeout=90)
    assert (answer["status"], answer["truncated"], answer["encoding"]) == (200, False, "utf-8")
    assert "html" in {name.lower(): value for name, value in answer["headers"]}["content-type"]
    assert "iniconfig-" in answer["body"]
    rows = api.ok("GET", box + "/egress/log", params={"is_allowed": "true", "limit": 100})["rows"]
    assert host in {row["host"] for row in rows if row not in before}
    assert api.counted(metric) > counted

    # The same from inside: the gate makes no difference between the two.
    code = f"import urllib.request as r; print(r.urlopen({address + '/iniconfig/'!r}, timeout=60).status)"
    inside = api.ok("POST", box + "/exec", {"argv": ["python3", "-c", code], "timeout": 90}, timeout=100)
    assert (inside["exit_code"], inside["stdout"]) == (0, "200\n"), inside["stderr"]

    cut = api.ok("POST", box + "/http", {**request, "max_bytes": 10}, timeout=90)
    assert (cut["status"], cut["truncated"], len(cut["body"])) == (200, True, 10)


@pytest.mark.network
def test_a_head_and_a_missing_page_are_answered_as_they_are(api: Api, box: str) -> None:
    address = package_index()
    head = api.ok("POST", box + "/http", {"url": f"{address}/iniconfig/", "method": "HEAD"}, timeout=90)
    assert (head["status"], head["body"]) == (200, "")
    missing = api.ok("POST", box + "/http", {"url": f"{address}/iniconfig/no-such-page/"}, timeout=90)
    assert missing["status"] == 404
    other = api.fails(403, "POST", box + "/http", {"url": "https://not-the-index.example/"})
    assert other["setting"] == "Policy.allowed_hosts"
