"""A sandbox that was made before anybody asked for it: it waits, and is claimed once, before any user's code runs.

Until then PID 1 may mount. The claim puts the work folder in its place and covers what is to be hidden there, lowers
the limits of programs, and gives that right up for good. What goes wrong ends the sandbox.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from .framing import pack_json
from .processes import read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Stream

WORKSPACE = "/workspace"
#: What the host puts there, and what covers a file.
GIVEN, NOTHING = "/run/agentbox/claim/work", "/run/agentbox/nothing"
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096
#: To mount, and to give that up.
CAP_SETPCAP, CAP_SYS_ADMIN, PR_CAPBSET_DROP = 8, 21, 24
_CAPABILITIES_V3 = 0x20080522


class Claim:
    """The one claim of a waiting sandbox.

    From the host, as JSON messages on a stream of kind ``claim``: any number of
    ``{"masks": [[path, is_folder], ...]}``, then ``{"rlimits": {...}, "lease": seconds}``, which is answered by
    ``{"ok": true}``.

    Parameters
    ----------
    on_lease : callable
        Told how long the sandbox may be without an owner from here on, in seconds.
    on_failure : callable
        Ends the sandbox.
    """

    def __init__(self, on_lease: Callable[[float], object], on_failure: Callable[[], object]) -> None:
        self._on_lease = on_lease
        self._on_failure = on_failure
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._masks: list[list[Any]] = []
        self._is_made = False

    def open(self, stream: Stream) -> None:
        """Serve the stream of it."""

        def asked(request: dict[str, Any]) -> None:
            if "masks" in request:
                self._masks += request["masks"]
                return
            try:
                self._make(request)
            except Exception as error:  # whatever it is: nothing may go on half made
                stream.reset(repr(error)[:500])
                self._on_failure()
            else:
                stream.write(pack_json({"ok": True}))

        read_requests(stream, asked)

    def _make(self, request: dict[str, Any]) -> None:
        if self._is_made:
            raise ValueError("it was claimed before")
        self._is_made = True
        self._mount(GIVEN, WORKSPACE, MS_BIND)
        for path, is_folder in self._masks:
            target = f"{WORKSPACE}/{path}"
            if not os.path.lexists(target) or os.path.islink(target):
                continue  # gone since the host has looked, or a link, which the host has covered if that can be
            if is_folder:
                self._mount("tmpfs", target, MS_RDONLY, "tmpfs", "mode=0555")
            else:
                self._mount(NOTHING, target, MS_BIND)
                self._mount(NOTHING, target, MS_BIND | MS_REMOUNT | MS_RDONLY)
        self._give_up_mounting()
        for name, value in request["rlimits"].items():
            number = getattr(resource, f"RLIMIT_{name}")
            value = min(value, resource.getrlimit(number)[1])
            resource.setrlimit(number, (value, value))
        self._on_lease(float(request["lease"]))

    def _mount(self, source: str, target: str, flags: int, kind: str = "", data: str = "") -> None:
        arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode())
        self._check(self._libc.mount(*arguments), target)

    def _give_up_mounting(self) -> None:
        for number in (CAP_SYS_ADMIN, CAP_SETPCAP):
            self._check(self._libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0), "the bounding set")
        head = ctypes.create_string_buffer(struct.pack("=II", _CAPABILITIES_V3, 0))
        sets = ctypes.create_string_buffer(24)
        self._check(self._libc.capget(head, sets), "capget")
        words = [word & ~(1 << CAP_SYS_ADMIN | 1 << CAP_SETPCAP) for word in struct.unpack("=3I", sets.raw[:12])]
        sets = ctypes.create_string_buffer(struct.pack("=3I", *words) + sets.raw[12:24], 24)
        self._check(self._libc.capset(head, sets), "capset")

    @staticmethod
    def _check(result: int, what: str) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
