"""The settings that documents and errors tell people to copy do what they say, on a real server in gVisor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from support import ROOT
from support.harness import Env, Server

EXTENSION = "--ServerApp.jpserver_extensions={'jupyter_agentbox': True}"
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def recipe(heading: str) -> str:
    """Return the Python code that the quickstart has below a heading."""
    section = QUICKSTART.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@pytest.fixture(scope="module")
def env(make_env: Callable[..., Env]) -> Env:
    env = make_env()
    (env.config_dir / "jupyter_agentbox_config.py").write_text(
        recipe("Use an API key") + "c.Policy.profiles = {'default': {'memory': '300 MiB'}}\n"
    )
    return env


@pytest.fixture(scope="module")
def server(env: Env) -> Iterator[Server]:
    with env.server("server", EXTENSION, env={"EXAMPLE_API_KEY": "k-1", "OTHER_API_KEY": "k-2"}) as server:
        yield server


def test_an_api_key_is_passed_on_by_name(server: Server) -> None:
    kernel = server.notebook("key.ipynb")
    said = kernel.check("import os; print(os.environ.get('EXAMPLE_API_KEY'), os.environ.get('OTHER_API_KEY'))")
    assert said == "k-1 None\n"
    kernel.shutdown()


def test_the_lines_that_an_error_names_allow_more_memory(server: Server) -> None:
    kernel = server.notebook("memory.ipynb")
    use = "x = [b'x' * 2**20 for _ in range(400)]; print('used')"
    ended = kernel.execute(use)
    assert ended.death
    found = re.search(r"To allow 600 MiB, add these lines to (\S+) and restart the kernel:\n(.*)", ended.notices, re.S)
    assert found is not None, ended.notices
    file = server.env.config_dir / "jupyter_agentbox_config.py"
    assert found[1] == str(file)
    with file.open("a") as settings:
        settings.write(found[2])
    # Jupyter restarts the first kernel by itself, with or without the lines.
    again = server.notebook("again.ipynb")
    assert again.check(use) == "used\n"
    again.shutdown()


def test_the_quickstart_allows_a_host_and_8_gib(make_env: Callable[..., Env]) -> None:
    env = make_env()
    lines = recipe("Reach another host") + recipe("Allow more memory")
    (env.config_dir / "jupyter_agentbox_config.py").write_text(lines)
    show = (
        "from jupyter_agentbox import Policy; profile = Policy().profile('default'); "
        "print(profile.limits.memory >> 30, 'example.org' in profile.hosts, 'pypi' in profile.hosts)"
    )
    assert env.run("python", "-c", show).output == "8 True True\n"
