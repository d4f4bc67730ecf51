"""Cover entries of the work folder from inside, and give up the right to mount.

With the runtime runsc the host has covered them already, so gVisor's file server can neither read what is hidden nor
write what is read-only. But gVisor itself does not know of those mounts, and would let code inside delete or replace
the entries beneath them. A mount that gVisor knows of prevents that. A mount made inside needs no connection to the
host. gVisor has about 250 of those, so mounts made inside are not limited by their number.

The text of this module is also part of a sandbox's first program (``runtimes.sandbox_start``), which covers the
entries before the guest runs. It may use only the standard library and must not import other modules of the guest.
"""

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

WORKSPACE = "/workspace"
#: List of the entries to cover, written by the launcher.
COVERED = "/run/agentbox/covered"
#: Content of a hidden file inside. Nearly all formats of such files ignore a line like this.
NOTE = "# This file is hidden in sandboxes (Policy.hidden_files).\n"
#: Files beside :data:`COVERED` that cover others: a hidden file, and names that must not be created. A Git directory
#: whose ``commondir`` is ``.`` works as one without.
FILES = {"nothing": NOTE, "vacant": "", "here": ".\n"}
_FOLDER = "/run/agentbox"
#: The work folder again, read-only, if the host has not covered its entries. A mount that only gVisor knows to be
#: read-only is not enough: in a user namespace of its own, code can make it writable.
SHOWN = f"{_FOLDER}/shown"
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
#: Capabilities to mount and to change the bounding set, and the prctl option that drops them.
CAP_SETPCAP, CAP_SYS_ADMIN, PR_CAPBSET_DROP = 8, 21, 24
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, flags: int, kind: str = "", data: str = "") -> None:
    """Mount a file system. Raises OSError."""
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), target)


def cover(entries: "Iterable[tuple[str, str]]") -> None:
    """Cover entries of the work folder.

    Parameters
    ----------
    entries : iterable of (str, str)
        Paths relative to the work folder, and how to cover each: ``d`` and ``f`` hide a folder and a file, ``r`` makes
        an entry read-only, ``h`` keeps a folder from being renamed, and ``b`` keeps a name from being created. A folder
        comes before what is beneath it.
    """
    for path, kind in entries:
        target = f"{WORKSPACE}/{path}"
        if kind == "b":
            block(target)
        elif not os.path.lexists(target) or os.path.islink(target):
            continue  # removed since the host has looked, or a link, which the host has covered if possible
        elif kind == "d":
            mount("tmpfs", target, MS_RDONLY, "tmpfs", "mode=0555")
        elif kind == "f":
            bind_read_only(f"{_FOLDER}/nothing", target)
        elif kind == "r":
            bind_read_only(f"{SHOWN}/{path}" if os.path.isdir(SHOWN) else target, target)
        else:
            mount(target, target, MS_BIND)


def bind_read_only(source: str, target: str) -> None:
    """Mount a file or folder read-only at another place, or at its own."""
    mount(source, target, MS_BIND)
    mount(source, target, MS_BIND | MS_REMOUNT | MS_RDONLY)


def block(target: str) -> None:
    """Keep a name that does not exist from being created.

    A socket is the one kind of entry that gVisor creates in its own memory and never on the host. The mount over it
    keeps it from being removed.
    """
    import socket

    try:
        with socket.socket(socket.AF_UNIX) as placeholder:
            os.chdir(os.path.dirname(target))  # the path of a socket has at most 107 bytes
            placeholder.bind(os.path.basename(target))
    except OSError:
        return  # it exists by now, or its folder does not
    finally:
        os.chdir("/")
    name = "here" if target.endswith("/commondir") else "vacant"
    bind_read_only(f"{_FOLDER}/{name}", target)


def give_up_mounting() -> None:
    """Drop the capabilities to mount and to change the bounding set, for this program and all its descendants."""
    for number in (CAP_SYS_ADMIN, CAP_SETPCAP):
        _check(_libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), "cannot drop capabilities")
    head = ctypes.create_string_buffer(struct.pack("=II", _CAPABILITIES_V3, 0))
    sets = ctypes.create_string_buffer(24)
    _check(_libc.capget(head, sets), "capget")
    words = [word & ~(1 << CAP_SYS_ADMIN | 1 << CAP_SETPCAP) for word in struct.unpack("=3I", sets.raw[:12])]
    sets = ctypes.create_string_buffer(struct.pack("=3I", *words) + sets.raw[12:24], 24)
    _check(_libc.capset(head, sets), "capset")


def pack(entries: "Iterable[tuple[str, str]]") -> bytes:
    """Return a list of covered entries in the format of :func:`parse`."""
    return b"".join(kind.encode() + os.fsencode(name) + b"\0" for name, kind in entries)


def parse(data: bytes) -> "list[tuple[str, str]]":
    """Parse a list of covered entries. Each is the letter of its kind, the path, and a NUL character."""
    return [(os.fsdecode(item[1:]), item[:1].decode()) for item in data.split(b"\0") if item]


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def cover_found() -> None:
    """Cover the entries that the host found."""
    with open(COVERED, "rb") as file:
        cover(parse(file.read()))
