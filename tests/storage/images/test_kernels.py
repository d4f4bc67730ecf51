"""The public conformance suite of Jupyter kernels, on the kernels of an image, for what each of them supports."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import conformance
from support.images import Built

from jupyter_agentbox.jupyter.kernelspecs import install_for_image

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module", autouse=True)
def isolated(built: Built) -> Iterator[None]:
    """A Jupyter of this module's own, with kernelspecs for the image's kernels."""
    with tempfile.TemporaryDirectory(prefix="ab") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", name)
        for directory in ("data", "runtime", "config"):
            patch.setenv(f"JUPYTER_{directory.upper()}_DIR", str(Path(name, directory)))
        Path(name, "config").mkdir()
        Path(name, "config", "jupyter_agentbox_config.json").write_text(json.dumps({"Policy": {"templates": False}}))
        built.lend(Path(name, "data", "agentbox"))
        for entry in built.image.kernels:
            install_for_image(built.image.name, entry)
        yield
        assert list(Path(name, "data", "agentbox", "sandboxes").glob("*")) == []


class TestR(conformance.KernelTests):
    """IRkernel sends what a cell comes to as a display, and has no history."""

    kernel_name = "agentbox-r"
    language_name = "R"
    file_extension = ".r"
    code_hello_world = "print('hello, world')"
    code_stderr = "message('test')"
    completion_samples = ({"text": "zi", "matches": {"zip"}},)
    complete_code_samples = ("1", "print('hello, world')", "f <- function(x) {\n  x * 2\n}")
    incomplete_code_samples = ("print('hello", "f <- function(x) {\n  x * 2")
    invalid_code_samples = ("import = 7q",)
    code_generate_error = "raise"
    code_display_data = (
        {"code": "'a'", "mime": "text/plain"},
        {"code": "IRdisplay::display_html('<b>test</b>')", "mime": "text/html"},
        {"code": "plot(1:3)", "mime": "image/png"},
    )
    code_inspect_sample = "print"
    code_clear_output = "IRdisplay::clear_output()"


class TestDeno(conformance.KernelTests):
    """Deno's kernel has neither history nor a pager."""

    kernel_name = "agentbox-deno"
    language_name = "typescript"
    file_extension = ".ts"
    code_hello_world = "console.log('hello, world')"
    code_stderr = "console.error('test')"
    completion_samples = ({"text": "Deno.readTextFileSy", "matches": {"readTextFileSync"}},)
    complete_code_samples = ("1", "console.log('hello, world')", "function f(x: number) {\n  return x * 2;\n}")
    code_generate_error = "throw new Error('no')"
    code_display_data = (
        {"code": "await Deno.jupyter.broadcast('display_data', {data: {'text/html': '<b>x</b>'}, metadata: {}})",
         "mime": "text/html"},
    )  # fmt: skip


class TestBash(conformance.KernelTests):
    """bash_kernel has no results, displays or pager."""

    kernel_name = "agentbox-bash"
    language_name = "bash"
    file_extension = ".sh"
    code_hello_world = "echo 'hello, world'"
    completion_samples = ({"text": "unse", "matches": {"unset"}},)
    code_generate_error = "false"
