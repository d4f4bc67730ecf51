"""What all commands of ``jupyter agentbox`` share: settings, arguments, errors and the exit status."""

from __future__ import annotations

import sys
from typing import ClassVar

from jupyter_core.application import JupyterApp, base_aliases, base_flags

from jupyter_agentbox import __version__
from jupyter_agentbox.errors import AgentboxError

ALIASES = {name: base_aliases[name] for name in ("config", "log-level")}
FLAGS = {"debug": base_flags["debug"]}


class Command(JupyterApp):
    """What the commands share: settings, arguments, errors and the exit status.

    Settings of files are read by :class:`~jupyter_agentbox.policy.Policy`, as for kernels, so that a command sees what
    a kernel would; here only ``--config`` and the command line are.
    """

    version = __version__
    aliases = ALIASES
    flags = FLAGS
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


def format_age(seconds: float) -> str:
    """Write a duration for a person: ``42 s``, ``5 min``, ``3 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def printable(text: str) -> str:
    """Keep a terminal safe from the names of other people's folders."""
    return "".join(char if char.isprintable() else "?" for char in text)
