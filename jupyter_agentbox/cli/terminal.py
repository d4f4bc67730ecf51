"""``jupyter agentbox shell``: open an interactive shell in a new sandbox.

This process owns the sandbox, which ends with it. If the process is killed, the guest's short lease and the sweeper end
the sandbox. ``jupyter.terminals`` makes Jupyter's own terminals run this command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traitlets import Bool, Unicode

from jupyter_agentbox.errors import AgentboxError, InvalidRequest
from jupyter_agentbox.policy.environment import user_name
from jupyter_agentbox.policy.languages import find_commands
from jupyter_agentbox.policy.policy import Policy
from jupyter_agentbox.sandbox.manager import SandboxManager
from jupyter_agentbox.sandbox.processes import Command as Program
from jupyter_agentbox.sandbox.processes import Exit, ProcessTable
from jupyter_agentbox.sandbox.processes.values import MAX_TERMINAL_SIZE
from jupyter_agentbox.spec import SandboxSpec

from .base import Command, printable, until_signal, write_out

#: Seconds for which the sandbox outlives this process. No process can take it over, so it only has to cover a busy
#: machine.
LEASE = 5.0
#: Seconds for which typed input waits for a program that does not read, and for which a message waits for a key.
TYPE_TIMEOUT, HOLD_TIMEOUT = 3600.0, 600.0
_STDIN, _STDOUT = 0, 1


class ShellCommand(Command):
    """Open a shell in a new sandbox. FOLDER, or else the current directory, is its /workspace.

    Changes to /workspace persist; everything else is deleted when the shell ends. The exit status is the shell's.
    """

    name = "jupyter agentbox shell"
    description = __doc__ or ""
    examples = "jupyter agentbox shell --profile=offline ~/work"
    argument = "[FOLDER]"
    wanted = "name at most one folder"
    profile = Unicode(help="Profile of the sandbox. Default: Policy.default_profile.").tag(config=True)
    image = Unicode(help="Image to run in, by name. Default: the profile's.").tag(config=True)
    language = Unicode(help="Open the prompt of this language, such as R, instead of a shell.").tag(config=True)
    from_server = Bool(
        False,
        help="Used by Jupyter's terminals: if policy refuses FOLDER, use a private folder; keep an error on the screen "
        "until a key is pressed.",
    ).tag(config=True)

    def run(self) -> int:
        """Start the sandbox and connect its shell to this terminal."""
        if not (os.isatty(_STDIN) and os.isatty(_STDOUT)):
            raise InvalidRequest("stdin and stdout must be a terminal")
        with _terminal_modes():
            try:
                policy = Policy(parent=self)
                spec = self._resolve(policy)
                prompt = find_commands(self.language, spec.python).prompt if self.language else None
                return asyncio.run(until_signal(_shell(policy, spec, Program(argv=prompt))))
            except AgentboxError as error:
                if not self.from_server:
                    raise
                _print_message(f"{self.name}: {error}\nPress any key to close this terminal.")
                select.select([_STDIN], [], [], HOLD_TIMEOUT)
                return 1

    def _resolve(self, policy: Policy) -> SandboxSpec:
        """Resolve the sandbox. If policy refuses a folder that was not named, use a private one."""
        profile = policy.profile(self.profile or policy.default_profile)
        request: dict[str, Any] = {"profile": profile.name, "lease_timeout": min(LEASE, profile.lease_timeout)}
        if self.image:
            request["image"] = self.image
        is_named = bool(self.extra_args)
        folder = Path(os.path.abspath(os.path.expanduser(self.extra_args[0] if is_named else ".")))

        def resolve(workspace: Path | None) -> SandboxSpec:
            return policy.resolve(request, workspace=workspace, executable=sys.executable, owner=user_name())

        try:
            return resolve(folder)
        except AgentboxError as error:
            if error.field != "workspace" or (is_named and not self.from_server):
                raise
            _print_message(f"Using a private work folder, which is deleted when the shell ends: {error}")
            return resolve(None)


def _print_message(text: str) -> None:
    print("\r\n".join(printable(line) for line in text.splitlines()), end="\r\n", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _terminal_modes() -> Iterator[None]:
    """Turn echo off until the shell starts, and restore the terminal's modes afterwards."""
    modes = termios.tcgetattr(_STDIN)
    tty.setcbreak(_STDIN, termios.TCSANOW)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal has hung up
            termios.tcsetattr(_STDIN, termios.TCSANOW, modes)


async def _shell(policy: Policy, spec: SandboxSpec, program: Program) -> int:
    manager = SandboxManager.shared(policy.state_path, spec.runtime, config=policy.config)
    sandbox = await manager.create(spec)
    try:
        return await _bridge(sandbox.processes, program)
    finally:
        await manager.stop(sandbox)


async def _bridge(processes: ProcessTable, program: Program) -> int:
    """Run a program, or else a login shell, connect it to this terminal until it ends, and return its exit status."""
    loop = asyncio.get_running_loop()
    resized = asyncio.Event()
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    rows, columns = _size()
    term = os.environ.get("TERM") or "xterm-256color"
    info = await processes.open_terminal(program, rows=rows, columns=columns, term=term)
    tty.setraw(_STDIN, termios.TCSANOW)
    typing = asyncio.ensure_future(_type(processes, info.id))
    fitting = asyncio.ensure_future(_fit(processes, info.id, resized))
    showing = asyncio.ensure_future(_show(processes, info.id))
    tasks = (typing, fitting, showing)
    try:
        # Typing ends when the terminal hangs up, or with the shell, whose remaining output is shown then.
        await asyncio.wait([showing, typing], return_when=asyncio.FIRST_COMPLETED)
        if typing.done() and typing.result():
            return 128 + signal.SIGHUP
        return await showing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _show(processes: ProcessTable, name: str) -> int:
    async with await processes.follow(name) as events:
        async for event in events:
            if isinstance(event, Exit):
                return event.exit_code
            try:
                await asyncio.to_thread(write_out, event.data)
            except OSError:
                return 128 + signal.SIGHUP
    raise AssertionError("a process's events end with its exit")


async def _type(processes: ProcessTable, name: str) -> bool:
    """Pass typed input to the shell. Return whether the terminal has hung up."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    try:
        while True:
            is_readable.clear()
            loop.add_reader(_STDIN, is_readable.set)
            await is_readable.wait()
            loop.remove_reader(_STDIN)
            try:
                data = os.read(_STDIN, 4096)
            except OSError:
                data = b""
            if not data:
                return True
            await processes.write(name, data, timeout=TYPE_TIMEOUT)
    except (AgentboxError, TimeoutError):
        return False
    finally:
        loop.remove_reader(_STDIN)


async def _fit(processes: ProcessTable, name: str, resized: asyncio.Event) -> None:
    """Pass each change of the terminal's size to the shell."""
    while True:
        await resized.wait()
        resized.clear()
        with contextlib.suppress(AgentboxError):  # the shell has ended, which _show reports
            await processes.resize(name, *_size())


def _size() -> tuple[int, int]:
    with contextlib.suppress(OSError):
        columns, rows = os.get_terminal_size(_STDIN)
        if rows and columns:
            return min(rows, MAX_TERMINAL_SIZE), min(columns, MAX_TERMINAL_SIZE)
    return 24, 80
