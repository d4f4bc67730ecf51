"""Run a command as root of its own user namespace and mount namespace.

The server itself never forks Python code: it starts :mod:`.launcher` as a program. The mounts that the launcher makes
are never visible outside, and its privileges there do not extend outside. :mod:`.rootfs` plans what the launcher
mounts, and ``runtimes.runsc.runtime`` provides the command.
"""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import pwd
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import IO, Any

from jupyter_agentbox.errors import InvalidRequest, RuntimeFailed, RuntimeUnavailable
from jupyter_agentbox.linux import PACKAGE, find_python
from jupyter_agentbox.spec import USER_ID

from . import launcher

LAUNCHER = Path(__file__).with_name("launcher.py")
NAMES = PACKAGE / "names.py"
#: Program that runs the code it receives first. Run from its file, the launcher would be compiled again each time.
_LOADER = "import marshal, sys; exec(marshal.load(sys.stdin.buffer))"
#: A host id that owns nothing, for the guest's own processes if the server is root.
NOBODY = 65534
#: Inner id of a root server's own files, if the work files belong to another user.
SERVER_ID = 1001

#: Settings that can forbid user namespaces: a file of /proc/sys, the value that forbids them, and one that allows them.
_SYSCTLS = (
    ("user/max_user_namespaces", "0", "15000"),
    ("kernel/unprivileged_userns_clone", "0", "1"),  # Debian
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),  # Ubuntu: they can be made, but have no rights
)

#: Exit status of a launcher that failed.
LAUNCHER_FAILED = 111

#: Directory of the claim helper, beneath a sandbox's directory, and seconds that the helper may take to start.
HELPER, HELPER_TIMEOUT = "helper", 30.0

Entry = tuple[int, int, int]


@dataclass(frozen=True)
class IdMaps:
    """The mapping between ids inside and outside, as lines of ``uid_map`` and ``gid_map``.

    Parameters
    ----------
    uids, gids : tuple of (int, int, int)
        Inner id, outer id, count.
    user : int
        Inner id of user code.
    is_direct : bool
        Whether the server can write the maps itself; otherwise ``newuidmap`` does.
    may_set_groups : bool
        Whether supplementary groups can be dropped.
    """

    uids: tuple[Entry, ...]
    gids: tuple[Entry, ...]
    user: int
    is_direct: bool
    may_set_groups: bool


def make_id_maps(
    uid: int,
    gid: int,
    *,
    is_root: bool = False,
    owner: tuple[int, int] | None = None,
    spare: tuple[int, int] | None = None,
) -> IdMaps:
    """Choose the id maps of a sandbox.

    User code has the id that owns the work files, and is not root inside. The guest has an id that owns nothing. If no
    spare id is available for the guest, or user code must be root inside, inner root is the server's own id.

    Parameters
    ----------
    uid, gid : int
        Effective ids of the server.
    is_root : bool
        Whether user code must be uid 0 inside.
    owner : (int, int), optional
        Ids that own the workspace. They can differ from the server's ids only if the server is root.
    spare : (int, int), optional
        Host ids for inner root.
    """
    if is_root or spare is None:
        return IdMaps(((0, uid, 1),), ((0, gid, 1),), 0, True, uid == 0)
    user, group = owner if uid == 0 and owner and owner[0] not in (0, spare[0]) else (uid, gid)
    uids: list[Entry] = [(0, spare[0], 1), (USER_ID, user, 1)]
    gids: list[Entry] = [(0, spare[1], 1), (USER_ID, group, 1)]
    if user != uid:
        # Without the server's own id in the map, the launcher could not traverse the server's private directories.
        uids.append((SERVER_ID, uid, 1))
    if group != gid:
        gids.append((SERVER_ID, gid, 1))
    return IdMaps(tuple(uids), tuple(gids), USER_ID, uid == 0, True)


def find_spare_ids(uid: int, etc: Path = Path("/etc"), proc: Path = Path("/proc")) -> tuple[int, int] | None:
    """Return host ids that own nothing: a fixed one for root servers, the first subordinate ids for other users."""
    if uid == 0:
        is_mapped = all(_is_mapped(proc / "self" / name, NOBODY) for name in ("uid_map", "gid_map"))
        return (NOBODY, NOBODY) if is_mapped else None
    if not (shutil.which("newuidmap") and shutil.which("newgidmap")):
        return None
    first_uid, first_gid = _find_subordinate(etc / "subuid", uid), _find_subordinate(etc / "subgid", uid)
    return None if first_uid is None or first_gid is None else (first_uid, first_gid)


def find_forbidding(uid: int | None = None, proc: Path = Path("/proc")) -> list[str]:
    """Return the commands that change settings which forbid user namespaces to this user (or `uid`)."""
    is_root = (os.geteuid() if uid is None else uid) == 0
    found = []
    for name, forbidding, allowing in _SYSCTLS:
        try:
            value = (proc / "sys" / name).read_text().strip()
        except OSError:
            continue  # this system has no such setting
        if value == forbidding and not (is_root and "unprivileged" in name):
            found.append(f"sysctl -w {name.replace('/', '.')}={allowing}")
    return found


def namespace_remedy(uid: int | None = None, proc: Path = Path("/proc")) -> str:
    """Return the remedy that allows user namespaces to this user (or `uid`): commands, if the cause is known."""
    commands = " && ".join(find_forbidding(uid, proc))
    return commands or "in a container, allow unshare and mount in its seccomp and AppArmor profiles"


def _is_mapped(path: Path, number: int) -> bool:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return False
    ranges = [[int(part) for part in line.split()] for line in lines]
    return any(inner <= number < inner + count for inner, _, count in ranges)


def _find_subordinate(path: Path, uid: int) -> int | None:
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        names = {str(uid)}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if name in names and first.isdigit() and count.isdigit() and int(count) > 0:
            return int(first)
    return None


@dataclass(frozen=True)
class Launch:
    """A command and the environment to run it in.

    Parameters
    ----------
    command : sequence of str
        Absolute path of the program and its arguments.
    maps : IdMaps
        The id maps.
    stage : Path, optional
        An empty directory over which the planned view is mounted; None for no mounts.
    plan : list
        Steps from :func:`.rootfs.make_plan`.
    cgroups : sequence of str
        ``cgroup.procs`` files of the groups to run in.
    processors : int
        Number of processors to run on; 0 for all. gVisor shows that many inside.
    join : (int, int, str), optional
        If given, no command runs. Instead, the tree that the plan builds at ``claim/work`` is moved into the view of a
        running sandbox. The values are the pid and start time of a process of that sandbox, and the target path.
    """

    command: Sequence[str]
    maps: IdMaps
    stage: Path | None = None
    plan: list[tuple[Any, ...]] = field(default_factory=list)
    cgroups: Sequence[str] = ()
    processors: int = 0
    join: tuple[int, int, str] | None = None


def run(launch: Launch, log: Path, timeout: float) -> int:
    """Run a command to its end and append its output to ``log``.

    Returns
    -------
    int
        Exit status of the command.

    Raises
    ------
    RuntimeUnavailable
        The namespaces or the id maps are not available here.
    RuntimeFailed
        It took longer than ``timeout`` seconds and was killed.
    InvalidRequest
        The work folder cannot be used.
    """
    deadline = time.monotonic() + timeout
    config = {
        "command": list(launch.command),
        "stage": str(launch.stage) if launch.stage else "",
        "plan": launch.plan,
        "join": launch.join,
        "names": _compile_names() if launch.plan else None,
        "processors": launch.processors,
        "may_set_groups": launch.maps.may_set_groups,
        "env": {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    }
    # The marker lets a sweep find the process even if this process ends before the launcher becomes runsc.
    mark = [f"--root={launch.stage.with_name('state')}"] if launch.stage else []
    with _open_log(log) as output:
        process = subprocess.Popen(
            [find_python(), "-I", "-S", "-B", "-c", _LOADER, *mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={},
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )
    try:
        # Joining each group takes the kernel milliseconds, so it happens while the interpreter starts.
        _join_cgroups(process.pid, launch.cgroups)
        return _converse(process, _compile_launcher() + marshal.dumps(config), launch, deadline, log)
    except subprocess.TimeoutExpired:
        raise RuntimeFailed(f"{Path(launch.command[0]).name} did not answer within {timeout:g} s") from None
    finally:
        process.kill()  # does nothing if the process has ended and was reaped
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _open_log(log: Path) -> IO[bytes]:
    """Open a log for appending; only this user may enter its directory.

    runsc gives the log to the id that is root inside, and more has to be appended after that.
    """
    file = log.open("ab")
    with contextlib.suppress(PermissionError):  # the log belongs to that id already, and is writable
        os.fchmod(file.fileno(), 0o666)
    return file


@functools.lru_cache(maxsize=1)
def _compile_launcher() -> bytes:
    return marshal.dumps(compile(LAUNCHER.read_bytes(), str(LAUNCHER), "exec"))


@functools.lru_cache(maxsize=1)
def _compile_names() -> CodeType:
    """Compile the module that classifies names, which the launcher runs without the package."""
    return compile(NAMES.read_bytes(), str(NAMES), "exec")


def _join_cgroups(pid: int, cgroups: Sequence[str]) -> None:
    """Move a process that waits for its configuration into control groups."""
    try:
        for path in cgroups:
            with open(path, "w") as file:
                file.write(str(pid))
    except ProcessLookupError:
        pass  # it has ended, and the log contains its output
    except OSError as error:
        raise RuntimeFailed(f"cannot move the sandbox into its control group {path}: {error.strerror}") from error


def start_helper(directory: Path, log: Path) -> None:
    """Start a helper that waits to ``join`` a sandbox, so that a claim does not wait for a program to start."""
    folder = directory / HELPER
    folder.mkdir(mode=0o700)
    for name in ("ask", "answer"):
        os.mkfifo(folder / name, 0o600)
    command = [find_python(), "-I", "-S", "-B", str(LAUNCHER), f"--root={directory / 'state'}", str(folder)]
    with _open_log(log) as output:
        subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={}, cwd="/", start_new_session=True,
            timeout=HELPER_TIMEOUT, check=True,
        )  # fmt: skip


def ask_helper(launch: Launch, directory: Path, timeout: float) -> str | None:
    """Let a sandbox's helper carry out a ``join``.

    Returns
    -------
    str or None
        What failed, or an empty string on success; None if the helper no longer exists and nothing was done.
    """
    folder = directory / HELPER
    # As text, because another server, of another Python, may have started the helper.
    names = NAMES.read_text(encoding="utf-8")
    config = marshal.dumps({"join": launch.join, "stage": str(launch.stage), "plan": launch.plan, "names": names})
    try:
        answer = os.open(folder / "answer", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        try:
            with open(os.open(folder / "ask", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC), "wb", buffering=0) as ask:
                os.set_blocking(ask.fileno(), True)
                ask.write(config)
        except OSError:
            return None
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        result = os.read(answer, 4096).decode(errors="replace") if poll.poll(timeout * 1000) else "it did not answer"
        return "" if result == "ok" else result or "it ended"
    finally:
        os.close(answer)


def _converse(process: subprocess.Popen[bytes], config: bytes, launch: Launch, deadline: float, log: Path) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        view = memoryview(config)
        while view:
            view = view[process.stdin.write(view) or 0 :]
    except BrokenPipeError:
        pass  # it has ended, and the log contains its output
    poll = select.poll()  # select() accepts no descriptor over 1023, and servers have many
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise subprocess.TimeoutExpired("launcher", 0)
    is_made = process.stdout.read(1) == b"u"
    if is_made:
        write_id_maps(process.pid, launch.maps, max(0.1, deadline - time.monotonic()))
        try:
            process.stdin.write(b"m")
        except BrokenPipeError:
            pass
    status = _wait(process, deadline)
    if status == launcher.REFUSED_STATUS:
        raise_refusal(read_tail(log, 8000))
    if status == LAUNCHER_FAILED:
        words = read_tail(log)
        if (not is_made and "unshare" in words) or find_forbidding():
            raise RuntimeUnavailable(f"Cannot create a user namespace: {words}. Fix: {namespace_remedy()}")
    return status


def raise_refusal(words: str) -> None:
    """Raise InvalidRequest if ``words`` contain the launcher's refusal of a work folder."""
    _, sign, sentence = words.rpartition(launcher.REFUSED)
    if sign:
        raise InvalidRequest(sentence, field="workspace", setting="Policy.hidden_files")


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Return the exit status as soon as a process ends; ``Popen.wait`` with a timeout polls only 20 times a second."""
    handle = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(max(0.1, deadline - time.monotonic()) * 1000):
            raise subprocess.TimeoutExpired("launcher", 0)
    finally:
        os.close(handle)
    return process.wait()


def write_id_maps(pid: int, maps: IdMaps, timeout: float) -> None:
    """Write the id maps of a process that has just created its user namespace."""
    try:
        if not maps.is_direct:
            for program, entries in (("newuidmap", maps.uids), ("newgidmap", maps.gids)):
                numbers = [str(number) for entry in entries for number in entry]
                subprocess.run(
                    [program, str(pid), *numbers],
                    check=True,
                    capture_output=True,
                    timeout=timeout,
                    stdin=subprocess.DEVNULL,
                )
            return
        if not maps.may_set_groups:
            Path(f"/proc/{pid}/setgroups").write_text("deny")
        for name, entries in (("uid_map", maps.uids), ("gid_map", maps.gids)):
            text = "".join(f"{inner} {outer} {count}\n" for inner, outer, count in entries)
            # A single write: the kernel accepts no second one.
            Path(f"/proc/{pid}/{name}").write_text(text)
    except (OSError, subprocess.CalledProcessError) as error:
        detail = (
            error.stderr.decode(errors="replace").strip() if isinstance(error, subprocess.CalledProcessError) else error
        )
        raise RuntimeUnavailable(
            f"Cannot map the ids of the sandbox's user namespace: {detail}. Fix: install uidmap and give this user"
            " subordinate ids in /etc/subuid and /etc/subgid, or remove its entries there to run without them"
        ) from error


def read_tail(log: Path, size: int = 2000) -> str:
    """Return the last bytes of a log as one line of printable text."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            text = file.read(size).decode(errors="replace")
    except OSError:
        return ""
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in text.splitlines()]
    return "; ".join(line for line in lines if line)
