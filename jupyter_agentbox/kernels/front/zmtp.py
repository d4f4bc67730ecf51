"""The listening side's handshake of ZMTP 3.0 with NULL security; messages are ``guest.zmtp``'s.

``kernels.front.front`` speaks ZMTP to Jupyter clients by itself. libzmq would cost it a thread
and two context switches for each message, and cannot say how much it holds for whom; with the
protocol in our hands each client's buffer is bounded in bytes, and a client that does not read
harms nobody else. Announcing 3.0 makes newer peers send subscriptions as ordinary messages.
"""

from __future__ import annotations

from jupyter_agentbox.guest.zmtp import COMMAND, LONG, MORE, Decoder, ZmtpError, encode, greeting, ready, split

__all__ = ["Decoder", "ServerHandshake", "ZmtpError", "encode", "greeting", "ready", "split"]

_GREETING_SIZE = 64
#: Of READY, which has two or three short properties.
_MAX_READY = 4096


class ServerHandshake:
    """Reads a client's greeting and READY, in any pieces.

    Attributes
    ----------
    identity : bytes
        The client's own choice of a routing identity; empty where it made none.
    """

    def __init__(self) -> None:
        self.identity = b""
        self._buffer = b""

    def feed(self, data: bytes) -> bytes | None:
        """Take bytes and return those that come after the handshake, or None while it is not over.

        Raises
        ------
        ZmtpError
            As soon as it is certain that the peer speaks something else.
        """
        buffer = self._buffer = self._buffer + data
        if (
            not b"\xff".startswith(buffer[:1])
            or (len(buffer) > 9 and not buffer[9] & 1)
            or (len(buffer) > 10 and buffer[10] < 3)
        ):
            raise ZmtpError("the peer does not speak ZMTP 3")
        if len(buffer) >= 32 and buffer[12:32].rstrip(b"\0") != b"NULL":
            raise ZmtpError("the peer wants security other than NULL")
        start = _GREETING_SIZE + 2
        if len(buffer) < start:
            return None
        flags = buffer[_GREETING_SIZE]
        if not flags & COMMAND or flags & MORE:
            raise ZmtpError("the peer sends no READY")
        if flags & LONG:
            start = _GREETING_SIZE + 9
            if len(buffer) < start:
                return None
        end = start + int.from_bytes(buffer[_GREETING_SIZE + 1 : start], "big")
        if end - start > _MAX_READY:
            raise ZmtpError("READY is too long")
        if len(buffer) < end:
            return None
        if not buffer[start:end].startswith(b"\x05READY"):
            raise ZmtpError("the peer refuses the connection")
        identity = _properties(buffer[start + 6 : end]).get(b"identity", b"")
        if len(identity) > 255:
            raise ZmtpError("the identity is too long")
        self.identity = identity
        self._buffer = b""
        return buffer[end:]


def _properties(body: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    position = 0
    while position < len(body):
        name_end = position + 1 + body[position]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(body[name_end:value_start], "big")
        if value_end > len(body):
            raise ZmtpError("a property of READY is cut off")
        found[body[position + 1 : name_end].lower()] = body[value_start:value_end]
        position = value_end
    return found
