"""Parse and create Jupyter messages as far as the front needs it: which cell runs, and how to add output to it.

Only frames of bounded size are parsed; large ones are skipped. Kernel output is hostile, so a notice always has a
header that a *client* sent as its parent.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

DELIMITER = b"<IDS|MSG>"
MAX_HEADER = 16 * 1024
MAX_IDENTITIES = 16
MAX_PENDING = 1024
#: Seconds after which the ``idle`` status of a request counts as lost. They count from the kernel's reply. On control,
#: where not every kernel replies, they count from the request, if the kernel has not begun to process it.
LOST_TIME = 10.0


def header_index(frames: Sequence[bytes]) -> int | None:
    """Return the index of the header, which is the second frame after the delimiter, or None if there is none."""
    for index, frame in enumerate(frames[:MAX_IDENTITIES]):
        if frame == DELIMITER:
            return index + 2 if len(frames) >= index + 6 else None
    return None


def parse(frame: bytes) -> dict[str, Any]:
    """Return the object in a small JSON frame, or an empty one if the frame contains anything else."""
    if len(frame) > MAX_HEADER:
        return {}
    try:
        value = json.loads(frame)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Signer:
    """A signer of messages that the kernel's clients accept.

    Parameters
    ----------
    key : bytes
        The connection's signing key. With an empty key, messages are not signed.
    signature_scheme : str
        For example ``hmac-sha256``.
    """

    def __init__(self, key: bytes, signature_scheme: str = "hmac-sha256") -> None:
        self._key = key
        self._digest = signature_scheme.rpartition("-")[2]
        if not signature_scheme.startswith("hmac-") or self._digest not in hashlib.algorithms_available:
            raise ValueError(f"unknown signature scheme {signature_scheme!r}")
        self._session = uuid.uuid4().hex

    def message(self, topic: bytes, kind: str, content: dict[str, Any], parent: bytes = b"{}") -> list[bytes]:
        """Return the frames of one iopub message. ``parent`` is a header as the client sent it."""
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
        """Return whether a message, whose header is at `index`, was signed with the key."""
        return hmac.compare_digest(frames[index - 1], self._sign(frames[index : index + 4]))

    def _sign(self, frames: Sequence[bytes]) -> bytes:
        return hmac.new(self._key, b"".join(frames), self._digest).hexdigest().encode() if self._key else b""

    def renew(self, frames: list[bytes], since: float) -> list[bytes] | None:
        """Give a message a new id if it was made before ``since``, or return None if it was not.

        A kernel that continues from a snapshot sends the messages that it had in memory, just as it did before. Jupyter
        clients raise an exception when they receive a message twice, and then stop listening on that channel. A message
        with an invalid signature is returned unchanged.
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
    """An execute request: who sent it, its header as sent, and whether its failure aborts the requests after it."""

    identity: bytes
    header: bytes
    stops: bool = True


@dataclass
class _OpenRequest:
    """A request that may still be running: its queue, and the time at which it counts as finished in any case."""

    queue: tuple[str, str]
    kind: str
    expires: float
    has_begun: bool = False
    is_answered: bool = False


class RunningCell:
    """A tracker of the execute request that the kernel works on, derived from the messages that pass.

    Attributes
    ----------
    header : bytes or None
        Header of the running request as its client sent it, or None if the kernel is idle.
    is_shutdown_requested : bool
        Whether a client asked the kernel to shut down.
    count : int
        The kernel's own execution count, as last seen.
    """

    def __init__(self) -> None:
        self.header: bytes | None = None
        self.is_shutdown_requested = False
        self.count = 0
        self._last: tuple[str, Request] | None = None
        self._open: OrderedDict[str, _OpenRequest] = OrderedDict()
        self._is_idle = False
        self._begun = ""
        self._lost: deque[str] = deque(maxlen=64)
        self._pending: OrderedDict[str, Request] = OrderedDict()
        self._running = ""

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs, or was sent and has not finished."""
        self._forget_lost()
        return bool(self._pending)

    @property
    def is_working(self) -> bool:
        """Whether any request may still be running.

        Every request, of whatever kind, ends with the status ``idle``. That message may be lost: a kernel drops what
        its socket cannot queue, and not every kernel sends the status for every request.
        """
        self._forget_lost()
        return bool(self._open) or not self._is_idle

    @property
    def pending(self) -> list[Request]:
        """The cells that were sent and have not finished."""
        self._forget_lost()
        return list(self._pending.values())

    def track_request(self, frames: Sequence[bytes], identity: bytes = b"", channel: str = "shell") -> bool:
        """Track a message that a client sends on shell or control. Return whether it is a cell to run."""
        index = header_index(frames)
        header = parse(frames[index]) if index is not None else {}
        kind, request_id = header.get("msg_type"), header.get("msg_id")
        if index is None or not isinstance(kind, str) or not isinstance(request_id, str):
            return False  # no kernel processes it
        # At the limit, the earlier requests keep the kernel busy until there is room for others
        if len(self._open) < MAX_PENDING:
            expires = time.monotonic() + LOST_TIME if channel == "control" else math.inf
            self._open[request_id] = _OpenRequest((channel, str(header.get("subshell_id"))[:64]), kind, expires)
        self.is_shutdown_requested |= kind == "shutdown_request"
        if kind == "execute_request":
            stops = parse(frames[index + 3]).get("stop_on_error") is not False
            self._pending[request_id] = Request(identity, frames[index], stops)
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
        return kind == "execute_request"

    def withdraw(self, frames: Sequence[bytes]) -> Request | None:
        """Forget an execute request that will not be forwarded, and return it.

        For any other message, return None and forget nothing.
        """
        index = header_index(frames)
        request_id = parse(frames[index]).get("msg_id") if index is not None else None
        found = self._pending.pop(request_id, None) if isinstance(request_id, str) else None
        if found is not None:
            self._open.pop(str(request_id), None)
        return found

    def track_output(self, frames: Sequence[bytes]) -> None:
        """Track a message that the kernel sends on iopub."""
        index = header_index(frames)
        if index is None or b'"status"' not in frames[index][:MAX_HEADER]:
            return
        if parse(frames[index]).get("msg_type") != "status":
            return
        state = parse(frames[index + 3]).get("execution_state")
        request = parse(frames[index + 1]).get("msg_id")
        if request in self._lost:
            return  # a late message of such a request proves nothing, because the remaining ones may never arrive
        self._is_idle = state == "idle"
        if not isinstance(request, str):
            return
        if state == "busy":
            self._begun = request
            if (current := self._open.get(request)) is not None:
                current.has_begun = True
                current.expires = current.expires if current.is_answered else math.inf
            if request in self._pending:
                self._running, self.header = request, self._pending[request].header
        elif state == "idle":
            self._finish(request)

    def _finish(self, request: str) -> list[str]:
        """Mark a request as finished, and with it earlier ones in its queue that must have finished.

        Return all of them.

        An earlier request must have finished if the kernel never reported it as busy, if it is a message without a
        reply, or if both are cells, because the kernel runs cells one after the other.
        """
        before = []
        if (current := self._open.get(request)) is not None and current.has_begun:
            for name, other in self._open.items():
                if name == request:
                    break
                is_past = not other.has_begun or not other.kind.endswith("_request")
                if other.queue == current.queue and (is_past or current.kind == other.kind == "execute_request"):
                    before.append(name)
        for name in (finished := [*before, request]):
            self._open.pop(name, None)
            if name in self._pending:
                self._last = name, self._pending.pop(name)
            if name == self._running:
                self._running, self.header = "", None
        return finished

    def _forget_lost(self) -> None:
        """Stop waiting for requests whose ``idle`` status was lost."""
        now = time.monotonic()
        for request in [name for name, current in self._open.items() if current.expires <= now]:
            finished = self._finish(request)
            self._is_idle |= self._begun in finished
            self._lost.extend(finished)

    def track_reply(self, frames: Sequence[bytes]) -> bool:
        """Track a reply of the kernel on shell or control.

        Return whether it is a failure that aborts the queued cells.
        """
        index = header_index(frames)
        kind = parse(frames[index]).get("msg_type") if index is not None else None
        if index is None or not str(kind).endswith("_reply"):
            return False
        request_id = parse(frames[index + 1]).get("msg_id")
        current = self._open.get(request_id) if isinstance(request_id, str) else None
        if current is not None:
            current.is_answered, current.expires = True, time.monotonic() + LOST_TIME
        if kind != "execute_reply":
            return False
        reply = parse(frames[index + 3])
        if type(reply.get("execution_count")) is int:
            self.count = reply["execution_count"]
        request = self._pending.get(request_id) if isinstance(request_id, str) else None
        if request is None and self._last is not None and self._last[0] == request_id:
            request = self._last[1]
        status = reply.get("status") or parse(frames[index + 2]).get("status")
        return status == "error" and request is not None and request.stops

    def clear(self) -> None:
        """Forget everything, because the kernel has ended."""
        self.header, self._running, self.is_shutdown_requested = None, "", False
        self._begun, self._is_idle = "", False
        self._open.clear()
        self._lost.clear()
        self._pending.clear()
