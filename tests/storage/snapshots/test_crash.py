"""Killed at any moment, the store holds what it held before, or what it should hold after; and nothing is left over."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support import TESTS
from support.snapshot_images import make_pages, make_store, pages_of, put

PROGRAM = textwrap.dedent("""
    import os, sys
    sys.path.insert(0, sys.argv[1])
    from pathlib import Path
    from support.snapshot_images import make_store, make_pages, put
    store = make_store(Path(sys.argv[2]), max_count=6)
    number = 0
    print("ready", flush=True)
    while True:  # the test kills it
        number += 1
        pages = make_pages(150, 0) + make_pages(number % 7, 1000 + number)
        print("saving", number, flush=True)
        made = put(store, pages, name=f"n{number}", kind=("user", "park")[number % 3 == 0], files={"f": b"x" * number})
        print("saved", made.id, number, flush=True)
        for old in store.list("ada")[:-2]:
            print("deleting", old.id, flush=True)
            store.delete(old.id, "ada")
            print("deleted", old.id, flush=True)
""")


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_at_any_moment_leaves_before_or_after(tmp_path: Path, seed: int) -> None:
    rng, state = random.Random(seed), tmp_path / "state"
    store = make_store(state)
    command = [sys.executable, "-c", PROGRAM, str(TESTS), str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], 60)[0]
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0.0, 0.25))
        finally:
            process.send_signal(signal.SIGKILL)
        lines = [line.split() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    saved = {line[1]: int(line[2]) for line in lines if line[0] == "saved"}
    gone = {line[1] for line in lines if line[0] == "deleted"}
    asked = {line[1] for line in lines if line[0] == "deleting"}
    last = max((int(line[1]) for line in lines if line[0] == "saving"), default=0)

    store.sweep()
    assert store.damaged("ada") == {}
    found = {snapshot.id: snapshot for snapshot in store.list("ada")}
    assert set(saved) - asked <= set(found)
    assert not gone & set(found)
    for snapshot in found.values():
        # What it did not come to say it saved can only be the last that it began.
        number = saved.get(snapshot.id, last)
        assert snapshot.meta.name == f"n{number}"
        assert pages_of(store, snapshot) == make_pages(150, 0) + make_pages(number % 7, 1000 + number)
    (owner,) = (state / "snapshots" / "owners").iterdir() if found else [None]
    if owner is not None:
        assert set(os.listdir(owner / "snapshots")) == set(found)
        assert os.listdir(state / "snapshots" / "live") == []
        for snapshot in found.values():
            store.delete(snapshot.id, "ada")
        assert os.listdir(owner / "packs") == os.listdir(owner / "snapshots") == []


def test_a_kill_before_each_step_of_commit_and_delete(tmp_path: Path) -> None:
    """Not by chance but one after the other: before the n-th call that changes a name in the file system."""
    program = textwrap.dedent("""
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from pathlib import Path
        from support.snapshot_images import make_store, make_pages, put
        def work(left, old, kind):
            store = make_store(Path(sys.argv[2]))
            def audit(event, arguments):
                nonlocal left
                if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.link") or (
                    event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
                ):
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), 9)
            staged = store.stage()
            store.discard(staged)
            sys.addaudithook(audit)
            if kind == "delete":
                store.delete(old, "ada")
            else:
                put(store, make_pages(20, 0) + make_pages(5, 2), kind=kind, parent=old)
        for line in sys.stdin:  # each in a process of its own, without starting Python again
            number, old, kind = line.split()
            pid = os.fork()
            if not pid:
                try:
                    work(int(number), old, kind)
                    os._exit(0)
                finally:
                    os._exit(1)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    """)
    state = tmp_path / "state"
    command = [sys.executable, "-c", program, str(TESTS), str(state)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for kind in ("user", "park", "delete"):
            seen: set[bool] = set()
            for number in range(0, 200, 4):
                store = make_store(state)
                first = put(store, make_pages(20, 0) + make_pages(5, 1))
                second = put(store, make_pages(20, 0), parent=first.id)
                process.stdin.write(f"{number} {first.id} {kind}\n")
                process.stdin.flush()
                code = int(process.stdout.readline())
                assert code in (0, -9)
                store.sweep()
                found = {snapshot.id: snapshot for snapshot in store.list("ada")}
                assert store.damaged("ada") == {}
                assert pages_of(store, second) == make_pages(20, 0)
                if kind == "delete":
                    seen.add(first.id in found)
                else:
                    assert pages_of(store, first) == make_pages(20, 0) + make_pages(5, 1)
                    seen.add(len(found) == 3)
                    for other in set(found) - {first.id, second.id}:
                        assert pages_of(store, found[other]) == make_pages(20, 0) + make_pages(5, 2)
                for snapshot in found:
                    store.delete(snapshot, "ada")
                (owner,) = (state / "snapshots" / "owners").iterdir()
                assert os.listdir(owner / "packs") == os.listdir(owner / "snapshots") == []
                if code == 0:
                    break
            assert seen == {True, False}
            assert code == 0
        process.stdin.close()


def test_what_somebody_counts_on_is_on_the_disk_before_it_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file and directory of it is forced there, the pack with the pages too; the directory of names comes last."""
    synced: list[Path] = []

    def note(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))

    store = make_store(tmp_path / "state")
    monkeypatch.setattr(os, "fsync", note)
    made = put(store, make_pages(3), kind="user")
    parked = put(store, make_pages(3), kind="park", parent=made.id)
    (owner,) = (tmp_path / "state" / "snapshots" / "owners").iterdir()
    for snapshot in (made, parked):
        folder = owner / "snapshots" / f".new-{snapshot.id}"
        expected = {folder, folder / "head", folder / "table", owner / "packs", owner, owner / "owner", owner.parent}
        if snapshot is made:
            expected.add(owner / "packs" / made.id)
        else:
            expected |= {folder / "packed" / name for name in ("", "pages.img", "pages_meta.img", "checkpoint.img")}
        upto = synced.index(owner / "snapshots")
        assert expected <= set(synced[:upto]), expected - set(synced[:upto])
        del synced[: upto + 1]
    put(store, make_pages(4), kind="auto")
    assert synced == [], "what a fork begins with is gone at once"
