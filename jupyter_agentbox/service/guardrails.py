"""The command blocklist: keeps a well-meaning agent from commands that its owner does not want run.

It is a guard rail and no boundary: whoever may run anything can write the same in other words. What must not happen
is prevented by the sandbox itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jupyter_agentbox.errors import PolicyRefused

#: What ends one command of a shell line and begins another.
_BREAKS = re.compile(r"[;&|\n(){}`]|\$\(")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=\S*")
#: Words that run the command behind them.
_RUNNERS = frozenset(
    {"sudo", "exec", "nohup", "time", "env", "command", "nice", "setsid", "xargs", "then", "do", "else"}
)


def check_command(command: str | Sequence[str], patterns: Iterable[str], setting: str | None = None) -> None:
    """Refuse a command that a pattern names.

    Parameters
    ----------
    command : str or sequence of str
        A line for the shell, or a program and its arguments.
    patterns : iterable of str
        Shell patterns for whole commands. One without a space stands for a program, whatever its arguments.
    setting : str, optional
        Where the patterns come from.

    Raises
    ------
    PolicyRefused
        The sentence names the pattern.
    """
    patterns = tuple(patterns)
    if not patterns:
        return
    for words in _commands(command):
        line = " ".join(words)
        program = words[0].rpartition("/")[2]
        for pattern in patterns:
            subject = " ".join((program, *words[1:])) if " " in pattern else program
            if fnmatchcase(subject, pattern) or fnmatchcase(line, pattern):
                raise PolicyRefused(
                    f"the command {line[:200]!r} is blocked by the rule {pattern!r}", field="command", setting=setting
                )


def _commands(command: str | Sequence[str]) -> Iterable[list[str]]:
    """Return every command of a line, in words, and again without what only runs another command."""
    parts = _BREAKS.split(command) if isinstance(command, str) else [" ".join(command)]
    for part in parts:
        words = part.split()
        while words:
            yield words
            is_prefix = _ASSIGNMENT.fullmatch(words[0]) or words[0] in _RUNNERS
            words = words[1:] if is_prefix else []
