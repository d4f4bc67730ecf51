"""Explain frames in the output of cells that show a server inside. The browser looks for it on its own computer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from jupyter_agentbox.sandbox.drivers.messages import header_index, parse
from jupyter_agentbox.spec import HOSTNAME

#: Largest output that is looked at, number of its frames, and the most characters of each frame's tag.
_MAX_MESSAGE, _MAX_FRAMES, _MAX_TAG = 1 << 20, 4, 1000
#: Maximum number of addresses that are explained for one kernel.
_MAX_ADDRESSES = 20
_KINDS = frozenset({"display_data", "execute_result", "update_display_data"})
_TAG = re.compile("<iframe", re.IGNORECASE)
_SOURCE = re.compile(
    rf"\ssrc\s*=\s*[\"']?(https?://(?:localhost|127\.[0-9.]{{1,12}}|0\.0\.0\.0|\[::1?\]|{HOSTNAME})(?::([0-9]{{1,5}}))?)"
    r"(?=[/?#\"'\s>]|$)",
    re.IGNORECASE,
)


class FrameNotes:
    """The sentences for one notebook's kernel. Each address is explained once."""

    def __init__(self) -> None:
        self._explained: set[str] = set()

    async def explain(self, frames: Sequence[bytes]) -> list[str]:
        """Return the sentences for a message on iopub; none unless it shows a frame with a server inside."""
        index = header_index(frames)
        if index is None or not (b"display_data" in frames[index] or b"execute_result" in frames[index]):
            return []
        if len(frames[index + 3]) > _MAX_MESSAGE or b"iframe" not in frames[index + 3].lower():
            return []
        if parse(frames[index]).get("msg_type") not in _KINDS:
            return []
        found = _find_sources(frames[index + 3])
        return [_sentence(address, port) for address, port in found if self._is_new(address)]

    def _is_new(self, address: str) -> bool:
        if address in self._explained or len(self._explained) >= _MAX_ADDRESSES:
            return False
        self._explained.add(address)
        return True


def _sentence(address: str, port: str) -> str:
    return (
        f"Cannot show {address}: the browser cannot reach servers in a notebook's sandbox. Run the program in a "
        f'sandbox created over REST with "ports": [{port or 80}], and open the port\'s address there.'
    )


def _find_sources(content: bytes) -> list[tuple[str, str]]:
    """Return address and port of each frame in an output that shows the sandbox itself."""
    output: Any = None
    with suppress(ValueError, RecursionError):
        output = json.loads(content)
    data = output.get("data") if isinstance(output, dict) else None
    html = data.get("text/html") if isinstance(data, dict) else None
    if isinstance(html, list):
        html = "".join(part for part in html if isinstance(part, str))
    if not isinstance(html, str):
        return []
    found = []
    for start in islice(_TAG.finditer(html), _MAX_FRAMES):
        tag = html[start.start() : start.start() + _MAX_TAG].partition(">")[0]
        if source := _SOURCE.search(tag):
            found.append((source[1], source[2] or ""))
    return found
