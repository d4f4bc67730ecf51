"""Keep the hosts that a person allowed and the folders that a person added, in two files of the state directory.

Policy says which hosts a person may allow (``Policy.user_may_allow``). A *rule* is one host that a person allowed: for
one kernel, for one notebook, or always for one profile. No sandbox can see the file, because none can see the state
directory. A rule has no effect on its own: ``Policy.with_consent`` applies only rules that policy still permits. The
same holds for folders, with ``Policy.user_may_add_folders`` and ``Policy.with_folders``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

import msgspec

from jupyter_agentbox.egress import rules
from jupyter_agentbox.errors import AgentboxError, Conflict, InvalidConfig, InvalidRequest
from jupyter_agentbox.linux import try_lock, write_atomically

log = logging.getLogger(__name__)

#: Maximum number of rules, and of those for kernels. A new rule for a kernel replaces the oldest, whose kernel has
#: usually ended.
MAX_RULES, MAX_KERNEL_RULES = 2000, 500
#: Seconds to wait for another process that changes the file.
LOCK_TIMEOUT = 5.0

Scope = Literal["kernel", "notebook", "always"]
FolderScope = Literal["notebook", "always"]


class Rule(msgspec.Struct, frozen=True):
    """A host that a person allowed.

    Parameters
    ----------
    host : str
        A host pattern.
    scope : str
        ``kernel``, ``notebook`` or ``always``.
    target : str
        The id of the kernel, the path of the notebook on the host, or the name of the profile.
    by : str
        Who allowed it.
    added : float
        When, in seconds since the epoch.
    """

    host: str
    scope: Scope
    target: str
    by: str = ""
    added: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the rule."""
        return self.scope, self.target, self.host


class FolderRule(msgspec.Struct, frozen=True):
    """A host folder that a person added, to be mounted read-only.

    Parameters
    ----------
    source : str
        Absolute path on the host, without links.
    scope : str
        ``notebook`` or ``always``.
    target : str
        The path of the notebook on the host, or the name of the profile.
    by : str
        Who added it.
    added : float
        When, in seconds since the epoch.
    """

    source: str
    scope: FolderScope
    target: str
    by: str = ""
    added: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the rule."""
        return self.scope, self.target, self.source


R = TypeVar("R", Rule, FolderRule)
Stamp = tuple[int, int, int] | None


class _RuleFile(Generic[R]):
    """Rules of one kind in one file of a state directory. May be used from any thread and by several processes.

    Parameters
    ----------
    state_path : Path
        The state directory.
    """

    file_name: ClassVar[str]
    #: What the rules allow, for messages.
    subject: ClassVar[str]
    kind: type[R]

    def __init__(self, state_path: Path) -> None:
        self.path = state_path / self.file_name
        self._read: tuple[Stamp, tuple[R, ...]] = (None, ())

    def check(self, rule: R) -> None:
        """Check the values of a rule. Raises AgentboxError."""

    def make_room(self, found: tuple[R, ...], rule: R) -> tuple[R, ...]:
        """Return the existing rules to keep when `rule` is added."""
        return found

    def stamp(self) -> Stamp:
        """Return a value that differs after each change of the file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def list(self) -> tuple[R, ...]:
        """Return all rules, oldest first. If the file cannot be read, log an error and return none."""
        try:
            return self._load()
        except AgentboxError as error:
            log.error("no %s is allowed by a person's consent: %s", self.subject, error)
            return ()

    def _load(self) -> tuple[R, ...]:
        stamp = self.stamp()
        if stamp is None:
            return ()
        if self._read[0] != stamp:
            try:
                found = msgspec.json.decode(self.path.read_bytes(), type=tuple[self.kind, ...])  # type: ignore[name-defined]
                for rule in found:
                    self.check(rule)
            except (OSError, ValueError, RecursionError, AgentboxError) as error:
                raise InvalidConfig(f"cannot read {self.path}: {error}. Correct or delete the file") from None
            self._read = stamp, found
        return self._read[1]

    def add(self, rule: R) -> None:
        """Add a rule, unless it exists. Raises InvalidConfig, Conflict."""
        self.check(rule)
        rule = msgspec.structs.replace(rule, added=rule.added or time.time())

        def change(found: tuple[R, ...]) -> tuple[R, ...]:
            if rule.key in {item.key for item in found}:
                return found
            if len(found) >= MAX_RULES:
                raise Conflict(f"{MAX_RULES} {self.subject}s are allowed already, the maximum; revoke some first")
            return self.make_room(found, rule) + (rule,)  # noqa: RUF005 - mypy cannot tell the kind of a starred one

        self._change(change)

    def remove(self, is_meant: Callable[[R], bool]) -> tuple[R, ...]:
        """Remove the rules for which `is_meant` returns true, and return them. Raises InvalidConfig, Conflict."""
        removed: list[R] = []

        def change(found: tuple[R, ...]) -> tuple[R, ...]:
            removed.extend(item for item in found if is_meant(item))
            return tuple(item for item in found if not is_meant(item))

        self._change(change)
        return tuple(removed)

    def _change(self, change: Callable[[tuple[R, ...]], tuple[R, ...]]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with try_lock(self.path.with_suffix(".lock"), timeout=LOCK_TIMEOUT) as is_held:
            if not is_held:
                raise Conflict(f"another process is changing {self.path}; try again")
            before = self._load()
            after = change(before)
            if after != before:
                encoded = msgspec.json.format(msgspec.json.encode(after), indent=2)
                write_atomically(self.path, encoded + b"\n", is_durable=True)


class HostRules(_RuleFile[Rule]):
    """The hosts that a person allowed."""

    file_name = "allowed_hosts.json"
    subject = "host"
    kind = Rule

    def check(self, rule: Rule) -> None:
        """Check that the host is a valid pattern. Raises AgentboxError."""
        rules.parse_pattern(rule.host)

    def make_room(self, found: tuple[Rule, ...], rule: Rule) -> tuple[Rule, ...]:
        """Drop the oldest rules for kernels if there are too many."""
        kernels = [item for item in found if item.scope == "kernel"]
        oldest = set(kernels[: max(0, len(kernels) + 1 - MAX_KERNEL_RULES)]) if rule.scope == "kernel" else set()
        return tuple(item for item in found if item not in oldest)

    def hosts(self, *, kernel: str, notebook: str, profile: str | None) -> tuple[str, ...]:
        """Return the hosts that are allowed for a kernel, for its notebook, and always for a profile.

        An empty or missing value matches no rule.
        """
        wanted = {("kernel", kernel), ("notebook", notebook), ("always", profile)}
        return tuple(
            dict.fromkeys(rule.host for rule in self.list() if rule.target and (rule.scope, rule.target) in wanted)
        )


class FolderRules(_RuleFile[FolderRule]):
    """The folders that a person added to the sandboxes of notebooks."""

    file_name = "added_folders.json"
    subject = "folder"
    kind = FolderRule

    def check(self, rule: FolderRule) -> None:
        """Check that the folder is a plain absolute path. Raises InvalidRequest."""
        if not os.path.isabs(rule.source) or os.path.normpath(rule.source) != rule.source:
            raise InvalidRequest(f"{rule.source!r} must be a plain absolute path", field="source")

    def of(self, *, notebook: str, profile: str) -> tuple[FolderRule, ...]:
        """Return the rules for a notebook and for a profile. An empty value matches no rule."""
        wanted = {("notebook", notebook), ("always", profile)}
        return tuple(rule for rule in self.list() if rule.target and (rule.scope, rule.target) in wanted)


def notebook_path(path: str) -> str:
    """Return a notebook's path in the form in which rules name it. Follows no link."""
    return os.path.abspath(os.path.expanduser(path)) if path else ""
