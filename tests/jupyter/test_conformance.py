"""The public conformance suite of Jupyter kernels, on the sandboxed Python kernel."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import conformance

from jupyter_agentbox.jupyter.kernelspecs import install_own

# The first completion parses the standard library's stubs, as nothing is cached in a fresh home yet.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def isolated(has_runsc: None) -> Iterator[None]:
    """A Jupyter of this module's own, with our kernelspec as the wheel installs it."""
    with tempfile.TemporaryDirectory(prefix="ab") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", name)
        for directory in ("data", "runtime", "config"):
            patch.setenv(f"JUPYTER_{directory.upper()}_DIR", str(Path(name, directory)))
        install_own()
        yield
        assert list(Path(name, "data", "agentbox", "sandboxes").glob("*")) == []


class TestSandboxedPython(conformance.KernelTests):
    """Every group of the suite that says something about Python."""

    kernel_name = "agentbox"
    language_name = "python"
    file_extension = ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = (
        {"text": "zi", "matches": {"zip"}},
        {"text": "import subpro", "matches": {"subprocess"}},
    )
    complete_code_samples = ("1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n")
    incomplete_code_samples = ("print('''hello", "def f(x):\n  x*2")
    invalid_code_samples = ("import = 7q",)
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result = (
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
    )
    code_display_data = (
        {"code": "from IPython.display import HTML, display; display(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('a'))", "mime": "text/latex"},
    )
    # Without "range": IPython answers session 0 for its own, outside of sandboxes too.
    supported_history_operations = ("tail", "search")
    code_history_pattern = "1?2*"
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"
