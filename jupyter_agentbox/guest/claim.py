"""A sandbox that was made before anybody asked for it: it waits, and is claimed once, before any user's code runs.

Until then PID 1 may mount. The claim puts the work folder in its place and covers what is to be hidden there, lowers
the limits of programs, and gives that right up for good. What goes wrong ends the sandbox.
"""

from __future__ import annotations

import resource

from .covers import MS_BIND, WORKSPACE, cover, give_up_mounting, mount
from .framing import pack_json
from .processes import read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Stream

#: What the host puts there.
GIVEN = "/run/agentbox/claim/work"


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
        mount(GIVEN, WORKSPACE, MS_BIND)
        cover((path, is_folder) for path, is_folder in self._masks)
        give_up_mounting()
        for name, value in request["rlimits"].items():
            number = getattr(resource, f"RLIMIT_{name}")
            value = min(value, resource.getrlimit(number)[1])
            resource.setrlimit(number, (value, value))
        self._on_lease(float(request["lease"]))
