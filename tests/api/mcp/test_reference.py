"""The tools as they are listed, and as the page on them says."""

from __future__ import annotations

import re

import jsonschema
from mcp import Client
from support import ROOT
from support.mcp_client import Endpoint

from jupyter_agentbox.api.mcp.tools import TOOLS
from jupyter_agentbox.api.routes import TABLE
from jupyter_agentbox.models import TOOLS as WORDS

PAGE = ROOT / "docs" / "mcp.md"


def test_the_page_names_every_tool() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(tool.name, tool.route.right, tool.description) for tool in TOOLS.values()]


def test_tools_are_described_and_bounded(endpoint: Endpoint) -> None:
    async def test(client: Client) -> None:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(listed) == list(TOOLS)
        for tool in listed.values():
            jsonschema.Draft202012Validator.check_schema(tool.input_schema)
            assert tool.input_schema["type"] == "object"
            assert tool.input_schema["additionalProperties"] is False
            assert 20 < len(tool.description or "") < 400
            for name, field in tool.input_schema["properties"].items():
                assert field.get("description") or name in ("method", "headers"), f"{tool.name}.{name}"
        hints = {name: tool.annotations for name, tool in listed.items()}
        assert hints["read"].read_only_hint is True
        assert hints["bash"].read_only_hint is False
        assert hints["bash"].destructive_hint is True
        assert hints["stop_sandbox"].destructive_hint is True
        assert hints["create_sandbox"].destructive_hint is False

    endpoint.run(test)


def test_each_word_of_a_sandboxs_tools_is_there_or_left_out_on_purpose() -> None:
    left_out = {"terminal"}  # that is for people
    covered = {tool.route.tool for tool in TOOLS.values()}
    assert not covered & left_out
    assert covered | left_out >= set(WORDS)
    assert all(tool.route in TABLE for tool in TOOLS.values())
