"""What sandboxes do, on the runtime runsc: on this machine's own system, and on an image of every language."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from contract.sandboxes import ImageContract, SandboxContract
from support.images import Built, on_every_recipe

# The first test to want the image may have to build it.
pytestmark = [pytest.mark.usefixtures("has_runsc"), pytest.mark.timeout(1800)]


class OnRunsc:
    """Settings of both."""

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls) -> Mapping[str, Mapping[str, Any]]:
        return {"Policy": {"runtime": "runsc"}}


class TestRunsc(OnRunsc, SandboxContract):
    """The host's system."""


class TestRunscImage(OnRunsc, ImageContract):
    """An image."""

    image: ClassVar[str] = "languages"

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, built: Built) -> Path:
        return built.store.state_dir


globals().update(on_every_recipe(TestRunsc))
