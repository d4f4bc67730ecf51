"""Keep a thread, and the threads and programs that it starts, to some folders: Linux's Landlock.

What is forbidden is decided for the file that is opened, not for the path that was asked for, so no link that is put in
its way meanwhile leads out. It cannot be undone. To look a file's size, times and kind up stays possible.
Rights and structures are those of ``linux/landlock.h`` and the kernel's "Landlock: unprivileged access control".
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # of every architecture
CREATE_RULESET_VERSION, RULE_PATH_BENEATH = 1, 1
PR_SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
#: What may be asked of a file, and not of a folder alone.
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
#: The oldest version in which files can be moved from one folder to another.
NEEDED_VERSION = 2


class _Ruleset(ctypes.Structure):
    _fields_ = [("handled_access_fs", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result


def is_available() -> bool:
    """Whether this kernel has what :func:`restrict` needs: Linux 5.19 or newer, with Landlock among its modules."""
    try:
        return _call(CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION) >= NEEDED_VERSION
    except OSError:
        return False


def restrict(changed: Iterable[str], read: Iterable[str]) -> None:
    """Have the calling thread reach nothing but these from now on. Raises OSError; then it is not restricted.

    Parameters
    ----------
    changed : iterable of str
        Folders and files in which it may do what the user may.
    read : iterable of str
        Folders and files that it may read and run. What does not exist, of either, is passed over.
    """
    version = _call(CREATE_RULESET, None, ctypes.c_size_t(0), CREATE_RULESET_VERSION)
    everything = (1 << (14 if version < 3 else 15)) - 1
    wanted = _Ruleset(everything)
    ruleset = _call(CREATE_RULESET, ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)), 0)
    try:
        for paths, access in ((changed, everything), (read, EXECUTE | READ_FILE | READ_DIR)):
            for path in paths:
                _allow(ruleset, path, access)
        if _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "landlock: no_new_privs")
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= OF_FILES
        rule = _PathBeneath(access, place)
        _call(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(place)
