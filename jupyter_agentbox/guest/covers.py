"""Cover the hidden entries of the work folder from inside, and give up the right to mount.

With the runtime runsc the host has covered them already, so gVisor's file server cannot read them. gVisor itself does
not know of those mounts, though, and would let code inside delete or replace what is beneath. A mount that gVisor knows
forbids that. One made in here needs no connection to the host, of which gVisor has some 250, so there is no such limit.

The module is also a program: the runtime runsc passes its text to the interpreter (``-c``) with the guest's directory
and arguments, to cover what was found before the guest runs; the runtime docker does so by :mod:`.docker_enter`.
Standard library only, and no import of a sibling.
"""

import ctypes
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

WORKSPACE = "/workspace"
#: What is to be covered, as the launcher wrote it, and what covers a file.
COVERED, NOTHING = "/run/agentbox/covered", "/run/agentbox/nothing"
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
#: To mount, and to give that up.
CAP_SETPCAP, CAP_SYS_ADMIN, PR_CAPBSET_DROP = 8, 21, 24
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, flags: int, kind: str = "", data: str = "") -> None:
    """Mount, or raise OSError."""
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), target)


def cover(entries: "Iterable[tuple[str, bool]]") -> None:
    """Cover entries of the work folder.

    Parameters
    ----------
    entries : iterable of (str, bool)
        Paths relative to the work folder, and whether each is a folder.
    """
    for path, is_folder in entries:
        target = f"{WORKSPACE}/{path}"
        if not os.path.lexists(target) or os.path.islink(target):
            continue  # gone since the host has looked, or a link, which the host has covered if that can be
        if is_folder:
            mount("tmpfs", target, MS_RDONLY, "tmpfs", "mode=0555")
        else:
            mount(NOTHING, target, MS_BIND)
            mount(NOTHING, target, MS_BIND | MS_REMOUNT | MS_RDONLY)


def give_up_mounting() -> None:
    """Give up the capabilities to mount and to change the bounding set, for this program and all that it starts."""
    for number in (CAP_SYS_ADMIN, CAP_SETPCAP):
        _check(_libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), "the bounding set")
    head = ctypes.create_string_buffer(struct.pack("=II", _CAPABILITIES_V3, 0))
    sets = ctypes.create_string_buffer(24)
    _check(_libc.capget(head, sets), "capget")
    words = [word & ~(1 << CAP_SYS_ADMIN | 1 << CAP_SETPCAP) for word in struct.unpack("=3I", sets.raw[:12])]
    sets = ctypes.create_string_buffer(struct.pack("=3I", *words) + sets.raw[12:24], 24)
    _check(_libc.capset(head, sets), "capset")


def pack(entries: "Iterable[tuple[str, bool]]") -> bytes:
    """Return a list of covered entries as :func:`parse` reads it."""
    return b"".join((b"d" if is_folder else b"f") + os.fsencode(name) + b"\0" for name, is_folder in entries)


def parse(data: bytes) -> "list[tuple[str, bool]]":
    """Read a list of covered entries: for each ``d`` or ``f``, the path, and a NUL character."""
    return [(os.fsdecode(item[1:]), item[:1] == b"d") for item in data.split(b"\0") if item]


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def cover_found() -> None:
    """Cover what the host found."""
    with open(COVERED, "rb") as file:
        cover(parse(file.read()))


def main(program: str, arguments: "list[str]") -> None:
    """Cover what the host found, and become the guest in the directory ``program``."""
    cover_found()
    give_up_mounting()
    sys.argv = [program, *arguments]
    with open(program + "/__main__.py", encoding="utf-8") as text:
        code = compile(text.read(), program + "/__main__.py", "exec")
    exec(code, {"__name__": "__main__", "__file__": program + "/__main__.py", "__builtins__": __builtins__})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
