"""Recipes: those that come with the package, what they may say, and how they are put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from jupyter_agentbox.errors import InvalidRequest, NotFound
from jupyter_agentbox.storage.images import build, values


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\n{text}\n')
    return path


def test_the_recipes_that_come_with_the_package_are_short_and_pinned() -> None:
    names = values.list_recipes()
    assert set(names) == {"base", "python", "datascience", "javascript", "r", "all"}
    for name in names:
        path = values.find_recipe(name)
        assert len(path.read_text().splitlines()) <= 25
        recipe = values.read_recipe(path)
        assert recipe.name == name
        assert "python3" in recipe.debian
        assert all("==" in pin for pin in recipe.pip)
    everything = values.read_recipe(values.find_recipe("all"))
    for name in names:
        part = values.read_recipe(values.find_recipe(name))
        assert {*part.debian, *part.pip, *part.npm} <= {*everything.debian, *everything.pip, *everything.npm}
    assert {language for kernel in everything.kernels for language in kernel.languages} >= {
        "R", "bash", "typescript", "javascript", "python",
    }  # fmt: skip


def test_recipes_are_put_together(tmp_path: Path) -> None:
    write(tmp_path, "first", 'debian = ["git", "curl"]\npip = ["Foo_bar==1"]\nenv = {A = "1", B = "1"}\ninit = ["one"]')
    write(tmp_path, "second", 'npm = ["x@1.0.0"]\nservices = [{name = "s", line = "run"}]')
    path = write(
        tmp_path,
        "whole",
        'from = ["first", "second"]\ndebian = ["curl", "less"]\npip = ["foo-bar==2"]\nenv = {B = "2"}',
    )
    recipe = values.read_recipe(path)
    assert (recipe.name, recipe.debian, recipe.pip) == ("whole", ["git", "curl", "less"], ["foo-bar==2"])
    assert (recipe.env, recipe.init, recipe.npm) == ({"A": "1", "B": "2"}, ["one"], ["x@1.0.0"])
    assert recipe.services[0].line == "run"
    mine = write(tmp_path, "python", 'from = "python"\ndebian = ["jq"]')
    assert {"jq", "python3"} <= {*values.read_recipe(mine).debian}, "called as the one that it is made from"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('pip = ["pandas"]', "pip"),
        ('pip = ["pandas>=2"]', "pip"),
        ('pip = ["--index-url=x==1"]', "pip"),
        ('npm = ["deno"]', "npm"),
        ('npm = ["--x@1.0.0"]', "npm"),
        ('debian = ["-o"]', "debian"),
        ('debian = ["git;x"]', "debian"),
        ('files = {x = "relative"}', "files"),
        ('env = {"A=B" = ""}', "env"),
        ("unknown = 1", "unknown"),
        ("name", "recipe"),
    ],
)
def test_what_no_recipe_may_say(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        values.read_recipe(write(tmp_path, "whole", text))


def test_recipes_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path, "first", 'from = "second"')
    with pytest.raises(InvalidRequest, match="based on itself"):
        values.read_recipe(write(tmp_path, "second", 'from = "first"'))


def test_a_recipe_that_is_not_there() -> None:
    with pytest.raises(NotFound, match=r"does not exist; use .* one of: all, base"):
        values.find_recipe("nothing")
    with pytest.raises(NotFound):
        values.find_recipe("/nowhere/x.toml")
    for name in ("../x", "X", ""):
        with pytest.raises(InvalidRequest):
            values.find_recipe(name)


def test_the_sources_are_the_machines_own() -> None:
    release = build.find_release()
    lines = build.find_sources(release)
    assert lines
    assert all(line.startswith("deb http") and f" {release}" in line for line in lines)
