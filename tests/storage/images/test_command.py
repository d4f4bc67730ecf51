"""The image command, without a build: what it lists, moves, offers to Jupyter and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.harness import Env
from support.serving import run_all
from support.trees import keep

from jupyter_agentbox.storage.images import ImageStore, archive
from jupyter_agentbox.storage.images.values import KernelEntry

pytestmark = pytest.mark.timeout(300)


def test_an_image_is_imported_listed_offered_exported_and_removed(tmp_path: Path) -> None:
    env = Env(tmp_path / "jupyter")
    try:
        other = ImageStore(tmp_path / "other")
        made = {
            name: keep(other, name, kernels=[KernelEntry("x", ["x", "{connection_file}"], title, ["x"])])
            for name, title in (("mine", "X"), ("theirs", "Other X"))
        }
        for name, image in made.items():
            archive.export_image(other, image, tmp_path / f"{name}.tar.gz")
        theirs = made["theirs"]
        ran = run_all(
            env,
            ("image", "import", str(tmp_path / "mine.tar.gz")),
            ("image", "import", str(tmp_path / "theirs.tar.gz")),
            ("image", "list"),
            ("image", "list", "--json"),
            ("image", "verify"),
            ("kernelspec", "--image=theirs"),
            ("kernelspec", "--image=theirs", "y"),
            ("kernelspec", "--image=theirs", "x", "--name=second"),
            timeout=200,
        )
        mine, second, table, listed, verified, offered, unknown, named = ran
        spec = json.loads((env.data / "kernels" / "agentbox-x" / "kernel.json").read_text())
        ran = run_all(
            env,
            ("image", "export", "mine", str(tmp_path / "mine.tar")),
            ("image", "remove", "mine", "theirs"),
            ("image", "remove", "mine"),
            ("image", "build", "nothing"),
            ("image", "build"),
            ("image",),
            timeout=200,
        )
        out, gone, again, missing, bare, group = ran
        assert mine.out.startswith("imported mine@")
        assert "kernels/agentbox-x" in mine.out
        assert "agentbox-x belongs to image mine" in second.out
        assert theirs.address[:12] in table.out
        assert "recipes: all, base" in table.out
        assert {item["name"] for item in json.loads(listed.out)} == {"mine", "theirs"}
        assert verified.out.count("is unchanged") == 2
        assert (offered.status, spec["display_name"]) == (0, "Other X (sandboxed)")
        assert spec["metadata"]["kernel_provisioner"]["config"] == {"image": "theirs"}
        assert named.status == 0
        assert (unknown.status, "its kernels: x" in unknown.err) == (1, True)
        assert (out.status, (tmp_path / "mine.tar").stat().st_size > 0) == (0, True)
        assert gone.out.count("removed mine@") == gone.out.count("removed theirs@") == 1
        assert gone.out.count("removed kernelspec ") == 2
        assert not list((env.data / "kernels").iterdir())
        assert (again.status, "images are: none" in again.err) == (1, True)
        assert "or one of: all, base" in missing.err
        assert [result.status for result in (missing, bare, group)] == [1, 2, 2]
        assert ImageStore(env.state_dir).list() == []
    finally:
        env.close()
