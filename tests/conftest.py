"""Fixtures of all tests."""

from __future__ import annotations

import compileall
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports it: the synchronous client is generated, and must follow the asynchronous one.
runpy.run_path(str(Path(__file__).parents[1] / "tools" / "make_sync_client.py"), run_name="__main__")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # Where Python is told to write no compiled files, each of the many processes would compile the package anew.
    compileall.compile_dir(Path(__file__).parents[1] / "jupyter_agentbox", quiet=2)

QUICK_IMPORTS = str(Path(__file__).parent / "support" / "quick_imports")
if sys.path[0] != QUICK_IMPORTS:
    sys.path.insert(0, QUICK_IMPORTS)  # for this process; PYTHONPATH is for those that it starts
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (QUICK_IMPORTS, os.environ.get("PYTHONPATH"))))

# A shell starts programs in the background with this signal ignored, and servers that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Named here rather than in the configuration, which would load it before the lines above.
pytest_plugins = ["pytest_jupyter.jupyter_server"]

# Before anything imports them: failed assertions of the shared suite tell their values.
pytest.register_assert_rewrite(
    "contract.runtime",
    "contract.escapes",
    "contract.box",
    "contract.sandboxes",
    "contract.serving",
)

import hypothesis  # noqa: E402
from support import waiting  # noqa: E402
from support.harness import Env  # noqa: E402
from support.images import RECIPE, Built, build, build_once  # noqa: E402

from jupyter_agentbox.runtimes.runsc import import_cache  # noqa: E402
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime  # noqa: E402
from jupyter_agentbox.sandbox.manager import SandboxManager  # noqa: E402

# How long an example takes to make and to try says something of the machine and of what else it does, and nothing else.
# A change is tried on the same few examples as what it is compared with; AGENTBOX_EXPLORE draws new ones, and more.
EXPLORE = "AGENTBOX_EXPLORE" in os.environ
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    max_examples=300 if EXPLORE else 40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=not EXPLORE,
)
hypothesis.settings.load_profile("patient")

os.environ.setdefault(waiting.VARIABLE, f"{waiting.measure_scale():.1f}")  # which xdist's workers inherit

# Files that take longest, a minute and more, longest first: they start first, so that none is left for the end.
LONGEST = (
    "runtimes/docker/test_runtime.py",
    "e2e/test_lifecycle.py",
    "runtimes/docker/test_sandboxes.py",
    "runtimes/runsc/test_sandboxes.py",
    "lab/test_lab.py",
    "lab/test_ends.py",
    "e2e/test_server_end.py",
    "lab/test_panel.py",
    "e2e/test_start_kinds.py",
    "e2e/test_clients.py",
    "storage/images/test_kernels.py",
    "runtimes/runsc/test_runtime.py",
    "jupyter/test_provisioner.py",
    "storage/images/test_languages.py",
    "promises/test_enforcement.py",
    "e2e/test_live_state.py",
    "service/live/test_parking.py",
    "promises/test_doctor.py",
    "lab/test_built.py",
    "promises/test_notebooks.py",
    "lab/test_scripts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first."""
    tests = Path(__file__).parent
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.relative_to(tests).as_posix(), len(order)))


@pytest.fixture(scope="session")
def has_runsc() -> None:
    """Fail, not skip: tests that claim to cover gVisor must not pass without it."""
    answer = subprocess.run(["runsc", "--version"], capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, "runsc is needed: run `make setup`"


@pytest.fixture
def manager(tmp_path: Path) -> SandboxManager:
    """Return the manager of a state directory of the test's own."""
    state = tmp_path / "state"
    return SandboxManager(state, RunscRuntime(state_dir=str(state)))


@pytest.fixture(scope="session")
def imports(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import cache, as a server makes it ten seconds after its first kernel. With it a kernel costs a third less."""
    state = tmp_path_factory.mktemp("imports")
    assert import_cache.make(state)
    return state / import_cache.FOLDER


@pytest.fixture(scope="module")
def make_env(has_runsc: None, imports: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Env]]:
    """Return a maker of isolated Jupyter environments; each is checked for leaks when the module is done."""
    made: list[Env] = []

    def make(**options: Any) -> Env:
        made.append(Env(tmp_path_factory.mktemp("jupyter"), **{"imports": imports, **options}))
        return made[-1]

    yield make
    try:
        for env in made:
            env.assert_clean()
    finally:
        for env in made:
            env.close()


@pytest.fixture
def agentbox_env(has_runsc: None, imports: Path, tmp_path: Path) -> Iterator[Env]:
    """An isolated Jupyter for one test, after which nothing of a sandbox may be left."""
    env = Env(tmp_path / "jupyter", imports=imports)
    try:
        yield env
        env.assert_clean()
    finally:
        env.close()


@pytest.fixture(scope="session")
def built(has_runsc: None) -> Built:
    """The image of all languages, built once on each machine for each recipe and way of building."""
    return build_once(RECIPE, build)
