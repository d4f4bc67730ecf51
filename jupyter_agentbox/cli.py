"""``jupyter agentbox``: setup, doctor, kernelspec, list and prune.

Thin over the modules that do the work; each command imports what it needs when it runs. Every command takes settings as
Jupyter's own commands do: ``jupyter agentbox doctor --Policy.state_dir=/srv/boxes``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import ClassVar

from jupyter_core.application import JupyterApp, base_aliases, base_flags
from traitlets import Bool, Unicode

from . import __version__
from .errors import AgentboxError

_ALIASES = {name: base_aliases[name] for name in ("config", "log-level")}
_FLAGS = {"debug": base_flags["debug"]}
_SETUP_FLAGS = {
    **_FLAGS,
    "dry-run": ({"SetupCommand": {"is_dry": True}}, "Say what would be done, and do nothing."),
    "enforce": ({"SetupCommand": {"is_enforcing": True}}, "Make Jupyter servers offer sandboxed kernels only."),
    "yes": ({}, "Accepted for scripts; nothing is ever asked."),
}
_DOCTOR_FLAGS = {**_FLAGS, "json": ({"DoctorCommand": {"is_json": True}}, "Print a JSON list instead of lines.")}
_LIST_FLAGS = {**_FLAGS, "json": ({"ListCommand": {"is_json": True}}, "Print a JSON list instead of a table.")}
_KERNELSPEC_ALIASES = {
    **_ALIASES,
    "profile": "KernelspecCommand.profile",
    "name": "KernelspecCommand.twin",
    "prefix": "KernelspecCommand.prefix",
}


class Command(JupyterApp):
    """What the commands share: settings, arguments, errors and the exit status.

    Settings of files are read by :class:`~jupyter_agentbox.policy.Policy`, as for kernels, so that a command sees what
    a kernel would; here only ``--config`` and the command line are.
    """

    version = __version__
    aliases = _ALIASES
    flags = _FLAGS
    #: What the positional arguments are called; None where there are none.
    argument: ClassVar[str | None] = None

    def migrate_config(self) -> None:
        """Do nothing: what Jupyter's other commands do here has no part in this."""

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Load ``--config`` alone, strictly. Never from the current directory, where sandboxes may write."""
        if self.config_file:
            self.raise_config_file_errors = True
            try:
                super().load_config_file(suppress_errors=False)
            except Exception as error:
                print(
                    f"{self.name}: the configuration file {self.config_file} can't be read: {error!r}", file=sys.stderr
                )
                self.exit(1)

    def start(self) -> None:
        """Run, and exit with the command's status."""
        super().start()
        try:
            if self.extra_args and self.argument is None:
                raise AgentboxError(
                    f"this command takes no argument, and got {' '.join(self.extra_args)!r}; see --help"
                )
            status = self.run()
        except AgentboxError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            status = 1
        self.exit(status)

    def run(self) -> int:
        """Do the work and return the exit status."""
        raise NotImplementedError


class SetupCommand(Command):
    """Get what sandboxes need: gVisor's runsc and a kernelspec.

    runsc is taken from the configured path, PATH, the distribution's packages, or the official release with its
    checksum verified. Nothing is asked. Each step is said before it is done; a second run does nothing.
    """

    name = "jupyter agentbox setup"
    description = __doc__ or ""
    examples = "jupyter agentbox setup --dry-run"
    flags = _SETUP_FLAGS
    is_dry = Bool(False, help="Say what would be done, and do nothing.").tag(config=True)
    is_enforcing = Bool(False, help="Make Jupyter servers of this environment offer sandboxed kernels only.").tag(
        config=True
    )
    releases = Unicode(help="Address of gVisor's releases, for a mirror of them.").tag(config=True)

    def run(self) -> int:
        """Set the machine up."""
        from . import kernelspecs
        from .install import RELEASES, Setup
        from .policy import Policy

        policy = Policy(parent=self)
        setup = Setup(
            policy.state_path,
            configured=str(policy.config.RunscRuntime.get("runsc", "")),
            is_dry=self.is_dry,
            releases=self.releases or RELEASES,
        )
        setup.get_runsc()
        setup.get_uidmap()
        if self.is_enforcing:
            print("server: offering sandboxed kernels only, and our own by default")
            if not self.is_dry:
                print(f"  written {kernelspecs.enforce()}; removing it undoes this")
        if self.is_dry:
            print("kernelspec: would install the sandboxed kernelspec, unless it is there")
        else:
            print(f"kernelspec: {kernelspecs.ensure_installed()}")
            print("ready; `jupyter agentbox doctor` examines it all")
        return 0


class DoctorCommand(Command):
    """Examine whether sandboxes start here. Prints for each finding: ok, or what is wrong and what mends it.

    The exit status is 0 if all is well and 1 if not.
    """

    name = "jupyter agentbox doctor"
    description = __doc__ or ""
    examples = "jupyter agentbox doctor --json"
    flags = _DOCTOR_FLAGS
    is_json = Bool(False, help="Print a JSON list.").tag(config=True)

    def run(self) -> int:
        """Examine and print."""
        from dataclasses import asdict

        from .doctor import examine

        found = examine(self)
        if self.is_json:
            print(json.dumps([asdict(check) for check in found], indent=2))
        else:
            for check in found:
                first, *more = check.message.splitlines() or [""]
                print(f"{'ok   ' if check.is_ok else 'WRONG'}  {check.name}: {first}")
                for line in more:
                    print(f"       {line}")
                if not check.is_ok and check.remedy:
                    print(f"       mend it: {check.remedy}")
        return 0 if all(check.is_ok for check in found) else 1


class KernelspecCommand(Command):
    """Make a sandboxed twin of an installed kernelspec: `jupyter agentbox kernelspec python3`."""

    name = "jupyter agentbox kernelspec"
    description = __doc__ or ""
    examples = "jupyter agentbox kernelspec ir --profile=small"
    argument = "NAME"
    aliases = _KERNELSPEC_ALIASES
    profile = Unicode(help="Profile of its sandboxes; the default one unless given.").tag(config=True)
    twin = Unicode(help="Name of the twin; NAME with -agentbox behind it unless given.").tag(config=True)
    prefix = Unicode(help="Where to install: a prefix such as sys.prefix; for this user unless given.").tag(config=True)

    def run(self) -> int:
        """Make the twin."""
        from . import kernelspecs
        from .policy import Policy

        if len(self.extra_args) != 1:
            raise AgentboxError("name one installed kernelspec; `jupyter kernelspec list` shows them")
        policy = Policy(parent=self)
        if self.profile:
            policy.profile(self.profile)
        made = kernelspecs.install_twin(
            self.extra_args[0], name=self.twin or None, profile=self.profile or None, prefix=self.prefix or None
        )
        print(f"installed {made}")
        return 0


class ListCommand(Command):
    """List the sandboxes of this user, whichever process owns them."""

    name = "jupyter agentbox list"
    description = __doc__ or ""
    flags = _LIST_FLAGS
    is_json = Bool(False, help="Print a JSON list.").tag(config=True)

    def run(self) -> int:
        """Print the registry."""
        from dataclasses import asdict

        from .manager import SandboxManager
        from .policy import Policy
        from .spec import format_size

        policy = Policy(parent=self)
        is_there = (policy.state_path / "sandboxes").is_dir()
        manager = SandboxManager.shared(policy.state_path, policy.runtime, config=policy.config) if is_there else None
        found = manager.list() if manager is not None else []
        if self.is_json:
            print(json.dumps([asdict(item) for item in found], indent=2))
            return 0
        rows: list[tuple[str, ...]] = [("ID", "STATE", "PROFILE", "AGE", "MEMORY", "KERNEL", "WORK FOLDER")]
        for item in found:
            age, memory = format_age(time.time() - item.created), format_size(item.memory) if item.memory else "-"
            texts = (item.id, item.state, item.profile, age, memory, item.kernel_id or "-", item.workspace or "private")
            rows.append(tuple(map(printable, texts)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        return 0


class PruneCommand(Command):
    """Remove what is left of sandboxes whose owner is gone and whose lease is over. Others are never touched."""

    name = "jupyter agentbox prune"
    description = __doc__ or ""

    def run(self) -> int:
        """Sweep once."""
        from .policy import Policy
        from .sweep import sweep

        removed = sweep(Policy(parent=self).state_path)
        for sandbox_id in removed:
            print(f"removed {sandbox_id}")
        if not removed:
            print("nothing to remove")
        return 0


_COMMANDS = {
    "setup": (SetupCommand, "Get what sandboxes need: gVisor's runsc and a kernelspec."),
    "doctor": (DoctorCommand, "Examine whether sandboxes start here, and say what mends what is wrong."),
    "kernelspec": (KernelspecCommand, "Make a sandboxed twin of an installed kernelspec."),
    "list": (ListCommand, "List the sandboxes."),
    "prune": (PruneCommand, "Remove what is left of sandboxes whose owner is gone."),
}


class AgentboxCommand(Command):
    """Jupyter kernels in gVisor sandboxes, with egress allowed by host name."""

    name = "jupyter agentbox"
    description = __doc__ or ""
    examples = "jupyter agentbox setup\njupyter agentbox doctor\njupyter agentbox kernelspec python3"
    argument = "COMMAND"
    subcommands = _COMMANDS

    def run(self) -> int:
        """Say what there is: a command was missing or is unknown."""
        from .profiles import did_you_mean

        word = self.extra_args[0] if self.extra_args else ""
        unknown = f"there is no command {word!r}{did_you_mean(word, _COMMANDS)}; " if word else ""
        print(f"{self.name}: {unknown}commands are {', '.join(_COMMANDS)}; --help tells more", file=sys.stderr)
        return 2


def format_age(seconds: float) -> str:
    """Write a duration for a person: ``42 s``, ``5 min``, ``3 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def printable(text: str) -> str:
    """Keep a terminal safe from the names of other people's folders."""
    return "".join(char if char.isprintable() else "?" for char in text)


def main(argv: list[str] | None = None) -> None:
    """Entry point of ``jupyter-agentbox``."""
    try:
        AgentboxCommand.launch_instance(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # `... --help | head`: whoever read has left, and what the interpreter flushes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
