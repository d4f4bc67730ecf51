"""Look up paths of the work folder that were changed from outside.

gVisor keeps a file open that was used inside. If the file is deleted from outside, it stays open, and its blocks stay
in use on the host, until a program inside looks its path up.
"""

from __future__ import annotations

import os

from .framing import pack_json
from .loop import LinkDown
from .processes import read_requests

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .loop import Stream

WORKSPACE = "/workspace/"


def open_lookup(stream: Stream) -> None:
    """Serve a stream of kind ``lookup``: answer each message ``{"paths": [...]}`` with ``{"ok": true}``.

    The paths are relative to the work folder.
    """

    def on_request(request: dict[str, Any]) -> None:
        for path in request["paths"]:
            try:
                os.lstat(WORKSPACE + path)  # if a folder was removed, gVisor releases everything beneath it
            except (OSError, ValueError):
                pass
        try:
            stream.write(pack_json({"ok": True}))
        except LinkDown:
            pass

    read_requests(stream, on_request)
