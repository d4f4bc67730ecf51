"""Write ``src/schema.ts``: the types of the REST API, made from its OpenAPI document by openapi-typescript.

``npm run generate`` runs it with the Python that has jupyter_agentbox. ``--check`` only says whether the file is what
it would write.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jupyter_agentbox.api import TABLE
from jupyter_agentbox.api.openapi import make_document

FOLDER = Path(__file__).resolve().parents[1]
TARGET = FOLDER / "src" / "schema.ts"
HEAD = "// Made by scripts/make_types.py from the OpenAPI document: change the API, and run `npm run generate`.\n\n"


def make() -> str:
    """Return the file's text."""
    document = make_document(TABLE)
    for path in document["paths"].values():
        for operation in path.values():
            # Every failure is an ErrorAnswer, which is thrown: to say it for each status would be half of the file.
            operation["responses"] = {k: v for k, v in operation["responses"].items() if k == "default" or int(k) < 400}
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "openapi.json"), Path(folder, "schema.ts")
        source.write_text(json.dumps(document))
        program = FOLDER / "node_modules" / ".bin" / "openapi-typescript"
        options = ["--empty-objects-unknown", "--default-non-nullable=false"]
        command = [str(program), str(source), "--output", str(made), *options]
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
        text = made.read_text()
    body = text.partition("*/\n")[2].lstrip()
    return "\n".join([HEAD + body, routes(document), events(document)])


def routes(document: dict[str, Any]) -> str:
    """Return the table of all operations: the one thing here that is there at run time too."""
    lines = ["/** For each operation: its verb and its path. */", "export const ROUTES = {"]
    for path, item in document["paths"].items():
        lines += [f'    {operation["operationId"]}: ["{verb.upper()}", "{path}"],' for verb, operation in item.items()]
    return "\n".join([*lines, "} as const;", ""])


def events(document: dict[str, Any]) -> str:
    """Return the types of what event streams send, which OpenAPI itself has no words for."""
    lines = ["/** For each operation that answers events: their names, and what their data is. */"]
    lines.append("export interface EventStreams {")
    for path in document["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("200", {}).get("content", {}).get("text/event-stream")
            if content is None:
                continue
            lines.append(f"    {operation['operationId']}: {{")
            for name, schema in content["x-events"].items():
                if name != "failure":  # which is thrown
                    reference = schema["$ref"].rpartition("/")[2]
                    lines.append(f'        {name}: components["schemas"]["{reference}"];')
            lines.append("    };")
    return "\n".join([*lines, "}", ""])


if __name__ == "__main__":
    text = make()
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.exists() and TARGET.read_text() == text else "src/schema.ts is stale: npm run generate")
    TARGET.write_text(text)
