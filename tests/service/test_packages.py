"""Names of packages: what goes to a package manager, and what does not."""

from __future__ import annotations

import pytest

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.models import InstallRequest
from jupyter_agentbox.service.packages import check_names, make_command


@pytest.mark.parametrize(
    "name", ["six", "pandas[excel]==2.2.*", "a>=1,<2", "A.b-c_d ~= 1.0", "x[a, b] !=1.0+local", "zope.interface"]
)
def test_names_for_pip(name: str) -> None:
    check_names([name])
    command = make_command(InstallRequest(packages=[name]))
    assert command.argv is not None
    assert list(command.argv)[-2:] == ["--", name]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-e",
        "--index-url=x",
        "./x",
        "/x",
        "x y",
        "http://x",
        "x @ file:///y",
        "x;python_version>'3'",
        "x\n",
        "x==1 -r f",
        "ü",
    ],
)
def test_what_is_no_name_for_pip(name: str) -> None:
    if name == "x\n":  # white space around a name is taken off
        name = "x\ny"
    with pytest.raises(InvalidRequest, match="is not a valid package name"):
        check_names([name])


@pytest.mark.parametrize("name", ["left-pad", "left-pad@1.3.0", "@types/node@^20", "x@latest"])
def test_names_for_npm(name: str) -> None:
    check_names([name], "npm")


@pytest.mark.parametrize("name", ["-g", "../x", "x@file:y", "git+https://x", "@x", "X/y", "x@npm:y"])
def test_what_is_no_name_for_npm(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_names([name], "npm")


def test_requirements_stay_in_the_workspace() -> None:
    command = make_command(InstallRequest(requirements="a/requirements.txt"))
    assert command.argv is not None
    assert list(command.argv)[-2:] == ["--requirement", "/workspace/a/requirements.txt"]
    for path in ("../x", "/etc/passwd"):
        with pytest.raises(InvalidRequest):
            make_command(InstallRequest(requirements=path))


@pytest.mark.parametrize("name", ["data.table", "R6", "ggplot2"])
def test_names_for_r(name: str) -> None:
    command = make_command(InstallRequest(packages=[name], manager="R"))
    assert command.argv is not None
    program, *_, code, last = command.argv
    assert (program, last) == ("Rscript", name)
    assert "install.packages(names" in code
    assert name not in code


@pytest.mark.parametrize("name", ["-e", "--args", "x-y", "a_b", "x==1", "x'", 'x");q("', "1x", "./x", "github/x", "x."])
def test_what_is_no_name_for_r(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"for R; examples: data\.table"):
        make_command(InstallRequest(packages=[name], manager="R"))


def test_only_pip_takes_requirements() -> None:
    for manager in ("npm", "R"):
        with pytest.raises(InvalidRequest, match=f"{manager} does not support requirements files"):
            make_command(InstallRequest(requirements="r", manager=manager))  # type: ignore[arg-type]
