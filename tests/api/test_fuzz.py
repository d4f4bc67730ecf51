"""Schemathesis against the served document on a live server: nothing undocumented, and no fault of the server's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.api import Api

#: Calls that would take away what the others are tried on, or wait for long: `test_fuzz_real` tries them.
LEFT_OUT = (
    "create_sandbox", "delete_sandbox", "patch_sandbox", "wait_process", "install_packages", "stream_installation",
    "http_request", "create_context", "restart_context", "connect_terminal",
)  # fmt: skip
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CONFIG = """
[parameters]
"path.id" = "{id}"
"""


def test_nothing_undocumented_and_no_fault(api: Api, box: str, tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG.format(id=box.rpartition("/")[2]))
    command = [
        sys.executable, "-m", "schemathesis.cli", f"--config-file={config}", "run", api.url("/openapi.json"),
        f"--header=Authorization: token {api.server.token}", f"--checks={CHECKS}", "--max-examples=6",
        "--phases=examples,coverage,fuzzing", "--request-timeout=60", "--no-color", "--max-time=20",
        "--suppress-health-check=all", "--generation-deterministic", f"--url={api.url('')}",
        *(f"--exclude-operation-id={name}" for name in LEFT_OUT),
    ]  # fmt: skip
    before = {item["id"] for item in api.ok("GET", "/sandboxes")["sandboxes"]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=tmp_path)
    for item in api.ok("GET", "/sandboxes")["sandboxes"]:  # forks: other tests are to have room for theirs
        if item["id"] not in before:
            api("DELETE", f"/sandboxes/{item['id']}")
    assert done.returncode == 0, _shortened(done.stdout) + done.stderr[-2000:]


def _shortened(text: str) -> str:
    return "\n".join(line[:300] for line in text.splitlines())[-12_000:]
