"""Answer some system calls as Linux would, where gVisor does not: by a filter of the calls of everything inside.

- An allocation that is larger than the sandbox's memory fails with ``ENOMEM``, as it does on a machine of that size, so
  that Python raises MemoryError. gVisor grants any size, and filling it would end the kernel. As with Linux, only
  memory that counts is refused: not address space that is reserved (``PROT_NONE``, ``MAP_NORESERVE``), and no mapping
  of a file.
- Programs that look up the SELinux label of a link are told that it has none. Older gVisor releases fail with EBADF, so
  that ``ls -l`` prints an error for every link (https://github.com/google/gvisor/issues/11049). The answer is ENOTSUP,
  as from a kernel without SELinux. libselinux is recognized by the size of its buffer, so other attributes are not
  affected.
"""

from __future__ import annotations

import errno
import os
import struct

#: Size in bytes of the buffer with which libselinux begins.
LABEL_SIZE = 255
#: For each machine, its name in ``struct seccomp_data`` (linux/audit.h), and the numbers of lgetxattr(2) and mmap(2).
MACHINES = {"x86_64": (0xC000003E, 192, 9), "aarch64": (0xC00000B7, 9, 222)}
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x00050000, 0x7FFF0000
PROT_WRITE, MAP_ANONYMOUS, MAP_NORESERVE = 0x2, 0x20, 0x4000
#: Instructions of classic BPF (linux/bpf_common.h): load a word, compare with a constant, return.
_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
#: Offsets in ``struct seccomp_data``: system call and machine.
_NUMBER, _MACHINE = 0, 4

Step = tuple[int, int, int, int]


def _argument(index: int, *, is_upper: bool = False) -> Step:
    """Return the instruction that loads half of an argument of the call."""
    return _LOAD, 0, 0, 16 + 8 * index + 4 * is_upper


def make_filter(machine: int, label: int, mmap: int, memory: int) -> list[Step]:
    """Return the filter as instructions: code, jump if true, jump if false, operand.

    Parameters
    ----------
    machine, label, mmap : int
        See :data:`MACHINES`.
    memory : int
        Bytes of the largest allocation.
    """
    upper, lower = memory >> 32, memory & 0xFFFFFFFF
    labels = [
        _argument(3),
        (_JUMP_EQUAL, 0, 1, LABEL_SIZE),
        (_RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.ENOTSUP),
        (_RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ]
    allocations = [
        _argument(1, is_upper=True),
        (_JUMP_GREATER, 3, 0, upper),  # larger
        (_JUMP_EQUAL, 0, 7, upper),
        _argument(1),
        (_JUMP_GREATER, 0, 5, lower),
        _argument(2),
        (_JUMP_SET, 0, 3, PROT_WRITE),
        _argument(3),
        (_JUMP_SET, 1, 0, MAP_NORESERVE),
        (_JUMP_SET, 1, 0, MAP_ANONYMOUS),
        (_RETURN, 0, 0, SECCOMP_RET_ALLOW),
        (_RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.ENOMEM),
    ]
    return [
        (_LOAD, 0, 0, _MACHINE),
        (_JUMP_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, SECCOMP_RET_ALLOW),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_EQUAL, 0, len(labels), label),
        *labels,
        (_JUMP_EQUAL, 0, len(allocations), mmap),
        *allocations,
        (_RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ]


def install_filter(memory: int) -> None:
    """Install the filter for this program and all its descendants. Does nothing where that is not possible.

    Parameters
    ----------
    memory : int
        Bytes of the largest allocation.
    """
    known = MACHINES.get(os.uname().machine)
    if known is None:
        return
    import ctypes

    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in make_filter(*known, memory))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)
