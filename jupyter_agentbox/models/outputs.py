"""What code put out: from a kernel's messages to one result of bounded size.

Sans-I/O: ``kernels.kernelclient`` feeds it contents of messages, which are hostile. Each kind is read
into a fixed shape, so that what nobody asked for is skipped and never becomes an object; what is beyond a limit is
counted and not kept. JSON inside of a MIME bundle stays the text it came as.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from jupyter_agentbox.spec import MIB, End

T = TypeVar("T")

#: Bytes of an error's or a reply's content that are read.
MAX_ERROR = 1 * MIB
#: Colons in a bundle's content, each of which may make an entry; more than any notebook's outputs have.
MAX_COLONS = 200_000
#: Most that a caller may set a limit to.
MAX_LIMIT = 256 * MIB

Status = Literal["ok", "error", "timed_out", "interrupted", "kernel_died"]


class OutputLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of what code puts out is kept.

    Parameters
    ----------
    stream_bytes : int
        UTF-8 bytes of stdout, and of stderr: the first ones.
    display_bytes : int
        Bytes of displays and the result together. One that does not fit is left out whole.
    displays : int
        Number of displays.
    """

    stream_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] = 1 * MIB
    display_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] = 10 * MIB
    displays: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1000


class Display(msgspec.Struct, frozen=True):
    """One MIME bundle.

    Parameters
    ----------
    data : dict
        By MIME type: a str, which is base64 for binary types as in notebooks; for JSON types a ``msgspec.Raw`` with
        the JSON text (``msgspec.json.decode`` reads it, encoding writes it as it is).
    metadata : dict
        As the kernel gave it, of ``msgspec.Raw``.
    display_id : str or None
        What later updates name it by.
    """

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str | None = None


class CodeError(msgspec.Struct, frozen=True):
    """An exception: its class, its text, and the traceback's lines with terminal colours, as Jupyter has them."""

    ename: str
    evalue: str
    traceback: list[str] = []


class TotalBytes(msgspec.Struct, frozen=True):
    """How much there was, kept or not, what was cleared included."""

    stdout: int = 0
    stderr: int = 0
    displays: int = 0


class CodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of code came to.

    Parameters
    ----------
    status : str
        ``ok``; ``error``, it raised; ``interrupted``; ``timed_out``; ``kernel_died``.
    stdout, stderr : str
        What is left of them after ``clear_output``.
    result : Display or None
        The last expression's value.
    displays : list of Display
        In order, each in its latest version.
    error : CodeError or None
    execution_count : int or None
    duration : float
        Seconds from sending the code to the end, or to giving up.
    truncated : bool
        Something was left out, by a limit.
    total_bytes : TotalBytes
    has_started : bool
        The kernel began to run it. False when other code kept the kernel busy for all the time there was.
    is_busy : bool
        It still runs: it did not heed the interrupt.
    end : End or None
        Why the kernel is gone.
    message : str or None
        A sentence for a person, where the status does not say it all.
    context : str
        The context's name.
    epoch : int
        Counts the context's kernels; when it has changed, variables are gone.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    result: Display | None = None
    displays: list[Display] = []
    error: CodeError | None = None
    execution_count: int | None = None
    duration: float = 0.0
    truncated: bool = False
    total_bytes: TotalBytes = TotalBytes()
    has_started: bool = True
    is_busy: bool = False
    end: End | None = None
    message: str | None = None
    context: str = "default"
    epoch: int = 0


class ContextInfo(msgspec.Struct, frozen=True):
    """A context as others see it.

    Parameters
    ----------
    name : str
    language : str
    state : str
        ``starting``, ``idle``, ``busy`` or ``dead``; the next run in a dead one starts a new kernel.
    epoch : int
        Counts its kernels.
    is_notebook : bool
        It is the kernel of an open notebook.
    end : End or None
        How a dead one ended.
    """

    name: str
    language: str
    state: Literal["starting", "idle", "busy", "dead"]
    epoch: int
    is_notebook: bool = False
    end: End | None = None


class ContextList(msgspec.Struct, frozen=True):
    """The kernels of a sandbox."""

    contexts: list[ContextInfo]


class StreamEvent(msgspec.Struct, frozen=True, tag_field="event", tag="stream"):
    """More text on stdout or stderr."""

    name: Literal["stdout", "stderr"]
    text: str


class DisplayEvent(msgspec.Struct, frozen=True, tag_field="event", tag="display"):
    """A display, or the new version of the one with its ``display_id``."""

    display: Display
    is_update: bool = False


class ResultEvent(msgspec.Struct, frozen=True, tag_field="event", tag="result"):
    """The last expression's value."""

    display: Display


class ClearEvent(msgspec.Struct, frozen=True, tag_field="event", tag="clear"):
    """All that came before is to be taken off the page."""


class ErrorEvent(msgspec.Struct, frozen=True, tag_field="event", tag="error"):
    """The code raised."""

    error: CodeError


class DoneEvent(msgspec.Struct, frozen=True, tag_field="event", tag="done"):
    """The last event of every run."""

    result: CodeResult


Event = StreamEvent | DisplayEvent | ResultEvent | ClearEvent | ErrorEvent | DoneEvent

# The shapes that messages are read into.

_Mime = Annotated[str, msgspec.Meta(max_length=256)]


class _Stream(msgspec.Struct):
    name: str = ""
    text: str = ""


class _Transient(msgspec.Struct):
    display_id: _Mime | None = None


class _Bundle(msgspec.Struct):
    data: dict[_Mime, msgspec.Raw] = {}
    metadata: dict[_Mime, msgspec.Raw] = {}
    transient: _Transient = msgspec.field(default_factory=_Transient)


class _Clear(msgspec.Struct):
    wait: bool = False


class _Error(msgspec.Struct):
    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []


class _Payload(msgspec.Struct):
    source: str = ""
    data: dict[_Mime, msgspec.Raw] = {}


class Reply(_Error):
    """What is read of an ``execute_reply``."""

    status: str = "error"
    execution_count: int | None = None
    payload: list[_Payload] = []


def read(frame: bytes, shape: type[T]) -> T | None:
    """Read a content into a shape; None where it has another."""
    try:
        try:
            return msgspec.json.decode(frame, type=shape)
        except (UnicodeDecodeError, msgspec.DecodeError):  # which of them tells of broken UTF-8 depends on its version
            # What a program printed in some other encoding comes through Jupyter as it is.
            return msgspec.json.decode(frame.decode("utf-8", "replace"), type=shape)
    except (msgspec.MsgspecError, RecursionError):
        return None


class _Text:
    """The beginning of a stream."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self.is_cut = False
        self._limit = self._room = limit
        self._kept = io.StringIO()

    def add(self, text: str) -> str:
        """Add text; the part of it that is kept is returned."""
        data = text.encode("utf-8", "replace")
        self.total += len(data)
        if len(data) > self._room:
            self.is_cut = True
            text = data[: self._room].decode("utf-8", "ignore")
            self._room = 0
        else:
            self._room -= len(data)
        self._kept.write(text)
        return text

    def clear(self) -> None:
        self._room = self._limit
        self._kept = io.StringIO()

    def value(self) -> str:
        return self._kept.getvalue()


class Outputs:
    """Gathers the outputs of one run.

    Parameters
    ----------
    limits : OutputLimits
        What is kept.
    emit : callable, optional
        Told each event as it comes; what is beyond a limit makes none.
    """

    def __init__(self, limits: OutputLimits, emit: Callable[[Event], None] | None = None) -> None:
        self.error: CodeError | None = None
        self._limits = limits
        self._emit = emit or (lambda event: None)
        self._texts = {"stdout": _Text(limits.stream_bytes), "stderr": _Text(limits.stream_bytes)}
        self._displays: list[tuple[Display, int]] = []
        self._result: tuple[Display, int] | None = None
        self._display_total = 0
        self._is_cut = False
        self._is_clear_due = False

    def take(self, kind: str, content: bytes) -> None:
        """Take the content of an iopub message; of kinds that are no output nothing is read."""
        if kind == "stream":
            self._take_stream(content)
        elif kind in ("display_data", "update_display_data", "execute_result"):
            self._take_bundle(kind, content)
        elif kind == "error":
            self._clear_if_due()
            self.raised(read_error(content))
        elif kind == "clear_output":
            clear = read(content, _Clear) if len(content) <= MAX_ERROR else None
            if clear is not None:
                self._is_clear_due = True
                if not clear.wait:
                    self._clear_if_due()

    def take_reply(self, reply: Reply) -> None:
        """Take what is output in a reply: the pages of ``name?``, and an error that nobody told before."""
        for payload in reply.payload:
            if payload.source == "page" and payload.data:
                self._keep("display_data", _Bundle(data=payload.data), sum(map(_size, payload.data.values())))
        if reply.status == "error" and self.error is None:
            self.raised(CodeError(reply.ename, reply.evalue, reply.traceback))

    def raised(self, error: CodeError) -> None:
        """Note an exception, the first one only."""
        if self.error is None:
            self.error = error
            self._emit(ErrorEvent(error))

    def result(self, status: Status, **values: Any) -> CodeResult:
        """Make the result; `values` are the fields that are no output."""
        stdout, stderr = self._texts["stdout"], self._texts["stderr"]
        return CodeResult(
            status=status,
            stdout=stdout.value(),
            stderr=stderr.value(),
            result=self._result[0] if self._result else None,
            displays=[display for display, _ in self._displays],
            error=self.error,
            truncated=self._is_cut or stdout.is_cut or stderr.is_cut,
            total_bytes=TotalBytes(stdout.total, stderr.total, self._display_total),
            **values,
        )

    def _take_stream(self, content: bytes) -> None:
        stream = read(content, _Stream)
        if stream is None:
            return
        self._clear_if_due()
        name: Literal["stdout", "stderr"] = "stderr" if stream.name == "stderr" else "stdout"
        kept = self._texts[name].add(stream.text)
        if kept:
            self._emit(StreamEvent(name, kept))

    def _take_bundle(self, kind: str, content: bytes) -> None:
        bundle = None
        if len(content) <= self._limits.display_bytes and content.count(b":") <= MAX_COLONS:
            bundle = read(content, _Bundle)
            if bundle is None:
                return
        if kind != "update_display_data":
            self._clear_if_due()
        self._keep(kind, bundle, len(content))

    def _keep(self, kind: str, bundle: _Bundle | None, size: int) -> None:
        self._display_total += size
        used = sum(used for _, used in self._displays) + (self._result[1] if self._result else 0)
        if kind == "update_display_data":
            if bundle is None:
                self._is_cut = True
            else:
                self._update(bundle, size, used)
        elif (
            bundle is None
            or used + size > self._limits.display_bytes
            or (kind == "display_data" and len(self._displays) >= self._limits.displays)
        ):
            self._is_cut = True
        elif kind == "execute_result":
            display = _display(bundle)
            self._result = (display, size)
            self._emit(ResultEvent(display))
        else:
            display = _display(bundle)
            self._displays.append((display, size))
            self._emit(DisplayEvent(display))

    def _update(self, bundle: _Bundle, size: int, used: int) -> None:
        name = bundle.transient.display_id
        places = [i for i, (display, _) in enumerate(self._displays) if name and display.display_id == name]
        if not places:
            return  # of a display of an earlier run, or of one that was cleared
        freed = sum(self._displays[i][1] for i in places)
        if used - freed + size * len(places) > self._limits.display_bytes:
            self._is_cut = True
            return
        display = _display(bundle)
        for i in places:
            self._displays[i] = (display, size)
        self._emit(DisplayEvent(display, is_update=True))

    def _clear_if_due(self) -> None:
        if self._is_clear_due:
            self._is_clear_due = False
            for text in self._texts.values():
                text.clear()
            self._displays.clear()
            self._result = None
            self._emit(ClearEvent())


def read_error(content: bytes) -> CodeError:
    """Read an ``error`` message, or say that it cannot be read."""
    error = read(content, _Error) if len(content) <= MAX_ERROR else None
    if error is None:
        return CodeError("Error", f"the kernel's error of {len(content)} bytes is too large, or malformed")
    return CodeError(error.ename, error.evalue, error.traceback)


def read_reply(content: bytes) -> Reply:
    """Read an ``execute_reply``; one that cannot be read counts as an error."""
    reply = read(content, Reply) if len(content) <= MAX_ERROR else None
    return reply or Reply(ename="Error", evalue="the kernel's reply is too large, or malformed")


def _display(bundle: _Bundle) -> Display:
    data = {mime: _value(raw) for mime, raw in bundle.data.items()}
    metadata = {name: _sound(raw) for name, raw in bundle.metadata.items()}
    return Display(data, metadata, bundle.transient.display_id)


def _value(raw: msgspec.Raw) -> Any:
    text = read(bytes(raw), str) if bytes(raw).startswith(b'"') else None
    return _sound(raw) if text is None else text


def _sound(raw: msgspec.Raw) -> msgspec.Raw:
    """Make a copy that is surely JSON, as nobody has looked yet whether its strings are UTF-8.

    A copy also lets go of the message that it was a part of.
    """
    return msgspec.Raw(bytes(raw).decode("utf-8", "replace").encode())


def _size(raw: msgspec.Raw) -> int:
    return len(bytes(raw))
