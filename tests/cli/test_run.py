"""``jupyter agentbox run``: a script in a sandbox of its own, in this process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import nbformat
import pytest
from support.harness import CANARY, Env
from support.public_site import RESOLVE, SITE
from support.serving import run, run_all, run_command


@pytest.fixture(scope="module")
def env(has_runsc: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    """Each run must leave nothing behind, which is looked at when all are done."""
    env = Env(tmp_path_factory.mktemp("run"), {"Policy": {"profiles": {"small": {"memory": "200 MiB"}}}})
    try:
        yield env
        env.assert_clean()
    finally:
        env.close()


def test_only_the_script_is_put_in_and_all_it_says_comes_back(env: Env) -> None:
    (env.work / "beside.txt").write_text("secret")
    (env.work / "script.py").write_text(
        "import os, sys\n"
        "print(sys.argv[1:], sorted(os.listdir('.')), os.getcwd())\n"
        f"print({CANARY!r} in str(os.environ), file=sys.stderr)\n"
        "open('made.txt', 'w').write('x')\n"
        "sys.exit(5)\n"
    )
    ran = run(env, "run", "script.py", "--profile=not-mine", "-c", "two words")
    assert ran.status == 5, ran
    assert ran.out == "['--profile=not-mine', '-c', 'two words'] ['script.py'] /workspace\n"
    assert ran.err == "False\n"
    assert not (env.work / "made.txt").exists()


def test_a_mounted_folder_is_shown_and_can_be_changed(env: Env) -> None:
    project = env.work / "project"
    (project / "src").mkdir(parents=True)
    (project / ".env").write_text("KEY=1")
    (project / "data.txt").write_text("data")
    (project / "src" / "main.sh").write_text("ls; cat .env data.txt > copy.txt; echo $1")
    ran = run(env, "run", "--mount", "project", "project/src/main.sh", "arg")
    assert (ran.status, ran.out) == (0, "data.txt\nsrc\narg\n"), ran.err
    assert (project / "copy.txt").read_text() == "# This file is hidden in sandboxes (Policy.hidden_files).\ndata"
    outside = run(env, "run", "--mount=project", "script.py")
    assert (outside.status, "is not in the mounted folder" in outside.err) == (1, True)


def test_code_input_and_hosts(env: Env) -> None:
    code = (
        "import sys, urllib.request\nprint(sys.stdin.read().upper(), sys.argv[1:])\n"
        "try: urllib.request.urlopen('http://listed.example/', timeout=5)\nexcept Exception as error: print('refused')"
    )
    ran = run(env, "run", "--stdin", "--offline", "-c", code, "x", stdin=b"in")
    assert (ran.status, ran.out) == (0, "IN ['x']\nrefused\n"), ran.err
    assert "jupyter agentbox run: Blocked by sandbox: listed.example:80." in ran.err
    assert "Allow it with --allow, or add it to Policy.allowed_hosts." in ran.err
    assert run(env, "run", "-", "a", stdin=b"import sys; print(sys.argv)").out == "['-', 'a']\n"


def test_allow_takes_any_host_that_policy_lets_a_person_allow(env: Env) -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    host = f"{SITE}:{listener.getsockname()[1]}"
    code = f"import socket; socket.create_connection(('{SITE}', {listener.getsockname()[1]}), 30); print('connected')"
    config = env.config_dir / "jupyter_agentbox_config.py"
    config.write_text(RESOLVE)
    try:
        ran = run(env, "run", f"--allow={host}", "-c", code)
        assert (ran.status, ran.out) == (0, "connected\n"), ran
        config.write_text(RESOLVE + "c.Policy.user_may_allow = ['other.test']\n")
        refused = run(env, "run", f"--allow={host}", "-c", code)
        assert (refused.status, refused.out) == (1, "")
        assert f"host {host!r} is not allowed by profile 'default'" in refused.err
        config.write_text(RESOLVE + f"c.Policy.user_may_allow = []\nc.Policy.allowed_hosts = [{host!r}]\n")
        offline = run(env, "run", "--offline", "-c", f"try:\n    {code}\nexcept OSError: pass")
        assert f"Blocked by sandbox: {SITE}" in offline.err
        assert "Allow it with --allow" in offline.err
    finally:
        config.unlink()
        listener.close()


def test_time_memory_and_signals_end_it(env: Env) -> None:
    late = run(env, "run", "--timeout=1", "-c", "import time; time.sleep(60)")
    assert (late.status, late.out) == (124, ""), late.err
    assert late.err == "jupyter agentbox run: killed after 1 s\n"
    big = run(env, "run", "--profile=small", "-c", "x = [bytearray(10**7) for _ in range(100)]")
    assert big.status != 0
    # The program is killed; if it has allocated too much by then, so is the sandbox.
    lines = big.err.splitlines()
    assert lines, big
    assert all("out of memory" in line for line in lines), big.err
    assert len(lines) <= 2, big.err
    code = "import time; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "jupyter_agentbox.cli", "run", "-c", code]
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(command, env=env.variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            process.send_signal(number)
            assert process.wait(60) == 128 + number
            assert process.stderr is not None
            assert process.stderr.read() == b""


@pytest.mark.network
def test_packages_are_installed_first(env: Env) -> None:
    ran = run(env, "run", "--package=iniconfig", "--allow=pypi", "-c", "import iniconfig; print(iniconfig.__name__)")
    assert (ran.status, ran.out) == (0, "iniconfig\n"), ran.err


def test_what_is_wrong_is_one_line_and_a_status(env: Env) -> None:
    (env.work / "book.ipynb").write_text("{}")
    wrong = (
        (("run", "missing.py"), "cannot be read"),
        (("run", "book.ipynb"), "book.ipynb is not a notebook"),
        (("run", "--image=nothing", "-c", "1"), "image 'nothing' does not exist"),
        (("run", "--language=cobol", "-c", "1"), "use one of python, bash, r, typescript, javascript"),
        (("run", "--profile=nope", "-c", "1"), "profile 'nope' does not exist"),
        (("run", "--allow=127.0.0.1", "-c", "1"), "127.0.0.1"),
        (("run", "--package=--index-url", "-c", "1"), "is not a valid package name"),
        (("run", f"--mount={env.home}", "-c", "1"), str(env.home)),
    )
    found = run_all(env, *(arguments for arguments, _ in wrong))
    for (arguments, words), ran in zip(wrong, found, strict=True):
        assert (ran.status, ran.out) == (1, ""), (arguments, ran)
        assert words in ran.err
        assert len(ran.err.splitlines()) == 1, ran.err
    usage = ((("run",), "name a script"), (("run", "--offline", "--package=x", "-c", "1"), "--offline"))
    for (_, words), ran in zip(usage, run_all(env, *(arguments for arguments, _ in usage)), strict=True):
        assert (ran.status, ran.out) == (2, ""), ran
        assert words in ran.err


def test_the_locale_and_the_time_zone_of_the_host_work_inside(env: Env) -> None:
    code = (
        "import locale, subprocess, sys, time, zoneinfo\nlocale.setlocale(locale.LC_ALL, '')\n"
        "print('\\xe9', sys.stdout.encoding, locale.getpreferredencoding(), time.tzname[0])\n"
        "print(zoneinfo.ZoneInfo('Europe/Berlin'))\nsubprocess.run(['bash', '-c', 'true'])\n"
        "subprocess.run(['perl', '-e1'])"
    )
    host = {"LANG": "xx_XX.UTF-8", "LC_ALL": "xx_XX.UTF-8", "TZ": "Europe/Berlin", "PYTHONIOENCODING": "utf-8"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in host.items():
            patch.setitem(env.variables, name, value)
        ran = run(env, "run", "--offline", "-c", code)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.lower() == "\xe9 utf-8 utf-8 cet\neurope/berlin\n"


def test_a_flood_of_output_and_progress_bars_come_as_they_are(env: Env) -> None:
    code = (
        "import sys\nfor i in range(60000): print('step', i, 'x' * 20)\n"
        "for i in range(3): print(f'\\r{i}', end='', file=sys.stderr)\nprint('RESULT 42')"
    )
    ran = run(env, "run", "--offline", "-c", code)
    assert ran.status == 0, ran.err
    assert ran.out.count("\n") == 60_001
    assert ran.out.endswith("\nRESULT 42\n")
    assert ran.err.replace("\n", "\r") == "\r0\r1\r2"  # text mode turns carriage returns into newlines


def test_a_script_runs_in_the_language_of_its_suffix_or_option(env: Env) -> None:
    (env.work / "a.js").write_text("console.log('node', process.argv[2])")
    (env.work / "a.R").write_text("cat('never')")
    assert run(env, "run", "--offline", "a.js", "x").out == "node x\n"
    assert run(env, "run", "--offline", "--language=bash", "-c", 'echo "$0"', "x").out == "x\n"
    none = run(env, "run", "--offline", "a.R")
    assert (none.status, none.out) == (127, "")
    assert 'image="r"; `jupyter agentbox image build r` builds it' in none.err


def test_a_notebook_runs_to_its_first_error_and_prints_its_output(env: Env) -> None:
    cells = ["x = 6\nprint('one')", "x * 7", "import sys; print('err', file=sys.stderr)", "1 / 0", "print('never')"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.cells.insert(1, nbformat.v4.new_markdown_cell("print('text')"))
    nbformat.write(book, env.work / "cells.ipynb")
    ran = run_command(("run", "--offline", "cells.ipynb"), env.work, env.variables, stdin=b"")
    assert (ran.status, ran.out) == (1, "one\n42\n")
    assert ran.err.startswith("err\n")
    assert "ZeroDivisionError" in ran.err
    book.cells[-2:] = [nbformat.v4.new_code_cell("import time; time.sleep(60)")]
    nbformat.write(book, env.work / "cells.ipynb")
    late = run_command(("run", "--offline", "--timeout=5", "cells.ipynb"), env.work, env.variables, stdin=b"")
    assert late.status == 124
