"""``jupyter agentbox run``: run a script in a new sandbox owned by this process. No server is needed."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from traitlets import Bool, Float, List, Unicode

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, SandboxEnded
from jupyter_agentbox.kernels.runner import Runner
from jupyter_agentbox.kernels.warm.starts import WarmStarts
from jupyter_agentbox.models import SandboxRequest
from jupyter_agentbox.models.outputs import (
    CodeResult,
    DisplayEvent,
    DoneEvent,
    ErrorEvent,
    Event,
    OutputLimits,
    ResultEvent,
    StreamEvent,
)
from jupyter_agentbox.policy.environment import user_name
from jupyter_agentbox.policy.languages import PYTHON, SUFFIXES, find_commands, suggest_image
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.policy.profiles import Profile, expand, find_uncovered
from jupyter_agentbox.sandbox.link.thread import LinkThread
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command as Program
from jupyter_agentbox.sandbox.processes import Exit
from jupyter_agentbox.service.managed_sandbox import ManagedSandbox
from jupyter_agentbox.service.packages import install_all, split_packages
from jupyter_agentbox.spec import WORKSPACE, SandboxSpec

from .base import (
    BROKEN_PIPE,
    ProgramCommand,
    UsageError,
    printable,
    read_input,
    until_signal,
    write_out,
)

#: Seconds for which the sandbox outlives this process if the process is killed.
LEASE = 5.0
MAX_SCRIPT = 16 * 1024 * 1024
#: Maximum bytes of output of one cell of a notebook.
MAX_OUTPUT = 64 * 1024 * 1024
TIMED_OUT = 124


class RunCommand(ProgramCommand):
    """Run a script in a new sandbox: `jupyter agentbox run script.py ARGUMENTS`.

    The sandbox contains the script and no other files of yours, and is deleted afterwards. With --mount, the script
    can change the files of that folder; secrets in it are hidden. Put options before the script. The suffix selects
    the language: .R, .ts, .js, .sh, and Python for any other; - reads a program from standard input. The cells of a
    notebook (.ipynb) run in order until one fails, and their output is printed. The exit status is the script's,
    124 after --timeout, or 128 + n after signal n. Ctrl-C ends the script. Refused connections are listed at the end.
    """

    name = "jupyter agentbox run"
    description = __doc__ or ""
    examples = (
        "jupyter agentbox run script.py one two\n"
        "jupyter agentbox run --offline --timeout=10 -c 'print(1 + 1)'\n"
        "jupyter agentbox run --mount=. --package=pandas --allow=pypi --allow=data.example.org report.py"
    )
    argument = "[SCRIPT] [ARGUMENTS...]"
    code = Unicode(help="Run this code instead of a script.").tag(config=True, option="c")
    image = Unicode(help="Image to run in, by name. Default: the profile's.").tag(config=True)
    language = Unicode(help="Language of the script, such as R. Default: by its suffix, or Python.").tag(config=True)
    profile = Unicode(help="Profile of the sandbox. Default: Policy.default_profile.").tag(config=True)
    mount = Unicode(help="Use this folder as the work folder. Changes to it persist.").tag(config=True)
    timeout = Float(0.0, min=0.0, help="Kill the script after this many seconds. Default: never.").tag(config=True)
    allow = List(
        Unicode(), help="Allow this host or preset instead of the profile's hosts, within policy. Can be repeated."
    ).tag(config=True)
    package = List(
        Unicode(), help="Install this package first, such as pandas, npm:left-pad or R:data.table. Can be repeated."
    ).tag(config=True)
    offline = Bool(False, help="Allow no host.").tag(config=True)
    stdin = Bool(False, help="Pass standard input to the script; it is read to its end first.").tag(config=True)

    def run(self) -> int:
        """Start the sandbox, run the script until it ends, and end the sandbox."""
        if self.offline and (self.allow or self.package):
            raise UsageError("--offline cannot be combined with --allow or --package")
        self._installs = split_packages(self.package, "package")
        script = self._read_script()
        is_notebook = not self.code and Path(self.rest[0]).suffix == ".ipynb"
        self._notebook = _read_notebook(script, self.rest[0]) if is_notebook else None
        stdin = read_input() if self.stdin or (self.rest[:1] == ["-"] and not self.code) else b""
        policy = Policy(parent=self)
        spec = self._resolve(policy)
        return asyncio.run(until_signal(self._run(policy, spec, script, self._command(spec.python), stdin)))

    def _read_script(self) -> bytes:
        """Return the content of the script file; empty for code and for standard input."""
        if self.code:
            return b""
        if not self.rest:
            raise UsageError("name a script, or give code with -c; see --help")
        if self.rest[0] == "-":
            return b""
        path = Path(self.rest[0])
        if self.mount and not path.resolve().is_relative_to(Path(self.mount).resolve()):
            raise InvalidRequest(f"{path} is not in the mounted folder {self.mount}", field="mount")
        try:
            with path.open("rb") as file:
                data = file.read(MAX_SCRIPT + 1)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be read: {error.strerror or error}") from None
        if len(data) > MAX_SCRIPT:
            raise InvalidRequest(f"{path} is larger than the {MAX_SCRIPT} bytes allowed for a script")
        return data

    def _language(self) -> str:
        """Return the language of the script or code."""
        suffix = Path(self.rest[0]).suffix.lower() if self.rest and not self.code else ""
        return self.language or SUFFIXES.get(suffix, PYTHON)

    def _command(self, python: str) -> Program:
        language = self._language()
        commands = find_commands(language, python)
        if self.code:
            return Program(argv=[*commands.code, self.code, *self.rest])
        name, *arguments = self.rest
        if name == "-":
            return Program(argv=[*commands.file, "-", *arguments] if language.lower() != "bash" else ["/bin/sh", "-s"])
        path = Path(name)
        place = path.resolve().relative_to(Path(self.mount).resolve()) if self.mount else Path(path.name)
        return Program(argv=[*commands.file, f"{WORKSPACE}/{place}", *arguments])

    def _resolve(self, policy: Policy) -> SandboxSpec:
        profile = policy.profile(self.profile or policy.default_profile)
        request: dict[str, Any] = {"profile": profile.name, "lease_timeout": min(LEASE, profile.lease_timeout)}
        if self.image:
            request["image"] = self.image
        # The person who runs this command may allow more than the profile does.
        chosen = [host for host in self.allow if _is_for_user(host, profile)]
        if self.offline or self.allow:
            request["allowed_hosts"] = [host for host in self.allow if host not in chosen]
        folder = Path(self.mount).resolve() if self.mount else None
        spec = policy.resolve(request, workspace=folder, executable=sys.executable, owner=user_name())
        if folder is not None and spec.workspace is None:
            raise InvalidRequest(f"profile {profile.name!r} does not mount a folder", field="mount")
        hosts = (*spec.grant.user_hosts, *expand(chosen))
        may_allow = (*spec.grant.may_allow, *expand(profile.hosts))
        setting, consent = profile.hosts_setting, "with --allow"
        grant = replace(spec.grant, user_hosts=hosts, may_allow=may_allow, setting=setting, consent=consent)
        return replace(spec, grant=grant)

    async def _run(self, policy: Policy, spec: SandboxSpec, script: bytes, command: Program, stdin: bytes) -> int:
        manager = SandboxManager.shared(policy.state_path, spec.runtime, config=policy.config)
        # No kernel is needed, but the sandbox of a waiting kernel starts faster than a new one.
        sandbox = await LinkThread.instance().run(
            WarmStarts.shared(manager, policy).create(spec, has_code=self._notebook is not None)
        )
        logging.getLogger("jupyter_agentbox.sandbox.sandbox").setLevel(logging.CRITICAL)  # its end is reported below
        managed = ManagedSandbox("run", spec.owner, SandboxRequest())
        try:
            managed.attach(sandbox)
            if script and not self.mount:
                name = Path(self.rest[0]).name
                await asyncio.to_thread(lambda: managed.folder().write(name, script))
            for request in self._installs:
                done = await install_all(managed, request)
                if not done.is_ok:
                    raise AgentboxError(f"the packages were not installed: {done.message}", field="package")
            before = managed.refusal_count
            if self._notebook is not None:
                status = await self._cells(managed, self._notebook)
            else:
                status = await self._script(managed, command, stdin)
            if status:
                await LinkThread.instance().run(sandbox.notice_end())
                managed.running()  # raises the cause
            for item in managed.refusals(before):
                print(f"{self.name}: {printable(item.sentence)}", file=sys.stderr)
            return status
        except SandboxEnded as error:
            self.complain(error)
            return error.end.exit_code or 1
        finally:
            managed.close()
            await Runner.shared().aclose()
            await manager.stop(sandbox)

    async def _script(self, managed: ManagedSandbox, command: Program, stdin: bytes) -> int:
        processes = managed.running().processes
        async with await processes.stream(command, stdin=stdin, timeout=self.timeout or None) as events:
            async for event in events:
                if isinstance(event, Exit):
                    break
                try:
                    await asyncio.to_thread(write_out, event.data, 2 if event.stream == "stderr" else 1)
                except OSError:
                    return BROKEN_PIPE
        assert isinstance(event, Exit)
        if event.exit_code == 127 and (remedy := suggest_image(self._language())):
            print(f"{self.name}: {remedy}", file=sys.stderr)
        if event.timed_out:
            print(f"{self.name}: killed after {self.timeout:g} s", file=sys.stderr)
            return TIMED_OUT
        return event.exit_code

    async def _cells(self, managed: ManagedSandbox, notebook: Notebook) -> int:
        """Run a notebook's cells in one kernel, print their output, and stop at the first error."""
        deadline = time.monotonic() + (self.timeout or math.inf)
        limits = OutputLimits(stream_bytes=MAX_OUTPUT, display_bytes=MAX_OUTPUT)
        for code in notebook.cells:
            left = max(0.01, deadline - time.monotonic()) if self.timeout else None
            language = self.language or notebook.language
            done: CodeResult | None = None
            events = Runner.shared().stream(managed.running(), code, language=language, timeout=left, limits=limits)
            async for event in events:
                if isinstance(event, DoneEvent):
                    done = event.result
                    break
                try:
                    await asyncio.to_thread(_show, event)
                except OSError:
                    return BROKEN_PIPE
            assert done is not None
            if done.status == "timed_out":
                print(f"{self.name}: killed after {self.timeout:g} s", file=sys.stderr)
                return TIMED_OUT
            if done.status != "ok":
                if done.message:
                    print(f"{self.name}: {printable(done.message)}", file=sys.stderr)
                return (done.end.exit_code if done.end is not None else 0) or 1
        return 0


@dataclass(frozen=True)
class Notebook:
    """The code of a notebook's cells, and their language."""

    cells: tuple[str, ...]
    language: str


def _is_for_user(host: str, profile: Profile) -> bool:
    """Return whether a profile does not allow a host, but lets a person allow it."""
    return find_uncovered([host], profile.hosts) is not None and find_uncovered([host], profile.user_may_allow) is None


def _read_notebook(data: bytes, name: str) -> Notebook:
    import nbformat  # takes seconds

    try:
        book: Any = nbformat.reads(data.decode(), as_version=4)  # type: ignore[no-untyped-call]
        cells = tuple(str(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code")
        metadata = book["metadata"]
        language = metadata.get("kernelspec", {}).get("language") or metadata.get("language_info", {}).get("name")
    except Exception as error:  # nbformat raises errors of many kinds
        raise InvalidRequest(f"{name} is not a notebook that can be read: {error!s:.200}") from None
    return Notebook(cells, str(language or PYTHON))


def _show(event: Event) -> None:
    """Print an event of a cell: text as it is, of other values their plain text."""
    if isinstance(event, StreamEvent):
        write_out(event.text.encode(), 2 if event.name == "stderr" else 1)
    elif isinstance(event, ErrorEvent):
        lines = event.error.traceback or [f"{event.error.ename}: {event.error.evalue}"]
        write_out(("\n".join(lines) + "\n").encode(), 2)
    elif isinstance(event, DisplayEvent | ResultEvent):
        data = event.display.data
        text = data.get("text/plain") or f"[{', '.join(data)}]"
        write_out(f"{text}\n".encode())
