"""Measure bare and sandboxed kernels side by side, and print the ratios to a bare kernel with their targets.

The rounds of the subjects are interleaved, so that other load on the machine affects all of them alike. Only the
ratios are comparable between machines.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

from . import kernels, rest

#: Maximum ratios to the bare kernel.
TARGETS = {
    "start to first reply": 2.5,
    "round trip, back to back, p50": 0.7,
    "round trip, back to back, p95": 1.0,
    "round trip, 100 ms apart, p50": 1.0,
    "round trip, 100 ms apart, p95": 1.0,
    "50 MB of output": 1.3,
    "60,000 prints": 1.3,
    "10 MB of comm buffers": 1.5,
    "memory of an idle kernel (PSS)": 1.6,
}

Samples = dict[str, dict[str, list[float]]]


def percentile(values: list[float], share: float) -> float:
    """Return the value below which the given share of all values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(rounds: int, executions: int, parallel: int) -> Samples:
    """Return all samples, by measure and then by subject, with one value per round."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for subject in kernels.SUBJECTS:  # fills the page cache; not counted
        kernels.start(subject)
    for _ in range(rounds):
        for subject in kernels.SUBJECTS:
            took, memory = kernels.start(subject)
            samples["start to first reply"][subject.name].append(took)
            samples["memory of an idle kernel (PSS)"][subject.name].append(memory)
    with ExitStack() as stack:
        running = {s.name: stack.enter_context(kernels.running(s)) for s in kernels.SUBJECTS}
        for kernel in running.values():
            kernels.round_trips(kernel, 20, 0)
        for _ in range(rounds):
            for label, count, pause in (("back to back", executions, 0.0), ("100 ms apart", executions // 8, 0.1)):
                for name, kernel in running.items():
                    times = kernels.round_trips(kernel, count, pause)
                    samples[f"round trip, {label}, p50"][name].append(percentile(times, 0.5))
                    samples[f"round trip, {label}, p95"][name].append(percentile(times, 0.95))
        for _ in range(max(1, rounds // 2)):
            for name, kernel in running.items():
                samples["50 MB of output"][name].append(kernels.output(kernel))
                samples["60,000 prints"][name].append(kernels.prints(kernel))
                samples["10 MB of comm buffers"][name].append(kernels.comm_buffers(kernel))
                to_kernel = samples["10 MB of comm buffers to the kernel"][name]
                to_kernel.append(kernels.comm_buffers_to_kernel(kernel))
    for subject in kernels.SUBJECTS:
        samples[f"{parallel} concurrent starts"][subject.name].append(kernels.parallel_starts(subject, parallel))
    return samples


def shown(measure_name: str, values: list[float]) -> str:
    """Return median and range in a suitable unit."""
    unit, factor = ("MB", 1e-6) if "memory" in measure_name else ("ms", 1e3) if "trip" in measure_name else ("s", 1.0)
    median, low, high = (factor * f(values) for f in (statistics.median, min, max))
    spread = f" ({low:.3g} to {high:.3g})" if len(values) > 1 else ""
    return f"{median:.3g}{spread} {unit}"


def table(samples: Samples) -> tuple[str, bool]:
    """Return the Markdown table, and whether all targets are met."""
    names = [subject.name for subject in kernels.SUBJECTS]
    lines = [f"| median (range) | {' | '.join(names)} | ratio | target | |", "|---" * (len(names) + 4) + "|"]
    are_met = True
    for name, by_subject in samples.items():
        base = statistics.median(by_subject[names[0]])
        ratios = [statistics.median(by_subject[other]) / base for other in names[1:]]
        target = TARGETS.get(name)
        is_met = target is None or max(ratios) <= target
        are_met &= is_met
        cells = [shown(name, by_subject[subject]) for subject in names]
        verdict = "" if target is None else "met" if is_met else "MISSED"
        lines.append(
            f"| {name} | {' | '.join(cells)} | {', '.join(f'{ratio:.2f}x' for ratio in ratios)} "
            f"| {f'{target}x' if target else ''} | {verdict} |"
        )
    return "\n".join(lines), are_met


def machine() -> str:
    """Return a description of this machine."""
    version = subprocess.run(["runsc", "--version"], capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    return f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, {version}"


def main() -> int:
    """Run the benchmarks. Return 0 if all targets are met, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of each measure (default: %(default)s)")
    parser.add_argument("--executions", type=int, default=160, help="executions per round (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=20, help="kernels started concurrently (default: %(default)s)")
    parser.add_argument("--rest", action="store_true", help="measure calls over REST instead of kernels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ab") as folder:
        # Separate from the user's own kernels, to distinguish the processes.
        os.environ["JUPYTER_DATA_DIR"] = f"{folder}/data"
        os.environ["JUPYTER_RUNTIME_DIR"] = f"{folder}/runtime"
        os.mkdir(os.environ["JUPYTER_RUNTIME_DIR"], 0o700)
        os.chdir(folder)
        os.mkdir("rest")
        if options.rest:
            samples = rest.measure(Path(folder, "rest"), options.rounds, options.executions)
            text, are_met = rest.table(samples, statistics.median)
        else:
            text, are_met = table(measure(options.rounds, options.executions, options.parallel))
    print(f"\n{machine()}\n\n{text}")
    return 0 if are_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
