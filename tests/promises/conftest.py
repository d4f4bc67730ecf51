"""Fixtures of the tests of promises: see :mod:`support.started`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.started import Installation, Started, build_wheel, install_wheel


@pytest.fixture(scope="session")
def make_installation(
    has_runsc: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Installation]]:
    """Return a maker of installations in a given or a new environment, which ends what they leave running."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # by all workers of this run
    made: list[Installation] = []

    def make(prefix: Path | None = None) -> Installation:
        folder = tmp_path_factory.mktemp("installed")
        if prefix is None:
            prefix = folder / "venv"
            install_wheel(build_wheel(shared / "wheel"), prefix)
        made.append(Installation(folder, prefix))
        return made[-1]

    yield make
    for installation in made:
        installation.close()


@pytest.fixture(scope="session")
def make_user(make_installation: Callable[..., Installation]) -> Callable[[], Installation]:
    """Return a maker of users of one environment, who have not run ``setup`` yet."""
    prefixes: list[Path] = []

    def make() -> Installation:
        user = make_installation(*prefixes)
        prefixes[:] = [user.prefix]
        return user

    return make


@pytest.fixture(scope="session")
def plain(make_user: Callable[[], Installation]) -> Installation:
    """The package after ``jupyter agentbox setup``."""
    installation = make_user()
    installation.setup()
    return installation


@pytest.fixture(scope="session")
def enforced(make_installation: Callable[..., Installation]) -> Installation:
    """The package after ``jupyter agentbox setup --enforce``, in an environment of its own."""
    installation = make_installation()
    installation.setup("--enforce")
    return installation


@pytest.fixture(scope="session")
def plain_lab(plain: Installation) -> Iterator[Started]:
    """A server of plain ``jupyter lab``."""
    with plain.start("lab") as server:
        yield server


@pytest.fixture(scope="session")
def enforced_lab(enforced: Installation) -> Iterator[Started]:
    """A server of plain ``jupyter lab`` after ``setup --enforce``."""
    with enforced.start("lab") as server:
        yield server


@pytest.fixture(scope="session")
def served(plain: Installation) -> Iterator[Started]:
    """A server of ``jupyter agentbox serve``."""
    with plain.start("serve") as server:
        yield server
