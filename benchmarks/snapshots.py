"""What ten snapshots in a row take, in time and on the disk: ``python -m benchmarks.snapshots``.

The images are made up, in the proportions of a small kernel's: memory of which some pages change between two snapshots
and all may lie elsewhere, and a kernel state that changes all over. No sandbox runs. ``--images`` takes real ones
instead: directories that ``runsc checkpoint -compression none`` wrote, oldest first.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from jupyter_agentbox.snapshots import SnapshotMeta, SnapshotStore

PAGE = 4096
MB = 1_000_000


def make_images(base: Path, count: int, size: int, changed: float) -> list[Path]:
    """Write made-up images, each with a share of the pages of the one before changed."""
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
    """Return the seconds until a snapshot is laid out, and leave it."""
    started = time.perf_counter()
    with context:
        return time.perf_counter() - started


def run(state: Path, images: list[Path], secret: bytes | None, say: Callable[[str], None]) -> None:
    """Save, lay out and delete; print a line for each."""
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
    say(f"the first one deleted in {time.perf_counter() - started:.3f} s")


def main() -> None:
    """Measure plain and encrypted stores."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--size", type=int, default=50, help="of the memory, in MB")
    parser.add_argument("--changed", type=float, default=0.02, help="share of the pages that change in between")
    parser.add_argument("--images", type=Path, nargs="*", help="directories of real images, oldest first")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".", prefix="bench-") as base:
        images = options.images or make_images(Path(base), options.count, options.size * MB, options.changed)
        for name, secret in (("plain", None), ("encrypted", bytes(32))):
            print(f"{name}\n  # kind   size MB  cost MB commit s layout s unread s")
            run(Path(base) / name, images, secret, print)


if __name__ == "__main__":
    main()
