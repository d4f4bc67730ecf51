"""Two hundred clients at once on a real server; the benchmark of the same name does so for a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from support.harness import Env

from benchmarks import load
from benchmarks.serving import Served


def test_two_hundred_clients_meet_no_error_and_leave_nothing(make_env: Callable[..., Env]) -> None:
    env = make_env()
    arguments = ("--ServerApp.jpserver_extensions={'jupyter_agentbox': True}",)
    with env.server("server", *arguments) as server:
        served = Served(server.url(""), server.token, server.process.pid, str(env.base))
        figures = asyncio.run(load.run(served, clients=200, sandboxes=2, seconds=10.0))
        said = f"{figures}\n{server.log.read_text()[-3000:]}"
        assert not figures.errors, said
        assert not figures.leaks, said
        # All of them were served, with commands and with files.
        assert len(figures.calls["exec"]) >= 100, said
        assert len(figures.calls["write"]) >= 100, said
        assert sum(map(len, figures.calls.values())) >= 200, said
        assert "Traceback" not in server.log.read_text(), said


def test_what_stays_is_seen() -> None:
    before = load.Held(descriptors=20, threads=10, processes=3, memory=1)
    assert load.find_leaks(before, before) == []
    after = load.Held(descriptors=20 + load.SLACK_DESCRIPTORS + 1, threads=10, processes=4, memory=1)
    assert [text.partition(":")[0] for text in load.find_leaks(before, after)] == ["descriptors", "processes"]
