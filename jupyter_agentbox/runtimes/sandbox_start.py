"""The first program of a sandbox, as PID 1: makes the root writable, gives up its privileges, and becomes the guest.

All writes inside go to a layer of limited size, so a write beyond the disk limit fails with ``ENOSPC``. gVisor's own
layer above a root has no such limit, so this program mounts one: with the runtime runsc, the layer's contents are in
one file on the host's disk; with docker, which has no writable layer over binds, they are in memory.

Docker has no id maps per sandbox either. So there the container's root, whose rights end in gVisor's own kernel,
creates a user namespace *inside*, with the maps that ``runtimes.namespaces`` chooses for every runtime: the guest is an
id that owns nothing, and user code is the owner of the work folder. Nothing stays outside that namespace, and no
process can leave it.

The program is passed to the interpreter as text (``-c``), so it uses the standard library only. Its arguments are the
guest's directory and JSON.
"""

import ctypes
import json
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
#: Directory of the layers, which only the guest can enter.
LAYERS = "/run/agentbox/layers"
#: Directory of the files that describe the machine.
MACHINE = "/run/agentbox/machine"
MS_BIND, MS_REC, MNT_DETACH = 4096, 16384, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_CAPBSET_DROP, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 24, 22, 2
CAPABILITY_VERSION = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def enter_namespace(uid_map: str, gid_map: str) -> None:
    """Become root of a new user namespace; a child stays behind to write the maps, which requires rights outside."""
    ready, ready_writer = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.read(ready, 1)
            for name, text in (("uid_map", uid_map), ("gid_map", gid_map)):
                with open(f"/proc/{os.getppid()}/{name}", "w") as file:
                    file.write(text)
            status = 0
        finally:
            os._exit(status)
    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
    os.write(ready_writer, b"u")
    if os.waitpid(child, 0)[1]:
        raise OSError("cannot write the id maps")
    os.close(ready)
    os.close(ready_writer)
    os.setresgid(0, 0, 0)
    os.setgroups([])
    os.setresuid(0, 0, 0)


def make_folders(folders: "list[tuple[str, int, int]]") -> None:
    """Create directories in the empty file systems, given path, mode and owner."""
    for path, mode, owner in folders:
        os.setresgid(owner, owner, 0)
        os.setresuid(owner, owner, 0)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def mount(kind: str, target: str, options: str) -> None:
    check(libc.mount(b"none", os.fsencode(target), kind.encode(), 0, os.fsencode(options)), target)


def show_processors(number: int) -> None:
    """Show that many processors inside, by the usual files and calls. gVisor itself shows all of the host's."""
    os.sched_setaffinity(0, range(number))
    with open("/proc/cpuinfo") as file:
        processors = file.read().split("\n\n")[:number]
    with open("/proc/stat") as file:
        shown = {f"cpu{index}" for index in range(number)} | {"cpu"}
        times = [line for line in file if not line.startswith("cpu") or line.split()[0] in shown]
    texts = {"/proc/cpuinfo": "\n\n".join([*processors, ""]), "/proc/stat": "".join(times)}
    for name in ("online", "possible", "present"):
        texts[f"/sys/devices/system/cpu/{name}"] = f"0-{number - 1}\n" if number > 1 else "0\n"
    os.mkdir(MACHINE, 0o700)
    for index, (path, text) in enumerate(texts.items()):
        if os.path.exists(path):
            with open(f"{MACHINE}/{index}", "w") as file:
                file.write(text)
            check(libc.mount(f"{MACHINE}/{index}".encode(), path.encode(), None, MS_BIND, None), path)


def add_layer(scratch: str, number: int, below: str, target: str) -> None:
    """Mount a writable layer over ``below`` at ``target``; the files beneath stay unchanged."""
    upper, work = f"{scratch}/{number}/upper", f"{scratch}/{number}/work"
    os.makedirs(upper)
    os.makedirs(work)
    found = os.stat(below)
    os.chmod(upper, found.st_mode & 0o7777)
    try:
        os.chown(upper, found.st_uid, found.st_gid)
    except OSError:
        pass  # its owner has no id in this namespace
    mount("overlay", target, f"lowerdir={below},upperdir={upper},workdir={work}")


def add_layers(paths: "list[str]", size: int) -> None:
    """Make directories writable, with layers in memory of ``size`` bytes together."""
    os.mkdir(LAYERS, 0o700)
    mount("tmpfs", LAYERS, f"mode=700,size={size}")
    for number, path in enumerate(paths):
        add_layer(LAYERS, number, path, path)


def renew_root(scratch: str, paths: "list[str]", files: "list[str]") -> None:
    """Switch to a root that is writable everywhere and contains all mounts of the old one.

    Parameters
    ----------
    scratch : str
        Mount point of an empty file system that receives what is written.
    paths : list of str
        Mounted directories that get a writable layer.
    files : list of str
        Mounted files to replace by copies, so that they can be exchanged.
    """
    with open("/proc/self/mountinfo") as table:
        words = {line.split()[4] for line in table}
    mounted = {word.encode().decode("unicode_escape").encode("latin-1").decode() for word in words}
    root = scratch + "/root"
    os.mkdir(root)
    add_layer(scratch, 0, "/", root)
    for path in files:
        with open(path, "rb") as source, open(root + path, "wb") as copy:
            copy.write(source.read())
    carried: dict[str, bool] = {}  # value: whether everything beneath is included
    for number, path in enumerate(sorted(mounted - {"/", scratch, *files}), 1):
        above = max((other for other in carried if path.startswith(other + "/")), key=len, default="")
        if path in paths:
            carried[path] = False
            add_layer(scratch, number, path, root + path)
        elif not carried.get(above):
            carried[path] = True
            check(libc.mount(os.fsencode(path), os.fsencode(root + path), None, MS_BIND | MS_REC, None), path)
    os.chdir(root)
    # The old root is stacked above the new one, then unmounted.
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    os.rmdir(scratch)


def keep_capabilities(numbers: "list[int]") -> None:
    """Drop all other capabilities, for this program and everything that it starts."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for number in range(last + 1):
        if number not in numbers:
            check(libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), f"capability {number}")
    mask = sum(1 << number for number in numbers)
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    check(libc.capset(header, struct.pack("=6I", mask, mask, 0, 0, 0, 0)), "capset")


def main(program: str, settings: str) -> None:
    what = json.loads(settings)
    if what["uid_map"]:
        enter_namespace(what["uid_map"], what["gid_map"])
    make_folders(what["folders"])
    if 0 < what["processors"] < (os.cpu_count() or 1):
        show_processors(what["processors"])
    if what["new_root"]:
        renew_root(what["new_root"], what["layers"], what["files"])
    elif what["layers"]:
        add_layers(what["layers"], what["layer_size"])
    if what["covers"]:
        inside: dict[str, Any] = {"__name__": "covers"}
        exec(what["covers"], inside)
        inside["cover_found"]()
    keep_capabilities(what["capabilities"])
    if what["filter"]:
        words = bytes.fromhex(what["filter"])
        steps = ctypes.create_string_buffer(words, len(words))
        described = struct.pack("@HP", len(words) // 8, ctypes.addressof(steps))
        check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")
    sys.argv = [program, *what["arguments"]]
    with open(program + "/__main__.py", encoding="utf-8") as file:
        code = compile(file.read(), program + "/__main__.py", "exec")
    exec(code, {"__name__": "__main__", "__file__": program + "/__main__.py", "__builtins__": __builtins__})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
