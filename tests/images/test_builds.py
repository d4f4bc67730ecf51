"""Whole builds, which take minutes each: only where AGENTBOX_IMAGES is ``all``."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest
from dockerd import Dockerd

from jupyter_agentbox.images import ImageStore, build, docker, values
from jupyter_agentbox.images.values import Recipe

from . import conftest

pytestmark = pytest.mark.timeout(3600)

if os.environ.get("AGENTBOX_IMAGES") == "all":

    def read(name: str) -> Recipe:
        return values.read_recipe(values.find_recipe(name))

    def make(recipe: Recipe, state: Path) -> str:
        store = ImageStore(state)
        image = build.build(store, recipe, print, cache=conftest.CACHE / "downloads")
        assert store.list() == [image]
        return image.address

    @pytest.mark.parametrize("name", values.list_recipes())
    def test_two_builds_of_one_recipe_have_one_address(name: str, tmp_path: Path) -> None:
        assert make(read(name), tmp_path / "one") == make(read(name), tmp_path / "two")

    def test_docker_builds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """From a bare system of the same release, as there is no registry here."""
        release = build.find_release()
        sources = tmp_path / "sources.list"
        sources.write_text("".join(f"{line}\n" for line in build.find_sources(release)))
        (tmp_path / "archives").mkdir()
        bare = build.make_command("mmdebstrap", Recipe(name="bare"), release, sources, tmp_path / "archives")
        dockerd = Dockerd(Path(tempfile.mkdtemp(prefix="ab-d")))
        try:
            dockerd.start()
            monkeypatch.setenv("DOCKER_HOST", dockerd.host)
            with (tmp_path / "bare.tar").open("wb") as file:
                subprocess.run(bare, stdout=file, check=True, timeout=1200)
            subprocess.run(["docker", "import", tmp_path / "bare.tar", "local/bare:1"], check=True, timeout=600)
            recipe = read("base")
            ours = msgspec.structs.replace(recipe, docker="local/bare:1")
            made = docker.build(ImageStore(tmp_path / "docker"), ours, print, cache=conftest.CACHE / "downloads")
            assert made.address == make(recipe, tmp_path / "apt")
        finally:
            dockerd.close()
