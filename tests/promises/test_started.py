"""The servers that the tests of promises ask are what the documentation describes."""

from __future__ import annotations

from support.started import Installation, Started


def test_nothing_comes_from_the_checkout(plain: Installation) -> None:
    where = plain.run("python", "-c", "import jupyter_agentbox; print(jupyter_agentbox.__file__)").output
    assert where.startswith(f"{plain.prefix}/")


def test_a_kernel_of_plain_lab_runs_in_gvisor(plain_lab: Started) -> None:
    kernel = plain_lab.notebook("started/book.ipynb")
    assert kernel.check("import os; print(os.uname().release)") == "4.4.0\n"
    kernel.shutdown()


def test_serve_runs_commands_in_gvisor(served: Started) -> None:
    assert served.run_command(["uname", "-r"])["stdout"] == "4.4.0\n"
