"""Implement ZMTP 3.0 with NULL security, as far as Jupyter's sockets need it. No input or output.

Both sides of a connection begin with :func:`greeting` and :func:`ready`, and check the peer's with :class:`Handshake`.
After that the guest, which connects to the kernel's sockets, only carries complete messages (:class:`Splitter`). The
host, to which Jupyter's clients connect, reads and writes them (:class:`Decoder`, :func:`encode`). Announcing version
3.0 makes newer peers send subscriptions as ordinary messages. The format is specified in RFC 23/ZMTP 3.0
(rfc.zeromq.org/spec/23).

This module also runs inside sandboxes, so it uses only the standard library.
"""

from __future__ import annotations

import struct

from .framing import copy_out

MORE, LONG, COMMAND = 1, 2, 4
_U64 = struct.Struct(">Q")
_GREETING_SIZE = 64
#: Maximum size of READY, which has two or three short properties, in bytes.
_MAX_READY = 4096

#: Message with which a SUB socket subscribes to everything.
SUBSCRIBE_ALL = b"\x00\x01\x01"


class ZmtpError(Exception):
    """The peer does not use ZMTP 3 with NULL security, or exceeds a limit."""


def greeting() -> bytes:
    """Return the 64 bytes with which each side begins."""
    return b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + b"\0" * 31


def ready(socket_type: bytes, identity: bytes = b"") -> bytes:
    """Return the READY command of a socket of this type."""
    body = b"\x05READY" + _property(b"Socket-Type", socket_type)
    if identity:
        body += _property(b"Identity", identity)
    return bytes((COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


class Handshake:
    """Parser for the peer's greeting and READY, which may arrive in any pieces.

    Attributes
    ----------
    identity : bytes
        Routing identity that the peer chose; empty if it chose none.
    """

    def __init__(self) -> None:
        self.identity = b""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> bytes | None:
        """Parse more bytes. Return the bytes after the handshake, or None while the handshake is incomplete.

        Raises
        ------
        ZmtpError
            The peer uses another protocol. Raised as early as possible.
        """
        self._buffer += data
        buffer = self._buffer
        if (
            not b"\xff".startswith(buffer[:1])
            or (len(buffer) > 9 and not buffer[9] & 1)
            or (len(buffer) > 10 and buffer[10] < 3)
        ):
            raise ZmtpError("the peer does not speak ZMTP 3")
        if len(buffer) >= 32 and buffer[12:32].rstrip(b"\0") != b"NULL":
            raise ZmtpError("the peer requires security other than NULL")
        if len(buffer) > _GREETING_SIZE and buffer[_GREETING_SIZE] & (COMMAND | MORE) != COMMAND:
            raise ZmtpError("the peer did not send READY")
        frame = _read_header(buffer, _GREETING_SIZE)
        if frame is None:
            return None
        _, start, end = frame
        if end - start > _MAX_READY:
            raise ZmtpError("READY is too long")
        if len(buffer) < end:
            return None
        if not buffer.startswith(b"\x05READY", start, end):
            raise ZmtpError("the peer refused the connection")
        self.identity = _parse_properties(bytes(buffer[start + 6 : end])).get(b"identity", b"")
        if len(self.identity) > 255:
            raise ZmtpError("the identity is too long")
        self._buffer = bytearray()
        return bytes(buffer[end:])


def _parse_properties(body: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    position = 0
    while position < len(body):
        name_end = position + 1 + body[position]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(body[name_end:value_start], "big")
        if value_end > len(body):
            raise ZmtpError("a property of READY is truncated")
        found[body[position + 1 : name_end].lower()] = body[value_start:value_end]
        position = value_end
    return found


def _read_header(buffer: bytearray, position: int) -> tuple[int, int, int] | None:
    """Return a frame's flags and the start and end of its content, or None while its header is incomplete."""
    available = len(buffer) - position
    if available < 2:
        return None
    flags = buffer[position]
    if not flags & LONG:
        start = position + 2
        return flags, start, start + buffer[position + 1]
    if available < 9:
        return None
    start = position + 9
    return flags, start, start + _U64.unpack_from(buffer, position + 1)[0]


def encode(frames: list[bytes]) -> bytes:
    """Return one message as bytes."""
    return b"".join(split(frames))


def split(frames: list[bytes]) -> list[bytes]:
    """Return one message as byte strings: for each frame its header, then the frame itself."""
    parts = []
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = MORE if index < last else 0
        if len(frame) > 255:
            parts.append(bytes((flags | LONG,)) + _U64.pack(len(frame)))
        else:
            parts.append(bytes((flags, len(frame))))
        parts.append(frame)
    return parts


class Splitter:
    """Parser that splits the bytes of one socket into messages, without parsing their content.

    Parameters
    ----------
    max_size : int
        Size of the largest message, in bytes.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._buffer = bytearray()
        self._position = 0  # start of the next frame

    def feed(self, data: bytes) -> list[bytes]:
        """Parse more bytes. Return the complete messages in their original encoding. Raises ZmtpError."""
        self._buffer += data
        messages: list[bytes] = []
        start, position, end = 0, self._position, len(self._buffer)
        while frame := _read_header(self._buffer, position):
            flags, _, after = frame
            if after - start > self.max_size:
                raise ZmtpError(f"a message of more than {self.max_size} bytes")
            if after > end:
                break
            position = after
            if not flags & (MORE | COMMAND):  # a command is passed on with the message that follows it
                messages.append(copy_out(self._buffer, start, position))
                start = position
        self._position = position - start
        if start:
            del self._buffer[:start]
        return messages


class Decoder:
    """Parser for messages in the bytes of one socket.

    Parameters
    ----------
    max_size : int
        Size of the largest message, in bytes.
    max_frames : int
        Maximum number of frames in one message.
    """

    def __init__(self, max_size: int, max_frames: int = 4096) -> None:
        self.max_size = max_size
        self.max_frames = max_frames
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Parse more bytes. Return the messages that are complete. Raises ZmtpError."""
        self._buffer += data
        messages: list[list[bytes]] = []
        position, end = 0, len(self._buffer)
        while frame := _read_header(self._buffer, position):
            flags, start, after = frame
            if self._size + after - start > self.max_size:
                raise ZmtpError(f"a message of more than {self.max_size} bytes")
            if after > end:
                break
            if not flags & COMMAND:
                self._frames.append(copy_out(self._buffer, start, after))
                self._size += after - start
                if len(self._frames) > self.max_frames:
                    raise ZmtpError(f"a message of more than {self.max_frames} parts")
                if not flags & MORE:
                    messages.append(self._frames)
                    self._frames, self._size = [], 0
            position = after
        if position:
            del self._buffer[:position]
        return messages
