"""Fixtures of the egress tests."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gate_box import Box, HttpServer, make_certificate, running

from jupyter_agentbox.guest import proxy
from jupyter_agentbox.spec import Grant


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"), "secure.example", "other.example")


@pytest.fixture
def make_box(tmp_path: Path) -> Iterator[Callable[..., Box]]:
    made: list[Box] = []

    def make(*hosts: str, private: tuple[str, ...] = (), **options: Any) -> Box:
        directory = tmp_path / f"box{len(made)}"
        directory.mkdir()
        made.append(Box(directory, Grant(hosts=hosts, private_hosts=private), **options))
        return made[-1]

    yield make
    for box in made:
        box.close()


@pytest.fixture
def hostile_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have guests pass on even connections to the sandbox itself."""
    monkeypatch.setattr(proxy, "own_addresses", lambda host: ())


@pytest.fixture
def web() -> Iterator[HttpServer]:
    server = HttpServer()
    with running(server):
        yield server


@pytest.fixture
def secure_web(certificate: Path) -> Iterator[HttpServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = HttpServer(context)
    with running(server):
        yield server
