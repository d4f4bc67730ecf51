"""Measure the time and disk space of ten consecutive snapshots: ``python -m benchmarks.snapshots``.

The images are synthetic, in the proportions of a small kernel. Between two snapshots, some pages of the memory change,
all pages may move, and the kernel state changes everywhere. No sandbox runs. ``--images`` takes real images instead:
directories that ``runsc checkpoint -compression none`` wrote, oldest first.

``--live`` measures kernels in sandboxes of a server: for how long a running program pauses, as seen by the program,
and how long calls take. The exit status is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jupyter_agentbox.client import Client
from jupyter_agentbox.storage.snapshots import SnapshotMeta, SnapshotStore

from .serving import serving

PAGE = 4096
MB = 1_000_000


def make_images(base: Path, count: int, size: int, changed: float) -> list[Path]:
    """Write synthetic images. In each, the given share of the previous image's pages is changed."""
    rng = random.Random(0)
    pages = [rng.randbytes(PAGE) for _ in range(size // PAGE)]
    images = []
    for number in range(count):
        image = base / f"image-{number}"
        image.mkdir()
        (image / "pages.img").write_bytes(b"".join(pages))
        (image / "pages_meta.img").write_bytes(rng.randbytes(5000))
        words = [rng.randbytes(24) for _ in range(400)]
        (image / "checkpoint.img").write_bytes(b"".join(rng.choices(words, k=30_000)))
        images.append(image)
        for _ in range(int(changed * len(pages))):
            pages[rng.randrange(len(pages))] = rng.randbytes(PAGE)
        cut = rng.randrange(len(pages))
        pages = pages[cut:] + pages[:cut]
    return images


def enter(context: AbstractContextManager[Path]) -> float:
    """Return the seconds until a snapshot is checked out, and leave it."""
    started = time.perf_counter()
    with context:
        return time.perf_counter() - started


def run(state: Path, images: list[Path], secret: bytes | None, say: Callable[[str], None]) -> None:
    """Save, check out and delete snapshots, and print a line for each."""
    state.mkdir(mode=0o700)
    store = SnapshotStore(state, secret=secret, max_bytes=100_000 * MB, max_count=1000)
    parent: str | None = None
    for number, image in enumerate([*images, images[-1]]):
        kind = "user" if number < len(images) else "park"
        staged = store.stage()
        shutil.copytree(image, staged / "image", dirs_exist_ok=True)
        meta = SnapshotMeta(sandbox="bench", owner="bench", kind=kind, created=time.time(), parent=parent)  # type: ignore[arg-type]
        started = time.perf_counter()
        made = store.commit(staged, meta)
        took = time.perf_counter() - started
        times = [enter(store.checkout(made.id, "bench")) for _ in range(3)]
        again = f"{enter(store.checkout(made.id, 'bench', verify='once')):8.4f}" if kind == "park" else ""
        say(f"{number + 1:3} {kind:5}{made.size / MB:9.1f}{made.cost / MB:9.2f}{took:9.3f}{min(times):9.3f}{again}")
        parent = made.id if kind == "user" else parent
    started = time.perf_counter()
    store.delete(store.list("bench")[0].id, "bench")
    say(f"first snapshot deleted in {time.perf_counter() - started:.3f} s")


#: Kernels by name: setup code, maximum pause of a snapshot in seconds, and a small change.
KERNELS = {
    "plain": ("", 0.2, "small = list(range(1000))"),
    "pandas": (
        "import pandas, numpy\nframe = pandas.DataFrame({'a': numpy.arange(100_000), 'b': 0.5})",
        0.3,
        "frame.loc[{number}, 'b'] = {number}; small = frame.head(100).describe()",
    ),
}
#: Maximum cost of the tenth snapshot, as a share of the first.
TENTH = 0.1
WATCH = """
import threading, time
longest = 0.0
def watch():
    global longest
    last = time.time()
    while True:
        time.sleep(0.002)
        now = time.time()
        longest = max(longest, now - last)
        last = now
threading.Thread(target=watch, daemon=True).start()
"""


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and its result."""
    started = time.perf_counter()
    answer = call()
    return time.perf_counter() - started, answer


def measure_live(client: Client, name: str, count: int) -> tuple[str, bool]:
    """Save, restore and fork one kernel. Return the row of the table, and whether all targets are met."""
    setup, most, change = KERNELS[name]
    with client.create() as box:
        box.run_code(setup + WATCH)
        taken, pauses, saved = [], [], []
        for number in range(count):
            box.run_code(change.format(number=number) + "\nlongest = 0.0")
            took, snapshot = timed(box.take_snapshot)
            ran = box.run_code("longest")
            assert ran.result is not None
            taken.append(took)
            pauses.append(float(ran.result.data["text/plain"]))
            saved.append(snapshot)
        restored = [timed(lambda: box.restore(saved[-1].id))[0] for _ in range(5)]
        forked = []
        for _ in range(5):
            took, fork = timed(lambda: box.fork(snapshot=saved[-1].id))
            forked.append(took)
            fork.delete()
        for snapshot in saved:
            client.delete_snapshot(snapshot.id)
    pause, share = statistics.median(pauses), saved[-1].cost / saved[0].cost
    is_met = pause <= most and share <= TENTH
    cells = [
        name,
        *(f"{statistics.median(times):.2f} s" for times in (taken, restored, forked)),
        f"{pause * 1000:.0f} ms ({min(pauses) * 1000:.0f} to {max(pauses) * 1000:.0f})",
        f"{most * 1000:.0f} ms",
        f"{saved[0].cost / MB:.1f}, {saved[-1].cost / MB:.1f} MB",
        f"{share:.0%}",
        "met" if is_met else "MISSED",
    ]
    return f"| {' | '.join(cells)} |", is_met


def run_live(count: int) -> bool:
    """Measure every kernel. Return whether all targets are met."""
    print("| kernel | snapshot | restore | fork | pause (range) | target | cost of the first and last | share | |")
    print("|---|---|---|---|---|---|---|---|---|")
    are_met = True
    with tempfile.TemporaryDirectory(prefix="ab") as base, serving(Path(base)) as served:
        with Client(served.url, served.token) as client:
            for name in KERNELS:
                row, is_met = measure_live(client, name, count)
                print(row, flush=True)
                are_met &= is_met
    return are_met


def main() -> int:
    """Measure plain and encrypted stores, or live kernels."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--size", type=int, default=50, help="size of the memory in MB (default: %(default)s)")
    parser.add_argument(
        "--changed",
        type=float,
        default=0.02,
        help="share of the pages that change between snapshots (default: %(default)s)",
    )
    parser.add_argument("--images", type=Path, nargs="*", help="directories of real images, oldest first")
    parser.add_argument("--live", action="store_true", help="measure kernels in sandboxes instead")
    options = parser.parse_args()
    if options.live:
        return 0 if run_live(options.count) else 1
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as base:
        images = options.images or make_images(Path(base), options.count, options.size * MB, options.changed)
        for name, secret in (("plain", None), ("encrypted", bytes(32))):
            print(f"{name}\n  # kind   size MB  cost MB commit s layout s unread s")
            run(Path(base) / name, images, secret, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
