"""What waits for the host, and finding programs; starting them is tested in gVisor, where it happens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_agentbox.guest.jobs import Output
from jupyter_agentbox.guest.processes import _find

PARTS = st.binary(min_size=1, max_size=50)
STEPS = st.lists(st.one_of(PARTS, st.integers(1, 60), st.sampled_from(["lost", "found"])), max_size=60)


@given(STEPS, st.sampled_from([0, 1, 40, 1000]))
@settings(max_examples=200, deadline=None)
def test_an_owner_gets_every_byte_in_its_place_and_the_last_are_kept_for_the_next(
    steps: list[bytes | int | str], keep: int
) -> None:
    output, printed, is_heard, place = Output(keep), b"", True, 0
    for step in steps:
        if step == "lost":
            is_heard = False
        elif step == "found":
            is_heard = True
            output.rewind()
            assert output.end - output.sent >= min(keep, len(printed))
            place = output.sent
        elif isinstance(step, bytes):
            printed += step
            output.put(step, has_owner=is_heard)
            if not is_heard:
                assert output.end - output.start <= max(keep, 0)
        elif isinstance(step, int) and is_heard:
            offset, data = output.take(step)
            assert offset == place
            assert data == printed[offset : offset + step]
            place += len(data)
        assert output.end == len(printed)
        assert output.start <= output.sent <= output.end


def test_a_program_is_found_as_a_shell_finds_it(tmp_path: Path) -> None:
    for name, mode in (("a/tool", 0o644), ("b/tool/x", 0o755), ("c/tool", 0o755), ("d/tool", 0o755)):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.touch()
        path.chmod(mode)
    path_variable = ":".join(str(tmp_path / folder) for folder in "abcd")
    assert _find("tool", path_variable) == str(tmp_path / "c/tool")
    assert _find("./tool", path_variable) == "./tool"
    with pytest.raises(FileNotFoundError):
        _find("none", path_variable)
