"""Results from a kernel's messages, hostile ones too; no kernel is needed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.models import outputs
from jupyter_agentbox.models.outputs import (
    ClearEvent,
    DisplayEvent,
    Event,
    OutputLimits,
    Outputs,
    StreamEvent,
    read_reply,
)


def encode(**content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogateescape")


def text(name: str, value: str) -> bytes:
    return encode(name=name, text=value)


def bundle(value: str, display_id: str | None = None) -> bytes:
    return encode(data={"text/plain": value}, metadata={}, transient={"display_id": display_id})


def plain(out: Outputs) -> list[str]:
    return [display.data["text/plain"] for display in out.result("ok").displays]


def test_text_is_cut_in_the_middle_and_counted_whole() -> None:
    out = Outputs(OutputLimits(stream_bytes=6))
    for piece in ("äö", "ü!", "more"):
        out.take("stream", text("stdout", piece))
    out.take("stream", text("stderr", "short"))
    result = out.result("ok")
    assert (result.stdout, result.stderr) == ("äö\n[5 bytes of output left out]\nre", "short")
    assert result.truncated
    assert (result.total_bytes.stdout, result.total_bytes.stderr) == (11, 5)


def test_all_text_causes_events_and_progress_leaves_its_last_state() -> None:
    events: list[Event] = []
    out = Outputs(OutputLimits(stream_bytes=20), events.append)
    for i in range(50):
        out.take("stream", text("stderr", f"\r{i} %"))
        out.take("stream", text("stdout", f"{i}\n"))
    result = out.result("ok")
    assert result.stderr == "49 %"
    assert result.stdout.startswith("0\n1\n")
    assert result.stdout.endswith("48\n49\n")
    assert result.truncated
    assert "".join(event.text for event in events if isinstance(event, StreamEvent)) == "".join(
        f"\r{i} %{i}\n" for i in range(50)
    )


def test_displays_leave_room_for_the_result() -> None:
    out = Outputs(OutputLimits(display_bytes=200))
    for _ in range(10):
        out.take("display_data", bundle("x" * 80))
    out.take("execute_result", bundle("42"))
    result = out.result("ok")
    assert result.result is not None
    assert result.result.data == {"text/plain": "42"}
    assert result.truncated


def test_bytes_that_are_no_utf_8_are_replaced() -> None:
    out = Outputs(OutputLimits())
    out.take("stream", text("stdout", "a\udcffb"))
    out.take("display_data", encode(data={"text/plain": "\udcff", "application/json": {"k": ["\udcff"]}}))
    result = out.result("ok")
    assert result.stdout == "a\N{REPLACEMENT CHARACTER}b"
    assert msgspec.json.decode(msgspec.json.encode(result.displays[0].data["application/json"])) == {
        "k": ["\N{REPLACEMENT CHARACTER}"]
    }


def test_clear_output_makes_room_and_waits_when_it_is_told_to() -> None:
    events: list[Event] = []
    out = Outputs(OutputLimits(stream_bytes=4), events.append)
    out.take("stream", text("stdout", "1234"))
    out.take("clear_output", encode(wait=True))
    assert out.result("ok").stdout == "1234"
    out.take("stream", text("stdout", "5678"))
    assert out.result("ok").stdout == "5678"
    assert not out.result("ok").truncated
    assert [type(event) for event in events] == [StreamEvent, ClearEvent, StreamEvent]


def test_updates_replace_their_display_and_free_its_room() -> None:
    events: list[Event] = []
    out = Outputs(OutputLimits(display_bytes=300), events.append)
    out.take("display_data", bundle("a", "one"))
    out.take("display_data", bundle("b"))
    for i in range(50):
        out.take("update_display_data", bundle(f"v{i}", "one"))
    out.take("update_display_data", bundle("of an earlier run", "other"))
    assert plain(out) == ["v49", "b"]
    assert isinstance(events[-1], DisplayEvent)
    assert events[-1].is_update


def test_displays_beyond_the_limits_are_left_out_whole() -> None:
    out = Outputs(OutputLimits(display_bytes=200, displays=2))
    out.take("display_data", bundle("x" * 300))
    assert (plain(out), out.result("ok").truncated) == ([], True)
    for i in range(5):
        out.take("display_data", bundle(str(i)))
    assert plain(out) == ["0", "1"]
    assert out.result("ok").total_bytes.displays > 500


def test_a_bundle_of_a_million_entries_is_not_read() -> None:
    out = Outputs(OutputLimits())
    out.take("display_data", b'{"data":{' + b",".join(b'"%d":0' % i for i in range(500_000)) + b"}}")
    assert (plain(out), out.result("ok").truncated) == ([], True)


def test_a_reply_tells_an_error_that_nobody_told_before() -> None:
    out = Outputs(OutputLimits())
    out.take_reply(read_reply(b"[" * 100_000))
    assert out.error is not None
    assert "malformed" in out.error.evalue


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
_content = st.one_of(
    st.binary(max_size=200),
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.sampled_from(["stdout", "stderr"]) | _json,
            "text": st.text(max_size=50) | _json,
            "data": st.dictionaries(st.sampled_from(["text/plain", "image/png", "a/json"]), _json) | _json,
            "metadata": _json,
            "transient": st.fixed_dictionaries({"display_id": st.sampled_from(["a", "b"]) | _json}) | _json,
            "wait": _json,
            "ename": _json,
            "traceback": _json,
        },
    ).map(lambda content: json.dumps(content).encode()),
)
_kind = st.sampled_from(
    ["stream", "display_data", "update_display_data", "execute_result", "clear_output", "error", "status", "x"]
)


@given(st.lists(st.tuples(_kind, _content), max_size=30))
def test_any_messages_make_a_bounded_result_that_is_json(messages: list[tuple[str, bytes]]) -> None:
    limits = OutputLimits(stream_bytes=60, display_bytes=200, displays=3)
    out = Outputs(limits)
    for kind, content in messages:
        out.take(kind, content)
    result = out.result("ok")
    assert len(result.stdout.encode()) <= 60 + len("\n[1,000 bytes of output left out]\n")
    assert len(result.displays) <= 3
    kept = msgspec.json.encode([result.displays, result.result])
    assert len(kept) <= 2 * (200 * 2) + 400  # escapes, and the fields' own names
    json.loads(msgspec.json.encode(result))


def test_every_event_has_its_tag() -> None:
    made = msgspec.json.encode(outputs.StreamEvent("stdout", "x"))
    assert msgspec.json.decode(made, type=Event) == outputs.StreamEvent("stdout", "x")
