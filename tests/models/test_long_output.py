"""The beginning, the end and the last state of output, whatever a program prints."""

from __future__ import annotations

import io
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from jupyter_agentbox.models import long_output
from jupyter_agentbox.models.long_output import HeadTail, OutputText, TerminalLines, apply_movements, shorten

NOTE = re.compile(r"\n?\[([\d,]+) bytes of output left out\]\n")


def pieces(parts: list[str]) -> str:
    lines = TerminalLines()
    return "".join(map(lines.add, parts)) + lines.pending


def terminal(text: str) -> str:
    """A grid of characters with a cursor: the slow way that cannot be wrong."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for token in re.findall(r"\x1b\[\d*[AKD]|.", text, re.DOTALL):
        if token == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append([])
        elif token == "\r":
            column = 0
        elif token == "\b":
            column = max(0, column - 1)
        elif token.startswith("\x1b"):
            number = int(token[2:-1] or 0)
            if token[-1] == "A":
                row = max(0, row - max(1, number))
                column = min(column, len(rows[row]))
            elif token[-1] == "D":
                column = max(0, column - max(1, number))
            else:
                rows[row][column:] = []
        else:
            rows[row][column : column + 1] = [token]
            column += 1
    return "\n".join(map("".join, rows))


_printed = st.lists(
    st.sampled_from(["a", "bc", "déf", "\n", "\r", "\r\n", "\b", "\x1b[A", "\x1b[2A", "\x1b[K", "\x1b[D"]), max_size=30
).map("".join)


@given(_printed)
def test_text_ends_up_as_on_a_terminal(text: str) -> None:
    assert apply_movements(text) == terminal(text)


@given(st.lists(_printed, max_size=8), st.integers(1, 5))
def test_it_does_not_matter_where_messages_end(parts: list[str], size: int) -> None:
    text = "".join(parts)
    whole = apply_movements(text)
    assert pieces(parts) == whole
    assert pieces([text[i : i + size] for i in range(0, len(text), size)]) == whole


@given(st.text(st.characters(exclude_characters="\r\b\x1b")))
def test_text_without_movements_stays_as_it_is(text: str) -> None:
    assert apply_movements(text) == text
    assert apply_movements(text.replace("\n", "\r\n")) == text


@given(st.text(st.sampled_from("ab\r\n\b\x1b[0123456789;mAKJHC?"), max_size=300))
def test_any_text_gives_text_that_stays_as_it_is(text: str) -> None:
    settled = apply_movements(text)
    assert "\r" not in settled
    assert "\b" not in settled


@given(st.lists(st.binary(max_size=20), max_size=30), st.integers(0, 60))
def test_the_beginning_and_the_end_are_kept(parts: list[bytes], limit: int) -> None:
    kept, whole = HeadTail(limit), b"".join(parts)
    for part in parts:
        kept.add(part)
    value = kept.value()
    assert kept.total == len(whole)
    assert value == HeadTail(limit).value(whole)
    if len(whole) <= limit:
        assert (value, kept.is_truncated) == (whole, False)
    elif not limit:
        assert value == b""
    else:
        head, count, tail = re.split(rb"\n?\[([\d,]+) bytes of output left out\]\n", value, maxsplit=1)
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert len(head + tail) <= limit
        assert limit - len(head + tail) <= 7  # parts of characters, and a newline
        assert abs(len(whole) - len(head + tail) - int(count.replace(b",", b""))) <= 1


@given(st.text(max_size=60), st.integers(1, 40))
def test_characters_are_not_cut(text: str, limit: int) -> None:
    value = shorten(text, limit)
    assert "\N{REPLACEMENT CHARACTER}" not in value or "\N{REPLACEMENT CHARACTER}" in text


def test_many_lines_keep_the_last_one_and_count_the_others() -> None:
    out = OutputText(10_000)
    for i in range(60_000):
        out.add(f"step {i}\n")
    out.add("RESULT 42\n")
    value = out.value()
    assert out.is_truncated
    assert value.startswith("step 0\nstep 1\n")
    assert value.endswith("\nstep 59999\nRESULT 42\n")
    (count,) = NOTE.findall(value)
    assert int(count.replace(",", "")) == out.total - len(NOTE.sub("", value).encode()) - (value.count("\n[") > 1)


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_progress_bars_leave_their_last_state(size: int) -> None:
    file = io.StringIO()
    for _ in tqdm(range(300), file=file, ncols=80, mininterval=0):
        pass
    for _ in tqdm(range(3), file=file, ncols=80, mininterval=0, desc="outer"):
        for _ in tqdm(range(40), file=file, ncols=80, mininterval=0, desc="inner", colour="green"):
            pass
    for _ in tqdm(range(3), file=file, ncols=80, mininterval=0, desc="kept", leave=True):
        for _ in tqdm(range(40), file=file, ncols=80, mininterval=0, desc="gone", leave=False):
            pass
    text = file.getvalue() + "RESULT 42\n"
    shown = re.sub(r"\x1b\[[0-9;]*m", "", pieces([text[i : i + size] for i in range(0, len(text), size)]))
    lines = [line.split("|")[0].split(":")[0].strip() for line in shown.splitlines()]
    assert [line for line in lines if line] == ["100%", "inner", "inner", "inner", "outer", "kept", "RESULT 42"]
    assert "300/300" in shown
    assert len(shown) < 1000


def test_colours_take_no_room_on_the_line() -> None:
    assert apply_movements("\x1b[31mabc\x1b[0mdef\rXY") == "XYc\x1b[0mdef"
    assert apply_movements("abcdef\r\x1b[32mX\x1b[0m") == "\x1b[32mX\x1b[0mbcdef"
    assert apply_movements("long line\r\x1b[2K\x1b[1mok\x1b[0m\n") == "\x1b[1mok\x1b[0m\n"


@pytest.mark.parametrize(
    "piece",
    [
        "\r",
        "x",
        "a\r",
        "\n",
        "a\b",
        "\x1b[A",
        "\x1b[9999A\x1b[9999B",
        "\x1b",
        "\x1b[",
        "\x1b[9999C.\n",
        "\x1b[31ma\r",
        "\x1b[0;" + "1;" * 3000,
        "\n" * 40 + "\x1b[40A\x1b[J",
        "é\r\n",
        "y" * 3000 + "\r\x1b[31mz",
        "\x1b[2Jx\n",
    ],
)
@pytest.mark.parametrize("size", [8, 600, 1 << 20])
def test_floods_take_bounded_memory_and_time(piece: str, size: int) -> None:
    text = piece * max(1, size // len(piece))
    count = max(1, 1_000_000 // len(text)) if size > 8 else 2_000
    out = OutputText(10_000)
    began = time.process_time()
    for _ in range(count):
        out.add(text)
        assert len(out._lines.pending) <= (long_output.MAX_EDITABLE_LINES + 1) * (long_output.MAX_EDITABLE_LINE + 1)
    took = time.process_time() - began
    assert len(out.value().encode()) <= 10_100
    # Below what it costs to receive that many messages, or that much text.
    assert took < 20 * (count * 50e-6 + count * len(text) * 0.2e-6)
