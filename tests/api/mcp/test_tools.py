"""Every tool, over HTTP, by the SDK's own client."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from mcp import Client
from support.mcp_client import MODES, Endpoint, text_of


@pytest.mark.parametrize("mode", MODES)
def test_code_keeps_its_variables_and_shows_plots(endpoint: Endpoint, box: str, mode: str) -> None:
    async def test(client: Client) -> None:
        assert text_of(await client.call_tool("run_code", {"code": "x = 20"})) == "done, no output"
        ran = await client.call_tool(
            "run_code", {"code": "import sys\nprint('out'); print('err', file=sys.stderr)\nx + 1"}
        )
        assert text_of(ran) == "out\n[stderr]\nerr\n21"
        plot = "import base64\nfrom IPython.display import Image, SVG, display\ndisplay(Image(base64.b64decode("
        plot += "'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=')))\n"
        plot += "display(SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'))"
        shown = await client.call_tool("run_code", {"code": plot})
        images = [block for block in shown.content if block.type == "image"]
        assert [block.mime_type for block in images] == ["image/png", "image/svg+xml"]
        assert base64.b64decode(images[0].data).startswith(b"\x89PNG")
        failed = await client.call_tool("run_code", {"code": "1/0"})
        assert failed.is_error
        assert "ZeroDivisionError: division by zero" in text_of(failed)
        assert "\x1b" not in text_of(failed)
        late = await client.call_tool("run_code", {"code": "import time\ntime.sleep(60)", "timeout": 1})
        assert late.is_error
        assert "timed out" in text_of(late)

    endpoint.run(test, mode=mode)


def test_contexts_and_notebooks_kernels(endpoint: Endpoint, box: str) -> None:
    kernel = endpoint.server.kernel()
    kernel.check("shared_value = 7")

    async def test(client: Client) -> None:
        listed = (await client.call_tool("list_sandboxes", {})).structured_content["sandboxes"]
        notebook = next(item for item in listed if item["kind"] == "notebook")
        assert notebook["kernels"][0]["id"] == kernel.id
        ran = await client.call_tool("run_code", {"sandbox": kernel.id, "code": "shared_value += 1; shared_value"})
        assert text_of(ran) == "8"
        other = await client.call_tool(
            "run_code", {"sandbox": kernel.id, "code": "shared_value", "context": "other", "timeout": 60}
        )
        assert "NameError" in text_of(other)
        stopped = await client.call_tool("stop_sandbox", {"sandbox": kernel.id})
        assert stopped.is_error
        assert "shut down the kernel" in text_of(stopped)

    endpoint.run(test)
    assert kernel.check("print(shared_value)") == "8\n"
    kernel.shutdown()


def test_a_parked_sandbox_is_still_the_only_one(endpoint: Endpoint, box: str) -> None:
    assert endpoint.server.call("POST", f"api/agentbox/sandboxes/{box}/park")["state"] == "parked"

    async def test(client: Client) -> None:
        listed = (await client.call_tool("list_sandboxes", {})).structured_content["sandboxes"]
        assert [item["state"] for item in listed if item["id"] == box] == ["parked"]
        ran = await client.call_tool("bash", {"command": "echo woken"})
        assert text_of(ran) == "woken"

    endpoint.run(test)


@pytest.mark.parametrize("mode", MODES)
def test_commands(endpoint: Endpoint, box: str, mode: str) -> None:
    async def test(client: Client) -> None:
        ran = await client.call_tool("bash", {"command": "echo out; echo err >&2; exit 3"})
        assert text_of(ran) == "out\n[stderr]\nerr\n[exit code 3]"
        late = await client.call_tool("bash", {"command": "echo begun; sleep 60", "timeout": 4})
        assert late.is_error
        assert "begun" in text_of(late)
        assert "killed after 4 s" in text_of(late)
        refused = await client.call_tool("bash", {"command": "forbidden-program --now"})
        assert refused.is_error
        assert "blocked_commands" in text_of(refused)
        started = await client.call_tool(
            "bash",
            {
                "command": f"echo one; until [ -e go-{mode} ]; do sleep 0.1; done; echo two; sleep 300",
                "background": True,
            },
        )
        process = started.structured_content["id"]
        first = text_of(await client.call_tool("bash_output", {"process": process, "wait": 60}))
        assert first.startswith("one\n\n[running; next offset 4")
        await client.call_tool("write", {"path": f"go-{mode}", "text": ""})
        second = text_of(await client.call_tool("bash_output", {"process": process, "offset": 4, "wait": 60}))
        assert second.startswith("two\n")
        killed = (await client.call_tool("bash_kill", {"process": process})).structured_content
        assert (killed["state"], killed["exit_code"]) == ("exited", 137)
        last = text_of(await client.call_tool("bash_output", {"process": process, "offset": 8}))
        assert "exited with code 137; next offset 8, end of output" in last

    endpoint.run(test, mode=mode)


def test_files(endpoint: Endpoint, box: str) -> None:
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes([0, 0, 0, 9] * 2)
    png = base64.b64encode(header + bytes(50_000)).decode()

    async def test(client: Client) -> None:
        async def call(tool: str, **arguments: object) -> str:
            result = await client.call_tool(tool, arguments)
            assert not result.is_error, text_of(result)
            return text_of(result)

        await call("write", path="src/a.py", text="one = 1\ntwo = 2\nthree = 3\n")
        await call("edit", path="src/a.py", old="two = 2", new="two = 'zwei'")
        assert await call("read", path="src/a.py") == "one = 1\ntwo = 'zwei'\nthree = 3\n"
        assert await call("list", recursive=True, path="src") == "src/a.py"
        assert "src/" in await call("list")
        assert await call("glob", pattern="**/*.py") == "src/a.py"
        assert await call("grep", pattern="zwei", context=1) == (
            "src/a.py-1:one = 1\nsrc/a.py:2:two = 'zwei'\nsrc/a.py-3:three = 3"
        )
        twice = await client.call_tool("edit", {"path": "src/a.py", "old": " = ", "new": "="})
        assert twice.is_error
        assert "3 times" in text_of(twice)

        await call("write", path="u.txt", text="ä" * 100)
        part = await client.call_tool("read", {"path": "u.txt", "length": 101})
        assert part.content[0].text == "ä" * 50
        assert part.content[1].text == "[bytes 0 to 100 of 200; continue at offset 100]"

        await call("upload", path="p.png", base64=png)
        shown = await client.call_tool("read", {"path": "p.png"})
        assert [block.type for block in shown.content] == ["image"]
        assert shown.content[0].data == png
        await call("upload", path="b.bin", base64="AAEC")
        await call("upload", path="b.bin", base64="/w==", append=True)
        got = await client.call_tool("download", {"path": "b.bin", "offset": 1})
        assert base64.b64decode(got.content[1].resource.blob) == b"\x01\x02\xff"
        binary = await client.call_tool("read", {"path": "b.bin"})
        assert binary.is_error
        assert "use download" in text_of(binary)

        for path in ("../../etc/passwd", "/etc/passwd"):
            assert (await client.call_tool("read", {"path": path})).is_error
        assert (await client.call_tool("read", {"path": "none"})).is_error

    endpoint.run(test)


def test_sandboxes(endpoint: Endpoint, box: str) -> None:
    async def test(client: Client) -> None:
        files = {"a.txt": "x", "b": {"base64": "AA=="}}
        request = {"id": "own", "files": files, "labels": {"for": "test"}, "allowed_hosts": []}
        made = await client.call_tool("create_sandbox", request)
        assert (made.structured_content["state"], made.structured_content["labels"]) == ("running", {"for": "test"})
        again = await client.call_tool("create_sandbox", request)
        assert again.structured_content["sandbox_id"] == made.structured_content["sandbox_id"]
        which = await client.call_tool("bash", {"command": "ls"})
        assert which.is_error
        assert "set sandbox to one of" in text_of(which)
        assert text_of(await client.call_tool("bash", {"sandbox": "own", "command": "ls"})) == "a.txt\nb"
        stopped = await client.call_tool("stop_sandbox", {"sandbox": "own"})
        assert text_of(stopped) == "the sandbox has ended"
        assert "'own' does not exist" in text_of(await client.call_tool("bash", {"sandbox": "own", "command": "ls"}))
        over = await client.call_tool("create_sandbox", {"idle_timeout": 30_000_000})
        assert over.is_error
        assert over.structured_content["setting"] == "Policy.max_idle_timeout"
        assert "Policy.max_idle_timeout" in text_of(over)
        unknown = await client.call_tool("create_sandbox", {"privileged": True})
        assert unknown.structured_content["field"] == "privileged"

    endpoint.run(test)


def test_an_agent_undoes_and_forks(endpoint: Endpoint, box: str) -> None:
    async def test(client: Client) -> None:
        async def call(tool: str, **arguments: object) -> Any:
            result = await client.call_tool(tool, {"sandbox": "shared", **arguments})
            assert not result.is_error, text_of(result)
            return result.structured_content or text_of(result)

        await call("run_code", code="undone = 1")
        saved = await call("snapshot", name="before", note="all is well")
        assert (await call("list_snapshots"))["snapshots"] == [saved]
        await call("run_code", code="undone = 2")
        fork = await call("fork", id="forked", snapshot=saved["id"])
        assert fork["id"] == "forked"
        assert await call("run_code", code="undone", sandbox="forked") == "1"
        assert await call("run_code", code="undone") == "2"
        await call("stop_sandbox", sandbox="forked")
        await call("restore", snapshot=saved["id"])
        assert await call("run_code", code="undone") == "1"
        wrong = await client.call_tool("restore", {"sandbox": "shared", "snapshot": "0" * 20})
        assert wrong.is_error
        assert "does not exist" in text_of(wrong)

    endpoint.run(test)


def test_a_sandboxs_own_tools_hold(endpoint: Endpoint, box: str) -> None:
    """MCP is under the same list of tools as REST, and in the same audit log."""
    server = endpoint.server
    server.call("POST", "api/agentbox/sandboxes", {"id": "narrow", "tools": ["read", "list"]})

    async def test(client: Client) -> None:
        refused = await client.call_tool("bash", {"sandbox": "narrow", "command": "true"})
        assert refused.is_error
        assert "'bash' is not allowed in this sandbox" in text_of(refused)
        assert not (await client.call_tool("list", {"sandbox": "narrow"})).is_error

    endpoint.run(test)
    rows = server.call("GET", "api/agentbox/sandboxes/narrow/audit?kind=call")["rows"]
    assert [(row["detail"]["tool"], row["is_allowed"]) for row in rows] == [("bash", False), ("list", True)]
    server.call("DELETE", "api/agentbox/sandboxes/narrow")


def test_the_network(endpoint: Endpoint, box: str) -> None:
    async def test(client: Client) -> None:
        known = (await client.call_tool("hosts", {})).structured_content
        assert known["hosts"]
        assert known["asks"] == []
        request = {"url": "http://not-allowed.example/"}
        refused = await client.call_tool("http_request", request)
        assert refused.is_error
        assert "not-allowed.example" in text_of(refused)
        assert "Policy.allowed_hosts" in text_of(refused)
        asked = await client.call_tool("ask_host", {"host": "not-allowed.example", "why": "to test"})
        assert asked.is_error
        inside = "curl -sS --max-time 20 http://not-allowed.example/; true"
        assert "[refused: " in text_of(await client.call_tool("bash", {"command": inside}))
        return None

    endpoint.run(test)


@pytest.mark.network
def test_packages(endpoint: Endpoint, box: str) -> None:
    told: list[str] = []

    async def test(client: Client) -> None:
        async def progress(done: float, total: float | None, message: str | None) -> None:
            told.append(message or "")

        installed = await client.call_tool("install", {"packages": ["six"], "upgrade": True, "timeout": 200},
                                           progress_callback=progress)  # fmt: skip
        assert not installed.is_error, text_of(installed)
        before = len(told)
        made = await client.call_tool("create_sandbox", {"id": "packed", "packages": ["six"]},
                                      progress_callback=progress)  # fmt: skip
        assert not made.is_error, text_of(made)
        assert any("six" in line for line in told[before:])
        await client.call_tool("stop_sandbox", {"sandbox": "packed"})
        hostile = await client.call_tool("install", {"packages": ["--index-url=http://x"]})
        assert hostile.is_error
        assert "is not a valid package name" in text_of(hostile)
        fetched = await client.call_tool("run_code", {"code": "import six; print(six.__name__)"})
        assert text_of(fetched) == "six"

    endpoint.run(test)
    assert any("six" in line for line in told)
