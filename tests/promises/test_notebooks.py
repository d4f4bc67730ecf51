"""A notebook shows in a sandbox what it shows in a bare kernel, on servers started as documented."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from support.harness import wait_until
from support.started import Installation

#: The first cells of a notebook about data: imports, a table, a figure, text and a command, rich output, and axes.
NOTEBOOK = [
    "import pandas as pd\nimport numpy as np\nimport matplotlib.pyplot as plt",
    "df = pd.DataFrame({'x': np.arange(5), 'y': np.arange(5) ** 2.0, 'name': list('abcde')})\ndf.head()",
    "plt.plot(df.x, df.y)\nplt.title('squares')\nplt.show()",
    'print(df.describe())\n!echo "$PAGER $GIT_PAGER $TERM $FORCE_COLOR $CLICOLOR"',
    "from IPython.display import HTML, Markdown, display\ndisplay(Markdown('**bold**'))\nHTML('<b>bold</b>')",
    "df.plot(x='x', y='y')",
]
PROGRAM = """
import sys, nbformat, nbclient
path, kernel = sys.argv[1:]
book = nbformat.read(path, 4)
nbclient.NotebookClient(book, kernel_name=kernel, timeout=150, iopub_timeout=60).execute()
nbformat.write(book, path)
"""


def run_notebook(installation: Installation, kernel: str) -> list[list[dict[str, Any]]]:
    """Run the notebook by nbclient in a program of its own, and return what each cell shows."""
    folder = installation.work / kernel
    folder.mkdir(exist_ok=True)
    book = folder / "book.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in NOTEBOOK]), book)
    installation.run("python", "-c", PROGRAM, book, kernel, cwd=folder, timeout=280)
    return [read_outputs(cell.outputs) for cell in nbformat.read(book, 4).cells]


def read_outputs(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return outputs without addresses in memory, and what was printed in one piece, however it came."""
    found: list[dict[str, Any]] = []
    for output in json.loads(re.sub(r"0x[0-9a-f]+", "0x", json.dumps(outputs))):
        if found and output["output_type"] == "stream" and found[-1].get("name") == output["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


@pytest.mark.timeout(900)
def test_the_first_cells_of_a_notebook_show_what_a_bare_kernel_shows(
    make_user: Callable[[], Installation], plain: Installation
) -> None:
    user = make_user()
    expected = run_notebook(user, "python3")
    assert [len(outputs) for outputs in expected] == [0, 1, 1, 1, 2, 2]
    assert run_notebook(user, "agentbox") == expected, "cold"
    assert run_notebook(plain, "agentbox") == expected, "from the template"
    path = plain.write_config({"Policy": {"pool_size": 1}})  # as `make run` has it
    pool = plain.state_dir / "sandboxes"
    try:
        with plain.start("lab") as server:
            server.notebook("first.ipynb").shutdown()
            wait_until(lambda: list(pool.glob("*/pooled")), 150, "a kernel waits in the pool")
            assert run_notebook(plain, "agentbox") == expected, "from the pool"
            for number in range(2):  # from the template, or from the pool
                kernel = server.notebook(f"book{number}.ipynb")
                result = kernel.execute("import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()")
                assert ["image/png" in data for data in result.data] == [True], f"kernel {number}: {result}"
                kernel.shutdown()
    finally:
        path.unlink()
