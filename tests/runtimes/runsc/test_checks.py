"""Doctor's checks of runsc, in real sandboxes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.harness import processes_naming
from support.waiting import wait_until

from jupyter_agentbox.runtimes import Check
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime

#: Exits after it has restored the probe, before it reads the probe's hello.
ASKER = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from jupyter_agentbox.runtimes.runsc import checks
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime
checks.PROBE = checks.PROBE.replace(f"+ {checks.PROBE_LIFE}", "+ 5.0")
answers, wait = [], checks._wait_for_hello
def wait_or_die(up):
    if answers:
        os._exit(42)
    answers.append(wait(up))
checks._wait_for_hello = wait_or_die
checks.check_runsc(RunscRuntime(state_dir=sys.argv[1] + "/state"))
"""


def test_a_probe_whose_asker_was_killed_ends(has_runsc: None, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    asked = subprocess.run([sys.executable, "-c", ASKER, str(tmp_path)], timeout=120)
    assert asked.returncode == 42
    wait_until(lambda: not processes_naming(f"{tmp_path}/agentbox-check-"), 60, "the probe has ended")


def test_two_checks_at_once_do_not_disturb_each_other(has_runsc: None, tmp_path: Path) -> None:
    def check(number: int) -> list[Check]:
        return [item for item in RunscRuntime(state_dir=str(tmp_path / str(number))).check() if not item.is_ok]

    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            assert list(pool.map(check, range(3))) == [[], [], []]
