"""Bound the text of a program's output: keep its beginning and its end, and the last state of each line.

Sans-I/O. All text is hostile: memory is bounded whatever arrives, and the work for each piece of text is bounded by its
length.
"""

from __future__ import annotations

import copy
import re

#: Lines that cursor movements can still change, and the longest line that they can change, in characters.
MAX_EDITABLE_LINES = 32
MAX_EDITABLE_LINE = 2048
#: Cursor movements, apart from carriage returns, that are followed in one piece of text: so many, and one more for so
#: many characters. Earlier ones are removed.
MIN_MOVES = CHARACTERS_A_MOVE = 64
# Coloured states of one line, in one piece of text, that may still show through later ones.
_MAX_STATES = 8

_LINE_END = re.compile(r"(?<!\r)\r+\n")
_MOVE = re.compile(r"\x08+|\x1b\[(\d{0,4})([A-GJK])")
_UNFINISHED = re.compile(r"\x1b(?:\[\d{0,4})?\Z")
_ESCAPES = re.compile(r"(?:\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\^_]))*")
# A character with the escape sequences before it, or the escape sequences at the end of the text.
_CELL = re.compile(rf"{_ESCAPES.pattern}(?:[^\x1b]|\Z)|\x1b", re.DOTALL)
#: Characters that are handled at a time.
_PIECE = 65_536


class HeadTail:
    """Buffer that keeps the beginning and the end of what is added.

    Parameters
    ----------
    limit : int
        Maximum number of bytes that are kept: two thirds of them from the beginning, the others from the end.

    Attributes
    ----------
    total : int
        Number of bytes that were added.
    """

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._tail_size = -(-limit // 3)
        self._head_size = limit - self._tail_size
        self._head = bytearray()
        self._tail = bytearray()

    @property
    def is_truncated(self) -> bool:
        """Whether something was left out."""
        return self.total > self._head_size + self._tail_size

    def add(self, data: bytes) -> None:
        """Append bytes."""
        self.total += len(data)
        room = self._head_size - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data[max(0, len(data) - self._tail_size) :]
            del self._tail[: max(0, len(self._tail) - self._tail_size)]

    def value(self, more: bytes = b"") -> bytes:
        """Return what is kept. Where something is left out, a line between says how many bytes.

        Text in UTF-8 is cut between characters. With a limit of 0, nothing is returned.

        Parameters
        ----------
        more : bytes
            Counts as if it were added, but is not.
        """
        if more:
            other = copy.copy(self)
            other._head, other._tail = self._head[:], self._tail[:]
            other.add(more)
            return other.value()
        if not self.is_truncated:
            return bytes(self._head + self._tail)
        if not self._tail_size:
            return b""
        head, tail = _cut_end(bytes(self._head)), _cut_start(bytes(self._tail))
        omitted = self.total - len(head) - len(tail)
        newline = b"\n" if head and not head.endswith(b"\n") else b""
        return b"".join((head, newline, f"[{omitted:,} bytes of output left out]\n".encode(), tail))


def _cut_end(data: bytes) -> bytes:
    """Return UTF-8 without an incomplete character at its end. Other data loses at most three bytes."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            return data[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else data
        if byte < 0x80:
            break
    return data


def _cut_start(data: bytes) -> bytes:
    """Return UTF-8 without the end of a character at its start. Other data loses at most three bytes."""
    start = 0
    while start < min(3, len(data)) and 0x80 <= data[start] < 0xC0:
        start += 1
    return data[start:]


class TerminalLines:
    """Filter that applies carriage returns, backspaces and cursor movements, as a terminal does.

    Progress bars use them to replace what they printed before. Colours and other escape sequences remain in the text.
    """

    def __init__(self) -> None:
        self._lines = [""]
        self._row = 0
        self._column: int | None = None  # None at the end of the line
        self._unfinished = ""

    @property
    def pending(self) -> str:
        """The text that later output may still change."""
        return "\n".join(self._lines) + self._unfinished

    def add(self, text: str) -> str:
        """Take more text. Return the text that can no longer change."""
        if len(text) <= _PIECE:
            return self._add(text)
        return "".join(self._add(text[start : start + _PIECE]) for start in range(0, len(text), _PIECE))

    def _add(self, text: str) -> str:
        text, self._unfinished = self._unfinished + text, ""
        if "\r" in text:
            text = _LINE_END.sub("\n", text)
        if "\x1b" in text[-6:] and (found := _UNFINISHED.search(text)):
            self._unfinished, text = found.group(), text[: found.start()]
        moves = list(_MOVE.finditer(text)) if "\x08" in text or "\x1b[" in text else []
        position = 0
        if len(moves) > (limit := MIN_MOVES + len(text) // CHARACTERS_A_MOVE):
            del moves[:-limit]
            position = moves[0].start()
            self._print(_MOVE.sub("", text[:position]))
        for move in moves:
            if position < move.start():
                self._print(text[position : move.start()])
            self._move(move)
            position = move.end()
        self._print(text[position:])
        return self._take_final()

    def _print(self, text: str) -> None:
        first, *others = text.split("\n")
        self._print_line(first)
        for line in others:
            self._row += 1
            if self._row < len(self._lines):
                self._column = 0
                self._print_line(line)
            else:
                self._column = None
                self._lines.append("")
                if "\r" in line:
                    self._print_line(line)
                else:
                    self._lines[-1] = line

    def _print_line(self, text: str) -> None:
        """Print text without newlines at the cursor."""
        first, *states = text.split("\r")
        if first:
            self._put(first)
        if not states:
            return
        # Later states of the line cover the earlier ones, which show only where they are longer.
        if "\x1b" in text:
            for state in states[-_MAX_STATES:]:
                self._column = 0
                self._put(state)
            return
        last = merged = states[-1]
        for state in reversed(states):
            if len(state) > len(merged):
                merged += state[len(merged) :]
        self._column = 0
        self._put(merged)
        if len(last) < len(merged):
            self._column = len(last)

    def _put(self, text: str) -> None:
        """Print text without control characters at the cursor."""
        line, column = self._lines[self._row], self._column
        if column is None or max(len(line), len(text)) > MAX_EDITABLE_LINE:
            self._lines[self._row] = line + text
            self._column = None
        elif "\x1b" not in line and "\x1b" not in text:
            self._column = end = column + len(text)
            self._lines[self._row] = line[:column] + text + line[end:]
        else:
            old, new = _cells(line), _cells(text)
            self._column = end = column + len(new)
            self._lines[self._row] = "".join((*old[:column], *(new or text), *old[end:]))

    def _move(self, move: re.Match[str]) -> None:
        if move.group(2) is None:
            self._column = max(0, self._find_column() - len(move.group()))
            return
        kind, number = move.group(2), int(move.group(1) or 0)
        if kind in "AF":
            self._row = max(0, self._row - max(1, number))
        elif kind in "BE":
            self._row = min(len(self._lines) - 1, self._row + max(1, number))
        if kind in "EF":
            self._column = 0
        elif kind in "CDG":
            column = self._find_column()
            wanted = {"C": column + max(1, number), "D": column - max(1, number), "G": number - 1}[kind]
            self._column = min(max(0, wanted), self._length())
        elif kind in "JK":
            self._erase(kind, number)

    def _erase(self, kind: str, number: int) -> None:
        """Erase the line after the cursor (0), before it (1) or all of it (2), and with J the lines there as well."""
        column, line = self._find_column(), self._lines[self._row]
        if len(line) <= MAX_EDITABLE_LINE:
            cells, blank = _cells(line), [" "] * column
            self._lines[self._row] = "".join(
                cells[:column] if number == 0 else blank + cells[column:] if number == 1 else blank
            )
            self._column = column
        if kind == "J" and number != 1:
            del self._lines[self._row + 1 :]
        if kind == "J" and number != 0:
            self._lines[: self._row] = [""] * self._row

    def _length(self) -> int:
        line = self._lines[self._row]
        return len(line) if "\x1b" not in line or len(line) > MAX_EDITABLE_LINE else len(_cells(line))

    def _find_column(self) -> int:
        length = self._length()
        return length if self._column is None else min(self._column, length)

    def _take_final(self) -> str:
        """Remove and return the lines before those that can still change."""
        lines = self._lines
        count = max(0, len(lines) - MAX_EDITABLE_LINES)
        # A line that is too long, and all before it, can no longer change.
        for index in range(len(lines) - 1, count - 1, -1):
            if len(lines[index]) > MAX_EDITABLE_LINE:
                count = index + 1
                break
        if not count:
            return ""
        final = "\n".join(lines[:count])
        del lines[:count]
        if lines:
            final += "\n"
        else:
            lines.append("")
        if self._row < count:
            self._row, self._column = 0, None if len(lines) == 1 else 0
        else:
            self._row -= count
        return final


def _cells(line: str) -> list[str]:
    """Return the visible characters of a line, each with its escape sequences."""
    cells: list[str] = [cell for cell in _CELL.findall(line) if cell]
    if cells and _ESCAPES.fullmatch(cells[-1]):
        last = cells.pop()
        cells[-1:] = [cells[-1] + last] if cells else []
    return cells


class OutputText:
    """Buffer for the text of one stream of a program: the last state of each line, and of those the first and last.

    Parameters
    ----------
    limit : int
        Maximum number of bytes of UTF-8 that are kept.

    Attributes
    ----------
    total : int
        Number of bytes that were added.
    """

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._limit = limit
        self._lines = TerminalLines()
        self._kept = HeadTail(limit)

    @property
    def is_truncated(self) -> bool:
        """Whether something is left out because of the limit."""
        return self._kept.total + len(_encode(self._lines.pending)) > self._limit

    def add(self, text: str) -> None:
        """Append text."""
        self.total += len(_encode(text))
        if final := self._lines.add(text):
            self._kept.add(_encode(final))

    def value(self) -> str:
        """Return what is kept. Where something is left out, a line between says how many bytes."""
        return self._kept.value(_encode(self._lines.pending)).decode()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def shorten(text: str, limit: int) -> str:
    """Return the last state of each line of a text, shortened in the middle to a number of bytes."""
    output = OutputText(limit)
    output.add(text)
    return output.value()


def apply_movements(text: str) -> str:
    """Return the last state of each line of a text."""
    lines = TerminalLines()
    return lines.add(text) + lines.pending
