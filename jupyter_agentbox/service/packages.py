"""Install packages into a sandbox with its own package managers, through its own gate.

Package names are validated here, so that no name is read as an option, an address or a path. The package indexes come
from the package managers' own configuration. Installed packages are lost when the sandbox ends.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from jupyter_agentbox.errors import InvalidRequest
from jupyter_agentbox.models import Installed, InstallRequest, ProgressEvent, RefusedHost
from jupyter_agentbox.models.long_output import OutputText, apply_movements
from jupyter_agentbox.policy.languages import suggest_image
from jupyter_agentbox.sandbox.processes import Command, Exit
from jupyter_agentbox.spec import WORKSPACE
from jupyter_agentbox.storage.files.paths import parse_path, write_path

from .managed_sandbox import ManagedSandbox

#: Maximum number of bytes kept of the package manager's output, and of characters of one line that is passed on.
MAX_LOG = 16_000
MAX_LINE = 1_000

_VERSION = r"\s*(===|==|!=|<=|>=|~=|<|>)\s*[A-Za-z0-9.*+!_-]{1,100}\s*"
_PIP = re.compile(
    rf"[A-Za-z0-9]([A-Za-z0-9._-]{{0,98}}[A-Za-z0-9])?\s*(\[[A-Za-z0-9._,\s-]{{0,200}}\])?({_VERSION}(,{_VERSION}){{0,10}})?"
)
_NPM = re.compile(r"(@[a-z0-9~][a-z0-9._~-]{0,100}/)?[a-z0-9~][a-z0-9._~-]{0,213}(@[A-Za-z0-9.^~<>=*+-]{1,100})?")
_R = re.compile(r"[A-Za-z][A-Za-z0-9.]{0,98}[A-Za-z0-9]")
_PATTERNS = {"pip": _PIP, "npm": _NPM, "R": _R}
_EXAMPLES = {"pip": "pandas[excel]==2.2.*", "npm": "left-pad@1.3.0", "R": "data.table"}
#: R only warns about packages that it could not install. Names are passed as arguments, never as part of the program.
_INSTALL_R = """\
names <- commandArgs(trailingOnly = TRUE)
if (identical(unname(getOption("repos")["CRAN"]), "@CRAN@")) {
  message("ERROR: R has no repository: set options(repos = ...) in its Rprofile.site"); quit(status = 1)
}
library <- Sys.getenv("R_LIBS_USER", "~/R")
dir.create(library, recursive = TRUE, showWarnings = FALSE)
.libPaths(library)
install.packages(names, lib = library)
missing <- setdiff(names, rownames(installed.packages()))
if (length(missing)) { message("ERROR: not installed: ", paste(missing, collapse = ", ")); quit(status = 1) }
message("Successfully installed ", paste(names, collapse = " "))
"""
_OK = re.compile(r"^(Successfully installed .*|added \d+ packages?.*|up to date.*)$", re.MULTILINE)
_ERROR = re.compile(r"^(?:ERROR: |npm (?:ERR!|error) )(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Done:
    """The last event of an installation."""

    result: Installed


def check_names(names: Iterable[str], manager: str = "pip", field: str = "packages") -> None:
    """Check that each name is a plain package name with optional extras and versions. Raises InvalidRequest."""
    for name in names:
        if not _PATTERNS[manager].fullmatch(name.strip()):
            raise InvalidRequest(
                f"{name[:100]!r} is not a valid package name for {manager}; examples: {_EXAMPLES[manager]}", field=field
            )


def split_packages(packages: Iterable[str], field: str = "packages") -> list[InstallRequest]:
    """Return one request for each package manager, in the order of its first package.

    Parameters
    ----------
    packages : iterable of str
        Names of Python packages, and names with a prefix: ``npm:left-pad@1.3.0``, ``R:data.table``.

    Raises
    ------
    InvalidRequest
        A name or prefix is malformed; the error has this `field`.
    """
    found: dict[Literal["pip", "npm", "R"], list[str]] = {}
    for entry in packages:
        prefix, colon, rest = entry.strip().partition(":")
        if not colon:
            found.setdefault("pip", []).append(entry)
        elif prefix == "npm":
            found.setdefault("npm", []).append(rest)
        elif prefix == "R":
            found.setdefault("R", []).append(rest)
        else:
            raise InvalidRequest(
                f"{entry[:100]!r} is not a valid package name: the prefixes are npm: and R:, and Python packages have "
                "none",
                field=field,
            )
    for manager, names in found.items():
        check_names(names, manager, field)
    return [InstallRequest(packages=names, manager=manager) for manager, names in found.items()]


def make_command(request: InstallRequest, python: str = sys.executable) -> Command:
    """Return the install command; for pip, it installs for the interpreter `python`. Raises InvalidRequest."""
    names = [name.strip() for name in request.packages]
    check_names(names, request.manager)
    if not names and request.requirements is None:
        raise InvalidRequest("give packages or a requirements file", field="packages")
    if request.manager != "pip" and request.requirements is not None:
        raise InvalidRequest(f"{request.manager} does not support requirements files", field="requirements")
    if request.manager == "R":
        # R reinstalls packages that are present, in their newest version, as with `upgrade`.
        return Command(argv=["Rscript", "--no-save", "--no-restore", "-e", _INSTALL_R, *names])
    if request.manager == "npm":
        verb = "update" if request.upgrade else "install"
        return Command(argv=["npm", verb, "--no-audit", "--no-fund", "--no-progress", "--", *names])
    argv = [python, "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    if request.upgrade:
        argv.append("--upgrade")
    if request.requirements is not None:
        path = write_path(parse_path(request.requirements, field="requirements"))
        argv += ["--requirement", f"{WORKSPACE}/{path}"]
    # Otherwise pip refuses to change a distribution's own Python. That Python cannot be damaged from a sandbox.
    env = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    return Command(argv=[*argv, *(["--", *names] if names else [])], env=env)


async def install(managed: ManagedSandbox, request: InstallRequest) -> AsyncIterator[ProgressEvent | Done]:
    """Install packages; yield each line of output as it is printed, and finally the result.

    Raises
    ------
    InvalidRequest
        A name is malformed.
    SandboxEnded, LinkClosed
        The sandbox ended during the installation.
    """
    sandbox = managed.running()
    command = make_command(request, sandbox.spec.python or sys.executable)
    refused_before = managed.refusal_count
    began = time.monotonic()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    log, line = OutputText(MAX_LOG), ""
    async with await sandbox.processes.stream(command, timeout=request.timeout) as events:
        async for event in events:
            if isinstance(event, Exit):
                break
            text = decoder.decode(event.data)
            log.add(text)
            *lines, line = (line + text)[-MAX_LOG:].split("\n")
            for whole in map(apply_movements, lines):
                if whole.strip():
                    yield ProgressEvent(whole.rstrip()[:MAX_LINE])
        else:
            raise AssertionError("a process's events end with its exit")
    if last := apply_movements(line).rstrip():
        yield ProgressEvent(last[:MAX_LINE])
    refused = [RefusedHost(item.host, item.port, item.sentence) for item in managed.refusals(refused_before)]
    yield Done(
        Installed(
            is_ok=event.exit_code == 0,
            message=_message(event, log.value(), refused, request),
            exit_code=event.exit_code,
            duration=time.monotonic() - began,
            log=log.value(),
            refused=refused,
        )
    )


async def install_all(
    managed: ManagedSandbox, request: InstallRequest, on_progress: Callable[[str], object] = lambda text: None
) -> Installed:
    """Install packages and return the result. `on_progress` is called with each line of output as it is printed."""
    async for event in install(managed, request):
        if isinstance(event, Done):
            return event.result
        on_progress(event.text + "\n")
        await asyncio.sleep(0)
    raise AssertionError("an installation ends with its result")


def _message(end: Exit, log: str, refused: list[RefusedHost], request: InstallRequest) -> str:
    if end.exit_code == 0:
        found = _OK.findall(log)
        return found[-1] if found else "already installed"
    if end.timed_out:
        return f"the installation did not end within {request.timeout:g} s"
    if refused:
        return "the gate refused: " + "; ".join(item.message for item in refused[:5])
    if end.exit_code == 127:
        return f"{request.manager} is not installed in this sandbox. {suggest_image(request.manager)}".rstrip()
    errors = _ERROR.findall(log)
    return errors[-1][:500] if errors else f"{request.manager} exited with status {end.exit_code}"
