"""Pages are kept once, whoever goes first; and what a snapshot costs."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.snapshot_images import PAGE, make_pages, make_store, pages_of, put

from jupyter_agentbox.storage.snapshots import Snapshot
from jupyter_agentbox.storage.snapshots.owner import disk_usage
from jupyter_agentbox.storage.snapshots.pages import MAX_PACKS


@pytest.mark.parametrize("secret", [None, b"k" * 40], ids=["plain", "encrypted"])
def test_the_tenth_of_ten_costs_less_than_a_tenth(tmp_path: Path, secret: bytes | None) -> None:
    """After small changes, with pages that have moved, as a restored sandbox writes them in another order."""
    rng = random.Random(1)
    store = make_store(tmp_path / "state", secret=secret)
    pages = [rng.randbytes(PAGE) for _ in range(2500)]
    made: list[Snapshot] = []
    for number in range(10):
        for _ in range(40):
            pages[rng.randrange(len(pages))] = rng.randbytes(PAGE)
        cut = rng.randrange(len(pages))
        pages = pages[cut:] + pages[:cut]
        state = rng.randbytes(30_000) + b"objects " * 60_000
        made.append(put(store, b"".join(pages), state=state, parent=made[-1].id if number % 2 and made else None))
    assert made[-1].cost < made[0].cost / 10
    assert pages_of(store, made[-1]) == b"".join(pages)
    listed = store.list("ada")
    folder = tmp_path / "state" / "snapshots" / "owners"
    assert sum(found.cost for found in listed) == disk_usage(*folder.glob("*/packs"), *folder.glob("*/snapshots"))


def test_a_delete_keeps_what_others_need_and_frees_the_rest(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    shared, own = make_pages(400, 1), make_pages(600, 2)
    first = put(store, own + shared)
    second = put(store, shared, parent=first.id)
    assert second.cost < 100_000
    store.delete(first.id, "ada")
    (left,) = store.list("ada")
    assert len(shared) <= left.cost < len(shared) + 200_000
    assert pages_of(store, left) == shared
    store.delete(second.id, "ada")
    assert disk_usage(*(tmp_path / "state" / "snapshots" / "owners").glob("*/packs")) == 0


def test_a_fork_shares_with_what_it_came_from_and_zeros_cost_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "state")
    first = put(store, make_pages(500))
    assert put(store, make_pages(500), sandbox="fork", parent=first.id).cost < 100_000
    assert put(store, make_pages(500), sandbox="stranger").cost > 500 * PAGE
    assert put(store, bytes(500 * PAGE), sandbox="zeros").cost < 100_000


Step = tuple[str, int, int]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("save"), st.integers(0, 2**32), st.integers(0, 9)),
            st.tuples(st.just("delete"), st.integers(0, 2**32), st.just(0)),
        ),
        min_size=3,
        max_size=12,
    ),
    st.booleans(),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_saved_and_deleted_the_others_are_whole(steps: list[Step], is_sealed: bool) -> None:
    with tempfile.TemporaryDirectory() as base:
        store = make_store(Path(base) / "state", secret=b"k" * 32 if is_sealed else None)
        pages = [make_pages(1, number % 5) for number in range(12)]
        expected: dict[str, tuple[Snapshot, bytes, bytes]] = {}
        for verb, seed, parent in steps:
            rng = random.Random(seed)
            if verb == "save":
                for _ in range(rng.randrange(4)):
                    pages[rng.randrange(len(pages))] = rng.choice([bytes(PAGE), rng.randbytes(PAGE), pages[0]])
                pages = [*pages[rng.randrange(3) :], rng.randbytes(PAGE)]
                tail, data = rng.randbytes(rng.randrange(PAGE)), rng.randbytes(rng.choice([0, 10, PAGE, 70_000]))
                made = put(
                    store,
                    b"".join(pages) + tail,
                    state=data * 2,
                    files={"f": data},
                    kind=rng.choice(["user", "auto", "park"]),
                    parent=sorted(expected)[parent % len(expected)] if expected else None,
                )
                expected[made.id] = (made, b"".join(pages) + tail, data)
            elif expected:
                gone = rng.choice(sorted(expected))
                store.delete(gone, "ada")
                del expected[gone]
        assert {found.id for found in store.list("ada")} == set(expected)
        for made, memory, data in expected.values():
            with store.checkout(made.id, "ada") as path:
                assert (path / "image" / "pages.img").read_bytes() == memory
                assert (path / "image" / "checkpoint.img").read_bytes() == data * 2
                assert (path / "work" / "f").read_bytes() == data


def test_a_long_line_of_snapshots_needs_no_more_packs_than_a_short_one(tmp_path: Path) -> None:
    """What a snapshot needs of many packs it brings anew, and those go with the snapshots that brought them."""
    store = make_store(tmp_path / "state")
    rng = random.Random(2)
    pages = [rng.randbytes(PAGE) for _ in range(300)]
    packs = tmp_path / "state" / "snapshots" / "owners"
    made = put(store, b"".join(pages))
    for _ in range(3 * MAX_PACKS):
        for _ in range(3):
            pages[rng.randrange(len(pages))] = rng.randbytes(PAGE)
        previous, made = made, put(store, b"".join(pages), parent=made.id)
        store.delete(previous.id, "ada")
    assert len(list(packs.glob("*/packs/*"))) <= MAX_PACKS + 1
    assert disk_usage(*packs.glob("*/packs")) < 2 * len(pages) * PAGE
    assert pages_of(store, made) == b"".join(pages)
