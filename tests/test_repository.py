"""What holds for the source tree as a whole, beyond what linters see."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "jupyter_agentbox"
TEXTS = {".py", ".md", ".toml", ".json", ".ts", ".tsx", ".txt", ".sh", ".html"}
MODULES = sorted(PACKAGE.rglob("*.py"))


#: The module of an import, and the names that are imported from it if it is a ``from`` import.
IMPORT = re.compile(r"^[ ]*(?:from[ ]+([\w.]+)[ ]+import[ ]+(\([^)]*\)|.*)|import[ ]+(.*))$", re.MULTILINE)


def imported(path: Path) -> set[str]:
    """Return the top-level names of a file's absolute imports."""
    modules = [module or more for module, _, more in IMPORT.findall(path.read_text())]
    names = {re.split(r"[.\s]", name.strip())[0] for module in modules for name in module.split(",")}
    return names - {""}  # of relative imports


@pytest.mark.parametrize("path", sorted((PACKAGE / "guest").rglob("*.py")), ids=lambda path: path.name)
def test_the_guest_needs_the_standard_library_only(path: Path) -> None:
    """It runs with ``-S``, without the package, in images that have nothing else."""
    own = {"guest"}  # itself, by the name that it has inside
    if path.parent.name == "ipykernel":  # runs in the kernel's process, which has these
        own |= {"IPython", "ipykernel", "jupyter_client", "tornado", "traitlets", "zmq", "pexpect", "_agentbox"}
    assert imported(path) - own <= sys.stdlib_module_names


def test_every_dependency_is_used_and_justified() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in project["dependencies"]}
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert {name for name in required if f"| `{name}` |" not in page} == set()
    extras = project["optional-dependencies"]
    optional = {*extras["mcp"], *extras["encryption"]}
    required |= {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in optional}
    assert {name for name in required if f"`{name}`" not in page} == set()
    used = set().union(*(imported(path) for path in MODULES)) - sys.stdlib_module_names - {"jupyter_agentbox", "guest"}
    # The kernel's process has its own; ours is that of ipykernel.
    used -= {"IPython", "zmq", "pexpect", "_agentbox"}
    used -= {"PIL"}  # of a program that runs inside
    used -= {"pytest"}  # of the suite for runtimes, which whoever runs it has
    assert used <= required


def test_the_version_is_said_once_in_each_place() -> None:
    import jupyter_agentbox

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert jupyter_agentbox.__version__ == project["version"]


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"


def test_no_mirror_is_named() -> None:
    """The hosts of package registries are read from their clients, which have them built in."""
    from pip._internal.models.index import PyPI

    names = {PyPI.netloc, PyPI.file_storage_domain}
    folders = ("jupyter_agentbox", "docs", "tests", "benchmarks", "images", "kernelspecs", "labextension/src", "tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXTS]
    assert len(files) > 200
    for path in [*files, *ROOT.glob("*.*"), ROOT / "Makefile", ROOT / ".ci/run"]:
        if path.is_file():
            text = path.read_text(errors="replace")
            assert not [name for name in names if name in text], path


def test_every_promise_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    table = text[text.index("| promise | test") :].partition("\n\n")[0].splitlines()[2:]
    assert len(table) > 20
    for row in table:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.split("|")[2])
        assert named, row
        for path, name in named:
            assert (ROOT / path).is_file(), row
            assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), row


def test_no_test_imports_another_test() -> None:
    """What tests share is in ``tests/support``."""
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        names = [name for each in IMPORT.findall(path.read_text()) for name in re.findall(r"\w+", " ".join(each))]
        found += [f"{path}: {name}" for name in names if name.startswith(("test_", "conftest"))]
    assert found == []


def test_the_tests_have_the_folders_of_the_package() -> None:
    more = {"support", "contract", "e2e", "promises", "lab"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("**/*.py"))}
    assert folders - more <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}


def test_the_package_has_thirteen_rooms() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    files = {path.name for path in PACKAGE.glob("*.py")}
    assert len(rooms) == 13
    assert files == {"__init__.py", "errors.py", "spec.py", "linux.py", "names.py"}
