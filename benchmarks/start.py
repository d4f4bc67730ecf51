"""Compare kernel starts with those of a bare kernel: ``python -m benchmarks.start``.

Measures the time from requesting a kernel to its first reply, with the same client: cold, from a template, from a pool,
and with pandas imported. The rounds are interleaved, so that other load on the machine affects all of them alike. The
exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.manager import KernelManager

from jupyter_agentbox.kernels.warm import starts
from jupyter_agentbox.kernels.warm.starts import WarmStarts
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.runtimes.runsc import import_cache
from jupyter_agentbox.sandbox.link.thread import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager

from .__main__ import machine

SPAWN_TIMEOUT = 120.0


@dataclass(frozen=True)
class Start:
    """Way to start a kernel.

    Parameters
    ----------
    name : str
    kernel : str
        Kernelspec.
    beside : str
        Bare start that it is compared with.
    target : float
        Maximum ratio; 0 for no target.
    code : str
        First cell.
    policy : dict
        Settings of ``Policy``.
    """

    name: str
    kernel: str = "agentbox"
    beside: str = "bare"
    target: float = 0.0
    code: str = "1"
    policy: dict[str, Any] = field(default_factory=dict)

    @property
    def has_template(self) -> bool:
        """Whether it starts from a template."""
        return bool(self.policy.get("templates", True)) and self.kernel == "agentbox"


PANDAS = "import pandas"
STARTS = [
    Start("bare", "python3"),
    Start("cold", target=2.5, policy={"templates": False}),
    Start("template", target=0.9),
    Start("pool", target=0.15, policy={"pool_size": 1}),
    Start("bare, pandas", "python3", code=PANDAS),
    Start("cold, pandas", beside="bare, pandas", code=PANDAS, policy={"templates": False}),
    Start(
        "template, pandas", beside="bare, pandas", target=0.4, code=PANDAS,
        policy={"profiles": {"default": {"preload": ["pandas"]}}},
    ),
]  # fmt: skip


def enter(folder: Path, start: Start) -> None:
    """Set the environment so that the next kernel starts with these settings, in its own state directory."""
    base = folder / start.name.replace(", ", "-")
    base.mkdir(exist_ok=True)
    (base / "jupyter_agentbox_config.json").write_text(json.dumps({"Policy": start.policy}))
    os.environ["JUPYTER_CONFIG_DIR"] = str(base)
    os.environ["JUPYTER_DATA_DIR"] = str(base)


def find_warm() -> WarmStarts:
    """Return the warm starts of the current settings."""
    policy = Policy()
    return WarmStarts.shared(SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config), policy)


def run(start: Start) -> float:
    """Return the seconds from requesting a kernel to the reply to its first cell.

    Does not use jupyter_client's `wait_for_ready`, which always waits 0.2 s for further messages.
    """
    begin = time.perf_counter()
    manager = KernelManager(kernel_name=start.kernel)
    manager.start_kernel(extra_arguments=["--log-level=ERROR"])
    client = manager.client()
    try:
        client.start_channels(hb=False, control=False, stdin=False)
        request = client.execute(start.code)
        while client.get_shell_msg(timeout=90)["parent_header"].get("msg_id") != request:
            pass
        return time.perf_counter() - begin
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def prepare(start: Start) -> None:
    """Fill the page cache, and create what the start needs. Not counted."""
    starts.TEMPLATE_DELAY = 0.0
    WarmStarts.is_keeping = start.kernel == "agentbox"
    run(start)
    if WarmStarts.is_keeping:
        wait_for(lambda: import_cache.read(find_warm().manager.state_dir) is not None, "the import cache")
    if start.has_template:
        wait_for(lambda: bool(find_warm().templates.list()), f"a template for {start.name}")
        run(start)


def wait_for(condition: Any, what: str) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + SPAWN_TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready within {SPAWN_TIMEOUT:g} s")
        time.sleep(0.05)


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Return all samples by name."""
    samples: dict[str, list[float]] = defaultdict(list)
    for start in STARTS:
        enter(folder, start)
        prepare(start)
    for _ in range(rounds):
        for start in STARTS:
            enter(folder, start)
            if "pool_size" in start.policy:
                wait_for(lambda: find_warm().keeper.waiting > 0, "a kernel in the pool")
                time.sleep(1.0)  # until it is frozen
            samples[start.name].append(run(start))
    return samples


def table(samples: dict[str, list[float]]) -> tuple[str, bool]:
    """Return the Markdown table, and whether all targets are met."""
    lines = ["| start | median (range), s | beside | ratio | target | |", "|---|---|---|---|---|---|"]
    are_met = True
    for start in STARTS:
        values = samples[start.name]
        median = statistics.median(values)
        text = f"{median:.3f} ({min(values):.3f} to {max(values):.3f})"
        if start.kernel != "agentbox":
            lines.append(f"| {start.name} | {text} | | 1.0 | | |")
            continue
        ratio = median / statistics.median(samples[start.beside])
        is_met = not start.target or ratio <= start.target
        are_met &= is_met
        target, verdict = (f"{start.target}x", "met" if is_met else "MISSED") if start.target else ("", "")
        lines.append(f"| {start.name} | {text} | {start.beside} | {ratio:.2f}x | {target} | {verdict} |")
    return "\n".join(lines), are_met


def main() -> int:
    """Run the benchmark. Return 0 if all targets are met, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="starts of each kind (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ab") as name:
        folder = Path(name)
        os.environ["JUPYTER_RUNTIME_DIR"] = f"{folder}/runtime"
        os.mkdir(os.environ["JUPYTER_RUNTIME_DIR"], 0o700)
        work = folder / "work"
        work.mkdir()
        os.chdir(work)
        try:
            text, are_met = table(measure(folder, options.rounds))
        finally:
            LinkThread.instance().submit(WarmStarts.aclose_all()).result(30)
    print(f"\n{machine()}\n\n{text}")
    return 0 if are_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
