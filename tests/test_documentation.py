"""Pages that are made from the code are as the code is, and what pages name is there."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT
from traitlets.utils.importstring import import_item

import jupyter_agentbox
from jupyter_agentbox.cli import AgentboxCommand
from jupyter_agentbox.cli.base import Command, ProgramCommand

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "clients").glob("*/README.md"))]


def test_the_page_of_settings_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_configuration", DOCS / "make_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.make() == (DOCS / "configuration.md").read_text(), "run `python docs/make_configuration.py`"


def read_commands(text: str) -> Iterator[str]:
    """Yield what follows ``jupyter agentbox`` in code, to the end of the line or of the code."""
    blocks = re.findall(r"^```.*?^```|^    .*?$", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for code in [*blocks, *re.findall(r"`([^`]+)`", rest)]:
        yield from re.findall(r"jupyter agentbox ([^#|)\n`]+)", code.replace("\\\n", " "))


def resolve(words: list[str]) -> tuple[Command, list[str]]:
    """Return the command that words begin with, and the words behind it."""
    command: Command = AgentboxCommand()
    while words and words[0] in command.subcommands:
        found = command.subcommands[words[0]][0]
        command, words = (import_item(found) if isinstance(found, str) else found)(), words[1:]
    return command, words


def check_command(line: str) -> None:
    """Assert that a command and its options are there."""
    try:
        words = shlex.split(line)
    except ValueError:  # a quote that the next line closes
        words = line.split()
    command, rest = resolve(words)
    assert not isinstance(command, AgentboxCommand) or words[0] in ("--help", "COMMAND"), line
    if isinstance(command, ProgramCommand):  # what follows the first argument is the program's own
        end = next((index for index, word in enumerate(rest) if not word.startswith("-")), len(rest))
        rest = rest[:end]
    known = {*command.flags, *command.aliases, "help", "help-all", ""}
    given = [word.lstrip("-").partition("=")[0] for word in rest if word.startswith("-")]
    assert [name for name in given if name not in known and "." not in name] == [], line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_on_a_page_are_there(page: Path) -> None:
    for line in read_commands(page.read_text()):
        check_command(line)


def test_commands_and_options_that_messages_name_are_there() -> None:
    found = []
    texts = [file.read_text() for file in (ROOT / "jupyter_agentbox").rglob("*.py")]
    for text in [text for text in texts if "jupyter agentbox" in text]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += re.findall(r"`(?:sudo )?jupyter agentbox ([^`]+)`", node.value)
                found += re.findall(r"\Ajupyter agentbox (.+)", node.value) if " " in node.value else []
    assert len(found) > 40
    for line in found:
        check_command(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    text = page.read_text()
    linked = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    linked += [f"{name}.md" for name in re.findall(r"\{doc\}`(?:[^`<]*<)?([\w-]+)>?`", text)]
    assert [name for name in linked if not (page.parent / name).exists()] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r"^([a-z-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    assert listed == {page.stem for page in DOCS.glob("*.md")} - {"index"}


def test_every_dependency_is_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DOCS / "dependencies.md").read_text()
    names = [re.split(r"[^\w.-]", line)[0] for line in project["dependencies"]]
    listed = re.findall(r"^\| `([\w.-]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted([*names, *project["optional-dependencies"]])


def walk_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements within a node. Does not descend into expressions, of which there are ten times as many."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        found = getattr(node, field, ())
        for child in found if isinstance(found, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            yield from walk_statements(child)


def test_files_and_functions_on_the_tour_are_there() -> None:
    """The tour of the code leads to what exists."""
    text = (DOCS / "architecture.md").read_text().partition("## Public names")[0]
    package = ROOT / "jupyter_agentbox"
    names = re.findall(r"`([^`\s]+)`", text)
    folders = [name for name in names if name.endswith("/")]
    assert len(folders) > 20
    assert [name for name in folders if not any(base.joinpath(name).is_dir() for base in (package, ROOT))] == []
    files = [name for name in names if name.endswith(".py")]
    assert len(files) > 25
    assert [
        name
        for name in files
        if not (list(package.rglob(Path(name).name)) if "/" not in name else (package / name).is_file())
    ] == []
    defined = set()
    for path in package.rglob("*.py"):
        for node in walk_statements(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined |= {node.name, *(f"{node.name}.{item.name}" for item in node.body if hasattr(item, "name"))}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(node.name)
    functions = [name for name in names if re.fullmatch(r"[A-Z]\w+\.\w+|[a-z]\w+_\w+", name)]
    assert len(functions) > 15
    known = {*defined, "jupyter_client", "import_linter"}
    missing = [name for name in functions if name not in known and not (package / f"{name}.py").exists()]
    assert missing == []


def test_every_public_name_is_documented_and_can_be_imported() -> None:
    text = (DOCS / "architecture.md").read_text()
    table = text[text.index("## Public names") : text.index("## Trust")]
    assert {name for name in jupyter_agentbox.__all__ if f"`{name}`" not in table} == set()
    assert all(getattr(jupyter_agentbox, name).__name__ == name for name in jupyter_agentbox.__all__)
