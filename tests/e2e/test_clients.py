"""One notebook, every client: files beside it, plots, widgets, installs through the gate, and a refusal."""

from __future__ import annotations

import os

import pytest
from support import notebooks
from support.harness import Env

LOOK = [
    "import os\nprint('\\n'.join(f'{k}={v}' for k, v in os.environ.items()))",
    "print(open('/proc/self/environ').read())\n"
    "print(open('/proc/1/environ').read() if os.access('/proc/1/environ', os.R_OK) else '')",
    "print('in', os.getcwd())\nopen('made.txt', 'w').write('by user')",
]
INPUT = "try:\n    input('name? ')\nexcept Exception as error:\n    print('input:', type(error).__name__)"
#: More than any queue on the way takes at once.
MANY = "import sys\nfor i in range(2_000):\n    sys.stdout.write('x' * 99 + '\\n'); sys.stdout.flush()"
SDIST = "%pip install -q --no-cache-dir docopt\nimport docopt\nprint('from an sdist', docopt.__name__)"
BATCH = (notebooks.nbconvert, notebooks.papermill, notebooks.nbclient)
#: In these nbclient runs the kernel just as for the others of its kind, so nothing is installed once more.
WITHOUT_INSTALL = (notebooks.jupyter_execute, notebooks.papermill)


@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("client", notebooks.CLIENTS, ids=lambda client: client.__name__)
def test_a_notebook_runs(agentbox_env: Env, client: notebooks.Client) -> None:
    """Its outputs arrive, the server's environment stays outside, and batch clients refuse input.

    It runs in its own folder, whatever the client says of that: Jupyter Server passes an absolute path, nbconvert a
    relative one, ``jupyter execute`` a ``Path``, and papermill none.
    """
    has_many = client in (notebooks.nbconvert, notebooks.kernel_gateway)
    is_installed = client not in (notebooks.nbclient, *WITHOUT_INSTALL)
    cells = [
        *LOOK,
        *(cell for cell in notebooks.CELLS if is_installed or cell != notebooks.INSTALL),
        *([SDIST] if client is notebooks.nbclient else []),
        *([INPUT] if client in BATCH else []),
        *([MANY, "print('the end')"] if has_many else []),
    ]
    folder = agentbox_env.work / "sub"
    text = client(agentbox_env, notebooks.make(folder, cells))
    notebooks.check(text, client, is_installed=is_installed)
    assert ("from an sdist docopt" in text) == (client is notebooks.nbclient)
    assert "HOME=/home/user" in text
    assert "canary" not in text
    assert "JUPYTER_TOKEN" not in text
    assert "AWS_" not in text
    assert "JPY_PARENT_PID" not in text
    assert str(agentbox_env.base) not in text
    assert ("input: StdinNotImplementedError" in text) == (client in BATCH)
    assert "in /workspace" in text
    made = folder / "made.txt"
    assert (made.read_text(), made.stat().st_uid, made.stat().st_gid) == ("by user", os.geteuid(), os.getegid())
    assert text.count("x" * 99) == (2_000 if has_many else 0)
    assert ("the end" in text) == has_many
