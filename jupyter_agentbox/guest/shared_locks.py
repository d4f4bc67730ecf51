"""Have Python's file locks in the work folder hold on the host, too. Runs in every Python process of user code.

gVisor handles file locks itself, so without this module two sandboxes of one folder could both hold a lock. The module
wraps the functions of ``fcntl``, and the system call with which SQLite locks. Each lock is taken inside *and* by the
guest on the host (:mod:`.locks`), so that other sandboxes and programs of the host respect it. Locks on files elsewhere
are left as they are.

The text of this module is written to the Python environment of the sandbox (:mod:`.own_locks`), where a ``.pth`` file
imports it. So it may use only the standard library, and its import must be fast.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

#: Name of this module in programs.
NAME = "_agentbox_locks"
#: Abstract address of the guest's socket.
ADDRESS = "\0agentbox-locks"
WORKSPACE = "/workspace/"
#: Seconds to wait for the guest's answer, and between two attempts of a lock that waits: minimum and maximum.
TIMEOUT, FIRST_PAUSE, LAST_PAUSE = 30.0, 0.001, 0.05


class Locks:
    """This process's connection to the guest, which is opened at the first lock."""

    def __init__(self) -> None:
        import os

        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Start without a connection, as in a child after a fork."""
        import _thread

        self._guard = _thread.allocate_lock()
        self._socket: Any = None
        self._pid = 0
        self._is_needed = True

    def ask(self, fd: int, kind: str, how: str, start: int = 0, length: int = 0) -> int:
        """Ask for a lock on the host.

        Parameters
        ----------
        fd : int
            The file.
        kind : str
            ``f`` for ``flock``, ``p`` for ``fcntl``.
        how : str
            ``s`` for shared, ``x`` for exclusive, ``u`` to unlock, ``t`` to test for locks of others.
        start, length : int
            Range in bytes; length 0 extends to the end of the file.

        Returns
        -------
        int
            0, or the error number. For a test, EBUSY if others share a lock, and EAGAIN if one has an exclusive lock.
        """
        import errno
        import json
        import os

        if not self._is_needed:
            return 0
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not path.startswith(WORKSPACE):
            return 0
        request = json.dumps([kind, how, fd, path[len(WORKSPACE) :], start, length, os.getpid()]).encode() + b"\n"
        with self._guard:
            for _ in range(2):
                try:
                    self._connect(os)
                    self._socket.sendall(request)
                    answer = b""
                    while not answer.endswith(b"\n"):
                        data = self._socket.recv(64)
                        if not data:
                            raise ConnectionError
                        answer += data
                    number = int(answer)
                    self._is_needed = number >= 0  # else the folder is not shared
                    return max(0, number)
                except ConnectionError:
                    self._socket = None  # for example, the parent's connection after a fork
                except (OSError, ValueError):
                    break
        self._socket = None
        return errno.EAGAIN

    def _connect(self, os: Any) -> None:
        if self._socket is None or self._pid != os.getpid():
            import socket

            self._pid = os.getpid()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(TIMEOUT)
            self._socket.connect(ADDRESS)


def wait(attempt: Callable[[], int], is_waiting: bool) -> int:
    """Call ``attempt`` until it returns something other than EAGAIN, if ``is_waiting``."""
    import errno
    import time

    pause = FIRST_PAUSE
    while True:
        number = attempt()
        if number != errno.EAGAIN or not is_waiting:
            return number
        time.sleep(pause)  # an interrupt raises KeyboardInterrupt here, as from the lock itself
        pause = min(2 * pause, LAST_PAUSE)


def patch_fcntl(fcntl: Any) -> None:
    """Wrap the functions of the module ``fcntl``."""
    import errno
    import os

    locks, real_flock, real_lockf, real_fcntl = Locks(), fcntl.flock, fcntl.lockf, fcntl.fcntl

    def is_shared(fd: int) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(WORKSPACE)
        except OSError:
            return False

    def number_of(file: Any) -> int:
        return int(file if isinstance(file, int) else file.fileno())

    def take(
        fd: int, kind: str, how: str, inner: Callable[[], object], is_waiting: bool, start: int = 0, length: int = 0
    ) -> None:
        """Take a lock on the host and inside, or neither."""

        def attempt() -> int:
            number = locks.ask(fd, kind, how, start, length)
            if number:
                return number
            try:
                inner()
            except OSError as error:
                # A lock that this process already had on the host is lost here; only programs that are not Python, and
                # lock the same file in the same sandbox at the same moment, can cause this.
                locks.ask(fd, kind, "u", start, length)
                return error.errno or errno.EIO
            return 0

        number = wait(attempt, is_waiting)
        if number:
            raise OSError(number, os.strerror(number))

    def flock(fd: Any, operation: int, /) -> Any:
        number = number_of(fd)
        if not is_shared(number):
            return real_flock(fd, operation)
        if operation & fcntl.LOCK_UN:
            real_flock(fd, operation)
            locks.ask(number, "f", "u")
            return None
        how = "s" if operation & fcntl.LOCK_SH else "x"
        return take(number, "f", how, lambda: real_flock(fd, operation | fcntl.LOCK_NB), not operation & fcntl.LOCK_NB)

    def lockf(fd: Any, cmd: int, len: int = 0, start: int = 0, whence: int = 0, /) -> Any:
        number = number_of(fd)
        if not is_shared(number):
            return real_lockf(fd, cmd, len, start, whence)
        base = 0
        if whence == os.SEEK_CUR:
            base = os.lseek(number, 0, os.SEEK_CUR)
        elif whence == os.SEEK_END:
            base = os.fstat(number).st_size
        if cmd & fcntl.LOCK_UN:
            real_lockf(fd, cmd, len, start, whence)
            locks.ask(number, "p", "u", base + start, len)
            return None
        how = "s" if cmd & fcntl.LOCK_SH else "x"

        def inner() -> None:
            real_lockf(fd, cmd | fcntl.LOCK_NB, len, start, whence)

        return take(number, "p", how, inner, not cmd & fcntl.LOCK_NB, base + start, len)

    def call_fcntl(fd: Any, cmd: int, arg: Any = 0, /) -> Any:
        if cmd in (fcntl.F_SETLK, fcntl.F_SETLKW) and isinstance(arg, (bytes, bytearray)) and is_shared(number_of(fd)):
            import struct

            kind, whence, start, length = struct.unpack_from("hhqq", arg)
            if whence == os.SEEK_SET:
                how = {fcntl.F_RDLCK: "s", fcntl.F_WRLCK: "x"}.get(kind, "u")
                if how == "u":
                    result = real_fcntl(fd, cmd, arg)
                    locks.ask(number_of(fd), "p", "u", start, length)
                    return result
                take(
                    number_of(fd),
                    "p",
                    how,
                    lambda: real_fcntl(fd, fcntl.F_SETLK, arg),
                    cmd == fcntl.F_SETLKW,
                    start,
                    length,
                )
                return bytes(arg)
        return real_fcntl(fd, cmd, arg)

    for own, real in ((flock, real_flock), (lockf, real_lockf), (call_fcntl, real_fcntl)):
        own.__name__, own.__qualname__, own.__doc__ = real.__name__, real.__name__, real.__doc__
    fcntl.flock, fcntl.lockf, fcntl.fcntl = flock, lockf, call_fcntl


def patch_sqlite(module: Any) -> None:
    """Replace the system call with which the SQLite of the module ``_sqlite3`` locks."""
    import ctypes
    import errno

    class Flock(ctypes.Structure):
        _fields_ = [
            ("type", ctypes.c_short),
            ("whence", ctypes.c_short),
            ("start", ctypes.c_longlong),
            ("length", ctypes.c_longlong),
            ("pid", ctypes.c_int),
        ]

    class Vfs(ctypes.Structure):
        _fields_ = [
            ("version", ctypes.c_int),
            ("file_size", ctypes.c_int),
            ("max_pathname", ctypes.c_int),
            ("next", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("data", ctypes.c_void_p),
            *((name, ctypes.c_void_p) for name in (
                "open", "delete", "access", "full_pathname", "dl_open", "dl_error", "dl_sym", "dl_close", "randomness",
                "sleep", "current_time", "last_error", "current_time_64",
            )),
            ("set_system_call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)),
        ]  # fmt: skip

    library = ctypes.CDLL(module.__file__) if getattr(module, "__file__", None) else ctypes.CDLL(None)
    find = library.sqlite3_vfs_find  # in the library that the module is linked to
    find.argtypes, find.restype = [ctypes.c_char_p], ctypes.POINTER(Vfs)
    real = ctypes.CDLL(None, use_errno=True).fcntl
    real.argtypes, real.restype = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p], ctypes.c_int
    locks = Locks()
    read, write, unlock, get, set_now = 0, 1, 2, 5, 6  # F_RDLCK, F_WRLCK, F_UNLCK, F_GETLK, F_SETLK

    def fail(number: int) -> int:
        ctypes.set_errno(number)
        return -1

    def call(fd: int, command: int, argument: int) -> int:
        try:
            if command not in (get, set_now):
                return int(real(fd, command, argument))
            lock = Flock.from_address(argument)
            kind, start, length = lock.type, lock.start, lock.length
            if command == get:
                result = int(real(fd, command, argument))
                if result == 0 and lock.type == unlock and (number := locks.ask(fd, "p", "t", start, length)):
                    lock.type = read if number == errno.EBUSY else write
                return result
            if kind == unlock:
                result = int(real(fd, command, argument))
                locks.ask(fd, "p", "u", start, length)
                return result
            probe = Flock(kind, 0, start, length, 0)
            if real(fd, get, ctypes.addressof(probe)) == 0 and probe.type != unlock:
                return fail(errno.EAGAIN)
            number = locks.ask(fd, "p", "s" if kind == read else "x", start, length)
            return fail(number) if number else int(real(fd, command, argument))
        except Exception:
            return fail(errno.EAGAIN)

    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, use_errno=True)
    callback = prototype(call)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))  # SQLite may call it until the process has ended
    vfs = find(None)
    if vfs.contents.version >= 3:
        vfs.contents.set_system_call(
            ctypes.cast(vfs, ctypes.c_void_p), b"fcntl", ctypes.cast(callback, ctypes.c_void_p)
        )


def install() -> None:
    """Wrap the functions of ``fcntl`` now, and SQLite's system call when the first database is opened."""
    import fcntl

    patch_fcntl(fcntl)
    is_patched = False

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_patched
        if event != "sqlite3.connect" or is_patched or "/.ipython/" in str(arguments[0]):
            return
        is_patched = True
        try:
            patch_sqlite(sys.modules["_sqlite3"])
        except Exception:
            import warnings

            warnings.warn(
                "agentbox: this Python's SQLite cannot lock files across sandboxes. Do not open a database in"
                " /workspace from two notebooks at the same time",
                stacklevel=2,
            )

    sys.addaudithook(on_event)


if __name__ == NAME:
    install()
