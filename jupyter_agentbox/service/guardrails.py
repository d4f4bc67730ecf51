"""Check commands against the blocklist, which keeps a well-meaning agent from commands that its owner does not want.

The blocklist is a guard rail, not a security boundary: code that can run any program can express the same command
differently. The sandbox itself prevents what must not happen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from jupyter_agentbox.errors import PolicyRefused

#: Ends one command of a shell line and begins another.
_BREAKS = re.compile(r"[;&|\n(){}`]|\$\(")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=\S*")
#: Words that run the command after them.
_RUNNERS = frozenset(
    {"sudo", "exec", "nohup", "time", "env", "command", "nice", "setsid", "xargs", "then", "do", "else"}
)


def check_command(command: str | Sequence[str], patterns: Iterable[str], setting: str | None = None) -> None:
    """Refuse a command that matches a pattern.

    Parameters
    ----------
    command : str or sequence of str
        A shell command line, or a program and its arguments.
    patterns : iterable of str
        Shell patterns for whole commands. A pattern without a space matches a program with any arguments.
    setting : str, optional
        Name of the setting that contains the patterns.

    Raises
    ------
    PolicyRefused
        The message names the pattern.
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
    """Yield every command of a line as a list of words, then again without each prefix that only runs a command."""
    parts = _BREAKS.split(command) if isinstance(command, str) else [" ".join(command)]
    for part in parts:
        words = part.split()
        while words:
            yield words
            is_prefix = _ASSIGNMENT.fullmatch(words[0]) or words[0] in _RUNNERS
            words = words[1:] if is_prefix else []
