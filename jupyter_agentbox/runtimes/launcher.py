"""The short-lived process that enters its own namespaces and then becomes ``runsc``.

:mod:`.namespaces` runs it with ``python -I -S -B``. It is a separate program so that the server, which has threads,
never runs Python code in a forked child. It uses the standard library only and imports as little as possible, because
its run time is part of every start. For the same reason the configuration arrives as :mod:`marshal`, which is built in.

The protocol: this program, compiled, and the configuration arrive on stdin. After ``unshare`` it writes one byte to
stdout. The parent writes the id maps and answers with one byte. The process then builds the file system view, which no
other process can see, and executes the command. It reports a failure as one line on stderr and exit status 111.
"""

import ctypes
import errno
import marshal
import os
import resource
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would be slow
    from collections.abc import Callable
    from typing import Any

    from jupyter_agentbox.names import Names

    Patterns = tuple[list[str], list[str]]

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
PR_SET_NO_NEW_PRIVS = 38
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MNT_DETACH = 2
SYS_OPEN_TREE, SYS_MOVE_MOUNT = 428, 429
OPEN_TREE_CLONE, MOVE_MOUNT_EMPTY_PATHS = 1, 0x04 | 0x40
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

#: How an entry of the work folder is covered: an empty folder or a note in the place of a hidden folder or file; a
#: read-only file or folder; a folder that contains read-only entries and must not be renamed; and a name that must not
#: be created.
HIDDEN_FOLDER, HIDDEN_FILE, READ_ONLY, HELD, BLOCKED = "d", "f", "r", "h", "b"
#: Names of a Git directory in which a placeholder keeps code inside from creating the missing ones.
GIT_HEAD = "HEAD"

#: Limits on covered entries. Each cover is a mount, and the stage stores the bytes of all paths.
MAX_COVERS, MAX_COVER_BYTES = 10_000, 4 << 20
#: Maximum bytes of one path in the work folder, because code inside has to be able to name it.
MAX_COVER_PATH = 4000
#: Seconds that the search for hidden entries may take.
SEARCH_TIME = 10.0
#: Exit status after a refusal, and the prefix of its line on stderr.
REFUSED_STATUS, REFUSED = 112, "launcher refuses: "

libc = ctypes.CDLL(None, use_errno=True)


PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
SECCOMP_ALLOW, SECCOMP_EPERM, SECCOMP_ENOSYS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
#: By machine: the audit number of the architecture, and the calls that set a file's mode. Each call is its number, the
#: index of the mode argument, and the index of the flags argument (without O_CREAT in the flags the mode is unused).
MODE_CALLS: dict[str, tuple[int, tuple[tuple[int, int, int | None], ...]]] = {
    "x86_64": (
        0xC000003E,
        ((90, 1, None), (91, 1, None), (268, 2, None), (452, 2, None), (85, 1, None), (133, 1, None), (259, 2, None),
         (2, 2, 1), (257, 3, 2)),
    ),
    "aarch64": (0xC00000B7, ((52, 1, None), (53, 2, None), (452, 2, None), (33, 2, None), (56, 3, 2))),
}  # fmt: skip
SET_ID_BITS, O_CREAT = 0o6000, 0o100
#: By machine: the number of the membarrier call. gVisor makes this call each time one of its processes starts, to offer
#: a call of that name inside, and the kernel then waits for all processors. If it is refused, the call does not exist
#: inside.
MEMBARRIER = {"x86_64": 324, "aarch64": 283}


def make_filter(machine: str) -> bytes:
    """Return a seccomp program, in the kernel's binary form, that refuses calls which set a set-id bit.

    On the host, files that code creates in a work folder belong to the user, so a set-user-id or set-group-id bit would
    give the user's identity to anyone. The program also refuses :data:`MEMBARRIER`.
    """
    audit, calls = MODE_CALLS[machine]

    def step(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    def argument(number: int) -> bytes:
        return step(0x20, 0, 0, 16 + 8 * number)  # the lower half of the argument

    body = [step(0x15, 0, 1, MEMBARRIER[machine]), step(0x06, 0, 0, SECCOMP_ENOSYS)]
    for number, mode, flags in calls:
        test = [argument(mode), step(0x45, 0, 1, SET_ID_BITS), step(0x06, 0, 0, SECCOMP_EPERM)]
        if flags is not None:
            test = [argument(flags), step(0x45, 0, len(test), O_CREAT), *test]
        test.append(step(0x06, 0, 0, SECCOMP_ALLOW))
        body += [step(0x15, 0, len(test), number), *test]
    head = [step(0x20, 0, 0, 4), step(0x15, 1, 0, audit), step(0x06, 0, 0, SECCOMP_ALLOW), step(0x20, 0, 0, 0)]
    return b"".join([*head, *body, step(0x06, 0, 0, SECCOMP_ALLOW)])


def refuse_calls() -> None:
    """Forbid this process and its children to create set-user-id files. Raises OSError if the filter cannot be set."""
    machine = os.uname().machine
    if machine not in MODE_CALLS:
        raise OSError(errno.ENOTSUP, "no file mode filter exists for this machine", machine)
    program = make_filter(machine)
    steps = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a 16-bit length, padding, and a pointer.
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(steps))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    def encode(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    check(libc.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)), target)


def restrict(target: str, is_writable: bool) -> None:
    """Make the whole tree of mounts at ``target`` nosuid and nodev, and also read-only unless ``is_writable``."""
    flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (0 if is_writable else MOUNT_ATTR_RDONLY)
    attributes = flags.to_bytes(8, sys.byteorder) + bytes(24)
    result = libc.syscall(
        SYS_MOUNT_SETATTR, AT_FDCWD, os.fsencode(target), AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    if result < 0 and ctypes.get_errno() == errno.ENOSYS:
        restrict_each(target, is_writable)
    else:
        check(result, target)


def restrict_each(target: str, is_writable: bool) -> None:
    """Do the same as :func:`restrict`, mount by mount, on a kernel before 5.12."""
    option_flags = {"noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21, "ro": MS_RDONLY}
    with open("/proc/self/mountinfo") as table:
        rows = [line.split() for line in table]
    for row in rows:
        path = row[4].encode().decode("unicode_escape")
        if path == target or path.startswith(target + "/"):
            flags = MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NODEV | (0 if is_writable else MS_RDONLY)
            for option in row[5].split(","):
                flags |= option_flags.get(option, 0)
            mount(None, path, None, flags)


def open_without_links(path: str) -> int:
    """Open an absolute path as a reference (``O_PATH``), one component at a time, without following symbolic links."""
    handle = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        for part in [part for part in path.split("/") if part]:
            below = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            os.close(handle)
            handle = below
            if stat.S_ISLNK(os.fstat(handle).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    except BaseException:
        os.close(handle)
        raise
    return handle


class Refused(Exception):
    """The work folder cannot be used. The message is for the user who starts the sandbox."""


class Search:
    """A search for every entry beneath a folder that must be covered, at any depth.

    If the search cannot be completed, the folder is refused. No link is followed. A hidden folder is covered as a
    whole, so its contents are not read. A folder that cannot be listed counts as hidden.

    Parameters
    ----------
    top : str
        Path of the folder to search.
    names : Names
        The classes of names; see :mod:`jupyter_agentbox.names`.
    folder : str
        The folder's path on the host, for refusals and for links.
    """

    def __init__(self, top: str, names: "Names", folder: str) -> None:
        self._found: dict[str, str] = {}
        self._links: list[str] = []
        self._top = top
        self._names = names
        self._folder = folder
        self._seen = self._size = 0
        self._deadline = time.monotonic() + SEARCH_TIME

    def run(self) -> "list[tuple[str, str]]":
        """Return the relative paths of the entries, and how to cover each, in this order. Raises Refused."""
        # Of each open folder: its path, its handle, and the name and state of the folders in it that are left.
        stack: list[tuple[str, int, list[tuple[str, Any]]]] = []
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        prefix = ""
        try:
            stack.append(("", top := os.open(self._top, flags), self._list("", top, ())))
            while stack:
                prefix, parent, names = stack[-1]
                if not names:
                    stack.pop()
                    os.close(parent)
                    continue
                name, state = names.pop()
                prefix += name
                try:
                    handle = os.open(name, flags, dir_fd=parent)
                except OSError as error:
                    if error.errno in (errno.EACCES, errno.EPERM):
                        self._add(prefix, HIDDEN_FOLDER)
                    elif error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                        raise
                    continue  # else: the entry no longer exists, or is no longer a folder
                stack.append((prefix + "/", handle, []))
                stack[-1][2].extend(self._list(prefix + "/", handle, state))
        except OSError as error:
            raise self._refuse(f"cannot search {prefix[:200]!r}: {error.strerror}") from None
        finally:
            for _, handle, _ in stack:
                os.close(handle)
        self._add_links()
        held = [path for path, kind in self._found.items() if kind in (READ_ONLY, BLOCKED)]
        for path in held:
            while path := path.rpartition("/")[0]:
                if path in self._found:
                    break
                self._add(path, HELD)
        # A mount hides the mounts that were made beneath its place before it.
        order = (HELD, READ_ONLY, HIDDEN_FOLDER, HIDDEN_FILE, BLOCKED)
        return sorted(self._found.items(), key=lambda item: (order.index(item[1]), item[0].count("/"), item[0]))

    def _list(self, prefix: str, handle: int, state: "Any") -> "list[tuple[str, Any]]":
        """Record the entries of one folder that must be covered, and return its other folders."""
        folders, step = [], self._names.step
        is_git = False
        with os.scandir(handle) as entries:
            for entry in entries:
                self._seen += 1
                if self._seen % 256 == 0 and time.monotonic() > self._deadline:
                    raise self._refuse(
                        f"the search for its hidden and read-only entries took more than {SEARCH_TIME:g} s: it saw"
                        f" {self._seen} entries and was at {prefix[:200] or '.'!r}"
                    )
                kind, below = step(state, entry.name)
                is_git = is_git or entry.name == GIT_HEAD
                is_folder = entry.is_dir(follow_symlinks=False)
                if kind == "hidden":
                    self._add(prefix + entry.name, HIDDEN_FOLDER if is_folder else HIDDEN_FILE)
                elif is_folder:
                    folders.append((entry.name, below))
                    if kind == "read-only":
                        self._add(prefix + entry.name, READ_ONLY)
                elif kind and entry.is_symlink():
                    self._links.append(prefix + entry.name)
                elif kind:
                    self._add(prefix + entry.name, READ_ONLY)
        if is_git and state:
            for name in self._names.git_files:
                if step(state, name)[0] == "read-only" and not _exists(name, handle):
                    self._add(prefix + name, BLOCKED)
        return folders

    def _add_links(self) -> None:
        """Make what the links with read-only names lead to read-only, if it is in the folder."""
        top = os.path.realpath(self._folder)
        for path in self._links:
            real = os.path.realpath(os.path.join(top, path))
            if real.startswith(top + "/") and os.path.exists(real):
                self._found.setdefault(real[len(top) + 1 :], READ_ONLY)

    def _add(self, path: str, kind: str) -> None:
        self._found[path] = kind
        size = len(os.fsencode(path))
        self._size += size
        if len(self._found) > MAX_COVERS or self._size > MAX_COVER_BYTES:
            tops = [found.partition("/")[0] for found in self._found]
            most = max(set(tops), key=tops.count)
            where = f", {tops.count(most)} of them in {most[:200]!r}" if tops.count(most) > 1 else ""
            raise self._refuse(
                f"it contains too many hidden and read-only entries: {len(self._found)} were found{where}, and at most"
                f" {MAX_COVERS} with {MAX_COVER_BYTES >> 20} MiB of names can be covered"
            )
        if size > MAX_COVER_PATH:
            raise self._refuse(f"the path {path[:100]!r}... is too long: {size} bytes")

    def _refuse(self, why: str) -> Refused:
        return Refused(
            f"Cannot use the work folder {self._folder}: {why}. Use a smaller folder, remove unneeded files, set"
            ' "workspace": "private", or have hidden_files and read_only_files of the profile match fewer names'
        )


def _exists(name: str, folder: int) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def find_entries(top: str, names: "Names", folder: str = "") -> "list[tuple[str, str]]":
    """Return all entries beneath ``top`` that must be covered, and how; see :class:`Search`. Raises Refused."""
    return Search(top, names, folder or top).run()


def mount_workspace(
    stage: str, module: "Any", path: str, source: str, device: int, inode: int, patterns: "Patterns", is_writable: bool
) -> "list[tuple[str, str]]":
    """Bind the workspace at ``<stage>/<path>``, cover its entries, and return the covered ones.

    The parent has checked the folder and identifies it by device and inode. A folder that has replaced it is refused.
    """
    target = stage + "/" + path
    handle = open_without_links(source)
    found = os.fstat(handle)
    if (found.st_dev, found.st_ino) != (device, inode) or not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ESTALE, "the workspace was replaced while it was being mounted", source)
    mount(f"/proc/self/fd/{handle}", target, None, MS_BIND | MS_REC)
    os.close(handle)
    restrict(target, is_writable)
    hidden, read_only = patterns
    if not hidden and not read_only:
        return []
    loaded: dict[str, Any] = {"__name__": "names"}
    exec(module, loaded)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))  # one descriptor for each folder of a path
    # Where nothing can be written, read-only names need no cover.
    entries = find_entries(target, loaded["Names"](hidden, read_only if is_writable else ()), source)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return Covers(stage, target).apply(entries)


class Covers:
    """The covers on the entries of a work folder, as mounts in this view.

    Parameters
    ----------
    stage : str
        Directory that contains ``empty``, ``nothing`` and ``hold``, an empty folder, a file and another folder.
    target : str
        Path of the work folder in this view.
    """

    def __init__(self, stage: str, target: str) -> None:
        self._stage, self._target = stage, target
        for name in ("/empty", "/nothing"):
            # These are separate read-only mounts, so that everything bound from them is read-only too.
            mount(stage + name, stage + name, None, MS_BIND)
            restrict(stage + name, False)

    def apply(self, entries: "list[tuple[str, str]]") -> "list[tuple[str, str]]":
        """Cover the entries, and return those that could be covered: others no longer exist, or are links now."""
        covered = []
        for path, kind in entries:
            if kind in (BLOCKED, HELD):  # only inside: gVisor renames and creates from another mount namespace
                covered.append((path, kind))
                continue
            try:
                handle = open_without_links(self._target + "/" + path)
            except OSError as error:
                if error.errno == errno.ELOOP and "/" not in path and self._cover_link(path):
                    covered.append((path, HIDDEN_FILE))
                continue
            try:
                is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
                if kind in (HIDDEN_FILE, HIDDEN_FOLDER):
                    kind = HIDDEN_FOLDER if is_folder else HIDDEN_FILE
                self._cover(handle, kind, is_folder)
                covered.append((path, kind))
            finally:
                os.close(handle)
        return covered

    def _cover(self, handle: int, kind: str, is_folder: bool) -> None:
        place = f"/proc/self/fd/{handle}"
        if kind == READ_ONLY:
            # Made read-only elsewhere first, so that no name that code can change is used twice.
            hold = self._stage + ("/hold" if is_folder else "/hold-file")
            mount(place, hold, None, MS_BIND)
            restrict(hold, False)
            mount(hold, place, None, MS_BIND)
            check(libc.umount2(os.fsencode(hold), MNT_DETACH), hold)
        else:
            mount(self._stage + ("/empty" if is_folder else "/nothing"), place, None, MS_BIND)

    def _cover_link(self, path: str) -> bool:
        """Cover a symbolic link. It cannot be followed outside the sandbox, so only its text needs hiding."""
        try:
            handle = os.open(self._target + "/" + path, os.O_PATH | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            mount(self._stage + "/nothing", f"/proc/self/fd/{handle}", None, MS_BIND)
            return True
        except OSError:
            return False  # some kernels cannot mount over links
        finally:
            os.close(handle)


def build(stage: str, plan: "list[tuple[Any, ...]]", module: "Any") -> None:
    """Carry out the steps that :mod:`.rootfs` planned, on a small file system mounted at ``stage``.

    ``module`` is the compiled code of :mod:`jupyter_agentbox.names`, which this program cannot import.
    """
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=16m,nr_inodes=16k")
    covered: list[tuple[str, str]] = []
    for step, path, *rest in plan:
        target = stage + "/" + path
        if step == "folder":
            mode, owner = rest
            os.makedirs(target, exist_ok=True)
            os.chmod(target, mode)
            if owner:
                os.chown(target, owner, owner)
        elif step == "file":
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "x") as file:
                file.write(rest[0])
        elif step == "link":
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(rest[0], target)
        elif step == "bind":
            source, is_writable = rest
            if os.path.isdir(source):
                os.makedirs(target, exist_ok=True)
            elif not os.path.lexists(target):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                open(target, "x").close()
            mount(source, target, None, MS_BIND | MS_REC)
            restrict(target, is_writable)
        elif step == "workspace":
            covered = mount_workspace(stage, module, path, *rest)
        elif step == "memory":
            # runsc reads from here how much memory to show inside.
            with open(target, "x") as file:
                file.write(f"MemTotal: {rest[0] >> 10} kB\n")
            mount(target, "/proc/meminfo", None, MS_BIND)
        elif step == "added":
            mount_workspace(stage, module, path, *rest)
        elif step == "covered":
            with open(path if path.startswith("/") else target, "wb") as raw:
                for name, kind in covered:  # in the format that guest/covers.py reads
                    raw.write(kind.encode() + os.fsencode(name) + b"\0")
        elif step == "config":
            with open(path, "w") as file:
                file.write(rest[0])
        else:
            raise ValueError(f"unknown step {step!r}")
    # All writes inside go to the layer that runsc puts on top.
    mount(None, stage, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def join(pid: int, start_time: int, target: str) -> "Callable[[str], None]":
    """Enter the user namespace of a running sandbox and return a function that moves a tree into its view.

    The process gets a mount namespace of its own.

    Parameters
    ----------
    pid, start_time : int
        A process with the sandbox's view of the host's files.
    target : str
        Path in that view to which the tree is moved.
    """
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt")]
    check(libc.setns(namespaces[0], CLONE_NEWUSER), "setns")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    check(libc.unshare(CLONE_NEWNS), "unshare")
    target_fd = os.open(f"/proc/{pid}/root{target}", os.O_PATH | os.O_DIRECTORY)
    with open(f"/proc/{pid}/stat", "rb") as file:
        if int(file.read().rpartition(b")")[2].split()[19]) != start_time:
            raise ProcessLookupError(errno.ESRCH, "the sandbox has ended", str(pid))

    def move(source: str) -> None:
        flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
        tree = libc.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(source), flags)
        check(tree, source)
        check(libc.setns(namespaces[1], CLONE_NEWNS), "setns")
        check(libc.syscall(SYS_MOVE_MOUNT, tree, b"", target_fd, b"", MOVE_MOUNT_EMPTY_PATHS), target)

    return move


def mount_into_sandbox(config: "dict[str, Any]") -> None:
    """Mount the planned tree into the view of a running sandbox."""
    move = join(*config["join"])
    build(config["stage"], config["plan"], config["names"])
    move(config["stage"] + "/claim/work")


def wait(folder: str) -> None:
    """Wait for a request on the FIFO ``ask``, carry it out, and write the result to ``answer``.

    Everything is loaded in advance, so that the claim is fast. The process detaches from its parent. Its command line
    names the sandbox, so it ends together with the sandbox.
    """
    if os.fork():
        os._exit(0)
    with open(folder + "/ask", "rb") as file:
        config = marshal.loads(file.read())
    with open(folder + "/answer", "w") as answer:  # opened before this process sees other files
        try:
            mount_into_sandbox(config)
            answer.write("ok")
        except Refused as error:
            answer.write(f"{REFUSED}{error}")
        except Exception as error:
            answer.write(f"{type(error).__name__}: {error}")


def main() -> None:
    if len(sys.argv) > 2:
        wait(sys.argv[2])
        return
    config = marshal.load(sys.stdin.buffer)
    if config["join"]:
        mount_into_sandbox(config)
        return
    if config["processors"]:
        allowed = sorted(os.sched_getaffinity(0))
        start = os.getpid() % len(allowed)  # so that sandboxes do not all run on the same processors
        os.sched_setaffinity(0, (allowed * 2)[start : start + config["processors"]])
    os.umask(0o022)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
    os.write(1, b"u")
    if sys.stdin.buffer.read(1) != b"m":
        raise SystemExit(111)  # the parent could not write the maps, or has ended
    os.setresgid(0, 0, 0)
    if config["may_set_groups"]:
        os.setgroups([])
    os.setresuid(0, 0, 0)
    if config["stage"]:
        build(config["stage"], config["plan"], config["names"])
    refuse_calls()
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.chdir("/")
    os.execve(config["command"][0], config["command"], config["env"])


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        print(f"{REFUSED}{error}", file=sys.stderr)
        sys.exit(REFUSED_STATUS)
    except Exception as error:
        print(f"launcher: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(111)
