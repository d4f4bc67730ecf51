"""The Docker runtime: the contract, the escapes, and what an engine can do to it. On an engine of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest
from dockerd import Dockerd

from jupyter_agentbox.runtimes import Runtime
from jupyter_agentbox.runtimes.docker import DockerRuntime
from jupyter_agentbox.testing.box import STANDIN
from jupyter_agentbox.testing.contract import RuntimeContract
from jupyter_agentbox.testing.escapes import EscapeContract


class TestDocker(RuntimeContract):
    """The contract."""

    has_writable_system = False
    has_layer_in_memory = True
    covers_special = False

    @pytest.fixture
    def runtime(self, dockerd: Dockerd, state_dir: Path) -> Runtime:
        return DockerRuntime(host=dockerd.host, state_dir=str(state_dir), guest_dir=str(STANDIN))


class TestDockerEscapes(EscapeContract):
    """Isolation, from inside."""

    @pytest.fixture(scope="class")
    @classmethod
    def runtime(cls, dockerd: Dockerd, state_dir: Path) -> Runtime:
        return DockerRuntime(host=dockerd.host, state_dir=str(state_dir), guest_dir=str(STANDIN))
