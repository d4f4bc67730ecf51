"""Collect the output of code: from a kernel's messages to one result of bounded size.

Sans-I/O: ``kernels.kernelclient`` passes in the contents of messages, which are hostile. Each kind of message is
decoded into a fixed shape, so that unknown fields are skipped and never become objects. Output beyond a limit is
counted but not kept: of text the middle, of displays the later ones. JSON in a MIME bundle stays as the text that was
received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from jupyter_agentbox.spec import MIB, End

from .long_output import OutputText

T = TypeVar("T")

#: Maximum number of bytes of an error's or a reply's content that is read.
MAX_ERROR = 1 * MIB
#: Maximum number of colons in a bundle's content, each of which may create an entry; above any notebook's outputs.
MAX_COLONS = 200_000
#: Maximum values of the limits that a caller may set.
MAX_LIMIT = 256 * MIB

Status = Literal["ok", "error", "timed_out", "interrupted", "kernel_died"]


class OutputLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on how much output is kept.

    Parameters
    ----------
    stream_bytes : int
        Maximum number of UTF-8 bytes of stdout and of stderr each. The beginning and the end are kept.
    display_bytes : int
        Maximum size of all displays together, and of the result. A display that does not fit is left out completely.
    displays : int
        Maximum number of displays.
    """

    stream_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] = 1 * MIB
    display_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] = 10 * MIB
    displays: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1000


class FullImage(msgspec.Struct, frozen=True):
    """An image that was reduced or left out because it is too large.

    Parameters
    ----------
    mime : str
    bytes : int
        Its size.
    width, height : int or None
        In pixels, if they are known.
    path : str or None
        Its path in the workspace. None if it could not be saved there.
    """

    mime: str
    bytes: int
    width: int | None
    height: int | None
    path: str | None


class Display(msgspec.Struct, frozen=True):
    """A MIME bundle.

    Parameters
    ----------
    data : dict
        By MIME type: a str, which is base64 for binary types as in notebooks; for JSON types a ``msgspec.Raw`` with
        the JSON text (``msgspec.json.decode`` decodes it, encoding writes it unchanged).
    metadata : dict
        As the kernel sent it; values are ``msgspec.Raw``.
    display_id : str or None
        Id by which later updates refer to it.
    full_image : FullImage or None
        The full image, if the one in `data` was reduced, or left out because it could not be.
    """

    data: dict[str, Any]
    metadata: dict[str, Any] = {}
    display_id: str | None = None
    full_image: FullImage | None = None


class CodeError(msgspec.Struct, frozen=True):
    """An exception: its class, its message, and the lines of its traceback with ANSI colours, as Jupyter sends them."""

    ename: str
    evalue: str
    traceback: list[str] = []


class TotalBytes(msgspec.Struct, frozen=True):
    """Total size of the output, including output that was left out or cleared."""

    stdout: int = 0
    stderr: int = 0
    displays: int = 0


class CodeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of running code.

    Parameters
    ----------
    status : str
        ``ok``, ``error`` if the code raised an exception, ``interrupted``, ``timed_out`` or ``kernel_died``.
    stdout, stderr : str
        Output as a terminal shows it: of a line that was printed repeatedly after carriage returns, such as a progress
        bar, the last state. Without what ``clear_output`` removed. Where output is left out because of the limit, a
        line says how much.
    result : Display or None
        Value of the last expression.
    displays : list of Display
        In order, each in its latest version.
    error : CodeError or None
    execution_count : int or None
    duration : float
        Seconds until the code ended or the call gave up.
    truncated : bool
        Whether output was left out because of a limit.
    total_bytes : TotalBytes
    has_started : bool
        Whether the kernel began to run the code. False if other code kept the kernel busy until the timeout.
    is_busy : bool
        Whether the code is still running because it did not react to the interrupt.
    end : End or None
        Why the kernel ended.
    message : str or None
        Explanation for people, if the status alone is not enough.
    context : str
        Name of the context.
    epoch : int
        Number of the context's kernel. If it changes, variables are lost.
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
    """The state of a context.

    Parameters
    ----------
    name : str
    language : str
    state : str
        ``starting``, ``idle``, ``busy`` or ``dead``. Running code in a dead context starts a new kernel.
    epoch : int
        Number of its kernel.
    is_notebook : bool
        Whether it is the kernel of an open notebook.
    end : End or None
        How a dead context ended.
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
    """A display, or with ``is_update`` the new version of the display with the same ``display_id``."""

    display: Display
    is_update: bool = False


class ResultEvent(msgspec.Struct, frozen=True, tag_field="event", tag="result"):
    """The value of the last expression."""

    display: Display


class ClearEvent(msgspec.Struct, frozen=True, tag_field="event", tag="clear"):
    """Remove all previous output."""


class ErrorEvent(msgspec.Struct, frozen=True, tag_field="event", tag="error"):
    """The code raised an exception."""

    error: CodeError


class DoneEvent(msgspec.Struct, frozen=True, tag_field="event", tag="done"):
    """The last event of every run, with its result."""

    result: CodeResult


Event = StreamEvent | DisplayEvent | ResultEvent | ClearEvent | ErrorEvent | DoneEvent

# The shapes that messages are decoded into.

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
    """The fields that are read of an ``execute_reply``."""

    status: str = "error"
    execution_count: int | None = None
    payload: list[_Payload] = []


def read(frame: bytes, shape: type[T]) -> T | None:
    """Decode a content into a shape. Return None if it does not match."""
    try:
        try:
            return msgspec.json.decode(frame, type=shape)
        except (UnicodeDecodeError, msgspec.DecodeError):  # which one reports invalid UTF-8 depends on the version
            # Output that a program printed in another encoding passes through Jupyter unchanged.
            return msgspec.json.decode(frame.decode("utf-8", "replace"), type=shape)
    except (msgspec.MsgspecError, RecursionError):
        return None


class Outputs:
    """Collector of the outputs of one run.

    Parameters
    ----------
    limits : OutputLimits
        Limits on what is kept.
    emit : callable, optional
        Called with each event as it arrives. All text causes events, unchanged. Displays beyond a limit do not.
    """

    def __init__(self, limits: OutputLimits, emit: Callable[[Event], None] | None = None) -> None:
        self.error: CodeError | None = None
        self._limits = limits
        self._emit = emit or (lambda event: None)
        self._texts = {name: OutputText(limits.stream_bytes) for name in ("stdout", "stderr")}
        self._totals = dict.fromkeys(self._texts, 0)
        self._displays: list[tuple[Display, int]] = []
        self._result: Display | None = None
        self._display_total = 0
        self._is_truncated = False
        self._is_clear_due = False

    def take(self, kind: str, content: bytes) -> None:
        """Take the content of an iopub message. Kinds that are not output are ignored."""
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
        """Take the output in a reply: the pages of ``name?``, and an error that was not reported before."""
        for payload in reply.payload:
            if payload.source == "page" and payload.data:
                self._add("display_data", _Bundle(data=payload.data), sum(map(_size, payload.data.values())))
        if reply.status == "error" and self.error is None:
            self.raised(CodeError(reply.ename, reply.evalue, reply.traceback))

    def raised(self, error: CodeError) -> None:
        """Record an exception. Only the first one is kept."""
        if self.error is None:
            self.error = error
            self._emit(ErrorEvent(error))

    def result(self, status: Status, **values: Any) -> CodeResult:
        """Return the result; `values` are the fields that are not output."""
        stdout, stderr = self._texts["stdout"], self._texts["stderr"]
        return CodeResult(
            status=status,
            stdout=stdout.value(),
            stderr=stderr.value(),
            result=self._result,
            displays=[display for display, _ in self._displays],
            error=self.error,
            truncated=self._is_truncated or stdout.is_truncated or stderr.is_truncated,
            total_bytes=TotalBytes(
                self._totals["stdout"] + stdout.total, self._totals["stderr"] + stderr.total, self._display_total
            ),
            **values,
        )

    def _take_stream(self, content: bytes) -> None:
        stream = read(content, _Stream)
        if stream is None:
            return
        self._clear_if_due()
        name: Literal["stdout", "stderr"] = "stderr" if stream.name == "stderr" else "stdout"
        if stream.text:
            self._texts[name].add(stream.text)
            self._emit(StreamEvent(name, stream.text))

    def _take_bundle(self, kind: str, content: bytes) -> None:
        bundle = None
        if len(content) <= self._limits.display_bytes and content.count(b":") <= MAX_COLONS:
            bundle = read(content, _Bundle)
            if bundle is None:
                return
        if kind != "update_display_data":
            self._clear_if_due()
        self._add(kind, bundle, len(content))

    def _add(self, kind: str, bundle: _Bundle | None, size: int) -> None:
        self._display_total += size
        # The result has room of its own, so that displays do not take it.
        used = sum(used for _, used in self._displays) if kind != "execute_result" else 0
        if kind == "update_display_data":
            if bundle is None:
                self._is_truncated = True
            else:
                self._update(bundle, size, used)
        elif (
            bundle is None
            or used + size > self._limits.display_bytes
            or (kind == "display_data" and len(self._displays) >= self._limits.displays)
        ):
            self._is_truncated = True
        elif kind == "execute_result":
            display = _display(bundle)
            self._result = display
            self._emit(ResultEvent(display))
        else:
            display = _display(bundle)
            self._displays.append((display, size))
            self._emit(DisplayEvent(display))

    def _update(self, bundle: _Bundle, size: int, used: int) -> None:
        name = bundle.transient.display_id
        indexes = [i for i, (display, _) in enumerate(self._displays) if name and display.display_id == name]
        if not indexes:
            return  # the display belongs to an earlier run, or was cleared
        freed = sum(self._displays[i][1] for i in indexes)
        if used - freed + size * len(indexes) > self._limits.display_bytes:
            self._is_truncated = True
            return
        display = _display(bundle)
        for i in indexes:
            self._displays[i] = (display, size)
        self._emit(DisplayEvent(display, is_update=True))

    def _clear_if_due(self) -> None:
        if self._is_clear_due:
            self._is_clear_due = False
            for name, text in self._texts.items():
                self._totals[name] += text.total
                self._texts[name] = OutputText(self._limits.stream_bytes)
            self._displays.clear()
            self._result = None
            self._emit(ClearEvent())


def read_error(content: bytes) -> CodeError:
    """Decode an ``error`` message. If that fails, return an error that says so."""
    error = read(content, _Error) if len(content) <= MAX_ERROR else None
    if error is None:
        return CodeError("Error", f"the kernel's error message of {len(content)} bytes is too large or malformed")
    return CodeError(error.ename, error.evalue, error.traceback)


def read_reply(content: bytes) -> Reply:
    """Decode an ``execute_reply``. If that fails, return an error reply."""
    reply = read(content, Reply) if len(content) <= MAX_ERROR else None
    return reply or Reply(ename="Error", evalue="the kernel's reply is too large or malformed")


def _display(bundle: _Bundle) -> Display:
    data = {mime: _value(raw) for mime, raw in bundle.data.items()}
    metadata = {name: _valid_json(raw) for name, raw in bundle.metadata.items()}
    return Display(data, metadata, bundle.transient.display_id)


def _value(raw: msgspec.Raw) -> Any:
    text = read(bytes(raw), str) if bytes(raw).startswith(b'"') else None
    return _valid_json(raw) if text is None else text


def _valid_json(raw: msgspec.Raw) -> msgspec.Raw:
    """Copy raw JSON, replacing invalid UTF-8, which has not been checked before.

    The copy also releases the message that it was part of.
    """
    return msgspec.Raw(bytes(raw).decode("utf-8", "replace").encode())


def _size(raw: msgspec.Raw) -> int:
    return len(bytes(raw))
