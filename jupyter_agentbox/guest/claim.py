"""Serve the claim of a sandbox that was started in advance, before any user's code runs in it.

Until the claim, PID 1 may mount. The claim mounts the work folder, covers its entries, lowers the limits of
programs, and gives up the right to mount for good. Any failure ends the sandbox.
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

#: Mount point at which the host provides the work folder.
SOURCE = "/run/agentbox/claim/work"


class Claim:
    """Claim of a waiting sandbox. It can be made only once.

    From the host, as JSON messages on a stream of kind ``claim``: any number of
    ``{"masks": [[path, kind], ...]}``, then ``{"rlimits": {...}, "lease": seconds}``, which is answered by
    ``{"ok": true}``.

    Parameters
    ----------
    on_lease : callable
        Called with the sandbox's new lease: how long it may be without an owner, in seconds.
    on_failure : callable
        Ends the sandbox.
    """

    def __init__(self, on_lease: Callable[[float], object], on_failure: Callable[[], object]) -> None:
        self._on_lease = on_lease
        self._on_failure = on_failure
        self._masks: list[list[Any]] = []
        self._is_made = False

    def open(self, stream: Stream) -> None:
        """Serve the claim's stream."""

        def on_request(request: dict[str, Any]) -> None:
            if "masks" in request:
                self._masks += request["masks"]
                return
            try:
                self._make(request)
            except Exception as error:  # any error: a partly claimed sandbox must not continue
                stream.reset(repr(error)[:500])
                self._on_failure()
            else:
                stream.write(pack_json({"ok": True}))

        read_requests(stream, on_request)

    def _make(self, request: dict[str, Any]) -> None:
        if self._is_made:
            raise ValueError("the sandbox was already claimed")
        self._is_made = True
        mount(SOURCE, WORKSPACE, MS_BIND)
        cover((path, kind) for path, kind in self._masks)
        give_up_mounting()
        for name, value in request["rlimits"].items():
            number = getattr(resource, f"RLIMIT_{name}")
            value = min(value, resource.getrlimit(number)[1])
            resource.setrlimit(number, (value, value))
        self._on_lease(float(request["lease"]))
