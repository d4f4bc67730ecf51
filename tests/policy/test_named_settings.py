"""Every setting that an error, a message or a label names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from jupyter_server.serverapp import ServerApp
from jupyter_server.services.kernels.kernelmanager import MappingKernelManager
from support import ROOT

from jupyter_agentbox import AgentboxContentsManager, AgentboxExtension, AgentboxKernelSpecManager, Policy
from jupyter_agentbox.jupyter.terminals import AgentboxTerminalManager
from jupyter_agentbox.policy.profiles import PROFILE_KEYS
from jupyter_agentbox.runtimes.docker.runtime import DockerRuncRuntime, DockerRuntime
from jupyter_agentbox.runtimes.runsc.runtime import RunscRuntime

CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        Policy, AgentboxExtension, AgentboxKernelSpecManager, AgentboxContentsManager, AgentboxTerminalManager,
        RunscRuntime, DockerRuntime, DockerRuncRuntime, ServerApp, MappingKernelManager, KernelManager,
        KernelSpecManager,
    )
}  # fmt: skip
NAMED = re.compile(rf"\b({'|'.join(CLASSES)})\.([a-z_]+)(?![a-z_(]|\.[a-z])")
#: As in ``memory of the profile`` and ``Policy.profiles['large']['memory']``.
KEYS = re.compile(r"\b([a-z_]+(?:\.[a-z_]+)?) of the profile\b(?!'s)|\['([a-z_]+)'\]")
FILES = sorted(
    path
    for folder, suffixes in (("jupyter_agentbox", (".py",)), ("labextension/src", (".ts", ".tsx")))
    for path in (ROOT / folder).rglob("*")
    if path.suffix in suffixes and "_sync" not in path.parts
)


def texts(path: Path) -> Iterator[str]:
    """Yield the string constants of a file, without docstrings."""
    if path.suffix != ".py":
        yield from re.findall(r"'((?:[^'\\\n]|\\.)*)'", path.read_text())
        return
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_settings_that_a_file_names_exist(path: Path) -> None:
    for text in texts(path):
        for owner, name in NAMED.findall(text):
            traits = CLASSES[owner].class_trait_names(config=True)
            # An f-string's part may end within the name.
            assert name in traits or (name.endswith("_") and any(trait.startswith(name) for trait in traits)), text
        if "profile" in text or "Policy" in text:
            for plain, key in KEYS.findall(text):
                assert plain in ("", "those") or plain in PROFILE_KEYS, text
                assert not key or key in PROFILE_KEYS, text


def test_nothing_is_missed() -> None:
    found = {name for path in FILES for text in texts(path) for name in NAMED.findall(text)}
    assert {("Policy", "allowed_hosts"), ("Policy", "max_memory"), ("RunscRuntime", "runsc")} <= found
    assert KEYS.findall("limits.memory of the profile") == [("limits.memory", "")]
