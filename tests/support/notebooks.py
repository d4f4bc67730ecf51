"""Provide a notebook with common features, and the clients that run it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pexpect

from support.harness import BIN, KERNEL, Env, KernelClient

INSTALL = "%pip install -q --no-cache-dir peppercorn\nimport peppercorn\nprint('from a wheel', peppercorn.__name__)"
#: Each cell prints or displays something that :func:`check` looks for.
CELLS = [
    "import pandas as pd\nprint('rows', len(pd.read_csv('data.csv')))",
    "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nplt.show()",
    "import ipywidgets\nipywidgets.IntSlider(value=3)",
    INSTALL,
    "import urllib.request\n"
    "try:\n    urllib.request.urlopen('https://not-listed.example/', timeout=20)\n"
    "except OSError as error:\n    print('refused:', error)",
]

Client = Callable[[Env, Path], str]
#: nbclient drops output that it has not read four seconds after a cell's end, which is too short on a busy machine.
PATIENCE = ("--ExecutePreprocessor.iopub_timeout=60",)


def make(folder: Path, cells: list[str] | None = None, name: str = "book.ipynb") -> Path:
    """Write a notebook and its CSV file into `folder`, and return the notebook's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in (CELLS if cells is None else cells)],
        metadata={"kernelspec": {"name": KERNEL, "display_name": "Python (sandboxed)", "language": "python"}},
    )
    nbformat.write(book, folder / name)
    return folder / name


def flat(outputs: list[dict]) -> str:  # type: ignore[type-arg]
    """Return outputs as text: printed, displayed and raised, with the MIME types."""
    parts = []
    for output in outputs:
        parts.append(output.get("text", ""))
        parts += [f"<{mime}> {value}" for mime, value in output.get("data", {}).items()]
        parts += [output.get("ename", ""), output.get("evalue", "")]
    return "\n".join(parts)


def read(path: Path) -> str:
    """Return all outputs of an executed notebook."""
    return flat([output for cell in nbformat.read(path, 4).cells for output in cell.outputs])


def check(text: str, client: Client, *, is_installed: bool = True) -> None:
    """Check that a client's output contains the result of each of :data:`CELLS`, :data:`INSTALL` being optional."""
    assert "rows 3" in text
    assert ("from a wheel peppercorn" in text) == is_installed
    assert "<image/png>" in text
    assert ("IntSlider" if client is console else "<application/vnd.jupyter.widget-view+json>") in text
    refusal = text[text.index("refused:") :]
    assert "not-listed.example" in refusal
    assert "Policy.allowed_hosts" in refusal


def sources(path: Path) -> list[str]:
    """Return the notebook's cells."""
    return [cell.source for cell in nbformat.read(path, 4).cells]


def nbconvert(env: Env, book: Path) -> str:
    env.run("jupyter-nbconvert", "--to", "notebook", "--execute", "--output", "out.ipynb", *PATIENCE,
            book.relative_to(env.work), timeout=280)  # fmt: skip
    return read(book.with_name("out.ipynb"))


def jupyter_execute(env: Env, book: Path) -> str:
    env.run("jupyter-execute", "--inplace", book, timeout=280)
    return read(book)


def papermill(env: Env, book: Path) -> str:
    env.run("papermill", "--no-progress-bar", book.name, "out.ipynb", cwd=book.parent, timeout=280)
    return read(book.with_name("out.ipynb"))


def nbclient(env: Env, book: Path) -> str:
    script = (
        "import sys, nbformat, nbclient; path, folder = sys.argv[1:]\n"
        "book = nbformat.read(path, 4)\n"
        "nbclient.NotebookClient(book, resources={'metadata': {'path': folder}}, iopub_timeout=60).execute()\n"
        "nbformat.write(book, path)"
    )
    env.run(sys.executable, "-c", script, book, book.parent, timeout=280)
    return read(book)


def over_websocket(kernel: KernelClient, book: Path) -> str:
    """Run a notebook's cells over a websocket, as a browser does."""
    text = [flat([o["content"] for o in kernel.execute(source, timeout=150).outputs]) for source in sources(book)]
    kernel.shutdown()
    return "\n".join(text)


def lab(env: Env, book: Path) -> str:
    with env.server("lab") as server:
        return over_websocket(server.notebook(str(book.relative_to(env.work))), book)


def kernel_gateway(env: Env, book: Path) -> str:
    with env.server("kernelgateway", cwd=book.parent) as server:
        return over_websocket(server.kernel(path=book.name), book)


#: By default the console opens pictures with any installed program. These options store them instead.
KEEP_PICTURES = [
    f"--ZMQTerminalInteractiveShell.{name}"
    for name in (
        "image_handler=tempfile",
        *(f"tempfile_image_handler={word}" for word in ("cp", "{file}", "shown.png")),
    )
]


def console(env: Env, book: Path) -> str:
    """Type the cells into a real terminal."""
    child = pexpect.spawn(
        str(BIN / "jupyter-console"),
        ["--simple-prompt", "--kernel", KERNEL, *KEEP_PICTURES],
        cwd=str(book.parent),
        env={**env.variables, "TERM": "dumb"},  # type: ignore[arg-type]
        encoding="utf-8",
        timeout=150,
        echo=False,
    )
    text = []
    try:
        child.expect(r"In \[\d+\]: ")
        # A cell's output may arrive after its prompt, so there is one additional cell.
        for number, source in enumerate([*sources(book), "None"]):
            (book.parent / f"cell{number}.py").write_text(source)
            child.sendline(f"_ = get_ipython().run_cell(open('cell{number}.py').read())")
            child.expect(r"In \[\d+\]: ")
            text.append(child.before or "")
        child.sendline("exit")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)
    shown = book.parent / "shown.png"
    if shown.exists() and shown.read_bytes().startswith(b"\x89PNG"):
        text.insert(0, "<image/png>")
    return "\n".join(text)


CLIENTS: list[Client] = [nbconvert, jupyter_execute, papermill, nbclient, lab, kernel_gateway, console]
