"""Define the link's wire format: many byte streams over one. No input or output; both ends use this file.

A frame is ``length (u32), type (u8), stream (u32), payload``, big-endian. Streams are opened with a
JSON header, carry bytes under credit-based flow control, and end by an EOF in each direction or by a reset.
The host opens odd ids, the guest even ones; ids only grow.

The guest is hostile to the host. A :class:`Connection` never buffers more than one frame of input,
never accepts more than the credit that it gave, and raises :class:`ProtocolError` on the first frame
that breaks a rule. The caller then closes the link.

This module also runs inside sandboxes, so it uses only the standard library, and few imports.
"""

from __future__ import annotations

import json
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1

HELLO, OPEN, DATA, CREDIT, EOF, RESET, PING, PONG = range(1, 9)

#: Largest payload of each frame type, in bytes.
MAX_PAYLOAD = {
    HELLO: 4096,
    OPEN: 256 * 1024,
    DATA: 64 * 1024,
    CREDIT: 4,
    EOF: 0,
    RESET: 1024,
    PING: 8,
    PONG: 8,
}
#: Largest payload of frames from the guest to the host. The guest's headers have only a few short fields.
MAX_GUEST_PAYLOAD = {**MAX_PAYLOAD, HELLO: 256, OPEN: 1024}
#: Credit of a stream when it is opened, in each direction, in bytes.
INITIAL_CREDIT = 64 * 1024
#: Maximum credit of a stream, in bytes.
MAX_CREDIT = 1 << 31
#: Maximum pending output for a peer that does not read, in bytes. Beyond it the link fails.
MAX_OUTPUT = 8 * 1024 * 1024
#: Part of that output that may be data, in bytes. The rest is for answers.
DATA_OUTPUT = 1024 * 1024

_HEAD = struct.Struct(">IBI")
_U32 = struct.Struct(">I")


class ProtocolError(Exception):
    """The peer broke a rule of the format, so the link must be closed."""


class Event:
    """Action of the peer: ``kind`` is a frame type, ``value`` its content.

    HELLO and OPEN carry a dict, DATA bytes, CREDIT the new credit (int), RESET a reason (str).
    """

    __slots__ = ("kind", "stream", "value")

    def __init__(self, kind: int, stream: int, value: Any = None) -> None:
        self.kind = kind
        self.stream = stream
        self.value = value

    def __repr__(self) -> str:
        return f"Event({self.kind}, {self.stream}, {self.value!r:.60})"


class _Stream:
    __slots__ = ("credit", "has_local_eof", "has_remote_eof", "window")

    def __init__(self) -> None:
        self.credit = INITIAL_CREDIT  # what this end may still send
        self.window = INITIAL_CREDIT  # what the peer may still send
        self.has_local_eof = False
        self.has_remote_eof = False


class Connection:
    """State of one end of the link.

    Parameters
    ----------
    is_host : bool
        Whether this is the host's end.
    max_streams : int
        Maximum number of open streams of the peer. Further streams are reset immediately.
    """

    def __init__(self, is_host: bool, max_streams: int = 512) -> None:
        self.max_streams = max_streams
        self._max_payload = MAX_GUEST_PAYLOAD if is_host else MAX_PAYLOAD
        self._output = bytearray()
        self._input = bytearray()
        self._streams: dict[int, _Stream] = {}
        self._next_id = 1 if is_host else 2
        self._peer_parity = 0 if is_host else 1
        self._peer_highest = 0
        self._peer_open = 0
        self._has_hello = False

    # -- what we send ------------------------------------------------------------------------

    def hello(self, info: dict[str, Any]) -> None:
        """Send the hello, the first frame in each direction."""
        self._put(HELLO, 0, _dump({"version": VERSION, **info}))

    def open(self, header: dict[str, Any]) -> int:
        """Open a stream and return its id."""
        payload = _dump(header)
        if len(payload) > MAX_PAYLOAD[OPEN]:
            raise ValueError(f"stream header of {len(payload)} bytes; the limit is {MAX_PAYLOAD[OPEN]}")
        stream = self._next_id
        self._next_id += 2
        self._streams[stream] = _Stream()
        self._put(OPEN, stream, payload)
        return stream

    def room(self, stream: int) -> int:
        """Return how many bytes :meth:`send` accepts now: the stream's credit, limited by the space in the output."""
        state = self._streams.get(stream)
        if state is None or state.has_local_eof:
            return 0
        return max(0, min(state.credit, DATA_OUTPUT - self.output_size))

    def credit(self, stream: int) -> int:
        """Return how many bytes the peer accepts on this stream."""
        state = self._streams.get(stream)
        return 0 if state is None or state.has_local_eof else state.credit

    def is_open(self, stream: int) -> bool:
        """Return whether the stream exists and was not reset or closed in both directions."""
        return stream in self._streams

    def send(self, stream: int, data: bytes | memoryview) -> int:
        """Queue as much of ``data`` as the peer's credit allows. Return the number of queued bytes."""
        state = self._streams.get(stream)
        if state is None or state.has_local_eof:
            return 0
        count = min(len(data), state.credit)
        view = memoryview(data)
        for start in range(0, count, MAX_PAYLOAD[DATA]):
            self._put(DATA, stream, view[start : min(start + MAX_PAYLOAD[DATA], count)])
        state.credit -= count
        return count

    def grant(self, stream: int, count: int) -> None:
        """Allow the peer to send ``count`` more bytes."""
        state = self._streams.get(stream)
        if state is not None and not state.has_remote_eof and count > 0:
            state.window += count
            self._put(CREDIT, stream, _U32.pack(count))

    def send_eof(self, stream: int) -> None:
        """Signal that this end sends no more data."""
        state = self._streams.get(stream)
        if state is not None and not state.has_local_eof:
            state.has_local_eof = True
            self._put(EOF, stream, b"")
            self._drop_if_done(stream, state)

    def reset(self, stream: int, reason: str = "") -> None:
        """Close the stream in both directions immediately."""
        if self._streams.get(stream) is not None:
            self._drop(stream)
            self._put(RESET, stream, _clip(reason))

    def ping(self, payload: bytes = b"\0" * 8) -> None:
        """Ask the peer for an answer."""
        self._put(PING, 0, payload)

    @property
    def output_size(self) -> int:
        """Number of bytes that wait to be written to the peer."""
        return len(self._output)

    def take_output(self) -> bytearray:
        """Return all bytes to write to the peer, and clear the output. The caller owns the buffer."""
        data, self._output = self._output, bytearray()
        return data

    # -- what the peer sends -----------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """Parse bytes from the peer. Return its actions.

        Raises
        ------
        ProtocolError
            The peer broke a rule. The connection must not be used any further.
        """
        self._input += data
        events: list[Event] = []
        position, size = 0, len(self._input)
        while size - position >= _HEAD.size:
            length, kind, stream = _HEAD.unpack_from(self._input, position)
            limit = self._max_payload.get(kind)
            if limit is None:
                raise ProtocolError(f"unknown frame type {kind}")
            if length > limit:
                raise ProtocolError(f"frame type {kind} of {length} bytes; the limit is {limit}")
            end = position + _HEAD.size + length
            if end > size:
                break
            self._handle(kind, stream, copy_out(self._input, position + _HEAD.size, end), events)
            position = end
        if position:
            del self._input[:position]
        return events

    def _handle(self, kind: int, stream: int, payload: bytes, events: list[Event]) -> None:
        if not self._has_hello:
            if kind != HELLO:
                raise ProtocolError("the first frame is not a hello")
            info = _load(payload)
            if info.get("version") != VERSION:
                raise ProtocolError(f"the peer speaks version {info.get('version')!r:.20}, not {VERSION}")
            self._has_hello = True
            events.append(Event(HELLO, 0, info))
        elif kind == OPEN:
            self._handle_open(stream, payload, events)
        elif kind == PING:
            self._put(PONG, 0, payload)
        elif kind == PONG:
            events.append(Event(PONG, 0, payload))
        elif kind == HELLO:
            raise ProtocolError("a second hello")
        else:
            state = self._streams.get(stream)
            if state is not None:
                self._handle_stream(kind, stream, state, payload, events)
            elif not self._was_open(stream):
                raise ProtocolError(f"frame type {kind} on stream {stream}, which was never opened")
            # else: the stream was closed here before this frame arrived

    def _handle_open(self, stream: int, payload: bytes, events: list[Event]) -> None:
        if stream % 2 != self._peer_parity or stream <= self._peer_highest:
            raise ProtocolError(f"stream {stream} cannot be opened by the peer now")
        self._peer_highest = stream
        header = _load(payload)
        self._streams[stream] = _Stream()
        self._peer_open += 1
        if self._peer_open > self.max_streams:
            self.reset(stream, f"too many streams (limit {self.max_streams})")
        else:
            events.append(Event(OPEN, stream, header))

    def _handle_stream(self, kind: int, stream: int, state: _Stream, payload: bytes, events: list[Event]) -> None:
        if kind == DATA:
            if state.has_remote_eof:
                raise ProtocolError(f"data after the end of stream {stream}")
            if len(payload) > state.window:
                raise ProtocolError(f"data beyond the credit of stream {stream}")
            if payload:
                state.window -= len(payload)
                events.append(Event(DATA, stream, payload))
        elif kind == CREDIT:
            if len(payload) != _U32.size:
                raise ProtocolError("a credit frame of the wrong size")
            state.credit += _U32.unpack(payload)[0]
            if state.credit > MAX_CREDIT:
                raise ProtocolError(f"credit of stream {stream} beyond {MAX_CREDIT}")
            events.append(Event(CREDIT, stream, state.credit))
        elif kind == EOF:
            if state.has_remote_eof:
                raise ProtocolError(f"a second end of stream {stream}")
            state.has_remote_eof = True
            events.append(Event(EOF, stream))
            self._drop_if_done(stream, state)
        else:  # RESET
            self._drop(stream)
            events.append(Event(RESET, stream, payload.decode("utf-8", "replace")))

    def _was_open(self, stream: int) -> bool:
        if stream % 2 == self._peer_parity:
            return 0 < stream <= self._peer_highest
        return 0 < stream < self._next_id

    def _drop_if_done(self, stream: int, state: _Stream) -> None:
        if state.has_local_eof and state.has_remote_eof:
            self._drop(stream)

    def _drop(self, stream: int) -> None:
        del self._streams[stream]
        if stream % 2 == self._peer_parity:
            self._peer_open -= 1

    def _put(self, kind: int, stream: int, payload: bytes | memoryview) -> None:
        # One buffer, because a list of small pieces would take many times their size.
        self._output += _HEAD.pack(len(payload), kind, stream)
        self._output += payload
        if len(self._output) > MAX_OUTPUT:
            raise ProtocolError("the peer sends pings without reading the answers")


class MessageReader:
    """Parser for messages of several parts on a raw stream: ``u32 total, (u32 length, part)*``.

    Parameters
    ----------
    max_size : int
        Size of the largest message, in bytes.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Parse more bytes. Return the messages that are complete. Raises ProtocolError."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= 4:
            (total,) = _U32.unpack_from(self._buffer)
            if total > self.max_size:
                raise ProtocolError(f"a message of {total} bytes; the limit is {self.max_size}")
            if len(self._buffer) < 4 + total:
                break
            body = copy_out(self._buffer, 4, 4 + total)
            del self._buffer[: 4 + total]
            messages.append(_split(body))
        return messages


def copy_out(buffer: bytearray, start: int, end: int) -> bytes:
    """Return a part of ``buffer`` as bytes, copied once. A slice would be copied twice."""
    with memoryview(buffer) as view:
        return bytes(view[start:end])


def pack_message(*parts: bytes) -> bytes:
    """Return one message of these parts, in the format of :class:`MessageReader`."""
    body = b"".join(_U32.pack(len(part)) + part for part in parts)
    return _U32.pack(len(body)) + body


def pack_json(value: dict[str, Any]) -> bytes:
    """Return one message with one JSON part."""
    return pack_message(_dump(value))


def load_json(part: bytes) -> dict[str, Any]:
    """Parse a JSON object from the peer. Raises ProtocolError if it is not one."""
    return _load(part)


def _split(body: bytes) -> list[bytes]:
    parts, position = [], 0
    while position < len(body):
        if len(body) - position < 4:
            raise ProtocolError("a part of a message is truncated")
        (length,) = _U32.unpack_from(body, position)
        position += 4
        if length > len(body) - position:
            raise ProtocolError("a part is longer than its message")
        parts.append(body[position : position + length])
        position += length
    return parts


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _load(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError("a header that is not JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("a header that is not a JSON object")
    return value


def _clip(reason: str) -> bytes:
    return reason.encode("utf-8", "replace")[: MAX_PAYLOAD[RESET]]
