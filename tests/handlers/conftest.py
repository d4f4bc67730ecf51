"""A Jupyter server with the extension, and one sandbox for each module."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError


@pytest.fixture
def jp_server_config(tmp_path: Path) -> dict[str, Any]:
    return {
        "ServerApp": {"jpserver_extensions": {"jupyter_agentbox": True}, "allow_unauthenticated_access": False},
        "AgentboxExtension": {"keep_sandboxes": False},
        "Policy": {"state_dir": str(tmp_path / "state")},
    }


class Answer:
    """An answer, whatever its status."""

    def __init__(self, status: int, body: bytes, headers: Any) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Api = Callable[..., Awaitable[Answer]]


@pytest.fixture
def api(jp_fetch: Any) -> Api:
    """Return a caller of the API: verb, path, body, and more of the client's options."""

    async def call(verb: str, path: str, body: Any = None, **options: Any) -> Answer:
        if body is not None or verb in ("POST", "PATCH", "PUT"):
            options["body"] = body if isinstance(body, (bytes, str)) else json.dumps(body if body is not None else {})
        options.setdefault("request_timeout", 60)
        try:
            got = await jp_fetch("api", "agentbox", *path.strip("/").split("/"), method=verb, **options)
        except HTTPClientError as error:
            assert error.response is not None, error
            got = error.response
        return Answer(got.code, got.body, got.headers)

    return call
