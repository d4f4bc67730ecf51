"""Failed assertions of the shared suite tell their values; and one Docker engine for all tests of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    "jupyter_agentbox.testing.contract",
    "jupyter_agentbox.testing.escapes",
    "jupyter_agentbox.testing.box",
    "jupyter_agentbox.testing.sandboxes",
    "jupyter_agentbox.testing.serving",
)

from dockerd import Dockerd  # noqa: E402


@pytest.fixture(scope="session")
def dockerd() -> Iterator[Dockerd]:
    """An engine of our own, ended with the session."""
    engine = Dockerd(Path(tempfile.mkdtemp(prefix="abd")))
    try:
        engine.start()
        yield engine
    finally:
        engine.close()
