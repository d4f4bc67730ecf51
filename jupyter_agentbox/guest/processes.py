"""Start, signal and reap programs inside.

Each program is marked by its own supplementary group. Code that runs as the user can neither drop nor acquire one, so
the mark finds all descendants, whatever sessions and process groups they create and whichever process adopts them. Code
that runs as uid 0 inside can drop its mark. It is then found through its parent, as long as the parent lives.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time

from .framing import MessageReader, ProtocolError, load_json
from .loop import CHUNK, Loop, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

#: Seconds for which to look for processes that fork faster than they are found.
SEARCH_TIMEOUT = 1.0
#: First of the marking groups, far above those that images use.
_FIRST_MARK = 0x40000000
_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGXFSZ)


class StartError(Exception):
    """The program could not be started; the message gives the reason.

    Parameters
    ----------
    message : str
    field : str
        Invalid input: ``workdir``, or ``argv`` for everything else.
    """

    def __init__(self, message: str, field: str = "argv") -> None:
        super().__init__(message)
        self.field = field


class Process:
    """Child process, leader of its own session and process group."""

    def __init__(self, pid: int, on_exit: Callable[[int, int], object]) -> None:
        self.pid = pid
        self.is_running = True
        self.on_exit = on_exit

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self.is_running:
            try:
                os.killpg(self.pid, number)
            except (OSError, OverflowError):
                pass


class Processes:
    """All child processes, including the orphans that PID 1 adopts.

    Parameters
    ----------
    loop : Loop
    uid, gid : int
        User and group of user code.

    Attributes
    ----------
    has_started : bool
        Whether a program was ever started.
    is_ending : bool
        Whether the sandbox ends, and all programs with it.
    is_full : bool
        Whether programs may not write to files; see :mod:`.disk`.
    """

    def __init__(self, loop: Loop, uid: int, gid: int) -> None:
        self.has_started = False
        self.is_ending = False
        self.is_full = False
        self.uid = uid
        self.gid = gid
        self._running: dict[int, Process] = {}
        self._last_mark = _FIRST_MARK
        os.umask(0o022)
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        def wake() -> None:
            try:
                os.read(reader, 4096)
            except BlockingIOError:
                pass
            self.reap()

        loop.watch(reader, wake)

    def spawn(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        on_exit: Callable[[int, int], object],
        stdio: tuple[int, ...] | None = None,
        is_root: bool = False,
        files: dict[str, bytes] | None = None,
        *,
        mark: int,
        program: str | None = None,
        needs_cwd: bool = False,
        has_terminal: bool = False,
    ) -> Process:
        """Start a program.

        Parameters
        ----------
        argv, env, cwd
            Command, environment and working directory.
        on_exit : callable
            Called with exit code (128 + n after signal n) and signal (0 for none).
        stdio : tuple of int, optional
            Descriptors for 0, 1, 2 and more. Without them, input is empty and output goes to PID 1's own.
        is_root : bool
            Run as uid 0.
        files : dict
            Files to write first, as the user, mode 0600.
        mark : int
            Group that identifies the program and its descendants, from :meth:`new_mark`.
        program : str, optional
            Executable, if it is not ``argv[0]``.
        needs_cwd : bool
            Fail if ``cwd`` does not exist, instead of starting in ``/``.
        has_terminal : bool
            Make descriptor 0 its controlling terminal.

        Raises
        ------
        StartError
        """
        try:
            if has_terminal and stdio is not None:
                path = os.ttyname(stdio[0])  # a session leader acquires a terminal by opening it
                actions = [
                    (os.POSIX_SPAWN_OPEN, 0, path, os.O_RDWR, 0),
                    *((os.POSIX_SPAWN_DUP2, 0, fd) for fd in (1, 2)),
                ]
            elif stdio is not None:
                actions = [(os.POSIX_SPAWN_DUP2, source, fd) for fd, source in enumerate(stdio)]
            else:
                actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0)]
            field = "argv"
            try:
                self._take_ids(is_root, mark)
                for name, content in (files or {}).items():
                    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                        file.write(content)
                field = "workdir"
                try:
                    os.chdir(cwd)
                except OSError:
                    if needs_cwd:
                        raise
                field = "argv"
                path = _find(program or argv[0], env.get("PATH", os.defpath))
                os.seteuid(0)
                self.has_started = True
                with _file_size(0) if self.is_full else contextlib.nullcontext():
                    pid = os.posix_spawn(
                        path, argv, env, file_actions=actions, setsid=True, resetids=True, setsigdef=_DEFAULT_SIGNALS
                    )
            finally:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
                os.setgroups([])
                os.chdir("/")
        except OSError as error:
            raise StartError(f"{error.strerror}: {error.filename or argv[0]}", field) from None
        except ValueError as error:
            raise StartError(f"{error}: {argv[0]!r}", field) from None
        process = self._running[pid] = Process(pid, on_exit)
        return process

    def _take_ids(self, is_root: bool, mark: int) -> None:
        """Switch to the user's ids temporarily, so that files that the user may not open are not opened for it.

        The saved ids allow switching back, and the program starts with the real ids. It would be simpler to fork and
        drop privileges in the child, but that takes five times as long in gVisor, which copies the address space.
        During the switch, the user's programs can signal PID 1, and thereby end the sandbox, which ends them too.
        """
        uid, gid = (0, 0) if is_root else (self.uid, self.gid)
        os.setgroups([mark])
        os.setresgid(gid, gid, 0)
        os.setresuid(uid, uid, 0)

    @contextlib.contextmanager
    def as_user(self) -> Iterator[None]:
        """Run the block with the user's ids."""
        try:
            self._take_ids(False, self._last_mark)
            yield
        finally:
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.setgroups([])

    def reap(self) -> None:
        """Reap every child that has exited, including adopted ones."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._running.pop(pid, None)
            if process is not None:
                process.is_running = False
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                process.on_exit(128 + number if number else os.WEXITSTATUS(status), number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every process except PID 1."""
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            pass

    def new_mark(self) -> int:
        """Return a group that no process has yet."""
        self._last_mark += 1
        return self._last_mark

    def kill_marked(self, mark: int, first: Process | None) -> None:
        """Kill all processes with a mark.

        ``first``, their ancestor, is killed before all others, so that it ends by SIGKILL. The others are stopped
        before they are killed, so that they cannot fork during the search. The search is repeated until none is left,
        because the Linux kernel continues stopped processes when the exit of another one orphans their process group.
        """
        found: set[int] = set()
        deadline = time.monotonic() + SEARCH_TIMEOUT  # processes that escape the search harm only their own sandbox
        while (alive := _marked(mark, found)) and time.monotonic() < deadline:
            fresh = alive - found
            for pid in fresh:
                _kill(pid, signal.SIGKILL if first is not None and pid == first.pid else signal.SIGSTOP)
            found |= fresh
            for pid in () if fresh else alive:
                _kill(pid, signal.SIGKILL)
        for pid in alive:
            _kill(pid, signal.SIGKILL)

    def signal_session(self, mark: int, session: int, number: int) -> None:
        """Send a signal to every marked process of one session."""
        for pid in _marked(mark):
            try:
                if os.getsid(pid) == session:
                    os.kill(pid, number)
            except OSError:
                pass


@contextlib.contextmanager
def _file_size(limit: int) -> Iterator[None]:
    """Give programs that the block starts a limit on the size of files."""
    import resource  # needed only while the disk is full

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _find(program: str, path: str) -> str:
    """Return the path of a program, searched with the current effective ids."""
    if "/" in program:
        return program
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", program)
        if os.access(candidate, os.X_OK, effective_ids=True) and os.path.isfile(candidate):
            return candidate
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)


def _marked(mark: int, known: set[int] | frozenset[int] = frozenset()) -> set[int]:
    """Return the live processes that have a mark or are in ``known``, and their children."""
    wanted = b"%d" % mark
    found: set[int] = set()
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/status", "rb", buffering=0) as file:
                    status = file.read(4096)
            except OSError:
                continue
            # Use the last match of each field: the name comes first, and gVisor writes it as the process set it, with
            # newlines.
            if status.rpartition(b"\nState:\t")[2].startswith(b"Z"):
                continue
            parents[int(name)] = int(status.rpartition(b"\nPPid:")[2].split(b"\n", 1)[0])
            if wanted in status.rpartition(b"\nGroups:")[2].partition(b"\n")[0].split():
                found.add(int(name))
    found.update(parents.keys() & known)
    while fresh := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= fresh  # as uid 0 they can drop their mark, as `su` does
    return found


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        pass


def read_requests(stream: Stream, on_request: Callable[[dict[str, Any]], object]) -> None:
    """Pass each JSON message of a stream to ``on_request``."""
    reader = MessageReader(CHUNK)

    def feed(data: bytes) -> None:
        try:
            for parts in reader.feed(data):
                on_request(load_json(parts[0]))
        except (ProtocolError, IndexError):
            stream.reset("not a request")
        stream.consumed(len(data))

    stream.on_data = feed
