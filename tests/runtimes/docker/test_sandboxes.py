"""What sandboxes do, on the runtime docker: on this machine's own system, and on an image of every language."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from contract.sandboxes import ImageContract, SandboxContract
from support.dockerd import Dockerd
from support.images import Built, on_every_recipe

# The first test to want the image may have to build it.
pytestmark = [pytest.mark.usefixtures("has_runsc"), pytest.mark.timeout(1800)]


class OnDocker:
    """Settings of both."""

    keeps_snapshots: ClassVar[bool] = False

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, dockerd: Dockerd) -> Mapping[str, Mapping[str, Any]]:
        policy = {"runtime": "docker", "allowed_runtimes": ["docker"]}
        return {"Policy": policy, "DockerRuntime": {"host": dockerd.host}}


class TestDocker(OnDocker, SandboxContract):
    """The host's system."""


class TestDockerImage(OnDocker, ImageContract):
    """An image."""

    image: ClassVar[str] = "languages"

    @pytest.fixture(scope="class")
    @classmethod
    def images(cls, built: Built) -> Path:
        return built.store.state_dir


globals().update(on_every_recipe(TestDocker))
