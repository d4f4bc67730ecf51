"""Cover the hidden entries of the work folder from inside, and give up the right to mount.

With the runtime runsc the host has covered them already, so gVisor's file server cannot read them. But gVisor itself
does not know of those mounts, and would let code inside delete or replace the files beneath them. A mount that gVisor
knows of prevents that. A mount made inside needs no connection to the host. gVisor has about 250 of those, so mounts
made inside are not limited by their number.

The text of this module is also part of a sandbox's first program (``runtimes.sandbox_start``), which covers the hidden
entries before the guest runs. It may use only the standard library and must not import other modules of the guest.
"""

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

WORKSPACE = "/workspace"
#: List of the entries to cover, written by the launcher, and the empty file that covers a file.
COVERED, NOTHING = "/run/agentbox/covered", "/run/agentbox/nothing"
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
#: Capabilities to mount and to change the bounding set, and the prctl option that drops them.
CAP_SETPCAP, CAP_SYS_ADMIN, PR_CAPBSET_DROP = 8, 21, 24
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, flags: int, kind: str = "", data: str = "") -> None:
    """Mount a file system. Raises OSError."""
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
            continue  # removed since the host has looked, or a link, which the host has covered if possible
        if is_folder:
            mount("tmpfs", target, MS_RDONLY, "tmpfs", "mode=0555")
        else:
            mount(NOTHING, target, MS_BIND)
            mount(NOTHING, target, MS_BIND | MS_REMOUNT | MS_RDONLY)


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


def pack(entries: "Iterable[tuple[str, bool]]") -> bytes:
    """Return a list of covered entries in the format of :func:`parse`."""
    return b"".join((b"d" if is_folder else b"f") + os.fsencode(name) + b"\0" for name, is_folder in entries)


def parse(data: bytes) -> "list[tuple[str, bool]]":
    """Parse a list of covered entries. Each is ``d`` or ``f``, the path, and a NUL character."""
    return [(os.fsdecode(item[1:]), item[:1] == b"d") for item in data.split(b"\0") if item]


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def cover_found() -> None:
    """Cover the entries that the host found."""
    with open(COVERED, "rb") as file:
        cover(parse(file.read()))
