"""Who may come over HTTP, what a call that is abandoned leaves, and what hostile output does."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
from typing import Any

import anyio
import httpx2
import pytest
import requests
from mcp import Client, MCPError
from PIL import Image
from support.harness import wait_until
from support.mcp_client import MODES, Endpoint, text_of, upload_in_parts

HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


def post(endpoint: Endpoint, body: Any, token: str | None = None, **options: Any) -> requests.Response:
    """Send a request without the SDK's client."""
    headers = {**HEADERS, **options.pop("headers", {})}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with requests.Session() as http:
        http.trust_env = False
        return http.post(endpoint.url, data=data, headers=headers, timeout=60, **options)


def make_token(endpoint: Endpoint, sandbox: str, *verbs: str) -> str:
    made = endpoint.server.call("POST", f"api/agentbox/sandboxes/{sandbox}/tokens", {"name": "t", "verbs": list(verbs)})
    return str(made["token"])


def test_only_a_token_opens_it(endpoint: Endpoint) -> None:
    server = endpoint.server
    for token in (None, "wrong"):
        answer = post(endpoint, INITIALIZE, token)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["reason"] == "unauthenticated"
    assert post(endpoint, INITIALIZE, "agentbox_e30.AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA").status_code == 401
    # A browser's cookie, even with what protects Jupyter's own API from other pages, is no token.
    with requests.Session() as browser:
        browser.trust_env = False
        browser.get(server.url(f"api/contents?token={server.token}"), timeout=60)
        browser.get(server.url("tree"), timeout=60)
        assert browser.get(server.url("api/contents"), timeout=60).ok, "the cookie is good"
        xsrf = browser.cookies.get("_xsrf") or ""
        for headers in ({}, {"X-XSRFToken": xsrf}, {"Origin": "http://evil.example", "X-XSRFToken": xsrf}):
            answer = browser.post(endpoint.url, json=INITIALIZE, headers={**HEADERS, **headers}, timeout=60)
            assert answer.status_code in (401, 404), answer.text
            assert "mcp-session-id" not in answer.headers
        assert browser.get(endpoint.url, headers=HEADERS, timeout=60).status_code == 401
    # A name that was made to lead here.
    rebound = post(endpoint, INITIALIZE, server.token, headers={"Host": "evil.example"})
    assert rebound.status_code == 403
    assert post(endpoint, INITIALIZE, server.token).ok


def test_requests_are_bounded_and_nonsense_is_refused(endpoint: Endpoint) -> None:
    token = endpoint.server.token
    assert post(endpoint, b"x" * (9 * 1024 * 1024), token).status_code == 413
    assert post(endpoint, b"{", token).status_code == 400
    assert post(endpoint, b"[" * 100_000, token).status_code == 400
    assert post(endpoint, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, token).status_code == 400
    assert post(endpoint, INITIALIZE, token, headers={"Content-Type": "text/plain"}).status_code == 400

    async def test(client: Client) -> None:
        with pytest.raises(MCPError, match="unknown tool"):
            await client.call_tool("no_such_tool", {})
        assert (await client.call_tool("read", {"path": 5})).structured_content["field"] == "path"

    endpoint.run(test)


def test_a_session_is_its_callers_own(endpoint: Endpoint, box: str) -> None:
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    opened = post(endpoint, INITIALIZE, endpoint.server.token)
    session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert post(endpoint, ready, endpoint.server.token, headers=session).status_code == 202
    assert post(endpoint, listing, endpoint.server.token, headers=session).ok
    foreign = make_token(endpoint, box, "read")
    assert post(endpoint, listing, foreign, headers=session).status_code == 404
    assert post(endpoint, listing, headers=session).status_code == 401
    # No caller has more than so many at a time, and others are not kept out by it.
    opened_by_it = [post(endpoint, INITIALIZE, foreign).status_code for _ in range(17)]
    assert opened_by_it == [200] * 16 + [503]
    assert post(endpoint, listing, endpoint.server.token, headers=session).ok


@pytest.mark.parametrize("mode", MODES)
def test_a_token_for_one_sandbox(endpoint: Endpoint, box: str, mode: str) -> None:
    server = endpoint.server
    server.call("POST", "api/agentbox/sandboxes", {"id": "scoped", "tools": ["read", "write", "list", "bash"]})
    token = make_token(endpoint, "scoped", "read", "write")

    async def test(client: Client) -> None:
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert {"read", "write", "list_sandboxes"} <= names
        assert not names & {"bash", "run_code", "create_sandbox", "install", "grep", "http_request"}
        written = await client.call_tool("write", {"path": "a.txt", "text": "hello"})
        assert not written.is_error, text_of(written)
        assert text_of(await client.call_tool("read", {"path": "a.txt"})) == "hello"
        listed = (await client.call_tool("list_sandboxes", {})).structured_content["sandboxes"]
        assert [item["id"] for item in listed] == ["scoped"]
        for name, arguments in {
            "bash": {"command": "id"},
            "run_code": {"code": "1"},
            "create_sandbox": {},
            "http_request": {"url": "http://a.example/"},
        }.items():
            refused = await client.call_tool(name, arguments)
            assert refused.is_error, name
            assert refused.structured_content["reason"] == "forbidden", name
        foreign = await client.call_tool("read", {"sandbox": box, "path": "a.txt"})
        assert foreign.structured_content["reason"] == "not_found"

    endpoint.run(test, token, mode)
    rows = server.call("GET", "api/agentbox/sandboxes/scoped/audit?kind=call")["rows"]
    assert all(row["detail"]["token_name"] == "t" for row in rows if row["is_allowed"])
    server.call("DELETE", "api/agentbox/sandboxes/scoped")
    assert post(endpoint, INITIALIZE, token).status_code == 401


def count(endpoint: Endpoint, box: str, mark: str) -> int:
    """Count processes inside that have a mark in their command line."""
    line = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^{mark}$' || true"
    answer = endpoint.server.call("POST", f"api/agentbox/sandboxes/{box}/exec", {"argv": ["sh", "-c", line]})
    return int(answer["stdout"])


@pytest.mark.parametrize("mode", MODES)
def test_a_call_that_is_cancelled_ends(endpoint: Endpoint, box: str, mode: str) -> None:
    mark = f"30{MODES.index(mode)}1"

    async def test(client: Client) -> None:
        for name, arguments in {
            "bash": {"command": f"sleep {mark}"},
            "run_code": {"code": f"import subprocess, time\nsubprocess.Popen(['sleep', '{mark}'])\ntime.sleep(300)"},
        }.items():
            with anyio.move_on_after(90):
                async with anyio.create_task_group() as group:
                    group.start_soon(client.call_tool, name, arguments)
                    while not await asyncio.to_thread(count, endpoint, box, mark):
                        await asyncio.sleep(0.1)
                    group.cancel_scope.cancel()
            if name == "bash":
                await asyncio.to_thread(wait_until, lambda: not count(endpoint, box, mark), 60, "the command has ended")
        # The kernel is free again, and the client's session goes on.
        assert text_of(await client.call_tool("run_code", {"code": "'free'"})) == "'free'"

    endpoint.run(test, mode=mode)
    endpoint.call("bash", command=f"pkill -f 'sleep {mark}'; true")


def test_a_client_that_hangs_up_ends_its_call(endpoint: Endpoint, box: str) -> None:
    async def test() -> None:
        headers = {**HEADERS, "Authorization": f"Bearer {endpoint.server.token}"}
        async with httpx2.AsyncClient(headers=headers, trust_env=False, timeout=60) as http:
            opened = await http.post(endpoint.url, json=INITIALIZE)
            session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
            await http.post(
                endpoint.url, json={"jsonrpc": "2.0", "method": "notifications/initialized"}, headers=session
            )
            call = {"name": "bash", "arguments": {"sandbox": box, "command": "sleep 3021"}}
            request = {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": call}
            async with http.stream("POST", endpoint.url, json=request, headers=session) as answer:
                assert answer.status_code == 200
                while not await asyncio.to_thread(count, endpoint, box, "3021"):
                    await asyncio.sleep(0.1)
        await asyncio.to_thread(wait_until, lambda: not count(endpoint, box, "3021"), 90, "the command has ended")

    asyncio.run(asyncio.wait_for(test(), 200))


@pytest.mark.parametrize("mode", MODES)
def test_progress_comes_while_the_work_goes_on(endpoint: Endpoint, box: str, mode: str) -> None:
    async def test(client: Client) -> None:
        # They go on when their first word has been heard, and not before.
        heard = f"/tmp/heard-{mode}"
        line = f"echo first; until [ -e {heard}-bash ]; do sleep 0.1; done; echo second"
        wait = f"import os, time\nwhile not os.path.exists('{heard}-code'): time.sleep(0.1)"
        for name, file, arguments in (
            ("bash", f"{heard}-bash", {"command": line}),
            ("run_code", f"{heard}-code", {"code": f"print('first', flush=True)\n{wait}\nprint('second')"}),
        ):
            told: list[tuple[float, str]] = []

            async def progress(
                done: float, total: float | None, message: str | None, told: Any = told, file: str = file
            ) -> None:
                told.append((done, message or ""))
                if told[-1][1].startswith("first"):  # and not that it is silent as yet
                    touch = {"argv": ["touch", file]}
                    await asyncio.to_thread(endpoint.server.call, "POST", f"api/agentbox/sandboxes/{box}/exec", touch)

            result = await client.call_tool(name, arguments, progress_callback=progress)
            assert text_of(result) == "first\nsecond"
            assert any(text.startswith("first") for _, text in told)
            assert [done for done, _ in told] == sorted({done for done, _ in told})

    endpoint.run(test, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_long_or_silent_tells_that_it_goes_on(endpoint: Endpoint, box: str, mode: str) -> None:
    async def test(client: Client) -> None:
        async def call(tool: str, **arguments: Any) -> tuple[Any, str]:
            told: list[tuple[float, str]] = []

            async def progress(done: float, total: float | None, message: str | None) -> None:
                told.append((done, message or ""))

            result = await client.call_tool(tool, arguments, progress_callback=progress)
            assert not result.is_error, text_of(result)
            assert [done for done, _ in told] == sorted({done for done, _ in told})
            return result.structured_content, "".join(text for _, text in told)

        name = f"told-{mode[:6]}"
        _, text = await call("create_sandbox", id=name)
        assert text.startswith("[Create a sandbox: started]\n")
        _, text = await call("bash", sandbox=name, command="sleep 7")
        assert re.match(r"\[Run a command: \d+ s so far\]\n", text)
        if mode == MODES[0]:  # what a call tells is the same, however it is sent
            await start_others(call, name)
        await call("stop_sandbox", sandbox=name)

    async def start_others(call: Any, name: str) -> None:
        saved, text = await call("snapshot", sandbox=name)
        assert text.startswith("[Take a snapshot: started]\n")
        _, text = await call("restore", sandbox=name, snapshot=saved["id"])
        assert text.startswith("[Restore a snapshot: started]\n")
        fork, text = await call("fork", sandbox=name, snapshot=saved["id"])
        assert text.startswith("[Fork the sandbox: started]\n")
        await call("stop_sandbox", sandbox=fork["id"])

    endpoint.run(test, mode=mode)


def test_a_dead_session_is_unknown_and_a_new_one_can_begin(endpoint: Endpoint, box: str) -> None:
    headers = {
        "Authorization": f"Bearer {endpoint.server.token}",
        "Accept": "application/json, text/event-stream",
        "Mcp-Session-Id": "0123456789abcdef0123456789abcdef",
    }

    def post(method: str, params: dict[str, Any]) -> requests.Response:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return requests.post(endpoint.url, json=message, headers=headers, timeout=60)

    assert post("tools/list", {}).status_code == 404
    begun = post(
        "initialize",
        {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
    )
    assert begun.status_code == 200
    assert begun.headers["Mcp-Session-Id"] != headers["Mcp-Session-Id"]
    headers["Mcp-Session-Id"] = begun.headers["Mcp-Session-Id"]
    assert requests.delete(endpoint.url, headers=headers, timeout=60).status_code == 200
    assert post("tools/list", {}).status_code == 404


def test_large_images_are_reduced_and_saved_in_full(endpoint: Endpoint, box: str) -> None:
    noise = (
        "import numpy\nfrom PIL import Image\nfrom IPython.display import display\n"
        "full = Image.fromarray(numpy.random.default_rng(1).integers(0, 255, (1500, 3000, 3), 'uint8'))\n"
        "display(full)\nfull.crop((0, 0, 3000, 300)).save('mine.png')"
    )
    plot = "import matplotlib.pyplot as plt\nplt.figure(figsize=(30, 20), dpi=200)\nplt.plot([1, 3, 2])\nplt.show()"

    def size_of(result: Any) -> tuple[int, int]:
        (block,) = [block for block in result.content if block.type == "image"]
        content = base64.b64decode(block.data)
        assert len(content) <= 1_000_000
        shown = Image.open(io.BytesIO(content))
        assert Image.MIME[str(shown.format)] == block.mime_type
        return shown.size

    async def test(client: Client) -> None:
        shown = await client.call_tool("run_code", {"code": noise})
        width, height = size_of(shown)
        assert max(width, height) <= 2000
        assert width == pytest.approx(2 * height, abs=2)
        found = re.search(r"the image of 3000 x 1500 pixels \(.* MiB\) was reduced; in full: (\S+)]", text_of(shown))
        assert found is not None, text_of(shown)
        same = f"import numpy\nprint((numpy.asarray(Image.open('{found[1]}')) == numpy.asarray(full)).all())"
        assert text_of(await client.call_tool("run_code", {"code": same})) == "True"
        read = await client.call_tool("read", {"path": "mine.png"})
        assert max(size_of(read)) <= 2000
        assert "was reduced; in full: mine.png]" in text_of(read)

        limits = {"image_pixels": 100, "image_bytes": 20_000}
        small = await client.call_tool("run_code", {"code": "display(full)", **limits})
        assert max(size_of(small)) <= 100
        assert max(size_of(await client.call_tool("run_code", {"code": plot}))) == 2000
        # What cannot be decoded, or would take too much memory.
        bad = (
            "import base64, struct\nfor sides in ((3000, 3000), (60000, 60000), (0, 9)):\n"
            "    data = b'\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR' + struct.pack('>II', *sides) + bytes(99)\n"
            "    display({'image/png': base64.b64encode(data).decode(), 'text/plain': 'x'}, raw=True)\n"
            "display({'image/svg+xml': '<svg>' + ' ' * 2_000_000}, raw=True)"
        )
        left_out = await client.call_tool("run_code", {"code": bad})
        assert [block.type for block in left_out.content] == ["text"]
        assert text_of(left_out).count("could not be reduced to the limits; in full: agentbox-images/") == 4

    endpoint.run(test)


def test_an_edit_keeps_the_line_ends_of_the_file(endpoint: Endpoint, box: str) -> None:
    async def test(client: Client) -> None:
        for first, after in ((b"", b""), (b"\xef\xbb\xbf", b"c = 4\n")):
            content = first + b"a = 1\r\nb = 2\r\n" + after
            await client.call_tool("upload", {"path": "windows.txt", "base64": base64.b64encode(content).decode()})
            made = await client.call_tool("edit", {"path": "windows.txt", "old": "a = 1\nb = 2", "new": "a = 1\nb = 3"})
            assert not made.is_error, text_of(made)
            seen = text_of(await client.call_tool("read", {"path": "windows.txt"}))
            again = {"path": "windows.txt", "old": seen, "new": seen + "d = 5\n", "all": True}
            assert not (await client.call_tool("edit", again)).is_error
            shown = text_of(await client.call_tool("bash", {"command": "base64 -w0 windows.txt"}))
            assert base64.b64decode(shown) == first + b"a = 1\r\nb = 3\r\n" + after + b"d = 5\n"

    endpoint.run(test)


def test_floods_keep_their_end_and_progress_bars_their_last_state(endpoint: Endpoint, box: str) -> None:
    flood = "for i in range(60000): print('step', i, 'x' * 20)\nprint('RESULT 42')"
    bars = (
        "import sys\nfor i in range(3000): print(f'\\r{i + 1:4}/3000 [{i * 50 // 3000 * chr(35):50}]', end='', "
        "file=sys.stderr)\nprint(file=sys.stderr)\nprint('RESULT 42')"
    )

    async def test(client: Client) -> None:
        for tool, arguments in (("run_code", {"code": flood}), ("bash", {"command": f'python3 -c "{flood}"'})):
            shown = text_of(await client.call_tool(tool, arguments))
            assert shown.startswith("step 0 xxx")
            assert "RESULT 42" in shown[-200:]
            assert "bytes of output left out]\n" in shown
            assert len(shown) < 41_000
        for tool, arguments in (("run_code", {"code": bars}), ("bash", {"command": f'python3 -c "{bars}"'})):
            shown = text_of(await client.call_tool(tool, arguments))
            assert [line.split(" [")[0] for line in shown.splitlines()] == ["RESULT 42", "[stderr]", "3000/3000"]
        windows = await client.call_tool("bash", {"command": r"printf 'a\r\nb\r\n'"})
        assert text_of(windows) == "a\nb"

    endpoint.run(test)


def test_output_is_bounded_and_harmless(endpoint: Endpoint, box: str) -> None:
    async def test(client: Client) -> None:
        big = await client.call_tool("bash", {"command": "yes 0123456789 | head -c 30000000; echo the end"})
        assert len(text_of(big)) < 41_000
        assert "[29,960,008 bytes of output left out]" in text_of(big)
        assert text_of(big).endswith("the end")
        flood = await client.call_tool("run_code", {"code": "print('y' * 5_000_000)"})
        assert len(text_of(flood)) < 42_000
        assert "in total: 5,000,001 bytes to stdout" in text_of(flood)

        escapes = await client.call_tool(
            "bash", {"command": r"printf '\033[31mred\033[0m \033]0;title\007 \001 \377 \0'"}
        )
        assert text_of(escapes) == "red  \ufffd \ufffd \ufffd"
        lies = (
            "from IPython.display import display\n"
            "for data in ({'image/png': 'AAAA'}, {'image/png': '!!'}, {'image/jpeg': ['x']}, {'image/svg+xml': 'no'},"
            " {'x/\\x1b[0m': '1'}, {'text/plain': '\\ud800'}):\n"
            "    display(data, raw=True)\n"
        )
        shown = await client.call_tool("run_code", {"code": lies})
        assert [block.type for block in shown.content] == ["text"]
        assert "\x1b" not in text_of(shown)
        assert text_of(shown).count("[a display omitted: its data is not image/") == 3
        died = await client.call_tool("run_code", {"code": "import os\nos._exit(3)", "context": "dies"})
        assert died.is_error
        assert "kernel died" in text_of(died)
        many = await client.call_tool(
            "run_code",
            {"code": "import base64\nfor i in range(25):\n    display({'image/png': base64.b64encode("
             "b'\\x89PNG\\r\\n\\x1a\\n\\0\\0\\0\\rIHDR' + bytes([0, 0, 0, 9] * 2)).decode()}, raw=True)"},
        )  # fmt: skip
        assert len([block for block in many.content if block.type == "image"]) == 20
        assert text_of(many).count("omitted: too many images]") == 5

    endpoint.run(test)
    # Names that are no UTF-8.
    made = endpoint.call("bash", command="mkdir -p odd && cd odd && touch $'a\\xff' $'b\\033[31m' $'c\\nd'")
    assert not made.is_error
    listed = endpoint.call("list", path="odd")
    assert not listed.is_error, text_of(listed)
    assert "\x1b" not in text_of(listed)


def test_work_of_a_revoked_token_ends(endpoint: Endpoint, box: str) -> None:
    server = endpoint.server
    made = server.call("POST", f"api/agentbox/sandboxes/{box}/tokens", {"name": "r", "verbs": ["execute", "read"]})

    async def test() -> None:
        results = []
        with contextlib.suppress(Exception):  # how the client says it is the client's own
            async with endpoint.connect(made["token"], "2026-07-28") as client:
                call = asyncio.ensure_future(client.call_tool("bash", {"command": "sleep 3031"}))
                while not await asyncio.to_thread(count, endpoint, box, "3031"):
                    await asyncio.sleep(0.1)
                path = f"api/agentbox/sandboxes/{box}/tokens/{made['info']['id']}"
                await asyncio.to_thread(server.call, "DELETE", path)
                results.append(await call)
        assert results == []
        await asyncio.to_thread(wait_until, lambda: not count(endpoint, box, "3031"), 60, "the command has ended")

    asyncio.run(asyncio.wait_for(test(), 200))


@pytest.mark.parametrize("mode", MODES)
def test_a_long_upload_tells_how_far_it_is(endpoint: Endpoint, box: str, mode: str) -> None:
    endpoint.run(lambda client: upload_in_parts(client, 6), mode=mode)
