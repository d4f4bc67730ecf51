"""Images that are handed out while they are verified: nobody gets a byte of one that was changed."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.snapshot_images import PAGE, make_pages, make_store, put

from jupyter_agentbox.errors import AgentboxError, Damaged
from jupyter_agentbox.storage.snapshots import deferred_image, store

PAGES = make_pages(300)
STATE = b"state " * 20_000


def load(image: Path) -> dict[str, bytes]:
    """Do what a runtime does: open all, and then read."""
    with ExitStack() as stack:
        names = ("checkpoint.img", "pages_meta.img", "pages.img")
        files = {name: stack.enter_context((image / name).open("rb")) for name in names}
        return {name: file.read() for name, file in files.items()}


@pytest.mark.parametrize("kind", ["user", "park"])
@pytest.mark.parametrize("secret", [None, b"s" * 32], ids=["plain", "encrypted"])
def test_who_opens_it_waits_until_it_is_verified(
    tmp_path: Path, kind: str, secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    run = deferred_image.DeferredImage._run
    monkeypatch.setattr(deferred_image.DeferredImage, "_run", lambda self: (goes_on.wait(60), run(self)))
    at = make_store(tmp_path / "state", secret=secret)
    made = put(at, PAGES, kind=kind, files={"kept.txt": b"kept"})
    loaded: dict[str, bytes] = {}
    with at.checkout(made.id, "ada", is_early=True) as path:
        assert (path / "work/kept.txt").read_bytes() == b"kept"
        reader = threading.Thread(target=lambda: loaded.update(load(path / "image")))
        reader.start()
        reader.join(0.1)
        assert reader.is_alive(), "it waits"
        goes_on.set()
        reader.join(60)
    assert loaded == {"checkpoint.img": STATE, "pages_meta.img": b"meta", "pages.img": PAGES}
    assert not path.exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["user", "park"])
def test_of_what_was_changed_there_is_nothing_to_load(tmp_path: Path, kind: str) -> None:
    at = make_store(tmp_path / "state")
    made = put(at, PAGES, kind=kind)
    owner = next((tmp_path / "state/snapshots/owners").iterdir())
    flip(next((owner / "packs").iterdir()) if kind == "user" else owner / f"snapshots/{made.id}/packed/pages.img")
    loaded = {}
    with pytest.raises(Damaged, match="memory was changed on disk"):
        with at.checkout(made.id, "ada", is_early=True) as path:
            loaded = load(path / "image")
            raise AgentboxError("what a runtime says of empty files")
    assert loaded == {"checkpoint.img": b"", "pages_meta.img": b"", "pages.img": b""}
    assert not path.exists()


def test_who_never_opens_it_keeps_nobody(tmp_path: Path) -> None:
    at = make_store(tmp_path / "state")
    made = put(at, PAGES, kind="park")
    with at.checkout(made.id, "ada", is_early=True) as path:
        assert (path / "image/pages_meta.img").is_fifo()
    with pytest.raises(AgentboxError, match="it did not start"):
        with at.checkout(made.id, "ada", is_early=True) as path:
            (path / "image/pages_meta.img").open("rb").close()  # and reads none of it
            raise AgentboxError("it did not start")
    assert not list((tmp_path / "state/snapshots/live").iterdir())


def test_a_large_one_is_verified_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "EARLY_SIZE", 100 * PAGE)
    at = make_store(tmp_path / "state")
    made = put(at, PAGES, kind="park")
    with at.checkout(made.id, "ada", is_early=True) as path:
        assert (path / "image/pages_meta.img").read_bytes() == b"meta"
