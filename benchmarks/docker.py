"""Compare `exec` of `true` over REST on the runtime docker with `docker exec`: ``python -m benchmarks.docker``.

Both run in the same container under gVisor, alternately. This needs an engine with gVisor registered (`jupyter agentbox
setup --docker`), found as the `docker` command finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jupyter_agentbox.runtimes.docker.engine import Engine

from .rest import Api, seconds
from .serving import serving

TARGET = 0.4
#: Timeout of one Docker command, in seconds.
TIMEOUT = 60.0


def main() -> int:
    """Run the benchmark and print the results. Return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executions", type=int, default=30)
    count = parser.parse_args().executions
    with tempfile.TemporaryDirectory(prefix="agentbox-bench-") as folder:
        base, policy = Path(folder, "base"), Path(folder, "policy")
        base.mkdir(mode=0o700)
        policy.mkdir(mode=0o700)
        settings = {"Policy": {"runtime": "docker", "allowed_runtimes": ["docker"]}}
        (policy / "jupyter_agentbox_config.json").write_text(json.dumps(settings))
        os.environ["JUPYTER_CONFIG_PATH"] = str(policy)
        with serving(base) as served:
            api = Api(served)
            try:
                ours, theirs, opened = measure(api, count)
            finally:
                api.close()
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"sandbox start, from request to ready: {opened:.2f} s")
    print(f"exec of true over REST, median of {count}: {statistics.median(ours) * 1e3:.1f} ms")
    print(f"docker exec of true in the same container: {statistics.median(theirs) * 1e3:.1f} ms")
    print(f"ratio {ratio:.2f}x, target {TARGET}x: {'met' if ratio <= TARGET else 'missed'}")
    return int(ratio > TARGET)


def measure(api: Api, count: int) -> tuple[list[float], list[float], float]:
    """Return the seconds of each REST call, of each Docker command, and of starting the sandbox."""
    began = time.perf_counter()
    made = api.call("POST", "/sandboxes", {"id": "bench"})
    opened = time.perf_counter() - began
    (container,) = Engine().list(f"jupyter-agentbox.sandbox={made['sandbox_id']}")
    beside = ["docker", "exec", container["Id"], "/usr/bin/true"]
    ours, theirs = [], []

    def run() -> None:
        ran = api.call("POST", "/sandboxes/bench/exec", {"argv": ["/usr/bin/true"]})
        assert ran["exit_code"] == 0, ran

    for _ in range(count):
        theirs.append(seconds(lambda: subprocess.run(beside, check=True, timeout=TIMEOUT)))
        ours.append(seconds(run))
    api.call("DELETE", "/sandboxes/bench")
    return ours, theirs, opened


if __name__ == "__main__":
    sys.exit(main())
