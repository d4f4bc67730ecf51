"""JupyterLab in a real browser, before a real server on real gVisor."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from support.harness import Env
from support.lab import BUILT, PATIENCE, SCREENS, SOURCES, run_npm


@pytest.fixture(autouse=True)
def jp_asyncio_loop() -> None:
    """Playwright has a loop of its own on this thread, so pytest-jupyter's is not to be made and closed here."""


@pytest.fixture(autouse=True)
def jp_server_cleanup() -> None:
    """Have no server of pytest-jupyter's to clean up after."""


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Have what is expected of a page waited for as long as everything else."""
    expect.set_options(timeout=PATIENCE)
    yield
    expect.set_options(timeout=5000)


@pytest.fixture(scope="session")
def npm_packages() -> Path:
    """Install what checks the sources, unless it is there as the lock file has it."""
    lock, done = SOURCES / "package-lock.json", SOURCES / "node_modules" / ".installed"
    with lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # other processes of these tests want them too
        if not done.exists() or done.read_bytes() != lock.read_bytes():
            run_npm("npm", "ci", "--no-audit", "--no-fund", "--prefer-offline")
            done.write_bytes(lock.read_bytes())
    return SOURCES / "node_modules"


@pytest.fixture(scope="module")
def make_lab(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Env]]:
    """Return a maker of Jupyter environments that have the extension as it was built from this tree."""
    made: list[Env] = []

    def make(**policy: Any) -> Env:
        policy = {"lease_timeout": 30.0, "allowed_hosts": ["allowed.test"], **policy}
        env = Env(tmp_path_factory.mktemp("lab"), {"Policy": policy})
        made.append(env)
        # In a virtual environment Jupyter would take what was installed there, be it older.
        env.variables["JUPYTER_PREFER_ENV_PATH"] = "0"
        shutil.copytree(BUILT, env.data / "labextensions" / "jupyter-agentbox")
        settings = env.config_dir / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
        # Tests open further notebooks in a page that is loaded already.
        (env.config_dir / "jupyter_lab_config.json").write_text('{"LabApp": {"expose_app_in_browser": true}}')
        return env

    yield make
    for env in made:
        env.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Debian's Chromium."""
    program = shutil.which("chromium")
    assert program, "chromium is needed: apt-get install chromium"
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--no-proxy-server"],
            timeout=PATIENCE,
        )
        yield running
        running.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Keep a picture of a page that a test failed on, beside those that are kept."""
    report: Any = yield
    lab = getattr(item, "funcargs", {}).get("lab")
    if SCREENS and report.failed and lab is not None:
        lab.shoot(f"failed-{item.name}")
    return report
