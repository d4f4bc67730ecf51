"""The little that the front knows of Jupyter's messages: which cell runs, and how to say something in it.

Everything is read from frames of bounded size and nothing from large ones; what the kernel sends
is hostile, so a notice is always parented to a header that a *client* sent.
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
#: Seconds after which the news that a request is over counts as lost: since the kernel's reply; on control, where not
#: every kernel answers, since it was asked and has not begun.
LOST_TIME = 10.0


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


@dataclass
class _Asked:
    """A request that is not known to be over: where it stands in line, and when it counts as over in any case."""

    lane: tuple[str, str]
    kind: str
    over: float
    has_begun: bool = False
    is_answered: bool = False


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
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._is_idle = False
        self._begun = ""
        self._lost: deque[str] = deque(maxlen=64)
        self._pending: OrderedDict[str, Request] = OrderedDict()
        self._running = ""

    @property
    def is_busy(self) -> bool:
        """Whether a cell runs, or has been sent and not been answered."""
        self._forget_lost()
        return bool(self._pending)

    @property
    def is_working(self) -> bool:
        """Whether any request may still run. Each one, of whatever kind, ends with the status ``idle``, but that may be
        lost: a kernel drops what its socket cannot queue, and not every kernel says it of everything."""
        self._forget_lost()
        return bool(self._asked) or not self._is_idle

    @property
    def pending(self) -> list[Request]:
        """Cells that were sent and not answered."""
        self._forget_lost()
        return list(self._pending.values())

    def saw_request(self, frames: Sequence[bytes], identity: bytes = b"", channel: str = "shell") -> bool:
        """Look at what a client sends on shell or control; whether it is a cell to run."""
        index = header_index(frames)
        header = parse(frames[index]) if index is not None else {}
        kind, request_id = header.get("msg_type"), header.get("msg_id")
        if index is None or not isinstance(kind, str) or not isinstance(request_id, str):
            return False  # no kernel does anything with it
        if len(self._asked) < MAX_PENDING:  # those before it keep the kernel busy until there is room for others
            over = time.monotonic() + LOST_TIME if channel == "control" else math.inf
            self._asked[request_id] = _Asked((channel, str(header.get("subshell_id"))[:64]), kind, over)
        self.is_shutdown_asked |= kind == "shutdown_request"
        if kind == "execute_request":
            stops = parse(frames[index + 3]).get("stop_on_error") is not False
            self._pending[request_id] = Request(identity, frames[index], stops)
            if len(self._pending) > MAX_PENDING:
                self._pending.popitem(last=False)
        return kind == "execute_request"

    def withdraw(self, frames: Sequence[bytes]) -> Request | None:
        """Forget an execute request that will not be sent on; None, and nothing is forgotten, for any other message."""
        index = header_index(frames)
        request_id = parse(frames[index]).get("msg_id") if index is not None else None
        found = self._pending.pop(request_id, None) if isinstance(request_id, str) else None
        if found is not None:
            self._asked.pop(str(request_id), None)
        return found

    def saw_output(self, frames: Sequence[bytes]) -> None:
        """Look at what the kernel sends on iopub."""
        index = header_index(frames)
        if index is None or b'"status"' not in frames[index][:MAX_HEADER]:
            return
        if parse(frames[index]).get("msg_type") != "status":
            return
        state = parse(frames[index + 3]).get("execution_state")
        request = parse(frames[index + 1]).get("msg_id")
        if request in self._lost:
            return  # what comes late of it tells nothing: the rest may not come
        self._is_idle = state == "idle"
        if not isinstance(request, str):
            return
        if state == "busy":
            self._begun = request
            if (asked := self._asked.get(request)) is not None:
                asked.has_begun = True
                asked.over = asked.over if asked.is_answered else math.inf
            if request in self._pending:
                self._running, self.header = request, self._pending[request].header
        elif state == "idle":
            self._is_over(request)

    def _is_over(self, request: str) -> list[str]:
        """A request is over. So are those before it in its line that the kernel never spoke of, or that it can't be at
        any more: it takes cells one after the other, and what is no request has no reply. Returns all of them."""
        before = []
        if (asked := self._asked.get(request)) is not None and asked.has_begun:
            for name, other in self._asked.items():
                if name == request:
                    break
                is_past = not other.has_begun or not other.kind.endswith("_request")
                if other.lane == asked.lane and (is_past or asked.kind == other.kind == "execute_request"):
                    before.append(name)
        for name in (over := [*before, request]):
            self._asked.pop(name, None)
            if name in self._pending:
                self._last = name, self._pending.pop(name)
            if name == self._running:
                self._running, self.header = "", None
        return over

    def _forget_lost(self) -> None:
        """Go on without the news that was lost."""
        now = time.monotonic()
        for request in [name for name, asked in self._asked.items() if asked.over <= now]:
            over = self._is_over(request)
            self._is_idle |= self._begun in over
            self._lost.extend(over)

    def saw_reply(self, frames: Sequence[bytes]) -> bool:
        """Look at what the kernel answers on shell or control; whether it is a failure that aborts the cells behind."""
        index = header_index(frames)
        kind = parse(frames[index]).get("msg_type") if index is not None else None
        if index is None or not str(kind).endswith("_reply"):
            return False
        request_id = parse(frames[index + 1]).get("msg_id")
        asked = self._asked.get(request_id) if isinstance(request_id, str) else None
        if asked is not None:
            asked.is_answered, asked.over = True, time.monotonic() + LOST_TIME
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
        """Forget all: the kernel is gone."""
        self.header, self._running, self.is_shutdown_asked = None, "", False
        self._begun, self._is_idle = "", False
        self._asked.clear()
        self._lost.clear()
        self._pending.clear()
