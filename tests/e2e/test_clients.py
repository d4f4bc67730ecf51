"""One notebook, every client: files beside it, plots, widgets, installs through the gate, and a refusal."""

from __future__ import annotations

import pytest
from support import notebooks
from support.harness import Env


def clients(*chosen: notebooks.Client) -> pytest.MarkDecorator:
    """Run the test once for each."""
    return pytest.mark.parametrize("client", chosen, ids=lambda client: client.__name__)


LOOK = [
    "import os\nprint('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))",
    "print(open('/proc/self/environ').read())\n"
    "print(open('/proc/1/environ').read() if os.access('/proc/1/environ', os.R_OK) else '')",
]
INPUT = "try:\n    input('name? ')\nexcept Exception as error:\n    print('input:', type(error).__name__)"
BATCH = (notebooks.nbconvert, notebooks.papermill, notebooks.nbclient)


@pytest.mark.network
@pytest.mark.timeout(600)
@clients(*notebooks.CLIENTS)
def test_a_notebook_runs(agentbox_env: Env, client: notebooks.Client) -> None:
    """Its outputs arrive, the server's environment stays outside, and input is refused where nobody can answer."""
    cells = [*LOOK, *notebooks.CELLS, *([INPUT] if client in BATCH else [])]
    text = client(agentbox_env, notebooks.make(agentbox_env.work / "sub", cells))
    notebooks.check(text, client)
    assert "HOME=/home/user" in text
    assert "canary" not in text
    assert "JUPYTER_TOKEN" not in text
    assert "AWS_" not in text
    assert "JPY_PARENT_PID" not in text
    assert str(agentbox_env.base) not in text
    assert ("input: StdinNotImplementedError" in text) == (client in BATCH)


@pytest.mark.network
def test_a_source_distribution_is_built_inside(agentbox_env: Env) -> None:
    cell = "%pip install -q --no-cache-dir docopt\nimport docopt\nprint('from an sdist', docopt.__name__)"
    assert "from an sdist docopt" in notebooks.nbclient(agentbox_env, notebooks.make(agentbox_env.work, [cell]))


@clients(notebooks.nbconvert, notebooks.kernel_gateway)
def test_ten_thousand_small_outputs_all_arrive(agentbox_env: Env, client: notebooks.Client) -> None:
    many = "import sys\nfor i in range(10_000):\n    sys.stdout.write('x' * 99 + '\\n'); sys.stdout.flush()"
    text = client(agentbox_env, notebooks.make(agentbox_env.work, [many, "print('the end')"]))
    assert text.count("x" * 99) == 10_000
    assert "the end" in text
