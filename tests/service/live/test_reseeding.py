"""Code that reseeds random generators. tests/storage/images runs it in kernels of Python, R and Bash."""

from __future__ import annotations

import random
import subprocess

from jupyter_agentbox.service.live.reseeding import SEEDS


def test_bash_draws_other_numbers_than_it_would_have() -> None:
    def draw(between: str) -> str:
        script = f"RANDOM=1; {between}; echo $RANDOM $RANDOM $RANDOM"
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout

    assert draw(":") == draw(":")
    assert len({draw(SEEDS["bash"]) for _ in range(3)} | {draw(":")}) >= 3
    old = SEEDS["bash"].replace("SRANDOM", "NONE_SUCH")
    assert len({draw(old) for _ in range(3)} | {draw(":")}) >= 3, "where bash is older than SRANDOM"


def test_python_draws_other_numbers_than_it_would_have() -> None:
    random.seed(1)
    exec(SEEDS["python"], {})
    drawn = random.random()
    random.seed(1)
    assert drawn != random.random()
