"""Which images may be chosen, and that nobody learns of the others; what makes trees of distributions alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.trees import keep
from traitlets.config import Config

from jupyter_agentbox.errors import NotFound, PolicyRefused
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.storage.images import ImageStore, build


def refuse(state: Path, asked: str, *allowed: str) -> tuple[type[Exception], str]:
    policy = Policy(config=Config({"Policy": {"state_dir": str(state), "allowed_images": list(allowed)}}))
    with pytest.raises((NotFound, PolicyRefused)) as caught:
        policy.resolve({"image": asked})
    return caught.type, str(caught.value).replace(asked, "ASKED")


def test_an_image_that_may_not_be_used_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    state = tmp_path / "state"
    store = ImageStore(state)
    secret, known = keep(store, "secret"), keep(store, "known")
    answers = {
        refuse(state, asked, "known", "k*")
        for asked in ("secret", "nothing", secret.short, f"secret@{'0' * 12}", secret.address, "0" * 64)
    }
    assert answers == {(PolicyRefused, "image 'ASKED' is not in Policy.allowed_images")}
    kind, words = refuse(state, "kept", "k*")
    assert kind is NotFound
    assert "images are: known." in words, "without those that may not be used"
    # The beginning of an address may be what a pattern of names allows.
    assert refuse(state, secret.address[:12], "[0-9a-f]*") == refuse(state, "0" * 12, "[0-9a-f]*")
    for asked in ("known", known.short, known.address):
        policy = Policy(config=Config({"Policy": {"state_dir": str(state), "allowed_images": ["kn*"]}}))
        assert policy.resolve({"image": asked}).root == store.root(known)
    assert refuse(state, "known")[0] is PolicyRefused


def test_a_build_leaves_out_what_sandboxes_do_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_sources", lambda release: ["deb http://here bookworm main"])
    root = tmp_path / "root"
    for name, text in {
        "etc/mtab": "",
        "etc/apt/sources.list.d/debian.sources": "theirs",
        "etc/apt/sources.list.d/another.list": "stays",
        "etc/apt/apt.conf.d/99mmdebstrap": "",
        "etc/dpkg/dpkg.cfg.d/99mmdebstrap": "",
        "usr/share/doc/git/copyright": "whose",
        "usr/share/doc/git/README": "",
        "usr/share/doc/less/NEWS": "",
        "usr/share/info/x.gz": "",
        "usr/share/lintian/overrides/x": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    build.settle(root, "bookworm")
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert found == [
        "etc/apt/apt.conf.d/99agentbox",
        "etc/apt/sources.list",
        "etc/apt/sources.list.d/another.list",
        "usr/share/doc/git/copyright",
    ]
    assert (root / "etc/apt/sources.list").read_text() == "deb http://here bookworm main\n"
    assert not (root / "usr/share/doc/less").exists()


@pytest.mark.parametrize("link", ["etc", "etc/apt", "etc/apt/sources.list.d", "usr/share", "usr/share/doc"])
def test_nothing_outside_of_a_tree_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str) -> None:
    monkeypatch.setattr(build, "find_sources", lambda release: [])
    outside, root = tmp_path / "outside", tmp_path / "root"
    for folder in ("", "doc", "apt", "apt/sources.list.d", "apt/apt.conf.d", "sources.list.d"):
        (outside / folder).mkdir(exist_ok=True)
        for name in ("mtab", "sources.list", "debian.sources", "99mmdebstrap", "README"):
            (outside / folder / name).touch()
    before = sorted(outside.rglob("*"))
    (root / link).parent.mkdir(parents=True)
    os.symlink(outside, root / link)
    build.settle(root, "bookworm")
    assert sorted(outside.rglob("*")) == before
