"""Wait for conditions, with one scale for machines that are slow or busy."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Scale factor for all timeouts of a run. The process that distributes the tests measures it once.
VARIABLE = "AGENTBOX_TEST_SCALE"
#: Seconds that one round of :func:`measure_scale` takes on two idle cores.
REFERENCE = 0.15


def measure_scale() -> float:
    """Return how much slower than the reference this machine computes and starts programs, between 1 and 10."""

    def measure_round() -> float:
        start = time.monotonic()
        for _ in range(2_000_000):
            pass
        subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60)
        return time.monotonic() - start

    return min(max(statistics.median(measure_round() for _ in range(3)) / REFERENCE, 1.0), 10.0)


def scaled(timeout: float) -> float:
    """Return a timeout multiplied by the factor of this run."""
    return timeout * float(os.environ.get(VARIABLE, "1"))


def wait_until(condition: Callable[[], T], timeout: float, what: str, pause: float = 0.05) -> T:
    """Return the first true value of `condition`, or fail saying `what` did not happen."""
    deadline = time.monotonic() + scaled(timeout)
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {scaled(timeout):g} s: {what}"
        time.sleep(pause)
    return value


async def wait_until_async(condition: Callable[[], T], timeout: float, what: str, pause: float = 0.05) -> T:
    """Return the first true value of `condition` while the event loop keeps running, or fail as :func:`wait_until`."""
    deadline = time.monotonic() + scaled(timeout)
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {scaled(timeout):g} s: {what}"
        await asyncio.sleep(pause)
    return value
