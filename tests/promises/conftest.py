"""Fixtures of the tests of promises: see :mod:`promises.started`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.started import Installation, Started, build_wheel


@pytest.fixture(scope="session")
def make_installation(
    has_runsc: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Installation]]:
    """Return a maker of installations; each is checked for what sandboxes leave behind when the session is done."""
    wheel = build_wheel(tmp_path_factory.mktemp("wheel"))
    made: list[Installation] = []

    def make(*arguments: str, is_set_up: bool = True) -> Installation:
        made.append(Installation(tmp_path_factory.mktemp("installed"), wheel))
        if is_set_up:
            made[-1].setup(*arguments)
        return made[-1]

    yield make
    for installation in made:
        installation.close()


@pytest.fixture(scope="session")
def plain(make_installation: Callable[..., Installation]) -> Installation:
    """The package after ``jupyter agentbox setup``."""
    return make_installation()


@pytest.fixture(scope="session")
def enforced(make_installation: Callable[..., Installation]) -> Installation:
    """The package after ``jupyter agentbox setup --enforce``."""
    return make_installation("--enforce")


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
