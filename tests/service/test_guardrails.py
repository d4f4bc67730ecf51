"""The command blocklist."""

from __future__ import annotations

import re

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


WORDS = st.lists(st.sampled_from(["ls", "echo", "curl", "git", "push", "pull"]), min_size=1, max_size=4)
PREFIXES = st.lists(st.sampled_from(["A=b", "sudo", "env", "nohup"]), max_size=2)


@given(
    st.lists(st.tuples(PREFIXES, WORDS), min_size=1, max_size=4),
    st.sampled_from([";", " && ", " | ", "\n", " & ", "||"]),
    st.sampled_from(["", "/usr/bin/"]),
)
def test_a_line_is_refused_exactly_if_one_of_its_commands_is_blocked(
    commands: list[tuple[list[str], list[str]]], joint: str, folder: str
) -> None:
    line = joint.join(" ".join([*prefixes, folder + words[0], *words[1:]]) for prefixes, words in commands)
    blocked = [words for _, words in commands if words[0] == "curl" or words[:2] == ["git", "push"]]
    if not blocked:
        check_command(line, ["curl", "git push*"], "Policy.blocked_commands")
        return
    with pytest.raises(PolicyRefused) as caught:
        check_command(line, ["curl", "git push*"], "Policy.blocked_commands")
    assert (caught.value.field, caught.value.setting) == ("command", "Policy.blocked_commands")
    first = blocked[0]
    assert repr(" ".join([folder + first[0], *first[1:]])) in str(caught.value)
    assert repr("curl" if first[0] == "curl" else "git push*") in str(caught.value)


def judge(command: str, patterns: list[str]) -> tuple[str, str | None] | None:
    """Return text and field of the refusal, or None."""
    try:
        check_command(command, patterns)
    except PolicyRefused as error:
        return str(error), error.field
    return None


@given(st.text(), st.lists(st.text(min_size=1), max_size=3))
def test_any_text_gets_one_verdict_which_names_its_rule(command: str, patterns: list[str]) -> None:
    verdict = judge(command, patterns)
    assert verdict == judge(command, patterns)
    if verdict is not None:
        assert any(repr(pattern) in verdict[0] for pattern in patterns)
        assert verdict[1] == "command"
    assert judge(command, []) is None
    # The pattern * matches every command, so it refuses exactly the texts that have one.
    has_command = bool(re.sub(r"\$\(|[;&|\n(){}`]", " ", command).split())
    assert (judge(command, ["*"]) is not None) == has_command
