"""What code in a sandbox puts into its folder leads a server's file browser nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import CANARY
from support.started import Installation, Started

TEXT = {"type": "file", "format": "text", "content": "new"}
CELL = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": [], "source": "1"}
BOOK = {"cells": [CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def save(server: Started, path: str, content: Any) -> Any:
    """Save a notebook or a text; return the answer."""
    model = {**TEXT, "content": content} if isinstance(content, str) else {"type": "notebook", "content": content}
    return server.request("PUT", f"api/contents/{path}", model)


def test_links_that_a_cell_makes_are_followed_only_within_their_folder(plain_lab: Started) -> None:
    work, secret = plain_lab.env.work, plain_lab.env.home / "secret.txt"
    other = work / "elsewhere" / "secret.ipynb"
    other.parent.mkdir()
    other.write_text(CANARY)
    kernel = plain_lab.notebook("links/book.ipynb")
    (work / "links" / "plan.txt").write_text("a plan")
    kernel.check(
        "import os\n"
        f"os.symlink({str(secret)!r}, '.~plan.txt')\n"
        f"os.symlink({str(secret)!r}, 'notes.txt')\n"
        "os.symlink('../elsewhere/secret.ipynb', 'report.ipynb')\n"
        "os.symlink('../elsewhere/secret.ipynb', '.~book.ipynb')\n"
        "os.makedirs('data'); os.symlink('data/kept.txt', 'latest.txt')\n"
        "os.symlink('../elsewhere', '.ipynb_checkpoints')\n"
    )
    # The saves that a person makes: of the names, and of those that Jupyter derives.
    assert save(plain_lab, "links/plan.txt", "new").status_code == 200
    save(plain_lab, "links/book.ipynb", BOOK)
    assert plain_lab.request("POST", "api/contents/links/plan.txt/checkpoints", {}).status_code == 403
    for path, content in (("notes.txt", "new"), ("report.ipynb", BOOK)):
        for answer in (
            save(plain_lab, f"links/{path}", content),
            plain_lab.request("GET", f"api/contents/links/{path}"),
            plain_lab.request("GET", f"files/links/{path}"),
            plain_lab.request("POST", "api/contents/links", {"copy_from": f"links/{path}"}),
        ):
            assert answer.status_code == 403
            assert CANARY not in answer.text
        assert "AgentboxContentsManager.linked_folders" in plain_lab.request("GET", f"api/contents/links/{path}").text
    assert save(plain_lab, "links/latest.txt", "kept").ok
    assert kernel.check("print(open('data/kept.txt').read(), open('plan.txt').read())") == "kept new\n"
    assert (secret.read_text(), other.read_text()) == (CANARY, CANARY)
    assert sorted(path.name for path in other.parent.iterdir()) == ["secret.ipynb"]
    kernel.shutdown()


def test_a_cell_makes_no_hard_link_to_what_it_may_not_write(plain_lab: Started) -> None:
    folder = plain_lab.env.work / "hard"
    folder.mkdir()
    (folder / ".env").write_text(CANARY)
    (folder / "own.txt").write_text("own")
    kernel = plain_lab.notebook("hard/book.ipynb")
    said = kernel.check(
        "import os, sys\n"
        f"for path in ('/etc/passwd', sys.executable, os.__file__, '.env', {str(plain_lab.env.home / 'secret.txt')!r},"
        "             '/proc/self/exe', '/proc/self/fd/0', 'own.txt'):\n"
        "    try:\n"
        "        os.link(path, 'made')\n"
        "    except OSError:\n"
        "        print('refused', end=' ')\n"
        "    else:\n"
        "        print('made', end=' '); os.unlink('made')\n"
    )
    assert said == "refused " * 7 + "made "
    kernel.shutdown()


@pytest.fixture(scope="module")
def user(make_user: Callable[[], Installation]) -> Installation:
    """A user whom these tests configure, each of them anew."""
    return make_user()


def test_the_rule_holds_beside_jupytext(user: Installation) -> None:
    # As `pip install jupytext` has it.
    extensions = {"ServerApp": {"jpserver_extensions": {"jupyterlab_jupytext": True}}}
    path = user.write_config(extensions, "jupyter_server_config.json")
    with user.start("server") as server:
        path.unlink()
        check_pairs(server)


def check_pairs(server: Started) -> None:
    """Work with text notebooks and pairs; then have a cell replace one of a pair by a link."""
    secret = server.env.home / "secret.txt"
    assert "Deriving an AsyncTextFileContentsManager from AgentboxContentsManager" in server.text
    kernel = server.notebook("pairs/a.ipynb")
    paired = {**BOOK, "metadata": {"jupytext": {"formats": "ipynb,py:percent"}}}
    assert save(server, "pairs/a.ipynb", paired).ok
    (server.env.work / "pairs" / "b.md").write_text("# Title\n\n```python\n1 + 1\n```\n")
    text = server.request("GET", "api/contents/pairs/b.md?type=notebook").json()
    assert [cell["cell_type"] for cell in text["content"]["cells"]] == ["markdown", "code"]
    assert save(server, "pairs/b.md", text["content"]).ok
    assert server.request("PATCH", "api/contents/pairs/a.ipynb", {"path": "pairs/c.ipynb"}).ok
    assert "# %%" in server.request("GET", "files/pairs/c.py").text
    kernel.check(f"import os; os.unlink('c.py'); os.symlink({str(secret)!r}, 'c.py')")
    answer = save(server, "pairs/c.ipynb", paired)
    assert not answer.ok
    assert "AgentboxContentsManager.linked_folders" in answer.text
    assert secret.read_text() == CANARY
    kernel.shutdown()


def test_hooks_may_start_programs(user: Installation, tmp_path: Path) -> None:
    user.config_dir.mkdir(exist_ok=True)
    config = user.config_dir / "jupyter_server_config.py"
    config.write_text(
        "import shutil, subprocess\n"
        "def convert(model, os_path, contents_manager, **more):\n"
        "    if 'broken' in os_path:\n"
        "        raise RuntimeError('this one is broken')\n"
        "    if model['type'] == 'notebook':\n"
        "        subprocess.check_call(['jupyter', 'nbconvert', '--to', 'markdown', os_path])\n"
        f"        shutil.copy(os_path, {str(tmp_path)!r})\n"
        "c.FileContentsManager.post_save_hook = convert\n"
    )
    with user.start("server") as server:
        config.unlink()
        assert save(server, "a.ipynb", BOOK).ok
        assert (user.work / "a.md").exists()
        assert (tmp_path / "a.ipynb").exists()
        answer = save(server, "broken.ipynb", BOOK)
        assert answer.status_code == 500
        assert "broken.ipynb was saved, but a post-save hook failed" in answer.json()["message"]
        assert len(json.loads((user.work / "broken.ipynb").read_text())["cells"]) == 1
