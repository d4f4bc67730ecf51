"""As much of ZMTP 3.0 as a Jupyter kernel needs from its one client: NULL security, whole messages.

The guest connects to the kernel's sockets with :func:`greeting` and :func:`ready`, checks the answer with
:class:`Handshake`, and from then on only carries bytes. The host reads and writes messages with
:class:`Decoder` and :func:`encode`. Source of the format: RFC 23/ZMTP 3.0 (rfc.zeromq.org/spec/23).

Runs inside sandboxes too: standard library only.
"""

from __future__ import annotations

import struct

from .framing import copy_out

MORE, LONG, COMMAND = 1, 2, 4
_U64 = struct.Struct(">Q")

#: What a SUB socket sends to have everything.
SUBSCRIBE_ALL = b"\x00\x01\x01"


class ZmtpError(Exception):
    """The peer does not speak ZMTP 3 with NULL security, or sends more than it may."""


def greeting() -> bytes:
    """The 64 bytes that each side begins with."""
    return b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + b"\0" * 31


def ready(socket_type: bytes, identity: bytes = b"") -> bytes:
    """The READY command of a socket of this type."""
    body = b"\x05READY" + _property(b"Socket-Type", socket_type)
    if identity:
        body += _property(b"Identity", identity)
    return bytes((COMMAND, len(body))) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


class Handshake:
    """Reads the peer's greeting and READY; what follows is left in :attr:`rest`."""

    def __init__(self) -> None:
        self.is_done = False
        self.rest = b""
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        """Take what was read. Raises ZmtpError."""
        self._buffer += data
        if len(self._buffer) > 4096:
            raise ZmtpError("the greeting does not end")
        if len(self._buffer) < 64 + 2:
            return
        if self._buffer[0] != 0xFF or self._buffer[9] & 1 != 1 or self._buffer[10] < 3:
            raise ZmtpError("the peer does not speak ZMTP 3")
        if self._buffer[12:32].rstrip(b"\0") != b"NULL":
            raise ZmtpError("the peer wants security other than NULL")
        flags, size = self._buffer[64], self._buffer[65]
        if flags != COMMAND:
            raise ZmtpError("the peer sends no READY")
        if len(self._buffer) >= 66 + size:
            if not self._buffer[66:].startswith(b"\x05READY"):
                raise ZmtpError("the peer refuses the connection")
            self.is_done = True
            self.rest = self._buffer[66 + size :]
            self._buffer = b""


def encode(frames: list[bytes]) -> bytes:
    """One message as bytes."""
    return b"".join(split(frames))


def split(frames: list[bytes]) -> list[bytes]:
    """One message as bytes, in two pieces for each frame, of which the second is the frame."""
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
    """Cuts the bytes of one socket into messages, without looking into them.

    Parameters
    ----------
    max_size : int
        Largest message, bytes.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._buffer = bytearray()
        self._position = 0  # where the next frame begins

    def feed(self, data: bytes) -> list[bytes]:
        """Take what was read; whole messages are returned as they came. Raises ZmtpError."""
        self._buffer += data
        messages: list[bytes] = []
        start, position, end = 0, self._position, len(self._buffer)
        while end - position >= 2:
            flags = self._buffer[position]
            if flags & LONG:
                if end - position < 9:
                    break
                after = position + 9 + _U64.unpack_from(self._buffer, position + 1)[0]
            else:
                after = position + 2 + self._buffer[position + 1]
            if after - start > self.max_size:
                raise ZmtpError(f"a message of over {self.max_size} bytes")
            if after > end:
                break
            position = after
            if not flags & (MORE | COMMAND):  # commands go along with the message that follows
                messages.append(copy_out(self._buffer, start, position))
                start = position
        self._position = position - start
        if start:
            del self._buffer[:start]
        return messages


class Decoder:
    """Reads messages from the bytes of one socket.

    Parameters
    ----------
    max_size : int
        Largest message, bytes.
    max_frames : int
        Most frames of one message.
    """

    def __init__(self, max_size: int, max_frames: int = 4096) -> None:
        self.max_size = max_size
        self.max_frames = max_frames
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Take what was read; whole messages are returned. Raises ZmtpError."""
        self._buffer += data
        messages: list[list[bytes]] = []
        position, end = 0, len(self._buffer)
        while end - position >= 2:
            flags = self._buffer[position]
            if flags & LONG:
                if end - position < 9:
                    break
                (size,) = _U64.unpack_from(self._buffer, position + 1)
                start = position + 9
            else:
                size = self._buffer[position + 1]
                start = position + 2
            if self._size + size > self.max_size:
                raise ZmtpError(f"a message of over {self.max_size} bytes")
            if end - start < size:
                break
            if not flags & COMMAND:
                self._frames.append(copy_out(self._buffer, start, start + size))
                self._size += size
                if len(self._frames) > self.max_frames:
                    raise ZmtpError(f"a message of over {self.max_frames} parts")
                if not flags & MORE:
                    messages.append(self._frames)
                    self._frames, self._size = [], 0
            position = start + size
        if position:
            del self._buffer[:position]
        return messages
