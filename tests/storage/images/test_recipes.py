"""Recipes: those that come with the package, what they may say, and how they are put together."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.images import CACHE

from jupyter_agentbox.errors import InvalidRequest, NotFound, RuntimeFailed
from jupyter_agentbox.storage.images import ImageStore, build, values


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
        ('pip = ["pandas"]', r"pip\[0\] is 'pandas', but must be .* such as duckdb==1\.1\.3"),
        ('pip = ["x==1", "pandas>=2"]', r"pip\[1\] is 'pandas>=2'"),
        ('pip = ["--index-url=x==1"]', "pip"),
        ('npm = ["deno"]', r"such as typescript@5\.6\.3"),
        ('npm = ["--x@1.0.0"]', "npm"),
        ('debian = ["-o"]', "debian"),
        ('debian = ["git;x"]', "such as jq"),
        ('files = {x = "relative"}', "a name in files .* an absolute path"),
        ('env = {"A=B" = ""}', "a name in env"),
        ('links = {"/x" = ""}', "a value in links"),
        ('services = [{name = "A", line = "x"}]', r"services\[0\]\.name is 'A'"),
        ("unknown = 1", "unknown"),
        ("name", "recipe"),
    ],
)
def test_what_no_recipe_may_say(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        values.read_recipe(write(tmp_path, "whole", text))


@pytest.mark.network
@pytest.mark.timeout(600)
def test_a_package_that_the_distribution_does_not_have_is_named(tmp_path: Path) -> None:
    recipe = values.read_recipe(write(tmp_path, "whole", 'debian = ["no-such-package"]'))
    store = ImageStore(tmp_path / "state")
    with pytest.raises(InvalidRequest, match="have no package no-such-package"):
        build.build(store, recipe, print, pip_environment={}, cache=CACHE / "downloads")
    assert not list(store.directory.iterdir())


@pytest.mark.parametrize(
    ("printed", "error", "words"),
    [
        ("E: Version '99' for 'less' was not found", InvalidRequest, "no version 99 of package less"),
        ("E: Package 'x' has no installation candidate", InvalidRequest, "no package x"),
        ("E: no room", RuntimeFailed, "mmdebstrap failed with status 25: E: no room"),
    ],
)
def test_what_a_build_fails_of_is_told_and_not_what_it_wrote_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str, error: type[Exception], words: str
) -> None:
    program = tmp_path / "mmdebstrap"
    program.write_text(f'#!/bin/sh\nprintf x\necho "{printed}" >&2\nexit 25\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    recipe = values.make_recipe("x")
    with pytest.raises(error, match=words):
        build.build(ImageStore(tmp_path / "state"), recipe, print, pip_environment={}, cache=tmp_path / "cache")


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
