"""The table of routes: what is documented is there and nothing else, and nobody comes in without the right."""

from __future__ import annotations

import asyncio
import errno
import re
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from jupyter_server.auth.authorizer import Authorizer
from tornado.httpclient import HTTPClientError

from jupyter_agentbox.api import TABLE
from jupyter_agentbox.api.base import AgentboxHandler
from jupyter_agentbox.api.failures import describe, invalid
from jupyter_agentbox.api.openapi import make_document
from jupyter_agentbox.api.routes import Route
from jupyter_agentbox.errors import AgentboxError, InvalidConfig, SandboxEnded
from jupyter_agentbox.jupyter.activity import KernelActivity
from jupyter_agentbox.models import TOOLS, SandboxRequest
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.service.registry import NotebookSandbox
from jupyter_agentbox.spec import Cause, End, SandboxSpec


class ReadOnly(Authorizer):
    def is_authorized(self, handler: Any, user: Any, action: str, resource: str) -> bool:
        return action == "read"


@pytest.fixture
def jp_server_config(tmp_path: Any) -> dict[str, Any]:
    return {
        "ServerApp": {
            "jpserver_extensions": {"jupyter_agentbox": True},
            "allow_unauthenticated_access": False,
        },
        "Policy": {"state_dir": str(tmp_path / "state")},
    }


def path_of(route: Route) -> list[str]:
    return ["api", "agentbox", *re.sub(r"{\w+}", "none", route.path).strip("/").split("/")]


async def status_of(fetch: Any, route: Route, **options: Any) -> int:
    if route.verb in ("post", "put", "patch"):
        options["body"] = "{}"
    try:
        return int((await fetch(*path_of(route), method=route.verb.upper(), **options)).code)
    except HTTPClientError as error:
        return error.code


async def test_every_route_needs_authentication(jp_fetch: Any) -> None:
    for route in TABLE:
        for headers in ({"Authorization": ""}, {"Authorization": "token wrong"}, {"Authorization": "Bearer x"}):
            assert await status_of(jp_fetch, route, headers=headers) == 401, route
    for path in (["agentbox", "docs"], ["agentbox", "docs.js"]):
        with pytest.raises(HTTPClientError) as caught:
            await jp_fetch(*path, headers={"Authorization": ""}, follow_redirects=False)
        assert caught.value.code in (302, 403)


async def test_a_reader_can_only_read(jp_fetch: Any, jp_serverapp: Any) -> None:
    settings = jp_serverapp.web_app.settings
    settings["authorizer"] = ReadOnly(parent=jp_serverapp, identity_provider=settings["identity_provider"])
    for route in TABLE:
        status = await status_of(jp_fetch, route)
        if route.action == "read":
            assert status != 403 or route.path.startswith("/audit"), route
        else:
            assert status == 403, route


async def test_document_and_server_are_one(jp_fetch: Any, jp_serverapp: Any) -> None:
    document = msgspec.json.decode((await jp_fetch("api", "agentbox", "openapi.json")).body)
    documented = {(verb, path) for path, verbs in document["paths"].items() for verb in verbs}
    others = {item for item in documented if re.search(r"/ports/|/socket$", item[1])}
    assert len(others) == 8
    assert documented - others == {(route.verb, route.path) for route in TABLE}
    live = set()
    app = jp_serverapp.web_app
    inner = [rule for outer in app.default_router.rules for rule in getattr(outer.target, "rules", [])]
    for rule in [*app.wildcard_router.rules, *inner]:
        handler = rule.target
        if isinstance(handler, type) and issubclass(handler, AgentboxHandler):
            live |= {(verb, route.path) for verb, route in handler.routes.items()}
    assert live == documented - others
    assert document["openapi"] == "3.1.0"
    assert document["servers"][0]["url"].endswith("/api/agentbox")


async def test_the_page_works_offline(jp_fetch: Any) -> None:
    page = await jp_fetch("agentbox", "docs")
    script = await jp_fetch("agentbox", "docs.js")
    assert "script-src 'self'" in page.headers["Content-Security-Policy"]
    for text in (page.body, script.body):
        assert not re.search(rb"https?://(?!127)", text)


async def test_a_gateway_is_noticed(jp_fetch: Any, jp_serverapp: Any) -> None:
    service = jp_serverapp.web_app.settings["agentbox"]
    service.gateway_url = "http://gateway.example.org:8888"
    health = msgspec.json.decode((await jp_fetch("api", "agentbox", "health")).body)
    assert health["status"] == "degraded"
    assert "gateway.example.org" in health["checks"][-1]["message"]


async def test_the_server_is_not_idle_while_a_call_goes_on(jp_serverapp: Any) -> None:
    (extension,) = jp_serverapp.extension_manager.extension_apps["jupyter_agentbox"]
    sandboxes = jp_serverapp.web_app.settings["agentbox"].sandboxes
    assert extension.current_activity() is None
    managed = ManagedSandbox("busy", "somebody", SandboxRequest())
    sandboxes.registry.sandboxes[managed.key] = managed
    try:
        managed.begin()
        assert extension.current_activity() == {"busy": {"name": "busy"}}
        managed.done()
        assert extension.current_activity() is None
    finally:
        del sandboxes.registry.sandboxes[managed.key]


async def test_use_of_a_notebooks_sandbox_is_activity_of_its_kernel() -> None:
    kernel, spec = SimpleNamespace(last_activity=None), SandboxSpec(kernel_id="k")

    class Kernels(dict[str, Any]):
        last_kernel_activity: Any = None
        get_kernel = dict.__getitem__

    activity = KernelActivity(Kernels(k=kernel), asyncio.get_running_loop())
    managed, other = (NotebookSandbox(name, "somebody", activity.used) for name in "ab")
    managed.spec, other.spec = spec, SandboxSpec(kernel_id="gone")

    async def told() -> Any:
        """Wait for the next word."""
        kernel.last_activity = None
        deadline = time.monotonic() + 60
        while kernel.last_activity is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        return kernel.last_activity

    await asyncio.to_thread(other.begin)  # another server's, or one that has just ended
    managed.begin()
    begun = await told()
    during = [await told() for _ in range(2)]
    managed.done()
    other.done()
    assert begun < during[0] < during[1] < await told()
    assert activity._kernels.last_kernel_activity == kernel.last_activity


def test_the_document_is_sound() -> None:
    document = make_document(TABLE)
    names = [operation["operationId"] for verbs in document["paths"].values() for operation in verbs.values()]
    assert len(names) == len(set(names))
    text = msgspec.json.encode(document).decode()
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document["components"]["schemas"]
    for route in TABLE:
        assert route.summary, route
        assert route.tool is None or route.tool in TOOLS, route
        assert all(name in ("id", "process", "context", "ask", "token", "snapshot") for name in route.parameters)
        if route.action == "read":
            assert route.verb == "get" or route.name == "export_files", route
    assert "----" not in text
    schemas = document["components"]["schemas"]
    for verbs in document["paths"].values():
        for operation in verbs.values():
            for parameter in operation.get("parameters", []):
                assert parameter["description"], (operation["operationId"], parameter)
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            for name, item in (
                schemas[content["schema"]["$ref"].rsplit("/", 1)[1]]["properties"].items() if content else ()
            ):
                assert "$ref" in item or item["description"], (operation["operationId"], name)


def test_every_error_has_a_status() -> None:
    def all_kinds(kind: type[AgentboxError]) -> list[type[AgentboxError]]:
        return [kind, *(inner for child in kind.__subclasses__() for inner in all_kinds(child))]

    # The client's own kinds are what an answer becomes at its other end.
    for kind in (kind for kind in all_kinds(AgentboxError) if ".client" not in kind.__module__):
        error = SandboxEnded(End(Cause.KILLED, 137, "gone", "x")) if kind is SandboxEnded else kind("a sentence")
        status, answer = describe(error)
        assert status != 500, kind
        assert answer.message
    assert describe(InvalidConfig("x", setting="Policy.y"))[1].setting == "Policy.y"
    status, answer = describe(ValueError("a secret of the server"))
    assert (status, "secret" in answer.message) == (500, False)
    for code, expected, words in (
        (errno.ENOSPC, 507, "is full"),
        (errno.EROFS, 503, "read-only"),
        (errno.EMFILE, 503, "open files"),
    ):
        status, answer = describe(OSError(code, "a secret of the server", "/a/secret"))
        assert (status, "secret" in answer.message) == (expected, False)
        assert words in answer.message


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b'{"foo": 1}', "foo"),
        (b'{"limits": {"cpus": "x"}}', "limits.cpus"),
        (b'{"limits": {"foo": 1}}', "limits.foo"),
        (b'{"packages": [1]}', "packages"),
        (b'{"files": {"a": {"base64": "%"}}}', "files.base64"),
        (b"{", None),
    ],
)
def test_the_field_at_fault_is_named(text: bytes, field: str | None) -> None:
    with pytest.raises(msgspec.MsgspecError) as caught:
        msgspec.json.decode(text, type=SandboxRequest)
    assert invalid(caught.value, "the body").field == field
