"""What all commands of ``jupyter agentbox`` share: options, arguments, help, errors and the exit status."""

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
from traitlets import Float, Int, List, TraitError

from jupyter_agentbox import __version__
from jupyter_agentbox.errors import AgentboxError, TooLarge

ALIASES = {name: base_aliases[name] for name in ("config", "log-level")}
FLAGS = {"debug": (base_flags["debug"][0], "Log all there is to tell.")}
#: Bytes of a program's input, which is read before it starts.
MAX_INPUT = 32 * 1024 * 1024
#: Exit statuses: a fault; options or arguments that are none; after Ctrl-C; when nobody reads the output.
FAULT, USAGE, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
#: What settings may be given for on the command line, beside runtimes; a name that is none of these is a slip.
_SETTINGS = ("Policy", "Application", "JupyterApp")
_ALWAYS = ("help", "help-all", "version", "h", "V")


class UsageError(AgentboxError):
    """An option or argument that the command does not have, or cannot take so."""


class Command(JupyterApp):
    """What the commands share: options, arguments, help, errors and the exit status.

    Settings of files are read by :class:`~jupyter_agentbox.policy.policy.Policy`, as for kernels, so that a command
    sees what a kernel would; here only ``--config`` and the command line are.
    """

    version = __version__
    aliases = ALIASES
    flags = FLAGS
    #: The positional arguments, as help shows them: ``ID [PROCESS]``, ``ID...``. Their number is checked by it.
    argument: ClassVar[str] = ""
    #: What to say when there are too few of them, or too many.
    wanted: ClassVar[str] = ""
    #: Whether settings of any class are its own affair, as those of Jupyter's server.
    takes_all_settings: ClassVar[bool] = False

    def migrate_config(self) -> None:
        """Do nothing: what Jupyter's other commands do here has no part in this."""

    def load_config_file(self, suppress_errors: bool = True) -> None:  # type: ignore[override]
        """Load ``--config`` alone, strictly. Never from the current directory, where sandboxes may write."""
        if self.config_file:
            self.raise_config_file_errors = True
            path = Path(self.config_file)
            try:
                if path.suffix not in (".py", ".json"):
                    raise ValueError("its name ends neither with .py nor with .json")
                path.open("rb").close()  # one that is missing would be passed over
                super().load_config_file(suppress_errors=False)
            except Exception as error:
                reason = error.strerror if isinstance(error, OSError) else repr(error)
                self.complain(f"the configuration file {self.config_file} can't be read: {reason}")
                self.exit(FAULT)

    def parse_command_line(self, argv: list[str] | None = None) -> None:
        """Read the options. One that does not exist is an error: half of what was asked for is never done."""
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
                    raise UsageError(f"{option} takes no value, and got {value!r}; see --help")
                continue
            if name not in self.aliases and "." not in name:
                known = [f"--{one}" for one in (*self.flags, *self.aliases, "help")]
                raise UsageError(f"there is no option {option}{did_you_mean(option, known)}; see --help")
            if not equals:
                value = next(rest, "--")
                if value.startswith("-") and value != "-":
                    raise UsageError(f"{option} needs a value; see --help")
            self._check_value(option, self._target(name), value)

    def _target(self, name: str) -> str:
        """Return the setting, ``Class.name``, that an option stands for."""
        target = self.aliases.get(name, name)
        return target if isinstance(target, str) else str(target[0])

    def _check_value(self, option: str, target: str, value: str) -> None:
        from jupyter_agentbox.policy.profiles import did_you_mean

        owner, _, name = target.rpartition(".")
        if owner not in (cls.__name__ for cls in type(self).__mro__):
            known = {*_SETTINGS, *(entry.attr for entry in entry_points(group="jupyter_agentbox.runtimes"))}
            if owner not in known and not self.takes_all_settings:
                raise UsageError(f"there are no settings {owner}{did_you_mean(owner, known)}; see --help-all")
            return
        traits = type(self).class_traits(config=True)
        if name not in traits:
            raise UsageError(f"there is no option {option}{did_you_mean(name, traits)}; see --help-all")
        trait: Any = traits[name]
        if isinstance(trait, List):
            return
        try:
            trait._validate(self, trait.from_string(value))
        except (TraitError, ValueError, TypeError):
            raise UsageError(f"{option} is {value!r}, and takes {_describe(trait)}; see --help") from None

    def start(self) -> None:
        """Run, and exit with the command's status."""
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
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes nowhere
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
            raise UsageError(f"this command takes no argument, and got {' '.join(given)!r}; see --help")
        raise UsageError(self.wanted or f"this command takes {self.argument}, and got {len(given)} of it; see --help")

    def run(self) -> int:
        """Do the work and return the exit status."""
        raise NotImplementedError

    def complain(self, error: Exception | str) -> None:
        """Say what is wrong, and the setting that changes it. The sentence may hold what code in a sandbox chose."""
        text, setting = str(error), getattr(error, "setting", None)
        if setting and setting not in text:
            text += f" (setting: {setting})"
        print(f"{self.name}: " + "\n".join(map(printable, text.splitlines())), file=sys.stderr)

    def emit_help(self, classes: bool = False) -> Iterator[str]:  # type: ignore[override]
        """Yield the lines of the help; with `classes` all settings that options can be given for."""
        width = min(100, shutil.get_terminal_size().columns)
        yield f"Usage: {self.name} [OPTIONS]{' ' if self.argument else ''}{self.argument}"
        yield ""
        yield from self.emit_description()
        yield from self.emit_subcommands_help()
        yield "Options:"
        names = sorted((*self.flags, *self.aliases), key=lambda name: name in {**FLAGS, **ALIASES})  # ours at the end
        rows = [self._describe_option(name) for name in names]
        rows.append(("--help", "Show this; --help-all the settings as well, each an option --Policy.NAME=VALUE."))
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
        trait_name = self._target(name).rpartition(".")[2]
        word = (trait_name if len(name) == 1 else name).upper().replace("-", "_")
        option = f"-{name} {word}" if len(name) == 1 else f"--{name} {word}"
        if name == "config":
            return option, "A file of settings, .py or .json, beside those in Jupyter's directories."
        if name == "log-level":
            return option, "DEBUG, INFO, WARN, ERROR or CRITICAL."
        trait: Any = type(self).class_traits()[trait_name]
        default = trait.default_value
        shown = f" ({default:g} unless given)" if isinstance(default, (int, float)) and default else ""
        return option, f"{trait.help}{shown}"

    def emit_subcommands_help(self) -> Iterator[str]:  # type: ignore[override]
        """Yield nothing: a command that has others beside what it does tells of them in its description."""
        yield from ()


class CommandGroup(Command):
    """A command that is nothing but its subcommands."""

    argument = "COMMAND"
    #: Headings of the help, each by the first command below it.
    headings: ClassVar[dict[str, str]] = {}

    def _check_arguments(self) -> None:
        return

    def run(self) -> int:
        """Say what there is: a command was missing or is unknown."""
        from jupyter_agentbox.policy.profiles import did_you_mean

        if not self.extra_args:
            self.print_help()
            return USAGE
        word = self.extra_args[0]
        raise UsageError(
            f"there is no command {printable(word)!r}{did_you_mean(word, self.subcommands)}; --help lists them"
        )

    def emit_subcommands_help(self) -> Iterator[str]:  # type: ignore[override]
        """Yield the commands, each with what it does."""
        width = max(map(len, self.subcommands))
        headings = self.headings or {next(iter(self.subcommands)): "Commands"}
        for name, (_, text) in self.subcommands.items():
            if name in headings:
                yield from ("",) if name != next(iter(self.subcommands)) else ()
                yield f"{headings[name]}:"
            yield f"  {name:{width}}  {text}"
        yield ""
        yield f"`{self.name} COMMAND --help` tells of each."
        yield ""


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
        """Return the positional arguments, the program among them."""
        return self.rest


def _describe(trait: Any) -> str:
    """Write what an option takes, for a person."""
    if not isinstance(trait, (Int, Float)):
        return str(trait.info())
    kind = "a whole number" if isinstance(trait, Int) else "a number"
    low, high = trait.min, trait.max
    if low in (None, float("-inf")):
        return kind
    return f"{kind} from {low:g} to {high:g}" if high not in (None, float("inf")) else f"{kind} from {low:g} on"


def _columns(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield rows of an option and its text, which is broken into lines."""
    left = max(len(option) for option, _ in rows) + 4
    for option, text in rows:
        yield from textwrap.wrap(
            text, max(width, left + 30), initial_indent=f"  {option}".ljust(left), subsequent_indent=" " * left
        )


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


async def until_signal(work: Coroutine[Any, Any, int]) -> int:
    """Await `work`, and return its status; 128 + n if signal n, one that ends programs, has cancelled it first."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    ended_by: list[int] = []

    def end(number: int) -> None:
        if not ended_by:  # the first alone: what is being cleared up goes on
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
