"""The command blocklist."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_agentbox.errors import PolicyRefused
from jupyter_agentbox.service.guardrails import check_command


@pytest.mark.parametrize(
    "command",
    [
        "curl x",
        "/usr/bin/curl",
        "a; curl x",
        "a && curl x",
        "a | curl x",
        "$(curl x)",
        "`curl x`",
        "A=b sudo curl x",
        "if true; then curl x; fi",
        "a\ncurl x",
        "git push",
        "git push origin main",
        ["curl", "x"],
        ["/bin/curl"],
    ],
)
def test_named_commands_are_refused(command: str | list[str]) -> None:
    with pytest.raises(PolicyRefused, match="blocked by the rule"):
        check_command(command, ["curl", "git push*"])


@pytest.mark.parametrize("command", ["echo curl", "curling", "git pull", "", ";;", ["echo", "curl"], "git 'push'"])
def test_others_are_not(command: str | list[str]) -> None:
    check_command(command, ["curl", "git push*"])


@given(st.text(), st.lists(st.text(min_size=1), max_size=3))
def test_any_text_is_judged(command: str, patterns: list[str]) -> None:
    with contextlib.suppress(PolicyRefused):
        check_command(command, patterns)
