"""Generate the OpenAPI 3.1 document from the table of routes and their structs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from jupyter_agentbox import __version__
from jupyter_agentbox.models import ErrorAnswer

if TYPE_CHECKING:
    from .routes import Route

_REF = "#/components/schemas/{name}"
_DESCRIPTION = """\
Sandboxes for agents and programs, isolated by gVisor, with network access by host name.

Every call needs Jupyter's own authentication, such as `Authorization: token ...`, or a token for one sandbox, which
you can give to an agent instead: `Authorization: Bearer agentbox_...`. Errors are always
`{"message", "reason", "field"?, "setting"?}`; `setting` is the administrator's setting that controls the behaviour."""
_PARAMETERS = {
    "id": "Id of a sandbox, chosen by the caller or generated. For a notebook's sandbox, also its kernel's id.",
    "process": "Id of a background process.",
    "context": "Name of one of the sandbox's kernels.",
    "ask": "Id of a host request.",
    "token": "Id of a token (not the token itself).",
    "snapshot": "Id of a snapshot.",
}
#: Fields that mean the same in all requests; a struct's own description of a field comes first.
_FIELDS = {
    "after": "Number of lines to return after each match.",
    "after_id": "Return rows with a higher id only, to continue after the last row of a page.",
    "all": "Replace every occurrence, however many there are.",
    "allowed_hosts": "Hosts that the sandbox may reach.",
    "argv": "Program and its arguments, run without a shell.",
    "base64": "Content as base64, for data that is not text.",
    "before": "Number of lines to return before each match.",
    "body": "Body as text.",
    "body_base64": "Body as base64, for data that is not text.",
    "columns": "Width of the terminal, in characters.",
    "command": "Command line, run by the shell.",
    "count": "Number of times that the text must occur.",
    "depth": "Number of levels to descend; unlimited by default.",
    "digest": "Send the SHA-256 of the data in the `Content-Digest` header.",
    "encoding": "Encoding of the data: `base64`, or `utf-8`, in which invalid bytes become U+FFFD.",
    "env": "Additional environment variables.",
    "exist_ok": "Succeed if the directory exists.",
    "follow": "Follow a link to its target.",
    "glob": "Search only files whose path matches this pattern.",
    "headers": "Header lines.",
    "ignore_case": "Ignore upper and lower case.",
    "is_allowed": "Return only decisions that allowed (true) or refused (false).",
    "is_last": "Close the standard input afterwards.",
    "is_literal": "Search for the pattern as plain text.",
    "kind": "Return only rows of this kind, such as `egress` or `lifecycle`.",
    "labels": "Labels that the caller chooses.",
    "language": "Programming language.",
    "length": "Number of bytes to read; up to the maximum by default.",
    "limit": "Maximum number of results.",
    "method": "HTTP method.",
    "missing_ok": "Succeed if there is nothing to delete.",
    "new": "Text to put in its place.",
    "note": "Note of the caller.",
    "offset": "Position of the first byte.",
    "old": "Text to replace.",
    "overwrite": "Replace an existing entry.",
    "parents": "Create missing parent directories.",
    "path": "Path in the workspace.",
    "pattern": "Pattern to search for.",
    "ports": "TCP ports that can be reached through the server.",
    "recursive": "Include directories with all that is in them.",
    "rows": "Height of the terminal, in lines.",
    "sha256": "SHA-256 that the data must have, in hexadecimal.",
    "signal": "Name or number of the signal.",
    "since": "Return rows from this time on, in seconds since the epoch.",
    "size": "Size in bytes.",
    "stderr_offset": "Position of the first byte of standard error.",
    "stdout_offset": "Position of the first byte of standard output.",
    "stream": "Which output to read.",
    "text": "Content as text.",
    "timeout": "Maximum number of seconds.",
    "until": "Return rows up to this time, in seconds since the epoch.",
    "user": "User to run it as: `root` only if the profile allows it.",
    "wait": "Seconds to wait for new output.",
    "why": "Reason for the request, shown to the person who decides.",
    "workdir": "Working directory; the sandbox's own by default.",
}
_TAGS = (
    ("files", "Files"),
    ("exec", "Commands"),
    ("processes", "Commands"),
    ("terminals", "Commands"),
    ("code", "Code"),
    ("contexts", "Code"),
    ("packages", "Packages"),
    ("egress", "Egress"),
    ("http", "Egress"),
    ("audit", "Audit"),
    ("tokens", "Tokens"),
    ("snapshots", "Snapshots"),
    ("restore", "Snapshots"),
    ("fork", "Snapshots"),
    ("park", "Snapshots"),
    ("wake", "Snapshots"),
    ("sandboxes", "Sandboxes"),
)


def make_document(table: Iterable[Route]) -> dict[str, Any]:
    """Describe all routes of a table."""
    routes = list(table)
    structs = list(dict.fromkeys(_structs(routes)))
    schemas, components = msgspec.json.schema_components(structs, ref_template=_REF)
    _describe(components, [route.body for route in routes if route.body is not None])
    for schema in components.values():
        _without_tuples(schema)
    references = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.verb] = _operation(route, references, components)
    paths |= _passages(references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Jupyter Agentbox", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "The Jupyter server's own token: `token ...`. It permits every call.",
                },
                "cookie": {
                    "type": "apiKey",
                    "in": "cookie",
                    "name": "username-*",
                    "description": "Jupyter's login. Calls that change anything also need the header `X-XSRFToken`.",
                },
                "scoped": {
                    "type": "http",
                    "scheme": "bearer",
                    "bearerFormat": "agentbox_<payload>.<signature>",
                    "description": "A token for one sandbox, from `POST /sandboxes/{id}/tokens`. The roles of an "
                    "operation are the verbs that it needs. It expires, can be revoked, and ends with the sandbox.",
                },
            },
        },
        "security": [{"token": []}, {"cookie": []}],
        "tags": [{"name": name} for name in dict.fromkeys([name for _, name in _TAGS] + ["Ports", "Service"])],
    }


def _structs(routes: Iterable[Route]) -> Iterable[type]:
    yield ErrorAnswer
    for route in routes:
        if route.body is not None:
            yield route.body
        if isinstance(route.answer, dict):
            yield from route.answer.values()
        elif inspect.isclass(route.answer) and issubclass(route.answer, msgspec.Struct):
            yield route.answer


def _describe(components: dict[str, Any], requests: Iterable[type]) -> None:
    """Convert docstrings, which msgspec includes as a whole, into descriptions of a schema and of its properties."""
    for schema in components.values():
        if "description" in schema:
            _describe_by_docstring(schema)
    for struct in requests:
        for name, item in components[struct.__name__]["properties"].items():
            if name in _FIELDS and "$ref" not in item:
                item.setdefault("description", _FIELDS[name])


def _describe_by_docstring(schema: dict[str, Any]) -> None:
    head, _, rest = inspect.cleandoc(schema["description"]).partition("\nParameters\n")
    schema["description"] = " ".join(head.split())
    lines = rest.splitlines()[1:]
    names: list[str] = []
    texts: dict[str, list[str]] = {}
    for line in lines:
        if line and not line[0].isspace():
            names = [name.strip() for name in line.partition(" : ")[0].split(",")]
        elif names and line.strip():
            for name in names:
                texts.setdefault(name, []).append(line.strip())
    for name, found in texts.items():
        if name in schema.get("properties", {}):
            schema["properties"][name].setdefault("description", " ".join(found))


def _without_tuples(schema: Any) -> None:
    """Describe tuples as arrays of a fixed length, because client generators do not know ``"items": false``."""
    if isinstance(schema, list):
        for item in schema:
            _without_tuples(item)
    elif isinstance(schema, dict):
        if schema.get("items") is False:
            kinds = schema.pop("prefixItems", [])
            schema["items"] = kinds[0] if all(kind == kinds[0] for kind in kinds) else {"anyOf": kinds}
        for item in schema.values():
            _without_tuples(item)


def _passages(references: dict[type, Any]) -> dict[str, dict[str, Any]]:
    """Describe the paths that are not in the table: a terminal's websocket, and the ports of programs inside."""

    def parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
        return {"name": name, "in": "path", "required": True, "schema": schema, "description": description}

    failures: dict[str, Any] = {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": references[ErrorAnswer]}},
        }
        for status in (400, 401, 403, 404, 409, 410, 429, 500, 502, 503, 504, 507)
    }
    sandbox = parameter("id", {"type": "string"}, _PARAMETERS["id"])
    process = parameter("process", {"type": "string"}, _PARAMETERS["process"])
    port = parameter("port", {"type": "integer", "minimum": 1, "maximum": 65535}, "One of the sandbox's `ports`.")
    path = parameter("path", {"type": "string"}, "Path and query of the request to the program.")
    security = [{"token": []}, {"cookie": []}, {"scoped": ["execute"]}]
    socket: dict[str, Any] = {
        "operationId": "connect_terminal",
        "summary": "Connect to a terminal over a websocket",
        "description": "Binary frames are the terminal's input and output. Text frames are JSON: "
        "`{rows, columns}` sets the size, `{exit_code}` reports its end. A browser offers the subprotocols `agentbox` "
        "and its token.",
        "tags": ["Commands"],
        "x-action": "execute",
        "security": security,
        "parameters": [sandbox, process],
        "responses": failures | {"101": {"description": "Switching Protocols"}},
    }
    ports: dict[str, Any] = {
        verb: {
            "operationId": f"{verb}_port",
            "summary": "Send a request to a program that listens on a port of the sandbox",
            "description": "Any path, query and body, and websockets. The response is the program's, or an error of "
            "this API.",
            "tags": ["Ports"],
            "x-action": "execute",
            "security": security,
            "parameters": [sandbox, port, path],
            "responses": failures | {"default": {"description": "The program's response."}},
        }
        for verb in ("get", "head", "post", "put", "patch", "delete", "options")
    }
    return {
        "/sandboxes/{id}/terminals/{process}/socket": {"get": socket},
        "/sandboxes/{id}/ports/{port}/{path}": ports,
    }


def _operation(route: Route, references: dict[type, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "tags": [_tag(route.path)],
        "x-action": route.action,
        "responses": _responses(route, references),
    }
    if route.takes_scope:
        operation["security"] = [{"token": []}, {"cookie": []}, {"scoped": [route.right]}]
    if route.description:
        operation["description"] = re.sub(r"(?<!\n)\n(?!\n)", " ", route.description)
    if route.tool is not None:
        operation["x-tool"] = route.tool
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "description": _PARAMETERS[name]}
        for name in route.parameters
    ]
    if route.query is not None:
        parameters += _query(route.query)
    if route.name == "download_file":
        schema = {"type": "string"}
        text = "Range of bytes, as in RFC 9110."
        parameters.append({"name": "Range", "in": "header", "required": False, "schema": schema, "description": text})
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        is_needed = any(item.required for item in msgspec.structs.fields(route.body))
        content = {"application/json": {"schema": references[route.body]}}
        operation["requestBody"] = {"required": is_needed, "content": content}
    elif route.kind == "upload":
        binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": binary}
    return operation


def _query(struct: type[msgspec.Struct]) -> list[dict[str, Any]]:
    (_,), components = msgspec.json.schema_components([struct], ref_template=_REF)
    _describe(components, [struct])
    properties = components[struct.__name__]["properties"]
    parameters = []
    for item in msgspec.structs.fields(struct):
        schema = dict(properties[item.encode_name])
        # In a query, an omitted parameter has the meaning of null in a body.
        choices = [choice for choice in schema.get("anyOf", []) if choice != {"type": "null"}]
        if len(choices) == 1:
            schema = {**{k: v for k, v in schema.items() if k not in ("anyOf", "default")}, **choices[0]}
        parameter = {"name": item.encode_name, "in": "query", "required": item.required, "schema": schema}
        if "description" in schema:
            parameter["description"] = schema.pop("description")
        if item.default_factory is list:
            parameter |= {"style": "form", "explode": True}
        parameters.append(parameter)
    return parameters


def _responses(route: Route, references: dict[type, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status in route.statuses:
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if status >= 400:
            response["content"] = {"application/json": {"schema": references[ErrorAnswer]}}
        elif status != 204:
            response["content"] = _content(route, references)
        responses[str(status)] = response
    return responses


def _content(route: Route, references: dict[type, Any]) -> dict[str, Any]:
    if route.kind == "download":
        is_export = route.name.startswith("export_") and "audit" in route.name
        kind = "application/jsonl" if is_export else "application/octet-stream"
        return {kind: {"schema": {"type": "string", "format": "binary"}}}
    if route.kind == "events":
        kinds = {name: references[struct] for name, struct in route.answer.items()}
        kinds["failure"] = references[ErrorAnswer]
        event = {
            "type": "object",
            "description": "An event. `data` is JSON with the schema that `x-events` has for its name.",
            "properties": {
                "event": {"type": "string", "enum": list(kinds)},
                "data": {"type": "string", "contentMediaType": "application/json"},
            },
            "required": ["event", "data"],
        }
        return {"text/event-stream": {"schema": event, "x-events": kinds}}
    schema = references.get(route.answer) if inspect.isclass(route.answer) else None
    return {"application/json": {"schema": schema or {"type": "object"}}}


def _tag(path: str) -> str:
    words = [word for word in path.split("/") if word and not word.startswith("{")]
    for word in words[1:2] or words[:1]:
        for known, name in _TAGS:
            if word == known:
                return name
    return "Sandboxes" if words[0] == "sandboxes" else "Service"
