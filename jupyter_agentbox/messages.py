"""The little that the front knows of Jupyter's messages: which cell runs, and how to say something in it.

Everything is read from frames of bounded size and nothing from large ones; what the kernel sends
is hostile, so a notice is always parented to a header that a *client* sent.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

DELIMITER = b"<IDS|MSG>"
MAX_HEADER = 16 * 1024
MAX_IDENTITIES = 16
MAX_PENDING = 1024

_WATCHED = (b"execute_request", b"shutdown_request")


def header_index(frames: Sequence[bytes]) -> int | None:
    """Find the header: the second frame after the delimiter, or None where there is none."""
    for index, frame in enumerate(frames[:MAX_IDENTITIES]):
        if frame == DELIMITER:
            return index + 2 if len(frames) >= index + 6 else None
    return None


def parse(frame: bytes) -> dict[str, Any]:
    """Read a small JSON object; an empty one where it is none."""
    if len(frame) > MAX_HEADER:
        return {}
    try:
        value = json.loads(frame)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Signer:
    """Makes messages that a client of the kernel accepts.

    Parameters
    ----------
    key : bytes
        The session's key; empty signs nothing.
    signature_scheme : str
        Such as ``hmac-sha256``.
    """

    def __init__(self, key: bytes, signature_scheme: str = "hmac-sha256") -> None:
        self._key = key
        self._digest = signature_scheme.rpartition("-")[2]
        if not signature_scheme.startswith("hmac-") or self._digest not in hashlib.algorithms_available:
            raise ValueError(f"unknown signature scheme {signature_scheme!r}")
        self._session = uuid.uuid4().hex

    def message(self, topic: bytes, kind: str, content: dict[str, Any], parent: bytes = b"{}") -> list[bytes]:
        """Make the frames of one iopub message; ``parent`` is a header as the client sent it."""
        header = {
            "msg_id": uuid.uuid4().hex,
            "msg_type": kind,
            "session": self._session,
            "username": "agentbox",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(),
            "version": "5.4",
        }
        signed = [json.dumps(header).encode(), parent, b"{}", json.dumps(content).encode()]
        return [topic, DELIMITER, self._sign(signed), *signed]

    def is_signed(self, frames: Sequence[bytes], index: int) -> bool:
        """Whether a message, whose header is at that index, was made by somebody who has the key."""
        return hmac.compare_digest(frames[index - 1], self._sign(frames[index : index + 4]))

    def _sign(self, frames: Sequence[bytes]) -> bytes:
        return hmac.new(self._key, b"".join(frames), self._digest).hexdigest().encode() if self._key else b""

    def renew(self, frames: list[bytes], since: float) -> list[bytes] | None:
        """Give a message an id of its own, if it was made before ``since``; None where it was made later.

        A kernel that goes on from a snapshot says what it had in memory then, as it did before. Jupyter's clients raise
        at a message that they have had, and hear nothing more on that channel. What was not signed well stays so.
        """
        index = header_index(frames)
        header = parse(frames[index]) if index is not None else {}
        try:
            made = datetime.datetime.fromisoformat(str(header["date"]).replace("Z", "+00:00")).timestamp()
        except (KeyError, ValueError, OverflowError):
            return None
        if index is None or made >= since:
            return None
        if not self.is_signed(frames, index):
            return frames
        signed = [json.dumps({**header, "msg_id": uuid.uuid4().hex}).encode(), *frames[index + 1 : index + 4]]
        return [*frames[: index - 1], self._sign(signed), *signed, *frames[index + 4 :]]


class Request(NamedTuple):
    """An execute request as its client sent it: who, its header, and whether its failure aborts those behind it."""

    identity: bytes
    header: bytes
    stops: bool = True


class RunningCell:
    """Which execute request the kernel works on, seen from the messages that pass.

    Attributes
    ----------
    header : bytes or None
        The header of the running request as its client sent it, or None when the kernel is idle.
    is_shutdown_asked : bool
        A client asked the kernel to shut down.
    count : int
        The kernel's own count of what it has run, as far as it was heard.
    """

    def __init__(self) -> None:
        self.header: bytes | None = None
        self.is_shutdown_asked = False
        self.count = 0
        self._last: tuple[str, Request] | None = None
        self._unanswered = 0
        self._is_idle = False
        self._pending: OrderedDict[str, Request] = OrderedDict()
        self._running = ""

    @property
    def is_busy(self) -> bool:
        """Whether a request runs, or has been sent and not been answered."""
        return bool(self._pending)

    @property
    def is_working(self) -> bool:
        """Whether any request may still run; each one, of whatever kind, ends with the status ``idle``."""
        return self._unanswered > 0 or not self._is_idle

    @property
    def pending(self) -> list[Request]:
        """What has been asked for and was not answered."""
        return list(self._pending.values())

    def saw_request(self, frames: Sequence[bytes], identity: bytes = b"") -> bool:
        """Look at what a client sends on shell or control; whether it is a cell to run."""
        index = header_index(frames)
        self._unanswered += 1
        if index is None or not any(kind in frames[index][:MAX_HEADER] for kind in _WATCHED):
            return False
        header = parse(frames[index])
        self.is_shutdown_asked |= header.get("msg_type") == "shutdown_request"
        if header.get("msg_type") == "execute_request" and isinstance(header.get("msg_id"), str):
            stops = parse(frames[index + 3]).get("stop_on_error") is not False
            self._pending[header["msg_id"]] = Request(identity, frames[index], stops)
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
            return True
        return False

    def withdraw(self, frames: Sequence[bytes]) -> Request | None:
        """Forget an execute request that will not be sent on; None, and nothing is forgotten, for any other message."""
        index = header_index(frames)
        request_id = parse(frames[index]).get("msg_id") if index is not None else None
        found = self._pending.pop(request_id, None) if isinstance(request_id, str) else None
        if found is not None:
            self._unanswered = max(0, self._unanswered - 1)
        return found

    def saw_output(self, frames: Sequence[bytes]) -> None:
        """Look at what the kernel sends on iopub."""
        index = header_index(frames)
        if index is None or b'"status"' not in frames[index][:MAX_HEADER]:
            return
        if parse(frames[index]).get("msg_type") != "status":
            return
        state = parse(frames[index + 3]).get("execution_state")
        self._is_idle = state == "idle"
        if self._is_idle:
            self._unanswered = max(0, self._unanswered - 1)
        request = parse(frames[index + 1]).get("msg_id")
        if not isinstance(request, str):
            return
        if state == "busy" and request in self._pending:
            self._running, self.header = request, self._pending[request].header
        elif state == "idle":
            if request in self._pending:
                self._last = request, self._pending.pop(request)
            if request == self._running:
                self._running, self.header = "", None

    def saw_reply(self, frames: Sequence[bytes]) -> bool:
        """Look at what the kernel sends on shell; whether it is a failure that aborts the cells behind it."""
        index = header_index(frames)
        if index is None or b'"execute_reply"' not in frames[index][:MAX_HEADER]:
            return False
        reply = parse(frames[index + 3])
        if type(reply.get("execution_count")) is int:
            self.count = reply["execution_count"]
        request_id = parse(frames[index + 1]).get("msg_id")
        request = self._pending.get(request_id) if isinstance(request_id, str) else None
        if request is None and self._last is not None and self._last[0] == request_id:
            request = self._last[1]
        status = reply.get("status") or parse(frames[index + 2]).get("status")
        return status == "error" and request is not None and request.stops

    def clear(self) -> None:
        """Forget all: the kernel is gone."""
        self.header, self._running, self.is_shutdown_asked = None, "", False
        self._unanswered, self._is_idle = 0, False
        self._pending.clear()
