"""Hidden entries of a notebook's folder stay hidden, whatever code inside has made."""

from __future__ import annotations

import shutil

from support.harness import KernelClient
from support.started import Installation, Started

CANARY = "the canary"


def test_code_inside_uncovers_nothing_by_what_it_makes(plain_lab: Started) -> None:
    folder = plain_lab.env.work / "hiding"
    for name in ("app/.env", "app/.ssh/config", "a/b/c/d/e/f/g/.env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CANARY)
    kernel = plain_lab.notebook("hiding/book.ipynb")
    look = "import subprocess; print(subprocess.run(['grep', '-rs', 'canary', '.'], stdout=-1, text=True).stdout)"
    assert CANARY not in kernel.check(look)
    kernel.check(
        "import os\nfor n in range(300): os.mkdir(f'.env.{n}')\nfor n in range(5200): open(f'f{n}', 'w').close()\n"
        "for n in range(300): os.makedirs(f'd{n}/.ssh')"
    )
    kernel.restart()
    assert CANARY not in kernel.check(look)
    kernel.check("open('more', 'w').write('x')")
    kernel.shutdown()
    assert (folder / "app" / ".env").read_text() == CANARY


def test_a_folder_with_too_many_hidden_entries_is_refused_by_its_name(plain_lab: Started) -> None:
    folder = plain_lab.env.work / "many"
    folder.mkdir()
    for number in range(10_001):
        (folder / f".env.{number}").touch()
    kernel = {"name": "agentbox"}
    body = {"path": "many/book.ipynb", "name": "book", "type": "notebook", "kernel": kernel}
    answer = plain_lab.request("POST", "api/sessions", body)
    assert answer.status_code >= 400
    for words in (str(folder), "10001", "hidden_files and read_only_files of the profile"):
        assert words in answer.text, answer.text
    shutil.rmtree(folder)  # the folder around it could not be used either


def test_a_notebook_in_the_home_where_jupyterlab_was_started_runs_and_sees_nothing_of_it(plain: Installation) -> None:
    with plain.start(cwd=plain.home) as server:
        kernel = KernelClient(server, start_session(server, "first.ipynb"))
        shown = kernel.check("import os; print(os.getcwd(), os.listdir(), os.path.exists('/workspace/secret.txt'))")
        assert shown == "/workspace [] False\n"
        [info] = server.call("GET", "api/agentbox/sandboxes")["sandboxes"]
        assert "home directory" in info["workspace_notice"]
        assert (info["workspace"], info["suggested_folder"]) == ("private", "notebooks")
        kernel.shutdown()
        (plain.home / "notebooks" / "data.csv").write_text("a,b")
        kernel = KernelClient(server, start_session(server, "notebooks/first.ipynb"))
        assert kernel.check("print(open('data.csv').read())") == "a,b\n"
        kernel.shutdown()


def start_session(server: Started, path: str) -> str:
    """Open a notebook of the server's root directory as JupyterLab does; return its kernel's id."""
    body = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "agentbox"}}
    return str(server.call("POST", "api/sessions", body)["kernel"]["id"])
