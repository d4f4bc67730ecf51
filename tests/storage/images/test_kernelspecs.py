"""Kernels that an image brings without a recipe that names them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jupyter_agentbox.storage.images.kernelspecs import add_kernels
from jupyter_agentbox.storage.images.values import KernelEntry, Recipe, make_recipe

R = {"argv": ["R", "--args", "{connection_file}"], "display_name": "R 4.2", "language": "R"}


def write(root: Path, name: str, spec: Any, place: str = "usr/share/jupyter/kernels") -> None:
    folder = root / place / name
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(spec if isinstance(spec, str) else json.dumps(spec))


def test_kernels_are_found_where_jupyter_finds_them(tmp_path: Path) -> None:
    write(tmp_path, "ir", R)
    write(tmp_path, "python3", {**R, "language": "python"})
    deno = {"argv": ["deno", "{resource_dir}/x", "{connection_file}"], "language": "typescript", "env": {"A": "b c"},
            "interrupt_mode": "message"}  # fmt: skip
    write(tmp_path, "Deno", deno, "usr/local/share/jupyter/kernels")
    made = add_kernels(make_recipe("mine"), tmp_path)
    assert made.kernels == [
        KernelEntry(
            "deno",
            ["/usr/bin/env", "A=b c", "deno", "/usr/local/share/jupyter/kernels/Deno/x", "{connection_file}"],
            "Deno",
            ["typescript", "javascript"],
            "message",
        ),
        KernelEntry("ir", ["R", "--args", "{connection_file}"], "R 4.2", ["R"]),
    ]


def test_what_a_recipe_says_of_a_language_stands(tmp_path: Path) -> None:
    write(tmp_path, "ir", R)
    own = KernelEntry("own", ["R", "{connection_file}"], "Ours", ["r"])
    assert add_kernels(Recipe(name="x", kernels=[own]), tmp_path).kernels == [own]


@pytest.mark.parametrize(
    "spec",
    [
        "{", "[]", "1", "{}", pytest.param("[" * 60_000, id="deep"), pytest.param("x" * 70_000, id="long"),
        {**R, "argv": ["R"]}, {**R, "argv": "{connection_file}"}, {**R, "argv": [1]},
        {**R, "argv": ["a\0{connection_file}"]}, {**R, "language": 1}, {**R, "language": ""},
        {**R, "language": "python"}, {**R, "interrupt_mode": "never"}, {**R, "env": [1]},
        {**R, "display_name": "x" * 101},
    ],
)  # fmt: skip
def test_what_is_no_kernelspec_is_no_kernel(tmp_path: Path, spec: Any) -> None:
    write(tmp_path, "bad", spec)
    assert add_kernels(make_recipe("mine"), tmp_path).kernels == []


def test_no_link_leads_out_of_the_tree(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write(tmp_path, "ir", R, "outside")
    (root / "usr/share/jupyter").mkdir(parents=True)
    (root / "usr/share/jupyter/kernels").symlink_to(tmp_path / "outside")
    os.mkfifo(root / "usr/share/fifo")
    write(root, "real", "{}", "usr/local/share/jupyter/kernels")
    for name, target in (("a", "/outside/ir/kernel.json"), ("b", "/usr/share/fifo")):
        write(root, name, "", "usr/local/share/jupyter/kernels")
        file = root / "usr/local/share/jupyter/kernels" / name / "kernel.json"
        file.unlink()
        file.symlink_to(target)
    assert add_kernels(make_recipe("mine"), root).kernels == []
