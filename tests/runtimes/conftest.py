"""One Docker engine for all tests of the shared suite."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dockerd import Dockerd


@pytest.fixture(scope="session")
def dockerd() -> Iterator[Dockerd]:
    """An engine of our own, ended with the session."""
    engine = Dockerd(Path(tempfile.mkdtemp(prefix="abd")))
    try:
        engine.start()
        yield engine
    finally:
        engine.close()
