"""Every operation of the document, tried by schemathesis on sandboxes, processes and snapshots that are there."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import CHECKS as KNOWN
from schemathesis.checks import load_all_checks
from support.api import Api
from support.harness import Env

from jupyter_agentbox.api.routes import TABLE

#: The sandbox that most calls are on, and one for those that end it, park it or change its terms.
MAIN, SPARE = "main", "spare"
ON_SPARE = frozenset({"delete_sandbox", "patch_sandbox", "park_sandbox", "wake_sandbox", "restore_sandbox"})
#: Calls that start, save or load something: tried less often, and a loaded machine may answer 503.
DEAR = frozenset({
    "create_sandbox", "fork_sandbox", "take_snapshot", "create_context", "restart_context", "delete_context",
    "install_packages", "stream_installation", "export_snapshot", "delete_snapshot", *ON_SPARE,
})  # fmt: skip
#: Calls that wait for a process's end, and so get one that has ended.
WAITING = frozenset({"wait_process", "follow_process", "read_output"})
#: Seconds that commands, code and installations may take.
PATIENCE = 2.0
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@pytest.fixture(scope="module")
def own_api(make_env: Callable[..., Env]) -> Iterator[Api]:
    """A server of the test's own, as any sandbox of it may be ended. Nothing on it reaches a network."""
    policy = {"lease_timeout": 30.0, "max_sandboxes_per_owner": 4, "allowed_hosts": ["fuzz.invalid"]}
    env = make_env(config={"Policy": policy})
    extensions = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}"
    with env.server("server", extensions) as running:
        made = Api(running)
        yield made
        made.http.close()


class Pinner:
    """Puts ids of what is there into calls, made if need be, and keeps calls from taking long."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def pin(self, name: str, case: schemathesis.Case) -> None:
        """Make a call be about what is there."""
        sandbox = SPARE if name in ON_SPARE else MAIN
        for parameter in case.path_parameters or {}:
            case.path_parameters[parameter] = self._real(parameter, name, sandbox)
        body = case.body
        if isinstance(body, dict) and isinstance(body.get("snapshot"), str):
            body["snapshot"] = self._real("snapshot", name, sandbox)

    def tame(self, name: str, case: schemathesis.Case) -> None:
        """Keep it from lasting, and from adding a kernel or a sandbox at each call."""
        body, query = case.body, case.query
        if name in ("create_sandbox", "fork_sandbox"):
            for item in self._api.ok("GET", "/sandboxes")["sandboxes"]:
                if item["id"] not in (MAIN, SPARE) and item["state"] != "ended":
                    self._api("DELETE", f"/sandboxes/{item['id']}")
        if isinstance(body, dict):
            if name == "create_sandbox" and body.get("packages"):
                body["packages"] = body["packages"][:0] if isinstance(body["packages"], list) else body["packages"]
            if name == "create_context" and isinstance(body.get("name"), str) and _NAME.fullmatch(body["name"]):
                body["name"] = "fuzz"
            if isinstance(body.get("context"), str):
                body["context"] = "default"
        for values, parameters in ((body, ("timeout",)), (query, ("timeout", "wait"))):
            if isinstance(values, dict):
                for parameter in parameters:
                    if is_number(values.get(parameter)):
                        values[parameter] = min(values[parameter], PATIENCE)
        timed = ("run_command", "stream_command", "run_code", "stream_code", "http_request", "install_packages",
                 "stream_installation", "wait_process")  # fmt: skip
        values = query if name == "wait_process" else body
        if name in timed and isinstance(values, dict):
            values.setdefault("timeout", PATIENCE)

    def _real(self, parameter: str, operation: str, sandbox: str) -> str:
        api, at = self._api, f"/sandboxes/{sandbox}"
        if parameter == "id":
            api.ok("POST", "/sandboxes", {"id": sandbox})
            return sandbox
        if parameter == "process":
            if operation == "resize_terminal":
                return str(api.ok("POST", at + "/terminals", {"command": "sleep 1000"})["id"])
            line = "true" if operation in WAITING else "exec sleep 1000"
            for found in api.ok("GET", at + "/processes")["processes"]:
                if found["command"] == line and (found["state"] == "exited") == (operation in WAITING):
                    return str(found["id"])
            made = api.ok("POST", at + "/processes", {"command": line})
            if operation in WAITING:
                api.ok("GET", f"{at}/processes/{made['id']}/wait")
            return str(made["id"])
        if parameter == "snapshot":
            found = api.ok("GET", at + "/snapshots")["snapshots"]
            return str((found[-1] if found else api.ok("POST", at + "/snapshots", {}))["id"])
        if parameter == "token":
            return str(api.ok("POST", at + "/tokens", {"verbs": ["read"]})["info"]["id"])
        if parameter == "ask":
            asked = [item for item in api.ok("GET", at + "/egress/asks")["asks"] if item["state"] == "pending"]
            if not asked:
                api.ok("PATCH", at, {"allowed_hosts": []})
                asked = [api.ok("POST", at + "/egress/asks", {"host": "fuzz.invalid"})]
            return str(asked[0]["id"])
        assert parameter == "context"
        api.ok("POST", at + "/contexts", {"name": "fuzz"})
        return "fuzz"


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@pytest.mark.timeout(600)  # some 600 calls, of which a busy machine may make two a second
@pytest.mark.parametrize("is_dear", [False, True], ids=["cheap", "dear"])
def test_every_operation_on_what_is_there(own_api: Api, is_dear: bool) -> None:
    load_all_checks()
    schema = schemathesis.openapi.from_dict(own_api.ok("GET", "/openapi.json"))
    checks = [KNOWN.get_one(name) for name in CHECKS]
    pinner, statuses = Pinner(own_api), defaultdict[str, set[int]](set)
    routes = {route.name: route for route in TABLE if (route.name in DEAR) == is_dear}
    for found in schema.get_all_operations():
        operation = found.ok()
        name = operation.definition.raw["operationId"]
        if name in routes:
            has_fields = routes[name].body is not None or routes[name].query is not None
            for mode in MODES[: 1 + has_fields]:  # where there is no field nothing can be wrong with one
                try_operation(own_api, pinner, operation, mode, checks, statuses[name])
    assert statuses.keys() == routes.keys()
    for name, route in routes.items():
        assert not route.parameters or statuses[name] - {404}, f"{name} has only said that there is no such thing"


def try_operation(api: Api, pinner: Pinner, operation: Any, mode: Any, checks: list[Any], statuses: set[int]) -> None:
    """Make a few calls of one operation, the same ones each time; each third is about what is not there."""
    name = operation.definition.raw["operationId"]
    tried = 0

    @hypothesis.settings(
        max_examples=2 if name in DEAR else 4, derandomize=True, deadline=None, database=None,
        phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def try_one(case: schemathesis.Case) -> None:
        nonlocal tried
        tried += 1
        if tried % 3 or name in DEAR:
            pinner.pin(name, case)
        pinner.tame(name, case)
        headers = {"Authorization": f"token {api.server.token}"}
        response = case.call(base_url=api.url(""), session=api.http, headers=headers, timeout=100)
        statuses.add(response.status_code)
        case.validate_response(response, checks=checks[response.status_code in (503, 504) and name in DEAR :])

    try_one()
