"""Answer programs that look up the SELinux label of a link that it has none.

Older gVisor releases fail with EBADF, so that ``ls -l`` prints an error for every link
(https://github.com/google/gvisor/issues/11049). The filter of system calls here answers with ENOTSUP instead, as a
kernel without SELinux does. It recognizes libselinux by the size of its buffer, so other attributes are not affected.
"""

from __future__ import annotations

import errno
import os
import struct

#: Size in bytes of the buffer with which libselinux begins.
LABEL_SIZE = 255
#: For each machine, its name in ``struct seccomp_data`` (linux/audit.h) and the number of lgetxattr(2).
MACHINES = {"x86_64": (0xC000003E, 192), "aarch64": (0xC00000B7, 9)}
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
#: Instructions of classic BPF (linux/bpf_common.h): load a word, compare with a constant, return.
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
#: Offsets in ``struct seccomp_data``: system call, machine, lower half of the fourth argument.
_NUMBER, _MACHINE, _SIZE = 0, 4, 40


def make_filter(machine: int, number: int) -> list[tuple[int, int, int, int]]:
    """Return the filter as instructions: code, jump if true, jump if false, operand."""
    return [
        (_LOAD, 0, 0, _MACHINE),
        (_JUMP_EQUAL, 0, 5, machine),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_EQUAL, 0, 3, number),
        (_LOAD, 0, 0, _SIZE),
        (_JUMP_EQUAL, 0, 1, LABEL_SIZE),
        (_RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.ENOTSUP),
        (_RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ]


def hide_labels_of_links() -> None:
    """Install the filter for this program and all its descendants. Does nothing where that is not possible."""
    known = MACHINES.get(os.uname().machine)
    if known is None:
        return
    import ctypes

    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in make_filter(*known))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
