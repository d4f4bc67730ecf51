"""Big outputs arrive whole, through the batch clients and through a slow reader."""

from __future__ import annotations

import time

import pytest
from support import notebooks
from support.harness import Env

#: More than a server keeps for a page that is away.
BIG = (
    "import sys\nblock = ('y' * 99 + '\\n') * 10_000\n"
    "for _ in range(20):\n    sys.stdout.write(block)\nsys.stdout.flush()"
)


@pytest.mark.timeout(400)
def test_twenty_megabytes_arrive_whole(agentbox_env: Env) -> None:
    text = notebooks.nbclient(agentbox_env, notebooks.make(agentbox_env.work, [BIG, "print('the end')"]))
    assert text.count("y") == 20 * 10_000 * 99
    assert "the end" in text


@pytest.mark.timeout(400)
def test_a_reader_that_pauses_loses_nothing(agentbox_env: Env) -> None:
    with agentbox_env.server("server") as server:
        kernel = server.kernel()
        request = kernel.start("for i in range(20_000): print(i, flush=i % 100 == 0)")
        time.sleep(5)
        text = kernel.finish(request, timeout=150).text
        assert text.splitlines() == [str(number) for number in range(20_000)]
        kernel.shutdown()
