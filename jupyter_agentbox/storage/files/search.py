"""Find files by name and lines by pattern, within a time limit that no tree and no pattern can exceed.

Names are matched by a state machine over the pattern's parts, which skips branches that cannot match. Lines are matched
by Python's ``re`` in a separate process (``storage.files.grep_worker``), because some patterns take forever, and ``re``
would block every thread of the server meanwhile. This process gets descriptors of regular files that this module has
opened, one at a time, and is killed at the timeout. The result is what was found until then.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

from jupyter_agentbox.errors import AgentboxError, InvalidRequest, NotFound, RuntimeFailed
from jupyter_agentbox.models.file_entries import Match, Matches
from jupyter_agentbox.storage.trees import closing

from .paths import Parts, read_name, show, write_path
from .tree import Budget, Tree, open_child, open_found

#: Limits: bytes of one file, characters of one line, of a pattern and of an answer, and number of context lines.
MAX_FILE = 16 * 1024 * 1024
MAX_LINE = 4096
MAX_PATTERN = 1000
MAX_TEXT = 4 * 1024 * 1024
MAX_CONTEXT = 100
_MAX_ANSWER = 64 * 1024 * 1024
_WORKER = Path(__file__).with_name("grep_worker.py")


class Glob:
    """A shell pattern of a path: ``*``, ``?`` and ``[...]`` within one name, ``**`` for any number of directories.

    Names with a leading dot are not special. Bytes that are not UTF-8 are written as in paths.
    """

    def __init__(self, pattern: str, field: str = "pattern") -> None:
        if not pattern or len(pattern) > MAX_PATTERN or "\0" in pattern:
            raise InvalidRequest(f"the glob pattern must have 1 to {MAX_PATTERN} characters", field=field)
        try:
            names = [name for name in read_name(pattern).split("/") if name not in ("", ".")]
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the pattern contains a character that no file name can contain", field=field
            ) from None
        if pattern.startswith("/") or ".." in names or not names:
            raise InvalidRequest(f"the glob pattern {show(pattern)} must be relative and without '..'", field=field)
        self._parts = [None if name == "**" else re.compile(fnmatch.translate(name)) for name in names]

    def states(self, parts: Parts) -> frozenset[int]:
        """Return the possible numbers of leading pattern parts that `parts` have matched."""
        states = self._skip({0})
        for name in parts:
            found = set()
            for state in states:
                if state < len(self._parts):
                    part = self._parts[state]
                    if part is None:
                        found.add(state)
                    elif part.match(name):
                        found.add(state + 1)
            states = self._skip(found)
        return frozenset(states)

    def _skip(self, states: set[int]) -> set[int]:
        """Add the states that are reached if ``**`` matches no directory."""
        for state in sorted(states):
            while state < len(self._parts) and self._parts[state] is None:
                state += 1
                states.add(state)
        return states

    def matches(self, parts: Parts) -> bool:
        """Return whether the whole path matches. ``**`` at the end matches everything beneath."""
        return len(self._parts) in self.states(parts)

    def may_match_beneath(self, parts: Parts) -> bool:
        """Return whether an entry beneath a directory can match."""
        return any(state < len(self._parts) for state in self.states(parts))


class _Worker:
    """The process that matches lines."""

    def __init__(self, request: dict[str, object]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", str(_WORKER), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                self._socket.close()
                raise
        self._request = json.dumps(request).encode()

    def compile(self, timeout: float) -> None:
        """Compile the pattern in the process. Raises InvalidRequest."""
        self._socket.settimeout(max(0.001, timeout))
        try:
            self._socket.sendall(struct.pack("!I", len(self._request)) + self._request)
            error = self._receive().get("error")
        except (EOFError, OSError):
            raise InvalidRequest("the pattern is too complex to be compiled in time", field="pattern") from None
        if error:
            raise InvalidRequest(f"the pattern is not a valid regular expression: {show(str(error))}", field="pattern")

    def search(self, fd: int, timeout: float) -> dict[str, object]:
        """Search one open file. Raises TimeoutError."""
        self._socket.settimeout(max(0.001, timeout))
        socket.send_fds(self._socket, [b"f"], [fd])
        return self._receive()

    def _receive(self) -> dict[str, object]:
        (size,) = struct.unpack("!I", self._read(4))
        if size > _MAX_ANSWER:
            raise RuntimeFailed("the search process returned too much data")
        answer: dict[str, object] = json.loads(self._read(size))
        return answer

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(min(size - len(data), 1 << 20))
            if not more:
                raise EOFError
            data += more
        return data

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


def grep(
    tree: Tree,
    top: Parts,
    pattern: str,
    *,
    glob: str | None,
    is_literal: bool,
    ignore_case: bool,
    before: int,
    after: int,
    limit: int,
    budget: Budget,
) -> Matches:
    """Search one file, or all regular files beneath a directory; see :meth:`FolderView.grep`."""
    if not pattern or len(pattern) > MAX_PATTERN:
        raise InvalidRequest(f"the pattern must have 1 to {MAX_PATTERN} characters", field="pattern")
    for name, value in (("before", before), ("after", after)):
        if not 0 <= value <= MAX_CONTEXT:
            raise InvalidRequest(f"{name} must be 0 to {MAX_CONTEXT} lines", field=name)
    wanted = Glob(glob if "/" in glob else f"**/{glob}", "glob") if glob else None
    request: dict[str, object] = {
        "pattern": pattern,
        "is_literal": is_literal,
        "ignore_case": ignore_case,
        "before": before,
        "after": after,
        "limit": limit + 1,
        "max_file": MAX_FILE,
        "max_line": MAX_LINE,
        "max_text": MAX_TEXT,
        "seconds": int(budget.remaining_seconds()) + 2,
    }
    opened, real = tree.resolve(top, follow=True)
    with closing(opened) as fd:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        file = None if is_directory else open_found(fd, write_path(top))
        worker = _Worker(request)
        try:
            worker.compile(budget.remaining_seconds())
            search = _Search(worker, limit, budget)
            if file is None:
                _search_beneath(tree.beneath(fd, real), top, wanted, search, budget)
            else:
                search.file(file, write_path(top))
        finally:
            worker.close()
            if file is not None:
                os.close(file)
    return Matches(search.matches, search.files, search.skipped, budget.reason is not None, budget.reason)


def _search_beneath(beneath: Tree, top: Parts, wanted: Glob | None, search: _Search, budget: Budget) -> None:
    try:
        for found in beneath.walk(budget, enter=wanted.may_match_beneath if wanted else None):
            if search.is_done:
                return
            if not stat.S_ISREG(found.status.st_mode) or (wanted and not wanted.matches(found.parts)):
                continue
            path = write_path(top + found.parts)
            try:
                file = open_child(found.directory, found.name, path)
            except AgentboxError as error:
                search.skipped += not isinstance(error, NotFound)
                continue
            with closing(file):
                search.file(file, path)
    finally:
        beneath.close()


class _Search:
    """The results of one grep so far."""

    def __init__(self, worker: _Worker, limit: int, budget: Budget) -> None:
        self._worker, self._limit, self._budget = worker, limit, budget
        self.matches: list[Match] = []
        self.files = self.skipped = 0
        self.is_done = False

    def file(self, fd: int, path: str) -> None:
        try:
            answer = self._worker.search(fd, self._budget.remaining_seconds())
        except TimeoutError:
            self.is_done = True
            self._budget.cut(f"stopped at {show(path)}: the search timed out")
            return
        except (EOFError, OSError):
            self.is_done = True
            self._budget.cut(f"stopped at {show(path)}: the pattern took too much time or memory")
            return
        if answer.get("is_binary"):
            self.skipped += 1
            return
        self.files += 1
        if answer.get("is_cut"):
            self._budget.cut(f"only the first {MAX_FILE} bytes of {show(path)} were searched")
        found = answer["matches"]
        assert isinstance(found, list)
        for line, text, before, after in found:
            if len(self.matches) >= self._limit:
                self.is_done = True
                self._budget.cut(f"stopped after {self._limit} matches")
                return
            self.matches.append(Match(path, line, text, before, after))
        if answer.get("is_full"):
            self.is_done = True
            self._budget.cut(f"stopped after {MAX_TEXT} characters of text")
