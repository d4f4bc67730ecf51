"""Whole builds, which take minutes each: only where AGENTBOX_IMAGES is ``all``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_agentbox.images import ImageStore, build, values

from . import conftest

pytestmark = pytest.mark.timeout(3600)

if os.environ.get("AGENTBOX_IMAGES") == "all":

    def test_two_builds_of_one_recipe_have_one_address(built: conftest.Built, tmp_path: Path) -> None:
        assert conftest.build(tmp_path / "state").address == built.image.address

    @pytest.mark.parametrize("name", values.list_recipes())
    def test_each_recipe_is_built(name: str, tmp_path: Path) -> None:
        store = ImageStore(tmp_path / "state")
        recipe = values.read_recipe(values.find_recipe(name))
        image = build.build(store, recipe, print, cache=conftest.CACHE / "downloads")
        assert store.list() == [image]
