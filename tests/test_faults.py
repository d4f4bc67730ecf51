"""What the machine runs out of is no reason to end sandboxes, nor to forget them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from jupyter_agentbox.runtimes import Handle
from jupyter_agentbox.sweep import kill_processes, read_start_time


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process none that is free."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def handle() -> Iterator[Handle]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield Handle("x", process.pid, read_start_time(process.pid) or 0)
        process.kill()


def read_state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, *states: str) -> None:
    deadline = time.monotonic() + 10
    while read_state(pid) not in states:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_without_descriptors_a_sandbox_neither_counts_as_gone_nor_as_killed(handle: Handle) -> None:
    with no_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/dev/null", os.O_RDONLY)
        is_running = handle.is_running
        left = kill_processes(handle.processes, 0.1)
    assert is_running
    assert left == [handle.pid]
    assert handle.is_running
    assert kill_processes(handle.processes) == []
    assert not handle.is_running


def test_without_descriptors_a_frozen_sandbox_goes_on(handle: Handle) -> None:
    os.kill(handle.pid, signal.SIGSTOP)
    wait_for_state(handle.pid, "T")
    with no_descriptors():
        handle.resume()
    wait_for_state(handle.pid, "S", "R")
