"""What all commands of ``jupyter agentbox`` share: settings, arguments, errors and the exit status."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from jupyter_core.application import JupyterApp, base_aliases, base_flags

from jupyter_agentbox import __version__
from jupyter_agentbox.errors import AgentboxError, TooLarge

ALIASES = {name: base_aliases[name] for name in ("config", "log-level")}
FLAGS = {"debug": base_flags["debug"]}
#: Bytes of a program's input, which is read before it starts.
MAX_INPUT = 32 * 1024 * 1024


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
            self.complain(error)
            status = 1
        self.exit(status)

    def run(self) -> int:
        """Do the work and return the exit status."""
        raise NotImplementedError

    def complain(self, error: AgentboxError) -> None:
        """Say what is wrong. The sentence may hold what code in a sandbox chose."""
        print(f"{self.name}: " + "\n".join(map(printable, str(error).splitlines())), file=sys.stderr)


class CommandGroup(Command):
    """A command that is nothing but its subcommands."""

    argument = "COMMAND"

    def run(self) -> int:
        """Say what there is: a command was missing or is unknown."""
        from jupyter_agentbox.profiles import did_you_mean

        word = self.extra_args[0] if self.extra_args else ""
        unknown = f"there is no command {word!r}{did_you_mean(word, self.subcommands)}; " if word else ""
        print(f"{self.name}: {unknown}commands are {', '.join(self.subcommands)}; --help tells more", file=sys.stderr)
        return 2


class ProgramCommand(Command):
    """A command whose arguments end with a program and what it takes, none of which are options of ours.

    Our own stand before the first argument; :attr:`rest` has all that follows.
    """

    #: How many arguments come before the program's own.
    own_count: ClassVar[int] = 0
    rest: list[str]

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """Read options up to the first argument."""
        words = list(sys.argv[1:] if argv is None else argv)
        flags = {*self.flags, "help", "help-all", "version", "h"}
        index = 0
        while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
            word = words[index].lstrip("-")
            takes_value = "=" not in word and word not in flags
            index += 2 if takes_value else 1
        super().parse_command_line(words[:index])
        self.rest = words[index:]
        if self.rest[:1] == ["--"] and not self.own_count:
            del self.rest[0]
        if self.own_count and self.rest[self.own_count : self.own_count + 1] == ["--"]:
            del self.rest[self.own_count]


def write_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns; the first is the heading."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def write_out(data: bytes, descriptor: int = 1) -> None:
    """Write bytes as they are. Raises BrokenPipeError when nobody reads."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]


def read_input(limit: int = MAX_INPUT) -> bytes:
    """Read standard input to its end. Raises TooLarge."""
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise TooLarge(f"the standard input is more than the {limit} bytes that are taken", field="stdin")
    return data


def format_age(seconds: float) -> str:
    """Write a duration for a person: ``42 s``, ``5 min``, ``3 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def printable(text: str) -> str:
    """Keep a terminal safe from the names of other people's folders."""
    return "".join(char if char.isprintable() else "?" for char in text)
