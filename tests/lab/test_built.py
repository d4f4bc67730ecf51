"""The extension's sources: checked, tested, and what the built one was built from."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from babel.messages.pofile import read_po
from support.lab import BUILT, ROOT, SOURCES, run_npm


def hash_sources() -> str:
    """Hash the sources as scripts/build.mjs does."""
    found = hashlib.sha256()

    def add(path: Path, name: str) -> None:
        if path.is_dir():
            for child in sorted(path.iterdir(), key=lambda item: item.name):
                add(child, f"{name}/{child.name}")
        elif path.name != "schema.ts":
            found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")

    for part in ("package.json", "schema", "src", "style", "../clients/typescript/src"):
        add(SOURCES / part, part)
    return found.hexdigest()


def test_what_is_built_is_of_these_sources() -> None:
    built = json.loads((BUILT / "package.json").read_text())
    assert built["jupyterlab"]["_sources"] == hash_sources(), "run `npm run build` in labextension"
    assert (BUILT / built["jupyterlab"]["_build"]["load"]).is_file()
    assert (BUILT / "schemas" / "jupyter-agentbox" / "plugin.json").read_bytes() == (
        SOURCES / "schema" / "plugin.json"
    ).read_bytes()


def test_the_operations_that_it_calls_are_those_of_the_api() -> None:
    api = (ROOT / "clients" / "typescript" / "src" / "schema.ts").read_text()
    routes = {name: rest for name, *rest in re.findall(r'^    (\w+): \["([A-Z]+)", "([^"]+)"\],$', api, re.M)}
    used = set()
    for path in (SOURCES / "src").glob("*.ts*"):
        used |= set(re.findall(r"\.call\('(\w+)'|ROUTES\.(\w+)", path.read_text()))
    names = {name for pair in used for name in pair if name}
    assert len(names) > 12
    text = "".join(path.read_text() for path in (BUILT / "static").glob("*.js"))
    assert {name for name in names if f'{name}:["{routes[name][0]}","{routes[name][1]}"]' not in text} == set()


def test_it_is_small_and_holds_no_copy_of_what_jupyterlab_has() -> None:
    files = [path for path in BUILT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 150_000
    text = "".join(path.read_text() for path in files)
    assert "__SECRET_INTERNALS_DO_NOT_USE_OR_YOU_WILL_BE_FIRED" not in text  # React's own
    assert str(ROOT) not in text


def test_it_is_installed_with_the_package() -> None:
    installed = Path(sys.prefix) / "share" / "jupyter" / "labextensions" / "jupyter-agentbox" / "package.json"
    assert json.loads(installed.read_text())["name"] == "jupyter-agentbox"
    assert (
        '"labextension/dist" = "share/jupyter/labextensions/jupyter-agentbox"' in (ROOT / "pyproject.toml").read_text()
    )


def test_lock_files_name_no_registry() -> None:
    for path in (SOURCES / "package-lock.json", SOURCES / "builder" / "package-lock.json"):
        assert '"integrity": "sha512-' in path.read_text()
        assert '"resolved"' not in path.read_text()


def test_the_catalogue_of_texts_is_of_these_sources() -> None:
    spec = importlib.util.spec_from_file_location("make_catalogue", ROOT / "tools" / "make_catalogue.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    found = tool.make_catalogue()
    assert {"Open", ("%1 day", "%1 days")} <= {message.id for message in found}
    with tool.TARGET.open("rb") as file:
        kept = read_po(file)
    texts = [{(message.id, message.context) for message in catalogue if message.id} for catalogue in (found, kept)]
    assert texts[0] == texts[1], "run tools/make_catalogue.py"


def test_every_text_that_people_see_is_translatable() -> None:
    """No element has words of its own beside code."""
    for path in sorted((SOURCES / "src").glob("*.tsx")):
        assert re.findall(r">\s*([A-Z][a-z]+[^<{};]*)</", path.read_text()) == [], path.name


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("npm_packages")
def test_types_lint_and_units() -> None:
    # What the `lint` and `test` scripts of package.json do, without npm, and with what an earlier run has found out.
    tsc = ("node", "node_modules/typescript/bin/tsc", "--incremental")
    run_npm(*tsc, "-p", "tsconfig.json", "--noEmit", "--tsBuildInfoFile", "build/sources.tsbuildinfo")
    run_npm("node", "node_modules/eslint/bin/eslint.js", "src", "test")
    run_npm(*tsc, "-p", "tsconfig.test.json", "--tsBuildInfoFile", "build/tests.tsbuildinfo")
    run_npm("node", "--test", "build/labextension/test/words.test.js")
