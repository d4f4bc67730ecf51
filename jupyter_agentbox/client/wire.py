"""Provide the parts of both clients that need no I/O: addresses, queries, answers, event streams."""

from __future__ import annotations

import base64
import codecs
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from msgspec import UNSET, UnsetType

from jupyter_agentbox.models import ErrorAnswer, ExitEvent, OutputEvent
from jupyter_agentbox.models.outputs import Event

from .errors import ApiError, ChecksumMismatch, InvalidRequest, UnexpectedAnswer, make_error

#: Maximum size of one JSON answer, and of one event of a stream, in bytes.
MAX_ANSWER = 512 * 1024 * 1024
MAX_EVENT = 128 * 1024 * 1024
#: Number of bytes to send or hash at a time.
CHUNK = 256 * 1024
#: Seconds that an answer may take beyond the server's own timeout for the call.
SLACK = 30.0
#: Seconds without data after which an event stream fails. The server sends a keep-alive every 15 s.
STREAM_TIMEOUT = 60.0
#: Timeout for installing packages while a sandbox is created, in seconds.
INSTALL_TIMEOUT = 600.0

Decode = Callable[[bytes], Any]


class Output(msgspec.Struct, frozen=True):
    """Output of a process or command.

    Parameters
    ----------
    stream : str
        ``stdout`` or ``stderr``; a terminal's output is ``stdout``.
    data : bytes
        Output as bytes.
    text : str
        Output as text. An incomplete character at the end is returned with the next event.
    offset : int
        Offset of the first byte in the whole output.
    """

    stream: Literal["stdout", "stderr"]
    data: bytes
    text: str
    offset: int


class Transferred(msgspec.Struct, frozen=True):
    """Size of a download in bytes, and its SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


def segment(text: str, field: str = "id") -> str:
    """Quote a name as one segment of a path. Raises InvalidRequest for a name that would change the path."""
    if not text or text in (".", ".."):
        raise InvalidRequest(f"{text!r} is not a valid name", field=field)
    return quote(text, safe="")


def make_query(query: msgspec.Struct | None) -> list[tuple[str, str | int | float | bool | None]]:
    """Return a query as pairs. Omits fields with their default value."""
    pairs: list[tuple[str, str | int | float | bool | None]] = []
    for name, value in (msgspec.to_builtins(query) if query is not None else {}).items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                pairs.append((name, str(item).lower() if isinstance(item, bool) else str(item)))
    return pairs


def content(data: str | bytes, text_field: str = "text", bytes_field: str = "base64") -> dict[str, Any]:
    """Return the fields of a request body for text or bytes."""
    return {text_field: data} if isinstance(data, str) else {bytes_field: bytes(data)}


def unset(value: Any) -> Any:
    """Return a value, or UNSET for None, with which a caller omits a field."""
    found: Any | UnsetType = UNSET if value is None else value
    return found


def decode_answer(data: bytes, answer: Any) -> Any:
    """Decode an answer's body. Raises UnexpectedAnswer."""
    try:
        return msgspec.json.decode(data or b"null", type=answer)
    except ValueError as error:
        raise UnexpectedAnswer(f"the response does not match this client's version: {error}", status=200) from None


def decode_error(status: int, data: bytes, place: str) -> ApiError:
    """Return the error for an answer, whether from the API or from another program."""
    try:
        return make_error(msgspec.json.decode(data, type=ErrorAnswer), status)
    except ValueError:
        what = "a redirect, which is never followed" if 300 <= status < 400 else f"status {status}"
        return UnexpectedAnswer(f"{place} does not serve sandboxes: it responded with {what}", status=status)


class EventReader:
    """Parser of the API's server-sent events.

    Parameters
    ----------
    decoders : mapping
        Functions that decode an event's data, by the event's name.
    last : str
        Name of the event that ends a stream.

    Attributes
    ----------
    found : deque
        Parsed events not yet read; a failure is an error object.
    is_done : bool
        Whether the last event was parsed.
    """

    def __init__(self, decoders: Mapping[str, Decode], last: str) -> None:
        self.found: deque[Any] = deque()
        self.is_done = False
        self._decoders, self._last = decoders, last
        self._rest = bytearray()
        self._name = ""

    def feed(self, data: bytes) -> None:
        """Parse bytes. Raises UnexpectedAnswer if they are not an event stream of this API."""
        if len(self._rest) + len(data) > MAX_EVENT:
            raise UnexpectedAnswer("an event of the stream is too large", status=200)
        self._rest += data
        if b"\n" not in data:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            if line.startswith(b"event: "):
                self._name = line[7:].decode("ascii", "replace")
            elif line.startswith(b"data: "):
                self._take(line[6:])

    def _take(self, data: bytes) -> None:
        if self._name == "failure":
            self.found.append(make_error(decode_answer(data, ErrorAnswer), 200))
            self.is_done = True
        elif (decode := self._decoders.get(self._name)) is not None:  # other events come from a newer server
            self.found.append(decode(data))
            self.is_done = self._name == self._last

    def end(self) -> None:
        """Handle the end of the data. Raises UnexpectedAnswer if the last event is missing."""
        if not self.is_done:
            raise UnexpectedAnswer("the stream was cut off before its end", status=200)


def output_decoders() -> dict[str, Decode]:
    """Return the decoders for the events of a command, with base64 output. Each stream needs new ones."""

    def output(stream: Literal["stdout", "stderr"]) -> Decode:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(line: bytes) -> Output:
            event: OutputEvent = decode_answer(line, OutputEvent)
            try:
                data = base64.b64decode(event.text)
            except ValueError:
                raise UnexpectedAnswer("a stream event does not match this client's version", status=200) from None
            return Output(stream, data, decoder.decode(data), event.offset)

        return decode

    return {
        "stdout": output("stdout"),
        "stderr": output("stderr"),
        "exit": lambda data: decode_answer(data, ExitEvent),
    }


def code_decoders() -> dict[str, Decode]:
    """Return the decoders for the events of code."""
    return {
        name: lambda data: decode_answer(data, Event)
        for name in ("stream", "display", "result", "clear", "error", "done")
    }


def check_digest(announced: str, found: bytes) -> None:
    """Compare a digest with the SHA-256 of a ``Content-Digest`` (RFC 9530). Raises ChecksumMismatch."""
    if announced != f"sha-256=:{base64.b64encode(found).decode()}:":
        raise ChecksumMismatch(f"the SHA-256 is {found.hex()} instead of {announced:.80}", field="sha256")
