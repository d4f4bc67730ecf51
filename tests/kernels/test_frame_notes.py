"""Which frames in the output of cells are explained."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.notes import explain

from jupyter_agentbox.kernels.frame_notes import FrameNotes
from jupyter_agentbox.sandbox.drivers.messages import Signer


def output(html: Any, kind: str = "display_data") -> list[bytes]:
    return Signer(b"").message(b"topic", kind, {"data": {"text/html": html}, "metadata": {}})


@pytest.mark.parametrize(
    ("html", "address", "port"),
    [
        ('<iframe width="300" src="http://127.0.0.1:8050" frameborder="0"></iframe>', "http://127.0.0.1:8050", 8050),
        (["<div>", "<IFRAME SRC='http://localhost:7860/?a'>"], "http://localhost:7860", 7860),
        ("<iframe src=http://0.0.0.0:1/>", "http://0.0.0.0:1", 1),
        ('<iframe src="http://[::1]/x">', "http://[::1]", 80),
        ('<iframe\n  src="http://agentbox:9">', "http://agentbox:9", 9),
        ('<iframe src="https://example.org"></iframe><iframe src="http://127.0.0.2:5">', "http://127.0.0.2:5", 5),
    ],
)
def test_a_frame_of_the_sandbox_itself_is_explained_once(html: Any, address: str, port: int) -> None:
    notes = FrameNotes()
    (sentence,) = explain(notes, output(html))
    assert sentence.startswith(f"Cannot show {address}: ")
    assert f'"ports": [{port}]' in sentence
    assert explain(notes, output(html, "execute_result")) == []


@pytest.mark.parametrize(
    "message",
    [
        output('<iframe src="https://example.org/?http://127.0.0.1:8050">'),
        output('<iframe src="http://127.0.0.1.example.org/">'),
        output('<iframe src="http://localhost:1@example.org/">'),
        output('<iframe data-src="x"> src="http://localhost"'),
        output('<a href="http://localhost:8050">iframe</a>'),
        output('<iframe src="http://localhost:8050">', "stream"),
        output({"iframe": 1}),
        output("<iframe " * 200_000),
        [b"nothing"],
    ],
)
def test_all_else_is_not(message: list[bytes]) -> None:
    assert explain(FrameNotes(), message) == []


@given(st.text(), st.binary())
def test_any_output_is_read(html: str, content: bytes) -> None:
    message = output("<iframe " + html)
    assert len(explain(FrameNotes(), message)) <= 4
    message[-1] = b"iframe" + content
    assert explain(FrameNotes(), message) == []


def test_addresses_are_bounded() -> None:
    notes = FrameNotes()
    found = [explain(notes, output(f'<iframe src="http://localhost:{port}">')) for port in range(1, 100)]
    assert sum(map(len, found)) == 20
