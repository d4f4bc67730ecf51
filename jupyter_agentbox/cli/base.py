"""Provide the base of all ``jupyter agentbox`` commands: options, arguments, help, errors and exit status."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Coroutine, Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from jupyter_core.application import JupyterApp, base_aliases, base_flags
from traitlets import Bool, Float, Int, List, TraitError, TraitType

from jupyter_agentbox import __version__
from jupyter_agentbox.errors import AgentboxError, TooLarge

ALIASES = {name: base_aliases[name] for name in ("config", "log-level")}
FLAGS = {"debug": (base_flags["debug"][0], "Log at level DEBUG.")}
#: Maximum number of bytes of standard input passed to a program.
MAX_INPUT = 32 * 1024 * 1024
#: Exit statuses: an error; a usage error; Ctrl-C; output whose reader has closed the pipe.
FAULT, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
#: Classes, besides runtimes, whose settings the command line accepts.
_SETTINGS = ("Policy", "Application", "JupyterApp")
_ALWAYS = ("help", "help-all", "version", "h", "V")


class UsageError(AgentboxError):
    """The command line has an unknown or invalid option or argument."""


class Command(JupyterApp):
    """Parse options and arguments, print help and errors, and set the exit status.

    Each configurable trait of a command is an option: ``token_file`` is ``--token-file``, and a ``Bool`` is a flag. The
    metadata ``option`` sets another name; an empty one means no option.

    Configuration files are read by :class:`~jupyter_agentbox.policy.policy.Policy`, as for kernels, so that a command
    sees the settings of a kernel. Only ``--config`` and the command line are read here.
    """

    version = __version__
    aliases = ALIASES
    flags = FLAGS
    #: Positional arguments as in the help, such as ``ID [PROCESS]`` or ``ID...``. Their number is checked against it.
    argument: ClassVar[str] = ""
    #: Error message for a wrong number of arguments.
    wanted: ClassVar[str] = ""
    #: Whether it accepts settings of any class, such as those of Jupyter's server.
    takes_all_settings: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Make an option of each configurable trait."""
        super().__init_subclass__(**options)
        cls.flags, cls.aliases = dict(FLAGS), dict(ALIASES)
        for base in reversed([base for base in cls.__mro__ if issubclass(base, Command)]):
            for name, trait in vars(base).items():
                if not isinstance(trait, TraitType) or not trait.metadata.get("config"):
                    continue
                option = trait.metadata.get("option", name.replace("_", "-"))
                if option and isinstance(trait, Bool):
                    cls.flags[option] = ({cls.__name__: {name: True}}, trait.help)
                elif option:
                    cls.aliases[option] = f"{cls.__name__}.{name}"

    def migrate_config(self) -> None:
        """Do nothing; Jupyter's migration does not apply."""

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Load only ``--config``, and fail on any error. Never read the current directory; sandboxes may write it."""
        if self.config_file:
            self.raise_config_file_errors = True
            path = Path(self.config_file)
            try:
                if path.suffix not in (".py", ".json"):
                    raise ValueError("its name must end with .py or .json")
                path.open("rb").close()  # traitlets ignores a missing file
                super().load_config_file(suppress_errors=False)
            except Exception as error:
                reason = error.strerror if isinstance(error, OSError) else repr(error)
                self.complain(f"cannot read the configuration file {self.config_file}: {reason}")
                self.exit(FAULT)

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """Parse the options. An unknown or invalid one is an error; traitlets would only warn."""
        words = list(sys.argv[1:] if argv is None else argv)
        if words[:1] and words[0] not in (*self.subcommands, "help"):
            try:
                self._check_options(words)
            except UsageError as error:
                self.complain(error)
                self.exit(USAGE)
        super().parse_command_line(words)

    def _check_options(self, words: Sequence[str]) -> None:
        from jupyter_agentbox.policy.profiles import did_you_mean

        rest = iter(words)
        for word in rest:
            if word == "--":
                return
            if not word.startswith("-") or word == "-":
                continue
            name, equals, value = word.lstrip("-").partition("=")
            option = word.partition("=")[0]
            if name in self.flags or name in _ALWAYS:
                if equals:
                    raise UsageError(f"{option} takes no value, got {value!r}; see --help")
                continue
            if name not in self.aliases and "." not in name:
                known = [f"--{one}" for one in (*self.flags, *self.aliases, "help")]
                raise UsageError(f"unknown option {option}{did_you_mean(option, known)}; see --help")
            if not equals:
                value = next(rest, "--")
                if value.startswith("-") and value != "-":
                    raise UsageError(f"{option} needs a value; see --help")
            self._check_value(option, str(self.aliases.get(name, name)), value)

    def _check_value(self, option: str, target: str, value: str) -> None:
        from jupyter_agentbox.policy.profiles import did_you_mean

        owner, _, name = target.rpartition(".")
        if owner not in (cls.__name__ for cls in type(self).__mro__):
            known = {*_SETTINGS, *(entry.attr for entry in entry_points(group="jupyter_agentbox.runtimes"))}
            if owner not in known and not self.takes_all_settings:
                raise UsageError(f"unknown settings class {owner}{did_you_mean(owner, known)}; see --help-all")
            return
        traits = type(self).class_traits(config=True)
        if name not in traits:
            raise UsageError(f"unknown option {option}{did_you_mean(name, traits)}; see --help-all")
        trait: Any = traits[name]
        if isinstance(trait, List):
            return
        try:
            trait._validate(self, trait.from_string(value))
        except (TraitError, ValueError, TypeError):
            raise UsageError(f"{option} must be {_describe(trait)}, got {value!r}; see --help") from None

    def start(self) -> None:
        """Run the command and exit with its status."""
        super().start()
        try:
            self._check_arguments()
            status = self.run()
            sys.stdout.flush()
        except AgentboxError as error:
            self.complain(error)
            status = USAGE if isinstance(error, UsageError) else FAULT
        except KeyboardInterrupt:
            status = INTERRUPTED
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard what is flushed at exit
            status = BROKEN_PIPE
        except OSError as error:
            if self.log.isEnabledFor(logging.DEBUG):
                raise
            self.complain(f"{error.filename}: {error.strerror}" if error.filename else error)
            status = FAULT
        self.exit(status)

    def arguments(self) -> Sequence[str]:
        """Return the positional arguments."""
        return self.extra_args

    def _check_arguments(self) -> None:
        given, words = self.arguments(), self.argument.split()
        least = sum(not word.startswith("[") for word in words)
        if least <= len(given) and ("..." in self.argument or len(given) <= len(words)):
            return
        if not words:
            raise UsageError(f"this command takes no arguments, got {' '.join(given)!r}; see --help")
        raise UsageError(self.wanted or f"this command takes {self.argument}, got {len(given)} arguments; see --help")

    def run(self) -> int:
        """Run the command and return the exit status."""
        raise NotImplementedError

    def complain(self, error: Exception | str) -> None:
        """Print an error and the setting that changes it. Text chosen by code in a sandbox is made printable."""
        text, setting = str(error), getattr(error, "setting", None)
        if setting and setting not in text:
            text += f" (setting: {setting})"
        print(f"{self.name}: " + "\n".join(map(printable, text.splitlines())), file=sys.stderr)

    def emit_help(self, classes: bool = False) -> Iterator[str]:  # type: ignore[override]
        """Yield the lines of the help; with `classes`, also of all settings."""
        width = min(100, shutil.get_terminal_size().columns)
        yield f"Usage: {self.name} [OPTIONS]{' ' if self.argument else ''}{self.argument}"
        yield ""
        yield from self.emit_description()
        yield from self.emit_subcommands_help()
        yield "Options:"
        names = sorted(
            (*self.flags, *self.aliases), key=lambda name: name in {**FLAGS, **ALIASES}
        )  # shared options last
        rows = [self._describe_option(name) for name in names]
        rows.append(("--help", "Print this help. --help-all also lists settings, such as --Policy.NAME=VALUE."))
        yield from _columns(rows, width)
        yield ""
        if self.examples:
            yield "Examples:"
            yield textwrap.indent(str(self.examples).strip(), "  ")
            yield ""
        if classes:
            from jupyter_agentbox.policy.policy import Policy

            yield Policy.class_get_help()

    def _describe_option(self, name: str) -> tuple[str, str]:
        if name in self.flags:
            return f"--{name}", str(self.flags[name][1])
        trait_name = str(self.aliases[name]).rpartition(".")[2]
        word = (trait_name if len(name) == 1 else name).upper().replace("-", "_")
        option = f"-{name} {word}" if len(name) == 1 else f"--{name} {word}"
        if name == "config":
            return option, "Read this .py or .json file in addition to those in Jupyter's directories."
        if name == "log-level":
            return option, "DEBUG, INFO, WARN, ERROR or CRITICAL."
        trait: Any = type(self).class_traits()[trait_name]
        default = trait.default_value
        shown = f" Default: {default:g}." if isinstance(default, (int, float)) and default else ""
        return option, f"{trait.help}{shown}"

    def emit_subcommands_help(self) -> Iterator[str]:  # type: ignore[override]
        """Yield nothing; a command with subcommands lists them in its description."""
        yield from ()


class CommandGroup(Command):
    """A command that only has subcommands."""

    argument = "COMMAND"
    #: Headings of the help, by the first command below each.
    headings: ClassVar[dict[str, str]] = {}

    def _check_arguments(self) -> None:
        return

    def run(self) -> int:
        """Report a missing or unknown command."""
        from jupyter_agentbox.policy.profiles import did_you_mean

        if not self.extra_args:
            self.print_help()
            return USAGE
        word = self.extra_args[0]
        raise UsageError(f"unknown command {printable(word)!r}{did_you_mean(word, self.subcommands)}; see --help")

    def emit_subcommands_help(self) -> Iterator[str]:  # type: ignore[override]
        """Yield the commands and their descriptions."""
        width = max(map(len, self.subcommands))
        headings = self.headings or {next(iter(self.subcommands)): "Commands"}
        for name, (_, text) in self.subcommands.items():
            if name in headings:
                yield from ("",) if name != next(iter(self.subcommands)) else ()
                yield f"{headings[name]}:"
            yield f"  {name:{width}}  {text}"
        yield ""
        yield f"`{self.name} COMMAND --help` describes a command."
        yield ""


class ProgramCommand(Command):
    """Command whose last arguments are a program and the program's own options.

    Options of the command come before the first argument. :attr:`rest` holds everything after them.
    """

    #: Number of arguments before the program.
    own_count: ClassVar[int] = 0
    rest: list[str]

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """Parse options up to the first argument."""
        words = list(sys.argv[1:] if argv is None else argv)
        flags = {*self.flags, *_ALWAYS}
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

    def arguments(self) -> Sequence[str]:
        """Return the positional arguments, including the program."""
        return self.rest


def _describe(trait: Any) -> str:
    """Describe the values of an option."""
    if not isinstance(trait, (Int, Float)):
        return str(trait.info())
    kind = "a whole number" if isinstance(trait, Int) else "a number"
    low, high = trait.min, trait.max
    if low in (None, float("-inf")):
        return kind
    return f"{kind} from {low:g} to {high:g}" if high not in (None, float("inf")) else f"{kind} of at least {low:g}"


def _columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield rows of an option and its wrapped description."""
    left = max(len(option) for option, _ in rows) + 4
    for option, text in rows:
        yield from textwrap.wrap(
            text, max(width, left + 30), initial_indent=f"  {option}".ljust(left), subsequent_indent=" " * left
        )


def write_table(rows: list[tuple[str, ...]]) -> None:
    """Print rows in columns; the first row is the heading."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def write_out(data: bytes, descriptor: int = 1) -> None:
    """Write all bytes. Raises BrokenPipeError if the reader has closed the pipe."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Await `work` and return its status, or 128 + n if SIGHUP, SIGINT or SIGTERM (n) cancels it."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    ended_by: list[int] = []

    def end(number: int) -> None:
        if not ended_by:  # further signals must not interrupt the cleanup
            ended_by.append(number)
            task.cancel()

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        return 128 + ended_by[0] if ended_by else FAULT


def read_input(limit: int = MAX_INPUT) -> bytes:
    """Read standard input to its end. Raises TooLarge."""
    data = sys.stdin.buffer.read(limit + 1)
    if len(data) > limit:
        raise TooLarge(f"standard input is larger than {limit} bytes", field="stdin")
    return data


def format_age(seconds: float) -> str:
    """Format a duration: ``42 s``, ``5 min``, ``3 h``, ``2 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def printable(text: str) -> str:
    """Return the text with characters replaced that a terminal could interpret."""
    return "".join(char if char.isprintable() else "?" for char in text)
