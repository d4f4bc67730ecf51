"""The other way in: the wheel, installed where nobody has the sources, with all that belongs to it."""

from __future__ import annotations

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from support import ROOT
from support.harness import Env, link


@pytest.mark.network
@pytest.mark.timeout(900)
def test_an_installed_wheel_is_all_that_is_needed(agentbox_env: Env, tmp_path: Path) -> None:
    env = agentbox_env
    env.run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "jupyter_agentbox").rglob("*.py")}
    assert package <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "labextension/"))]

    # What it depends on is that of this environment; of the checkout itself nothing is.
    prefix = tmp_path / "venv"
    env.run(sys.executable, "-m", "venv", "--without-pip", prefix)
    packages = Path(sysconfig.get_path("purelib"))
    target = prefix / packages.relative_to(sys.prefix)
    others = shutil.ignore_patterns("*jupyter_agentbox*", "*.pyc.*")  # the latter programs write and rename meanwhile
    shutil.copytree(packages, target, copy_function=link, dirs_exist_ok=True, ignore=others)
    python = prefix / "bin" / "python"
    env.run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel)
    env.variables["PATH"] = f"{prefix / 'bin'}:{env.variables['PATH']}"
    where = env.run(python, "-c", "import jupyter_agentbox; print(jupyter_agentbox.__file__)").output
    assert where.strip() == str(target / "jupyter_agentbox" / "__init__.py")

    env.run(prefix / "bin" / "jupyter-agentbox", "setup", "--no-template")
    script = (
        "import nbformat, nbclient\n"
        "book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('import os; 6 * 7, os.uname().release')])\n"
        "nbclient.NotebookClient(book, kernel_name='agentbox').execute()\n"
        "print(book.cells[0].outputs[0]['data']['text/plain'])"
    )
    assert "(42, '4.4.0')" in env.run(python, "-c", script).output
    for kind, name in (("labextension", "jupyter-agentbox"), ("server extension", "jupyter_agentbox")):
        module = {
            "labextension": "jupyterlab.labextensions",
            "server extension": "jupyter_server.extension.serverextension",
        }
        listed = env.run(python, "-m", module[kind], "list").output
        assert name in listed, kind
    recipes = env.run(prefix / "bin" / "jupyter-agentbox", "image", "list").output
    assert "base" in recipes
