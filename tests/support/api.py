"""Call the REST API concisely from tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import requests

from support.harness import Server

#: Long, so that the sandbox shared by all tests survives on a slow machine.
LEASE = 30.0


class Api:
    """Calls to one server's REST API by one user."""

    def __init__(self, server: Server, token: str | None = None) -> None:
        self.server = server
        self.http = requests.Session()
        self.http.trust_env = False
        self.http.headers["Authorization"] = f"token {token or server.token}"

    def url(self, path: str) -> str:
        return self.server.url("api/agentbox" + path)

    def __call__(self, verb: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        """Make a call. Asserts only that the server did not fail."""
        if body is not None:
            options["json" if isinstance(body, (dict, list)) else "data"] = body
        options.setdefault("timeout", 150)
        answer = self.http.request(verb, self.url(path), **options)
        assert answer.status_code != 500, f"{answer.text}\n{self.server.log.read_text()[-6000:]}"
        return answer

    def ok(self, verb: str, path: str, body: Any = None, **options: Any) -> Any:
        """Make a call that must succeed, and return the decoded answer."""
        answer = self(verb, path, body, **options)
        assert answer.ok, f"{verb} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def fails(self, status: int, verb: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """Make a call that must fail with this status, and return the error."""
        answer = self(verb, path, body, **options)
        assert answer.status_code == status, f"{verb} {path}: {answer.status_code} {answer.text}"
        error: dict[str, Any] = answer.json()
        assert error["message"]
        assert error["reason"]
        return error

    def counted(self, name: str) -> float:
        """Return the sum of the server's metrics whose lines begin with `name`."""
        text = self.server.http.get(self.server.url("metrics"), timeout=60).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def events(self, verb: str, path: str, body: Any = None, **options: Any) -> Iterator[tuple[str, Any]]:
        """Yield the server-sent events of a call."""
        answer = self(verb, path, body, stream=True, **options)
        assert answer.status_code == 200, answer.text
        assert answer.headers["Content-Type"] == "text/event-stream"
        name = ""
        try:
            for line in answer.iter_lines(chunk_size=1):
                if line.startswith(b"event: "):
                    name = line[7:].decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])
        finally:
            answer.close()


def make_server_config(**policy: Any) -> dict[str, Any]:
    return {"Policy": {"lease_timeout": LEASE, **policy}}


class Holder(Api):
    """Calls with a token for one sandbox."""

    def __init__(self, api: Api, token: str, scheme: str = "Bearer") -> None:
        super().__init__(api.server, token)
        self.token = token
        self.http.headers["Authorization"] = f"{scheme} {token}"


def give(api: Api, path: str, verbs: list[str], **more: Any) -> Holder:
    return Holder(api, api.ok("POST", f"{path}/tokens", {"verbs": verbs, **more})["token"])


Make = Callable[..., str]
