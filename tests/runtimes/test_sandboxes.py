"""What sandboxes do, on the runtime runsc: on this machine's own system, and on an image of every language."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from images.conftest import Built, built, on_every_recipe  # noqa: F401  # a fixture

from jupyter_agentbox.testing.sandboxes import SandboxContract

# The first test to want the image may have to build it.
pytestmark = [pytest.mark.usefixtures("has_runsc"), pytest.mark.timeout(1800)]


class TestRunsc(SandboxContract):
    """The host's system."""

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls) -> Mapping[str, Mapping[str, Any]]:
        return {"Policy": {"runtime": "runsc"}}


class TestRunscImage(TestRunsc):
    """An image."""

    image: ClassVar[str] = "languages"

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, built: Built) -> Path:  # noqa: F811
        return built.store.state_dir


globals().update(on_every_recipe(TestRunsc))
