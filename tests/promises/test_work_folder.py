"""Hidden entries of a notebook's folder stay hidden, whatever code inside has made."""

from __future__ import annotations

from support.started import Started

CANARY = "the canary"


def test_code_inside_uncovers_nothing_by_what_it_makes(plain_lab: Started) -> None:
    folder = plain_lab.env.work / "hiding"
    for name in ("app/.env", "app/.git/config", "a/b/c/d/e/f/g/.env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(CANARY)
    kernel = plain_lab.notebook("hiding/book.ipynb")
    look = "import subprocess; print(subprocess.run(['grep', '-rs', 'canary', '.'], stdout=-1, text=True).stdout)"
    assert CANARY not in kernel.check(look)
    kernel.check(
        "import os\nfor n in range(300): os.mkdir(f'.{n}')\nfor n in range(5200): open(f'f{n}', 'w').close()\n"
        "for n in range(300): os.makedirs(f'd{n}/.x')"
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
        (folder / f".{number}").touch()
    kernel = {"name": "agentbox"}
    body = {"path": "many/book.ipynb", "name": "book", "type": "notebook", "kernel": kernel}
    answer = plain_lab.request("POST", "api/sessions", body)
    assert answer.status_code >= 400
    for words in (str(folder), "10001", "hidden_files of the profile"):
        assert words in answer.text, answer.text
