"""Run a program in a root of its own: started as ``unshare ... python chroot_exec.py ROOT SHARED PROGRAM...``.

``unshare`` has created the namespaces. The tree becomes the root and the host's root is unmounted, so that the program
sees only the tree, five devices, its own /proc and the shared folder. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_NO_NEW_PRIVS = 38
DEVICES = ("null", "zero", "full", "random", "urandom")
SHARED = "/tmp/lent"

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raise OSError if a call failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """Mount a file system or a path."""
    name = None if kind is None else os.fsencode(kind)
    check(libc.mount(os.fsencode(source), os.fsencode(target), name, ctypes.c_ulong(flags), None), target)


def main() -> None:
    """Enter the tree and execute the program. The tree's ``dev``, ``proc`` and ``tmp`` must be empty folders."""
    root, shared, *program = sys.argv[1:]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount(root, root, None, MS_BIND | MS_REC)
    for name in DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    with contextlib.suppress(OSError):  # cannot be mounted where the host's own /proc is masked
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(root + SHARED)
    mount(shared, root + SHARED, None, MS_BIND)
    os.chdir(root)
    # The old root is stacked above the new one, then unmounted.
    check(libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
