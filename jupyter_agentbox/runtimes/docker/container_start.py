"""PID 1 of a container before it is the guest: gives up what the container gives, and then runs the guest.

Docker has no id maps of a sandbox's own. So the container's root, whose rights end in gVisor's own kernel, makes a user
namespace *inside*, with the maps that ``runtimes.namespaces`` decides for every runtime: the guest is an id that owns
nothing, and user code is the owner of the work folder. Nothing is left outside of that namespace, and no way back out
of it. Over what is shown read-only it lays what can be written, in memory, for Docker has no such layer over binds.
Passed to the interpreter as text (``-c``), so standard library only; its arguments are the guest's directory and JSON.
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
#: Where the layers lie, which only the guest can enter.
LAYERS = "/run/agentbox/layers"
MS_BIND, MS_REC, MNT_DETACH = 4096, 16384, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_CAPBSET_DROP, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 24, 22, 2
CAPABILITY_VERSION = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def enter_namespace(uid_map: str, gid_map: str) -> None:
    """Become root of a user namespace; a child that stays behind writes its maps, which takes rights outside of it."""
    ready, tell = os.pipe()
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
    os.write(tell, b"u")
    if os.waitpid(child, 0)[1]:
        raise OSError("the id maps could not be written")
    os.close(ready)
    os.close(tell)
    os.setresgid(0, 0, 0)
    os.setgroups([])
    os.setresuid(0, 0, 0)


def make_folders(folders: "list[tuple[str, int, int]]") -> None:
    """Make directories in the empty file systems: path, mode and owner."""
    for path, mode, owner in folders:
        os.setresgid(owner, owner, 0)
        os.setresuid(owner, owner, 0)
        os.makedirs(path, exist_ok=True)
        os.chmod(path, mode)
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


def mount(kind: str, target: str, options: str) -> None:
    check(libc.mount(b"none", os.fsencode(target), kind.encode(), 0, os.fsencode(options)), target)


def add_layer(place: str, number: int, below: str, target: str) -> None:
    """Mount at ``target`` what lies at ``below``, so that it can be written to; what is beneath stays as it is."""
    upper, work = f"{place}/{number}/upper", f"{place}/{number}/work"
    os.makedirs(upper)
    os.makedirs(work)
    found = os.stat(below)
    os.chmod(upper, found.st_mode & 0o7777)
    try:
        os.chown(upper, found.st_uid, found.st_gid)
    except OSError:
        pass  # it is somebody's who is nobody here
    mount("overlay", target, f"lowerdir={below},upperdir={upper},workdir={work}")


def add_layers(paths: "list[str]", size: int) -> None:
    """Let directories be written to, in memory of ``size`` bytes together."""
    os.mkdir(LAYERS, 0o700)
    mount("tmpfs", LAYERS, f"mode=700,size={size}")
    for number, path in enumerate(paths):
        add_layer(LAYERS, number, path, path)


def renew_root(place: str, paths: "list[str]", files: "list[str]") -> None:
    """Become a program of a root that can be written to all over, with all that is mounted in the old one.

    Parameters
    ----------
    place : str
        Where an empty file system is mounted, for what is written.
    paths : list of str
        Mounted directories over which there is to be a layer.
    files : list of str
        Mounted files that are to be mere files, which can be exchanged.
    """
    with open("/proc/self/mountinfo") as table:
        words = {line.split()[4] for line in table}
    mounted = {word.encode().decode("unicode_escape").encode("latin-1").decode() for word in words}
    root = place + "/root"
    os.mkdir(root)
    add_layer(place, 0, "/", root)
    for path in files:
        with open(path, "rb") as source, open(root + path, "wb") as copy:
            copy.write(source.read())
    carried: dict[str, bool] = {}  # whether with all beneath
    for number, path in enumerate(sorted(mounted - {"/", place, *files}), 1):
        above = max((other for other in carried if path.startswith(other + "/")), key=len, default="")
        if path in paths:
            carried[path] = False
            add_layer(place, number, path, root + path)
        elif not carried.get(above):
            carried[path] = True
            check(libc.mount(os.fsencode(path), os.fsencode(root + path), None, MS_BIND | MS_REC, None), path)
    os.chdir(root)
    # The old root comes to lie above the new one, and is taken away.
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    os.rmdir(place)


def keep_capabilities(kept: "list[int]") -> None:
    """Give up all but these, for this program and all that it starts."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for number in range(last + 1):
        if number not in kept:
            check(libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), f"capability {number}")
    mask = sum(1 << number for number in kept)
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    check(libc.capset(header, struct.pack("=6I", mask, mask, 0, 0, 0, 0)), "capset")


def main(program: str, settings: str) -> None:
    what = json.loads(settings)
    enter_namespace(what["uid_map"], what["gid_map"])
    make_folders(what["folders"])
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
