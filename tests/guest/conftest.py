"""Fixtures of the guest's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.inside import Inside


@pytest.fixture
def inside() -> Iterator[Inside]:
    made = Inside()
    yield made
    made.egress.close()
    for sock in made.sockets:
        sock.close()
    for stream in made.link.streams:
        stream.on_reset("over")
    made.loop._poll.close()
