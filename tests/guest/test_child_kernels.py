"""Kernelspecs of sandboxed kernels inside: they start their kernels directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jupyter_agentbox.guest import child_kernels, own_pip
from jupyter_agentbox.jupyter.kernelspecs import OWN_NAME, OWN_SPEC, PROVISIONER_NAME

ARGV = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(child_kernels, "FOLDERS", (str(tmp_path / "system"),))
    return tmp_path / "env"


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / "share" / "jupyter" / "kernels" / name / "kernel.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return path


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def test_ours_are_unwrapped_and_others_are_left_alone(prefix: Path) -> None:
    own = write(prefix, OWN_NAME, json.dumps(OWN_SPEC))
    other = write(prefix, "python3", json.dumps({"argv": ARGV, "display_name": "Python"}))
    unguarded = {"kernel_provisioner": {"provisioner_name": PROVISIONER_NAME, "config": {}}}
    third = write(prefix, "third", json.dumps({"argv": ["R"], "metadata": unguarded}))
    broken = [write(prefix, f"broken{number}", text) for number, text in enumerate(("{", "[]", '{"metadata": 1}'))]
    child_kernels.provide(str(prefix / "bin" / "python"))
    assert load(own) == {**OWN_SPEC, "argv": ARGV, "metadata": {"debugger": True}}
    assert load(other) == {"argv": ARGV, "display_name": "Python"}
    assert load(third) == {"argv": ["R"], "metadata": {}}
    assert [path.read_text() for path in broken] == ["{", "[]", '{"metadata": 1}']


def test_an_environment_in_the_work_folder_is_not_changed(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_pip, "WORKSPACE", str(prefix.parent))
    own = write(prefix, OWN_NAME, json.dumps(OWN_SPEC))
    child_kernels.provide(str(prefix / "bin" / "python"))
    assert load(own) == OWN_SPEC


def test_names_without_a_kernelspec_get_one(prefix: Path) -> None:
    child_kernels.provide("python3")
    assert load(prefix.parent / "system" / OWN_NAME / "kernel.json")["argv"] == ["python3", *ARGV[1:]]
    child_kernels.offer("Mine", ARGV)
    assert load(prefix.parent / "system" / "mine" / "kernel.json")["argv"] == ARGV
    child_kernels.offer("mine", ["other"])
    assert load(prefix.parent / "system" / "mine" / "kernel.json")["argv"] == ARGV
    for name in ("", "..", "a/b"):
        child_kernels.offer(name, ARGV)
    assert len(list((prefix.parent / "system").iterdir())) == 2
