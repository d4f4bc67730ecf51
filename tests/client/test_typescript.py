"""The TypeScript client: its types are the API's, and its own tests pass against a live server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT
from support.harness import Env

#: The packages that it is made with may have to be got first.
pytestmark = pytest.mark.timeout(900)

FOLDER = ROOT / "clients" / "typescript"
#: The compiler, which keeps what an earlier run has found out.
TSC = ("node", "node_modules/typescript/bin/tsc", "--incremental")


def run(*command: str | Path, **env: str) -> str:
    answer = subprocess.run(
        [str(part) for part in command],
        cwd=FOLDER,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert answer.returncode == 0, answer.stdout[-8000:]
    return answer.stdout


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    """Install what the client is made with, unless it is there as the lock file has it."""
    lock, done = FOLDER / "package-lock.json", FOLDER / "node_modules" / ".installed"
    if not done.exists() or done.read_bytes() != lock.read_bytes():
        run("npm", "ci", "--no-audit", "--no-fund")
        done.write_bytes(lock.read_bytes())


def test_the_types_are_those_of_the_api() -> None:
    run(sys.executable, FOLDER / "scripts" / "make_types.py", "--check")


def test_the_lock_file_names_no_registry() -> None:
    text = (FOLDER / "package-lock.json").read_text()
    assert '"integrity": "sha512-' in text
    assert '"resolved"' not in text


def test_the_package_needs_nothing_of_node() -> None:
    run(*TSC, "-p", "tsconfig.build.json", "--noEmit", "--tsBuildInfoFile", "build/package.tsbuildinfo")


def test_its_own_tests_pass_on_a_live_server(make_env: Callable[..., Env]) -> None:
    # What its `test` script does, without npm.
    run(*TSC, "-p", "tsconfig.json", "--tsBuildInfoFile", "build/tests.tsbuildinfo")
    env = make_env()
    extensions = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}"
    with env.server("server", extensions) as server:
        place = {"AGENTBOX_TEST_URL": server.url(""), "AGENTBOX_TEST_TOKEN": server.token}
        text = run("node", "--test", "build/test/live.test.js", **place)
    assert "# fail 0" in text
