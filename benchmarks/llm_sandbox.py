"""Compare first and repeated runs with those of llm-sandbox on the same Docker: ``python -m benchmarks.llm_sandbox``.

llm-sandbox is not a dependency: it runs in a separate interpreter, on an existing image. Its environment setup, a
virtual environment and an upgrade of pip from the network, is skipped. agentbox runs on the runtimes docker and runsc,
over REST. All subjects are measured alternately, each round with a new sandbox or container. This needs an engine with
gVisor registered (`jupyter agentbox setup --docker`), found as the `docker` command finds it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_agentbox.runtimes.docker.engine import RUNTIME_NAME

from .rest import Api, seconds
from .serving import serving

CODE = "print(1+1)"
#: Timeout of one step of llm-sandbox, in seconds.
TIMEOUT = 120.0
#: Program for llm-sandbox's interpreter: it prints a line of JSON for each sandbox, with the seconds of each step.
WORKER = """
import json, sys, time
from llm_sandbox import SandboxBackend, SandboxSession

def clock(work):
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result

for line in sys.stdin:
    asked = json.loads(line)
    session = SandboxSession(
        backend=SandboxBackend.DOCKER, lang="python", image=asked["image"], keep_template=True,
        skip_environment_setup=True, workdir="/srv",
        runtime_configs={"runtime": asked["runtime"], "network_mode": "none"},
    )
    opened = time.perf_counter()
    session.open()
    took = []
    for _ in range(asked["count"] + 1):
        spent, result = clock(lambda: session.run(asked["code"]))
        assert result.stdout.strip() == "2", result
        took.append(time.perf_counter() - opened if not took else spent)
    closed, _ = clock(session.close)
    print(json.dumps([took, closed]), flush=True)
"""
SUBJECTS = {
    "llm-sandbox, runc": "runc",
    "llm-sandbox, gVisor": RUNTIME_NAME,
    "ours on docker, run_code": "docker",
    "ours on docker, exec": "docker",
    "ours on runsc, run_code": "runsc",
    "ours on runsc, exec": "runsc",
}
Samples = dict[str, dict[str, list[float]]]


class Theirs:
    """Process in which llm-sandbox runs."""

    def __init__(self, python: str, image: str) -> None:
        self._image = image
        self._process = subprocess.Popen(
            [python, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def measure(self, runtime: str, count: int) -> tuple[list[float], float]:
        """Open a container, run code once and `count` times more, and close it. Return the seconds of each step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"image": self._image, "runtime": runtime, "count": count, "code": CODE}
        self._process.stdin.write(json.dumps(asked) + "\n")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llm-sandbox failed; see its output above")
        took, closed = json.loads(line)
        return took, closed

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=TIMEOUT)


def measure_ours(api: Api, how: str, count: int) -> tuple[list[float], float]:
    """Measure the same over REST: in one kernel, or with a new process each time."""

    def run() -> None:
        if how == "exec":
            output = api.call("POST", "/sandboxes/bench/exec", {"argv": ["python3", "-c", CODE]})["stdout"]
        else:
            output = api.call("POST", "/sandboxes/bench/code", {"code": CODE})["stdout"]
        assert output.strip() == "2", output

    began = time.perf_counter()
    api.call("POST", "/sandboxes", {"id": "bench"})
    run()
    took = [time.perf_counter() - began, *(seconds(run) for _ in range(count))]
    return took, seconds(lambda: api.call("DELETE", "/sandboxes/bench"))


@contextlib.contextmanager
def server(base: Path, runtime: str) -> Iterator[Api]:
    """Run an agentbox server with this runtime."""
    policy = base / "policy"
    policy.mkdir(parents=True, mode=0o700)
    settings = {"Policy": {"runtime": runtime, "allowed_runtimes": [runtime]}}
    (policy / "jupyter_agentbox_config.json").write_text(json.dumps(settings))
    os.environ["JUPYTER_CONFIG_PATH"] = str(policy)
    (base / "served").mkdir(mode=0o700)
    with serving(base / "served") as served, contextlib.closing(Api(served)) as api:
        yield api


def measure(base: Path, python: str, image: str, rounds: int, count: int) -> Samples:
    """Return all samples, without those of the first round."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    theirs = Theirs(python, image)
    try:
        with server(base / "docker", "docker") as docker, server(base / "runsc", "runsc") as runsc:
            apis = {"docker": docker, "runsc": runsc}
            for number in range(rounds + 1):
                for name, runtime in SUBJECTS.items():
                    if name.startswith("llm-sandbox"):
                        took, closed = theirs.measure(runtime, count)
                    else:
                        took, closed = measure_ours(apis[runtime], name.rpartition(" ")[2], count)
                    if number:
                        samples[name]["first"].append(took[0])
                        samples[name]["again"] += took[1:]
                        samples[name]["close"].append(closed)
    finally:
        theirs.close()
    return samples


def table(samples: Samples) -> str:
    """Return the Markdown table. Ratios are to llm-sandbox under the same isolation."""
    beside = samples["llm-sandbox, gVisor"]
    lines = [
        "| median | open to first result, s | ratio | run again, ms | ratio | close, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in samples.items():
        middle: dict[str, Any] = {step: statistics.median(values) for step, values in found.items()}
        first, again = (middle[step] / statistics.median(beside[step]) for step in ("first", "again"))
        lines.append(
            f"| {name} | {middle['first']:.2f} | {first:.2f}x | {1e3 * middle['again']:.0f} | {again:.2f}x "
            f"| {middle['close']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm_sandbox", description=__doc__)
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has llm-sandbox[docker] (default: this one)"
    )
    parser.add_argument("--image", required=True, help="image of the engine that contains `python`")
    parser.add_argument("--rounds", type=int, default=5, help="sandboxes of each kind (default: %(default)s)")
    parser.add_argument(
        "--executions", type=int, default=10, help="runs in each after the first (default: %(default)s)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentbox-bench-") as folder:
        samples = measure(Path(folder), options.python, options.image, options.rounds, options.executions)
    print(f"load {os.getloadavg()[0]:.1f}\n\n{table(samples)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
